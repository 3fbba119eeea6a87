//! Where an application's time and bytes went: one account per application, of a fixed size.
//!
//! Entries are made per request and per batch, never per block: some relaxed additions beside a socket read or a disk
//! call. An account has [`STAGES`] stages of a few counters and a coarse histogram each, about 1.5 KiB in all, so
//! that the limit on applications bounds them; how many accounts of finished applications are kept is decided in
//! `service`. Sums of stages that ran at the same time for several tasks may be longer than the wall clock's time.

use std::array;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Instant;

/// What an application can wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// From a ticket refused because the memory is full to the next one granted.
    TicketWait,
    /// As above, refused because one of its partitions fills its share of the memory.
    PartitionWait,
    /// A send, from its header to its commit: mostly its bytes arriving on the socket.
    Receive,
    /// A sealed batch, until a flush worker takes it.
    FlushQueue,
    /// A batch, from the worker to readable on disk.
    FlushWrite,
    /// The disk part of a read of index or data.
    DiskRead,
    /// An answer with data, while the reader's socket takes it.
    Answer,
}

/// All of them, in the order of a block's way.
pub const STAGES: [Stage; 7] = [
    Stage::TicketWait,
    Stage::PartitionWait,
    Stage::Receive,
    Stage::FlushQueue,
    Stage::FlushWrite,
    Stage::DiskRead,
    Stage::Answer,
];

/// Buckets of a histogram: bucket `n` counts durations below 2^n µs, the last one everything else (over 67 s).
const BUCKETS: usize = 27;

/// The counters of one application; shared by everything that works for it.
#[derive(Debug)]
pub struct Account {
    opened: Instant,
    stages: [Entry; STAGES.len()],
    waiting: [Waiting; 2],
    pub tickets_granted: Tally,
    /// Sends that were refused or died.
    pub sends_failed: Tally,
    /// Blocks sent again, by their payload.
    pub duplicates: Tally,
    /// Batches that had to be tried again.
    pub flush_retries: Tally,
    pub memory_reads: Tally,
    /// Bytes in memory times microseconds, added up at each sample.
    memory_byte_us: AtomicU64,
    memory_peak_bytes: AtomicU64,
}

