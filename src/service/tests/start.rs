//! Starts that recover damaged, missing or unreadable state.

use std::os::fd::OwnedFd;

use super::*;
use crate::clock::Instant;
use crate::log::{PartitionBlockIds, Record, RegistrationRecord, Report};
use crate::memory::{Backing, Owner};
use crate::store::{ExtentData, ExtentWrite, ServedTier as _};
use uniffle_base::budget::{Budget, HeapKind};
use uniffle_wire::types::{BlockId, BlockMeta, ShuffleId, ShuffleKey, TaskAttemptId};

const PARTITIONS: i32 = 64;
const BLOCK: u32 = 1000;

fn key() -> ShuffleKey {
    ShuffleKey::new(AppId::parse(APP).unwrap(), ShuffleId(0))
}

fn registration() -> Vec<u8> {
    let ranges = vec![(0, PARTITIONS - 1)];
    Record::Registration(RegistrationRecord { ranges, user: "ann".into(), ..RegistrationRecord::default() })
        .encode()
}

/// Returns a report with one block in each partition; its id is the partition's number.
fn report() -> Vec<u8> {
    let ids = |it: i32| PartitionBlockIds { partition: PartitionId(it), block_ids: vec![it.into()] };
    let partitions = (0..PARTITIONS).map(ids).collect();
    Record::Report(Report { bitmap_count: 1, task_attempt: 0, partitions, records: Vec::new() }).encode()
}

fn block(partition: i32, crc: u32) -> BlockMeta {
    let (block_id, task_attempt_id) = (BlockId(partition.into()), TaskAttemptId(0));
    BlockMeta { block_id, task_attempt_id, length: BLOCK, uncompressed_length: BLOCK, crc }
}

async fn store_on(disk: &Arc<dyn Disk>, extents: &Budget, registry: &Registry) -> Arc<LocalStore> {
    LocalStore::open(LocalConfig::default(), vec![Arc::clone(disk)], extents, registry).await.unwrap()
}

/// Returns the disk of an earlier process, which has written `records` of the shuffle and one block
/// in each of `partitions` partitions.
async fn left_on_disk(records: &[Vec<u8>], partitions: i32) -> Arc<dyn Disk> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("/disk", None));
    let store = store_on(&disk, &Budget::new(u64::MAX), &Registry::new()).await;
    let handle = store.register(&key());
    for record in records {
        store.append_metadata(&handle, record).await.unwrap();
    }
    let extent = |partition| ExtentWrite {
        partition: PartitionId(partition),
        blocks: vec![block(partition, 0)],
        length: BLOCK.into(),
        data: ExtentData::Pieces(vec![vec![7; BLOCK as usize].into()]),
    };
    if partitions > 0 {
        store.write(&key(), (0..partitions).map(extent).collect()).await.unwrap();
    }
    disk
}

fn memory_of(file: Option<OwnedFd>) -> Arc<Memory> {
    let owner = Owner { node: "node".to_owned(), boot: 1 };
    Memory::open(&memory_config(Backing::Memfd), &owner, file, &Registry::new()).unwrap()
}

/// Returns the memory of an earlier process with one block in each partition, which has other bytes
/// than were sent.
fn left_in_memory() -> Option<OwnedFd> {
    let memory = memory_of(None);
    let shuffle = memory.register(&key(), Distribution::Normal);
    memory.finish_restore();
    for partition in 0..PARTITIONS {
        let ticket = memory.tickets().require(&key().app, 2000, 1).unwrap();
        let mut funds = memory.tickets().redeem(&key().app, ticket).unwrap();
        let heap = memory.heap().of(HeapKind::Partitions);
        let buffer = shuffle.buffer(PartitionId(partition), heap).unwrap();
        let mut fill = buffer.reserve(BLOCK, &mut funds).unwrap();
        fill.write(&[7; BLOCK as usize]);
        buffer.commit(vec![(block(partition, 1), fill)], &mut funds).unwrap();
    }
    let file = memory.duplicate_for_successor().unwrap();
    memory.release();
    file
}

/// The next process, before it restores anything.
struct Next {
    store: Arc<LocalStore>,
    service: Arc<Service>,
    tasks: Tasks,
}

impl Next {
    async fn on(disk: &Arc<dyn Disk>, memory: &Arc<Memory>) -> Self {
        let (registry, tasks) = (Registry::new(), Tasks::new());
        let store = store_on(disk, memory.extents(), &registry).await;
        let flush = FlushConfig { limits: quiet(), ..FlushConfig::default() };
        let (m, s) = (Arc::clone(memory), Arc::clone(&store));
        let flusher = Flusher::start(flush, m, s, tasks.clone(), &registry).unwrap();
        let apps = Arc::new(AppRegistry::new(AppConfig::default(), memory.heap(), memory.answered()));
        let (m, f) = (Arc::clone(memory), Some(flusher));
        let service = Service::new(ServiceConfig::default(), apps, m, f, tasks.clone(), &registry).unwrap();
        Self { store, service, tasks }
    }

