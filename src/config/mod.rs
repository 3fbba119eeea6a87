//! The configuration: TOML and environment → sorted keys → typed [`Config`] → cross-checks.
//!
//! All problems are reported at once, each with its key, its value and what is allowed. Nothing here starts, opens or
//! binds anything. Invariant: a `Config` made by [`Config::load`] or [`Config::parse`] needs no further checks.
//! The environment is passed in as a map, the machine as a [`Machine`], so that tests share no state.

mod banner;
mod build;
mod embedded;
mod hdfs;
mod keys;
mod machine;
mod observe;
mod print;
mod reader;
mod tls;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use banner::startup_banner;
pub use build::check_tags;
pub use machine::Machine;
pub use tls::{Tls, TlsListener};

use crate::coordinator::embedded::assign::{NodeOrder, PartitionSelection};
use crate::listeners::http::admin::Token;
use crate::listeners::http::push;
use crate::telemetry::TelemetryConfig;
use crate::tiers::hdfs::RemoteLocation;

/// Least capacity of the memory store: room for a handful of the largest segments.
pub const CAPACITY_BYTES_MIN: u64 = 16 << 20;

/// Largest configuration file read; real ones have a few KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Longest value repeated in a problem.
const SHOWN_CHARS_MAX: usize = 120;

/// Everything the worker can be told, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The file it came from; none for the embedded defaults.
    pub source: Option<PathBuf>,
    /// Things accepted that have no effect; to be logged once.
    pub warnings: Vec<String>,
    /// Tiers. Default: `MEMORY_LOCALFILE`.
    pub store_type: StoreType,
    /// Address all listeners listen on. Default: 0.0.0.0.
    pub bind_address: IpAddr,
    /// gRPC port; 0 = any free one. Default: 21100.
    pub grpc_port: u16,
    /// Raw TCP port; 0 = any free one. Default: 21200 with the embedded coordinator (0 if `grpc_port` is 0), else none.
    pub urpc_port: Option<u16>,
    /// HTTP port; 0 = any free one. Default: 19998.
    pub http_port: u16,
    /// Coordinators to send heartbeats to; none = embedded coordinator. Default: none. At most 16.
    pub coordinator_quorum: Vec<Endpoint>,
    /// Tags besides the ones of the protocol versions. Default: none. At most 64.
    pub tags: Vec<String>,
    /// Time between two heartbeats. Default: 10 s; 1 s to 1 h.
    pub heartbeat_interval: Duration,
    /// How often a decommissioning worker looks whether an application is left. Default: 60 s; 1 s to 1 h.
    pub decommission_check_interval: Duration,
    /// Whether the worker stops once it is decommissioned. Default: false.
    pub decommission_shutdown: bool,
    /// `[shutdown] flush_timeout_sec`: how long a worker that stops or is upgraded may take to bring what is in memory to
    /// the disks. Default: 60 s, within systemd's 90; 0 to 1 h.
    pub shutdown_flush_timeout: Duration,
    /// `WORKER_IP`: the address told to coordinators and clients; none = found out from the interfaces.
    pub advertised_ip: Option<IpAddr>,
    /// `[memory_store]`
    pub memory: MemoryStore,
    /// `[localfile_store]`
    pub localfile: LocalfileStore,
    /// `[hdfs_store]`
    pub hdfs: HdfsSection,
    /// `[hybrid_store]`
    pub hybrid: HybridStore,
    /// `[runtime_config]`
    pub runtime: Runtime,
    /// `[log]`; the filter is `RUST_LOG`, else `LOG`, else `info`. Default: stderr, `Daily`, 14 files (1 to
    /// 10,000), text.
    pub log: TelemetryConfig,
    /// `[metrics]`, except its port
    pub metrics: Metrics,
    /// `[tracing]`
    pub tracing: Tracing,
    /// `[app_config]`
    pub app: App,
    /// `[grpc]`
    pub grpc: Grpc,
    /// `[http]`
    pub http: Http,
    /// `[admin]`
    pub admin: Admin,
    /// `[tls]`
    pub tls: Tls,
    /// `[embedded_coordinator]`
    pub embedded_coordinator: EmbeddedCoordinator,
}

