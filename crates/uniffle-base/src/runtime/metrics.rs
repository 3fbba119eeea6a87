//! Metrics of the asynchronous runtime, read at each scrape: counters of tokio, the list of tasks
//! ([`Tasks`]) and pauses of the `clock`.

use std::collections::HashMap;

use prometheus::{Counter, GaugeVec, IntGauge, IntGaugeVec, Registry};
use tokio::runtime::Handle;

use super::Tasks;
use crate::{clock, metrics};

metrics::table! {
    struct RuntimeMetricTable {
        running: IntGaugeVec["name"] = "tasks_running", "Running tasks, by name";
        longest_poll: GaugeVec["name"] = "tasks_longest_poll_seconds",
            "CPU seconds of the longest poll since start, if 1 ms or more";
        threads: IntGauge = "runtime_workers", "Threads of the runtime";
        queued: IntGauge = "runtime_queue_depth",
            "Tasks waiting in the global queue", also "grpc_server_executor_blocking_queue_size";
        busy: Counter = "runtime_busy_seconds_total", "Seconds that threads spent in tasks, summed";
        paused: Counter = "runtime_paused_seconds_total",
            "Seconds in which the process did not run (stopped, swapped out, machine paused); excluded \
             from timeouts";
        parked: Counter = "runtime_park_total", "Times that a thread became idle";
    }
}

#[cfg(tokio_unstable)]
metrics::table! {
    /// Threads of tokio's blocking pool, which run disk calls and long computations.
    struct BlockingThreadMetrics {
        threads: IntGauge = "runtime_blocking_threads", "Threads for blocking work (disk calls, computations)";
        idle: IntGauge = "runtime_blocking_idle_threads", "Idle threads for blocking work";
        queued: IntGauge = "runtime_blocking_queue_depth", "Blocking work waiting for a thread";
    }
}

/// Metrics of the runtime that started the worker. Threads of the TCP listener are not included.
#[derive(Debug)]
pub struct RuntimeMetrics {
    handle: Handle,
    tasks: Tasks,
    table: RuntimeMetricTable,
    #[cfg(tokio_unstable)]
    blocking: BlockingThreadMetrics,
}

impl RuntimeMetrics {
    /// Registers metrics of the current runtime and of `tasks`.
    ///
    /// # Errors
    /// If a name is already registered in `registry`.
    pub fn new(tasks: Tasks, registry: &Registry) -> prometheus::Result<Self> {
        Ok(Self {
            handle: Handle::current(),
            tasks,
            table: RuntimeMetricTable::new(registry)?,
            #[cfg(tokio_unstable)]
            blocking: BlockingThreadMetrics::new(registry)?,
        })
    }

    /// Returns the documentation of the metrics.
    pub fn described() -> Vec<metrics::Description> {
        [
            RuntimeMetricTable::described(),
            #[cfg(tokio_unstable)]
            BlockingThreadMetrics::described(),
        ]
        .concat()
    }

    /// Updates all metrics.
    pub fn refresh(&self) {
        let mut counts: HashMap<&str, i64> = HashMap::new();
        for task in self.tasks.list() {
            *counts.entry(task.name).or_default() += 1;
        }
        self.table.running.reset();
        for (name, count) in counts {
            self.table.running.with_label_values(&[name]).set(count);
        }
        for (name, took) in self.tasks.longest_polls() {
            self.table.longest_poll.with_label_values(&[name]).set(took.as_secs_f64());
        }
        let runtime = self.handle.metrics();
        self.table.threads.set(metrics::clamped(runtime.num_workers()));
        self.table.queued.set(metrics::clamped(runtime.global_queue_depth()));
        let workers = 0..runtime.num_workers();
        let busy: f64 =
            workers.clone().map(|worker| runtime.worker_total_busy_duration(worker).as_secs_f64()).sum();
        raise_to(&self.table.busy, busy);
        raise_to(&self.table.paused, clock::paused().as_secs_f64());
        #[expect(clippy::cast_precision_loss, reason = "a count for a chart")]
        raise_to(
            &self.table.parked,
            workers.map(|worker| runtime.worker_park_count(worker)).sum::<u64>() as f64,
        );
        #[cfg(tokio_unstable)]
        {
            self.blocking.threads.set(metrics::clamped(runtime.num_blocking_threads()));
            self.blocking.idle.set(metrics::clamped(runtime.num_idle_blocking_threads()));
            self.blocking.queued.set(metrics::clamped(runtime.blocking_queue_depth()));
        }
    }
}

/// Raises `counter` to `total`, which never decreases.
fn raise_to(counter: &Counter, total: f64) {
    counter.inc_by((total - counter.get()).max(0.0));
}
