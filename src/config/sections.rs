//! Combines the sections of all modules, and derives settings that depend on several sections.
//!
//! Invariant: `Config::follow` must run after every change of a value that it reads, or derived
//! settings are outdated.

use std::collections::HashMap;
use std::path::PathBuf;

use super::worker::WorkerConfig;
use crate::app::AppConfig;
use crate::compat::NO_EFFECT;
use crate::flush::FlushConfig;
use crate::listeners::grpc::GrpcConfig;
use crate::listeners::http::HttpConfig;
use crate::listeners::http::admin::AdminConfig;
use crate::listeners::http::push::PushConfig;
use crate::listeners::tcp::TcpConfig;
use crate::listeners::tls::{TlsConfig, TlsListener};
use crate::memory::MemoryConfig;
use crate::remote::hdfs::{AllowList, AllowedPath, HdfsConfig, RemoteLocation};
use crate::schema::{RemovedKey, Schema, Section as _, section};
use crate::service::{PartitionConfig, ServiceConfig};
use crate::store::{INDEX_CACHE_BYTES, LocalConfig, ObjectConfig};
use crate::telemetry::TelemetryConfig;
use crate::telemetry::traces::TracingConfig;
use uniffle_base::budget::memory_plan::{ConfiguredConnections, ConnectionLimits, MemoryParts, divide};
use uniffle_coordinator::embedded::EmbeddedConfig;
use uniffle_coordinator::heartbeat::HeartbeatConfig;

/// Default port of the raw TCP listener without a coordinator quorum.
const URPC_PORT: u16 = 21200;

const NO_OVERFLOW: &str = "batches no longer go through the page cache, because a disk that failed later lost acknowledged blocks; \
    delete the key";
const NO_URING: &str =
    "disks are always accessed by threads, because io_uring was not faster; delete the key";
const NO_REWRITING: &str =
    "small extents are not merged any more, because that cost more disk time than it saved; delete the key";

const NO_SHARING: &str =
    "the raw TCP listener always has threads of its own, because sharing was slower; delete the key";

/// Keys of earlier versions that a start, `--check` and a reload refuse.
const REMOVED: &[RemovedKey] = &[
    RemovedKey { path: "localfile_store.io_engine", release: "0.2.0", reason: NO_URING },
    RemovedKey { path: "localfile_store.page_cache_size", release: "0.2.0", reason: NO_OVERFLOW },
    RemovedKey { path: "localfile_store.rewrite_below", release: "0.2.0", reason: NO_REWRITING },
    RemovedKey { path: "localfile_store.rewrite_after_sec", release: "0.2.0", reason: NO_REWRITING },
    RemovedKey { path: "runtime_config.urpc_runtime", release: "0.2.0", reason: NO_SHARING },
];

section! {
    /// The complete, checked configuration.
    pub struct Config {
        /// Tiers, ports, threads, shutdown.
        #[section(WorkerConfig)]
        pub worker: WorkerConfig,
        /// The coordinators of the quorum.
        #[section(HeartbeatConfig)]
        pub heartbeat: HeartbeatConfig,
        /// The shuffle service.
        #[section(ServiceConfig)]
        pub service: ServiceConfig,
        /// Memory.
        #[section(MemoryConfig)]
        pub memory: MemoryConfig,
        /// Local disks.
        #[section(LocalConfig)]
        pub local: LocalConfig,
        /// HDFS.
        #[section(HdfsConfig)]
        pub hdfs: HdfsConfig,
        /// Object storage.
        #[section(ObjectConfig)]
        pub object: ObjectConfig,
        /// Flushing of memory.
        #[section(FlushConfig)]
        pub flush: FlushConfig,
        /// Applications.
        #[section(AppConfig)]
        pub app: AppConfig,
        /// Limits of a partition.
        #[section(PartitionConfig)]
        pub partition: PartitionConfig,
        /// The gRPC listener.
        #[section(GrpcConfig)]
        pub grpc: GrpcConfig,
        /// The raw TCP listener.
        #[section(TcpConfig)]
        pub tcp: TcpConfig,
        /// The HTTP listener.
        #[section(HttpConfig)]
        pub http: HttpConfig,
        /// Administration.
        #[section(AdminConfig)]
        pub admin: AdminConfig,
        /// TLS.
        #[section(TlsConfig)]
        pub tls: TlsConfig,
        /// Push of metrics to a gateway.
        #[section(PushConfig)]
        pub push: PushConfig,
        /// Traces.
        #[section(TracingConfig)]
        pub tracing: TracingConfig,
        /// Logs.
        #[section(TelemetryConfig)]
        pub log: TelemetryConfig,
        /// The embedded coordinator.
        #[section(EmbeddedConfig)]
        pub embedded: EmbeddedConfig,
        /// The file it was read from, or `None` for the built-in defaults.
        pub source: Option<PathBuf> = None,
        /// Warnings to be logged once.
        pub warnings: Vec<String> = Vec::new(),
    }
}

