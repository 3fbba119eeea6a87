//! Explains why a job is slow: one application's path through the worker, from its account and its
//! partitions.
//!
//! An explanation is computed on request, and once when an application is removed, so that a job
//! that has just failed can still be explained. The last [`FINISHED_MAX`] are kept. Pure functions
//! decide which numbers become a sentence ([`findings`]).

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use parking_lot::Mutex;
use serde::Serialize;

use crate::app::{App, STAGES, StageSum, WaitStage};
use crate::memory::Memory;

use super::statistics::AppStatistics;
use crate::service::losses::{IncompleteShuffle, ShuffleLoss, incomplete_of, losses_of};
use crate::service::quota::QuotaUse;

/// Number of explanations kept of removed applications. Without losses, each has a few KiB.
const FINISHED_MAX: usize = 64;

/// Number of partitions listed, the largest first.
const TOP_PARTITIONS: usize = 10;

/// Maximum number of losses listed.
const LOSSES_MAX: usize = 100;

/// Whether an application is registered, or why it was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Presence {
    /// The application is registered.
    Known,
    /// It unregistered, or an operator purged it.
    Unregistered,
    /// It expired without a heartbeat.
    Expired,
}

/// Waits of one application, and the findings from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// Application id.
    pub app: String,
    pub user: String,
    /// Whether the application is registered, or why it was removed.
    pub presence: Presence,
    /// Time since the first registration (until the removal).
    pub age_seconds: f64,
    /// Findings as sentences; never empty.
    pub findings: Vec<String>,
    /// Time per stage, in the order in which a block passes the stages.
    pub stages: Vec<StageView>,
    pub bytes: Bytes,
    /// True if the object store fails.
    pub object_store_is_failing: bool,
    /// True if all data directories are full.
    pub all_disks_full: bool,
    /// Retried and failed operations.
    pub retries: Retries,
    /// Configured quotas with the usage of the application and its user.
    pub quotas: Vec<QuotaUse>,
    /// Shuffles registered now.
    pub shuffles: usize,
    /// Partitions registered now.
    pub partitions: u64,
    /// Size of the largest partition divided by the mean of those with data.
    pub skew: f64,
    /// The largest partitions, by payload received.
    pub top_partitions: Vec<TopPartition>,
    /// Lost blocks.
    pub losses: Vec<ShuffleLoss>,
    /// Shuffles whose results are refused because reports may be missing.
    pub incomplete: Vec<IncompleteShuffle>,
}

/// Totals of one stage. Times of concurrent tasks add up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageView {
    /// Name of the stage.
    pub stage: &'static str,
    /// Number of entries.
    pub count: u64,
    /// Payload bytes, where known.
    pub bytes: u64,
    /// Sum of all durations.
    pub total_seconds: f64,
    /// Median duration, to a factor of two. Longer ones than 67 s count as 67 s.
    pub median_seconds: f64,
    /// 99th percentile of the durations, with the same limits.
    pub p99_seconds: f64,
    pub longest_seconds: f64,
}

/// Payload of an application.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bytes {
    /// Total bytes received, including removed shuffles.
    pub received: u64,
    pub in_memory: u64,
    /// Peak of the bytes found in memory.
    pub in_memory_peak: u64,
    /// Mean time that a byte stayed in memory.
    pub mean_seconds_in_memory: f64,
    pub on_local_disks: u64,
    pub in_object_store: u64,
    pub local_files: u64,
    /// Total bytes read from memory.
    pub read_from_memory: u64,
    /// Total bytes read from disks and the object store, including indexes.
    pub read_from_disks: u64,
}

/// Retried and failed operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Retries {
    pub tickets_granted: u64,
    /// Tickets refused or queued because the memory was full; clients retry refused ones.
    pub tickets_refused_memory: u64,
    /// Tickets refused because one partition filled its share.
    pub tickets_refused_partition: u64,
    /// Sends that were refused or failed.
    pub sends_failed: u64,
    /// Blocks received twice.
    pub duplicate_blocks: u64,
    /// Payload of the duplicates.
    pub duplicate_bytes: u64,
    /// Failed writes of batches to any tier; each was retried.
    pub flushes_retried: u64,
}

/// One of the largest partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TopPartition {
    pub shuffle: i32,
    /// Partition id.
    pub partition: i32,
    /// Payload received.
    pub received_bytes: u64,
    /// Payload in memory.
    pub in_memory_bytes: u64,
}