/// The tiers a worker stores blocks in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreType {
    /// Memory only: when it is full, writers wait.
    Memory,
    /// Memory, spilled to local disks.
    MemoryLocalfile,
    /// Memory, spilled to HDFS.
    MemoryHdfs,
    /// Memory, spilled to local disks, and to HDFS what is cold.
    MemoryLocalfileHdfs,
}

impl StoreType {
    /// The name used in configurations and by clients.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "MEMORY",
            Self::MemoryLocalfile => "MEMORY_LOCALFILE",
            Self::MemoryHdfs => "MEMORY_HDFS",
            Self::MemoryLocalfileHdfs => "MEMORY_LOCALFILE_HDFS",
        }
    }

    /// True when blocks are spilled to local disks.
    #[must_use]
    pub fn has_local(self) -> bool {
        match self {
            Self::Memory | Self::MemoryHdfs => false,
            Self::MemoryLocalfile | Self::MemoryLocalfileHdfs => true,
        }
    }

    /// True when blocks are spilled to HDFS.
    #[must_use]
    pub fn has_hdfs(self) -> bool {
        match self {
            Self::Memory | Self::MemoryLocalfile => false,
            Self::MemoryHdfs | Self::MemoryLocalfileHdfs => true,
        }
    }
}

/// Which data reads have their blocks' checksums compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyReads {
    /// All.
    Always,
    /// One in sixteen.
    Sampled,
    /// None.
    Off,
}

impl VerifyReads {
    /// The name used in configurations.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Sampled => "sampled",
            Self::Off => "off",
        }
    }
}

/// `localfile_store.sync`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncWrites {
    /// Nothing is synced.
    Off,
    /// Everything that counts, writers together.
    Group,
}

impl SyncWrites {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Group => "group",
        }
    }
}

/// `host:port` of a coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Host name or IP address, IPv6 without brackets.
    pub host: String,
    /// Port, never 0.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            return write!(f, "[{}]:{}", self.host, self.port);
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// `[memory_store]`
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryStore {
    /// Bytes of the segment region. Default: 40 % of the memory, 256 MiB to 16 GiB; 16 MiB to 16 TiB.
    pub capacity_bytes: u64,
    /// Life of an unused ticket. Default: 300 s; 1 s to 1 d.
    pub ticket_timeout: Duration,
    /// Time between two looks for expired tickets. Default: 10 s; 100 ms to 1 h, at most the timeout.
    pub ticket_check_interval: Duration,
    /// Tickets outstanding at once. Default: 1,000,000; 1 to 100,000,000.
    pub ticket_max_count: usize,
    /// Bytes for reads from disk under way. Default: 64 MiB; 4 MiB to 64 GiB.
    pub read_capacity_bytes: u64,
    /// Blocks in memory at once. Default: one per 512 bytes of capacity; 1,000 to 2^32.
    pub block_max_count: u64,
}

