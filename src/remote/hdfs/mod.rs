//! The HDFS tier: files that clients find, open and read themselves (docs/protocol.md §6).
//!
//! The protocol defines names, formats and the order in which data becomes visible. A shuffle is
//! registered with the remote path that its client named. Each extent of a batch is written by a
//! free [`writer`] of its partition's directory. No file is written to again after a failed call.
//! Data is never read back. Index files are read only to determine which blocks exist.

#[cfg(feature = "hdfs")]
pub mod client;
mod config;
mod deletion_gate;
#[cfg(feature = "hdfs")]
pub mod hadoop;
#[cfg(feature = "hdfs")]
pub mod kerberos;
pub mod layout;
pub mod location;
mod present;
mod purge;
mod remote;
mod tier;
mod write;
mod writer;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

pub use self::config::HdfsConfig;
pub use self::location::{AllowList, AllowedPath, RemoteLocation};
pub use self::purge::HdfsRemoval;
pub use self::remote::{FsFuture, RemoteEntry, RemoteFs, RemoteTarget};
pub(crate) use self::tier::NAMES;

use self::deletion_gate::DeletionGate;
use self::layout::WideRanges;
use self::remote::{RemoteClient, RemoteMetrics};
use self::writer::Writers;
use crate::clock::sleep;
use crate::metrics::{self, clamped};
use crate::runtime::Tasks;
use crate::store::{HdfsState, RemoteStorage, StoreError, StoreErrorKind, TierUsage};
use uniffle_base::sched::{FairSemaphore, Reserve};
use uniffle_wire::types::{AppId, ShuffleKey};

/// Maximum number of remote stores (by path, settings and user) in use, because clients name them.
const REMOTES_MAX: usize = 1024;

/// Interval between two checks for remote stores that need a probe.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Creates clients of file systems.
pub trait RemoteConnector: fmt::Debug + Send + Sync {
    /// Returns the relevant part of a client's request: settings, and the user to impersonate,
    /// unless it is the worker's own.
    ///
    /// # Errors
    /// Settings that cannot work.
    fn target(&self, storage: &RemoteStorage, location: RemoteLocation) -> Result<RemoteTarget, StoreError>;

    /// Creates a client, which may connect later.
    ///
    /// # Errors
    /// Settings that cannot work.
    fn connect(&self, target: &RemoteTarget) -> Result<Arc<dyn RemoteFs>, StoreError>;
}

/// A validated remote storage, ready for registration.
#[derive(Debug, Clone)]
pub struct PreparedStorage {
    remote: Arc<RemoteClient>,
    root: Arc<str>,
    writers: usize,
}

#[derive(Debug)]
struct HdfsShuffle {
    key: ShuffleKey,
    remote: Arc<RemoteClient>,
    root: Arc<str>,
    writers_max: usize,
    purged: AtomicBool,
    written_bytes: AtomicU64,
    gate: Arc<DeletionGate>,
    ranges: RwLock<WideRanges>,
    writers: Mutex<HashMap<(i32, i32), Arc<Writers>>>,
}

impl HdfsShuffle {
    fn require_present(&self) -> Result<(), StoreError> {
        match self.purged.load(Ordering::Acquire) {
            true => Err(StoreError::new(StoreErrorKind::Purged, self.key.to_string())),
            false => Ok(()),
        }
    }
}

/// State of an application, including its removed shuffles.
#[derive(Debug, Default)]
struct AppState {
    gate: Arc<DeletionGate>,
    /// Possible parents of its directories.
    roots: Mutex<Vec<(Arc<RemoteClient>, Arc<str>)>>,
}