/// Explanations of removed applications.
#[derive(Debug, Default)]
pub(in crate::service) struct FinishedApps(Mutex<VecDeque<Arc<Explanation>>>);

impl FinishedApps {
    pub(in crate::service) fn push(&self, explanation: Explanation) {
        let mut finished = self.0.lock();
        if finished.len() >= FINISHED_MAX {
            finished.pop_front();
        }
        finished.push_back(Arc::new(explanation));
    }

    pub(in crate::service) fn find(&self, app: &str) -> Option<Arc<Explanation>> {
        self.0.lock().iter().rev().find(|finished| finished.app == app).map(Arc::clone)
    }

    /// Returns all explanations, the latest first.
    pub(in crate::service) fn all(&self) -> Vec<Arc<Explanation>> {
        self.0.lock().iter().rev().map(Arc::clone).collect()
    }
}

/// Condition of the tiers below memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StorageCondition {
    pub(super) object_store_is_failing: bool,
    pub(super) all_disks_full: bool,
}

/// Returns the explanation of `app`.
pub(super) fn explanation(
    app: &App,
    presence: Presence,
    statistics: &AppStatistics,
    quotas: Vec<QuotaUse>,
    memory: &Memory,
    storage: StorageCondition,
) -> Explanation {
    let account = &app.account;
    let sum = |stage| account.sum(stage);
    let disk_read = sum(WaitStage::DiskRead);
    let received = statistics.received_bytes;
    let mut explanation = Explanation {
        app: app.id().to_string(),
        user: app.client.user(),
        presence,
        age_seconds: app.activity.age().as_secs_f64(),
        findings: Vec::new(),
        stages: STAGES.iter().map(|stage| view(*stage, sum(*stage))).collect(),
        bytes: Bytes {
            received,
            in_memory: statistics.in_memory_bytes,
            in_memory_peak: account.memory_peak_bytes().max(statistics.in_memory_bytes),
            mean_seconds_in_memory: account.mean_time_in_memory(received).as_secs_f64(),
            on_local_disks: statistics.local_bytes.saturating_sub(statistics.object_bytes),
            in_object_store: statistics.object_bytes,
            local_files: statistics.local_files,
            read_from_memory: account.memory_reads.bytes(),
            read_from_disks: disk_read.bytes,
        },
        object_store_is_failing: storage.object_store_is_failing,
        all_disks_full: storage.all_disks_full,
        retries: Retries {
            tickets_granted: account.tickets_granted.count(),
            tickets_refused_memory: sum(WaitStage::TicketWait).count,
            tickets_refused_partition: sum(WaitStage::PartitionWait).count,
            sends_failed: account.sends_failed.count(),
            duplicate_blocks: account.duplicates.count(),
            duplicate_bytes: account.duplicates.bytes(),
            flushes_retried: account.flush_retries.count(),
        },
        quotas,
        shuffles: app.shuffles().len(),
        partitions: statistics.partitions,
        skew: statistics.skew(),
        top_partitions: top_partitions(app, memory),
        losses: losses_of(app, LOSSES_MAX),
        incomplete: incomplete_of(app).into_iter().take(LOSSES_MAX).collect(),
    };
    explanation.findings = findings(&explanation);
    if presence != Presence::Known {
        // The removal of the application frees its data.
        let bytes = &mut explanation.bytes;
        (bytes.in_memory, bytes.on_local_disks, bytes.in_object_store, bytes.local_files) = (0, 0, 0, 0);
        explanation.top_partitions.iter_mut().for_each(|partition| partition.in_memory_bytes = 0);
    }
    explanation
}

fn top_partitions(app: &App, memory: &Memory) -> Vec<TopPartition> {
    let mut top = Vec::new();
    for shuffle in app.shuffles() {
        let Some(buffers) = memory.shuffle(shuffle.key()) else { continue };
        top.extend(buffers.all().iter().map(|buffer| TopPartition {
            shuffle: shuffle.key().shuffle.0,
            partition: buffer.partition().0,
            received_bytes: buffer.received_bytes(),
            in_memory_bytes: buffer.in_memory_bytes(),
        }));
        keep_largest(&mut top);
    }
    top
}

fn keep_largest(top: &mut Vec<TopPartition>) {
    top.sort_unstable_by_key(|it| (Reverse(it.received_bytes), it.shuffle, it.partition));
    top.truncate(TOP_PARTITIONS);
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

fn name(stage: WaitStage) -> &'static str {
    match stage {
        WaitStage::TicketWait => "ticket_wait",
        WaitStage::PartitionWait => "partition_wait",
        WaitStage::Receive => "receive",
        WaitStage::FlushQueue => "flush_queue",
        WaitStage::FlushWrite => "flush_write",
        WaitStage::DiskRead => "disk_read",
        WaitStage::Answer => "answer",
    }
}

