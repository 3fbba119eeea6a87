//! The HDFS tier: files that clients find, open and read themselves (docs/protocol.md §6).
//!
//! Names, formats and the order in which things become visible are the protocol's; here is only how they come about. A
//! shuffle is registered with the remote path that its client named; a batch is one partition's blocks, written by a
//! free [`writer`] of its directory. No file is written to again after a failed call. Data is never read back; index
//! files are, when it has to be known which blocks are there.
//!
//! | file | does |
//! | --- | --- |
//! | `location` | remote paths and the list of those allowed (pure) |
//! | `layout` | names of directories and files (pure) |
//! | `fs` | the eight calls, which `client` answers out of a real HDFS |
//! | `hadoop`, `kerberos` | Hadoop's settings; what a login needs |
//! | `remote` | one file system as one user, and whether it works |
//! | `writer` | data, then index, each batch |
//! | `present` | which blocks are there, for the ledger of losses |
//! | `deletion_gate`, `purge` | deletion, kept apart from writes |
//!
//! A write runs in a task of its own: who waits for it may give up (a hung NameNode), but the write goes on with its
//! memory, and neither its files nor the memory are used otherwise until it has ended.

#[cfg(feature = "hdfs")]
pub mod client;
mod deletion_gate;
pub mod fs;
#[cfg(feature = "hdfs")]
pub mod hadoop;
#[cfg(feature = "hdfs")]
pub mod kerberos;
pub mod layout;
pub mod location;
pub(crate) mod metrics;
mod precheck;
mod present;
mod purge;
mod remote;
mod tier;
mod writer;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep, timeout};

pub use self::location::{AllowList, AllowedPath, RemoteLocation};
pub use self::purge::Removal;
pub use self::remote::RemoteTarget;
pub(super) use self::tier::NAMES;

use self::deletion_gate::{DeletionGate, Writing};
use self::fs::RemoteFs;
use self::layout::WideRanges;
use self::metrics::Metrics;
use self::remote::Remote;
use self::writer::{Writer, Writers};
use crate::metrics::clamped;
use crate::runtime::Tasks;
use crate::schema::kind::{HOUR, Kind, SECOND, count, flag, list, optional, parsed, path, seconds, text};
use crate::schema::section;
use crate::tiers::{ExtentWrite, RemoteStorage, StoreError, StoreErrorKind, TierUsage};
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

/// Remote file systems (by settings and user) in use at once: clients name them.
const REMOTES_MAX: usize = 1024;
/// How often a write that waits for a place looks whether waiting makes sense.
const PLACE_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Between two looks for remote stores that are not tried.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Between two attempts to close a torn file; doubles up to the second, and ends with the third.
const RECOVERY_PAUSE: Duration = Duration::from_millis(500);
const RECOVERY_PAUSE_MAX: Duration = Duration::from_secs(15);
const RECOVERY_DEADLINE: Duration = Duration::from_secs(3600);

