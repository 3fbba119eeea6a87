//! Settings of the worker as a whole: tiers, addresses, threads and shutdown.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::coordinator::identity::Advertised;
use crate::schema::kind::{
    HOUR, Kind, SECOND, count, flag, ip_address, list, optional, parsed, port, seconds, word,
};
use crate::schema::{section, words};

words! {
    /// The tiers a worker stores blocks in.
    pub enum StoreType {
        /// Memory only: when it is full, writers wait.
        Memory = "MEMORY",
        /// Memory, spilled to local disks.
        MemoryLocalfile = "MEMORY_LOCALFILE",
        /// Memory, spilled to HDFS.
        MemoryHdfs = "MEMORY_HDFS",
        /// Memory, spilled to local disks; cold partitions to HDFS.
        MemoryLocalfileHdfs = "MEMORY_LOCALFILE_HDFS",
        /// Memory, spilled to an object store, which clients read through the worker.
        MemoryObject = "MEMORY_OBJECT",
        /// Memory, spilled to local disks, and moved to an object store in the background.
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
    #[table("runtime_config", "Threads.")]
    #[table("shutdown", "How the worker ends.")]
    pub struct WorkerConfig |machine| {
        /// MEMORY; MEMORY_LOCALFILE: memory, spilled to local disks; MEMORY_HDFS: spilled to HDFS; MEMORY_LOCALFILE_HDFS: to
        /// local disks, and to HDFS what is cold; MEMORY_OBJECT: to an object store, for workers without disks;
        /// MEMORY_LOCALFILE_OBJECT: to local disks, and from there in the background to an object store. Clients must be told the
        /// same (spark.rss.storage.type); for the last two, MEMORY_LOCALFILE.
        #[key("store_type", word(), Restart)]
        pub store_type: StoreType = StoreType::MemoryLocalfile,
        /// Address all listeners listen on.
        #[key("bind_address", ip_address(), Restart)]
        pub bind_address: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        /// Port of gRPC, with the embedded coordinator when there is one. Ports must differ.
        #[key("grpc_port", port(), Restart)]
        pub grpc_port: u16 = 21100,
        /// Port of Uniffle's raw TCP protocol, which clients of type GRPC_NETTY speak. Default: on at 21200 with the embedded
        /// coordinator (0 if grpc_port is 0), off with a coordinator_quorum.
        #[key("urpc_port", optional(port()), Restart, example "21200")]
        pub urpc_port: Option<u16> = None,
        /// Port of metrics, health and status.
        #[key("http_port" or "metrics.http_port", port(), Restart)]
        pub http_port: u16 = 19998,
        /// Tags besides ss_v4, ss_v5 and GRPC.
        #[key("tags", list(TAGS_MAX, tag()), AtOnce)]
        pub tags: Vec<String> = Vec::new(),
        /// Whether the worker stops once it is decommissioned and no application is left.
        #[key("decommission_shutdown", flag(), Restart)]
        pub decommission_shutdown: bool = false,
        /// Threads of the asynchronous runtime. Default: the machine's cores.
        #[key("runtime_config.worker_threads", count(1..=1024), Restart, example "8")]
        pub threads: usize = machine.cores.clamp(1, 1024),
        /// Most threads for disk work, started on demand.
        #[key("runtime_config.blocking_threads", count(4..=4096), Restart)]
        pub blocking_threads: usize = 256,
        /// How long a worker that is stopped (SIGTERM) or upgraded (SIGUSR2) may take to bring what is in memory to the
        /// disks; reads go on meanwhile. An upgrade that passes memory on (memory_store.backing) may take as long to end the
        /// batches that are being written, or is refused; one beside a disk that hangs, but 10 s at least, until its
        /// successor is ready. Stay below the time that the service manager gives (systemd: 90 s).
        #[key("shutdown.flush_timeout_sec", seconds(Duration::ZERO..=HOUR), Restart)]
        pub flush_timeout: Duration = 60 * SECOND,
        /// The address told to coordinators and clients; of a host name, such as that of a Kubernetes Service, the address
        /// that it stands for at start. Default: found out from the interfaces.
        #[env("WORKER_IP", optional(parsed("an IP address that clients can reach or a host name", str::parse)))]
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
