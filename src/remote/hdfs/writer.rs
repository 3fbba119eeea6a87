//! The writers of one directory, which write concurrently, each to its own pair of files.
//!
//! Data is written before its index, and is readable before an index record refers to it. A writer
//! whose call failed never writes to its files again: their content is unknown, and we may still
//! hold their lease. It begins a pair with the next number. Files of an earlier process are not
//! continued either: they may end in blocks without records, and readers expect the blocks of
//! consecutive records to be contiguous. Files are closed after every extent, as in the Java
//! server, because an open file costs a thread on its DataNodes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::layout::WriterName;
use super::remote::RemoteFs;
use crate::store::index::records::encode_blocks;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_wire::types::BlockMeta;

/// Number of used names that are skipped before that counts as a failure.
const NAMES_MAX: u32 = 16;

/// The writers of one directory.
#[derive(Debug)]
pub(super) struct Writers {
    directory: String,
    server_id: Arc<str>,
    max: usize,
    slots: Mutex<Vec<WriterSlot>>,
    /// Served in the order of arrival: all waiters are of one application.
    free: Arc<Semaphore>,
    files: AtomicU64,
}

#[derive(Debug, Clone, Copy, Default)]
struct WriterSlot {
    busy: bool,
    failures: u32,
    /// Length of its data file, or `None` before the first batch and after a failure.
    data_bytes: Option<u64>,
}

impl Writers {
    /// Creates the writers. At most `max` of them write at a time, and at least one.
    pub(super) fn new(directory: String, server_id: Arc<str>, max: usize) -> Arc<Self> {
        let max = max.clamp(1, Semaphore::MAX_PERMITS);
        let free = Arc::new(Semaphore::new(max));
        Arc::new(Self { directory, server_id, max, slots: Mutex::default(), free, files: AtomicU64::new(0) })
    }

    /// Waits for a free writer and acquires it. Prefers the lowest number, so that few files are
    /// created.
    pub(super) async fn take(self: &Arc<Self>) -> HdfsWriter {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        let mut slots = self.slots.lock();
        let free = slots.iter().position(|slot| !slot.busy);
        let index = free.unwrap_or_else(|| {
            slots.push(WriterSlot::default());
            slots.len() - 1
        });
        slots[index].busy = true;
        let WriterSlot { failures, data_bytes, .. } = slots[index];
        drop(slots);
        HdfsWriter {
            writers: Arc::clone(self),
            index,
            failures,
            data_bytes,
            torn: Vec::new(),
            _permit: permit,
        }
    }

    /// Waits for the active writers, and blocks new ones.
    pub(super) async fn hold(&self) -> PausedWriters {
        let all = u32::try_from(self.max).unwrap_or(u32::MAX);
        let permits = Arc::clone(&self.free).acquire_many_owned(all).await.ok();
        let slots = self.slots.lock();
        let pairs = slots.iter().enumerate().filter(|(_, slot)| slot.data_bytes.is_some());
        let in_use = pairs.map(|(index, slot)| self.name(index).files(slot.failures).1).collect();
        PausedWriters { in_use, _permits: permits }
    }

    /// Returns the number of files created so far.
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

/// Guard that blocks the writers of the directory. None is active while it exists.
#[derive(Debug)]
pub(super) struct PausedWriters {
    /// Index files that writers will append to. All of them are closed now.
    in_use: HashSet<String>,
    _permits: Option<OwnedSemaphorePermit>,
}

impl PausedWriters {
    /// Returns whether a writer continues this index file. Our other index files are abandoned.
    pub(super) fn uses(&self, index_name: &str) -> bool {
        self.in_use.contains(index_name)
    }
}

/// A writer in use by one batch.
#[derive(Debug)]
pub(super) struct HdfsWriter {
    writers: Arc<Writers>,
    index: usize,
    failures: u32,
    data_bytes: Option<u64>,
    /// Files with published blocks that have a failed append.
    torn: Vec<String>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for HdfsWriter {
    fn drop(&mut self) {
        let slot = WriterSlot { busy: false, failures: self.failures, data_bytes: self.data_bytes };
        self.writers.slots.lock()[self.index] = slot;
    }
}

impl HdfsWriter {
    /// Appends blocks whose bytes are `data`. After `Ok` a reader that lists the directory finds
    /// them. If the write fails or is dropped, the pair of files is abandoned.
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

    /// Returns the files that must be closed, so that readers find their earlier content.
    pub(super) fn take_torn(&mut self) -> Vec<String> {
        std::mem::take(&mut self.torn)
    }

    /// Creates a new pair of files.
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
        let mut records = Vec::new();
        let data_bytes = encode_blocks(blocks, 0, &mut records);
        fs.create(&index_path, vec![records.into()]).await?;
        self.writers.files.fetch_add(2, Ordering::Relaxed);
        Ok(data_bytes)
    }

    /// Appends to both files and closes them. `hsync` would save two NameNode calls per file, but
    /// cost a sync of a disk.
    async fn append(
        &self,
        fs: &dyn RemoteFs,
        base: u64,
        blocks: &[BlockMeta],
        data: Vec<Bytes>,
    ) -> Result<u64, StoreError> {
        let (data_path, index_path) = self.paths();
        let mut records = Vec::new();
        let data_bytes = encode_blocks(blocks, base, &mut records);
        fs.append(&data_path, data).await?;
        fs.append(&index_path, vec![records.into()]).await?;
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

    /// Returns the first number above those of all files of this writer in the directory.
    async fn next_free(&self, fs: &dyn RemoteFs) -> Result<u32, StoreError> {
        let entries = fs.list(&self.writers.directory).await?;
        let taken = entries.iter().filter_map(|entry| self.name().failures_of(&entry.name)).max();
        Ok(taken.unwrap_or(self.failures).max(self.failures).saturating_add(1))
    }
}
