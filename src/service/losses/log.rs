//! Log lines for lost blocks, and for partitions that cannot be verified now: one per shuffle,
//! however many of its partitions are affected, and at most one a minute while there are more.
//!
//! The partitions and ids are listed in `/losses`, and in the log at DEBUG.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use croaring::Bitmap;
use parking_lot::Mutex;

use crate::clock::sleep;
use crate::log::Loss;
use crate::runtime::Tasks;
use crate::telemetry::AUDIT;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Time within which the first losses of a shuffle are gathered into one line.
const GATHER: Duration = Duration::from_secs(1);
/// Interval of further lines with the losses found since the previous one.
const GATHER_AGAIN: Duration = Duration::from_secs(60);

/// Events that are not logged yet, by shuffle.
#[derive(Debug)]
pub(in crate::service) struct LossLog {
    gathered: Mutex<HashMap<(ShuffleKey, Event), GatheredLosses>>,
    tasks: Tasks,
}

/// Event in some partitions of a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Event {
    /// Blocks are lost.
    Lost,
    /// It cannot be determined now which blocks are lost.
    Unverified,
}

#[derive(Debug, Default)]
struct GatheredLosses {
    partitions: Bitmap,
    blocks: u64,
    /// Bytes of the blocks with known sizes.
    bytes: u64,
    has_unknown_sizes: bool,
    reason: Option<Arc<str>>,
    has_more_reasons: bool,
}

impl LossLog {
    pub(in crate::service) fn new(tasks: &Tasks) -> Arc<Self> {
        Arc::new(Self { gathered: Mutex::default(), tasks: tasks.clone() })
    }

    /// Schedules a log line for `loss`, together with other losses of the shuffle.
    pub(in crate::service) fn add(self: &Arc<Self>, key: &ShuffleKey, partition: PartitionId, loss: &Loss) {
        self.add_blocks(key, partition, loss.ids.len(), loss.bytes, &loss.reason);
    }

    /// Schedules a log line for lost blocks, together with others of the shuffle. The sizes may
    /// be unknown.
    pub(super) fn add_blocks(
        self: &Arc<Self>,
        key: &ShuffleKey,
        partition: PartitionId,
        blocks: u64,
        bytes: Option<u64>,
        reason: &Arc<str>,
    ) {
        self.gather(key, Event::Lost, |of_shuffle| {
            of_shuffle.blocks += blocks;
            of_shuffle.bytes += bytes.unwrap_or(0);
            of_shuffle.has_unknown_sizes |= bytes.is_none();
            of_shuffle.add(partition, reason);
        });
    }

    /// Schedules a log line for a partition that cannot be verified now, together with others of
    /// the shuffle.
    pub(super) fn add_unverified(self: &Arc<Self>, key: &ShuffleKey, partition: PartitionId, reason: &str) {
        self.gather(key, Event::Unverified, |of_shuffle| of_shuffle.add(partition, &Arc::from(reason)));
    }

    fn gather(self: &Arc<Self>, key: &ShuffleKey, event: Event, add: impl FnOnce(&mut GatheredLosses)) {
        let of = (key.clone(), event);
        let mut gathered = self.gathered.lock();
        let is_first = !gathered.contains_key(&of);
        add(gathered.entry(of).or_default());
        drop(gathered);
        if is_first {
            self.tasks.spawn("log losses", Arc::clone(self).log(key.clone(), event));
        }
    }

    /// Logs the events of a shuffle until there are no more, or the worker stops.
    async fn log(self: Arc<Self>, key: ShuffleKey, event: Event) {
        let of = (key.clone(), event);
        let mut pause = GATHER;
        loop {
            let is_stopped = tokio::select! {
                biased;
                () = self.tasks.cancelled() => true,
                () = sleep(pause) => false,
            };
            {
                let mut gathered = self.gathered.lock();
                let events = gathered.get_mut(&of).map(std::mem::take).unwrap_or_default();
                if events.partitions.is_empty() || is_stopped {
                    gathered.remove(&of);
                }
                if events.partitions.is_empty() {
                    return;
                }
                match event {
                    Event::Lost => events.log_losses(&key),
                    Event::Unverified => events.log_unverified(&key),
                }
            }
            if is_stopped {
                return;
            }
            pause = GATHER_AGAIN;
        }
    }
}

impl GatheredLosses {
    fn add(&mut self, partition: PartitionId, reason: &Arc<str>) {
        self.partitions.add(partition.0.unsigned_abs());
        let first = self.reason.get_or_insert_with(|| Arc::clone(reason));
        self.has_more_reasons |= first != reason;
    }

