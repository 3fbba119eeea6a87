//! What jemalloc holds, by its own counters, and how much of it is kept for reuse. Payload is not in it: blocks live in the
//! memory region.
//!
//! jemalloc keeps what was freed for some seconds, in several arenas, because to take the same pages from the system again
//! costs more than to receive what they are for. What was freed in one arena is not used by another: under attack that was
//! 160 MiB of a heap of 72. So the budget of the heap has it returned ([`return_freed`]) as its charges go on.

#[cfg(feature = "jemalloc")]
mod jemalloc {
    use prometheus::IntGauge;
    use tikv_jemalloc_ctl::{Access as _, AsName as _, Result, arenas, epoch, stats};

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

    /// Returns what was freed and is kept for reuse to the system, when it is more than `most_bytes`. What fails leaves it
    /// where it is, as before.
    pub(crate) fn return_freed(most_bytes: u64) {
        if kept_bytes().is_ok_and(|kept| kept > most_bytes) {
            let _ = return_all();
        }
    }

    /// Bytes of pages that are resident and in no use (jemalloc's dirty pages; `stats.resident` has those, the active and its own).
    fn kept_bytes() -> Result<u64> {
        epoch::advance()?;
        let in_use = stats::active::read()? + stats::metadata::read()?;
        Ok(stats::resident::read()?.saturating_sub(in_use) as u64)
    }

    /// A decay time of nothing returns an arena's freed pages in that call, whatever the background thread does.
    fn return_all() -> Result<()> {
        let usual: isize = b"arenas.dirty_decay_ms\0"[..].name().read()?;
        let mut decay = b"arena.0.dirty_decay_ms\0"[..].name().mib::<[usize; 3]>()?;
        for arena in 0..arenas::narenas::read()? {
            decay[1] = arena as usize;
            // One that no thread has used yet does not exist.
            if decay.write(0_isize).is_ok() {
                decay.write(usual)?;
            }
        }
        Ok(())
    }

    impl AllocatorMetrics {
        /// Brings them up to date.
        pub(crate) fn refresh(&self) {
            // The counters are snapshots of the last epoch. None of the calls fails on a jemalloc with statistics.
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
pub(crate) use jemalloc::{AllocatorMetrics, return_freed};

/// Nothing: what the system's allocator keeps is not known.
#[cfg(not(feature = "jemalloc"))]
pub(crate) fn return_freed(_: u64) {}

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
