//! Heap use of partitions, lists and blocks, compared with their charges.

use super::*;

/// Counts the heap of each thread, unlike the system's allocator.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Returns the bytes that this thread has allocated and not freed.
fn held_bytes() -> u64 {
    use tikv_jemalloc_ctl::thread::{allocatedp, deallocatedp};
    allocatedp::read().unwrap().get().wrapping_sub(deallocatedp::read().unwrap().get())
}

#[test]
fn empty_partition_costs_at_most_200_bytes() {
    const COUNT: u64 = 10_000;
    let memory = memory(64 * MIB);
    let shuffle = memory.register(&key(), Distribution::Normal);
    let write_and_flush = |partition: u64| {
        let partition = PartitionId(i32::try_from(partition).unwrap());
        let buffer = shuffle.buffer(partition, partitions(&memory)).unwrap();
        put(&memory, &buffer, 1, 0, 100);
        put(&memory, &buffer, 2, 0, 5000);
        let batch = buffer.seal().unwrap();
        buffer.release(&batch);
    };
    let before = held_bytes();
    (0..COUNT).for_each(write_and_flush);
    let each = (held_bytes() - before) / COUNT;
    assert!((50..=200).contains(&each), "each partition takes {each} bytes");
    assert_eq!(partitions(&memory).used(), COUNT * PARTITION_BYTES);
    // Again: memory of a partition does not accumulate.
    (0..COUNT).for_each(write_and_flush);
    assert_eq!((held_bytes() - before) / COUNT, each);
    drop((memory.forget(&key()), shuffle));
    assert_empty(&memory);
}

#[test]
fn lists_and_blocks_use_at_most_their_charged_heap() {
    const COUNT: u64 = 1000;
    let memory = memory_of(256 * MIB, 1 << 20);
    let shuffle = memory.register(&key(), Distribution::Normal);
    let before = held_bytes();
    for blocks in [1, 2, 5, 9] {
        // Each partition gets a block in each of several sends. In the second round its list is
        // sealed.
        for partition in 0..COUNT {
            let buffer =
                shuffle.buffer(PartitionId(i32::try_from(partition).unwrap()), partitions(&memory)).unwrap();
            for id in 0..blocks {
                put(&memory, &buffer, 100 * blocks + id, id, 3000);
            }
            if blocks == 2 {
                buffer.seal().unwrap();
            }
        }
        let held = held_bytes() - before;
        let charged = partitions(&memory).used() + memory.shared.supply.lists.charged_bytes();
        assert!(held <= charged, "{blocks} blocks hold {held} bytes, {charged} are charged");
        assert!(held >= charged / 3, "{blocks} blocks hold {held} bytes, {charged} are charged");
    }
    drop((memory.forget(&key()), shuffle));
    assert_empty(&memory);
}

#[test]
fn tiny_blocks_use_at_most_their_charged_heap() {
    let memory = memory_of(64 * MIB, 1 << 20);
    let buffer = buffer(&memory);
    let before = held_bytes();
    for send in 0..20 {
        let mut funds = funds(&memory, 20_000);
        let blocks: Vec<_> =
            (0..20_000).map(|id| fill(&buffer, send * 20_000 + id, send, 1, &mut funds)).collect();
        buffer.commit(blocks, &mut funds).unwrap();
        let (held, lists) = (held_bytes() - before, &memory.shared.supply.lists);
        assert!(
            held <= lists.charged_bytes(),
            "{held} bytes are held, {} are charged",
            lists.charged_bytes()
        );
        assert!(lists.charged_bytes() <= lists.ceded_bytes() + (2 << 20));
    }
    assert!(memory.shared.supply.lists.ceded_bytes() >= 22 << 20);
    drop(memory.forget(&key()));
    drop(buffer);
    assert_empty(&memory);
}

#[test]
fn list_of_many_blocks_is_split_into_batches() {
    let memory = memory_of(64 * MIB, 1 << 20);
    let buffer = buffer(&memory);
    for send in 0..5 {
        let mut funds = funds(&memory, 20_000);
        let blocks: Vec<_> =
            (0..20_000).map(|id| fill(&buffer, send * 20_000 + id, send, 1, &mut funds)).collect();
        buffer.commit(blocks, &mut funds).unwrap();
    }
    assert_eq!(buffer.active_blocks(), 100_000);
    let batches: Vec<_> = std::iter::from_fn(|| buffer.seal()).collect();
    assert_eq!(batches.iter().map(|batch| batch.blocks()).collect::<Vec<_>>(), [40_000, 40_000, 20_000]);
    drop((batches, buffer));
    drop(memory.forget(&key()));
    assert_empty(&memory);
}

#[test]
fn partitions_beyond_the_heap_are_refused_with_a_reason() {
    let memory = memory(8 * MIB);
    let shuffle = memory.register(&key(), Distribution::Normal);
    let heap = partitions(&memory).child(3 * PARTITION_BYTES);
    for partition in [0, 1, 2, 0].map(PartitionId) {
        shuffle.buffer(partition, &heap).unwrap();
    }
    let refused = shuffle.buffer(PartitionId(3), &heap).unwrap_err().to_string();
    assert!(refused.contains("partitions") && refused.contains("memory_store.heap_capacity"), "{refused}");
    put(&memory, &shuffle.buffer(PartitionId(2), &heap).unwrap(), 1, 0, 100);
    drop((memory.forget(&key()), shuffle));
    assert_eq!(heap.used(), 0);
    assert_empty(&memory);
}
