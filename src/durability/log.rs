//! The worker's metadata log: what shuffles said and must not be forgotten, in two copies.
//!
//! An entry is acknowledged once it is on the device in both copies, on two directories where two can be written. This is the
//! handle; one task writes (`writer`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot, watch};

use super::contents::LogShares;
use super::error::LogError;
use super::frame::{Entry, Gap, Incarnation};
use super::generation::COPIES;
use super::hand_off::HandOff;
use super::read::{Directory, Snapshot, Survey};
use super::ship::{CheckpointSource, Shipper};
use super::shipped::ShippedLog;
use super::take_over::Found;
use super::writer::{Deadlines, Request, Told, Writer};
use crate::runtime::Tasks;
use uniffle_wire::types::ShuffleKey;

/// Entries that wait. Each stands for a request, of which listeners bound number and bytes.
const WAITING_MAX: usize = 4096;
/// Records that wait to be taken over.
const TOLD_MAX: usize = 64;

/// The part of the log in an object store that is below the directories.
#[derive(Debug, Clone)]
pub struct LogInStore {
    /// Log of earlier processes.
    pub found: Arc<ShippedLog>,
    /// Log of this process.
    pub shipper: Shipper,
}

/// The log; clones share it. It ends with the last of them.
#[derive(Debug, Clone)]
pub struct MetadataLog {
    requests: mpsc::Sender<Request>,
    gap: Option<Arc<str>>,
    is_begun: Arc<AtomicBool>,
    was_tried: watch::Receiver<bool>,
    living: LogShares,
}

impl MetadataLog {
    /// Takes over what the directories have, by the rule (`proof`), and begins a new epoch on them: at once where nothing is
    /// left, else when what shuffles said was told ([`MetadataLog::said`]), so that nobody who takes it over waits for a
    /// device, or before the first entry. A log that cannot be begun now is tried again with every entry, which is refused until
    /// then.
    pub async fn open(
        directories: Vec<Directory>,
        survey: Survey,
        deadlines: Deadlines,
        store: Option<LogInStore>,
        tasks: &Tasks,
    ) -> (Self, Found) {
        let (shipper, shipped) = store.map(|store| (store.shipper, store.found)).unzip();
        let (mut writer, found) = Writer::on(directories, deadlines, &survey, shipped).await;
        writer.shipper = shipper;
        if found.shuffles.is_empty() {
            writer.begin_first().await;
        }
        let gap = found.gap.as_deref().map(Arc::from);
        let (is_begun, was_tried) = (Arc::clone(&writer.is_begun), writer.was_tried.subscribe());
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
        (Self { requests, gap, is_begun, was_tried, living }, found)
    }

    /// Whether what an earlier process left is on the device: it may have ended between a write and its sync, and only a new
    /// generation has all of it synced.
    #[must_use]
    pub fn is_begun(&self) -> bool {
        self.is_begun.load(Ordering::Acquire)
    }

    /// Waits until a new generation is begun, or could not be. To be called when what shuffles said was told.
    pub async fn begun(&self) {
        // The writer ends with the worker.
        let _ = self.was_tried.clone().wait_for(|was_tried| *was_tried).await;
    }

    /// Why it is not known which shuffles there were.
    #[must_use]
    pub fn gap(&self) -> Option<Arc<str>> {
        self.gap.clone()
    }

    /// Appends a record of a shuffle: when this returns `Ok` it outlives process and power. Continues when it is dropped. Returns its
    /// position on the way into the object store, if there is one.
    ///
    /// # Errors
    /// Too few directories can be written, or it is too long.
    pub async fn append(&self, shuffle: Incarnation, said: Bytes) -> Result<u64, LogError> {
        self.ask(Entry::Said(shuffle, said)).await
    }

    /// From now on what a shuffle said is incomplete for `reason`, also for later starts, until it is purged.
    ///
    /// # Errors
    /// As [`MetadataLog::append`].
    pub async fn mark_incomplete(&self, shuffle: Incarnation, reason: &str) -> Result<u64, LogError> {
        let gap = Gap { reason: reason.to_owned(), until_back: Vec::new() };
        self.ask(Entry::Incomplete(shuffle, gap)).await
    }

