//! Selection of flush victims among 100,000 partitions, and bookkeeping of reported block ids.
//!
//! Run: `cargo bench --bench policy`. The selection runs on a runtime thread, so it must take only
//! a few milliseconds. The preceding scan of the buffers is not included.
//!
//! Figures: `benches/notes/criterion.md`.

#![allow(missing_docs, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uniffle_base::budget::Budget;
use uniffle_wire::types::PartitionId;
use uniffle_worker::app::{BlockIds, Price, Quota};
use uniffle_worker::flush::policy::{Candidate, Goal, Limits, MemoryUsage, flush_goal, victims};
use uniffle_worker::log::PartitionBlockIds;
use uniffle_worker::memory::Claimant;

const PARTITIONS: u64 = 100_000;

const LIMITS: Limits = Limits {
    high_watermark: 0.8,
    low_watermark: 0.2,
    single_buffer_bytes_max: 256 << 20,
    huge_partition_bytes: 20 << 30,
    huge_buffer_bytes_max: 128 << 20,
    huge_share_bytes: u64::MAX,
    in_flight_batches_max: 5,
    blocks_high: 30_000_000,
    blocks_low: 8_000_000,
};

/// Returns sizes of a skewed shuffle: one partition in a hundred is a hundred times larger.
fn candidates() -> Vec<Candidate> {
    let candidate = |n: u64| {
        let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let bytes = 4096 + mixed % 65_536;
        let bytes = if n.is_multiple_of(100) { bytes * 100 } else { bytes };
        Candidate {
            app: 0,
            charged_bytes: bytes,
            payload_bytes: bytes,
            blocks: bytes / 1024 + 1,
            received_bytes: bytes,
            in_flight_batches: usize::from(n.is_multiple_of(7)) * 5,
        }
    };
    (0..PARTITIONS).map(candidate).collect()
}

fn policy(c: &mut Criterion) {
    let candidates = candidates();
    let total: u64 = candidates.iter().map(|candidate| candidate.charged_bytes).sum();
    let apps = [Claimant { weight: 1, demand: total }];
    let mut group = c.benchmark_group("victims_of_100000");
    group.throughput(Throughput::Elements(PARTITIONS));
    for share in [1, 25, 75, 100] {
        let goal = Goal { bytes: total / 100 * share, blocks: 0 };
        group.bench_with_input(BenchmarkId::new("percent", share), &goal, |b, goal| {
            b.iter(|| victims(black_box(&candidates), &apps, *goal, &LIMITS));
        });
    }
    group.finish();

    let usage = MemoryUsage {
        capacity: 16 << 30,
        used: 15 << 30,
        reserved: 1 << 30,
        in_flight: 1 << 30,
        ..MemoryUsage::default()
    };
    c.bench_function("flush_goal", |b| b.iter(|| flush_goal(black_box(usage), &LIMITS)));
}

/// Measures a Spark job of 1,000 × 1,000 partitions in which a task reports a block per partition.
fn reports(c: &mut Criterion) {
    let report = |task: i64| -> Vec<_> {
        let ids = |id| PartitionBlockIds {
            partition: PartitionId(id),
            block_ids: vec![i64::from(id) << 22 | task << 2],
        };
        (0..1000).map(ids).collect()
    };
    let reports: Vec<_> = (0..1000).map(report).collect();
    let mut group = c.benchmark_group("reported_ids");
    group.throughput(Throughput::Elements(1_000_000));
    group.sample_size(10);
    group.bench_function("1000_reports_of_1000_partitions", |b| {
        b.iter(|| {
            let (heap, counted) = (Budget::new(1 << 30), Budget::new(u64::MAX));
            let mut ids = BlockIds::new(&Quota::new(u64::MAX), &heap, counted.empty_charge());
            for report in &reports {
                assert!(!ids.has_all(report));
                let Price { ids: count, bytes } = Price::of(report);
                let charge = heap.try_charge(bytes).expect("a GiB is enough");
                let mut paid = ids.pay(count, charge, counted.charge_unchecked(count)).expect("no bound");
                ids.begin(1).expect("always one bitmap");
                ids.insert(report, &mut paid);
            }
            ids
        });
    });
    group.finish();
}

criterion_group!(benches, policy, reports);
criterion_main!(benches);
