//! Checks of the whole configuration: keys against each other, and single values that the kind of a
//! key does not exclude.
//!
//! Invariant: all problems are collected, so that one start shows them all. A problem refuses the
//! configuration, even if the worker could run with it; a warning is only logged.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::sections::Config;
use super::worker::StoreType;
use crate::listeners::http::push;
use crate::schema::kind::size_text;
use crate::schema::{Problem, ValueReader};
use crate::store::{INDEX_CACHE_BYTES, SyncWrites};
use uniffle_base::budget::memory_plan::{divide, promised};
use uniffle_coordinator::embedded::{AppStorage, EmbeddedConfig};
use uniffle_coordinator::heartbeat::CoordinatorAddress;

/// Collects problems and warnings.
#[derive(Debug)]
struct Findings<'a> {
    reader: &'a mut ValueReader,
}

impl Findings<'_> {
    fn refuse(&mut self, key: &str, value: impl Display, allowed: impl Into<String>) {
        self.reader.problems.push(Problem::new(key, value, allowed));
    }

    fn warn(&mut self, text: impl Into<String>) {
        self.reader.warnings.push(text.into());
    }
}

/// Adds the problems and warnings of `config` to `reader`.
pub(super) fn check(config: &Config, reader: &mut ValueReader) {
    let mut found = Findings { reader };
    check_ports(config, &mut found);
    check_admin(config, &mut found);
    check_order(config, &mut found);
    check_localfile(config, &mut found);
    check_partition_limits(config, &mut found);
    check_memory(config, &mut found);
    check_backing(config, &mut found);
    check_coordinators(config, &mut found);
    check_hdfs(config, &mut found);
    check_object(config, &mut found);
    check_tls(config, &mut found);
    for (name, value) in &config.push.labels {
        if let Err(allowed) = push::check_label(name, value) {
            found.refuse("metrics.labels", format_args!("{name:?} = {value:?}"), allowed);
        }
    }
}

fn check_ports(config: &Config, found: &mut Findings) {
    let mut taken = HashMap::new();
    let worker = &config.worker;
    let ports = [
        ("grpc_port", Some(worker.grpc_port)),
        ("urpc_port", worker.urpc_port),
        ("http_port", Some(worker.http_port)),
        ("admin.port", config.admin.port),
    ];
    for (key, port) in ports {
        let Some(port) = port.filter(|port| *port != 0) else { continue };
        if let Some(other) = taken.insert(port, key) {
            found.refuse(key, port, format!("must be a port other than that of {other}"));
        }
    }
}

/// Checks that the admin port has a token unless it listens on loopback only.
fn check_admin(config: &Config, found: &mut Findings) {
    let admin = &config.admin;
    let has_token = admin.token.is_some() || admin.token_file.is_some();
    if !admin.bind_address.is_loopback() && !has_token {
        let allowed = "must be a loopback address, or admin.token_file or WORKER_ADMIN_TOKEN must be set";
        found.refuse("admin.bind_address", admin.bind_address, allowed);
    }
    if let (Some(_), Some(file)) = (&admin.token, &admin.token_file) {
        found.refuse("admin.token_file", file.display(), "must be unset if WORKER_ADMIN_TOKEN is set");
    }
}

/// Checks pairs of keys in which one bounds the other.
fn check_order(config: &Config, found: &mut Findings) {
    let (local, spill) = (&config.local, &config.flush.limits);
    let watermarks = [
        ("localfile_store.disk_low", local.low_watermark, "localfile_store.disk_high", local.high_watermark),
        (
            "hybrid_store.memory_spill_low",
            spill.low_watermark,
            "hybrid_store.memory_spill_high",
            spill.high_watermark,
        ),
    ];
    for (low_key, low, high_key, high) in watermarks {
        if low >= high {
            found.refuse(
                &format!("{low_key}_watermark"),
                low,
                format!("must be less than {high_key}_watermark ({high})"),
            );
        }
    }
    check_windows(config, found);
    if config.service.ticket_check_interval > config.memory.ticket_timeout {
        let interval = humantime::format_duration(config.service.ticket_check_interval);
        let key = "memory_store.buffer_ticket_check_interval_sec";
        found.refuse(key, interval, "must be at most memory_store.buffer_ticket_timeout_sec");
    }
}