fn view(stage: WaitStage, sum: StageSum) -> StageView {
    StageView {
        stage: name(stage),
        count: sum.count,
        bytes: sum.bytes,
        total_seconds: sum.total.as_secs_f64(),
        median_seconds: sum.median.as_secs_f64(),
        p99_seconds: sum.p99.as_secs_f64(),
        longest_seconds: sum.longest.as_secs_f64(),
    }
}

/// Share of the application's lifetime above which a wait becomes a finding.
const WAIT_SHARE: f64 = 0.05;
/// Duration above which a wait in the flush queue or for a disk becomes a finding.
const SLOW_DISK: Duration = Duration::from_secs(1);
/// Ratio of the largest partition to the mean above which it becomes a finding.
const SKEW: f64 = 10.0;

/// Returns the findings, the worst first. Pure.
fn findings(it: &Explanation) -> Vec<String> {
    let stage = |wanted: WaitStage| it.stages.iter().find(|stage| stage.stage == name(wanted));
    let total = |wanted| stage(wanted).map_or(0.0, |stage| stage.total_seconds);
    let p99 = |wanted| stage(wanted).map_or(0.0, |stage| stage.p99_seconds);
    let share = |wanted| if it.age_seconds > 0.0 { total(wanted) / it.age_seconds } else { 0.0 };
    let slow = SLOW_DISK.as_secs_f64();
    let mut found = Vec::new();
    if let Some(IncompleteShuffle { shuffle, reason, .. }) = it.incomplete.first() {
        let more = it.incomplete.len() - 1;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        found.push(format!(
            "results of shuffle {shuffle}{more} are refused because reports may be missing: {reason}"
        ));
    }
    if !it.losses.is_empty() {
        let blocks: u64 = it.losses.iter().map(|loss| loss.blocks).sum();
        found.push(format!("{blocks} blocks are lost; their readers fail and Spark reruns the map tasks"));
    }
    if it.object_store_is_failing && it.bytes.in_object_store > 0 {
        let bytes = size(it.bytes.in_object_store);
        found.push(format!("the object store with {bytes} of the application fails; their readers wait"));
    }
    for quota in it.quotas.iter().filter(|quota| quota.refused > 0) {
        let QuotaUse { quota, max, used, refused, .. } = quota;
        let [max, used] =
            [*max, *used].map(|n| if quota.ends_with("_disk") { size(n) } else { n.to_string() });
        found.push(format!("{refused} requests were refused by {quota} = {max}, {used} in use"));
    }
    if share(WaitStage::PartitionWait) >= WAIT_SHARE {
        let waited = total(WaitStage::PartitionWait);
        found.push(format!(
            "writers waited {waited:.1} s because a huge partition filled its memory share; the data is \
             skewed, or app_config.partition_limit_memory_backpressure_ratio is too small"
        ));
    }
    if share(WaitStage::TicketWait) >= WAIT_SHARE {
        let waited = total(WaitStage::TicketWait);
        let cause = if it.all_disks_full {
            "all disks are full, so memory is not flushed"
        } else {
            "the disks are slower than the writers, or memory_store.capacity is too small"
        };
        found.push(format!("writers waited {waited:.1} s for memory; {cause}"));
    }
    if it.retries.flushes_retried > 0 {
        found.push(format!(
            "{} writes of batches to a tier failed and were retried",
            it.retries.flushes_retried
        ));
    }
    if p99(WaitStage::FlushQueue) >= slow {
        let p99 = p99(WaitStage::FlushQueue);
        let cause = if it.all_disks_full { "all disks are full" } else { "the disks are too slow" };
        found.push(format!("batches wait up to {p99:.1} s for a flush worker; {cause}"));
    }
    if p99(WaitStage::DiskRead) >= slow {
        found.push(format!("reads wait up to {:.1} s for disks", p99(WaitStage::DiskRead)));
    }
    if it.skew >= SKEW {
        found.push(format!("the largest partition is {:.0} times as large as the mean", it.skew));
    }
    if it.retries.sends_failed > 0 {
        found.push(format!("{} sends were refused or aborted", it.retries.sends_failed));
    }
    if found.is_empty() {
        found.push("no findings on this worker".to_owned());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explanation() -> Explanation {
        Explanation {
            app: "app".to_owned(),
            user: "user".to_owned(),
            presence: Presence::Known,
            age_seconds: 100.0,
            findings: Vec::new(),
            stages: STAGES.iter().map(|stage| view(*stage, StageSum::default())).collect(),
            bytes: Bytes {
                received: 0,
                in_memory: 0,
                in_memory_peak: 0,
                mean_seconds_in_memory: 0.0,
                on_local_disks: 0,
                in_object_store: 0,
                local_files: 0,
                read_from_memory: 0,
                read_from_disks: 0,
            },
            object_store_is_failing: false,
            all_disks_full: false,
            retries: Retries {
                tickets_granted: 0,
                tickets_refused_memory: 0,
                tickets_refused_partition: 0,
                sends_failed: 0,
                duplicate_blocks: 0,
                duplicate_bytes: 0,
                flushes_retried: 0,
            },
            quotas: Vec::new(),
            shuffles: 1,
            partitions: 1,
            skew: 1.0,
            top_partitions: Vec::new(),
            losses: Vec::new(),
            incomplete: Vec::new(),
        }
    }

    #[test]
    fn refused_results_are_the_first_finding() {
        let refused = |shuffle| IncompleteShuffle {
            app: "app".to_owned(),
            shuffle,
            reason: "/a is missing".to_owned(),
        };
        let it = Explanation { incomplete: vec![refused(3), refused(4)], ..explanation() };
        let found = findings(&it);
        let expected =
            "results of shuffle 3 and 1 more are refused because reports may be missing: /a is missing";
        assert_eq!(found.first().map(String::as_str), Some(expected));
    }

    #[test]
    fn ordinary_app_has_no_findings() {
        assert_eq!(findings(&explanation()), ["no findings on this worker"]);
    }

    #[test]
    fn full_disks_are_named_instead_of_slow_ones() {
        let mut it = Explanation { all_disks_full: true, ..explanation() };
        it.stages[0].total_seconds = 5.0;
        it.stages[3].p99_seconds = 2.0;
        let found = findings(&it);
        assert_eq!(found[0], "writers waited 5.0 s for memory; all disks are full, so memory is not flushed");
        assert_eq!(found[1], "batches wait up to 2.0 s for a flush worker; all disks are full");
    }

    #[test]
    fn findings_are_sorted_by_severity() {
        let mut it = explanation();
        it.stages[0].total_seconds = 5.0;
        it.stages[3].p99_seconds = 2.0;
        it.skew = 20.0;
        let quota = QuotaUse { quota: "quota.app_disk", max: 9, used: 7, by: None, refused: 3 };
        it.quotas.push(quota);
        let text = findings(&it).join("\n");
        assert!(text.contains("3 requests were refused by quota.app_disk = 9 B, 7 B in use"), "{text}");
        let memory = text.find("5.0 s for memory").unwrap();
        let disks = text.find("the disks are too slow").unwrap();
        let skew = text.find("20 times as large").unwrap();
        assert!(memory < disks && disks < skew, "{text}");
        it.bytes.in_object_store = 7;
        assert!(
            !findings(&it).join("\n").contains("object store"),
            "the object store answers, but a finding blames it"
        );
        it.object_store_is_failing = true;
        assert!(findings(&it)[0].starts_with("the object store with 7 B"));
        it.losses.push(ShuffleLoss {
            app: "app-1".to_owned(),
            shuffle: 1,
            partition: 2,
            blocks: 3,
            ranges: vec![(1, 3)],
            bytes: None,
            reason: "gone".to_owned(),
            at_ms: 5,
        });
        assert!(findings(&it)[0].contains("3 blocks are lost"));
    }

    #[test]
    fn only_the_largest_partitions_and_the_latest_apps_are_kept() {
        let sized = |partition: i32| TopPartition {
            shuffle: 0,
            partition,
            received_bytes: u64::from(partition.unsigned_abs() % 50),
            in_memory_bytes: 0,
        };
        let mut top: Vec<_> = (0..100).map(sized).collect();
        keep_largest(&mut top);
        assert_eq!((top.len(), top[0].partition, top[1].partition), (TOP_PARTITIONS, 49, 99));

        let finished = FinishedApps::default();
        for n in 0..100 {
            finished.push(Explanation { app: format!("app-{n}"), ..explanation() });
        }
        assert!(finished.find("app-35").is_none() && finished.find("app-36").is_some());
    }
}
