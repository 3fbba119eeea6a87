//! The worker's metadata log: records of shuffles that must survive the process, in two copies.
//!
//! An entry is acknowledged once it is on the device in both copies, on two directories if two are
//! writable. Without directories it is acknowledged once the object store has it. This module has
//! the handle. A single task writes (`writer`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use croaring::Treemap;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use super::LogError;
use super::contents::LogShares;
use super::format::frame::{FrameContent, Gap, Incarnation};
use super::objects::ship::{CheckpointSource, Shipper};
use super::objects::shipped::ShippedLog;
use super::recovery::proof::HandOff;
use super::recovery::read::{Directory, Snapshot, SourceReader, Survey};
use super::recovery::take_over::FoundLog;
use super::write::generation::COPIES;
use super::write::writer::{Deadlines, LogRequest, MetadataWriter, RecoveredRecord};
use uniffle_base::clock::timeout;
use uniffle_base::runtime::Tasks;
use uniffle_wire::types::ShuffleKey;

/// Maximum number of waiting entries. Most belong to a request, and listeners bound number and
/// bytes of requests.
const WAITING_MAX: usize = 4096;
/// Longest wait until the object store has the end of a gap. The caller has other regular work.
const GAP_WAIT: Duration = Duration::from_secs(10);
/// Maximum number of records queued for the reader during a recovery.
const TOLD_MAX: usize = 64;

/// The log in an object store: of earlier processes, and of this process.
#[derive(Debug, Clone)]
pub struct LogInStore {
    /// Log of earlier processes.
    pub found: Arc<ShippedLog>,
    /// Log of this process.
    pub shipper: Shipper,
}

/// Handle of the log. Clones share it, and the log ends with the last of them.
#[derive(Debug, Clone)]
pub struct MetadataLog {
    requests: mpsc::Sender<LogRequest>,
    gap: Arc<Mutex<Option<Arc<str>>>>,
    is_begun: Arc<AtomicBool>,
    was_tried: watch::Receiver<bool>,
    damage: watch::Receiver<Option<Arc<str>>>,
    living: LogShares,
    /// The object store, if it is the only holder of the log.
    store: Option<Shipper>,
}

impl MetadataLog {
    /// Recovers the contents of the directories by the rule (`proof`), and begins a new epoch on
    /// them or resumes that of the predecessor. Without recovered shuffles, this happens at once.
    /// Otherwise it happens once the records were delivered ([`RecordReader`]), or before the first
    /// new entry, so that recovery does not wait for a write. If it fails, each new entry tries
    /// again and is refused until that succeeds. Without directories, `store` is the only holder of
    /// the log.
    pub async fn open(
        directories: Vec<Directory>,
        survey: Survey,
        deadlines: Deadlines,
        store: Option<LogInStore>,
        tasks: &Tasks,
    ) -> (Self, FoundLog, RecordReader) {
        if directories.is_empty()
            && let Some(store) = store
        {
            return Self::in_store(store);
        }
        let (shipper, shipped) = store.map(|store| (store.shipper, store.found)).unzip();
        let (mut writer, found) = MetadataWriter::on(directories, deadlines, &survey, shipped).await;
        writer.shipper = shipper;
        if found.shuffles.is_empty() {
            writer.begin_first().await;
        }
        let gap = Arc::new(Mutex::new(found.gap.as_deref().map(Arc::from)));
        let (is_begun, was_tried) = (Arc::clone(&writer.is_begun), writer.was_tried.subscribe());
        let damage = writer.damage.subscribe();
        let living = writer.contents.living.clone();
        let (requests, receiver) = mpsc::channel(WAITING_MAX);
        let cancelled = tasks.cancelled();
        tasks.spawn("metadata log", async move {
            tokio::select! {
                biased;
                () = cancelled => {}
                () = writer.run(receiver) => {}
            }
        });
        let log = Self { requests, gap, is_begun, was_tried, damage, living, store: None };
        let records = log.records();
        (log, found, records)
    }

    /// Opens the log of a worker without directories. No task writes it except the shipper.
    fn in_store(LogInStore { found: log, shipper }: LogInStore) -> (Self, FoundLog, RecordReader) {
        let mut shuffles = log.shuffles().clone();
        // The disks of an earlier process had the data of a shuffle that was not moved.
        shuffles.retain(|_, found| found.is_moved);
        for found in shuffles.values_mut() {
            found.incomplete = log.gap().map(str::to_owned).or(found.incomplete.take());
        }
        let living = shuffles.values().map(|found| found.incarnation).collect();
        let gap = log.unknown_gap().map(str::to_owned);
        let opened = Self {
            requests: mpsc::channel(1).0,
            gap: Arc::new(Mutex::new(gap.as_deref().map(Arc::from))),
            is_begun: Arc::new(true.into()),
            was_tried: watch::channel(true).1,
            damage: watch::channel(None).1,
            living: LogShares::default(),
            store: Some(shipper),
        };
        let (has_new_gap, next_incarnation) = (log.gap().is_some(), log.next_incarnation());
        let records = RecordReader::stored(log, living);
        let found = FoundLog { shuffles, gap, has_new_gap, next_incarnation, ..FoundLog::default() };
        (opened, found, records)
    }