    fn log_losses(&self, key: &ShuffleKey) {
        let Self { partitions, blocks, bytes, has_unknown_sizes, reason, has_more_reasons } = self;
        // Omitted instead of too small.
        let bytes = (!has_unknown_sizes).then_some(bytes);
        let reason = reason.as_deref().unwrap_or_default();
        let (partitions, first) = (partitions.cardinality(), partitions.minimum());
        tracing::error!(
            target: AUDIT,
            shuffle = %key, partitions, first, blocks, bytes, reason, has_more_reasons,
            "blocks are lost"
        );
    }

    fn log_unverified(&self, key: &ShuffleKey) {
        let Self { partitions, reason, has_more_reasons, .. } = self;
        let reason = reason.as_deref().unwrap_or_default();
        let (partitions, first) = (partitions.cardinality(), partitions.minimum());
        tracing::warn!(
            shuffle = %key, partitions, first, reason, has_more_reasons,
            "cannot determine which blocks are lost; retrying"
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::log::IdSet;
    use uniffle_wire::types::{AppId, ShuffleId};

    use super::*;
    use uniffle_testkit::captured_log::CapturedLog;

    fn key(shuffle: i32) -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(shuffle))
    }

    fn loss(ids: std::ops::Range<u64>, reason: &str) -> Loss {
        let ids: IdSet = ids.collect();
        Loss { bytes: Some(10), ids, reason: Arc::from(reason), at_ms: 0 }
    }

    fn lines(log: &CapturedLog) -> Vec<String> {
        log.text().lines().map(str::to_owned).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn losses_of_many_partitions_are_one_line_per_shuffle() {
        let (log, tasks) = (CapturedLog::of_this_thread(), Tasks::new());
        let losses = LossLog::new(&tasks);
        for partition in 0..1000 {
            losses.add(&key(0), PartitionId(partition), &loss(0..3, "a disk is missing"));
        }
        losses.add(&key(1), PartitionId(7), &loss(0..1, "in memory"));
        losses.add(&key(1), PartitionId(7), &loss(5..6, "a disk is missing"));
        sleep(2 * GATHER).await;
        let text = lines(&log);
        let [one, other] = text.as_slice() else { panic!("{text:?}") };
        let (first, second) = if one.contains("shuffle=app/0") { (one, other) } else { (other, one) };
        assert!(first.contains("partitions=1000 first=0 blocks=3000 bytes=10000"), "{first}");
        assert!(first.contains("reason=\"a disk is missing\" has_more_reasons=false"), "{first}");
        assert!(second.contains("partitions=1 first=7 blocks=2"), "{second}");
        assert!(second.contains("has_more_reasons=true"), "{second}");
        losses.add(&key(0), PartitionId(1), &loss(9..10, "in memory"));
        losses.add(&key(0), PartitionId(2), &loss(9..10, "in memory"));
        sleep(GATHER_AGAIN).await;
        assert_eq!(lines(&log).len(), 3);
        sleep(2 * GATHER_AGAIN).await;
        assert!(losses.gathered.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_blocks_of_unknown_size_are_omitted() {
        let (log, tasks) = (CapturedLog::of_this_thread(), Tasks::new());
        let losses = LossLog::new(&tasks);
        losses.add(&key(0), PartitionId(0), &loss(0..3, "a disk is missing"));
        losses.add(&key(0), PartitionId(1), &Loss { bytes: None, ..loss(0..3, "a disk is missing") });
        sleep(2 * GATHER).await;
        losses.add(&key(0), PartitionId(2), &loss(0..3, "a disk is missing"));
        sleep(GATHER_AGAIN).await;
        let text = lines(&log);
        assert!(text[0].contains("partitions=2 first=0 blocks=6 reason"), "{text:?}");
        assert!(text[1].contains("partitions=1 first=2 blocks=3 bytes=10 reason"), "{text:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn unverified_partitions_are_one_line_per_shuffle() {
        let (log, tasks) = (CapturedLog::of_this_thread(), Tasks::new());
        let losses = LossLog::new(&tasks);
        losses.add(&key(0), PartitionId(3), &loss(0..3, "a disk is missing"));
        for _ in 0..2 {
            for partition in 0..1000 {
                losses.add_unverified(&key(0), PartitionId(partition), "a file is cut");
            }
        }
        sleep(2 * GATHER).await;
        let text = lines(&log);
        assert_eq!(text.len(), 2, "{text:?}");
        let line = text.iter().find(|line| line.contains("cannot determine")).unwrap();
        assert!(line.contains("shuffle=app/0 partitions=1000 first=0 reason=\"a file is cut\""), "{line}");
        sleep(2 * GATHER_AGAIN).await;
        assert!(losses.gathered.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn losses_are_logged_when_the_worker_stops() {
        let (log, tasks) = (CapturedLog::of_this_thread(), Tasks::new());
        LossLog::new(&tasks).add(&key(0), PartitionId(0), &loss(0..3, "a disk is missing"));
        tasks.cancel();
        tasks.drained().await;
        assert_eq!(lines(&log).len(), 1);
    }
}
