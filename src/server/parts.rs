//! From the configuration's sections to each module's own settings: one function per part.

use std::time::Duration;

use crate::app::AppConfig;
use crate::config::{Config, UrpcRuntime};
use crate::coordinator::embedded::{EmbeddedConfig, RemoteStorage};
use crate::coordinator::heartbeat::HeartbeatConfig;
use crate::flush::FlushConfig;
use crate::flush::policy::Limits;
use crate::grpc::GrpcConfig;
use crate::http::HttpConfig;
use crate::memory::{MemoryConfig, READ_BUFFER_BYTES_MAX};
use crate::store::LocalConfig;
use crate::tcp::TcpConfig;

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

/// Apps are looked at often enough that one outlives its timeout by a tenth at most.
pub(super) fn app_check_interval(config: &Config) -> Duration {
    (config.app.heartbeat_timeout / 10).clamp(Duration::from_millis(100), Duration::from_secs(30))
}

pub(super) fn store(config: &Config) -> LocalConfig {
    let local = &config.localfile;
    LocalConfig {
        paths: local.data_paths.clone(),
        write_concurrency_per_disk: local.write_concurrency_per_disk,
        high_watermark: local.disk_high_watermark,
        low_watermark: local.disk_low_watermark,
        direct_io: local.direct_io,
        probe_interval: local.disk_healthy_check_interval,
        ..LocalConfig::default()
    }
}

pub(super) fn flush(config: &Config, disks: usize) -> FlushConfig {
    let hybrid = &config.hybrid;
    FlushConfig {
        limits: Limits {
            high_watermark: hybrid.memory_spill_high_watermark,
            low_watermark: hybrid.memory_spill_low_watermark,
            single_buffer_bytes_max: hybrid.memory_single_buffer_max_spill_size_bytes,
            in_flight_batches_max: 5,
            blocks_max: config.memory.block_max_count / 10 * 8,
        },
        workers: disks * config.localfile.write_concurrency_per_disk,
        batch_bytes_max: 64 << 20,
        tick: Duration::from_secs(1),
        retry_pause_min: Duration::from_millis(100),
        retry_pause_max: Duration::from_secs(10),
    }
}

/// What the store type needs of clients comes first, so that the configuration can say otherwise.
pub(super) fn embedded(config: &Config) -> EmbeddedConfig {
    let section = &config.embedded_coordinator;
    let mut client_conf = vec![("rss.storage.type".to_owned(), config.store_type.as_str().to_owned())];
    client_conf.retain(|(key, _)| !section.client_conf.contains_key(key));
    client_conf.extend(section.client_conf.iter().map(|(key, value)| (key.clone(), value.clone())));
    let remote_storages = section
        .remote_storage_path
        .iter()
        .map(|path| RemoteStorage { path: path.clone(), conf: Vec::new() })
        .collect();
    EmbeddedConfig { client_conf, remote_storages, ..EmbeddedConfig::default() }
}

pub(super) fn heartbeat(config: &Config) -> anyhow::Result<HeartbeatConfig> {
    let coordinators = config
        .coordinator_quorum
        .iter()
        .map(|endpoint| endpoint.to_string().parse())
        .collect::<Result<_, _>>()?;
    Ok(HeartbeatConfig { coordinators, interval: config.heartbeat_interval })
}

pub(super) fn http(config: &Config) -> HttpConfig {
    HttpConfig { max_connections: config.http.max_connections, request_timeout: config.http.request_timeout }
}

/// The configuration's bounds are within the types' ranges (`config` checks them); the rest are the door's defaults.
pub(super) fn grpc(config: &Config) -> GrpcConfig {
    let grpc = &config.grpc;
    let narrowed = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    GrpcConfig {
        max_message_bytes: narrowed(grpc.max_message_bytes),
        connections_max: grpc.max_connections,
        concurrent_streams_max: u32::try_from(grpc.max_concurrent_streams).unwrap_or(u32::MAX),
        stream_window_bytes: narrowed(grpc.stream_window_bytes),
        connection_window_bytes: narrowed(grpc.connection_window_bytes),
        frame_bytes_max: narrowed(grpc.max_frame_bytes),
        window_budget_bytes: grpc.window_total_bytes,
        send_deadline: grpc.request_timeout,
        stream_deadline: grpc.request_timeout * 3,
        ..GrpcConfig::default()
    }
}

/// Local answers that wait may hold a quarter of the read memory's chunks; the rest is for those being written.
pub(super) fn tcp(config: &Config) -> TcpConfig {
    let chunks = config.memory.read_capacity_bytes / READ_BUFFER_BYTES_MAX as u64;
    let waiting = usize::try_from(chunks / 4).unwrap_or(usize::MAX);
    let own_threads = match config.runtime.urpc {
        UrpcRuntime::PerCore => config.runtime.worker_threads,
        UrpcRuntime::Shared => 0,
    };
    TcpConfig {
        local_reads_in_flight_max: waiting.max(1),
        own_threads,
        blocking_threads: config.runtime.blocking_threads,
        ..TcpConfig::default()
    }
}