    /// Returns whether this process has begun or resumed a generation. Only then is the recovered
    /// state durable, since an earlier process may have ended between a write and its sync.
    #[must_use]
    pub fn is_begun(&self) -> bool {
        self.is_begun.load(Ordering::Acquire)
    }

    /// Waits until a generation is begun or resumed, or an attempt has failed. Called after the
    /// recovered records were delivered.
    pub async fn begun(&self) {
        // The writer ends with the worker.
        let _ = self.was_tried.clone().wait_for(|was_tried| *was_tried).await;
    }

    /// Returns the reason why shuffles may exist that the log does not have. `None` without such a
    /// gap.
    #[must_use]
    pub fn gap(&self) -> Option<Arc<str>> {
        self.gap.lock().clone()
    }

    /// Ends the gap, also for later starts. Must be called only when all applications from before
    /// the gap have ended. Incomplete shuffles stay incomplete. Returns false if a directory that
    /// may have newer metadata is missing or unreadable. Directories of a time before a worker
    /// without disks do not count: they have their own record of the gap.
    ///
    /// # Errors
    /// Too few directories can be written, or the store does not take the end of the gap in time.
    pub async fn end_gap(&self) -> Result<bool, LogError> {
        let is_over = match &self.store {
            None => self.ask(LogRequest::EndGap).await?,
            Some(_) => {
                let ended = timeout(GAP_WAIT, self.add(FrameContent::Epoch(Box::default()))).await;
                let silent = |_| LogError::of(io::ErrorKind::TimedOut, "the object store does not answer");
                ended.map_err(silent)??;
                true
            }
        };
        if is_over {
            *self.gap.lock() = None;
        }
        Ok(is_over)
    }

    /// Returns why the log lacks records of living shuffles that this process has acknowledged:
    /// another program damaged all copies. The next start refuses results of these shuffles.
    #[must_use]
    pub fn damage(&self) -> Option<Arc<str>> {
        self.damage.borrow().clone()
    }

    /// Appends a record of a shuffle. After `Ok` it survives the process and a power loss. The
    /// append continues if the future is dropped. Returns the position of the record in the log
    /// that is copied to the object store, or 0 without a store.
    ///
    /// # Errors
    /// Too few directories can be written or the store does not take the record, the record is too
    /// long, the registration is outdated, or the worker is stopping.
    pub async fn append(&self, shuffle: Incarnation, record: Bytes) -> Result<u64, LogError> {
        self.add(FrameContent::Record(shuffle, record)).await
    }

    /// Marks the records of a shuffle as incomplete for `reason` until it is purged, also for later
    /// starts. Returns the position of the entry.
    ///
    /// # Errors
    /// See [`MetadataLog::append`].
    pub async fn mark_incomplete(&self, shuffle: Incarnation, reason: &str) -> Result<u64, LogError> {
        let gap = Gap { reason: reason.to_owned(), until_returned: Vec::new() };
        self.add(FrameContent::Incomplete(shuffle, gap)).await
    }

    /// Records the purge of a shuffle. Its files may be removed afterwards, but its objects only
    /// once the object store knows the returned position.
    ///
    /// # Errors
    /// See [`MetadataLog::append`].
    pub async fn purge(&self, shuffle: Incarnation) -> Result<u64, LogError> {
        if let Some(store) = &self.store {
            store.begin();
            return Ok(store.purge(shuffle));
        }
        self.add(FrameContent::Purged(shuffle)).await
    }

    /// Checks the copies, and writes them again if files are missing or other directories are
    /// better, for example after one has failed or returned.
    pub async fn settle(&self) {
        let (done, settled) = oneshot::channel();
        if self.requests.send(LogRequest::Settle(done)).await.is_ok() {
            // An error also means that it is done.
            let _: Result<(), _> = settled.await;
        }
    }

    /// Closes the log: nothing is written afterwards. Returns the hand-off record for a successor.
    ///
    /// # Errors
    /// The log cannot be written now, so a successor has to begin a generation.
    pub async fn release(&self) -> Result<HandOff, LogError> {
        self.ask(LogRequest::Release).await
    }

