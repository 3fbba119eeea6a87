//! What jemalloc holds, by its own counters. Payload is not in it: blocks live in the memory region.

#[cfg(feature = "jemalloc")]
mod jemalloc {
    use prometheus::IntGauge;
    use tikv_jemalloc_ctl::{epoch, stats};

    use crate::metrics;

    metrics::table! {
        /// Gauges of the process's allocator.
        pub(crate) struct AllocatorMetrics {
            allocated: IntGauge = "allocator_allocated_bytes",
                "bytes that the program asked for", also "allocator_allocated_size";
            active: IntGauge = "allocator_active_bytes", "bytes of pages with such bytes";
            metadata: IntGauge = "allocator_metadata_bytes", "bytes of the allocator's own";
            resident: IntGauge = "allocator_resident_bytes", "bytes of the heap that are in memory";
            retained: IntGauge = "allocator_retained_bytes", "bytes of address space kept for later";
        }
    }

    impl AllocatorMetrics {
        /// Brings them up to date.
        pub(crate) fn refresh(&self) {
            // The counters are snapshots of the last epoch. None of the calls fails on a jemalloc with statistics.
            let _ = epoch::advance();
            let set = |gauge: &IntGauge, bytes: tikv_jemalloc_ctl::Result<usize>| {
                gauge.set(bytes.map_or(0, metrics::clamped));
            };
            set(&self.allocated, stats::allocated::read());
            set(&self.active, stats::active::read());
            set(&self.metadata, stats::metadata::read());
            set(&self.resident, stats::resident::read());
            set(&self.retained, stats::retained::read());
        }
    }
}

#[cfg(feature = "jemalloc")]
pub(crate) use jemalloc::AllocatorMetrics;

/// Nothing: the system's allocator counts nothing.
#[cfg(not(feature = "jemalloc"))]
#[derive(Debug)]
pub(crate) struct AllocatorMetrics;

#[cfg(not(feature = "jemalloc"))]
impl AllocatorMetrics {
    pub(crate) fn new(_: &prometheus::Registry) -> prometheus::Result<Self> {
        Ok(Self)
    }

    pub(crate) fn described() -> Vec<crate::metrics::Description> {
        Vec::new()
    }

    pub(crate) fn refresh(&self) {}
}
