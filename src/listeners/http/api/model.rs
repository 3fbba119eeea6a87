//! Types of the API. Names end in their unit. Sizes are bytes; times are seconds or Unix
//! milliseconds.

use std::time::Duration;

use serde::Serialize;

use crate::service::{AppStatistics, Explanation, Incompleteness, Presence, QuotaUse};
use crate::store::{HdfsState, ObjectStoreState};

/// The worker's state without applications and history.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// Identity and state of the worker.
    pub node: NodeModel,
    /// Age of the figures.
    pub age_seconds: f64,
    /// The memory tier.
    pub memory: MemoryModel,
    /// Tiers with a known capacity: memory, and the local disks if there are any.
    pub tiers: Vec<TierModel>,
    /// Data directories.
    pub disks: Vec<DiskModel>,
    /// The object store, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_store: Option<ObjectStoreState>,
    /// HDFS, if the worker writes to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hdfs: Option<HdfsState>,
    /// Flushing from memory.
    pub flush: Flush,
    /// Memory reserved for sends.
    pub tickets: TicketsModel,
    /// Coordinators that the worker reports to.
    pub coordinators: Vec<Coordinator>,
    /// Open connections.
    pub connections: Connections,
    /// Totals of all applications.
    pub apps: AppTotals,
    /// Incomplete shuffles, whose results are refused.
    pub incomplete: Incompleteness,
    /// Configured quotas, with the largest user of each.
    pub quotas: Vec<QuotaUse>,
    /// Counters since the start.
    pub totals: Totals,
    /// Figures of the process.
    pub process: Process,
    /// Lines of `spark-defaults.conf` with which Spark uses this worker.
    pub spark_options: String,
}

/// The worker as a node of its cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeModel {
    /// Server id for coordinators and clients.
    pub id: String,
    /// Address announced to clients.
    pub ip: String,
    /// `active`, `unhealthy`, `decommissioning` or `decommissioned`.
    pub state: &'static str,
    /// Reason why `/health/ready` fails; null if the worker is ready.
    pub not_ready: Option<String>,
    /// Current tags.
    pub tags: Vec<String>,
    /// `store_type`
    pub store_type: &'static str,
    /// Bound port of gRPC.
    pub grpc_port: u16,
    /// Bound port of raw TCP; null if off.
    pub tcp_port: Option<u16>,
    /// Bound port of HTTP.
    pub http_port: u16,
    /// Version of the worker.
    pub version: &'static str,
    /// Commit it was built from.
    pub commit: &'static str,
    /// Start time.
    pub started_ms: i64,
    /// Time since the start.
    pub uptime_seconds: f64,
}

/// The memory tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryModel {
    /// `memory_store.capacity`
    pub capacity_bytes: u64,
    /// Bytes in use: stored, in flight or reserved.
    pub used_bytes: u64,
    /// Bytes reserved by tickets and not stored yet.
    pub reserved_bytes: u64,
    /// Bytes being flushed.
    pub in_flight_bytes: u64,
    /// Buffers of reads from disk, outside the capacity.
    pub read_buffer_bytes: u64,
    /// `memory_store.heap_capacity`
    pub heap_capacity_bytes: u64,
    /// Bytes charged to the heap budget.
    pub heap_used_bytes: u64,
    /// The charged bytes by kind.
    pub heap: Vec<HeapUse>,
    /// Blocks stored.
    pub blocks: u64,
    /// Maximum number of blocks.
    pub blocks_max: u64,
    /// Flushing starts at this share of the capacity.
    pub high_watermark: f64,
    /// Flushing ends at this share of the capacity.
    pub low_watermark: f64,
}

/// Heap use of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HeapUse {
    /// `requests`, `unfinished_blocks`, `answers`, `registrations`, `reported_ids` or `partitions`.
    pub kind: &'static str,
    /// Limit of this kind.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
}

/// A storage tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierModel {
    /// `memory` or `local`.
    pub tier: &'static str,
    /// Capacity of the tier.
    pub capacity_bytes: u64,
    /// Bytes of this worker in the tier.
    pub used_bytes: u64,
}

/// A data directory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiskModel {
    /// Path of the directory.
    pub path: String,
    /// Mount point of the directory.
    pub mount: String,
    /// `ssd`, `hdd` or `unknown`.
    pub media: &'static str,
    /// `healthy`, `full`, `read_only`, `detached`, `hung` or `broken`.
    pub condition: &'static str,
    /// Error of a read-only, detached, hung or broken disk.
    pub fault: Option<String>,
    /// Number of errors.
    pub failures: u64,
    /// Size of the file system.
    pub total_bytes: u64,
    /// Free bytes of the file system.
    pub free_bytes: u64,
    /// Bytes of this worker.
    pub used_bytes: u64,
    /// Bytes being written.
    pub in_flight_bytes: u64,
}