/// Checks the HTTP/2 windows against each other. The default of the total depends on capacity and
/// threads, so the problem names `worker_threads` if fewer threads would solve it.
fn check_windows(config: &Config, found: &mut Findings) {
    let grpc = &config.grpc;
    let (stream, connection) = (grpc.stream_window_bytes.into(), grpc.connection_window_bytes.into());
    if stream > connection {
        let allowed = format!("must be at most grpc.connection_window ({})", size_text(connection));
        found.refuse("grpc.stream_window", size_text(stream), allowed);
    }
    let total = grpc.window_budget_bytes;
    if connection <= total {
        return;
    }
    let (capacity, threads) = (config.memory.capacity_bytes, config.worker.threads);
    let has_room = |threads: &usize| divide(capacity, *threads).windows >= connection;
    let fits = if grpc.windows_wanted.is_none() { (1..threads).rev().find(has_room) } else { None };
    if let Some(fit) = fits {
        let allowed = format!(
            "must be at most {fit} with memory_store.capacity = {}, or capacity must be larger: beside the threads, \
             capacity × 0.05 + 200 MiB has no room for grpc.connection_window ({})",
            size_text(capacity),
            size_text(connection)
        );
        found.refuse("runtime_config.worker_threads", threads, allowed);
        return;
    }
    let allowed = format!("must be at most grpc.window_total ({})", size_text(total));
    found.refuse("grpc.connection_window", size_text(connection), allowed);
}

fn check_localfile(config: &Config, found: &mut Findings) {
    if !config.worker.store_type.has_local() {
        return;
    }
    let key = "localfile_store.data_paths";
    let paths = &config.local.paths;
    // The default directory is for a first try; in a cluster, disks must be configured explicitly.
    if !found.reader.given.contains(key) && config.has_quorum() {
        found.refuse(key, "(absent)", "is required with a coordinator_quorum: one directory per disk");
    }
    if paths.is_empty() {
        found.refuse(key, "[]", "must be at least one directory for a store_type with LOCALFILE");
    }
    for (at, path) in paths.iter().enumerate() {
        if path == Path::new("/") {
            found.refuse(key, "/", "must be a directory below the root");
        }
        let overlaps = |other: &&PathBuf| path.starts_with(other) || other.starts_with(path);
        if let Some(other) = paths.iter().take(at).find(overlaps) {
            let allowed = format!(
                "must be distinct directories, none inside another; {} is also listed",
                other.display()
            );
            found.refuse(key, path.display(), allowed);
        }
    }
    if config.local.min_disks > paths.len() {
        let allowed = format!("must be at most the number of data_paths, {}", paths.len());
        found.refuse("localfile_store.healthy_check_min_disks", config.local.min_disks, allowed);
    }
}

/// Warns if configured limits exceed the promised bound of resident memory, with figures.
fn check_memory(config: &Config, found: &mut Findings) {
    let (bound, promised) = (config.resident_bytes_max(), promised(config.memory.capacity_bytes));
    if bound <= promised {
        return;
    }
    let (real, part) = (config.configured_parts(), config.default_parts());
    let kinds = [
        ("memory_store.heap_capacity", real.heap, part.heap),
        ("memory_store.read_buffer_capacity", real.reads, part.reads),
        ("HTTP/2 windows (grpc.window_total, grpc.max_connections)", real.windows, part.windows),
        ("gRPC requests (grpc.max_connections, grpc.max_streams_total)", real.grpc, part.grpc),
        ("TCP connections (tcp.max_connections)", real.tcp, part.tcp),
        ("localfile_store.index_cache_size", config.local.index_cache_bytes, INDEX_CACHE_BYTES),
    ];
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let beyond = kinds.iter().filter(|(_, real, part)| real > part);
    let beyond: Vec<String> = beyond
        .map(|(what, real, part)| format!("{what}: {} MiB, limit {} MiB", mib(*real), mib(*part)))
        .collect();
    found.warn(format!(
        "the process may use {} MiB, more than memory_store.capacity × 1.05 + 200 MiB = {} MiB; lower: {}",
        mib(bound),
        mib(promised),
        beyond.join("; ")
    ));
}

