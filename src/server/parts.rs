//! From the configuration's sections to each module's own settings: one function per part.

use std::time::Duration;

use crate::app::AppConfig;
use crate::config::{Config, Endpoint, GrpcDecommission, IoEngine, SyncWrites, UrpcRuntime, VerifyReads};
use crate::coordinator::embedded::{AccessRules, EmbeddedConfig, RemoteStorage};
use crate::coordinator::heartbeat::HeartbeatConfig;
use crate::flush::FlushConfig;
use crate::flush::policy::Limits;
use crate::listeners::grpc::{DecommissionBy, GrpcConfig};
use crate::listeners::http::HttpConfig;
use crate::listeners::http::push::PushConfig;
use crate::listeners::tcp::TcpConfig;
use crate::memory::MemoryConfig;
use crate::metrics::clamped;
use crate::proto::ApplicationInfo;
use crate::service::{AppStatistics, PartitionLimits, ServiceConfig};
use crate::telemetry::traces::Traces;
#[cfg(feature = "hdfs")]
use crate::tiers::HdfsConfig;
#[cfg(feature = "hdfs")]
use crate::tiers::hdfs::AllowList;
use crate::tiers::{self, LocalConfig};
use uniffle_io::Engine;
use uniffle_io::buffers::READ_CHUNK_BYTES_SHORT;

pub(super) fn memory(config: &Config) -> MemoryConfig {
    MemoryConfig {
        capacity_bytes: config.memory.capacity_bytes,
        read_capacity_bytes: config.memory.read_capacity_bytes,
        ticket_timeout: config.memory.ticket_timeout,
        tickets_max: config.memory.ticket_max_count,
        blocks_max: config.memory.block_max_count,
    }
}

pub(super) fn app(config: &Config) -> AppConfig {
    AppConfig { heartbeat_timeout: config.app.heartbeat_timeout, ..AppConfig::default() }
}

pub(super) fn service(config: &Config) -> ServiceConfig {
    let app = &config.app;
    let partition_limits = PartitionLimits {
        huge_bytes: Some(app.partition_limit_threshold_bytes),
        huge_in_memory_bytes_max: app.partition_limit_enable.then(|| huge_share_bytes(config)),
        split_bytes: app.partition_split_enable.then_some(app.partition_split_threshold_bytes),
        bytes_max: app.partition_hard_limit_bytes,
    };
    ServiceConfig {
        partition_limits,
        decommission_check_interval: config.decommission_check_interval,
        ..ServiceConfig::default()
    }
}

/// Memory that one huge partition may fill.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a ratio of 0..=1 of a byte count; a few bytes of rounding do not matter"
)]
fn huge_share_bytes(config: &Config) -> u64 {
    (config.memory.capacity_bytes as f64 * config.app.partition_limit_memory_backpressure_ratio) as u64
}

/// Apps are looked at often enough that one outlives its timeout by a tenth at most.
pub(super) fn app_check_interval(config: &Config) -> Duration {
    (config.app.heartbeat_timeout / 10).clamp(Duration::from_millis(100), Duration::from_secs(30))
}

/// The id that Linux gives to each start of its own; empty where there is none.
fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.split_whitespace().collect()
}

pub(super) fn store(config: &Config) -> LocalConfig {
    let local = &config.localfile;
    LocalConfig {
        paths: local.data_paths.clone(),
        write_concurrency_per_disk: local.write_concurrency_per_disk,
        max_concurrency_per_disk: local.disk_max_concurrency,
        index_cache_bytes: local.index_cache_bytes,
        high_watermark: local.disk_high_watermark,
        low_watermark: local.disk_low_watermark,
        direct_io: local.direct_io,
        recovery: local.recovery,
        boot: boot_id(),
        engine: match local.io_engine {
            IoEngine::Blocking => Engine::Blocking,
            IoEngine::Uring => Engine::Uring,
        },
        verify_reads: match local.verify_reads {
            VerifyReads::Always => tiers::VerifyReads::Always,
            VerifyReads::Sampled => tiers::VerifyReads::Sampled,
            VerifyReads::Off => tiers::VerifyReads::Off,
        },
        sync: match local.sync {
            SyncWrites::Off => tiers::SyncWrites::Off,
            SyncWrites::Group => tiers::SyncWrites::Group,
        },
        probe_interval: local.disk_healthy_check_interval,
        ..LocalConfig::default()
    }
}