/// `[localfile_store]`
#[derive(Debug, Clone, PartialEq)]
pub struct LocalfileStore {
    /// One directory per disk. Default: one below the user's state directory. At most 64.
    pub data_paths: Vec<PathBuf>,
    /// Fewer healthy disks than this make the worker unhealthy. Default: 0; at most the number of paths.
    pub healthy_check_min_disks: usize,
    /// A disk used beyond this gets no new data. Default: 0.8.
    pub disk_high_watermark: f64,
    /// ... until it is used less than this. Default: 0.7.
    pub disk_low_watermark: f64,
    /// Operations under way per disk. Default: 2000; 1 to 1,000,000.
    pub disk_max_concurrency: usize,
    /// Writes under way per disk. Default: 4; 1 to 256.
    pub write_concurrency_per_disk: usize,
    /// Time between two health checks. Default: 60 s; 1 s to 1 d.
    pub disk_healthy_check_interval: Duration,
    /// Write past the page cache where the file system allows it. Default: true.
    pub direct_io: bool,
    /// Whether a start takes over what an earlier process left; else it is deleted. Default: true.
    pub recovery: bool,
    /// Who reads and writes. Default: blocking calls.
    pub io_engine: IoEngine,
    /// Which data reads have their blocks' checksums compared. Default: `always`, which costs 8 % of a read's CPU time.
    pub verify_reads: VerifyReads,
    /// What is synced before it counts. Default: `off`, nothing.
    pub sync: SyncWrites,
    /// Index records kept in memory. Default: 16 MiB; 0 to 16 GiB.
    pub index_cache_bytes: u64,
}

/// `[hdfs_store]`
#[derive(Debug, Clone, PartialEq)]
pub struct HdfsSection {
    /// Files written at a time per file system. Default: 10; 1 to 10,000.
    pub max_concurrency: usize,
    /// Writers per partition. Default: 20; 1 to 1,000.
    pub partition_write_max_concurrency: usize,
    /// What clients may name as remote path, with everything below. Default: the embedded coordinator's paths where
    /// there are any, else everything. At most 256.
    pub allowed_paths: Vec<RemoteLocation>,
    /// Time for a batch, and a second more for every MiB of it. Default: 60 s; 1 s to 1 h.
    pub write_timeout: Duration,
    /// Whether a file is written to every allowed path at start, and the start fails if that does. Default: false.
    pub precheck_enable: bool,
    /// Keytab of the worker's login. Default: none, the ticket cache is used.
    pub keytab_path: Option<PathBuf>,
    /// Principal in the keytab; both or neither.
    pub principal: Option<String>,
    /// Whether files are written as the application's user where Hadoop's security is on. Default: true.
    pub proxy_user_enable: bool,
    /// `HADOOP_CONF_DIR`: the worker's own Hadoop settings. Default: none.
    pub hadoop_conf_dir: Option<PathBuf>,
    /// `KRB5CCNAME`: where the tickets are when there is no keytab. Default: none, Kerberos' own default.
    pub ticket_cache: Option<String>,
}

/// `[hybrid_store]`
#[derive(Debug, Clone, PartialEq)]
pub struct HybridStore {
    /// Share of the capacity in use at which spilling starts. Default: 0.8.
    pub memory_spill_high_watermark: f64,
    /// ... and down to which it goes. Default: 0.2.
    pub memory_spill_low_watermark: f64,
    /// A single partition is spilled beyond this size. Default: 256 MiB; 1 MiB to 1 TiB.
    pub memory_single_buffer_max_spill_size_bytes: u64,
    /// ... and one of a huge partition beyond this one. Default: 128 MB; 1 MiB to 1 TiB.
    pub huge_partition_memory_single_buffer_max_spill_size_bytes: u64,
    /// With both, a single batch larger than this goes to HDFS instead of local disks. Default: 128 MB; 1 to 1 TiB.
    pub memory_spill_to_cold_threshold_size_bytes: u64,
    /// Batches for HDFS in flight; with local disks too, more go there. Default: 500; 1 to 10,000.
    pub memory_spill_to_hdfs_concurrency: usize,
}

/// `[runtime_config]`
#[derive(Debug, Clone, PartialEq)]
pub struct Runtime {
    /// Threads of the asynchronous runtime. Default: cores; 1 to 1024.
    pub worker_threads: usize,
    /// Most threads for blocking work (disks). Default: 256; 4 to 4096.
    pub blocking_threads: usize,
    /// Where connections of the raw TCP listener run. Default: per core.
    pub urpc: UrpcRuntime,
}