fn check_partition_limits(config: &Config, found: &mut Findings) {
    let partition = &config.partition;
    if partition.memory_ratio <= 0.0 {
        let key = "app_config.partition_limit_memory_backpressure_ratio";
        found.refuse(key, partition.memory_ratio, "must be more than 0.0");
    }
    if let Some(hard_limit) = partition.bytes_max
        && partition.split
        && hard_limit < partition.split_bytes
    {
        let allowed = "must be at least app_config.partition_split_threshold, else no partition is ever \
             split";
        found.refuse("app_config.partition_hard_limit", size_text(hard_limit), allowed);
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn check_coordinators(config: &Config, found: &mut Findings) {
    let mut seen = HashSet::new();
    for address in &config.heartbeat.coordinators {
        if !seen.insert(address) {
            found.refuse("coordinator_quorum", address, "must contain each coordinator once");
        }
    }
    let embedded = &config.embedded;
    let is_default = *embedded
        == EmbeddedConfig {
            enable: embedded.enable,
            storage_type: embedded.storage_type.clone(),
            ..EmbeddedConfig::default()
        };
    if !config.is_embedded() && !is_default {
        found.warn("[embedded_coordinator] has no effect with a coordinator_quorum unless enable is true");
    }
    if !config.is_embedded() && !config.has_quorum() {
        found.refuse("embedded_coordinator.enable", false, "must be true, or coordinator_quorum must be set");
    }
    if config.is_embedded() && embedded.node_timeout <= config.heartbeat.interval {
        // Own heartbeats arrive at that interval, so the coordinator would expire its own worker.
        let timeout = humantime::format_duration(embedded.node_timeout);
        found.refuse(
            "embedded_coordinator.node_timeout_sec",
            timeout,
            "must be more than heartbeat_interval_seconds",
        );
    }
    let is_elsewhere = |address: &CoordinatorAddress| !is_loopback(address.host());
    let has_others = config.heartbeat.coordinators.iter().any(is_elsewhere);
    if config.is_embedded() && has_others && embedded.worker_networks.is_empty() {
        found.warn(
            "embedded_coordinator.worker_networks is empty; workers of other machines cannot join this \
             coordinator",
        );
    }
    let key = "embedded_coordinator.remote_storage_conf";
    let storages = embedded.remote_storages();
    for (host, conf) in &embedded.remote_storage_conf {
        if !storages.iter().any(|storage| storage.host() == host) {
            found.refuse(key, host, "must be hosts of embedded_coordinator.remote_storage_path");
        }
        if AppStorage::parse_conf(conf).is_empty() {
            found.refuse(key, conf, "must be settings of the form \"key=value,key=value\"");
        }
    }
}

/// Checks that persistent memory is combined with recovery, without which its shuffles are unknown.
fn check_backing(config: &Config, found: &mut Findings) {
    let backing = &config.memory.backing;
    if backing.is_private() {
        return;
    }
    let key = "memory_store.backing";
    if !config.worker.store_type.has_local() {
        let allowed = "must be private, or store_type one with local disks, which store registrations and \
             reports";
        found.refuse(key, backing, allowed);
    } else if !config.local.recovery {
        found.refuse(
            key,
            backing,
            "must be private with localfile_store.recovery = false, which deletes all shuffles at start",
        );
    }
}

/// Returns the allowed store types if this build does not support `store_type`.
fn allowed_without(store_type: StoreType, has_hdfs: bool) -> Option<&'static str> {
    let lacks = store_type.has_hdfs() && !has_hdfs;
    lacks.then_some("must be a store type without HDFS; this build has no HDFS (feature `hdfs`)")
}

fn check_hdfs(config: &Config, found: &mut Findings) {
    let store_type = config.worker.store_type;
    if let Some(allowed) = allowed_without(store_type, cfg!(feature = "hdfs")) {
        found.refuse("store_type", store_type.as_str(), allowed);
    }
    let hdfs = &config.hdfs;
    let (keytab, principal) =
        ("hdfs_store.kerberos_security_config.keytab_path", "hdfs_store.kerberos_security_config.principal");
    match (&hdfs.keytab_path, &hdfs.principal) {
        (Some(_), None) => found.refuse(principal, "(absent)", "is required with a keytab_path"),
        (None, Some(_)) => found.refuse(keytab, "(absent)", "is required with a principal"),
        _ => {}
    }
    if store_type.has_hdfs() && hdfs.allowed.0.is_empty() {
        if hdfs.precheck {
            found.refuse(
                "hdfs_store.precheck_enable",
                true,
                "must be false, or hdfs_store.allowed_paths must list the paths to check",
            );
        }
        if hdfs.allowed_paths.is_empty() && config.has_quorum() {
            let allowed = "is required with a coordinator_quorum: remote paths where the worker may write \
                 and delete for applications, or [\"*\"] for all";
            found.refuse("hdfs_store.allowed_paths", "[]", allowed);
        } else {
            found.warn(
                "hdfs_store.allowed_paths permits every remote path; the worker writes and deletes wherever \
                 clients request",
            );
        }
    }
    if !store_type.has_hdfs() && (hdfs.keytab_path.is_some() || !hdfs.allowed_paths.is_empty()) {
        found.warn(format!("[hdfs_store] has no effect with store_type {}", store_type.as_str()));
    }
}

fn check_object(config: &Config, found: &mut Findings) {
    let store_type = config.worker.store_type;
    if store_type.has_object() && config.object.url.is_none() {
        let allowed = format!("is required with store_type {}", store_type.as_str());
        found.refuse("object_store.url", "(absent)", allowed);
    }
    if !store_type.has_object() && config.object.url.is_some() {
        found.warn(format!("[object_store] has no effect with store_type {}", store_type.as_str()));
    }
    if store_type.has_object() && !store_type.has_local() {
        let local = &config.local;
        let keys = [
            ("localfile_store.data_paths", true),
            ("localfile_store.recovery", !local.recovery),
            ("localfile_store.require_mounted", local.require_mounted.is_some()),
            ("localfile_store.sync", local.sync != SyncWrites::Off),
        ];
        let asks = |(key, asks): &(&str, bool)| *asks && found.reader.given.contains(key);
        let ignored: Vec<&str> = keys.iter().filter(|it| asks(it)).map(|(key, _)| *key).collect();
        for key in ignored {
            found.warn(format!("{key} has no effect with store_type {}", store_type.as_str()));
        }
    }
    for (key, value, allowed) in config.object.problems() {
        found.refuse(key, value, allowed);
    }
    config.object.warnings().into_iter().for_each(|warning| found.warn(warning));
}

fn check_tls(config: &Config, found: &mut Findings) {
    let has = |key| found.reader.given.contains(key);
    let (cert, key, client_ca) = (has("tls.cert_file"), has("tls.key_file"), has("tls.client_ca_file"));
    if !cert && (key || client_ca) {
        found.refuse("tls.cert_file", "(absent)", "is required with the other files of [tls]");
    }
    if cert && !key {
        found.refuse("tls.key_file", "(absent)", "is required with tls.cert_file");
    }
    // With client certificates required elsewhere, an unauthenticated port would be a surprise.
    if let Some(port) = config.worker.urpc_port {
        if config.tls.forbids_plain_tcp() {
            let allowed = "must be unset with tls.client_ca_file, because raw TCP cannot check \
                 certificates; tls.plain_tcp = true allows it";
            found.refuse("urpc_port", port, allowed);
        } else if client_ca {
            found.warn(format!(
                "urpc_port = {port} accepts every caller, without a certificate of tls.client_ca_file"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_without_hdfs_refuses_hdfs_store_types() {
        for store_type in [StoreType::MemoryHdfs, StoreType::MemoryLocalfileHdfs] {
            let allowed = allowed_without(store_type, false).unwrap();
            assert!(allowed.contains("this build has no HDFS"), "{allowed}");
            assert_eq!(allowed_without(store_type, true), None);
        }
        assert_eq!(allowed_without(StoreType::MemoryLocalfile, false), None);
    }
}
