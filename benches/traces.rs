//! Cost of requesting a span for a call that is not traced, as all calls without a collector.
//!
//! Run: `cargo bench --bench traces`.
//!
//! Figures: `benches/notes/criterion.md`.

#![allow(missing_docs, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use uniffle_worker::telemetry::traces::Traces;

/// A client's header that is not sampled.
const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

fn begin(c: &mut Criterion) {
    let mut group = c.benchmark_group("begin");
    for (name, traces, parent) in [
        ("off", Traces::off(), None),
        ("off, with a parent", Traces::off(), Some(PARENT)),
        ("of one in a million", Traces::sampled(1e-6), None),
        ("of one in a million, with a parent", Traces::sampled(1e-6), Some(PARENT)),
    ] {
        group.bench_function(name, |b| b.iter(|| black_box(traces).begin("bench", black_box(parent))));
    }
    group.finish();
}

criterion_group!(benches, begin);
criterion_main!(benches);