    /// Records that this start may have missed shuffles. It assigns incarnations from a range of
    /// its own, which no later start may use.
    pub async fn count_blind_start(&self) {
        let (done, counted) = oneshot::channel();
        if self.requests.send(LogRequest::Blind(done)).await.is_ok() {
            let _: Result<(), _> = counted.await;
        }
    }

    /// Returns the bytes that a shuffle takes in all copies of the log.
    #[must_use]
    pub fn disk_bytes(&self, incarnation: u64) -> u64 {
        COPIES as u64 * self.living.of(incarnation)
    }

    /// Begins to write the log to an object store.
    pub fn ship_by(&self, shipper: &Shipper) {
        match &self.store {
            Some(store) => store.begin(),
            None => shipper.begin_from_disks(Arc::new(self.clone())),
        }
    }

    /// Returns where the log can be read now, and its living shuffles.
    ///
    /// # Errors
    /// The log cannot be written now.
    async fn read_snapshot(&self) -> Result<Snapshot, LogError> {
        self.ask(LogRequest::Snapshot).await
    }

    /// Marks a shuffle as moved: its later records are acknowledged once the object store has them.
    /// Returns the position of the entry.
    ///
    /// # Errors
    /// See [`MetadataLog::append`].
    pub async fn mark_moved(&self, shuffle: Incarnation) -> Result<u64, LogError> {
        self.add(FrameContent::Moved(shuffle)).await
    }

    /// Returns a reader of the records of living shuffles on the disks, which can be read once.
    #[must_use]
    pub fn records(&self) -> RecordReader {
        RecordReader(Records::Log(self.clone()))
    }

    async fn add(&self, entry: FrameContent) -> Result<u64, LogError> {
        if let Some(store) = &self.store {
            store.begin();
            return store.append(entry).await;
        }
        self.ask(|done| LogRequest::Append(entry, done)).await
    }

    /// Sends a request to the writer and returns its answer.
    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, LogError>>) -> LogRequest,
    ) -> Result<T, LogError> {
        let (done, answer) = oneshot::channel();
        let ended = || LogError::other("the worker is stopping");
        self.requests.send(request(done)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

/// Reader of the records of living shuffles, in the order in which they were written. Copies with
/// different content are read one after the other. A log on disks is not written meanwhile, and
/// only a few records are in memory at a time.
#[derive(Debug, Default)]
pub struct RecordReader(Records);

/// Source of recovered records.
#[derive(Debug, Default)]
enum Records {
    #[default]
    None,
    /// The log, until the first record is requested.
    Log(MetadataLog),
    /// Records that the writer of the log sends.
    FromWriter(mpsc::Receiver<RecoveredRecord>),
    /// The log in an object store. `_log` keeps its objects from being deleted.
    Stored { reader: Box<SourceReader<'static>>, living: Treemap, _log: Arc<ShippedLog> },
}

impl RecordReader {
    /// Returns a reader of the records of `living` incarnations in an object store.
    pub(crate) fn stored(log: Arc<ShippedLog>, living: Treemap) -> Self {
        let reader = Box::new(log.source.read_stored());
        Self(Records::Stored { reader, living, _log: log })
    }

    /// Returns the next record, or `None` at the end.
    ///
    /// # Errors
    /// The log cannot be read to its end.
    pub async fn next(&mut self) -> Result<Option<(ShuffleKey, Bytes)>, LogError> {
        if let Records::Log(log) = &self.0 {
            let (to, receiver) = mpsc::channel(TOLD_MAX);
            // Without a writer nothing is received, which is reported as an error.
            let _ = log.requests.send(LogRequest::SendRecords(to)).await;
            self.0 = Records::FromWriter(receiver);
        }
        let next = match &mut self.0 {
            Records::None | Records::Log(_) => Ok(None),
            Records::FromWriter(receiver) => {
                receiver.recv().await.unwrap_or_else(|| Err(LogError::other("the worker is stopping")))
            }
            Records::Stored { reader, living, .. } => loop {
                match reader.next().await {
                    Ok(Some(FrameContent::Record(shuffle, record))) if living.contains(shuffle.number) => {
                        break Ok(Some((shuffle.key, record)));
                    }
                    Ok(Some(_)) => {}
                    ended => break ended.map(|_| None).map_err(LogError::from),
                }
            },
        };
        if !matches!(next, Ok(Some(_))) {
            self.0 = Records::None;
        }
        next
    }
}

impl CheckpointSource for MetadataLog {
    fn begun(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.begun())
    }

    fn snapshot(&self) -> BoxFuture<'_, Result<Snapshot, LogError>> {
        Box::pin(self.read_snapshot())
    }
}