section! {
    /// How the tier works.
    #[table("hdfs_store", "HDFS. Remote paths and Hadoop settings come with each application; HADOOP_CONF_DIR names a directory with the worker's own core-site.xml and hdfs-site.xml, over which an application's settings are laid.")]
    #[table("hdfs_store.kerberos_security_config", "Where Hadoop's security is on. Without a keytab the tickets of KRB5CCNAME are used, which must be renewed from outside.")]
    pub struct HdfsConfig {
        /// Files written at a time per file system.
        #[key("hdfs_store.max_concurrency", count(1..=10_000), Restart)]
        pub max_concurrency: usize = 10,
        /// Files of one partition written at a time, where the application does not say how many.
        #[key("hdfs_store.partition_write_max_concurrency", count(1..=1000), Restart)]
        pub partition_write_max_concurrency: usize = 20,
        /// What an application may ask for instead (maxConcurrencyPerPartitionToWrite); more is cut to it.
        #[key("hdfs_store.partition_write_concurrency_limit", count(1..=1000), Restart)]
        pub partition_write_concurrency_limit: usize = 1000,
        /// Remote paths that applications may name, with everything below: the worker writes and deletes what they name.
        /// Needed with a coordinator_quorum; "*" permits every path. None with the embedded coordinator: those of its
        /// remote_storage_path, else all, with a warning.
        #[key("hdfs_store.allowed_paths", list(256, location()), Restart)]
        pub allowed_paths: Vec<AllowedPath> = Vec::new(),
        /// Time to write a batch; every MiB of it adds a second. Then it goes to local disks, or is tried again.
        #[key("hdfs_store.write_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub write_timeout: Duration = 60 * SECOND,
        /// Write, read and delete a file in every allowed path at start, and do not start if that fails.
        #[key("hdfs_store.precheck_enable", flag(), Restart)]
        pub precheck: bool = false,
        /// Keytab of the worker's login, with a principal.
        #[key("hdfs_store.kerberos_security_config.keytab_path", optional(path()), Restart, example "\"/etc/uniffle.keytab\"")]
        pub keytab_path: Option<PathBuf> = None,
        /// Principal in the keytab.
        #[key("hdfs_store.kerberos_security_config.principal", optional(principal()), Restart, example "\"uniffle/host@REALM\"")]
        pub principal: Option<String> = None,
        /// Write as the application's user; the NameNodes need hadoop.proxyuser settings for the principal.
        #[key("hdfs_store.kerberos_security_config.proxy_user_enable", flag(), Restart)]
        pub proxy_user: bool = true,
        /// Directory with the worker's own core-site.xml and hdfs-site.xml.
        #[env("HADOOP_CONF_DIR", optional(text("a directory", |text| Ok(PathBuf::from(text)), |path| path.display().to_string())))]
        pub hadoop_conf_dir: Option<PathBuf> = None,
        /// Where the Kerberos tickets are when there is no keytab; by default where Kerberos has them.
        #[env("KRB5CCNAME", optional(parsed("a ticket cache", |text| Ok(text.to_owned()))))]
        pub ticket_cache: Option<String> = None,
        /// Partitions on their way to HDFS at once. More than that go to local disks where there are any.
        #[key("hybrid_store.memory_spill_to_hdfs_concurrency", count(1..=10_000), Restart)]
        pub in_flight_max: usize = 500,
        /// As told to coordinators: clients look for files that begin with it.
        pub server_id: String = String::new(),
        /// What clients may name: `allowed_paths`, else the embedded coordinator's. Default: everything.
        pub allowed: AllowList = AllowList::default(),
        /// Time for one call that moves no data.
        pub call_timeout: Duration = 60 * SECOND,
        /// How long a deletion is tried.
        pub purge_timeout: Duration = 600 * SECOND,
    }
}

fn location() -> Kind<AllowedPath> {
    let convert = |text: &str| {
        AllowedPath::parse(text)
            .map_err(|why| format!("paths such as \"hdfs://nameservice/uniffle\"; this one {why}"))
    };
    parsed("paths such as hdfs://nameservice/uniffle, or *", convert)
}

const PRINCIPAL_BYTES_MAX: usize = 1024;

fn principal() -> Kind<String> {
    let convert = |text: &str| {
        let is_plain = |c: char| !c.is_control() && !c.is_whitespace();
        let is_principal =
            text.split_once('@').is_some_and(|(name, realm)| !name.is_empty() && !realm.is_empty());
        if is_principal && text.len() <= PRINCIPAL_BYTES_MAX && text.chars().all(is_plain) {
            Ok(text.to_owned())
        } else {
            Err("a Kerberos principal such as \"uniffle/host@REALM\"".to_owned())
        }
    };
    parsed("a Kerberos principal", convert)
}

/// Makes clients of file systems.
pub trait Connector: fmt::Debug + Send + Sync {
    /// What of a client's wish counts: settings that matter, and the user to act as, if that is not the worker's own.
    ///
    /// # Errors
    /// Settings that cannot work.
    fn target(&self, storage: &RemoteStorage, location: RemoteLocation) -> Result<RemoteTarget, StoreError>;

    /// A client; need not connect yet.
    ///
    /// # Errors
    /// Settings that cannot work.
    fn connect(&self, target: &RemoteTarget) -> Result<Arc<dyn RemoteFs>, StoreError>;
}

/// A remote storage that was looked at and can be registered.
#[derive(Debug, Clone)]
pub struct PreparedStorage {
    remote: Arc<Remote>,
    root: Arc<str>,
    writers: usize,
}

/// One registration of a shuffle.
#[derive(Clone)]
pub struct RemoteHandle {
    shuffle: Arc<Shuffle>,
}

impl fmt::Debug for RemoteHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteHandle({})", self.shuffle.key)
    }
}

impl RemoteHandle {
    /// Whether its file system is worth trying now.
    pub fn is_available(&self) -> bool {
        self.shuffle.remote.is_available()
    }
}

#[derive(Debug)]
struct Shuffle {
    key: ShuffleKey,
    remote: Arc<Remote>,
    root: Arc<str>,
    writers_max: usize,
    purged: AtomicBool,
    written_bytes: AtomicU64,
    gate: Arc<DeletionGate>,
    ranges: RwLock<WideRanges>,
    writers: Mutex<HashMap<(i32, i32), Arc<Writers>>>,
}

