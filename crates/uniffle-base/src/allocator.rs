//! Statistics of jemalloc, and return of freed memory. Payload is not included: blocks are in the
//! memory region.
//!
//! jemalloc keeps freed pages for some seconds, in several arenas, because returning and getting
//! them again is expensive. Memory freed in one arena is not used by another. Under attack, 160 MiB
//! of unused pages collected beside a heap of 72 MiB. The heap budget (`budget::heap`) therefore
//! calls [`return_freed`] again after each fixed number of charged bytes.

#[cfg(feature = "jemalloc")]
mod jemalloc {
    use prometheus::IntGauge;
    use tikv_jemalloc_ctl::{Access as _, AsName as _, Result, arenas, epoch, stats};

    use crate::metrics;

    metrics::table! {
        /// Gauges of the process's allocator.
        pub struct AllocatorMetrics {
            allocated: IntGauge = "allocator_allocated_bytes",
                "Bytes allocated by the program", also "allocator_allocated_size";
            active: IntGauge = "allocator_active_bytes", "Bytes of pages that contain allocations";
            metadata: IntGauge = "allocator_metadata_bytes", "Bytes of allocator metadata";
            resident: IntGauge = "allocator_resident_bytes", "Bytes of the heap that are resident";
            retained: IntGauge = "allocator_retained_bytes",
                "Bytes of unmapped address space retained for reuse";
        }
    }

    /// Returns freed memory to the system if more than `most_bytes` are kept. Errors are ignored.
    pub fn return_freed(most_bytes: u64) {
        if kept_bytes().is_ok_and(|kept| kept > most_bytes) {
            let _ = return_all();
        }
    }

    /// Returns the bytes of resident, unused pages: jemalloc's resident bytes without active pages
    /// and metadata.
    fn kept_bytes() -> Result<u64> {
        epoch::advance()?;
        let in_use = stats::active::read()? + stats::metadata::read()?;
        Ok(stats::resident::read()?.saturating_sub(in_use) as u64)
    }

    /// Returns the freed pages of all arenas. Writing a decay time of 0 does that at once,
    /// independent of the background thread. The usual time is restored.
    fn return_all() -> Result<()> {
        let usual: isize = b"arenas.dirty_decay_ms\0"[..].name().read()?;
        let mut decay = b"arena.0.dirty_decay_ms\0"[..].name().mib::<[usize; 3]>()?;
        for arena in 0..arenas::narenas::read()? {
            decay[1] = arena as usize;
            // The write fails for an arena that no thread has used yet.
            if decay.write(0_isize).is_ok() {
                decay.write(usual)?;
            }
        }
        Ok(())
    }

    impl AllocatorMetrics {
        /// Updates the gauges.
        pub fn refresh(&self) {
            // Statistics are snapshots of the last epoch. With statistics enabled no call fails.
            let _ = epoch::advance();
            let set = |gauge: &IntGauge, bytes: Result<usize>| {
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
pub use jemalloc::{AllocatorMetrics, return_freed};

/// Does nothing: the system's allocator does not report freed memory.
#[cfg(not(feature = "jemalloc"))]
pub fn return_freed(_: u64) {}

/// No metrics: the system's allocator has no statistics.
#[cfg(not(feature = "jemalloc"))]
#[derive(Debug)]
pub struct AllocatorMetrics;

#[cfg(not(feature = "jemalloc"))]
impl AllocatorMetrics {
    /// Registers nothing.
    ///
    /// # Errors
    /// Never.
    pub fn new(_: &prometheus::Registry) -> prometheus::Result<Self> {
        Ok(Self)
    }

    /// Returns no documentation.
    pub fn described() -> Vec<crate::metrics::Description> {
        Vec::new()
    }

    /// Does nothing.
    pub fn refresh(&self) {}
}
