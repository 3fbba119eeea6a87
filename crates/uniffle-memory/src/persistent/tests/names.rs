//! Names of shuffles: registered during the recovery, without a slot, or unknown to the log.

use super::super::layout::NAME_WORDS;
use super::super::slots::CHUNK_BYTES;
use super::*;

pub(super) fn send_one(memory: &Memory, shuffle: i32, id: i64) {
    let mut funds = funds(memory, 100_000).unwrap();
    let buffer = buffer(memory, shuffle, 0);
    let mut fill = buffer.reserve(5000, &mut funds).unwrap();
    fill.write(&payload(id, 5000));
    let meta = BlockMeta {
        block_id: BlockId(id),
        task_attempt_id: TaskAttemptId(1),
        length: 5000,
        uncompressed_length: 1,
        crc: crc32fast::hash(&payload(id, 5000)),
    };
    buffer.commit(vec![(meta, fill)], &mut funds).unwrap();
}

/// Restores the shuffles that the log knows and returns their ids.
fn taken_over(memory: &Memory, shuffles: impl Iterator<Item = i32> + Clone) -> BTreeMap<i32, Vec<BlockId>> {
    shuffles.clone().for_each(|shuffle| drop(memory.register(&key(shuffle), Distribution::Normal)));
    let heap = memory.heap().of(HeapKind::Partitions);
    let restored = shuffles.filter_map(|shuffle| {
        let mut ids = memory.restore(&key(shuffle), |_| Box::new(|_| false), heap, |_, ids| ids);
        Some((shuffle, ids.pop()?.1))
    });
    let restored = restored.collect();
    memory.finish_restore();
    restored
}

/// The log knows a shuffle that the region does not, as after a kill during a purge. Its new name
/// is between existing names.
#[test]
fn name_allocated_during_a_start_stays_unique() {
    let memory = open(None);
    assert!(taken_over(&memory, 0..0).is_empty());
    let per_chunk = i32::try_from(CHUNK_BYTES / (8 * NAME_WORDS as u64)).unwrap();
    let all = 0..3 * per_chunk;
    all.clone().for_each(|shuffle| drop(memory.register(&key(shuffle), Distribution::Normal)));
    let gone = per_chunk..2 * per_chunk;
    gone.clone().for_each(|shuffle| drop(memory.forget(&key(shuffle))));
    let file = memory.duplicate_for_successor().unwrap().unwrap();
    send_one(&memory, 0, 7);
    memory.release();
    drop(memory);
    let (unknown, later) = (1000, 1001);
    let known = all.filter(|shuffle| !gone.contains(shuffle)).chain([unknown]);
    let memory = open(Some(file.try_clone().unwrap()));
    assert_eq!(taken_over(&memory, known.clone()), BTreeMap::from([(0, vec![BlockId(7)])]));
    send_one(&memory, unknown, 8);
    memory.register(&key(later), Distribution::Normal);
    send_one(&memory, later, 9);
    let expected =
        BTreeMap::from([(0, vec![BlockId(7)]), (unknown, vec![BlockId(8)]), (later, vec![BlockId(9)])]);
    memory.release();
    drop(memory);
    let memory = open(Some(file));
    assert_eq!(taken_over(&memory, known.chain([later])), expected);
}

#[test]
fn shuffle_without_slot_gets_one_later() {
    let memory = open(None);
    assert!(taken_over(&memory, 0..0).is_empty());
    memory.shared.supply.region.limit_pages(0);
    memory.register(&key(0), Distribution::Normal);
    memory.register(&key(1), Distribution::Normal);
    assert_eq!(memory.unprotected_shuffles(), 2);
    memory.protect_shuffles();
    assert_eq!(memory.unprotected_shuffles(), 2, "no slot is free yet");
    memory.shared.supply.region.limit_pages(usize::MAX);
    send_one(&memory, 0, 7);
    drop(buffer(&memory, 0, 0).seal());
    send_one(&memory, 0, 8);
    assert_eq!(rows_left(&memory), 0);
    memory.protect_shuffles();
    assert_eq!((memory.unprotected_shuffles(), rows_left(&memory)), (0, 2));
    send_one(&memory, 0, 9);
    drop(memory.forget(&key(1)));
    let file = memory.duplicate_for_successor().unwrap().unwrap();
    memory.release();
    drop(memory);
    let memory = open(Some(file));
    let ids = [7, 8, 9].map(BlockId).to_vec();
    assert_eq!(taken_over(&memory, 0..2), BTreeMap::from([(0, ids)]));
}

