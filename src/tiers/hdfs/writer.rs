//! The writers of one directory: several batches of a partition at a time, each into a pair of files of its own.
//!
//! A pair is data then index, and the data is readable before an index record names it. A writer whose call failed
//! never touches its files again: what they hold is unknown, and the NameNode may still lease them to us. It goes on
//! with the next number. For the same reason a pair is begun with a new file only: one that an earlier process left may
//! end in blocks without records, and readers take the blocks between two records to lie side by side.
//!
//! Files are closed after every batch, as the Java server does: a file that is kept open costs a thread on its
//! DataNodes, and a spill touches thousands of partitions. `hsync` would save two calls of the NameNode per file and
//! batch, and cost a disk's sync.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::fs::RemoteFs;
use super::layout::WriterName;
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_wire::index::{IndexRecord, RECORD_BYTES};
use uniffle_wire::types::BlockMeta;

/// How often a name that is taken is replaced by the next free one, before that counts as a failure.
const NAMES_MAX: u32 = 16;

/// The writers of one directory.
#[derive(Debug)]
pub(super) struct Writers {
    directory: String,
    server_id: Arc<str>,
    max: usize,
    slots: Mutex<Vec<Slot>>,
    free: Arc<Semaphore>,
    files: AtomicU64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    busy: bool,
    failures: u32,
    /// Length of its data file; none before the first batch and after a failure.
    data_bytes: Option<u64>,
}

impl Writers {
    /// At most `max` at a time, at least one.
    pub(super) fn new(directory: String, server_id: Arc<str>, max: usize) -> Arc<Self> {
        let max = max.clamp(1, Semaphore::MAX_PERMITS);
        let free = Arc::new(Semaphore::new(max));
        Arc::new(Self { directory, server_id, max, slots: Mutex::default(), free, files: AtomicU64::new(0) })
    }

    /// A writer of the caller's own; waits for one. The lowest number that is free, so that few files are made.
    pub(super) async fn take(self: &Arc<Self>) -> Writer {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        let mut slots = self.slots.lock();
        let free = slots.iter().position(|slot| !slot.busy);
        let index = free.unwrap_or_else(|| {
            slots.push(Slot::default());
            slots.len() - 1
        });
        slots[index].busy = true;
        let Slot { failures, data_bytes, .. } = slots[index];
        drop(slots);
        Writer { writers: Arc::clone(self), index, failures, data_bytes, torn: Vec::new(), _permit: permit }
    }

    /// Waits for the writers at work, and holds back those to come.
    pub(super) async fn hold(&self) -> Held {
        let all = u32::try_from(self.max).unwrap_or(u32::MAX);
        let permits = Arc::clone(&self.free).acquire_many_owned(all).await.ok();
        let slots = self.slots.lock();
        let pairs = slots.iter().enumerate().filter(|(_, slot)| slot.data_bytes.is_some());
        let in_use = pairs.map(|(index, slot)| self.name(index).files(slot.failures).1).collect();
        Held { in_use, _permits: permits }
    }

    /// Files made so far.
    pub(super) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    pub(super) fn directory(&self) -> &str {
        &self.directory
    }

    fn name(&self, index: usize) -> WriterName<'_> {
        WriterName { server_id: &self.server_id, index: (self.max > 1).then_some(index) }
    }
}

/// No writer is at work in the directory, and none begins.
#[derive(Debug)]
pub(super) struct Held {
    /// Index files that are to be appended to, all of them closed now.
    in_use: HashSet<String>,
    _permits: Option<OwnedSemaphorePermit>,
}

impl Held {
    /// Whether a writer goes on with this index file; all others of ours are given up.
    pub(super) fn uses(&self, index_name: &str) -> bool {
        self.in_use.contains(index_name)
    }
}

/// One writer, taken.
#[derive(Debug)]
pub(super) struct Writer {
    writers: Arc<Writers>,
    index: usize,
    failures: u32,
    data_bytes: Option<u64>,
    /// Files with published blocks whose append has failed.
    torn: Vec<String>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        let slot = Slot { busy: false, failures: self.failures, data_bytes: self.data_bytes };
        self.writers.slots.lock()[self.index] = slot;
    }
}

impl Writer {
    /// Appends blocks whose bytes are `data`. When this returns `Ok` a reader that lists the directory finds them.
    /// Dropped or failed on the way, the pair of files is given up.
    pub(super) async fn write(
        &mut self,
        fs: &dyn RemoteFs,
        blocks: &[BlockMeta],
        data: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        let written = self.data_bytes.take();
        let result = match written {
            Some(base) => {
                let appended = self.append(fs, base, blocks, data).await;
                if appended.is_err() {
                    self.torn = <[String; 2]>::from(self.paths()).into();
                }
                appended
            }
            None => self.begin(fs, blocks, data).await,
        };
        match result {
            Ok(data_bytes) => self.data_bytes = Some(data_bytes),
            Err(_) => self.failures = self.failures.saturating_add(1),
        }
        result.map(drop)
    }

    /// Files that must be closed, so that readers find what they had before the failure.
    pub(super) fn take_torn(&mut self) -> Vec<String> {
        std::mem::take(&mut self.torn)
    }

    /// A new pair.
    async fn begin(
        &mut self,
        fs: &dyn RemoteFs,
        blocks: &[BlockMeta],
        data: Vec<Bytes>,
    ) -> Result<u64, StoreError> {
        let mut names = 0;
        let index_path = loop {
            let (data_path, index_path) = self.paths();
            match fs.create(&data_path, data.clone()).await {
                Ok(()) => break index_path,
                Err(error) if error.kind == StoreErrorKind::Exists && names < NAMES_MAX => {
                    names += 1;
                    self.failures = self.next_free(fs).await?;
                }
                Err(error) => return Err(error),
            }
        };
        let (records, data_bytes) = records_of(blocks, 0);
        fs.create(&index_path, vec![records]).await?;
        self.writers.files.fetch_add(2, Ordering::Relaxed);
        Ok(data_bytes)
    }

    async fn append(
        &self,
        fs: &dyn RemoteFs,
        base: u64,
        blocks: &[BlockMeta],
        data: Vec<Bytes>,
    ) -> Result<u64, StoreError> {
        let (data_path, index_path) = self.paths();
        let (records, data_bytes) = records_of(blocks, base);
        fs.append(&data_path, data).await?;
        fs.append(&index_path, vec![records]).await?;
        Ok(data_bytes)
    }

    fn name(&self) -> WriterName<'_> {
        self.writers.name(self.index)
    }

    fn paths(&self) -> (String, String) {
        let (data, index) = self.name().files(self.failures);
        let directory = &self.writers.directory;
        (format!("{directory}/{data}"), format!("{directory}/{index}"))
    }

    /// The number behind all that stand in the directory.
    async fn next_free(&self, fs: &dyn RemoteFs) -> Result<u32, StoreError> {
        let entries = fs.list(&self.writers.directory).await?;
        let taken = entries.iter().filter_map(|entry| self.name().failures_of(&entry.name)).max();
        Ok(taken.unwrap_or(self.failures).max(self.failures).saturating_add(1))
    }
}

/// Records of blocks that lie side by side from `base` on, and where they end.
fn records_of(blocks: &[BlockMeta], base: u64) -> (Bytes, u64) {
    let mut records = Vec::with_capacity(blocks.len() * RECORD_BYTES);
    let mut offset = base;
    for block in blocks {
        records.extend_from_slice(&IndexRecord::new(block, offset).encode());
        offset += u64::from(block.length);
    }
    (records.into(), offset)
}
