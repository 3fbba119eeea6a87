//! The shapes of the API. Names end in their unit; sizes are bytes, times seconds or Unix milliseconds.

use std::time::Duration;

use serde::Serialize;

use crate::service::{AppStatistics, Explanation, Incompleteness, Presence, QuotaUse};

/// Everything but the applications and the last minutes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// Who this is, now.
    pub node: Node,
    /// How old the figures are.
    pub age_seconds: f64,
    /// The memory tier.
    pub memory: Memory,
    /// All tiers, the fastest first.
    pub tiers: Vec<Tier>,
    /// Data directories.
    pub disks: Vec<Disk>,
    /// The object store; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_store: Option<ObjectStore>,
    /// Between memory and disks.
    pub flush: Flush,
    /// Promised memory.
    pub tickets: Tickets,
    /// Whom it reports to.
    pub coordinators: Vec<Coordinator>,
    /// Who is connected.
    pub connections: Connections,
    /// Applications in all.
    pub apps: AppTotals,
    /// What is not proven to be complete: its results are refused.
    pub incomplete: Incompleteness,
    /// Quotas that are set, with who has most of each.
    pub quotas: Vec<QuotaUse>,
    /// Since the start.
    pub totals: Totals,
    /// The process.
    pub process: Process,
}

/// The worker as a node of its cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Node {
    /// Server id, as coordinators and clients know it.
    pub id: String,
    /// Address told to clients.
    pub ip: String,
    /// `active`, `unhealthy`, `decommissioning` or `decommissioned`.
    pub state: &'static str,
    /// Why `/health/ready` says no; null when it says yes.
    pub not_ready: Option<String>,
    /// Configured tags.
    pub tags: Vec<String>,
    /// `store_type`
    pub store_type: &'static str,
    /// As bound.
    pub grpc_port: u16,
    /// As bound; null = off.
    pub tcp_port: Option<u16>,
    /// As bound.
    pub http_port: u16,
    /// Version of the worker.
    pub version: &'static str,
    /// Commit it was built from.
    pub commit: &'static str,
    /// Start.
    pub started_ms: i64,
    /// Since then.
    pub uptime_seconds: f64,
}

/// The memory tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// `memory_store.capacity`
    pub capacity_bytes: u64,
    /// In use: stored, in flight or reserved.
    pub used_bytes: u64,
    /// Promised to tickets, not stored yet.
    pub reserved_bytes: u64,
    /// On the way to disks.
    pub in_flight_bytes: u64,
    /// Buffers of reads from disk, outside the capacity.
    pub read_buffer_bytes: u64,
    /// `memory_store.heap_capacity`
    pub heap_capacity_bytes: u64,
    /// Charged to it.
    pub heap_used_bytes: u64,
    /// ... by kind.
    pub heap: Vec<HeapUse>,
    /// Blocks stored.
    pub blocks: u64,
    /// At most.
    pub blocks_max: u64,
    /// Spilling starts at this share.
    pub high_watermark: f64,
    /// ... and ends at this one.
    pub low_watermark: f64,
}

/// What the heap is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HeapUse {
    /// `requests`, `unfinished_blocks`, `answers`, `registrations`, `reported_ids` or `partitions`.
    pub kind: &'static str,
    /// The most that it may have.
    pub capacity_bytes: u64,
    /// What it has.
    pub used_bytes: u64,
}

/// A place where blocks are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tier {
    /// `memory` or `local`.
    pub tier: &'static str,
    /// Its size.
    pub capacity_bytes: u64,
    /// Bytes of this worker in it.
    pub used_bytes: u64,
}

/// An object store, and the read cache before it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ObjectStore {
    /// Bytes of the segments of known shuffles.
    pub stored_bytes: u64,
    /// Whether the last calls failed by its fault.
    pub is_failing: bool,
    /// Bytes of the places in use in the read cache.
    pub cache_used_bytes: u64,
    /// Bytes of all its places; 0 = there is none.
    pub cache_capacity_bytes: u64,
    /// Chunks that reads found in it.
    pub cache_hits: u64,
    /// Chunks that were fetched for it.
    pub cache_misses: u64,
}

