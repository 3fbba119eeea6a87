//! Writers: each takes a task, sends its messages, reports its blocks, and takes the next task.
//!
//! The loop is closed by default: a message is sent after the response to the previous one. With a
//! rate, each message has a due time, from which latencies count. Invariant: the ledger has each
//! block of a task that reports once, however often it was sent. A failed report ends the run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use uniffle_wire::types::{PartitionId, ShuffleKey};

use crate::plan::{PlannedMessage, WorkPlan};
use crate::session::ClientSession;
use crate::stats::Stats;

/// The ids that a shuffle must return, by partition.
#[derive(Debug)]
pub(crate) struct ExpectedIds {
    partitions: Vec<Mutex<Vec<i64>>>,
}

impl ExpectedIds {
    pub(crate) fn new(partitions: u32) -> Self {
        Self { partitions: (0..partitions).map(|_| Mutex::default()).collect() }
    }

    fn add(&self, blocks: &BTreeMap<PartitionId, Vec<i64>>) {
        for (partition, ids) in blocks {
            self.partitions[index(*partition)].lock().extend_from_slice(ids);
        }
    }

    /// Returns the ids of a partition in ascending order.
    pub(crate) fn sorted(&self, partition: PartitionId) -> Vec<i64> {
        let mut ids = self.partitions[index(partition)].lock().clone();
        ids.sort_unstable();
        ids
    }
}

fn index(partition: PartitionId) -> usize {
    usize::try_from(partition.0).expect("planned partitions are not negative")
}

/// Amount and pace of the writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WriteOptions {
    pub(crate) writers: u32,
    pub(crate) tasks: u32,
    /// Total payload, without duplicates.
    pub(crate) total_bytes: u64,
    /// Time at which writing ends, whatever was written.
    pub(crate) until: Option<Instant>,
    /// Number of times that each message is sent, with the same ids.
    pub(crate) replicas: u32,
    /// Total payload bytes per second.
    pub(crate) rate: Option<f64>,
}

/// State that all writers of a phase share.
pub(crate) struct WritePhase {
    pub(crate) options: WriteOptions,
    pub(crate) plan: WorkPlan,
    pub(crate) key: ShuffleKey,
    pub(crate) sessions: Vec<Arc<ClientSession>>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) ledger: Arc<ExpectedIds>,
    pub(crate) next_task: AtomicU32,
    /// Bytes scheduled by the pace so far.
    pub(crate) paced_bytes: AtomicU64,
    pub(crate) begin: Instant,
}

/// Runs all writers until they are done or the first error occurs.
pub(crate) async fn run(phase: Arc<WritePhase>) -> anyhow::Result<()> {
    let mut writers = JoinSet::new();
    for writer in 0..phase.options.writers {
        writers.spawn(work(phase.clone(), writer));
    }
    while let Some(done) = writers.join_next().await {
        done??;
    }
    Ok(())
}

async fn work(phase: Arc<WritePhase>, writer: u32) -> anyhow::Result<()> {
    let session = &phase.sessions[usize::try_from(writer)? % phase.sessions.len()];
    loop {
        let task = phase.next_task.fetch_add(1, Ordering::Relaxed);
        if task >= phase.options.tasks || over(&phase) {
            return Ok(());
        }
        run_task(&phase, session, task).await?;
    }
}

fn over(phase: &WritePhase) -> bool {
    phase.options.until.is_some_and(|until| Instant::now() >= until)
}

async fn run_task(phase: &WritePhase, session: &ClientSession, task: u32) -> anyhow::Result<()> {
    let mut messages = phase.plan.messages_of(task);
    let mut remaining = share(phase.options.total_bytes, phase.options.tasks, task);
    let mut blocks: BTreeMap<PartitionId, Vec<i64>> = BTreeMap::new();
    let mut id = None;
    while remaining > 0 && !over(phase) {
        let message = messages.next_message(remaining);
        remaining = remaining.saturating_sub(message.payload_bytes);
        for _ in 0..phase.options.replicas {
            let due = pace(phase, &message).await;
            session.push(&phase.stats, &phase.key, &message, due).await?;
        }
        id = Some(message.task);
        for (partition, planned) in &message.partitions {
            blocks.entry(*partition).or_default().extend(planned.iter().map(|planned| planned.id));
        }
    }
    let Some(id) = id else { return Ok(()) };
    phase.ledger.add(&blocks);
    session.report(&phase.stats, &phase.key, id, blocks).await
}

/// Returns the share of task number `task` of `tasks` in `total`. All shares add up to `total`.
fn share(total: u64, tasks: u32, task: u32) -> u64 {
    let tasks = u64::from(tasks);
    total / tasks + u64::from(u64::from(task) < total % tasks)
}

/// Waits for the due time of `message`, and returns it.
async fn pace(phase: &WritePhase, message: &PlannedMessage) -> Instant {
    let Some(rate) = phase.options.rate else { return Instant::now() };
    let before = phase.paced_bytes.fetch_add(message.payload_bytes, Ordering::Relaxed);
    let due = phase.begin + Duration::from_secs_f64(before as f64 / rate);
    sleep_until(due).await;
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shares_sum_to_the_total() {
        for (total, tasks) in [(0, 3), (1, 3), (10, 3), (1_000_003, 7)] {
            assert_eq!((0..tasks).map(|task| share(total, tasks, task)).sum::<u64>(), total);
        }
    }

    #[test]
    fn ledger_sorts_ids_of_all_tasks() {
        let ledger = ExpectedIds::new(2);
        ledger.add(&BTreeMap::from([(PartitionId(1), vec![5, 3])]));
        ledger.add(&BTreeMap::from([(PartitionId(1), vec![4])]));
        assert_eq!(ledger.sorted(PartitionId(1)), [3, 4, 5]);
        assert!(ledger.sorted(PartitionId(0)).is_empty());
    }
}
