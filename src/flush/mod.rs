//! Moves data from memory to the tiers, each at its own pace.
//!
//! One scheduler wakes on memory pressure or a tick. It asks the pure [`policy`] for victims, seals
//! them, and queues batches of one shuffle each for the tier that [`placement`] selects. A fixed
//! number of workers per tier writes them, so a slow tier delays only its own batches. Unless its
//! shuffle is purged, a batch leaves memory only after its bytes and then its index records are
//! readable in the tier (docs/protocol.md §4.5). A batch that no tier could write stays readable in
//! memory and is retried without limit, with exponential backoff. Buffers above their own limits
//! and commits are flushed without the scheduler.

pub(crate) mod metrics;
pub mod placement;
pub mod policy;
mod queue;
mod scheduler;
mod worker;

use std::time::Duration;

pub use scheduler::Flusher;

use crate::schema::kind::{MIB, SECOND, TIB, size};
use crate::schema::section;
use crate::telemetry::traces::Traces;

section! {
    /// Pace and bounds of the flusher.
    pub struct FlushConfig {
        /// Watermarks and per-buffer bounds at the start; see [`Flusher::limits`].
        #[section(policy::Limits)]
        pub limits: policy::Limits,
        /// With MEMORY_LOCALFILE_HDFS, larger flushes of a partition go to HDFS, and all of huge
        /// partitions.
        #[key("hybrid_store.memory_spill_to_cold_threshold_size", size(1..=TIB), Restart)]
        pub cold_bytes: u64 = 128_000_000,
        /// Bytes after which a batch of several partitions is closed. One partition's chain may be
        /// larger.
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
