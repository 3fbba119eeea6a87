//! Cost of a flush besides the copy: encoding and checking index groups, and disk placement. Time
//! of a start above many blocks.
//!
//! Run: `cargo bench --bench store`.
//!
//! Figures: `benches/notes/criterion.md`.

#![allow(missing_docs, reason = "a benchmark")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use prometheus::Registry;
use uniffle_base::budget::Budget;
use uniffle_io::blocking::BlockingDisk;
use uniffle_wire::index::{IndexRecord, rebase};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, TaskAttemptId};
use uniffle_worker::store::disk::directories::placement::{DiskCandidate, choose};
use uniffle_worker::store::index::codec::{GroupExtent, GroupHeader, decode, encode};
use uniffle_worker::store::{DiskCondition, LocalConfig, LocalStore};
use uuid::Uuid;

fn blocks(count: i64) -> Vec<BlockMeta> {
    let block = |n| BlockMeta {
        block_id: BlockId(n),
        task_attempt_id: TaskAttemptId(n / 3),
        length: 14_336,
        uncompressed_length: 40_000,
        crc: 0x1234_5678,
    };
    (0..count).map(block).collect()
}

fn records(c: &mut Criterion) {
    let mut group = c.benchmark_group("index_record");
    let blocks = blocks(1000);
    group.throughput(Throughput::Elements(1000));
    group.bench_function("encode", |b| {
        b.iter(|| {
            let mut offset = 0;
            for block in &blocks {
                black_box(IndexRecord::new(block, offset).encode());
                offset += u64::from(block.length);
            }
        });
    });
    let mut bytes: Vec<u8> = blocks.iter().flat_map(|block| IndexRecord::new(block, 0).encode()).collect();
    group.bench_function("rebase", |b| b.iter(|| rebase(black_box(&mut bytes), 4096)));
    group.finish();
}

fn groups(c: &mut Criterion) {
    let header = GroupHeader { sequence: 1, incarnation: 1, disk: Uuid::nil(), file_number: 0 };
    let mut group = c.benchmark_group("index_group");
    for (partitions, per_partition) in [(1, 16_384), (256, 64), (16_384, 1)] {
        let blocks = blocks(per_partition);
        let extents: Vec<_> = (0..partitions)
            .map(|n| GroupExtent { partition: PartitionId(n), base: 0, data_offset: 0, blocks: &blocks })
            .collect();
        group.throughput(Throughput::Elements(16_384));
        let name = format!("{partitions}x{per_partition}");
        group.bench_function(BenchmarkId::new("encode", &name), |b| {
            b.iter(|| encode(&header, black_box(&extents)))
        });
        let encoded = encode(&header, &extents).bytes;
        group.bench_function(BenchmarkId::new("decode", &name), |b| b.iter(|| decode(black_box(&encoded))));
    }
    group.finish();
}

fn placement(c: &mut Criterion) {
    let disk = |n: u64| DiskCandidate {
        condition: match n {
            3 => DiskCondition::Broken,
            5 => DiskCondition::Full,
            _ => DiskCondition::Healthy,
        },
        free_bytes: 1u64 << (30 + n % 4),
        in_flight_bytes: n << 20,
        pace: None,
    };
    let disks: Vec<_> = (0..12).map(disk).collect();
    c.bench_function("placement_12_disks", |b| b.iter(|| choose(black_box(&disks), 1 << 20, &[])));
}

/// Measures the start that an upgrade waits for: 10 GB of 14 KiB blocks, with the index in the page
/// cache.
fn recovery(c: &mut Criterion) {
    const PARTITIONS: i32 = 64;
    const GROUPS: u64 = 153;
    const BLOCKS_PER_EXTENT: i64 = 73;
    let root = tempfile::tempdir().expect("a temp dir");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let config = LocalConfig { high_watermark: 1.0, low_watermark: 1.0, ..LocalConfig::default() };
    let open = || {
        let disk = Arc::new(BlockingDisk::new(root.path(), 4, 16));
        let (heap, registry) = (Budget::new(u64::MAX), Registry::new());
        let opening = LocalStore::open(config.clone(), vec![disk], &heap, &registry);
        runtime.block_on(opening).expect("a store")
    };
    let disk = open().disks()[0].uuid;

    let directory = root.path().join("apps/app/1.1");
    std::fs::create_dir_all(&directory).expect("a directory");
    let blocks = blocks(BLOCKS_PER_EXTENT);
    let length: u64 = blocks.iter().map(|block| u64::from(block.length)).sum();
    let (mut log, mut data_offset) = (Vec::new(), 0);
    for sequence in 0..GROUPS {
        let mut extent = |partition| {
            let at = data_offset;
            data_offset += length.next_multiple_of(4096);
            let partition = PartitionId(partition);
            GroupExtent { partition, base: sequence * length, data_offset: at, blocks: &blocks }
        };
        let extents: Vec<_> = (0..PARTITIONS).map(&mut extent).collect();
        let header = GroupHeader { sequence, incarnation: 1, disk, file_number: 0 };
        log.extend_from_slice(&encode(&header, &extents).bytes);
    }
    let data = std::fs::File::create(directory.join("0.data")).expect("a data log");
    data.set_len(data_offset).expect("a sparse file");
    std::fs::write(directory.join("1.index"), log).expect("an index log");

    let expected = GROUPS * BLOCKS_PER_EXTENT.unsigned_abs() * u64::from(PARTITIONS.unsigned_abs());
    c.bench_function("recovery_of_10_GB", |b| {
        b.iter(|| assert_eq!(open().take_recovered().blocks, expected));
    });
}

criterion_group!(benches, records, groups, placement, recovery);
criterion_main!(benches);
