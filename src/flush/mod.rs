//! Memory → store, at its own pace.
//!
//! Memory publishes its pressure; one scheduler wakes on it (or on a tick), asks the pure [`policy`] for victims, seals
//! them and queues batches of one shuffle each, for the tier that [`tier`] chooses; a fixed number of workers per tier
//! writes them, so that a slow tier holds nothing up but its own batches. A batch leaves memory only after its bytes
//! and then its index records are readable in the store (docs/protocol.md §4.5). A batch that could not be written
//! anywhere stays in memory, readable, and is tried again forever with a growing pause: nothing is dropped because a
//! counter ran out.

pub(crate) mod metrics;
pub mod policy;
mod queue;
mod scheduler;
pub mod tier;
mod worker;

use std::sync::Arc;
use std::time::Duration;

pub use scheduler::Flusher;

use crate::schema::kind::{MIB, SECOND, TIB, count, size};
use crate::schema::section;
use crate::telemetry::traces::Traces;
use crate::tiers::{HdfsStore, LocalStore};

/// The tiers below memory; at least one.
#[derive(Debug, Clone, Default)]
pub struct Stores {
    /// Local disks.
    pub local: Option<Arc<LocalStore>>,
    /// Remote files.
    pub hdfs: Option<Arc<HdfsStore>>,
}

impl From<Arc<LocalStore>> for Stores {
    fn from(store: Arc<LocalStore>) -> Self {
        Self { local: Some(store), hdfs: None }
    }
}

section! {
    /// Pace and bounds of the flusher.
    pub struct FlushConfig {
        /// Watermarks and per-buffer bounds at the start; see [`Flusher::limits`].
        #[section(policy::Limits)]
        pub limits: policy::Limits,
        /// MEMORY_LOCALFILE_HDFS: a partition spilled with more than this goes to HDFS; so do huge ones.
        #[key("hybrid_store.memory_spill_to_cold_threshold_size", size(1..=TIB), Restart)]
        pub cold_bytes: u64 = 128_000_000,
        /// Partitions on their way to HDFS at once. More than that go to local disks where there are any.
        #[key("hybrid_store.memory_spill_to_hdfs_concurrency", count(1..=10_000), Restart)]
        pub hdfs_in_flight_max: usize = 500,
        /// Batches written to local disks at a time: disks × write concurrency per disk.
        pub workers: usize = 4,
        /// Bytes after which a batch of several partitions is closed; one partition's chain may be larger.
        pub batch_bytes_max: u64 = 64 * MIB,
        /// The scheduler looks at least this often.
        pub tick: Duration = SECOND,
        /// First pause after a batch could not be written; doubles up to `retry_pause_max`.
        pub retry_pause_min: Duration = SECOND / 10,
        /// Longest pause.
        pub retry_pause_max: Duration = 10 * SECOND,
        /// Which flushes are traced.
        pub traces: Traces = Traces::off(),
    }
}