impl Config {
    /// Chooses the backing of block memory. systemd (254+) sets `FDSTORE` to the number of
    /// descriptors that it can store.
    pub(super) fn settle_backing(&mut self, env: &HashMap<String, String>) {
        let kept = env.get("FDSTORE").and_then(|kept| kept.parse::<u64>().ok());
        let has_log = self.worker.store_type.has_local() && self.local.recovery;
        self.memory.backing = self.memory.backing.settled(kept.is_some_and(|kept| kept > 0), has_log);
    }

    /// Sets settings of a section that depend on other sections.
    pub(super) fn follow(&mut self) {
        let is_open = !self.has_quorum() && !self.tls.forbids_plain_tcp();
        let worker = &mut self.worker;
        if worker.urpc_port.is_none() && is_open {
            // By default both transports are open. Port 0 for gRPC also chooses a free TCP port.
            worker.urpc_port = Some(if worker.grpc_port == 0 { 0 } else { URPC_PORT });
        }
        let (capacity, traces) = (self.memory.capacity_bytes, self.tracing.traces());
        self.service.partition_limits = self.partition.limits(capacity);

        let limits = &mut self.flush.limits;
        limits.huge_partition_bytes = self.partition.huge_bytes;
        limits.huge_share_bytes = self.partition.huge_share_bytes(capacity);
        limits.blocks_high = self.memory.blocks_max / 10 * 8;
        limits.blocks_low = self.memory.blocks_max / 10 * 2;
        self.flush.traces = traces;

        let configured =
            ConfiguredConnections { grpc: self.grpc.connections_wanted, tcp: self.tcp.connections_wanted };
        let limits = self.default_parts().limits(self.encrypts_grpc(), configured);
        self.grpc.connections_max = limits.grpc_connections;
        self.grpc.stream_budget = self.grpc.streams_wanted.unwrap_or(limits.grpc_requests);
        self.grpc.window_budget_bytes = self.grpc.windows_wanted.unwrap_or(self.default_parts().windows);
        self.tcp.connections_max = limits.tcp_connections;
        self.tcp.requests_total = limits.tcp_requests;
        self.grpc.traces = traces;
        self.grpc.coordinators =
            self.heartbeat.coordinators.iter().map(|address| address.host().to_owned()).collect();
        self.tcp.traces = traces;
        self.tcp.local_reads_in_flight_max = TcpConfig::local_reads_for(self.memory.read_capacity_bytes);
        self.tcp.blocking_threads = self.worker.blocking_threads;
        self.tcp.own_threads = self.worker.threads;
        self.embedded.storage_type = self.worker.store_type.of_clients().as_str().to_owned();
        self.hdfs.allowed = AllowList(self.allowed_remote_paths());
    }

    /// Returns the default limits per kind of memory besides the capacity.
    pub(super) fn default_parts(&self) -> MemoryParts {
        divide(self.memory.capacity_bytes, self.worker.threads)
    }

