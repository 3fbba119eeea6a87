//! What reads are under way, by the names of the Java server (docs/protocol.md §10.2), and what they cost.

use std::sync::Arc;
use std::time::Duration;

use prometheus::{Counter, IntCounter, IntGauge, Registry};

use crate::metrics::{self, GaugeGuard};

/// Reads of each tier.
#[derive(Debug)]
pub(super) struct ReadMetrics {
    pub(super) memory: Arc<TierReads>,
    pub(super) local_data: Arc<TierReads>,
    pub(super) local_index: Arc<TierReads>,
}

/// Reads of one kind.
#[derive(Debug)]
pub(super) struct TierReads {
    under_way: IntGauge,
    bytes: IntGauge,
    /// Shared by the kinds.
    disk_ms: Counter,
    /// Shared by the kinds.
    pub(super) ahead: IntCounter,
}

impl ReadMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let disk_ms =
            Counter::new("total_read_time", "Milliseconds that reads waited for local disks, summed")?;
        registry.register(Box::new(disk_ms.clone()))?;
        let ahead = metrics::counter(
            registry,
            "read_ahead_operations",
            "Chunks read from local disks while the one before was on its way",
        )?;
        let reads = |kind: &str, what: &str| -> prometheus::Result<Arc<TierReads>> {
            let help = format!("{what} that are not answered in full");
            let under_way = metrics::gauge(registry, &format!("read_{kind}_thread_num"), &help)?;
            let help = format!("Bytes of these {what}");
            let bytes = metrics::gauge(registry, &format!("read_{kind}_buffer_size"), &help)?;
            Ok(Arc::new(TierReads { under_way, bytes, disk_ms: disk_ms.clone(), ahead: ahead.clone() }))
        };
        Ok(Self {
            memory: reads("memory_data", "reads of memory")?,
            local_data: reads("local_data_file", "reads of local data")?,
            local_index: reads("local_index_file", "reads of local indexes")?,
        })
    }
}

impl TierReads {
    /// Counts a read of `bytes` until the returned value is dropped.
    pub(super) fn begin(self: &Arc<Self>, bytes: u64) -> Reading {
        let gauges = [GaugeGuard::one(&self.under_way), GaugeGuard::of(&self.bytes, bytes)];
        Reading { reads: Arc::clone(self), _gauges: gauges }
    }
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) reads: Arc<TierReads>,
    _gauges: [GaugeGuard; 2],
}

impl Reading {
    /// The disk was waited for so long, all chunks together.
    pub(super) fn waited_for_disk(&self, time: Duration) {
        self.reads.disk_ms.inc_by(time.as_secs_f64() * 1e3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_counts_while_it_lasts_and_its_time_for_ever() {
        let registry = Registry::new();
        let metrics = ReadMetrics::new(&registry).unwrap();
        let value = |name: &str| crate::metrics::Values::gather(&registry).value(name);
        let reading = metrics.local_data.begin(70);
        reading.waited_for_disk(Duration::from_millis(3));
        let _other = metrics.memory.begin(u64::MAX);
        assert_eq!(
            (value("read_local_data_file_thread_num"), value("read_local_data_file_buffer_size")),
            (1.0, 70.0)
        );
        drop(reading);
        assert_eq!(
            (value("read_local_data_file_thread_num"), value("read_local_data_file_buffer_size")),
            (0.0, 0.0)
        );
        assert_eq!(value("read_memory_data_thread_num"), 1.0);
        assert_eq!(value("total_read_time"), 3.0);
    }
}
