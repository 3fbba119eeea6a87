//! Settings of the worker as a whole: tiers, addresses, threads and shutdown.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::schema::kind::{
    HOUR, Kind, SECOND, count, flag, ip_address, list, optional, parsed, port, seconds, word,
};
use crate::schema::{section, words};
use uniffle_coordinator::identity::Advertised;

words! {
    /// The tiers a worker stores blocks in.
    pub enum StoreType {
        /// Memory only: when it is full, writers wait.
        Memory = "MEMORY",
        /// Memory, spilled to local disks.
        MemoryLocalfile = "MEMORY_LOCALFILE",
        /// Memory, spilled to HDFS.
        MemoryHdfs = "MEMORY_HDFS",
        /// Memory, spilled to local disks; large batches and huge partitions to HDFS.
        MemoryLocalfileHdfs = "MEMORY_LOCALFILE_HDFS",
        /// Memory, spilled to an object store, which clients read through the worker.
        MemoryObject = "MEMORY_OBJECT",
        /// Memory, spilled to local disks, and offloaded to an object store in the background.
        MemoryLocalfileObject = "MEMORY_LOCALFILE_OBJECT",
    }
}

impl StoreType {
    /// Returns whether blocks are spilled to local disks.
    pub fn has_local(self) -> bool {
        match self {
            Self::Memory | Self::MemoryHdfs | Self::MemoryObject => false,
            Self::MemoryLocalfile | Self::MemoryLocalfileHdfs | Self::MemoryLocalfileObject => true,
        }
    }

    /// Returns whether blocks are spilled to HDFS.
    pub fn has_hdfs(self) -> bool {
        match self {
            Self::Memory | Self::MemoryLocalfile | Self::MemoryObject | Self::MemoryLocalfileObject => false,
            Self::MemoryHdfs | Self::MemoryLocalfileHdfs => true,
        }
    }

    /// Returns whether blocks are stored in an object store.
    pub fn has_object(self) -> bool {
        match self {
            Self::Memory | Self::MemoryLocalfile | Self::MemoryHdfs | Self::MemoryLocalfileHdfs => false,
            Self::MemoryObject | Self::MemoryLocalfileObject => true,
        }
    }

    /// Returns the storage type for clients (spark.rss.storage.type). To clients, objects are local
    /// files.
    pub fn of_clients(self) -> Self {
        match self {
            Self::MemoryObject | Self::MemoryLocalfileObject => Self::MemoryLocalfile,
            same => same,
        }
    }
}

section! {
    /// The worker as a whole.
    #[table(
        "",
        "Store types:\n\
         MEMORY: memory only.\n\
         MEMORY_LOCALFILE, MEMORY_HDFS: memory, flushed to local disks or to HDFS.\n\
         MEMORY_LOCALFILE_HDFS: flushed to local disks, and large partitions to HDFS.\n\
         MEMORY_OBJECT: flushed to an object store, for workers without disks.\n\
         MEMORY_LOCALFILE_OBJECT: flushed to local disks, and offloaded to an object store in the \
         background."
    )]
    #[table("runtime_config", "Threads.")]
    #[table(
        "shutdown",
        "Shutdown (SIGTERM) and upgrade (SIGUSR2). Reads continue during the flush.\n\
         An upgrade that hands memory over (memory_store.backing) waits up to flush_timeout_sec \
         for writes in progress, and is refused after that.\n\
         An upgrade is refused while a disk hangs."
    )]
    pub struct WorkerConfig |machine| {
        /// Storage tiers of blocks. Clients set spark.rss.storage.type to the same, or to
        /// MEMORY_LOCALFILE for the last two.
        #[key("store_type", word(), Restart)]
        pub store_type: StoreType = StoreType::MemoryLocalfile,
        /// Address of all listeners except the administration listener.
        #[key("bind_address", ip_address(), Restart)]
        pub bind_address: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        /// Port of gRPC, shared with the embedded coordinator. All ports must differ.
        #[key("grpc_port", port(), Restart)]
        pub grpc_port: u16 = 21100,
        /// Port of the raw TCP protocol, for GRPC_NETTY clients. Default without
        /// coordinator_quorum: 21200, or 0 if grpc_port is 0; else off.
        #[key("urpc_port", optional(port()), Restart, example "21200")]
        pub urpc_port: Option<u16> = None,
        /// Port of metrics, health checks and the status page.
        #[key("http_port" or "metrics.http_port", port(), Restart)]
        pub http_port: u16 = 19998,
        /// Tags in addition to ss_v4, ss_v5 and GRPC.
        #[key("tags", list(TAGS_MAX, tag()), AtOnce)]
        pub tags: Vec<String> = Vec::new(),
        /// Stop the worker once it is decommissioned and its last application has ended.
        #[key("decommission_shutdown", flag(), Restart)]
        pub decommission_shutdown: bool = false,
        /// Threads of the asynchronous runtime. Default: the number of cores.
        #[key("runtime_config.worker_threads", count(1..=1024), Restart, example "8")]
        pub threads: usize = machine.cores.clamp(1, 1024),
        /// Maximum number of threads for blocking work, started on demand.
        #[key("runtime_config.blocking_threads", count(4..=4096), Restart)]
        pub blocking_threads: usize = 256,
        /// Time to flush memory on SIGTERM or before an upgrade. Keep it below the service
        /// manager's stop timeout (systemd: 90 s).
        #[key("shutdown.flush_timeout_sec", seconds(Duration::ZERO..=HOUR), Restart)]
        pub flush_timeout: Duration = 60 * SECOND,
        /// Address announced to coordinators and clients; a host name is resolved at start.
        /// Default: chosen from the network interfaces.
        #[env("WORKER_IP", optional(parsed("a reachable IP address or a host name", str::parse)))]
        pub advertised: Option<Advertised> = None,
    }
}

const TAGS_MAX: usize = 64;
const TAG_CHARS_MAX: usize = 100;

fn tag() -> Kind<String> {
    let convert = |text: &str| check_tag(text).map(|()| text.to_owned());
    parsed(&format!("1 to {TAG_CHARS_MAX} characters without blanks or commas"), convert)
}

/// Checks one tag. Metrics join tags with commas, and coordinators compare them as a set.
fn check_tag(text: &str) -> Result<(), String> {
    let is_plain = |c: char| !c.is_control() && !c.is_whitespace() && c != ',';
    match (1..=TAG_CHARS_MAX).contains(&text.chars().count()) && text.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!("tags of 1 to {TAG_CHARS_MAX} characters without blanks or commas")),
    }
}

/// Checks a list of tags.
///
/// # Errors
/// A description of the allowed tags.
pub fn check_tags(tags: &[String]) -> Result<(), String> {
    if tags.len() > TAGS_MAX {
        return Err(format!("at most {TAGS_MAX} tags"));
    }
    tags.iter().try_for_each(|text| check_tag(text))
}
