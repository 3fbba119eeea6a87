//! Tests of the whole local store, with their shared fixtures.

#![expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "test data is small")]

mod directories;
mod faults;
mod full_disks;
mod hangs;
mod hints;
mod lifecycle;
mod log_compaction;
mod metadata;
mod model;
mod offload;
mod power;
mod reads;
mod removal;
mod restarts;
mod returned;
mod suite;
mod vanished;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use prometheus::Registry;

use super::directories::mounts::MOUNTS;
use super::*;
use crate::log::METADATA;
use crate::store::index::codec;
use crate::store::recovery::take_over::append;
use crate::store::removal::deletion_queue::drop_blocking;
use crate::store::{
    ChunkRead as _, DiskCondition, ExtentData, ExtentWrite, MaintainedTier as _, MetadataTier as _,
    Recovered, ServedTier as _, StoreError, StoreErrorKind, Tier, TierUsage, by_mount,
};
use uniffle_base::budget::Budget;
use uniffle_io::Disk;
use uniffle_io::buffers::{AlignedBuffer, HeapBuffers, READ_CHUNK_BYTES_MAX};
use uniffle_testkit::fault::{FaultDisk, Faults};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_wire::index::{FILLER_BLOCK_ID, IndexRecord, records};
use uniffle_wire::types::{AppId, BlockId, BlockMeta, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};

impl LocalStore {
    /// Writes a record of a shuffle to the metadata log.
    pub(crate) async fn append_metadata(
        &self,
        handle: &DiskShuffleHandle,
        content: &[u8],
    ) -> Result<(), StoreError> {
        append(&self.metadata, &handle.shuffle, Bytes::copy_from_slice(content)).await.map(drop)
    }

    /// Writes to the current incarnation of a shuffle.
    pub(crate) async fn write(
        &self,
        key: &ShuffleKey,
        extents: Vec<ExtentWrite>,
    ) -> Result<BatchSummary, StoreError> {
        let purged = || StoreError::new(StoreErrorKind::Purged, key.to_string());
        self.handle(key).ok_or_else(purged)?.write(extents).await
    }

    /// Purges a shuffle and removes its files.
    pub(crate) async fn purge(&self, key: &ShuffleKey) {
        drop_blocking(self.forget_shuffle(key).into_iter().collect()).await;
        self.remove_files(&key.app).await;
    }

    /// Purges all shuffles of an application and removes their files.
    pub(super) async fn purge_app(&self, app: &AppId) {
        let keys: Vec<_> =
            self.shuffles.iter().filter(|it| it.key().app == *app).map(|it| it.key().clone()).collect();
        drop_blocking(keys.iter().filter_map(|key| self.forget_shuffle(key)).collect()).await;
        self.remove_files(app).await;
    }

    /// Returns the published bytes of a partition.
    pub(super) fn partition_bytes(&self, key: &ShuffleKey, partition: PartitionId) -> u64 {
        self.view(key, partition).map_or(0, |view| view.bytes)
    }

    /// Sets the incarnation of the next registration.
    pub(in crate::store) fn count_from(&self, number: u64) {
        self.next_incarnation.store(number, Ordering::Relaxed);
    }
}

/// A memory disk with faults.
pub(super) struct TestDisk {
    pub(super) memory: MemoryDisk,
    pub(in crate::store) faults: Faults,
}

impl TestDisk {
    pub(in crate::store) fn new(name: &str) -> Self {
        Self { memory: MemoryDisk::new(name, None), faults: Faults::default() }
    }

    pub(in crate::store) fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(FaultDisk::new(Arc::new(self.memory.clone()), self.faults.clone()))
    }

    /// Returns the files of applications.
    pub(super) fn app_files(&self) -> Vec<PathBuf> {
        self.memory.files().into_iter().filter(|path| path.starts_with("apps")).collect()
    }

    /// Returns all directories below `apps`.
    pub(super) fn app_directories(&self) -> Vec<PathBuf> {
        let below = |path: &PathBuf| path.starts_with("apps") && path != Path::new("apps");
        self.memory.directories().into_iter().filter(below).collect()
    }
}

/// Opens a store on `disks`.
pub(super) async fn store_on(disks: &[TestDisk]) -> Arc<LocalStore> {
    open(disks.iter().map(TestDisk::disk).collect()).await.unwrap()
}