impl Shuffle {
    fn require_present(&self) -> Result<(), StoreError> {
        match self.purged.load(Ordering::Acquire) {
            true => Err(StoreError::new(StoreErrorKind::Purged, self.key.to_string())),
            false => Ok(()),
        }
    }
}

/// What an application has, also of shuffles that are gone.
#[derive(Debug, Default)]
struct AppState {
    gate: Arc<DeletionGate>,
    /// Where its directories can be.
    roots: Mutex<Vec<(Arc<Remote>, Arc<str>)>>,
}

#[derive(Debug)]
struct Core {
    config: HdfsConfig,
    server_id: Arc<str>,
    connector: Arc<dyn Connector>,
    metrics: Metrics,
    tasks: Tasks,
    remotes: Mutex<HashMap<RemoteTarget, Weak<Remote>>>,
    /// Places to write, by authority.
    permits: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// The store.
#[derive(Debug)]
pub struct HdfsStore {
    core: Arc<Core>,
    shuffles: DashMap<ShuffleKey, Arc<Shuffle>>,
    apps: DashMap<AppId, Arc<AppState>>,
}

impl HdfsStore {
    /// A store without shuffles. Connects to nothing.
    ///
    /// # Errors
    /// A metric name that is taken in `registry`.
    pub fn new(
        config: HdfsConfig,
        connector: Arc<dyn Connector>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let core = Core {
            server_id: config.server_id.as_str().into(),
            metrics: Metrics::new(registry)?,
            config,
            connector,
            tasks,
            remotes: Mutex::default(),
            permits: Mutex::default(),
        };
        Ok(Arc::new(Self { core: Arc::new(core), shuffles: DashMap::new(), apps: DashMap::new() }))
    }

    /// Looks at what a client names. Connects to nothing.
    ///
    /// # Errors
    /// `Denied` with the reason: no location, not on the allow-list, settings that cannot work.
    pub fn prepare(&self, storage: &RemoteStorage) -> Result<PreparedStorage, StoreError> {
        let denied = |text: String| StoreError::remote(StoreErrorKind::Denied, &storage.path, text);
        let location =
            RemoteLocation::parse(&storage.path).map_err(|why| denied(format!("the remote path {why}")))?;
        if !self.core.config.allowed.permits(&location) {
            return Err(denied(
                "this worker's hdfs_store.allowed_paths does not have the remote path".to_owned(),
            ));
        }
        let root: Arc<str> = location.path().into();
        let target = self.core.connector.target(storage, location)?;
        let remote = self.core.remote(target)?;
        let config = &self.core.config;
        let limit = config.partition_write_concurrency_limit;
        let writers = storage.writers.map_or(config.partition_write_max_concurrency, |it| it.clamp(1, limit));
        Ok(PreparedStorage { remote, root, writers })
    }

    /// Makes a shuffle known; again adds ranges and changes nothing else. Touches no file.
    pub fn register(&self, key: &ShuffleKey, storage: &PreparedStorage, ranges: &[(i32, i32)]) {
        let app = Arc::clone(&*self.apps.entry(key.app.clone()).or_default());
        let create = || {
            let mut roots = app.roots.lock();
            let known = |(remote, root): &(Arc<Remote>, Arc<str>)| {
                Arc::ptr_eq(remote, &storage.remote) && *root == storage.root
            };
            if !roots.iter().any(known) {
                roots.push((Arc::clone(&storage.remote), Arc::clone(&storage.root)));
            }
            Arc::new(Shuffle {
                key: key.clone(),
                remote: Arc::clone(&storage.remote),
                root: Arc::clone(&storage.root),
                writers_max: storage.writers,
                purged: AtomicBool::new(false),
                written_bytes: AtomicU64::new(0),
                gate: Arc::clone(&app.gate),
                ranges: RwLock::default(),
                writers: Mutex::default(),
            })
        };
        let shuffle = Arc::clone(&*self.shuffles.entry(key.clone()).or_insert_with(create));
        shuffle.ranges.write().add(ranges);
    }

    /// The present registration of a shuffle; none when its client named no remote path.
    pub fn handle(&self, key: &ShuffleKey) -> Option<RemoteHandle> {
        self.shuffles.get(key).map(|shuffle| RemoteHandle { shuffle: Arc::clone(&*shuffle) })
    }

