//! Buffers with all their parts, one behaviour per test. `model` runs random interleavings,
//! `promised` random sends with tickets, and `stress` threads. `heap` measures the heap.

use bytes::Bytes;
use prometheus::Registry;

use super::*;
use crate::admission::reservation::METADATA_BYTES;
use crate::buffer::list::SEGMENT_HEAP_BYTES;
use crate::{HeapKind, Memory, MemoryConfig, SealedData, SealedExtent};
use uniffle_wire::types::{AppId, Distribution, ShuffleId, ShuffleKey, TaskAttemptId};

mod heap;
mod model;
mod promised;
mod stress;

const MIB: u64 = 1 << 20;

fn memory(capacity_bytes: u64) -> Arc<Memory> {
    memory_of(capacity_bytes, 10_000)
}

fn memory_of(capacity_bytes: u64, blocks_max: u64) -> Arc<Memory> {
    let config = MemoryConfig {
        capacity_bytes,
        read_capacity_bytes: 2 * MIB,
        heap_bytes: 96 << 20,
        ticket_timeout: std::time::Duration::from_secs(300),
        tickets_max: 1000,
        blocks_max,
        backing: Default::default(),
        ..MemoryConfig::default()
    };
    Memory::new(&config, &Registry::new()).unwrap()
}

fn app() -> AppId {
    AppId::parse("app").unwrap()
}

fn key() -> ShuffleKey {
    ShuffleKey::new(app(), ShuffleId(0))
}

fn buffer(memory: &Memory) -> Arc<Buffer> {
    memory.register(&key(), Distribution::Normal).buffer(PartitionId(0), partitions(memory)).unwrap()
}

fn partitions(memory: &Memory) -> &Budget {
    memory.heap().of(HeapKind::Partitions)
}

fn funds(memory: &Memory, bytes: u64) -> Reservation {
    let ticket = memory.tickets().require(&app(), bytes, 1).unwrap();
    memory.tickets().redeem(&app(), ticket).unwrap()
}

/// Block contents are derived from the id, so that every reader can check them.
fn payload(id: i64, len: usize) -> Vec<u8> {
    let seed = id.wrapping_mul(31).to_le_bytes()[0];
    (0..len).map(|at| seed.wrapping_add((at * 7 + at / 251).to_le_bytes()[0])).collect()
}

fn meta(id: i64, task: i64, len: usize) -> BlockMeta {
    let length = u32::try_from(len).unwrap();
    let (block_id, task_attempt_id) = (BlockId(id), TaskAttemptId(task));
    BlockMeta { block_id, task_attempt_id, length, uncompressed_length: length * 2, crc: 9 }
}

fn fill(buffer: &Buffer, id: i64, task: i64, len: usize, funds: &mut Reservation) -> (BlockMeta, BlockFill) {
    let meta = meta(id, task, len);
    let mut fill = buffer.reserve(meta.length, funds).unwrap();
    // In uneven steps, as frames arrive.
    for step in payload(id, len).chunks(1000) {
        assert_eq!(fill.write(step), step.len());
    }
    assert_eq!((fill.write(b"more"), fill.remaining()), (0, 0));
    (meta, fill)
}

fn put(memory: &Memory, buffer: &Buffer, id: i64, task: i64, len: usize) -> CommitOutcome {
    let mut funds = funds(memory, len as u64);
    let block = fill(buffer, id, task, len, &mut funds);
    buffer.commit(vec![block], &mut funds).unwrap()
}

fn joined(data: &[Bytes]) -> Vec<u8> {
    data.concat()
}

/// Checks the bytes of a read and returns its ids.
fn ids(read: &MemoryRead) -> Vec<i64> {
    let data = joined(&read.data);
    assert_eq!(data.len() as u64, read.length);
    check_blocks(&read.blocks, &data);
    read.blocks.iter().map(|block| block.block_id.0).collect()
}

fn check_blocks(blocks: &[BlockMeta], data: &[u8]) {
    let mut rest = data;
    for block in blocks {
        let (bytes, after) = rest.split_at(block.length as usize);
        assert!(bytes == payload(block.block_id.0, bytes.len()), "block {} has other bytes", block.block_id);
        rest = after;
    }
    assert!(rest.iter().all(|byte| *byte == 0), "only padding may follow the last block");
}