/// Creates two disks, a store on them, and a registered shuffle with `blocks` blocks, each in a
/// batch of its own.
pub(super) async fn two_disks_with_blocks(
    blocks: i64,
) -> ([TestDisk; 2], Arc<LocalStore>, ShuffleKey, DiskShuffleHandle) {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    for id in 0..blocks {
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
    }
    (disks, store, key, handle)
}

pub(in crate::store) async fn open(disks: Vec<Arc<dyn Disk>>) -> Result<Arc<LocalStore>, StoreError> {
    // Without the cache of index records every index read accesses the disk, where the faults are.
    let config = LocalConfig { index_cache_bytes: 0, ..LocalConfig::default() };
    open_with(config, disks).await
}

/// Opens a store on real disks, however full they are.
pub(super) async fn open_real(disks: Vec<Arc<dyn Disk>>) -> Result<Arc<LocalStore>, StoreError> {
    open_with(LocalConfig { index_cache_bytes: 0, ..roomy() }, disks).await
}

/// Configuration that ignores the fill level of the machine's disks.
pub(super) fn roomy() -> LocalConfig {
    LocalConfig { high_watermark: 1.0, low_watermark: 1.0, ..LocalConfig::default() }
}

pub(super) async fn open_with(
    config: LocalConfig,
    disks: Vec<Arc<dyn Disk>>,
) -> Result<Arc<LocalStore>, StoreError> {
    LocalStore::open(config, disks, &Budget::new(u64::MAX), &Registry::new()).await
}

/// Returns the ids of the readable blocks of a partition, sorted.
pub(in crate::store) async fn present(
    store: &LocalStore,
    key: &ShuffleKey,
    partition: PartitionId,
) -> Vec<u64> {
    let mut ids = Vec::new();
    store.visit_present(key, partition, &mut |id| ids.push(id)).await.unwrap();
    ids.sort_unstable();
    ids
}

/// State that a start recovered, with the records of shuffles.
pub(super) struct RecoveredRecords {
    pub(in crate::store) recovered: Recovered,
    pub(in crate::store) records: BTreeMap<ShuffleKey, Vec<Bytes>>,
}

impl std::ops::Deref for RecoveredRecords {
    type Target = Recovered;

    fn deref(&self) -> &Recovered {
        &self.recovered
    }
}

pub(super) async fn recover(store: &LocalStore) -> RecoveredRecords {
    let (mut recovered, mut records) = (store.take_recovered(), BTreeMap::<_, Vec<_>>::new());
    // A log that cannot be read to its end returns the records before the failure.
    while let Ok(Some((key, record))) = recovered.records.next().await {
        records.entry(key).or_default().push(record);
    }
    store.metadata.begun().await;
    RecoveredRecords { recovered, records }
}

pub(in crate::store) fn key(app: &str, shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
}

/// Returns the content of block `id`.
pub(super) fn payload(id: i64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (id as usize * 31 + at * 7 + at / 251) as u8).collect()
}

/// Creates an extent of blocks (id, length), in aligned memory or in one piece per block.
pub(in crate::store) fn extent(partition: i32, blocks: &[(i64, usize)], aligned: bool) -> ExtentWrite {
    let payloads: Vec<_> = blocks.iter().map(|(id, len)| payload(*id, *len)).collect();
    let metas = blocks.iter().zip(&payloads).map(|((id, len), bytes)| BlockMeta {
        block_id: BlockId(*id),
        task_attempt_id: TaskAttemptId(id % 7),
        length: *len as u32,
        uncompressed_length: *len as u32 * 2,
        crc: crc32fast::hash(bytes),
    });
    let data = if aligned {
        let mut buffer = AlignedBuffer::unpooled();
        payloads.iter().for_each(|bytes| assert_eq!(buffer.put(bytes), bytes.len()));
        buffer.pad();
        let bytes = buffer.freeze();
        let half = bytes.len() / 2 / 4096 * 4096;
        ExtentData::Aligned(vec![bytes.slice(..half), bytes.slice(half..)])
    } else {
        ExtentData::Pieces(payloads.iter().cloned().map(Bytes::from).collect())
    };
    let length = payloads.iter().map(|bytes| bytes.len() as u64).sum();
    ExtentWrite { partition: PartitionId(partition), blocks: metas.collect(), length, data }
}