metrics::table! {
    /// Counters and gauges of all file systems. Names are Java's where they exist, with its label,
    /// the host of the remote path. The others are riffle's.
    pub(crate) struct Metrics {
        written_bytes: IntCounterVec["storage_host"] =
            "total_hadoop_write_data", "Payload bytes written to a remote store";
        huge_bytes: IntCounterVec["storage_host"] = "total_hadoop_write_data_for_huge_partition",
            "Payload bytes of huge partitions written to a remote store";
        retries: IntCounterVec["storage_host"] = "storage_retry_write_remote",
            "Retried batches for a remote store, after a failure there or elsewhere";
        writes: IntCounterVec["storage_host"] =
            "storage_total_write_remote", "Batches to be written to a remote store";
        failures: IntCounterVec["storage_host"] =
            "storage_failed_write_remote", "Batches that failed to be written to a remote store";
        successes: IntCounterVec["storage_host"] =
            "storage_success_write_remote", "Batches written to a remote store";
        failing: IntGaugeVec["storage_host"] = "remote_storage_is_failing",
            "1 while the latest calls to the remote store failed";
        deletions_failed: IntCounterVec["storage_host"] = "total_remote_storage_deletion_failed",
            "Directories of a remote store that could not be deleted";
        used_bytes: IntCounter = "total_hdfs_used", "Payload bytes written to all remote stores";
        remotes: IntGauge = "remote_storage_connections", "Remote file systems in use, by settings and user";
    }
}

impl Metrics {
    /// Returns the metrics of the file system `authority`.
    fn of(&self, authority: &str) -> RemoteMetrics {
        let label = [authority];
        RemoteMetrics {
            written_bytes: self.written_bytes.with_label_values(&label),
            huge_bytes: self.huge_bytes.with_label_values(&label),
            retries: self.retries.with_label_values(&label),
            writes: self.writes.with_label_values(&label),
            failures: self.failures.with_label_values(&label),
            successes: self.successes.with_label_values(&label),
            failing: self.failing.with_label_values(&label),
            deletions_failed: self.deletions_failed.with_label_values(&label),
        }
    }
}

#[derive(Debug)]
struct HdfsCore {
    config: HdfsConfig,
    server_id: Arc<str>,
    connector: Arc<dyn RemoteConnector>,
    metrics: Metrics,
    tasks: Tasks,
    remotes: Mutex<HashMap<RemoteTarget, Weak<RemoteClient>>>,
    /// Permits to write, by authority.
    permits: Mutex<HashMap<String, Arc<FairSemaphore>>>,
}

/// The HDFS tier.
#[derive(Debug)]
pub struct HdfsStore {
    core: Arc<HdfsCore>,
    shuffles: DashMap<ShuffleKey, Arc<HdfsShuffle>>,
    apps: DashMap<AppId, Arc<AppState>>,
}

