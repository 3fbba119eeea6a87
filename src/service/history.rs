//! The last quarter of an hour: what the status page draws as soon as it is opened.
//!
//! A task takes a sample at an interval; a ring of fixed size keeps them. The same task tells each application's
//! account what it has in memory, which is a walk over all partitions: with many of them it is done more rarely.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Service;

/// Between two samples.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);

/// Samples kept: 15 minutes, 25 KiB.
const SAMPLES_MAX: usize = 450;

/// A walk over so many partitions takes about a millisecond; for each of them one more sample goes by without one.
const PARTITIONS_PER_SAMPLE: usize = 20_000;

/// The worker at one moment. Counters go on from the start of the process, gauges are of the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Unix milliseconds.
    pub at_ms: u64,
    /// Counter: payload received.
    pub received_bytes: u64,
    /// Counter: payload read, all tiers.
    pub read_bytes: u64,
    /// Counter: payload brought from memory to disks.
    pub flushed_bytes: u64,
    /// Bytes of memory in use, tickets and batches in flight included.
    pub memory_used_bytes: u64,
    /// Of those, promised to tickets.
    pub memory_reserved_bytes: u64,
    /// Of those, on their way to disks.
    pub memory_in_flight_bytes: u64,
}

/// The ring of samples, oldest first.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<VecDeque<Sample>>);

impl History {
    fn push(&self, sample: Sample) {
        let mut samples = self.0.lock();
        if samples.len() >= SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample);
    }
}

impl Service {
    /// Samples later than `after_ms`, oldest first.
    pub fn history(&self, after_ms: u64) -> Vec<Sample> {
        self.history.0.lock().iter().filter(|sample| sample.at_ms > after_ms).copied().collect()
    }

    /// The worker now.
    pub fn sample(&self) -> Sample {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Sample {
            at_ms: u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX),
            received_bytes: self.metrics.received_bytes.get(),
            read_bytes: self.metrics.read_bytes.get(),
            flushed_bytes: self.flusher.as_ref().map_or(0, |flusher| flusher.flushed_bytes()),
            memory_used_bytes: self.memory.used_bytes(),
            memory_reserved_bytes: self.memory.pre_allocated_bytes(),
            memory_in_flight_bytes: self.memory.in_flight_bytes(),
        }
    }

    /// Samples until the worker stops.
    pub async fn run_sampling(self: Arc<Self>) {
        let stopped = self.tasks.cancelled();
        tokio::pin!(stopped);
        let mut ticks = interval(SAMPLE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut walked, mut pause) = (Instant::now(), 0);
        loop {
            tokio::select! {
                biased;
                () = &mut stopped => return,
                _ = ticks.tick() => self.history.push(self.sample()),
            }
            if pause > 0 {
                pause -= 1;
                continue;
            }
            pause = self.sample_apps(walked.elapsed()) / PARTITIONS_PER_SAMPLE;
            walked = Instant::now();
        }
    }

    /// Tells each account what its application has in memory; returns how many partitions were asked.
    fn sample_apps(&self, over: Duration) -> usize {
        let mut partitions = 0;
        for app in self.apps.apps() {
            let mut bytes = 0;
            for shuffle in app.shuffles() {
                let Some(buffers) = self.memory.shuffle(shuffle.key()) else { continue };
                let buffers = buffers.all();
                partitions += buffers.len();
                bytes += buffers.iter().map(|buffer| buffer.in_memory_bytes()).sum::<u64>();
            }
            app.account().sample_memory(bytes, over);
        }
        partitions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_forgets_the_oldest() {
        let history = History::default();
        let sample = |at_ms| Sample {
            at_ms,
            received_bytes: 0,
            read_bytes: 0,
            flushed_bytes: 0,
            memory_used_bytes: 0,
            memory_reserved_bytes: 0,
            memory_in_flight_bytes: 0,
        };
        for at_ms in 0..1_000 {
            history.push(sample(at_ms));
        }
        let kept = history.0.lock();
        assert_eq!((kept.len(), kept[0].at_ms), (SAMPLES_MAX, 550));
    }
}