    /// Writes one partition's blocks: when this returns `Ok` a client that lists the directory finds every one.
    ///
    /// # Errors
    /// The file system's (the caller keeps the memory and may try again or elsewhere), or `Purged`.
    pub async fn write_to(&self, handle: &RemoteHandle, extent: ExtentWrite) -> Result<(), StoreError> {
        self.core.write_extent(&handle.shuffle, extent).await
    }

    /// What a shuffle has; nothing when it is not known.
    pub fn usage(&self, key: &ShuffleKey) -> TierUsage {
        let Some(handle) = self.handle(key) else { return TierUsage::default() };
        let files = handle.shuffle.writers.lock().values().map(|writers| writers.files()).sum();
        let bytes = handle.shuffle.written_bytes.load(Ordering::Relaxed);
        TierUsage { files, bytes, ..TierUsage::default() }
    }

    /// Known shuffles.
    pub fn shuffle_count(&self) -> usize {
        self.shuffles.len()
    }

    /// Whether there are remote stores in use and none of them works.
    pub fn all_failing(&self) -> bool {
        let remotes = self.core.remotes();
        !remotes.is_empty() && remotes.iter().all(|remote| remote.is_failing())
    }

    /// Asks remote stores that fail and are not tried, until `stop`. Deleting what is not there needs an
    /// active NameNode that takes changes.
    pub async fn keep_probing(self: Arc<Self>, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => return,
                () = sleep(PROBE_INTERVAL) => {}
            }
            for remote in self.core.remotes().iter().filter(|remote| remote.is_forgotten()) {
                let answer = remote.fs.delete(&remote.probe_path, false);
                remote.note(&self.core.timed(&remote.probe_path, answer).await);
            }
        }
    }

    /// Brings gauges of live values up to date.
    pub fn refresh_metrics(&self) {
        let remotes = self.core.remotes();
        self.core.metrics.remotes.set(clamped(remotes.len()));
        // Several users of one file system share a gauge: one that fails is enough.
        for remote in &remotes {
            remote.metrics.failing.set(0);
        }
        for remote in remotes.iter().filter(|remote| remote.is_failing()) {
            remote.metrics.failing.set(1);
        }
    }
}

impl Core {
    async fn write_extent(&self, shuffle: &Arc<Shuffle>, extent: ExtentWrite) -> Result<(), StoreError> {
        shuffle.require_present()?;
        let bytes = extent.length;
        let metrics = &shuffle.remote.metrics;
        metrics.writes.inc();
        let result = self.write(shuffle, extent).await;
        match &result {
            Ok(()) => {
                metrics.successes.inc();
                metrics.written_bytes.inc_by(bytes);
                shuffle.written_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.metrics.used_bytes.inc_by(bytes);
            }
            Err(error) if error.kind == StoreErrorKind::Purged => {}
            Err(_) => metrics.failures.inc(),
        }
        result
    }

