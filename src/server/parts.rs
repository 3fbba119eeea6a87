//! From the configuration's sections to each module's own settings: one function per part.

use std::sync::Arc;
use std::time::Duration;

use crate::app::AppConfig;
use crate::config::Config;
use crate::coordinator::embedded::{EmbeddedConfig, RemoteStorage};
use crate::coordinator::heartbeat::HeartbeatConfig;
use crate::flush::FlushConfig;
use crate::flush::policy::Limits;
use crate::grpc::GrpcConfig;
use crate::http::HttpConfig;
use crate::io::Disk;
use crate::io::blocking::BlockingDisk;
use crate::memory::MemoryConfig;
use crate::store::LocalConfig;

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

pub(super) fn disks(config: &Config) -> Vec<Arc<dyn Disk>> {
    config
        .localfile
        .data_paths
        .iter()
        .map(|path| Arc::new(BlockingDisk::new(path.clone(), config.localfile.write_concurrency_per_disk)) as _)
        .collect()
}

pub(super) fn store(config: &Config) -> LocalConfig {
    LocalConfig {
        high_watermark: config.localfile.disk_high_watermark,
        low_watermark: config.localfile.disk_low_watermark,
        direct_io: config.localfile.direct_io,
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
    let remote_storages =
        section.remote_storage_path.iter().map(|path| RemoteStorage { path: path.clone(), conf: Vec::new() }).collect();
    EmbeddedConfig { client_conf, remote_storages, ..EmbeddedConfig::default() }
}

pub(super) fn heartbeat(config: &Config) -> anyhow::Result<HeartbeatConfig> {
    let coordinators =
        config.coordinator_quorum.iter().map(|endpoint| endpoint.to_string().parse()).collect::<Result<_, _>>()?;
    Ok(HeartbeatConfig { coordinators, interval: config.heartbeat_interval })
}