/// `localfile_store.io_engine`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoEngine {
    /// Threads that wait for `pread` and `pwritev`.
    Blocking,
    /// One io_uring per disk.
    Uring,
}

impl IoEngine {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Blocking => "blocking",
            Self::Uring => "io_uring",
        }
    }
}

/// `runtime_config.urpc_runtime`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrpcRuntime {
    /// As many threads as `worker_threads`, each with connections of its own.
    PerCore,
    /// With everything else.
    Shared,
}

impl UrpcRuntime {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PerCore => "per_core",
            Self::Shared => "shared",
        }
    }
}

/// `[metrics]`
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics {
    /// A Prometheus pushgateway. Default: none.
    pub push_gateway_endpoint: Option<push::Endpoint>,
    /// Time between two pushes. Default: 10 s; 1 s to 1 h.
    pub push_interval: Duration,
    /// More labels of what is pushed. Default: none. At most 16.
    pub labels: BTreeMap<String, String>,
}

/// `[tracing]`
#[derive(Debug, Clone, PartialEq)]
pub struct Tracing {
    /// An OTLP collector (gRPC). Default: none, nothing is traced.
    pub otlp_endpoint: Option<String>,
    /// Share of the calls without a trace of the client's that get one. Default: 0.01.
    pub sampling_ratio: f64,
}

/// `[app_config]`
#[derive(Debug, Clone, PartialEq)]
pub struct App {
    /// An application silent for this long is purged. Default: 5 min; 10 s to 7 d.
    pub heartbeat_timeout: Duration,
    /// Whether a huge partition's share of the memory is limited. Default: true.
    pub partition_limit_enable: bool,
    /// A partition that received more is huge. Default: 20 GB; 1 MiB to 1 PiB.
    pub partition_limit_threshold_bytes: u64,
    /// Share of the memory that a huge partition may fill. Default: 0.2; more than 0.
    pub partition_limit_memory_backpressure_ratio: f64,
    /// Whether clients are told to split partitions. Default: false.
    pub partition_split_enable: bool,
    /// A partition that would have more is to be split. Default: 40 GB; 1 MiB to 1 PiB.
    pub partition_split_threshold_bytes: u64,
    /// A partition that would have more is refused for good. Default: none; 1 MiB to 1 PiB.
    pub partition_hard_limit_bytes: Option<u64>,
}

/// `[grpc]`: the bounds of the gRPC listener.
#[derive(Debug, Clone, PartialEq)]
pub struct Grpc {
    /// Largest message accepted. Default: 1 GiB; 1 MiB to 2 GiB − 1.
    pub max_message_bytes: u64,
    /// Connections at once. Default: 4096; 1 to 100,000.
    pub max_connections: usize,
    /// Streams at once per connection. Default: 256; 1 to 65,535.
    pub max_concurrent_streams: usize,
    /// Sum of the calls that all connections may have in progress; each gets fewer the more there are, but at least
    /// four. Default: 8192; 256 to 10,000,000.
    pub max_streams_total: usize,
    /// HTTP/2 window of a stream. Default: 1 MiB; 64 KiB to 64 MiB.
    pub stream_window_bytes: u64,
    /// HTTP/2 window of a connection. Default: 4 MiB; the stream's window to 512 MiB.
    pub connection_window_bytes: u64,
    /// Sum of the windows of all connections, which shrink to keep it. Default: 64 MiB; the connection's window to 64 GiB.
    pub window_total_bytes: u64,
    /// Largest HTTP/2 frame accepted. Default: 1 MiB; 16 KiB to 8 MiB.
    pub max_frame_bytes: u64,
    /// A request must have arrived within this time. Default: 120 s; 1 s to 1 h.
    pub request_timeout: Duration,
}

/// `[http]`: the bounds of the HTTP listener.
#[derive(Debug, Clone, PartialEq)]
pub struct Http {
    /// Connections at once; more wait. Default: 64; 1 to 10,000.
    pub max_connections: usize,
    /// A request is answered within this time. Default: 30 s; 1 s to 10 min.
    pub request_timeout: Duration,
}