/// Checks bytes and alignment of an extent and returns its ids.
fn checked_ids(extent: &SealedExtent) -> Vec<i64> {
    let total: u64 = extent.blocks.iter().map(|block| u64::from(block.length)).sum();
    match &extent.data {
        SealedData::Aligned(pieces) => {
            for piece in pieces {
                assert_eq!((piece.as_ptr().addr() % 4096, piece.len() % 4096), (0, 0));
            }
            let data = joined(pieces);
            assert_eq!(data.len() as u64, total.next_multiple_of(4096));
            check_blocks(&extent.blocks, &data);
        }
        SealedData::Pieces(pieces) => {
            let data = joined(pieces);
            assert_eq!(data.len() as u64, total);
            check_blocks(&extent.blocks, &data);
        }
    }
    extent.blocks.iter().map(|block| block.block_id.0).collect()
}

fn is_aligned(extent: &SealedExtent) -> bool {
    matches!(extent.data, SealedData::Aligned(_))
}

/// Asserts that every counter is zero and the region is whole.
fn assert_empty(memory: &Memory) {
    assert_eq!((memory.used_bytes(), memory.pre_allocated_bytes()), (0, 0));
    assert_eq!((memory.in_flight_bytes(), memory.block_count()), (0, 0));
    let region = &memory.shared.supply.region;
    assert_eq!(region.free_bytes(), region.capacity_bytes());
}

#[test]
fn block_is_visible_only_after_commit() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let mut funds = funds(&memory, 1000);
    let block = fill(&buffer, 1, 1, 1000, &mut funds);
    assert!(buffer.read(None, 1, None).blocks.is_empty() && buffer.seal().is_none());
    let done = buffer.commit(vec![block], &mut funds).unwrap();
    assert_eq!((done.blocks, done.bytes, done.duplicate_blocks), (1, 1000, 0));
    assert_eq!(ids(&buffer.read(None, 1, None)), [1]);
    assert_eq!((buffer.active_bytes(), buffer.block_count(), memory.block_count()), (1000, 1, 1));
    drop(funds);
    assert_eq!(memory.used_bytes(), 4096 + METADATA_BYTES + LIST_BYTES);
    drop(memory.forget(&key()));
    assert_empty(&memory);
}

#[test]
fn blocks_of_any_size_span_segments() {
    let memory = memory(64 * MIB);
    let buffer = buffer(&memory);
    let sizes = [1, 4095, 4096, 4097, 100_000, 1 << 20, 3, (5 << 20) + 1, 2 << 20];
    for (id, len) in (0..).zip(sizes) {
        put(&memory, &buffer, id, 0, len);
    }
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), (0..9).collect::<Vec<_>>());
    let batch = buffer.seal().unwrap();
    let extent = batch.extent(Distribution::Normal);
    assert!(is_aligned(&extent));
    assert_eq!(checked_ids(&extent).len(), 9);
    assert_eq!((batch.bytes(), batch.blocks()), (sizes.iter().sum::<usize>() as u64, 9));
    buffer.release(&batch);
    drop((batch, extent));
    assert_empty(&memory);
}

#[test]
fn payload_beyond_the_ticket_is_refused() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let mut funds = funds(&memory, 1000);
    let first = buffer.reserve(600, &mut funds).unwrap();
    assert_eq!(
        buffer.reserve(401, &mut funds).unwrap_err(),
        MemoryError::TicketOverspent { requested: 401, remaining: 400 }
    );
    drop((first, funds));
    drop(memory.forget(&key()));
    assert_empty(&memory);
}

#[test]
fn ticket_for_all_memory_is_usable_completely() {
    let memory = memory(8 * MIB);
    let (shuffle, heap) = (memory.register(&key(), Distribution::Normal), partitions(&memory));
    let partitions = 64;
    let bytes = 8 * MIB - partitions * 4096;
    let ticket = memory.tickets().require(&app(), bytes, 64).unwrap();
    let mut funds = memory.tickets().redeem(&app(), ticket).unwrap();
    let each = bytes / partitions;
    for partition in 0..64 {
        let buffer = shuffle.buffer(PartitionId(partition), heap).unwrap();
        let (a, b) = (usize::try_from(each / 3).unwrap(), usize::try_from(each - each / 3).unwrap());
        let blocks = vec![fill(&buffer, 1, 1, a, &mut funds), fill(&buffer, 2, 1, b, &mut funds)];
        buffer.commit(blocks, &mut funds).unwrap();
    }
    assert_eq!(funds.remaining_bytes(), 0);
    drop(funds);
    for partition in 0..64 {
        let read = shuffle.existing(PartitionId(partition)).unwrap().read(None, u64::MAX, None);
        assert_eq!(ids(&read), [1, 2]);
    }
    drop(shuffle);
    drop(memory.forget(&key()));
    assert_empty(&memory);
}

