//! Cost of a block in memory: allocator, append (reserve, write, commit), read, and the extent of a
//! sealed batch.
//!
//! Run: `cargo bench --bench memory`. Append rounds write 8 MiB in requests of 64 blocks, seal and
//! release, so that the region is warm as in a running worker. `copy` is the baseline: the same
//! bytes and block size, copied into a warm 8 MiB buffer.
//!
//! Figures: `benches/notes/criterion.md`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use prometheus::Registry;
use uniffle_base::budget::HeapKind;
use uniffle_wire::types::{
    AppId, BlockId, BlockMeta, Distribution, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId,
};
use uniffle_worker::memory::region::Region;
use uniffle_worker::memory::{Budget, Buffer, Memory, MemoryConfig};

const ROUND_BYTES: usize = 8 << 20;
const REQUEST_BLOCKS: usize = 64;

fn memory() -> (Arc<Memory>, Arc<Buffer>, AppId) {
    let config = MemoryConfig {
        capacity_bytes: 256 << 20,
        read_capacity_bytes: 2 << 20,
        heap_bytes: 96 << 20,
        ticket_timeout: Duration::from_secs(300),
        tickets_max: 1000,
        blocks_max: 1_000_000,
        backing: Default::default(),
        ..MemoryConfig::default()
    };
    let memory = Memory::new(&config, &Registry::new()).expect("mapping 256 MiB");
    let app = AppId::parse("bench").expect("valid");
    let shuffle = memory.register(&ShuffleKey::new(app.clone(), ShuffleId(0)), Distribution::Normal);
    let buffer =
        shuffle.buffer(PartitionId(0), memory.heap().of(HeapKind::Partitions)).expect("there is heap");
    (memory, buffer, app)
}

fn append(memory: &Memory, buffer: &Buffer, app: &AppId, payload: &[u8]) {
    let blocks = ROUND_BYTES / payload.len();
    let length = u32::try_from(payload.len()).expect("small");
    let mut id = 0;
    for _ in 0..blocks / REQUEST_BLOCKS {
        let bytes = (payload.len() * REQUEST_BLOCKS) as u64;
        let ticket = memory.tickets().require(app, bytes, 1).expect("memory is recycled");
        let mut funds = memory.tickets().redeem(app, ticket).expect("own ticket");
        let mut request = Vec::with_capacity(REQUEST_BLOCKS);
        for _ in 0..REQUEST_BLOCKS {
            let mut fill = buffer.reserve(length, &mut funds).expect("within the ticket");
            fill.write(payload);
            id += 1;
            let (block_id, task_attempt_id) = (BlockId(id), TaskAttemptId(1));
            let meta = BlockMeta { block_id, task_attempt_id, length, uncompressed_length: length, crc: 0 };
            request.push((meta, fill));
        }
        buffer.commit(request, &mut funds).expect("not purged");
    }
}

fn release(buffer: &Buffer) {
    if let Some(batch) = buffer.seal() {
        buffer.release(&batch);
    }
}

fn walk(buffer: &Buffer) -> u64 {
    let (mut cursor, mut length) = (None, 0);
    loop {
        let read = buffer.read(cursor, 2 << 20, None);
        cursor = read.blocks.last().map(|block| block.block_id);
        length += read.length;
        if read.is_end {
            return length;
        }
    }
}

fn allocator(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocator");
    for (name, bytes) in [("4K", 4096usize), ("64K", 64 << 10), ("2M", 2 << 20)] {
        let region = Region::new(64 << 20).expect("mapping 64 MiB");
        let budget = Budget::new(64 << 20);
        group.bench_function(format!("alloc+free {name}"), |b| {
            b.iter(|| {
                let charge = budget.try_charge(bytes as u64).expect("free");
                black_box(region.allocate(bytes, charge)).expect("free");
            });
        });
    }
    group.finish();
}

fn appends(c: &mut Criterion) {
    for (name, len) in [("14K", 14 << 10), ("1K", 1 << 10)] {
        let mut group = c.benchmark_group(format!("append {name}"));
        let payload = vec![0x5Au8; len];
        let blocks = ROUND_BYTES / len / REQUEST_BLOCKS * REQUEST_BLOCKS;
        group.throughput(Throughput::Bytes((blocks * len) as u64));
        let mut warm = vec![0u8; blocks * len];
        group.bench_function("copy (floor)", |b| {
            b.iter(|| {
                for block in warm.chunks_exact_mut(len) {
                    block.copy_from_slice(black_box(&payload));
                }
            });
        });
        let (memory, buffer, app) = memory();
        group.bench_function("reserve+write+commit", |b| {
            b.iter(|| {
                append(&memory, &buffer, &app, &payload);
                release(&buffer);
            });
        });
        group.finish();
    }
}

fn reads(c: &mut Criterion) {
    let mut group = c.benchmark_group("read");
    for (name, len) in [("14K", 14 << 10), ("1K", 1 << 10)] {
        let (memory, buffer, app) = memory();
        append(&memory, &buffer, &app, &vec![1u8; len]);
        group.bench_function(format!("walk 8 MiB of {name} blocks in answers of 2 MiB"), |b| {
            b.iter(|| black_box(walk(&buffer)));
        });
        let batch = buffer.seal().expect("blocks");
        group.bench_function(format!("aligned extent of 8 MiB of {name} blocks"), |b| {
            b.iter(|| black_box(batch.extent(Distribution::Normal)));
        });
        drop(memory);
    }
    group.finish();
}

criterion_group!(benches, allocator, appends, reads);
criterion_main!(benches);