#[cfg(feature = "hdfs")]
pub(super) fn hdfs(config: &Config, server_id: String) -> HdfsConfig {
    HdfsConfig {
        server_id,
        allowed: AllowList(config.allowed_remote_paths()),
        max_concurrency: config.hdfs.max_concurrency,
        partition_write_max_concurrency: config.hdfs.partition_write_max_concurrency,
        write_timeout: config.hdfs.write_timeout,
        ..HdfsConfig::default()
    }
}

pub(super) fn flush(config: &Config, disks: usize) -> FlushConfig {
    let hybrid = &config.hybrid;
    let app = &config.app;
    FlushConfig {
        limits: Limits {
            high_watermark: hybrid.memory_spill_high_watermark,
            low_watermark: hybrid.memory_spill_low_watermark,
            single_buffer_bytes_max: hybrid.memory_single_buffer_max_spill_size_bytes,
            huge_partition_bytes: app.partition_limit_threshold_bytes,
            // Half of its share, so that one half is written while the other fills.
            huge_buffer_bytes_max: hybrid
                .huge_partition_memory_single_buffer_max_spill_size_bytes
                .min(huge_share_bytes(config) / 2),
            in_flight_batches_max: 5,
            blocks_high: config.memory.block_max_count / 10 * 8,
            blocks_low: config.memory.block_max_count / 10 * 2,
        },
        workers: disks * config.localfile.write_concurrency_per_disk,
        hdfs_in_flight_max: hybrid.memory_spill_to_hdfs_concurrency,
        cold_bytes: hybrid.memory_spill_to_cold_threshold_size_bytes,
        batch_bytes_max: 64 << 20,
        tick: Duration::from_secs(1),
        retry_pause_min: Duration::from_millis(100),
        retry_pause_max: Duration::from_secs(10),
        traces: traces(config),
    }
}

/// What the store type needs of clients comes first, so that the configuration can say otherwise.
pub(super) fn embedded(config: &Config) -> EmbeddedConfig {
    let section = &config.embedded_coordinator;
    let mut client_conf = vec![("rss.storage.type".to_owned(), config.store_type.as_str().to_owned())];
    client_conf.retain(|(key, _)| !section.client_conf.contains_key(key));
    client_conf.extend(section.client_conf.iter().map(|(key, value)| (key.clone(), value.clone())));
    let storage = |path: &String| {
        let mut storage = RemoteStorage { path: path.clone(), conf: Vec::new() };
        let conf = section.remote_storage_conf.get(storage.host());
        storage.conf = conf.map(|text| RemoteStorage::parse_conf(text)).unwrap_or_default();
        storage
    };
    EmbeddedConfig {
        client_conf,
        remote_storages: section.remote_storage_paths.iter().map(storage).collect(),
        node_timeout: section.node_timeout,
        app_timeout: section.app_timeout,
        shuffle_nodes_max: section.shuffle_nodes_max,
        node_order: section.assignment_strategy,
        partition_selection: section.select_partition_strategy,
        excluded_nodes: section.exclude_nodes.iter().cloned().collect(),
        access: AccessRules {
            nodes_min: section.access_min_nodes,
            memory_ratio_min: section.access_min_memory_ratio,
            apps_per_user_max: section.quota_apps_per_user,
        },
    }
}

pub(super) fn heartbeat(config: &Config) -> anyhow::Result<HeartbeatConfig> {
    let coordinators = config
        .coordinator_quorum
        .iter()
        .map(|endpoint| endpoint.to_string().parse())
        .collect::<Result<_, _>>()?;
    Ok(HeartbeatConfig { coordinators, interval: config.heartbeat_interval })
}

