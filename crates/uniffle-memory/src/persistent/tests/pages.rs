//! Pages of the block table: allocated with the first row of a chunk, freed with the last, and
//! charged.

use super::super::layout::ROW_BYTES;
use super::super::slots::{CHUNK_BYTES, UNCHARGED_CHUNKS};
use super::*;

/// Rows per chunk.
const PER_CHUNK: u64 = CHUNK_BYTES / ROW_BYTES;

fn tiny(memory: &Memory, partition: i32, ids: std::ops::Range<i64>) -> Result<(), crate::MemoryError> {
    let app = AppId::parse("app").unwrap();
    let ticket = memory.tickets().require(&app, 256 << 10, 1)?;
    let mut funds = memory.tickets().redeem(&app, ticket)?;
    let buffer = buffer(memory, 0, partition);
    let mut blocks = Vec::new();
    for id in ids {
        let mut fill = buffer.reserve(1, &mut funds)?;
        fill.write(&[7]);
        let (block_id, task_attempt_id) = (BlockId(id), TaskAttemptId(1));
        let meta = BlockMeta { block_id, task_attempt_id, length: 1, uncompressed_length: 1, crc: 0 };
        blocks.push((meta, fill));
    }
    buffer.commit(blocks, &mut funds).map(drop)
}

/// Returns the bytes of the row table that have pages.
fn resident_bytes(memory: &Memory) -> u64 {
    let geometry = table_geometry();
    let range = 8 * geometry.row_at(0)..8 * geometry.row_at(geometry.rows) / 4096 * 4096;
    let holes = table(memory).region().front_holes(range.clone()).unwrap();
    (range.len() - holes.iter().map(|hole| hole.len()).sum::<usize>()) as u64
}

fn release(memory: &Memory, partition: i32) {
    let buffer = buffer(memory, 0, partition);
    let batch = buffer.seal().unwrap();
    buffer.release(&batch);
}

#[test]
fn row_pages_are_allocated_and_freed_with_rows() {
    let memory = open(None);
    assert_eq!(resident_bytes(&memory), 0, "no row exists");
    tiny(&memory, 0, 0..1000).unwrap();
    assert_eq!(resident_bytes(&memory), 1000u64.div_ceil(PER_CHUNK) * CHUNK_BYTES);
    release(&memory, 0);
    assert_eq!((resident_bytes(&memory), memory.used_bytes()), (0, 0));
    tiny(&memory, 0, 0..1000).unwrap();
    drop(memory.forget(&key(0)));
    assert_eq!((resident_bytes(&memory), memory.used_bytes()), (0, 0));
}

/// One block of each chunk remains.
#[test]
fn pages_with_few_rows_are_charged_whole() {
    let memory = open(None);
    let chunks = 20u32;
    for chunk in 0..chunks {
        let first = 1000 * i64::from(chunk);
        tiny(&memory, 0, first..first + 1).unwrap();
        tiny(&memory, 1, first + 1..first + PER_CHUNK as i64).unwrap();
    }
    let before = memory.used_bytes();
    let all = u64::from(chunks) * CHUNK_BYTES;
    assert_eq!(resident_bytes(&memory), all);
    release(&memory, 1);
    assert_eq!(resident_bytes(&memory), all, "each chunk must have a row");
    let charged = all - UNCHARGED_CHUNKS * CHUNK_BYTES;
    let rows = u64::from(chunks) * ROW_BYTES;
    assert!(memory.used_bytes() >= charged, "only {} of {before} bytes are charged", memory.used_bytes());
    assert!(memory.shared.supply.lists.charged_bytes() >= charged + u64::from(chunks) * 64);
    // The next process finds the same pages.
    let file = memory.duplicate_for_successor().unwrap().unwrap();
    memory.release();
    let again = open(Some(file));
    again.register(&key(0), Distribution::Normal);
    let heap = again.heap().of(HeapKind::Partitions);
    assert_eq!(
        again.restore(&key(0), |_| Box::new(|_| false), heap, |_, ids| ids.len()),
        [(PartitionId(0), chunks as usize)]
    );
    assert_eq!(again.finish_restore().1, u64::from(chunks));
    assert_eq!(resident_bytes(&again), all);
    assert!(again.used_bytes() >= charged + rows);
    // Free slots are used before a page is allocated.
    tiny(&again, 1, 500_000..500_000 + PER_CHUNK as i64 - 1).unwrap();
    assert_eq!(resident_bytes(&again), all);
    release(&again, 0);
    release(&again, 1);
    assert_eq!((resident_bytes(&again), again.used_bytes()), (0, 0));
}

/// All memory is promised and the heap lends little: a send is refused before it gets unpaid pages.
#[test]
fn rows_without_room_for_pages_are_refused() {
    let config = MemoryConfig {
        heap_bytes: MIB,
        capacity_bytes: 16 * MIB,
        blocks_max: 200_000,
        ..config(Backing::Memfd)
    };
    let memory = Memory::open(&config, &owner(), None, &Registry::new()).unwrap();
    let lists = &memory.shared.supply.lists;
    let all = memory.budget().try_charge(memory.budget().free() - MIB).unwrap();
    let mut sent = 0;
    let refused = loop {
        match tiny(&memory, 0, 1000 * sent..1000 * (sent + 1)) {
            Ok(()) => sent += 1,
            Err(refused) => break refused,
        }
        let front = table(&memory).rows.lock().slots.with_pages().len() as u64 * CHUNK_BYTES;
        let records = memory.block_count() * 64;
        let paid = crate::admission::metadata_reserve::FREE_BYTES + lists.ceded_bytes();
        let paid = paid + memory.heap().of(HeapKind::Blocks).used() + UNCHARGED_CHUNKS * CHUNK_BYTES;
        assert!(
            front + records <= paid,
            "after {sent} sends {front} and {records} bytes are used, {paid} are paid"
        );
        assert!(sent < 150, "a send must be refused");
    };
    assert!(matches!(refused, crate::MemoryError::NoCapacity { .. }), "{refused:?}");
    drop((all, memory.forget(&key(0))));
    assert_eq!(memory.used_bytes(), 0);
}
