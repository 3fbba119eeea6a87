//! Samples of the last 15 minutes, which the status page draws as soon as it is opened.
//!
//! A task takes a sample at an interval and stores it in a ring of fixed size. The same task
//! updates each application's memory statistics. This walks all partitions, so it runs less often
//! if there are many.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;

use crate::app::AppRegistry;
use crate::memory::Memory;

/// Interval between two samples.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);

/// Number of samples kept: 15 minutes, 25 KiB.
const SAMPLES_MAX: usize = 450;

/// Number of partitions for which the walk skips one more sample.
pub(super) const PARTITIONS_PER_SAMPLE: usize = 20_000;

/// The worker at one moment. Counters start with the process; gauges are momentary values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Unix milliseconds.
    pub at_ms: u64,
    /// Counter: payload received.
    pub received_bytes: u64,
    /// Counter: payload read, all tiers.
    pub read_bytes: u64,
    /// Counter: payload flushed from memory to the tiers.
    pub flushed_bytes: u64,
    /// Bytes of memory in use, including tickets and batches in flight.
    pub memory_used_bytes: u64,
    /// Bytes of these that are reserved for tickets.
    pub memory_reserved_bytes: u64,
    /// Bytes of these that are being flushed.
    pub memory_in_flight_bytes: u64,
}

/// The ring of samples, oldest first.
#[derive(Debug, Default)]
pub(in crate::service) struct History(Mutex<VecDeque<Sample>>);

impl History {
    pub(in crate::service) fn push(&self, sample: Sample) {
        let mut samples = self.0.lock();
        if samples.len() >= SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// Returns the samples later than `after_ms`, in milliseconds since 1970.
    pub(in crate::service) fn after(&self, after_ms: u64) -> Vec<Sample> {
        self.0.lock().iter().filter(|sample| sample.at_ms > after_ms).copied().collect()
    }
}

/// Records each application's bytes in memory for the time `over`. Returns the number of partitions
/// walked.
pub(super) fn sample_apps(apps: &AppRegistry, memory: &Memory, over: Duration) -> usize {
    let mut partitions = 0;
    for app in apps.apps() {
        let mut bytes = 0;
        for shuffle in app.shuffles() {
            let Some(buffers) = memory.shuffle(shuffle.key()) else { continue };
            let buffers = buffers.all();
            partitions += buffers.len();
            bytes += buffers.iter().map(|buffer| buffer.in_memory_bytes()).sum::<u64>();
        }
        app.account.sample_memory(bytes, over);
    }
    partitions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_drops_the_oldest() {
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
        let samples = history.0.lock();
        assert_eq!((samples.len(), samples[0].at_ms), (SAMPLES_MAX, 550));
    }
}
