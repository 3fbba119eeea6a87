//! A configuration back to TOML, for `--print-config`. Invariant (tested): it parses back to an equal one.

use std::collections::BTreeMap;
use std::time::Duration;

use toml::{Table, Value};

use super::reader::size_text;
use super::{Config, embedded, hdfs, observe, tls};
use crate::telemetry::{LogFormat, Rotation};

/// Every supported key that has a value; absent optional keys stay absent.
pub(super) fn to_toml(config: &Config) -> String {
    table(config).to_string()
}

fn table(config: &Config) -> Table {
    let mut top = Table::new();
    put(&mut top, "store_type", config.store_type.as_str());
    put(&mut top, "bind_address", config.bind_address.to_string());
    put(&mut top, "grpc_port", i64::from(config.grpc_port));
    if let Some(port) = config.urpc_port {
        put(&mut top, "urpc_port", i64::from(port));
    }
    put(&mut top, "http_port", i64::from(config.http_port));
    if !config.is_embedded() {
        let quorum = config.coordinator_quorum.iter().map(|endpoint| Value::from(endpoint.to_string()));
        put(&mut top, "coordinator_quorum", quorum.collect::<Vec<_>>());
    }
    put(&mut top, "tags", config.tags.clone());
    put(&mut top, "heartbeat_interval_seconds", duration(config.heartbeat_interval, 1));
    put(&mut top, "decommission_check_interval_sec", duration(config.decommission_check_interval, 1));
    put(&mut top, "decommission_shutdown", config.decommission_shutdown);
    put(&mut top, "memory_store", memory(config));
    put(&mut top, "localfile_store", localfile(config));
    put(&mut top, "hdfs_store", hdfs::print(&config.hdfs));
    put(&mut top, "hybrid_store", hybrid(config));
    put(&mut top, "runtime_config", runtime(config));
    put(&mut top, "log", log(config));
    put(&mut top, "metrics", observe::print_metrics(&config.metrics));
    put(&mut top, "tracing", observe::print_tracing(&config.tracing));
    put(&mut top, "app_config", app(config));
    put(&mut top, "grpc", grpc(config));
    put(&mut top, "http", http(config));
    put(&mut top, "admin", admin(config));
    put(&mut top, "tls", tls::print(&config.tls));
    let mut shutdown = Table::new();
    put(&mut shutdown, "flush_timeout_sec", duration(config.shutdown_flush_timeout, 1));
    put(&mut top, "shutdown", shutdown);
    put(&mut top, "embedded_coordinator", embedded::print(&config.embedded_coordinator));
    top
}

pub(super) fn put(table: &mut Table, key: &str, value: impl Into<Value>) {
    table.insert(key.to_owned(), value.into());
}

/// A number far below 2^63 by the bounds of its key.
pub(super) fn number(count: impl TryInto<i64>) -> Value {
    Value::Integer(count.try_into().unwrap_or(i64::MAX))
}

/// Whole units as an integer, everything else as text.
pub(super) fn duration(duration: Duration, unit_secs: u64) -> Value {
    let is_whole = duration.subsec_nanos() == 0 && duration.as_secs().is_multiple_of(unit_secs);
    if is_whole {
        return number(duration.as_secs() / unit_secs);
    }
    Value::from(humantime::format_duration(duration).to_string())
}

fn memory(config: &Config) -> Table {
    let mut table = Table::new();
    put(&mut table, "capacity", size_text(config.memory.capacity_bytes));
    put(&mut table, "buffer_ticket_timeout_sec", duration(config.memory.ticket_timeout, 1));
    put(&mut table, "buffer_ticket_check_interval_sec", duration(config.memory.ticket_check_interval, 1));
    put(&mut table, "buffer_ticket_max_count", number(config.memory.ticket_max_count));
    put(&mut table, "read_buffer_capacity", size_text(config.memory.read_capacity_bytes));
    put(&mut table, "block_max_count", number(config.memory.block_max_count));
    table
}

fn localfile(config: &Config) -> Table {
    let local = &config.localfile;
    let mut table = Table::new();
    let paths = local.data_paths.iter().map(|path| Value::from(path.display().to_string()));
    put(&mut table, "data_paths", paths.collect::<Vec<_>>());
    put(&mut table, "healthy_check_min_disks", number(local.healthy_check_min_disks));
    put(&mut table, "disk_high_watermark", local.disk_high_watermark);
    put(&mut table, "disk_low_watermark", local.disk_low_watermark);
    put(&mut table, "disk_max_concurrency", number(local.disk_max_concurrency));
    put(&mut table, "write_concurrency_per_disk", number(local.write_concurrency_per_disk));
    put(&mut table, "disk_healthy_check_interval_sec", duration(local.disk_healthy_check_interval, 1));
    put(&mut table, "direct_io", local.direct_io);
    put(&mut table, "recovery", local.recovery);
    put(&mut table, "io_engine", local.io_engine.as_str());
    put(&mut table, "verify_reads", local.verify_reads.as_str());
    put(&mut table, "sync", local.sync.as_str());
    put(&mut table, "index_cache_size", size_text(local.index_cache_bytes));
    table
}