/// A data directory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Disk {
    /// Its root.
    pub path: String,
    /// Where it is mounted.
    pub mount: String,
    /// `ssd`, `hdd` or `unknown`.
    pub media: &'static str,
    /// `healthy`, `full`, `read_only`, `detached`, `hung` or `broken`.
    pub condition: &'static str,
    /// What is wrong with a read-only, detached, hung or broken one.
    pub fault: Option<String>,
    /// Errors so far.
    pub failures: u64,
    /// Size of the file system.
    pub total_bytes: u64,
    /// Free in it.
    pub free_bytes: u64,
    /// Of this worker.
    pub used_bytes: u64,
    /// Being written.
    pub in_flight_bytes: u64,
}

/// Between memory and disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Flush {
    /// Batches that wait for a worker.
    pub queued_batches: usize,
    /// Those and the ones being written or waiting to be tried again.
    pub unfinished_batches: usize,
    /// Their bytes.
    pub in_flight_bytes: u64,
    /// Payload brought to disks since the start.
    pub flushed_bytes: u64,
    /// How often a batch could be written to no disk.
    pub failed_writes: u64,
}

/// Promised memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Tickets {
    /// Neither used nor expired.
    pub outstanding: usize,
    /// Their bytes.
    pub reserved_bytes: u64,
    /// Refused because the memory was full, since the start.
    pub refused_memory: u64,
    /// Refused because a huge partition filled its share, since the start.
    pub refused_partition: u64,
}

/// One coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Coordinator {
    /// As configured.
    pub address: String,
    /// `up`, `down`, `untried` or `embedded`.
    pub link: &'static str,
    /// Why it is down.
    pub reason: Option<String>,
}

/// Open connections by listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Connections {
    /// gRPC.
    pub grpc: u64,
    /// Raw TCP.
    pub tcp: u64,
    /// HTTP, this one included.
    pub http: u64,
}

/// Applications in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AppTotals {
    /// Known now.
    pub count: usize,
    /// Their partitions.
    pub partitions: u64,
    /// Of those, huge.
    pub huge_partitions: u64,
    /// Blocks of theirs that are lost.
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

/// The process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Process {
    /// Resident memory.
    pub resident_bytes: u64,
    /// CPU time since the start.
    pub cpu_seconds: f64,
    /// Threads.
    pub threads: u64,
    /// Descriptors.
    pub open_files: u64,
    /// Panics; each ended a task.
    pub panics: u64,
}

/// The applications, the largest first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Apps {
    /// How many are known.
    pub count: usize,
    /// The largest of them, by payload received.
    pub apps: Vec<App>,
    /// Those that have gone, the latest first.
    pub gone: Vec<Gone>,
}

/// One application.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct App {
    /// Its id.
    pub app: String,
    pub user: String,
    /// Since its first registration.
    pub age_seconds: f64,
    /// Since it was last heard of.
    pub idle_seconds: f64,
    /// Shuffles registered.
    pub shuffles: usize,
    #[serde(flatten)]
    pub statistics: AppStatistics,
    /// The largest partition by the mean of those with data; 0 without any.
    pub skew: f64,
    pub lost_blocks: u64,
}

impl App {
    /// What is told of `app`.
    pub fn new(app: &crate::app::App, statistics: AppStatistics, idle: Duration, lost_blocks: u64) -> Self {
        Self {
            app: app.id().to_string(),
            user: app.user(),
            age_seconds: app.age().as_secs_f64(),
            idle_seconds: idle.as_secs_f64(),
            shuffles: app.shuffles().len(),
            skew: statistics.skew(),
            statistics,
            lost_blocks,
        }
    }
}

/// An application that is here no more; `/explain` tells the rest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gone {
    /// Its id.
    pub app: String,
    /// Its user.
    pub user: String,
    /// How it went.
    pub presence: Presence,
    /// How old it was.
    pub age_seconds: f64,
    /// Payload it had sent.
    pub received_bytes: u64,
    /// Blocks of it that were lost.
    pub lost_blocks: u64,
}

impl Gone {
    /// The short form of `gone`.
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