impl HdfsStore {
    /// Creates a store without shuffles. Does not connect.
    ///
    /// # Errors
    /// A metric name that is already used in `registry`.
    pub fn new(
        config: HdfsConfig,
        connector: Arc<dyn RemoteConnector>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let core = HdfsCore {
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

    /// Validates the storage that a client names. Does not connect.
    ///
    /// # Errors
    /// `Denied` with the reason: not a location, not on the allow-list, settings that cannot work,
    /// or too many remote stores in use.
    pub fn prepare(&self, storage: &RemoteStorage) -> Result<PreparedStorage, StoreError> {
        let denied = |text: String| StoreError::remote(StoreErrorKind::Denied, &storage.path, text);
        let location =
            RemoteLocation::parse(&storage.path).map_err(|why| denied(format!("the remote path {why}")))?;
        if !self.core.config.allowed.permits(&location) {
            return Err(denied(
                "the remote path is not in this worker's hdfs_store.allowed_paths".to_owned(),
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

    /// Registers a shuffle. A further call only adds ranges. Touches no file.
    pub fn register(&self, key: &ShuffleKey, storage: &PreparedStorage, ranges: &[(i32, i32)]) {
        let app = Arc::clone(&*self.apps.entry(key.app.clone()).or_default());
        let create = || {
            let mut roots = app.roots.lock();
            let known = |(remote, root): &(Arc<RemoteClient>, Arc<str>)| {
                Arc::ptr_eq(remote, &storage.remote) && *root == storage.root
            };
            if !roots.iter().any(known) {
                roots.push((Arc::clone(&storage.remote), Arc::clone(&storage.root)));
            }
            Arc::new(HdfsShuffle {
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

    fn find(&self, key: &ShuffleKey) -> Option<Arc<HdfsShuffle>> {
        self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle))
    }

    /// Returns the usage of a shuffle, which is empty if it is unknown.
    pub fn usage(&self, key: &ShuffleKey) -> TierUsage {
        let Some(shuffle) = self.find(key) else { return TierUsage::default() };
        let files = shuffle.writers.lock().values().map(|writers| writers.files()).sum();
        let bytes = shuffle.written_bytes.load(Ordering::Relaxed);
        TierUsage { files, bytes, ..TierUsage::default() }
    }

    /// Returns the number of known shuffles.
    pub fn shuffle_count(&self) -> usize {
        self.shuffles.len()
    }

    /// Returns whether remote stores are in use and all of them fail.
    pub fn all_failing(&self) -> bool {
        let state = self.state();
        state.stores > 0 && state.failing_stores == state.stores
    }

    /// Returns the stores in use and the payload written for known shuffles.
    pub fn state(&self) -> HdfsState {
        let remotes = self.core.remotes();
        let written = |shuffle: &Arc<HdfsShuffle>| shuffle.written_bytes.load(Ordering::Relaxed);
        HdfsState {
            stores: remotes.len(),
            failing_stores: remotes.iter().filter(|remote| remote.is_failing()).count(),
            written_bytes: self.shuffles.iter().map(|shuffle| written(shuffle.value())).sum(),
        }
    }

    /// Probes failing remote stores that were not tried for a while, until `stop`. Deleting a
    /// missing file requires an active NameNode that accepts changes.
    pub async fn keep_probing(self: Arc<Self>, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => return,
                () = sleep(PROBE_INTERVAL) => {}
            }
            for remote in self.core.remotes().iter().filter(|remote| remote.needs_probe()) {
                let answer = remote.fs.delete(&remote.probe_path, false);
                remote.note(&self.core.timed(&remote.probe_path, answer).await);
            }
        }
    }

    /// Updates gauges of live values.
    pub fn refresh_metrics(&self) {
        let remotes = self.core.remotes();
        self.core.metrics.remotes.set(clamped(remotes.len()));
        // Several users of one file system share a gauge. It is set if one of them fails.
        for remote in &remotes {
            remote.metrics.failing.set(0);
        }
        for remote in remotes.iter().filter(|remote| remote.is_failing()) {
            remote.metrics.failing.set(1);
        }
    }
}

impl HdfsCore {
    fn remotes(&self) -> Vec<Arc<RemoteClient>> {
        self.remotes.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Returns the client of a target, which is shared by equal targets.
    fn remote(&self, target: RemoteTarget) -> Result<Arc<RemoteClient>, StoreError> {
        let mut remotes = self.remotes.lock();
        if let Some(remote) = remotes.get(&target).and_then(Weak::upgrade) {
            return Ok(remote);
        }
        remotes.retain(|_, remote| remote.strong_count() > 0);
        if remotes.len() >= REMOTES_MAX {
            let text = format!("too many remote stores, the limit is {REMOTES_MAX}");
            return Err(StoreError::remote(StoreErrorKind::Denied, target.location.to_string(), text));
        }
        let authority = target.location.authority();
        let fs = self.connector.connect(&target)?;
        let most = self.config.max_concurrency.max(1) as u64;
        let permits = Arc::clone(
            (self.permits.lock().entry(authority.clone()))
                .or_insert_with(|| FairSemaphore::new(most, Reserve::None)),
        );
        let metrics = self.metrics.of(&authority);
        let root = target.location.path().trim_end_matches('/');
        let probe_path = format!("{root}/.probe-{}", self.server_id);
        let remote = Arc::new(RemoteClient::new(authority, probe_path, fs, permits, metrics));
        remotes.insert(target, Arc::downgrade(&remote));
        Ok(remote)
    }
}