    /// Forgets a shuffle, whose files may be removed from then on.
    ///
    /// # Errors
    /// As [`MetadataLog::append`].
    pub async fn purge(&self, shuffle: Incarnation) -> Result<u64, LogError> {
        self.ask(Entry::Purged(shuffle)).await
    }

    /// Brings the copies to where they should be as the directories are now.
    pub async fn settle(&self) {
        let (done, settled) = oneshot::channel();
        if self.requests.send(Request::Settle(done)).await.is_ok() {
            // An error, too, means that it is done.
            let _: Result<(), _> = settled.await;
        }
    }

    /// Closes the log: nothing more is written. Returns the hand-off record for a successor.
    ///
    /// # Errors
    /// The log cannot be written now, so a successor has to begin a generation.
    pub async fn release(&self) -> Result<HandOff, LogError> {
        let (done, answer) = oneshot::channel();
        let ended = || LogError::told("the worker ends");
        self.requests.send(Request::Release(done)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// This start could not see everything: what it numbers is not to be numbered so by others.
    pub async fn count_blind_start(&self) {
        let (done, counted) = oneshot::channel();
        if self.requests.send(Request::Blind(done)).await.is_ok() {
            let _: Result<(), _> = counted.await;
        }
    }

    /// Returns the bytes that a shuffle takes in all copies of the log.
    #[must_use]
    pub fn disk_bytes(&self, incarnation: u64) -> u64 {
        COPIES as u64 * self.living.of(incarnation)
    }

    /// Returns where the log can be read now, and what of it lives.
    ///
    /// # Errors
    /// The log cannot be written now.
    /// Begins to copy the log to an object store.
    pub fn ship_by(&self, shipper: &Shipper) {
        shipper.begin_from_disks(Arc::new(self.clone()));
    }

    async fn read_snapshot(&self) -> Result<Snapshot, LogError> {
        let (done, answer) = oneshot::channel();
        let ended = || LogError::told("the worker ends");
        self.requests.send(Request::Snapshot(done)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// From now on the records of a shuffle are acknowledged once the object store has them. Returns the position of the entry.
    ///
    /// # Errors
    /// As [`MetadataLog::append`].
    pub async fn mark_moved(&self, shuffle: Incarnation) -> Result<u64, LogError> {
        self.ask(Entry::Moved(shuffle)).await
    }

    /// What living shuffles said, to be read once.
    #[must_use]
    pub fn said(&self) -> Said {
        Said { log: Some(self.clone()), told: None }
    }

    async fn ask(&self, entry: Entry) -> Result<u64, LogError> {
        let (done, answer) = oneshot::channel();
        let ended = || LogError::told("the worker ends");
        self.requests.send(Request::Append(entry, done)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

/// What living shuffles said, in the order in which it was written (of copies that say different things, one after the
/// other). While it is read nothing is written; a few records are held at a time.
#[derive(Debug, Default)]
pub struct Said {
    /// Until it is asked.
    log: Option<MetadataLog>,
    told: Option<mpsc::Receiver<Told>>,
}

impl Said {
    /// What someone else tells who keeps records, one by one, with none at the end.
    #[must_use]
    pub fn of(told: mpsc::Receiver<Result<Option<(ShuffleKey, Bytes)>, LogError>>) -> Self {
        Self { log: None, told: Some(told) }
    }

    /// The next record; none at the end.
    ///
    /// # Errors
    /// The log cannot be read to its end.
    pub async fn next(&mut self) -> Result<Option<(ShuffleKey, Bytes)>, LogError> {
        if let Some(log) = self.log.take() {
            let (to, told) = mpsc::channel(TOLD_MAX);
            self.told = Some(told);
            // Without a writer nothing is told, which is an error.
            let _ = log.requests.send(Request::Tell(to)).await;
        }
        let Some(told) = &mut self.told else { return Ok(None) };
        let next = told.recv().await.unwrap_or_else(|| Err(LogError::told("the worker ends")));
        if !matches!(next, Ok(Some(_))) {
            self.told = None;
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