#[test]
fn space_is_not_reserved_ahead_when_memory_is_short() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    put(&memory, &buffer, 1, 0, 1 << 20);
    let _hog = memory.budget().try_charge(memory.budget().free() - 8192).unwrap();
    put(&memory, &buffer, 2, 0, 100);
    let heap = METADATA_BYTES + SEGMENT_HEAP_BYTES;
    assert_eq!(memory.budget().free(), 8192 - 4096 - heap, "the smallest segment must be charged");
}

#[test]
fn reader_pins_only_the_segments_it_reads() {
    let memory = memory(64 * MIB);
    let buffer = buffer(&memory);
    put(&memory, &buffer, 1, 0, 100);
    put(&memory, &buffer, 2, 0, 8 << 20);
    let small = buffer.read(None, 1, None);
    let batch = buffer.seal().unwrap();
    buffer.release(&batch);
    drop(batch);
    assert_eq!((ids(&small), memory.used_bytes()), (vec![1], 4096));
    drop(small);
    assert_empty(&memory);
}

/// Deduplication by block id, also while the first copy is being flushed.
#[test]
fn resent_blocks_are_deduplicated_also_in_flight() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    put(&memory, &buffer, 1, 0, 5000);
    let again = put(&memory, &buffer, 1, 0, 5000);
    assert_eq!((again.blocks, again.duplicate_blocks, again.duplicate_bytes), (0, 1, 5000));
    let batch = buffer.seal().unwrap();
    assert!(!is_aligned(&batch.extent(Distribution::Normal)), "the duplicate must leave a dead range");
    let used = memory.used_bytes();
    assert_eq!(put(&memory, &buffer, 1, 0, 5000).duplicate_blocks, 1);
    buffer.drop_dead();
    assert_eq!((memory.used_bytes(), memory.block_count()), (used, 1));
    let mut funds = funds(&memory, 200);
    let twice = vec![fill(&buffer, 2, 0, 100, &mut funds), fill(&buffer, 2, 0, 100, &mut funds)];
    assert_eq!(buffer.commit(twice, &mut funds).unwrap().duplicate_blocks, 1);
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), [1, 2]);
    buffer.release(&batch);
    assert_eq!(
        put(&memory, &buffer, 1, 0, 10).blocks,
        1,
        "the id of a released block must be accepted again"
    );
    drop((batch, funds));
    drop(memory.forget(&key()));
    drop(buffer);
    assert_empty(&memory);
}

/// Seals a batch with block 2. Block 1 of its chain is written and not committed.
fn seal_before_commit(
    buffer: &Buffer,
    funds: &mut Reservation,
) -> ((BlockMeta, BlockFill), Arc<SealedBatch>) {
    let late = fill(buffer, 1, 5, 5000, funds);
    let early = fill(buffer, 2, 5, 5000, funds);
    buffer.commit(vec![early], funds).unwrap();
    (late, buffer.seal().unwrap())
}

#[test]
fn closed_batch_moves_late_fills_to_the_next_list() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let mut funds = funds(&memory, 20_000);
    let (late, batch) = seal_before_commit(&buffer, &mut funds);
    let extent = batch.extent(Distribution::Normal);
    assert!(!is_aligned(&extent));
    assert_eq!(checked_ids(&extent), [2]);
    let after = fill(&buffer, 3, 5, 10, &mut funds);
    buffer.commit(vec![after, late], &mut funds).unwrap();
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), [2, 3, 1]);
    buffer.release(&batch);
    drop((batch, extent));
    assert_eq!(
        ids(&buffer.read(Some(BlockId(3)), u64::MAX, None)),
        [1],
        "a stray block must outlive its batch"
    );
    let strays = buffer.seal().unwrap();
    assert_eq!(checked_ids(&strays.extent(Distribution::Normal)), [3, 1]);
    assert_eq!(checked_ids(&strays.extent(Distribution::LocalOrder)), [3, 1]);
    buffer.release(&strays);
    drop((strays, funds));
    assert_empty(&memory);
}

