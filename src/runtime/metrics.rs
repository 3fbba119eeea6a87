//! What the asynchronous runtime does, read from its own counters when metrics are gathered.

use std::collections::HashMap;

use prometheus::{Counter, IntGauge, IntGaugeVec, Registry};
use tokio::runtime::Handle;

use super::Tasks;
use crate::metrics::{self, clamped};

/// Gauges of the runtime that the worker was started in. Threads that belong to the TCP listener are not in them.
#[derive(Debug)]
pub struct RuntimeMetrics {
    handle: Handle,
    tasks: Tasks,
    running: IntGaugeVec,
    workers: IntGauge,
    queued: IntGauge,
    busy: Counter,
    parked: Counter,
    #[cfg(tokio_unstable)]
    blocking: Blocking,
}

/// The threads for disk calls.
#[cfg(tokio_unstable)]
#[derive(Debug)]
struct Blocking {
    threads: IntGauge,
    idle: IntGauge,
    queued: IntGauge,
}

impl RuntimeMetrics {
    /// Metrics of the current runtime and of `tasks`.
    ///
    /// # Errors
    /// A name that is taken in `registry`.
    pub fn new(tasks: Tasks, registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| -> prometheus::Result<Counter> {
            let counter = Counter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let queued = metrics::gauge(registry, "runtime_queue_depth", "tasks that wait for any thread")?;
        metrics::also(registry, &queued, "grpc_server_executor_blocking_queue_size")?;
        Ok(Self {
            handle: Handle::current(),
            tasks,
            running: metrics::gauge_vec(registry, "tasks_running", "tasks that have not ended", &["name"])?,
            workers: metrics::gauge(registry, "runtime_workers", "threads that run tasks")?,
            queued,
            busy: counter("runtime_busy_seconds_total", "time that threads spent in tasks, summed")?,
            parked: counter("runtime_park_total", "times that a thread had nothing to do")?,
            #[cfg(tokio_unstable)]
            blocking: Blocking {
                threads: metrics::gauge(registry, "runtime_blocking_threads", "threads for disk calls")?,
                idle: metrics::gauge(registry, "runtime_blocking_idle_threads", "of these, without work")?,
                queued: metrics::gauge(
                    registry,
                    "runtime_blocking_queue_depth",
                    "disk calls that wait for a thread",
                )?,
            },
        })
    }

    /// Brings them up to date.
    pub fn refresh(&self) {
        let mut counts: HashMap<&str, i64> = HashMap::new();
        for task in self.tasks.list() {
            *counts.entry(task.name).or_default() += 1;
        }
        self.running.reset();
        for (name, count) in counts {
            self.running.with_label_values(&[name]).set(count);
        }
        let runtime = self.handle.metrics();
        self.workers.set(clamped(runtime.num_workers()));
        self.queued.set(clamped(runtime.global_queue_depth()));
        let workers = 0..runtime.num_workers();
        let busy: f64 =
            workers.clone().map(|worker| runtime.worker_total_busy_duration(worker).as_secs_f64()).sum();
        advance(&self.busy, busy);
        #[expect(clippy::cast_precision_loss, reason = "a count for a chart")]
        advance(&self.parked, workers.map(|worker| runtime.worker_park_count(worker)).sum::<u64>() as f64);
        #[cfg(tokio_unstable)]
        {
            self.blocking.threads.set(clamped(runtime.num_blocking_threads()));
            self.blocking.idle.set(clamped(runtime.num_idle_blocking_threads()));
            self.blocking.queued.set(clamped(runtime.blocking_queue_depth()));
        }
    }
}

/// Brings `counter` to `total`, which never falls.
fn advance(counter: &Counter, total: f64) {
    counter.inc_by((total - counter.get()).max(0.0));
}