/// Flushing from memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Flush {
    /// Batches that wait to be written.
    pub queued_batches: usize,
    /// Batches that wait, are being written, or will be retried.
    pub unfinished_batches: usize,
    /// Bytes of the unfinished batches.
    pub in_flight_bytes: u64,
    /// Payload flushed since the start.
    pub flushed_bytes: u64,
    /// Number of failed writes of a batch to a tier.
    pub failed_writes: u64,
}

/// Memory reserved for sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TicketsModel {
    /// Tickets that are neither used nor expired.
    pub outstanding: usize,
    /// Bytes reserved by these tickets.
    pub reserved_bytes: u64,
    /// Tickets refused since the start because memory was full.
    pub refused_memory: u64,
    /// Tickets refused since the start because a huge partition used up its share.
    pub refused_partition: u64,
}

/// The link to a coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Coordinator {
    /// Address as configured.
    pub address: String,
    /// `up`, `down`, `untried` or `embedded`.
    pub link: &'static str,
    /// Reason if it is down.
    pub reason: Option<String>,
}

/// Open connections by listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Connections {
    /// Connections of gRPC.
    pub grpc: u64,
    /// Connections of raw TCP.
    pub tcp: u64,
    /// Connections of HTTP.
    pub http: u64,
}

/// Totals of all applications.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AppTotals {
    /// Number of known applications.
    pub count: usize,
    /// Number of their partitions.
    pub partitions: u64,
    /// Number of huge partitions.
    pub huge_partitions: u64,
    /// Number of lost blocks.
    pub lost_blocks: u64,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Payload received.
    pub received_bytes: u64,
    /// Payload read.
    pub read_bytes: u64,
    /// Payload flushed.
    pub flushed_bytes: u64,
}

/// Figures of the process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Process {
    /// Resident memory.
    pub resident_bytes: u64,
    /// CPU time since the start.
    pub cpu_seconds: f64,
    /// Number of threads.
    pub threads: u64,
    /// Number of open descriptors.
    pub open_files: u64,
    /// Number of panics, including those after which the task continued.
    pub panics: u64,
}

/// The applications, largest first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Apps {
    /// Number of known applications.
    pub count: usize,
    /// The largest applications, by payload received.
    pub apps: Vec<AppModel>,
    /// Finished applications, latest first.
    pub gone: Vec<FinishedApp>,
}

/// A known application.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AppModel {
    /// Application id.
    pub app: String,
    pub user: String,
    /// Time since its first registration.
    pub age_seconds: f64,
    /// Time since its last call.
    pub idle_seconds: f64,
    /// Number of registered shuffles.
    pub shuffles: usize,
    #[serde(flatten)]
    pub statistics: AppStatistics,
    /// Size of the largest partition divided by the mean of those with data; 0 without data.
    pub skew: f64,
    pub lost_blocks: u64,
}

impl AppModel {
    /// Creates the description of `app`.
    pub fn new(app: &crate::app::App, statistics: AppStatistics, idle: Duration, lost_blocks: u64) -> Self {
        Self {
            app: app.id().to_string(),
            user: app.client.user(),
            age_seconds: app.activity.age().as_secs_f64(),
            idle_seconds: idle.as_secs_f64(),
            shuffles: app.shuffles().len(),
            skew: statistics.skew(),
            statistics,
            lost_blocks,
        }
    }
}

/// A finished application. `/explain` has the details.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FinishedApp {
    /// Application id.
    pub app: String,
    /// User of the application.
    pub user: String,
    /// Outcome of the application.
    pub presence: Presence,
    /// Age when it ended.
    pub age_seconds: f64,
    /// Payload received from it.
    pub received_bytes: u64,
    /// Number of its blocks that were lost.
    pub lost_blocks: u64,
}

impl FinishedApp {
    /// Creates the short form of an explanation.
    #[must_use]
    pub fn new(gone: &Explanation) -> Self {
        Self {
            app: gone.app.clone(),
            user: gone.user.clone(),
            presence: gone.presence,
            age_seconds: gone.age_seconds,
            received_bytes: gone.bytes.received,
            lost_blocks: gone.losses.iter().map(|loss| loss.blocks).sum(),
        }
    }
}