#[test]
fn sealed_batch_admits_blocks_of_its_chain_until_its_write() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let mut funds = funds(&memory, 20_000);
    let (late, batch) = seal_before_commit(&buffer, &mut funds);
    let resent = fill(&buffer, 2, 5, 5000, &mut funds);
    let done = buffer.commit(vec![late, resent], &mut funds).unwrap();
    assert_eq!((done.blocks, done.duplicate_blocks), (1, 1));
    assert_eq!((buffer.active_blocks(), batch.blocks(), batch.bytes()), (0, 2, 10_000));
    assert_eq!(
        ids(&buffer.read(None, u64::MAX, None)),
        [2, 1],
        "blocks must be in the order of their commits"
    );
    let extent = batch.extent(Distribution::Normal);
    assert!(is_aligned(&extent), "the chain must be complete");
    assert_eq!(checked_ids(&extent), [1, 2]);
    buffer.release(&batch);
    drop((batch, extent, funds));
    drop(memory.forget(&key()));
    assert_empty(&memory);
}

#[test]
fn commit_order_is_read_order_and_chain_order_is_extent_order() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let mut funds = funds(&memory, 20_000);
    let one = fill(&buffer, 1, 1, 5000, &mut funds);
    let two = fill(&buffer, 2, 2, 5000, &mut funds);
    let three = fill(&buffer, 3, 1, 5000, &mut funds);
    buffer.commit(vec![two], &mut funds).unwrap();
    buffer.commit(vec![three, one], &mut funds).unwrap();
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), [2, 3, 1]);
    let batch = buffer.seal().unwrap();
    let normal = batch.extent(Distribution::Normal);
    assert!(is_aligned(&normal), "a late block must not make the chain incomplete");
    assert_eq!(checked_ids(&normal), [1, 2, 3]);
    let sorted = batch.extent(Distribution::LocalOrder);
    assert!(!is_aligned(&sorted));
    assert_eq!(checked_ids(&sorted), [3, 1, 2], "blocks must be sorted by task attempt, then by commit");
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), [2, 3, 1], "reads must keep the order of commits");
}

#[test]
fn sorted_blocks_are_aligned_in_local_order_too() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    for (id, task) in [(9, 1), (8, 1), (7, 4)] {
        put(&memory, &buffer, id, task, 3000);
    }
    let extent = buffer.seal().unwrap().extent(Distribution::LocalOrder);
    assert!(is_aligned(&extent));
    assert_eq!(checked_ids(&extent), [9, 8, 7]);
}

#[test]
fn aborted_sends_release_their_segments() {
    let memory = memory(64 * MIB);
    let buffer = buffer(&memory);
    put(&memory, &buffer, 1, 0, 100);
    let used = memory.used_bytes();
    for _ in 0..100 {
        let mut funds = funds(&memory, 8 * MIB);
        let mut block = buffer.reserve(8 << 20, &mut funds).unwrap();
        block.write(&[7; 100_000]);
    }
    assert_eq!(memory.candidates().len(), 1, "the scan must drop dead segments");
    // The first segment still has the live block; its dead part stays until the flush.
    assert_eq!(memory.used_bytes(), used);
    put(&memory, &buffer, 2, 0, 100);
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), [1, 2]);
    assert_eq!(checked_ids(&buffer.seal().unwrap().extent(Distribution::Normal)), [1, 2]);
    drop(memory.forget(&key()));
    drop(buffer);
    assert_empty(&memory);
}

#[test]
fn reads_follow_cursor_limit_and_filter() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let empty = buffer.read(Some(BlockId(7)), 100, None);
    assert!(empty.is_end && empty.blocks.is_empty() && buffer.read(None, 0, None).is_end);
    for (id, task) in [(1, 10), (2, 20), (3, 10)] {
        put(&memory, &buffer, id, task, 100);
    }
    let batch = buffer.seal().unwrap();
    for (id, task) in [(4, -1), (5, 10)] {
        put(&memory, &buffer, id, task, 100);
    }
    let read = |after: Option<i64>, limit| buffer.read(after.map(BlockId), limit, None);
    assert_eq!(ids(&read(None, 0)), [1], "a limit of zero must return one block");
    assert_eq!((ids(&read(None, 100)), read(None, 100).is_end), (vec![1], false));
    assert_eq!(ids(&read(None, 101)), [1, 2]);
    assert_eq!((ids(&read(Some(2), 300)), read(Some(2), 300).is_end), (vec![3, 4, 5], false));
    assert_eq!((ids(&read(Some(2), 301)), read(Some(2), 301).is_end), (vec![3, 4, 5], true));
    let last = read(Some(5), 100);
    assert!(last.blocks.is_empty() && last.is_end);
    assert_eq!(ids(&read(Some(99), 100)), [1], "an unknown cursor must start from the head");
    let filtered = |ids: &[u64]| Treemap::from_iter(ids.iter().copied());
    assert_eq!(ids(&buffer.read(None, u64::MAX, Some(&filtered(&[10])))), [1, 3, 5]);
    assert_eq!(ids(&buffer.read(Some(BlockId(1)), 1, Some(&filtered(&[20, 10])))), [2]);
    assert_eq!(
        ids(&buffer.read(None, u64::MAX, Some(&filtered(&[u64::MAX])))),
        [4],
        "task ids must be compared as unsigned numbers"
    );
    let none = buffer.read(None, 0, Some(&filtered(&[])));
    assert!(none.blocks.is_empty() && none.is_end);
    buffer.release(&batch);
    assert_eq!(ids(&read(Some(2), 1)), [4], "a read must continue although the block of its cursor is gone");
    let whole = read(None, u64::MAX);
    assert_eq!((ids(&whole), whole.data.len()), (vec![4, 5], 1), "adjacent blocks must be one piece");
}