/// Applications that a heartbeat tells of, the largest first: it is for dashboards, and must stay small.
const REPORTED_APPS_MAX: usize = 1_000;

pub(super) fn application_info(apps: &[AppStatistics]) -> Vec<ApplicationInfo> {
    let mut largest: Vec<&AppStatistics> = apps.iter().collect();
    largest.sort_unstable_by_key(|app| std::cmp::Reverse(app.received_bytes));
    largest.truncate(REPORTED_APPS_MAX);
    let info = |app: &&AppStatistics| ApplicationInfo {
        app_id: app.app.to_string(),
        partition_num: clamped(app.partitions),
        memory_size: clamped(app.in_memory_bytes),
        local_file_num: clamped(app.local_files),
        local_total_size: clamped(app.local_bytes),
        hadoop_file_num: clamped(app.remote_files),
        hadoop_total_size: clamped(app.remote_bytes),
        total_size: clamped(app.received_bytes),
    };
    largest.iter().map(info).collect()
}

/// Without a collector nobody would take them.
fn traces(config: &Config) -> Traces {
    match config.tracing.otlp_endpoint {
        Some(_) => Traces::sampled(config.tracing.sampling_ratio),
        None => Traces::off(),
    }
}

pub(super) fn push(config: &Config) -> Option<PushConfig> {
    let metrics = &config.metrics;
    Some(PushConfig {
        endpoint: metrics.push_gateway_endpoint.clone()?,
        interval: metrics.push_interval,
        labels: metrics.labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
    })
}

pub(super) fn http(config: &Config) -> HttpConfig {
    HttpConfig { max_connections: config.http.max_connections, request_timeout: config.http.request_timeout }
}

/// The configuration's bounds are within the types' ranges (`config` checks them); the rest are the listener's defaults.
pub(super) fn grpc(config: &Config) -> GrpcConfig {
    let grpc = &config.grpc;
    let narrowed = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    GrpcConfig {
        max_message_bytes: narrowed(grpc.max_message_bytes),
        connections_max: grpc.max_connections,
        concurrent_streams_max: u32::try_from(grpc.max_concurrent_streams).unwrap_or(u32::MAX),
        stream_budget: grpc.max_streams_total as u64,
        stream_window_bytes: narrowed(grpc.stream_window_bytes),
        connection_window_bytes: narrowed(grpc.connection_window_bytes),
        frame_bytes_max: narrowed(grpc.max_frame_bytes),
        window_budget_bytes: grpc.window_total_bytes,
        send_deadline: grpc.request_timeout,
        stream_deadline: grpc.request_timeout * 3,
        traces: traces(config),
        decommission_by: match config.admin.grpc_decommission {
            GrpcDecommission::Off => DecommissionBy::Nobody,
            GrpcDecommission::Loopback => DecommissionBy::ThisMachine,
            GrpcDecommission::Coordinators => {
                let host = |endpoint: &Endpoint| endpoint.host.clone();
                DecommissionBy::Machines(config.coordinator_quorum.iter().map(host).collect())
            }
            GrpcDecommission::Open => DecommissionBy::Everybody,
        },
        ..GrpcConfig::default()
    }
}

/// Local answers that wait may hold a quarter of the read memory's chunks, half when these are large; the rest is for
/// those being written.
pub(super) fn tcp(config: &Config) -> TcpConfig {
    let chunks = config.memory.read_capacity_bytes / READ_CHUNK_BYTES_SHORT as u64;
    let waiting = usize::try_from(chunks / 4).unwrap_or(usize::MAX);
    let own_threads = match config.runtime.urpc {
        UrpcRuntime::PerCore => config.runtime.worker_threads,
        UrpcRuntime::Shared => 0,
    };
    TcpConfig {
        local_reads_in_flight_max: waiting.max(1),
        own_threads,
        blocking_threads: config.runtime.blocking_threads,
        traces: traces(config),
        ..TcpConfig::default()
    }
}