    /// Returns the configured limits per kind of memory besides the capacity.
    pub(super) fn configured_parts(&self) -> MemoryParts {
        let (memory, grpc) = (&self.memory, &self.grpc);
        let limits = ConnectionLimits {
            grpc_connections: grpc.connections_max,
            grpc_requests: grpc.stream_budget,
            tcp_connections: if self.worker.urpc_port.is_some() { self.tcp.connections_max } else { 0 },
            tcp_requests: if self.worker.urpc_port.is_some() { self.tcp.requests_total } else { 0 },
        };
        let (heap, reads, windows) =
            (memory.heap_bytes, memory.read_capacity_bytes, grpc.window_budget_bytes);
        let parts = self.default_parts().with(heap, reads, windows, limits, self.encrypts_grpc());
        // The base already includes an index cache of the default size.
        let more_cache = self.local.index_cache_bytes.saturating_sub(INDEX_CACHE_BYTES);
        MemoryParts { base: parts.base.saturating_add(more_cache), ..parts }
    }

    /// Returns the upper bound of the resident memory of the process.
    #[must_use]
    pub fn resident_bytes_max(&self) -> u64 {
        self.memory.capacity_bytes.saturating_add(self.configured_parts().sum())
    }

    fn encrypts_grpc(&self) -> bool {
        self.tls.of(TlsListener::Grpc).is_some()
    }

    /// Returns this configuration with the reloadable values of `new`.
    #[must_use]
    pub fn renewed(&self, new: &Self) -> Self {
        let mut next = self.clone();
        next.renew(new);
        next.local.min_disks = next.local.min_disks.min(next.local.paths.len());
        if self.tls.files().is_none() || new.tls.files().is_none() {
            // Encryption of a listener is decided when it opens. The CA for outgoing connections is
            // independent of that.
            next.tls = TlsConfig { ca_file: new.tls.ca_file.clone(), ..self.tls.clone() };
        }
        next.warnings.clone_from(&new.warnings);
        if next.tls.forbids_plain_tcp() && self.worker.urpc_port.is_some() {
            let text = "tls.client_ca_file: urpc_port remains open without certificates until the next \
                 start";
            next.warnings.push(text.to_owned());
        }
        next.follow();
        next
    }

    /// Returns whether the worker has an embedded coordinator: as configured, by default without a
    /// quorum.
    #[must_use]
    pub fn is_embedded(&self) -> bool {
        self.embedded.enable.unwrap_or(!self.has_quorum())
    }

    /// Returns whether workers of other processes report to the embedded coordinator.
    #[must_use]
    pub fn expects_workers(&self) -> bool {
        self.is_embedded() && (self.has_quorum() || !self.embedded.worker_networks.is_empty())
    }

    /// Returns whether a coordinator quorum is configured. It may include the embedded coordinator.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        !self.heartbeat.coordinators.is_empty()
    }

    /// Returns the remote paths that clients may use: the configured ones, or those of the embedded
    /// coordinator. An empty list allows all.
    fn allowed_remote_paths(&self) -> Vec<RemoteLocation> {
        if !self.hdfs.allowed_paths.is_empty() {
            let below = |allowed: &AllowedPath| match allowed {
                AllowedPath::Any => None,
                AllowedPath::Below(location) => Some(location.clone()),
            };
            // An entry that allows all paths gives an empty list, which allows all.
            return self.hdfs.allowed_paths.iter().map(below).collect::<Option<_>>().unwrap_or_default();
        }
        let paths = &self.embedded.remote_storage_paths;
        paths.iter().filter_map(|path| RemoteLocation::parse(path).ok()).collect()
    }
}

/// Returns the schema of all keys.
pub(super) fn schema() -> Schema {
    let mut schema = Schema { no_effect: NO_EFFECT, removed: REMOVED, ..Schema::default() };
    Config::describe(&mut schema);
    schema
}
