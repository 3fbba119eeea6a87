//! Memory → store, at its own pace.
//!
//! Memory publishes its pressure; one scheduler wakes on it (or on a tick), asks the pure [`policy`] for victims, seals
//! them and queues batches of one shuffle each; a fixed number of workers writes them. A batch leaves memory only after
//! its bytes and then its index records are readable in the store (PROTOCOL §4.5). A batch that could not be written
//! anywhere stays in memory, readable, and is tried again for ever with a growing pause: nothing is dropped because a
//! counter ran out.

mod metrics;
pub mod policy;
mod queue;
mod scheduler;
mod worker;

use std::time::Duration;

pub use scheduler::Flusher;

/// Pace and bounds of the flusher.
#[derive(Debug, Clone)]
pub struct FlushConfig {
    /// Watermarks and per-buffer bounds.
    pub limits: policy::Limits,
    /// Batches written at a time. Default: disks × write concurrency per disk.
    pub workers: usize,
    /// Bytes after which a batch of several partitions is closed; one partition's chain may be larger.
    pub batch_bytes_max: u64,
    /// The scheduler looks at least this often.
    pub tick: Duration,
    /// First pause after a batch could not be written; doubles up to `retry_pause_max`.
    pub retry_pause_min: Duration,
    /// Longest pause.
    pub retry_pause_max: Duration,
}