#[test]
fn purged_buffer_refuses_blocks_and_is_empty() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let shuffle = memory.shuffle(&key()).unwrap();
    put(&memory, &buffer, 1, 0, 100);
    let batch = buffer.seal().unwrap();
    put(&memory, &buffer, 2, 0, 100);
    let mut funds = funds(&memory, 5000);
    let block = fill(&buffer, 3, 0, 100, &mut funds);
    drop(memory.forget(&key()));
    assert_eq!(buffer.reserve(1, &mut funds).unwrap_err(), MemoryError::Purged);
    assert_eq!(buffer.commit(vec![block], &mut funds).unwrap_err(), MemoryError::Purged);
    assert!(buffer.read(None, 100, None).blocks.is_empty() && buffer.seal().is_none());
    for partition in [0, 1].map(PartitionId) {
        assert_eq!(shuffle.buffer(partition, partitions(&memory)).unwrap_err(), MemoryError::Purged);
    }
    assert!(memory.shuffle(&key()).is_none() && memory.candidates().is_empty());
    buffer.release(&batch);
    assert_eq!(
        memory.in_flight_bytes(),
        batch.charged_bytes(),
        "the bytes must stay charged until the flush ends"
    );
    drop((batch, funds));
    assert_empty(&memory);
    let shuffle = memory.register(&key(), Distribution::Normal);
    let again = shuffle.buffer(PartitionId(0), partitions(&memory)).unwrap();
    assert_eq!(put(&memory, &again, 1, 0, 100).blocks, 1);
}

#[tokio::test]
async fn block_limit_refuses_and_wakes_the_flusher() {
    let memory = memory(64 * MIB);
    let buffer = buffer(&memory);
    let mut funds = funds(&memory, 20_000);
    let blocks: Vec<_> = (0..9999).map(|id| fill(&buffer, id, 0, 1, &mut funds)).collect();
    buffer.commit(blocks, &mut funds).unwrap();
    let two = vec![fill(&buffer, -5, 0, 1, &mut funds), fill(&buffer, -6, 0, 1, &mut funds)];
    assert_eq!(buffer.commit(two, &mut funds).unwrap_err(), MemoryError::TooManyBlocks { max: 10_000 });
    memory.pressure().notified().await;
    assert_eq!(buffer.block_count(), 9999);
    let one = fill(&buffer, -7, 0, 1, &mut funds);
    assert_eq!(buffer.commit(vec![one], &mut funds).unwrap().blocks, 1);
}

#[test]
fn send_pays_once_for_blocks_of_all_partitions() {
    let memory = memory(64 * MIB);
    let shuffle = memory.register(&key(), Distribution::Normal);
    let mut funds = funds(&memory, 1000);
    shuffle.pay_for_blocks(4, &mut funds).unwrap();
    assert_eq!((memory.block_count(), funds.paid_blocks()), (4, 4));
    for partition in [1, 2] {
        let buffer = shuffle.buffer(PartitionId(partition), partitions(&memory)).unwrap();
        let blocks = vec![fill(&buffer, partition.into(), 0, 10, &mut funds)];
        assert_eq!(buffer.commit(blocks, &mut funds).unwrap().blocks, 1);
    }
    assert_eq!((memory.block_count(), funds.paid_blocks()), (4, 2));
    drop(funds);
    assert_eq!(memory.block_count(), 2);
}