/// `[admin]`: the administration's listener.
#[derive(Debug, Clone, PartialEq)]
pub struct Admin {
    /// Port; 0 = any free one. Default: none, there is no administration.
    pub port: Option<u16>,
    /// Address it listens on; any but a loopback one needs a token. Default: 127.0.0.1.
    pub bind_address: IpAddr,
    /// File that holds the bearer token. Default: none.
    pub token_file: Option<PathBuf>,
    /// `WORKER_ADMIN_TOKEN`: the bearer token itself. Default: none.
    pub token: Option<Token>,
    /// Who may decommission the worker over gRPC, where there is no token. Default: coordinators.
    pub grpc_decommission: GrpcDecommission,
}

/// `admin.grpc_decommission`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrpcDecommission {
    /// Nobody.
    Off,
    /// Programs on this machine.
    Loopback,
    /// The machines of `coordinator_quorum`.
    Coordinators,
    /// Everybody who reaches the port, as with the Java server.
    Open,
}

impl GrpcDecommission {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Off, Self::Loopback, Self::Coordinators, Self::Open];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Loopback => "loopback",
            Self::Coordinators => "coordinators",
            Self::Open => "open",
        }
    }
}

/// `[embedded_coordinator]`, used when there is no `coordinator_quorum`.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddedCoordinator {
    /// A worker that is silent for longer is lost. Default: 30 s; 100 ms to 1 h, more than the heartbeat interval.
    pub node_timeout: Duration,
    /// An application that is silent for longer is forgotten. Default: 60 s; 1 s to 1 d.
    pub app_timeout: Duration,
    /// Most workers given to one shuffle. Default: 9; 1 to 10,000.
    pub shuffle_nodes_max: usize,
    /// Order of the candidates. Default: `PARTITION_BALANCE`; or `BASIC`.
    pub assignment_strategy: NodeOrder,
    /// Dealing of partitions to workers. Default: `CONTINUOUS`; or `ROUND`.
    pub select_partition_strategy: PartitionSelection,
    /// Ids of workers that get no new shuffles. Default: none. At most 10,000.
    pub exclude_nodes: Vec<String>,
    /// Workers with the wanted tags and memory that `accessCluster` asks for. Default: 1; 1 to 10,000.
    pub access_min_nodes: usize,
    /// Free share of its memory from which on a worker counts for that. Default: 0.0.
    pub access_min_memory_ratio: f64,
    /// Applications of one user at a time, for `accessCluster`. Default: 0, any number; to 100,000.
    pub quota_apps_per_user: usize,
    /// Handed to clients by `fetchRemoteStorage`. Default: none. At most 64.
    pub remote_storage_paths: Vec<String>,
    /// Hadoop settings by the host of a path, as `k=v,k=v`. Default: empty. At most 64 entries.
    pub remote_storage_conf: BTreeMap<String, String>,
    /// Handed to clients by `fetchClientConf`. Default: empty. At most 256 entries.
    pub client_conf: BTreeMap<String, String>,
}

impl Default for EmbeddedCoordinator {
    fn default() -> Self {
        Self {
            node_timeout: Duration::from_secs(30),
            app_timeout: Duration::from_secs(60),
            shuffle_nodes_max: 9,
            assignment_strategy: NodeOrder::default(),
            select_partition_strategy: PartitionSelection::default(),
            exclude_nodes: Vec::new(),
            access_min_nodes: 1,
            access_min_memory_ratio: 0.0,
            quota_apps_per_user: 0,
            remote_storage_paths: Vec::new(),
            remote_storage_conf: BTreeMap::new(),
            client_conf: BTreeMap::new(),
        }
    }
}

/// One thing wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key as written.
    pub key: String,
    /// Its value, shortened.
    pub value: Option<String>,
    /// What is allowed instead.
    pub allowed: String,
}