    fn remotes(&self) -> Vec<Arc<Remote>> {
        self.remotes.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The client of a target, shared by all that have the same.
    fn remote(&self, target: RemoteTarget) -> Result<Arc<Remote>, StoreError> {
        let mut remotes = self.remotes.lock();
        if let Some(remote) = remotes.get(&target).and_then(Weak::upgrade) {
            return Ok(remote);
        }
        remotes.retain(|_, remote| remote.strong_count() > 0);
        if remotes.len() >= REMOTES_MAX {
            let text = format!("{REMOTES_MAX} remote stores are in use, more are not taken");
            return Err(StoreError::remote(StoreErrorKind::Denied, target.location.to_string(), text));
        }
        let authority = target.location.authority();
        let fs = self.connector.connect(&target)?;
        let permits = Arc::clone(self.permits.lock().entry(authority.clone()).or_insert_with(|| {
            Arc::new(Semaphore::new(self.config.max_concurrency.clamp(1, Semaphore::MAX_PERMITS)))
        }));
        let metrics = self.metrics.of(&authority);
        let root = target.location.path().trim_end_matches('/');
        let probe_path = format!("{root}/.probe-{}", self.server_id);
        let remote = Arc::new(Remote::new((authority, probe_path), fs, permits, metrics));
        remotes.insert(target, Arc::downgrade(&remote));
        Ok(remote)
    }

    /// What is the application's own is waited for first, a place, which all share, last: who waits for its own
    /// deletion or for its own writer must not keep others from writing.
    async fn write(&self, shuffle: &Arc<Shuffle>, extent: ExtentWrite) -> Result<(), StoreError> {
        let turn = timeout(self.config.write_timeout, self.turn(shuffle, extent.partition)).await;
        let mut turn = turn.map_err(|late| StoreError::io(&shuffle.remote.authority, late.into()))??;
        let place = place(&shuffle.remote).await?;
        let bytes = extent.length;
        let (told, result) = oneshot::channel();
        let (owned, tasks) = (Arc::clone(shuffle), self.tasks.clone());
        self.tasks.spawn("remote write", async move {
            let job = write_batch(&owned, &mut turn, &extent, &tasks);
            let result = tokio::select! {
                biased;
                () = tasks.cancelled() => Err(StoreError::new(StoreErrorKind::Unhealthy, owned.key.to_string())),
                result = job => result,
            };
            owned.remote.note(&result);
            drop((extent, turn, place));
            drop(told.send(result));
        });
        let deadline = self.config.write_timeout + Duration::from_secs(bytes >> 20);
        match timeout(deadline, result).await {
            Ok(result) => result.unwrap_or_else(|gone| {
                Err(StoreError::io(&shuffle.remote.authority, io::Error::other(gone)))
            }),
            Err(late) => {
                let error = StoreError::io(&shuffle.remote.authority, io::Error::from(late));
                shuffle.remote.note(&Err::<(), _>(StoreError::io(
                    &shuffle.remote.authority,
                    io::ErrorKind::TimedOut.into(),
                )));
                Err(error)
            }
        }
    }

    /// Waits until the application may write and a writer of the partition's directory is free.
    async fn turn(&self, shuffle: &Shuffle, partition: PartitionId) -> Result<Turn, StoreError> {
        let writing = shuffle.gate.write().await;
        shuffle.require_present()?;
        let writer = self.writers(shuffle, partition).take().await;
        Ok(Turn { writer, _writing: writing })
    }

    fn writers(&self, shuffle: &Shuffle, partition: PartitionId) -> Arc<Writers> {
        let (start, end) = shuffle.ranges.read().of(partition);
        let mut writers = shuffle.writers.lock();
        let create = || {
            let directory = layout::shuffle_directory(&shuffle.root, &shuffle.key);
            Writers::new(
                format!("{directory}/{start}-{end}"),
                Arc::clone(&self.server_id),
                shuffle.writers_max,
            )
        };
        Arc::clone(writers.entry((start, end)).or_insert_with(create))
    }
}

/// A place to write. Who waits for one while the file system stops working is told.
async fn place(remote: &Remote) -> Result<OwnedSemaphorePermit, StoreError> {
    loop {
        if !remote.is_available() {
            return Err(remote.suspended());
        }
        let waiting = Arc::clone(&remote.permits).acquire_owned();
        if let Ok(Ok(place)) = timeout(PLACE_LOOK_INTERVAL, waiting).await {
            remote.try_now()?;
            return Ok(place);
        }
    }
}

/// A write that may begin as soon as there is a place: its writer goes back before its application's gate opens.
#[derive(Debug)]
struct Turn {
    writer: Writer,
    _writing: Writing,
}

async fn write_batch(
    shuffle: &Arc<Shuffle>,
    turn: &mut Turn,
    extent: &ExtentWrite,
    tasks: &Tasks,
) -> Result<(), StoreError> {
    shuffle.require_present()?;
    let result = turn.writer.write(&*shuffle.remote.fs, &extent.blocks, extent.payload()).await;
    for path in turn.writer.take_torn() {
        tasks.spawn("file recovery", recover(Arc::clone(shuffle), path, tasks.clone()));
    }
    result
}

/// Brings a file with published blocks whose append has failed back to readers: until it is closed, its last
/// block may be unreadable, and the NameNode does so by itself only after an hour.
async fn recover(shuffle: Arc<Shuffle>, path: String, tasks: Tasks) {
    let mut pause = RECOVERY_PAUSE;
    let deadline = Instant::now() + RECOVERY_DEADLINE;
    while shuffle.require_present().is_ok() && Instant::now() < deadline {
        match shuffle.remote.fs.recover(&path).await {
            Ok(true) => return,
            Err(error) if error.kind == StoreErrorKind::NotFound => return,
            Ok(false) => {}
            Err(error) => tracing::debug!(%path, %error, "a torn file is not closed yet"),
        }
        tokio::select! {
            biased;
            () = tasks.cancelled() => return,
            () = sleep(pause) => {}
        }
        pause = (pause * 2).min(RECOVERY_PAUSE_MAX);
    }
    if shuffle.require_present().is_ok() {
        tracing::error!(%path, remote = %shuffle.remote.authority, "a torn file could not be closed, it may be unreadable");
    }
}