#[test]
fn purged_shuffle_gets_no_slot() {
    let memory = open(None);
    assert!(taken_over(&memory, 0..0).is_empty());
    memory.shared.supply.region.limit_pages(0);
    let shuffle = memory.register(&key(0), Distribution::Normal);
    memory.shared.supply.region.limit_pages(usize::MAX);
    drop(memory.forget(&key(0)));
    shuffle.protect();
    assert_eq!(memory.unprotected_shuffles(), 0);
    assert!(table(&memory).found_names().is_empty());
}

/// Opens the memory of a process that had a block of shuffle 0 and one of shuffle 1, and registers
/// only shuffle 0. `keeps` is false in a mutation that frees unknown shuffles.
fn knows_the_first(file: &OwnedFd, keeps: bool) -> Arc<Memory> {
    let memory = open(Some(file.try_clone().unwrap()));
    memory.register(&key(0), Distribution::Normal);
    let heap = memory.heap().of(HeapKind::Partitions);
    assert_eq!(memory.restore(&key(0), |_| Box::new(|_| false), heap, |_, ids| ids.len()).len(), 1);
    if keeps {
        assert_eq!(memory.keep_for_later(|unknown| *unknown == key(1)), 1);
    }
    memory.finish_restore();
    memory
}

/// The checks of [`unknown_shuffle_is_kept_until_it_ends`] must detect the mutation.
#[test]
fn start_that_frees_unknown_shuffles_is_noticed() {
    for keeps in [false, true] {
        let memory = open(None);
        assert!(taken_over(&memory, 0..0).is_empty());
        let file = memory.duplicate_for_successor().unwrap().unwrap();
        send_one(&memory, 0, 7);
        send_one(&memory, 1, 8);
        memory.release();
        drop(memory);
        let memory = knows_the_first(&file, keeps);
        assert_eq!(rows_left(&memory), if keeps { 2 } else { 1 });
        memory.release();
        drop(memory);
        let memory = open(Some(file));
        assert_eq!(taken_over(&memory, 0..2).contains_key(&1), keeps);
    }
}

#[test]
fn unknown_shuffle_is_kept_until_it_ends() {
    let memory = open(None);
    assert!(taken_over(&memory, 0..0).is_empty());
    let file = memory.duplicate_for_successor().unwrap().unwrap();
    send_one(&memory, 0, 7);
    send_one(&memory, 1, 8);
    memory.release();
    drop(memory);
    // Two starts in a row.
    for _ in 0..2 {
        let memory = knows_the_first(&file, true);
        assert!(memory.used_bytes() >= 10_000, "both blocks must be charged: {}", memory.used_bytes());
        assert_eq!(rows_left(&memory), 2);
        memory.release();
        drop(memory);
    }
    let memory = open(Some(file.try_clone().unwrap()));
    assert_eq!(taken_over(&memory, 0..2), BTreeMap::from([(0, vec![BlockId(7)]), (1, vec![BlockId(8)])]));
    memory.release();
    drop(memory);

    let ends: [fn(&Memory); 3] = [
        |memory| memory.forget_app(&key(1).app),
        |memory| drop(memory.register(&key(1), Distribution::Normal)),
        |memory| drop(memory.forget(&key(1))),
    ];
    for end in ends {
        let memory = knows_the_first(&copy(&file), true);
        end(&memory);
        assert_eq!(rows_left(&memory), 1, "the row of the known shuffle must stay");
        drop(memory.forget(&key(0)));
        assert_eq!((memory.used_bytes(), rows_left(&memory)), (0, 0));
    }
}