impl Problem {
    fn new(key: &str, value: &toml::Value, allowed: &str) -> Self {
        Self { key: key.to_owned(), value: Some(value.to_string()), allowed: allowed.to_owned() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(value) = &self.value else {
            return write!(f, "{}: {}", self.key, self.allowed);
        };
        let shown: String =
            value.chars().take(SHOWN_CHARS_MAX).map(|c| if c == '\n' { ' ' } else { c }).collect();
        let cut = if value.chars().nth(SHOWN_CHARS_MAX).is_some() { "…" } else { "" };
        write!(f, "{} = {shown}{cut}: {}", self.key, self.allowed)
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML; the text has line and column.
    #[error("the configuration{} is not TOML: {text}", at(.path.as_deref()))]
    Syntax {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// What the parser says.
        text: String,
    },
    /// The file is TOML, and this is wrong with it.
    #[error("the configuration{} has {}:{}", at(.path.as_deref()), counted(.problems.len()), listed(.problems))]
    Invalid {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// Everything that is wrong.
        problems: Vec<Problem>,
    },
}

fn at(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!(" {}", path.display()))
}

fn counted(count: usize) -> String {
    if count == 1 { "a problem".to_owned() } else { format!("{count} problems") }
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

impl Config {
    /// Reads the file given on the command line, else the one of `WORKER_CONFIG_PATH`, else takes the defaults.
    ///
    /// # Errors
    /// [`ConfigError`]; its text is complete for a person, on several lines when there are several problems.
    pub fn load(
        command_line: Option<&Path>,
        env: &HashMap<String, String>,
        machine: &Machine,
    ) -> Result<Self, ConfigError> {
        let from_env = env.get("WORKER_CONFIG_PATH").filter(|path| !path.is_empty()).map(Path::new);
        let Some(path) = command_line.or(from_env) else {
            return Self::parse("", env, machine);
        };
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > FILE_BYTES_MAX {
            let text = format!("it has {bytes} bytes, at most {FILE_BYTES_MAX} are read");
            return Err(unreadable(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text)));
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        match Self::parse(&text, env, machine) {
            Ok(config) => Ok(Self { source: Some(path.to_owned()), ..config }),
            Err(ConfigError::Syntax { text, .. }) => {
                Err(ConfigError::Syntax { path: Some(path.to_owned()), text })
            }
            Err(ConfigError::Invalid { problems, .. }) => {
                Err(ConfigError::Invalid { path: Some(path.to_owned()), problems })
            }
            Err(error @ ConfigError::Unreadable { .. }) => Err(error),
        }
    }

    /// Reads a configuration from `text`; empty text gives the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] without a path.
    pub fn parse(text: &str, env: &HashMap<String, String>, machine: &Machine) -> Result<Self, ConfigError> {
        let table: toml::Table = text
            .parse()
            .map_err(|error: toml::de::Error| ConfigError::Syntax { path: None, text: error.to_string() })?;
        build::build(keys::sort_keys(table), env, machine)
            .map_err(|problems| ConfigError::Invalid { path: None, problems })
    }

    /// True when no coordinator is configured, so that the worker is its own.
    #[must_use]
    pub fn is_embedded(&self) -> bool {
        self.coordinator_quorum.is_empty()
    }

    /// Remote paths that clients may name, with everything below; none = all.
    #[must_use]
    pub fn allowed_remote_paths(&self) -> Vec<RemoteLocation> {
        hdfs::allowed(self)
    }

    /// Every entry by its dotted key.
    #[must_use]
    pub fn entries(&self) -> BTreeMap<String, String> {
        print::entries(self)
    }

    /// The effective configuration as TOML with every supported key; parses back to an equal one.
    #[must_use]
    pub fn to_toml(&self) -> String {
        print::to_toml(self)
    }
}

#[cfg(test)]
mod tests;