/// A count, with bytes.
#[derive(Debug, Default)]
pub struct Tally {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Tally {
    /// Counts `count` more, of `bytes`.
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
struct Entry {
    tally: Tally,
    total_us: AtomicU64,
    longest_us: AtomicU64,
    buckets: [AtomicU32; BUCKETS],
}

/// A wait that began with a refusal. Of many tasks that wait at once only the first refusal and the first grant count:
/// it is the time in which the application as a whole was held up. A wait without a grant (the task gave up) ends with
/// its latest refusal.
#[derive(Debug, Default)]
struct Waiting {
    /// 0 = no wait.
    since_us: AtomicU64,
    latest_us: AtomicU64,
}

/// Clients that wait ask again within seconds; after so long without a refusal the wait is over.
const PATIENCE_US: u64 = 60_000_000;

impl Waiting {
    /// How long it went on at `now_us`, if it does.
    fn lasted(&self, now_us: u64) -> u64 {
        let since = self.since_us.load(Ordering::Relaxed);
        let latest = self.latest_us.load(Ordering::Relaxed);
        let end = if now_us.saturating_sub(latest) > PATIENCE_US { latest } else { now_us };
        if since == 0 { 0 } else { end.saturating_sub(since) }
    }
}

/// What one stage came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageSum {
    /// How often.
    pub count: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// All times added up.
    pub total: Duration,
    pub longest: Duration,
    /// Half of them were shorter, to a factor of two.
    pub median: Duration,
    /// 99 of 100 were shorter, to a factor of two.
    pub p99: Duration,
}

impl Default for Account {
    fn default() -> Self {
        let entry = |_| Entry {
            tally: Tally::default(),
            total_us: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
            buckets: array::from_fn(|_| AtomicU32::new(0)),
        };
        Self {
            opened: Instant::now(),
            stages: array::from_fn(entry),
            waiting: array::from_fn(|_| Waiting::default()),
            tickets_granted: Tally::default(),
            sends_failed: Tally::default(),
            duplicates: Tally::default(),
            flush_retries: Tally::default(),
            memory_reads: Tally::default(),
            memory_byte_us: AtomicU64::new(0),
            memory_peak_bytes: AtomicU64::new(0),
        }
    }
}

impl Account {
    /// `bytes` went through `stage` and took so long.
    pub fn enter(&self, stage: Stage, bytes: u64, took: Duration) {
        let us = micros(took);
        let entry = &self.stages[stage as usize];
        entry.tally.add(1, bytes);
        entry.total_us.fetch_add(us, Ordering::Relaxed);
        entry.longest_us.fetch_max(us, Ordering::Relaxed);
        entry.buckets[bucket(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// A ticket was refused; `stage` is one of the two waits.
    pub fn refused(&self, stage: Stage, bytes: u64) {
        self.stages[stage as usize].tally.add(1, bytes);
        let now = micros(self.opened.elapsed()).max(1);
        // Only the first refusal of a wait begins it.
        let waiting = &self.waiting[usize::from(stage == Stage::PartitionWait)];
        waiting.latest_us.store(now, Ordering::Relaxed);
        let _ = waiting.since_us.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A ticket was granted: waits that were going on are over. How long a wait for memory was, if there was one.
    pub fn granted(&self, bytes: u64) -> Option<Duration> {
        self.tickets_granted.add(1, bytes);
        let mut waited = None;
        for (waiting, stage) in self.waiting.iter().zip([Stage::TicketWait, Stage::PartitionWait]) {
            if waiting.since_us.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let lasted = waiting.lasted(micros(self.opened.elapsed()));
            if waiting.since_us.swap(0, Ordering::Relaxed) > 0 {
                self.waited(stage, lasted);
                if stage == Stage::TicketWait {
                    waited = Some(Duration::from_micros(lasted));
                }
            }
        }
        waited
    }

    fn waited(&self, stage: Stage, us: u64) {
        let entry = &self.stages[stage as usize];
        entry.total_us.fetch_add(us, Ordering::Relaxed);
        entry.longest_us.fetch_max(us, Ordering::Relaxed);
        entry.buckets[bucket(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// So many bytes of it were in memory since the last sample, `over` ago.
    pub fn sample_memory(&self, bytes: u64, over: Duration) {
        self.memory_byte_us.fetch_add(bytes.saturating_mul(micros(over)), Ordering::Relaxed);
        self.memory_peak_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// The most bytes that a sample found in memory.
    pub fn memory_peak_bytes(&self) -> u64 {
        self.memory_peak_bytes.load(Ordering::Relaxed)
    }

    /// How long a byte was in memory, of `received_bytes` in all: the samples' bytes × time by the bytes.
    pub fn mean_time_in_memory(&self, received_bytes: u64) -> Duration {
        let byte_us = self.memory_byte_us.load(Ordering::Relaxed);
        Duration::from_micros(byte_us.checked_div(received_bytes).unwrap_or(0))
    }

    /// What `stage` came to. A wait that still goes on is in its total.
    pub fn sum(&self, stage: Stage) -> StageSum {
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

    fn going_on_us(&self, stage: Stage) -> u64 {
        let waiting = match stage {
            Stage::TicketWait => &self.waiting[0],
            Stage::PartitionWait => &self.waiting[1],
            Stage::Receive | Stage::FlushQueue | Stage::FlushWrite | Stage::DiskRead | Stage::Answer => {
                return 0;
            }
        };
        waiting.lasted(micros(self.opened.elapsed()))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The bucket of a duration: the number of its binary digits.
fn bucket(us: u64) -> usize {
    let digits = u64::BITS - us.leading_zeros();
    usize::try_from(digits).map_or(BUCKETS - 1, |digits| digits.min(BUCKETS - 1))
}

/// The upper end of the bucket in which the `percent`th of all falls.
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
        // 100,000 applications at once are the limit of the registry.
        assert!(size_of::<Account>() <= 1536, "{} bytes", size_of::<Account>());
    }

    #[tokio::test(start_paused = true)]
    async fn wait_lasts_from_first_refusal_to_next_grant() {
        let account = Account::default();
        tokio::time::advance(Duration::from_secs(1)).await;
        account.refused(Stage::TicketWait, 10);
        tokio::time::advance(Duration::from_secs(2)).await;
        account.refused(Stage::TicketWait, 10);
        assert_eq!(account.sum(Stage::TicketWait).total, Duration::from_secs(2), "it still goes on");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(account.granted(10), Some(Duration::from_secs(3)));
        assert_eq!(account.granted(10), None);
        let sum = account.sum(Stage::TicketWait);
        assert_eq!((sum.count, sum.total, sum.longest), (2, Duration::from_secs(3), Duration::from_secs(3)));
        assert_eq!(account.sum(Stage::PartitionWait), StageSum::default());
        assert_eq!(account.tickets_granted.count(), 2);

        account.refused(Stage::PartitionWait, 10);
        tokio::time::advance(Duration::from_secs(1)).await;
        account.refused(Stage::PartitionWait, 10);
        tokio::time::advance(Duration::from_secs(3600)).await;
        let waited = account.sum(Stage::PartitionWait).total;
        assert_eq!(waited, Duration::from_secs(1), "no reader waits any more");
    }

    #[tokio::test]
    async fn stages_sum_up_with_their_spread() {
        let account = Account::default();
        for _ in 0..98 {
            account.enter(Stage::Receive, 100, Duration::from_micros(900));
        }
        account.enter(Stage::Receive, 100, Duration::from_secs(3600));
        account.enter(Stage::Receive, 100, Duration::ZERO);
        let sum = account.sum(Stage::Receive);
        assert_eq!((sum.count, sum.bytes, sum.longest), (100, 10_000, Duration::from_secs(3600)));
        assert_eq!((sum.median, sum.p99), (Duration::from_micros(1024), Duration::from_micros(1024)));
        assert_eq!(account.sum(Stage::Answer), StageSum::default());
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