    async fn restore(&self) -> RestoreCounts {
        self.service.lifecycle.restore(self.store.take_recovered()).await
    }

    async fn stop(self) {
        self.tasks.cancel();
        self.tasks.drained().await;
    }
}

#[tokio::test]
async fn damage_found_during_recovery_is_reported() {
    let disk = left_on_disk(&[registration(), report()], 0).await;
    let memory = memory_of(left_in_memory());
    let next = Next::on(&disk, &memory).await;
    // Verifies buffers concurrently, as the flusher does.
    let (looked, is_going_on) = (Arc::clone(&memory), Arc::new(()));
    // The loop ends with this test, even if the test fails.
    let goes_on = Arc::downgrade(&is_going_on);
    let looks = tokio::task::spawn_blocking(move || {
        while goes_on.strong_count() > 0 {
            looked.buffers().iter().for_each(|buffer| buffer.verify());
        }
    });
    next.restore().await;
    memory.finish_restore();
    drop(is_going_on);
    looks.await.unwrap();
    memory.buffers().iter().for_each(|buffer| buffer.verify());
    let lost = || next.service.diagnostics.losses().losses.iter().map(|loss| loss.blocks).sum::<u64>();
    within_time("all damaged blocks are named", || lost() == u64::from(PARTITIONS.unsigned_abs())).await;
    next.stop().await;
}

/// The shuffle's blocks in memory are kept for a later start.
#[tokio::test]
async fn memory_of_an_unreadable_shuffle_is_kept() {
    let file = left_in_memory().unwrap();
    let memory = memory_of(Some(file.try_clone().unwrap()));
    let disk = left_on_disk(&[b"of a later version".to_vec()], 0).await;
    let next = Next::on(&disk, &memory).await;
    assert_eq!(next.restore().await.unregistered, 1);
    memory.finish_restore();
    next.stop().await;
    memory.release();
    drop(memory);

    let memory = memory_of(Some(file));
    let disk = left_on_disk(&[registration(), report()], 0).await;
    let next = Next::on(&disk, &memory).await;
    next.restore().await;
    let blocks = u64::from(PARTITIONS.unsigned_abs());
    assert_eq!(memory.finish_restore(), (blocks, blocks));
    next.stop().await;
}

/// Regression test: a stop waited for its whole time, because kept blocks are never flushed.
#[tokio::test]
async fn drain_does_not_wait_for_kept_blocks() {
    let memory = memory_of(left_in_memory());
    let disk = left_on_disk(&[b"of a later version".to_vec()], 0).await;
    let next = Next::on(&disk, &memory).await;
    next.restore().await;
    memory.finish_restore();
    let blocks = u64::from(PARTITIONS.unsigned_abs());
    assert_eq!((memory.block_count(), memory.contents()), (blocks, Vec::new()));
    let kept = memory.contents_with_kept().remove(0);
    assert_eq!((kept.shuffle, kept.blocks, kept.bytes), (key(), blocks, blocks * u64::from(BLOCK)));
    assert!(next.service.flusher().unwrap().drain(Instant::now()).await, "kept blocks count as unflushed");
    next.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unreadable_registration_is_left_for_a_later_start() {
    let disk = left_on_disk(&[b"of a later version".to_vec()], 3).await;
    let memory = memory_of(None);
    let next = Next::on(&disk, &memory).await;
    let restored = next.restore().await;
    assert_eq!((restored.shuffles, restored.unregistered), (0, 1));
    let incomplete = next.service.diagnostics.losses().incomplete;
    assert!(incomplete[0].reason.contains("cannot be recovered"), "{incomplete:?}");
    next.store.sweep().await;
    next.store.maintain_once().await;
    next.stop().await;
    let next = Next::on(&disk, &memory_of(None)).await;
    let shuffle = next.store.take_recovered().shuffles.remove(0);
    assert_eq!((shuffle.key, shuffle.present.len()), (key(), 3));
    next.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unreadable_report_refuses_results_but_serves_blocks() {
    let records = [registration(), report(), b"of a later version".to_vec()];
    let disk = left_on_disk(&records, PARTITIONS).await;
    let next = Next::on(&disk, &memory_of(None)).await;
    assert_eq!(next.restore().await.shuffles, 1);
    let report = next.service.diagnostics.losses();
    assert!(report.incomplete[0].reason.contains("cannot be recovered"), "{report:?}");
    assert!(report.losses.is_empty(), "{report:?}");
    next.store.sweep().await;
    assert!(next.store.index(&key(), PartitionId(3)).is_ok());
    next.stop().await;
}