pub(super) async fn index_of(
    store: &LocalStore,
    key: &ShuffleKey,
    partition: i32,
) -> Result<(Vec<IndexRecord>, u64), StoreError> {
    let mut read = store.index(key, PartitionId(partition))?;
    let mut bytes = Vec::new();
    while let Some(chunk) = read.chunks.next_chunk(&HeapBuffers).await? {
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(bytes.len() as u64, read.length);
    Ok((records(&bytes).collect(), read.data_length))
}

pub(super) async fn range_of(
    store: &LocalStore,
    key: &ShuffleKey,
    partition: i32,
    range: (u64, u32),
) -> Result<Vec<u8>, StoreError> {
    let mut read = store.data(key, PartitionId(partition), range.0, range.1)?.chunks;
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&HeapBuffers).await? {
        assert!(!chunk.is_empty() && chunk.len() <= READ_CHUNK_BYTES_MAX);
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(bytes.len(), range.1 as usize);
    Ok(bytes)
}

/// Reads a partition as a client does and checks every block. Returns the ids in order.
pub(super) async fn read_all(
    store: &LocalStore,
    key: &ShuffleKey,
    partition: i32,
) -> Result<Vec<i64>, StoreError> {
    let (records, data_length) = index_of(store, key, partition).await?;
    let mut ids = Vec::new();
    let mut at = 0;
    if data_length == 0 {
        assert!(records.is_empty());
        return Ok(ids);
    }
    let data = range_of(store, key, partition, (0, data_length as u32)).await?;
    for record in records {
        assert_eq!(record.offset, at, "records of the index must be contiguous");
        let bytes = &data[at as usize..][..record.length as usize];
        assert_eq!(bytes, payload(record.block_id, bytes.len()), "block {} has other bytes", record.block_id);
        assert_eq!(record.crc, i64::from(crc32fast::hash(bytes)));
        assert_eq!(record.uncompressed_length, record.length * 2);
        assert_eq!(record.task_attempt_id, record.block_id % 7);
        at += i64::from(record.length);
        ids.push(record.block_id);
    }
    assert_eq!(at as u64, data_length, "records and length must be of the same moment");
    Ok(ids)
}

/// Returns every copy of the metadata log with its disk.
pub(super) fn log_copies(disks: &[TestDisk]) -> Vec<(usize, PathBuf)> {
    let of = |(at, disk): (usize, &TestDisk)| {
        let all = disk.memory.files().into_iter().filter(|path| path.ends_with("log"));
        all.map(|path| (at, path)).collect::<Vec<_>>()
    };
    disks.iter().enumerate().flat_map(of).collect()
}

/// Returns the whole groups of all index logs by sequence, up to the first damage in each log.
pub(super) fn groups(disks: &[TestDisk]) -> Vec<codec::IndexGroup> {
    let mut found = Vec::new();
    for disk in disks {
        for path in disk.app_files().iter().filter(|path| path.extension().is_some_and(|it| it == "index")) {
            let content = disk.memory.content(path).unwrap();
            let mut rest = &content[..];
            while let Ok((group, bytes)) = codec::decode(rest) {
                found.push(group);
                rest = &rest[bytes..];
            }
        }
    }
    found.sort_by_key(|group| group.header.sequence);
    found
}

/// Runs maintenance, then asserts that purged shuffles left nothing: no file, no counted byte, no
/// write in flight.
pub(super) async fn assert_nothing_left(store: &LocalStore, disks: &[TestDisk]) {
    store.maintain_once().await;
    for disk in disks {
        let ours = disk.memory.files().into_iter().filter(|path| !path.starts_with(METADATA));
        assert_eq!(ours.collect::<Vec<_>>(), [MARKER, MOUNTS].map(PathBuf::from));
        assert_eq!(disk.app_directories(), Vec::<PathBuf>::new());
    }
    assert_eq!(store.used_bytes(), 0);
    assert_eq!(store.core.metrics.extents.get(), 0);
    assert_eq!(store.core.files.len(), 0);
    assert!(store.disks().iter().all(|disk| disk.in_flight_bytes == 0));
    assert_eq!(store.writer.staging.available(), store.core.config.staging_buffers(disks.len()));
}