fn hybrid(config: &Config) -> Table {
    let hybrid = &config.hybrid;
    let mut table = Table::new();
    put(&mut table, "memory_spill_high_watermark", hybrid.memory_spill_high_watermark);
    put(&mut table, "memory_spill_low_watermark", hybrid.memory_spill_low_watermark);
    let max_spill = size_text(hybrid.memory_single_buffer_max_spill_size_bytes);
    put(&mut table, "memory_single_buffer_max_spill_size", max_spill);
    let max_spill = size_text(hybrid.huge_partition_memory_single_buffer_max_spill_size_bytes);
    put(&mut table, "huge_partition_memory_single_buffer_max_spill_size", max_spill);
    let cold = size_text(hybrid.memory_spill_to_cold_threshold_size_bytes);
    put(&mut table, "memory_spill_to_cold_threshold_size", cold);
    put(&mut table, "memory_spill_to_hdfs_concurrency", number(hybrid.memory_spill_to_hdfs_concurrency));
    table
}

fn runtime(config: &Config) -> Table {
    let mut table = Table::new();
    put(&mut table, "worker_threads", number(config.runtime.worker_threads));
    put(&mut table, "blocking_threads", number(config.runtime.blocking_threads));
    put(&mut table, "urpc_runtime", config.runtime.urpc.as_str());
    table
}

fn log(config: &Config) -> Table {
    let mut table = Table::new();
    put(&mut table, "filter", config.log.filter.clone());
    if let Some(path) = &config.log.directory {
        put(&mut table, "path", path.display().to_string());
    }
    let rotation = match config.log.rotation {
        Rotation::Daily => "Daily",
        Rotation::Hourly => "Hourly",
        Rotation::Never => "Never",
    };
    put(&mut table, "rotation", rotation);
    put(&mut table, "max_files", number(config.log.files_max));
    let format = match config.log.format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    put(&mut table, "format", format);
    table
}

fn app(config: &Config) -> Table {
    let mut table = Table::new();
    let app = &config.app;
    put(&mut table, "app_heartbeat_timeout_min", duration(app.heartbeat_timeout, 60));
    put(&mut table, "partition_limit_enable", app.partition_limit_enable);
    put(&mut table, "partition_limit_threshold", size_text(app.partition_limit_threshold_bytes));
    let ratio = app.partition_limit_memory_backpressure_ratio;
    put(&mut table, "partition_limit_memory_backpressure_ratio", ratio);
    put(&mut table, "partition_split_enable", app.partition_split_enable);
    put(&mut table, "partition_split_threshold", size_text(app.partition_split_threshold_bytes));
    if let Some(bytes) = app.partition_hard_limit_bytes {
        put(&mut table, "partition_hard_limit", size_text(bytes));
    }
    table
}

fn grpc(config: &Config) -> Table {
    let grpc = &config.grpc;
    let mut table = Table::new();
    put(&mut table, "max_message_size", size_text(grpc.max_message_bytes));
    put(&mut table, "max_connections", number(grpc.max_connections));
    put(&mut table, "max_concurrent_streams", number(grpc.max_concurrent_streams));
    put(&mut table, "max_streams_total", number(grpc.max_streams_total));
    put(&mut table, "stream_window", size_text(grpc.stream_window_bytes));
    put(&mut table, "connection_window", size_text(grpc.connection_window_bytes));
    put(&mut table, "window_total", size_text(grpc.window_total_bytes));
    put(&mut table, "max_frame_size", size_text(grpc.max_frame_bytes));
    put(&mut table, "request_timeout_sec", duration(grpc.request_timeout, 1));
    table
}

fn http(config: &Config) -> Table {
    let mut table = Table::new();
    put(&mut table, "max_connections", number(config.http.max_connections));
    put(&mut table, "request_timeout_sec", duration(config.http.request_timeout, 1));
    table
}

/// Without the token: what is printed ends up in tickets and terminals.
fn admin(config: &Config) -> Table {
    let mut table = Table::new();
    if let Some(port) = config.admin.port {
        put(&mut table, "port", i64::from(port));
    }
    put(&mut table, "bind_address", config.admin.bind_address.to_string());
    if let Some(file) = &config.admin.token_file {
        put(&mut table, "token_file", file.display().to_string());
    }
    put(&mut table, "grpc_decommission", config.admin.grpc_decommission.as_str());
    table
}

/// Every entry by its dotted key, as text: what is compared when a file is read again.
pub(super) fn entries(config: &Config) -> BTreeMap<String, String> {
    fn walk(prefix: &str, table: &Table, entries: &mut BTreeMap<String, String>) {
        for (name, value) in table {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                Value::Table(inner) => walk(&key, inner, entries),
                value => drop(entries.insert(key, value.to_string())),
            }
        }
    }
    let mut entries = BTreeMap::new();
    walk("", &table(config), &mut entries);
    entries
}
