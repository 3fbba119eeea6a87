//! Per-application statistics of time and bytes, in one account of a fixed size per application.
//!
//! An account is updated per request and per batch, never per block. An update is a few relaxed
//! additions beside a socket read or a disk call. An account has [`STAGES`] stages, each with a few
//! counters and a coarse histogram. The limit on applications therefore bounds the memory. The sum
//! of a stage may exceed the wall-clock time, because several tasks can be in that stage at the
//! same time.

use std::array;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Instant;

/// Stage at which an application's work waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitStage {
    /// From a ticket refused or queued because the memory is full to the next granted ticket.
    TicketWait,
    /// From a ticket refused because a partition fills its share of the memory to the next granted
    /// ticket.
    PartitionWait,
    /// A send, from its header to its commit. Most of this is the arrival of its bytes on the
    /// socket.
    Receive,
    /// The wait of a sealed batch for a flush worker.
    FlushQueue,
    /// From the start of a batch write until the batch is readable in its tier.
    FlushWrite,
    /// The part of an index or data read that waits for a disk or the object store.
    DiskRead,
    /// A data response while the reader's socket accepts it.
    Answer,
}

/// All stages, in the order in which a block passes them.
pub const STAGES: [WaitStage; 7] = [
    WaitStage::TicketWait,
    WaitStage::PartitionWait,
    WaitStage::Receive,
    WaitStage::FlushQueue,
    WaitStage::FlushWrite,
    WaitStage::DiskRead,
    WaitStage::Answer,
];

/// Number of histogram buckets. Bucket `n` counts durations from 2^(n-1) µs to below 2^n µs; the
/// last one counts all from 2^(n-1) µs (33 s) on.
const BUCKETS: usize = 27;

/// The counters of one application, shared by all tasks that work for it.
#[derive(Debug)]
pub struct Account {
    opened: Instant,
    has_huge_partition: AtomicBool,
    stages: [StageEntry; STAGES.len()],
    waiting: [WaitInterval; 2],
    pub tickets_granted: ByteCounter,
    /// Sends that were refused or failed.
    pub sends_failed: ByteCounter,
    /// Resent blocks and their payload bytes.
    pub duplicates: ByteCounter,
    /// Failed writes of batches. A batch counts once per failed write, in any tier.
    pub flush_retries: ByteCounter,
    pub memory_reads: ByteCounter,
    /// Bytes in memory times microseconds, summed over the samples.
    memory_byte_us: AtomicU64,
    memory_peak_bytes: AtomicU64,
}

