//! Metrics of reads in progress and their costs, with the names of the Java server.
//!
//! A read counts until its response was sent or dropped ([`ReadInProgress`]). Reads of local data
//! and indexes include those that the worker serves from an object store.

use std::time::Duration;

use prometheus::{Counter, IntCounter, IntGauge, Registry};

use crate::metrics::{self, GaugeGuard};

metrics::table! {
    struct AllReads {
        disk_ms: Counter = "total_read_time", "Milliseconds that reads waited for local disks, summed";
        ahead: IntCounter =
            "read_ahead_operations",
            "Chunks read ahead from local disks while the previous chunk was being sent";
    }
}

metrics::table! {
    struct ReadKind each fill {
        under_way: IntGauge = "read_{kind}_thread_num", "In-progress {what}";
        bytes: IntGauge = "read_{kind}_buffer_size", "Response bytes of in-progress {what}";
    }
}

const MEMORY: metrics::Placeholders<'_> = &[("{kind}", "memory_data"), ("{what}", "reads from memory")];
const LOCAL_DATA: metrics::Placeholders<'_> =
    &[("{kind}", "local_data_file"), ("{what}", "reads of local data")];
const LOCAL_INDEX: metrics::Placeholders<'_> =
    &[("{kind}", "local_index_file"), ("{what}", "reads of local indexes")];

/// Read metrics of all tiers.
#[derive(Debug)]
pub(crate) struct ReadMetrics {
    pub(super) memory: TierReads,
    pub(super) local_data: TierReads,
    pub(super) local_index: TierReads,
}

/// Metrics of one kind of read.
#[derive(Debug)]
pub(super) struct TierReads {
    under_way: IntGauge,
    bytes: IntGauge,
    /// Shared by the kinds.
    disk_ms: Counter,
    /// Shared by the kinds.
    ahead: IntCounter,
}

impl ReadMetrics {
    pub(in crate::service) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let AllReads { disk_ms, ahead } = AllReads::new(registry)?;
        let reads = |fill| -> prometheus::Result<TierReads> {
            let ReadKind { under_way, bytes } = ReadKind::new(registry, fill)?;
            Ok(TierReads { under_way, bytes, disk_ms: disk_ms.clone(), ahead: ahead.clone() })
        };
        Ok(Self { memory: reads(MEMORY)?, local_data: reads(LOCAL_DATA)?, local_index: reads(LOCAL_INDEX)? })
    }

    pub(in crate::service) fn described() -> Vec<metrics::Description> {
        let kinds = [MEMORY, LOCAL_DATA, LOCAL_INDEX];
        [AllReads::described(), kinds.into_iter().flat_map(ReadKind::described).collect()].concat()
    }
}

impl TierReads {
    /// Counts a read of `bytes` until the returned value is dropped.
    pub(in crate::service) fn begin(&self, bytes: u64) -> ReadInProgress {
        ReadInProgress {
            disk_ms: self.disk_ms.clone(),
            ahead: self.ahead.clone(),
            bytes,
            _gauges: [GaugeGuard::inc(&self.under_way), GaugeGuard::add(&self.bytes, bytes)],
        }
    }
}

/// A read in progress.
#[derive(Debug)]
pub(super) struct ReadInProgress {
    disk_ms: Counter,
    pub(in crate::service) ahead: IntCounter,
    /// Length of the response.
    pub(in crate::service) bytes: u64,
    _gauges: [GaugeGuard; 2],
}

impl ReadInProgress {
    /// Adds `time` spent waiting for the disk, summed over all chunks.
    pub(super) fn waited_for_disk(&self, time: Duration) {
        self.disk_ms.inc_by(time.as_secs_f64() * 1e3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_counts_in_gauges_until_dropped() {
        let registry = Registry::new();
        let metrics = ReadMetrics::new(&registry).unwrap();
        let value = |name: &str| {
            let families = registry.gather();
            let metric = &families.iter().find(|it| it.name() == name).unwrap().get_metric()[0];
            metric.get_counter().get_value() + metric.get_gauge().get_value()
        };
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