#[test]
fn chain_of_four_gigabytes_rotates() {
    let memory = memory(8 << 30);
    let buffer = buffer(&memory);
    put(&memory, &buffer, 1, 0, 10);
    let mut funds = funds(&memory, 6 << 30);
    // Never written, so never resident.
    let fills: Vec<_> = (0..8).map(|_| buffer.reserve(512 << 20, &mut funds).unwrap()).collect();
    put(&memory, &buffer, 2, 0, 10);
    assert_eq!((buffer.active_bytes(), buffer.active_blocks(), buffer.in_flight_batches()), (20, 2, 0));
    assert_eq!(ids(&buffer.read(None, u64::MAX, None)), [1, 2]);
    let (first, second) = (buffer.seal().unwrap(), buffer.seal().unwrap());
    assert!(buffer.seal().is_none());
    assert_eq!(checked_ids(&first.extent(Distribution::Normal)), [1]);
    assert_eq!(checked_ids(&second.extent(Distribution::Normal)), [2]);
    assert_eq!((buffer.active_bytes(), buffer.in_flight_bytes(), buffer.in_flight_batches()), (0, 20, 2));
    drop((fills, funds));
    buffer.release(&first);
    buffer.release(&second);
    drop((first, second));
    buffer.drop_dead();
    assert_empty(&memory);
}

#[test]
fn metrics_show_live_values() {
    let registry = Registry::new();
    let config = MemoryConfig {
        capacity_bytes: 8 * MIB,
        read_capacity_bytes: 2 * MIB,
        heap_bytes: 96 << 20,
        ticket_timeout: std::time::Duration::ZERO,
        tickets_max: 10,
        blocks_max: 10,
        backing: Default::default(),
        ..MemoryConfig::default()
    };
    let memory = Memory::new(&config, &registry).unwrap();
    let buffer = buffer(&memory);
    put(&memory, &buffer, 1, 0, 100);
    put(&memory, &buffer, 1, 0, 100);
    let _batch = buffer.seal().unwrap();
    memory.tickets().require(&app(), 1000, 1).unwrap();
    memory.tickets().require(&app(), 1000, 1).unwrap();
    let _buffer = memory.read_pool().try_acquire(10).unwrap();
    let value = |name: &str| {
        memory.refresh_metrics();
        let families = registry.gather();
        let metric = &families.iter().find(|family| family.name() == name).unwrap().get_metric()[0];
        metric.get_gauge().get_value() + metric.get_counter().get_value()
    };
    let (stored, lists) = (4096.0 + 64.0 + 896.0, 64.0 + 896.0);
    assert_eq!((value("memory_used"), value("memory_lists_bytes")), (stored, lists));
    assert_eq!(value("allocated_buffer_size"), 2.0 * (1000.0 + 4096.0));
    assert_eq!(value("used_buffer_size"), stored + 2.0 * (1000.0 + 4096.0));
    assert_eq!(value("in_flush_buffer_size"), stored);
    assert_eq!(value("total_in_memory_block_count"), 1.0);
    assert_eq!(value("read_used_buffer_size"), 4096.0);
    assert_eq!(value("total_duplicate_blocks"), 1.0);
    assert_eq!(value("memory_allocated_tickets_num"), 2.0);
    assert_eq!(memory.expire_tickets(uniffle_base::clock::Instant::now()), 2);
    assert_eq!(value("total_evict_timeout_tickets_num"), 2.0);
    assert_eq!(value("memory_allocated_tickets_num"), 0.0);
    assert!(Memory::new(&config, &registry).is_err(), "a registry accepted two memories");
}

#[test]
fn ids_are_those_of_all_unreleased_blocks() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let ids = || {
        let mut ids = buffer.ids();
        ids.sort_unstable();
        ids
    };
    assert!(ids().is_empty());
    put(&memory, &buffer, 1, 0, 10);
    put(&memory, &buffer, 2, 0, 10);
    let first = buffer.seal().unwrap();
    put(&memory, &buffer, 3, 0, 10);
    let second = buffer.seal().unwrap();
    put(&memory, &buffer, 4, 0, 10);
    assert_eq!(ids(), [1, 2, 3, 4]);
    // Batches may be released in any order.
    buffer.release(&second);
    assert_eq!(ids(), [1, 2, 4]);
    buffer.release(&first);
    assert_eq!(ids(), [4]);
    drop((first, second));
    buffer.release(&buffer.seal().unwrap());
    assert!(ids().is_empty());
}
