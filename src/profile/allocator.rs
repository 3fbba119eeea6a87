//! What jemalloc holds, by its own counters. Payload is not in it: blocks live in the memory region.

#[cfg(feature = "jemalloc")]
mod jemalloc {
    use prometheus::{IntGauge, Registry};
    use tikv_jemalloc_ctl::{epoch, stats};

    use crate::metrics::{self, clamped};

    /// Gauges of the process's allocator.
    #[derive(Debug)]
    pub struct AllocatorMetrics {
        allocated: IntGauge,
        active: IntGauge,
        metadata: IntGauge,
        resident: IntGauge,
        retained: IntGauge,
    }

    impl AllocatorMetrics {
        /// Registers them.
        ///
        /// # Errors
        /// A name that is taken in `registry`.
        pub fn new(registry: &Registry) -> prometheus::Result<Self> {
            let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
            let metrics = Self {
                allocated: gauge("allocator_allocated_bytes", "bytes that the program asked for")?,
                active: gauge("allocator_active_bytes", "bytes of pages with such bytes")?,
                metadata: gauge("allocator_metadata_bytes", "bytes of the allocator's own")?,
                resident: gauge("allocator_resident_bytes", "bytes of the heap that are in memory")?,
                retained: gauge("allocator_retained_bytes", "bytes of address space kept for later")?,
            };
            metrics::also(registry, &metrics.allocated, "allocator_allocated_size")?;
            Ok(metrics)
        }

        /// Brings them up to date.
        pub fn refresh(&self) {
            // The counters are snapshots of the last epoch. None of the calls fails on a jemalloc with statistics.
            let _ = epoch::advance();
            let set = |gauge: &IntGauge, bytes: tikv_jemalloc_ctl::Result<usize>| {
                gauge.set(bytes.map_or(0, clamped));
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
pub use jemalloc::AllocatorMetrics;

#[cfg(not(feature = "jemalloc"))]
mod absent {
    use prometheus::Registry;

    /// Nothing: the system's allocator counts nothing.
    #[derive(Debug)]
    pub struct AllocatorMetrics;

    impl AllocatorMetrics {
        /// Registers nothing.
        ///
        /// # Errors
        /// Never.
        pub fn new(_: &Registry) -> prometheus::Result<Self> {
            Ok(Self)
        }

        /// Does nothing.
        pub fn refresh(&self) {}
    }
}

#[cfg(not(feature = "jemalloc"))]
pub use absent::AllocatorMetrics;