/// A count and a sum of bytes.
#[derive(Debug, Default)]
pub struct ByteCounter {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl ByteCounter {
    /// Adds `count` events with `bytes` bytes in total.
    pub fn add(&self, count: u64, bytes: u64) {
        self.count.fetch_add(count, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct StageEntry {
    tally: ByteCounter,
    total_us: AtomicU64,
    longest_us: AtomicU64,
    buckets: [AtomicU32; BUCKETS],
}

/// A wait that began with a refusal. If many tasks wait at once, only the first refusal and the
/// first grant count, so the duration is the time in which the application as a whole was held up.
/// If the refusals end without a grant (the task gave up), only the time to the latest one counts.
#[derive(Debug, Default)]
struct WaitInterval {
    /// Time of the first refusal; 0 if there is no wait.
    since_us: AtomicU64,
    latest_us: AtomicU64,
}

/// Waiting clients ask again within seconds. After this time without a refusal, the wait is counted
/// up to its latest refusal. A later refusal continues it.
const WAIT_GAP_MAX_US: u64 = 60_000_000;

impl WaitInterval {
    /// Returns the duration of the wait at `now_us`, or 0 if there is no wait.
    fn lasted(&self, now_us: u64) -> u64 {
        let since = self.since_us.load(Ordering::Relaxed);
        let latest = self.latest_us.load(Ordering::Relaxed);
        let end = if now_us.saturating_sub(latest) > WAIT_GAP_MAX_US { latest } else { now_us };
        if since == 0 { 0 } else { end.saturating_sub(since) }
    }
}

/// Totals of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageSum {
    /// Number of entries; of the two waits, of refusals.
    pub count: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// Sum of all durations.
    pub total: Duration,
    pub longest: Duration,
    /// Median duration, to a factor of two. Longer ones than 67 s count as 67 s.
    pub median: Duration,
    /// 99th percentile of the durations, with the same limits.
    pub p99: Duration,
}

impl Default for Account {
    fn default() -> Self {
        let entry = |_| StageEntry {
            tally: ByteCounter::default(),
            total_us: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
            buckets: array::from_fn(|_| AtomicU32::new(0)),
        };
        Self {
            opened: Instant::now(),
            has_huge_partition: AtomicBool::new(false),
            stages: array::from_fn(entry),
            waiting: array::from_fn(|_| WaitInterval::default()),
            tickets_granted: ByteCounter::default(),
            sends_failed: ByteCounter::default(),
            duplicates: ByteCounter::default(),
            flush_retries: ByteCounter::default(),
            memory_reads: ByteCounter::default(),
            memory_byte_us: AtomicU64::new(0),
            memory_peak_bytes: AtomicU64::new(0),
        }
    }
}

impl Account {
    /// Records that one of the application's partitions is huge. Returns true the first time.
    #[must_use]
    pub fn mark_huge(&self) -> bool {
        !self.has_huge_partition.swap(true, Ordering::Relaxed)
    }

    /// Records that `bytes` bytes passed `stage` in the time `took`.
    pub fn enter(&self, stage: WaitStage, bytes: u64, took: Duration) {
        let us = micros(took);
        let entry = &self.stages[stage as usize];
        entry.tally.add(1, bytes);
        entry.total_us.fetch_add(us, Ordering::Relaxed);
        entry.longest_us.fetch_max(us, Ordering::Relaxed);
        entry.buckets[bucket(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// Records a refused or queued ticket; `stage` is one of the two waits.
    pub fn refused(&self, stage: WaitStage, bytes: u64) {
        self.stages[stage as usize].tally.add(1, bytes);
        let now = micros(self.opened.elapsed()).max(1);
        // Only the first refusal of a wait begins it.
        let waiting = &self.waiting[usize::from(stage == WaitStage::PartitionWait)];
        waiting.latest_us.store(now, Ordering::Relaxed);
        let _ = waiting.since_us.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Records a granted ticket, which ends the current waits. Returns the duration of the wait for
    /// memory, if there was one.
    pub fn granted(&self, bytes: u64) -> Option<Duration> {
        self.tickets_granted.add(1, bytes);
        let mut waited = None;
        for (waiting, stage) in self.waiting.iter().zip([WaitStage::TicketWait, WaitStage::PartitionWait]) {
            if waiting.since_us.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let lasted = waiting.lasted(micros(self.opened.elapsed()));
            if waiting.since_us.swap(0, Ordering::Relaxed) > 0 {
                self.waited(stage, lasted);
                if stage == WaitStage::TicketWait {
                    waited = Some(Duration::from_micros(lasted));
                }
            }
        }
        waited
    }

    fn waited(&self, stage: WaitStage, us: u64) {
        let entry = &self.stages[stage as usize];
        entry.total_us.fetch_add(us, Ordering::Relaxed);
        entry.longest_us.fetch_max(us, Ordering::Relaxed);
        entry.buckets[bucket(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// Records that `bytes` bytes were in memory since the last sample, `over` ago.
    pub fn sample_memory(&self, bytes: u64, over: Duration) {
        self.memory_byte_us.fetch_add(bytes.saturating_mul(micros(over)), Ordering::Relaxed);
        self.memory_peak_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Returns the largest number of bytes in memory that a sample found.
    pub fn memory_peak_bytes(&self) -> u64 {
        self.memory_peak_bytes.load(Ordering::Relaxed)
    }

    /// Returns the mean time that one of `received_bytes` bytes was in memory: byte-time of the
    /// samples divided by the bytes.
    pub fn mean_time_in_memory(&self, received_bytes: u64) -> Duration {
        let byte_us = self.memory_byte_us.load(Ordering::Relaxed);
        Duration::from_micros(byte_us.checked_div(received_bytes).unwrap_or(0))
    }

    /// Returns the totals of `stage`. The total includes a wait that has not ended.
    pub fn sum(&self, stage: WaitStage) -> StageSum {
        let entry = &self.stages[stage as usize];
        let counts = entry.buckets.each_ref().map(|count| u64::from(count.load(Ordering::Relaxed)));
        let going_on = self.going_on_us(stage);
        let longest = Duration::from_micros(entry.longest_us.load(Ordering::Relaxed).max(going_on));
        StageSum {
            count: entry.tally.count(),
            bytes: entry.tally.bytes(),
            total: Duration::from_micros(entry.total_us.load(Ordering::Relaxed) + going_on),
            longest,
            median: quantile(&counts, 50).min(longest),
            p99: quantile(&counts, 99).min(longest),
        }
    }

    fn going_on_us(&self, stage: WaitStage) -> u64 {
        let waiting = match stage {
            WaitStage::TicketWait => &self.waiting[0],
            WaitStage::PartitionWait => &self.waiting[1],
            WaitStage::Receive
            | WaitStage::FlushQueue
            | WaitStage::FlushWrite
            | WaitStage::DiskRead
            | WaitStage::Answer => {
                return 0;
            }
        };
        waiting.lasted(micros(self.opened.elapsed()))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the bucket of a duration: the number of its binary digits.
fn bucket(us: u64) -> usize {
    let digits = u64::BITS - us.leading_zeros();
    usize::try_from(digits).map_or(BUCKETS - 1, |digits| digits.min(BUCKETS - 1))
}

/// Returns the upper end of the bucket that contains the `percent`th percentile. The last bucket
/// has no end and counts as 67 s.
fn quantile(counts: &[u64; BUCKETS], percent: u64) -> Duration {
    let all: u64 = counts.iter().sum();
    let wanted = (all * percent).div_ceil(100).max(1);
    let mut seen = 0;
    for (index, count) in counts.iter().enumerate() {
        seen += count;
        if seen >= wanted {
            return Duration::from_micros(1 << index);
        }
    }
    Duration::ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_small() {
        // The registry allows 100,000 applications at once.
        assert!(size_of::<Account>() <= 1536, "an account takes {} bytes", size_of::<Account>());
    }

    #[tokio::test(start_paused = true)]
    async fn wait_lasts_from_first_refusal_to_next_grant() {
        let account = Account::default();
        tokio::time::advance(Duration::from_secs(1)).await;
        account.refused(WaitStage::TicketWait, 10);
        tokio::time::advance(Duration::from_secs(2)).await;
        account.refused(WaitStage::TicketWait, 10);
        assert_eq!(
            account.sum(WaitStage::TicketWait).total,
            Duration::from_secs(2),
            "a repeated refusal must not restart the wait"
        );
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(account.granted(10), Some(Duration::from_secs(3)));
        assert_eq!(account.granted(10), None);
        let sum = account.sum(WaitStage::TicketWait);
        assert_eq!((sum.count, sum.total, sum.longest), (2, Duration::from_secs(3), Duration::from_secs(3)));
        assert_eq!(account.sum(WaitStage::PartitionWait), StageSum::default());
        assert_eq!(account.tickets_granted.count(), 2);

        account.refused(WaitStage::PartitionWait, 10);
        tokio::time::advance(Duration::from_secs(1)).await;
        account.refused(WaitStage::PartitionWait, 10);
        tokio::time::advance(Duration::from_secs(3600)).await;
        let waited = account.sum(WaitStage::PartitionWait).total;
        assert_eq!(waited, Duration::from_secs(1), "time after the last refusal must not count");
    }

    #[tokio::test]
    async fn stages_sum_up_with_their_spread() {
        let account = Account::default();
        for _ in 0..98 {
            account.enter(WaitStage::Receive, 100, Duration::from_micros(900));
        }
        account.enter(WaitStage::Receive, 100, Duration::from_secs(3600));
        account.enter(WaitStage::Receive, 100, Duration::ZERO);
        let sum = account.sum(WaitStage::Receive);
        assert_eq!((sum.count, sum.bytes, sum.longest), (100, 10_000, Duration::from_secs(3600)));
        assert_eq!((sum.median, sum.p99), (Duration::from_micros(1024), Duration::from_micros(1024)));
        assert_eq!(account.sum(WaitStage::Answer), StageSum::default());
    }

    #[tokio::test]
    async fn time_in_memory_is_weighted_by_bytes() {
        let account = Account::default();
        account.sample_memory(1_000, Duration::from_secs(5));
        account.sample_memory(500, Duration::from_secs(4));
        assert_eq!(account.mean_time_in_memory(1_000), Duration::from_secs(7));
        assert_eq!(account.mean_time_in_memory(0), Duration::ZERO);
        assert_eq!(account.memory_peak_bytes(), 1_000);
    }
}
