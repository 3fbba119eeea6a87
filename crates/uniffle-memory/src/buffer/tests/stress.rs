//! Threads that send, flush, read and purge concurrently in a memory that is too small for them.

use std::collections::HashSet;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::time::Instant;

use super::*;

const WRITERS: u64 = 4;
const REQUESTS: u64 = 150;
const PARTITIONS: i32 = 3;

/// Generous, because the flusher competes with everything else on the machine.
const TICKET_DEADLINE: Duration = Duration::from_secs(60);

/// Gets and redeems a ticket. Waits for the flusher if needed.
fn wait_for_ticket(memory: &Memory, bytes: u64, partitions: usize) -> Reservation {
    let began = Instant::now();
    loop {
        match memory.tickets().require(&app(), bytes, partitions) {
            Ok(ticket) => return memory.tickets().redeem(&app(), ticket).unwrap(),
            Err(MemoryError::NoCapacity { .. }) => std::thread::yield_now(),
            Err(other) => panic!("{other}"),
        }
        assert!(began.elapsed() < TICKET_DEADLINE, "no ticket for {bytes} bytes, because nothing is flushed");
    }
}

/// Counts a running writer. The other threads continue until the last writer ended, even by a
/// panic.
struct Writing<'a>(&'a AtomicU64);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Sends a request of random blocks. Returns the acknowledged ids with their partitions, or `None`
/// if the shuffle was purged meanwhile.
fn send(memory: &Memory, random: &mut ChaCha8Rng, next: &AtomicI64) -> Option<Vec<(PartitionId, i64)>> {
    let lens: Vec<usize> = (0..random.random_range(1..20)).map(|_| block_len(random)).collect();
    let total: usize = lens.iter().sum();
    let mut funds = wait_for_ticket(memory, total as u64, PARTITIONS as usize);
    let shuffle = memory.shuffle(&key())?;
    let mut requests: Vec<_> = (0..PARTITIONS).map(|id| (PartitionId(id), Vec::new())).collect();
    for len in lens {
        let (partition, blocks) = &mut requests[random.random_range(0..PARTITIONS as usize)];
        let id = next.fetch_add(1, Ordering::Relaxed);
        let meta = meta(id, random.random_range(0..5), len);
        let mut fill =
            match shuffle.buffer(*partition, partitions(memory)).ok()?.reserve(meta.length, &mut funds) {
                Ok(fill) => fill,
                Err(MemoryError::Purged) => return None,
                Err(other) => panic!("a valid ticket failed: {other}"),
            };
        fill.write(&payload(id, len));
        if random.random_ratio(1, 10) {
            drop(fill);
        } else {
            blocks.push((meta, fill));
        }
    }
    let mut acknowledged = Vec::new();
    for (partition, blocks) in requests {
        let sent: Vec<_> = blocks.iter().map(|(meta, _)| (partition, meta.block_id.0)).collect();
        match shuffle.buffer(partition, partitions(memory)).ok()?.commit(blocks, &mut funds) {
            Ok(done) => assert_eq!(done.blocks, sent.len()),
            Err(MemoryError::Purged) => return None,
            Err(other) => panic!("{other}"),
        }
        acknowledged.extend(sent);
    }
    Some(acknowledged)
}

fn block_len(random: &mut ChaCha8Rng) -> usize {
    if random.random_ratio(1, 30) { random.random_range(1..600_000) } else { random.random_range(1..20_000) }
}

type Seen = Mutex<HashSet<(PartitionId, i64)>>;

/// Seals everything, checks it, "publishes" it and only then releases it.
fn flush(memory: &Memory, published: &Seen, distribution: Distribution) {
    for candidate in memory.candidates() {
        let Some(batch) = candidate.buffer.seal() else { continue };
        let extent = batch.extent(distribution);
        let ids = checked_ids(&extent);
        published.lock().extend(ids.into_iter().map(|id| (batch.partition(), id)));
        candidate.buffer.release(&batch);
    }
}

/// Walks one partition like a client. Every block acknowledged before must be in the walk or
/// published after it.
fn read(memory: &Memory, partition: PartitionId, acknowledged: &Seen, published: &Seen) {
    let before: Vec<_> = acknowledged.lock().iter().filter(|(of, _)| *of == partition).copied().collect();
    let Some(buffer) = memory.shuffle(&key()).and_then(|shuffle| shuffle.existing(partition)) else { return };
    let (mut cursor, mut seen) = (None, HashSet::new());
    loop {
        let read = buffer.read(cursor, 50_000, None);
        seen.extend(ids(&read));
        cursor = read.blocks.last().map(|block| block.block_id);
        if read.is_end {
            break;
        }
    }
    let published = published.lock();
    for block in before {
        assert!(seen.contains(&block.1) || published.contains(&block), "block {block:?} is in no tier");
    }
}

#[test]
fn every_acknowledged_block_is_in_a_tier_at_every_moment() {
    let memory = memory(16 * MIB);
    memory.register(&key(), Distribution::Normal);
    let (acknowledged, published) = (Seen::default(), Seen::default());
    let (next, writing) = (AtomicI64::new(0), AtomicU64::new(WRITERS));
    std::thread::scope(|scope| {
        for seed in 0..WRITERS {
            let (memory, next, acknowledged, writing) = (&memory, &next, &acknowledged, &writing);
            scope.spawn(move || {
                let _writing = Writing(writing);
                let mut random = ChaCha8Rng::seed_from_u64(seed);
                for _ in 0..REQUESTS {
                    let sent = send(memory, &mut random, next).expect("the shuffle exists");
                    acknowledged.lock().extend(sent);
                }
            });
        }
        scope.spawn(|| {
            let mut distributions = [Distribution::Normal, Distribution::LocalOrder].into_iter().cycle();
            while writing.load(Ordering::Acquire) > 0 {
                flush(&memory, &published, distributions.next().unwrap());
            }
        });
        scope.spawn(|| {
            let mut partitions = (0..PARTITIONS).cycle();
            while writing.load(Ordering::Acquire) > 0 {
                read(&memory, PartitionId(partitions.next().unwrap()), &acknowledged, &published);
            }
        });
    });
    flush(&memory, &published, Distribution::Normal);
    assert_eq!(*acknowledged.lock(), *published.lock(), "the published blocks must be the acknowledged ones");
    assert!(memory.candidates().is_empty());
    drop(memory.forget(&key()));
    assert_empty(&memory);
}

#[test]
fn purges_amid_sends_and_flushes_leave_nothing() {
    let memory = memory(8 * MIB);
    memory.register(&key(), Distribution::Normal);
    let published = Seen::default();
    let (next, writing) = (AtomicI64::new(0), AtomicU64::new(2));
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (memory, next, writing) = (&memory, &next, &writing);
            scope.spawn(move || {
                let _writing = Writing(writing);
                let mut random = ChaCha8Rng::seed_from_u64(100 + seed);
                for _ in 0..REQUESTS {
                    let _purged_or_not = send(memory, &mut random, next);
                }
            });
        }
        scope.spawn(|| {
            while writing.load(Ordering::Acquire) > 0 {
                flush(&memory, &published, Distribution::Normal);
            }
        });
        scope.spawn(|| {
            while writing.load(Ordering::Acquire) > 0 {
                drop(memory.forget(&key()));
                memory.register(&key(), Distribution::Normal);
            }
        });
    });
    drop(memory.forget(&key()));
    assert_empty(&memory);
}
