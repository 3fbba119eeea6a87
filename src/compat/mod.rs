//! Names and formats that exist for the dashboards, tools and configurations of other servers: the
//! Java server, riffle and Uniffle's experimental Rust server.
//!
//! [`dashboards`] give metrics a second name, which [`view`] applies; a single further name is
//! `also` in the table of a metric. [`http`] serves paths of the Java server, and [`NO_EFFECT`]
//! lists keys. Nothing here makes decisions.

pub(crate) mod dashboards;
pub mod http;
pub(crate) mod view;

/// Property of riffle with which an app chooses its heartbeat timeout in minutes (docs/protocol.md
/// §8.4).
pub(crate) const HEARTBEAT_TIMEOUT_PROPERTY: &str = "spark.rss.riffle.appHeartbeatTimeoutMinutes";

const THREADS: &str = "the number of threads depends on cores and disks";
const BUFFERS: &str = "buffers are part of memory_store.read_buffer_capacity";
const SPILL: &str = "see the other keys of [hybrid_store]";
const DIRECT_IO: &str = "see localfile_store.direct_io";
const HEALTH: &str = "health is determined automatically";
const BUILT_IN: &str = "not configurable";

/// Accepted keys of riffle and of Uniffle's experimental Rust server that have no counterpart here.
pub(crate) const NO_EFFECT: &[(&str, &str)] = &[
    ("memory_store.dashmap_shard_amount", BUILT_IN),
    ("localfile_store.disk_write_buf_capacity", BUFFERS),
    ("localfile_store.disk_read_buf_capacity", BUFFERS),
    ("localfile_store.launch_purge_enable", "localfile_store.recovery = false deletes old data at start"),
    ("localfile_store.direct_io_enable", DIRECT_IO),
    ("localfile_store.direct_io_read_enable", DIRECT_IO),
    ("localfile_store.direct_io_append_enable", DIRECT_IO),
    ("localfile_store.io_duration_threshold_sec", HEALTH),
    ("localfile_store.index_consistency_detection_enable", "see localfile_store.verify_reads"),
    ("localfile_store.io_limiter.capacity", BUILT_IN),
    ("localfile_store.io_limiter.read_enable", BUILT_IN),
    ("localfile_store.io_limiter.write_enable", BUILT_IN),
    ("localfile_store.read_io_sendfile_enable", BUILT_IN),
    ("localfile_store.read_ahead_options.batch_size", BUILT_IN),
    ("localfile_store.read_ahead_options.batch_number", BUILT_IN),
    ("hybrid_store.huge_partition_memory_spill_to_hdfs_threshold_size", SPILL),
    ("hybrid_store.huge_partition_fallback_enable", SPILL),
    ("hybrid_store.memory_spill_max_concurrency", SPILL),
    ("hybrid_store.memory_spill_to_localfile_concurrency", "see localfile_store.write_concurrency_per_disk"),
    ("hybrid_store.sensitive_watermark_spill_enable", SPILL),
    ("hybrid_store.async_watermark_spill_trigger_enable", SPILL),
    ("hybrid_store.async_watermark_spill_trigger_interval_ms", SPILL),
    ("runtime_config.read_thread_num", THREADS),
    ("runtime_config.write_thread_num", THREADS),
    ("runtime_config.grpc_thread_num", THREADS),
    ("runtime_config.localfile_write_thread_num", THREADS),
    ("runtime_config.hdfs_write_thread_num", THREADS),
    ("runtime_config.http_thread_num", THREADS),
    ("runtime_config.default_thread_num", THREADS),
    ("runtime_config.dispatch_thread_num", THREADS),
    ("log.max_file_size", "files are rotated by time, see log.rotation"),
    ("app_config.block_id_manager_type", BUILT_IN),
    ("tracing.jaeger_service_name", "the service name is uniffle-worker"),
    ("health_service_config.alive_app_number_max_limit", HEALTH),
    ("health_service_config.disk_used_ratio_health_threshold", "see localfile_store.disk_high_watermark"),
    ("health_service_config.memory_allocated_threshold", HEALTH),
    ("health_service_config.service_hang_of_mem_continuous_unchange_sec", HEALTH),
    ("health_service_config.service_hang_of_app_valid_number", HEALTH),
    ("historical_apps_config.retention_days", "the latest finished applications are kept in memory"),
    ("historical_apps_config.backend", "the latest finished applications are kept in memory"),
    ("historical_apps_config.db_path", "the latest finished applications are kept in memory"),
    ("fallback_random_ports_enable", "a port in use fails the start; port 0 selects a free one"),
    ("initial_unhealthy_status_enable", "calls of POST /admin change the status"),
    ("conf_reload_enable", "the file is always watched"),
];
