//! Which keys a configuration may have, and what to say about the others.
//!
//! [`sort_keys`] turns a TOML table into canonical key → value. It knows names only: no value is looked at here.
//! Invariant: every entry of the table ends either in the result or in a problem.

use std::collections::BTreeMap;

use super::Problem;

/// What this build does with a key it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is read.
    Supported,
    /// It belongs to a part that does not exist yet: an error, because ignoring it would surprise.
    NotYet,
    /// Another server's knob for which this worker has no counterpart: accepted with a warning.
    NoEffect,
}

/// A known key.
#[derive(Debug)]
pub(super) struct Key {
    /// Canonical dotted path.
    pub(super) path: &'static str,
    /// Other dotted paths that mean the same.
    pub(super) aliases: &'static [&'static str],
    /// What is done with it.
    pub(super) standing: Standing,
}

const fn key(path: &'static str) -> Key {
    Key { path, aliases: &[], standing: Standing::Supported }
}

const fn aliased(path: &'static str, aliases: &'static [&'static str]) -> Key {
    Key { path, aliases, standing: Standing::Supported }
}

const fn not_yet(path: &'static str) -> Key {
    Key { path, aliases: &[], standing: Standing::NotYet }
}

const fn no_effect(path: &'static str) -> Key {
    Key { path, aliases: &[], standing: Standing::NoEffect }
}

/// Every key, in the order of `config.toml.example`.
pub(super) const KEYS: &[Key] = &[
    key("store_type"),
    key("bind_address"),
    key("grpc_port"),
    key("urpc_port"),
    aliased("http_port", &["metrics.http_port"]),
    key("coordinator_quorum"),
    key("tags"),
    key("heartbeat_interval_seconds"),
    key("decommission_check_interval_sec"),
    key("decommission_shutdown"),
    key("memory_store.capacity"),
    key("memory_store.buffer_ticket_timeout_sec"),
    key("memory_store.buffer_ticket_check_interval_sec"),
    key("memory_store.buffer_ticket_max_count"),
    key("memory_store.read_buffer_capacity"),
    key("memory_store.block_max_count"),
    key("localfile_store.data_paths"),
    aliased("localfile_store.healthy_check_min_disks", &["localfile_store.min_number_of_available_disks"]),
    key("localfile_store.disk_high_watermark"),
    key("localfile_store.disk_low_watermark"),
    key("localfile_store.disk_max_concurrency"),
    key("localfile_store.write_concurrency_per_disk"),
    key("localfile_store.disk_healthy_check_interval_sec"),
    key("localfile_store.direct_io"),
    key("localfile_store.recovery"),
    key("localfile_store.io_engine"),
    key("localfile_store.verify_reads"),
    key("localfile_store.sync"),
    key("localfile_store.index_cache_size"),
    key("hdfs_store.max_concurrency"),
    key("hdfs_store.partition_write_max_concurrency"),
    key("hdfs_store.allowed_paths"),
    key("hdfs_store.write_timeout_sec"),
    key("hdfs_store.precheck_enable"),
    key("hdfs_store.kerberos_security_config.keytab_path"),
    key("hdfs_store.kerberos_security_config.principal"),
    key("hdfs_store.kerberos_security_config.proxy_user_enable"),
    key("hybrid_store.memory_spill_high_watermark"),
    key("hybrid_store.memory_spill_low_watermark"),
    key("hybrid_store.memory_single_buffer_max_spill_size"),
    key("hybrid_store.huge_partition_memory_single_buffer_max_spill_size"),
    key("hybrid_store.memory_spill_to_cold_threshold_size"),
    key("hybrid_store.memory_spill_to_hdfs_concurrency"),
    key("runtime_config.worker_threads"),
    key("runtime_config.blocking_threads"),
    key("runtime_config.urpc_runtime"),
    no_effect("runtime_config.read_thread_num"),
    no_effect("runtime_config.localfile_write_thread_num"),
    no_effect("runtime_config.hdfs_write_thread_num"),
    no_effect("runtime_config.http_thread_num"),
    no_effect("runtime_config.default_thread_num"),
    no_effect("runtime_config.dispatch_thread_num"),
    key("metrics.push_gateway_endpoint"),
    key("metrics.push_interval_sec"),
    key("metrics.labels"),
    key("log.filter"),
    key("log.path"),
    key("log.rotation"),
    key("log.max_files"),
    key("log.format"),
    key("app_config.app_heartbeat_timeout_min"),
    key("app_config.partition_limit_enable"),
    key("app_config.partition_limit_threshold"),
    key("app_config.partition_limit_memory_backpressure_ratio"),
    key("app_config.partition_split_enable"),
    key("app_config.partition_split_threshold"),
    key("app_config.partition_hard_limit"),
    not_yet("health_service_config.alive_app_number_max_limit"),
    aliased("tracing.otlp_endpoint", &["tracing.jaeger_reporter_endpoint"]),
    key("tracing.sampling_ratio"),
    key("grpc.max_message_size"),
    key("grpc.max_connections"),
    key("grpc.max_concurrent_streams"),
    key("grpc.max_streams_total"),
    key("grpc.stream_window"),
    key("grpc.connection_window"),
    key("grpc.window_total"),
    key("grpc.max_frame_size"),
    key("grpc.request_timeout_sec"),
    key("http.max_connections"),
    key("http.request_timeout_sec"),
    key("admin.port"),
    key("admin.bind_address"),
    key("admin.token_file"),
    key("admin.grpc_decommission"),
    key("shutdown.flush_timeout_sec"),
    key("tls.cert_file"),
    key("tls.key_file"),
    key("tls.client_ca_file"),
    key("tls.doors"),
    key("embedded_coordinator.node_timeout_sec"),
    key("embedded_coordinator.app_timeout_sec"),
    key("embedded_coordinator.shuffle_nodes_max"),
    key("embedded_coordinator.assignment_strategy"),
    key("embedded_coordinator.select_partition_strategy"),
    key("embedded_coordinator.exclude_nodes"),
    key("embedded_coordinator.access_min_nodes"),
    key("embedded_coordinator.access_min_memory_ratio"),
    key("embedded_coordinator.quota_apps_per_user"),
    key("embedded_coordinator.remote_storage_path"),
    key("embedded_coordinator.remote_storage_conf"),
    key("embedded_coordinator.client_conf"),
];

/// How alike two names must be (Damerau-Levenshtein, normalised) before one is offered for the other.
const LIKENESS_MIN: f64 = 0.5;

/// The entries of a configuration under their canonical names.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    /// Supported keys.
    pub(super) values: BTreeMap<&'static str, toml::Value>,
    /// Entries that may not stand.
    pub(super) problems: Vec<Problem>,
    /// Entries that may stand and do nothing.
    pub(super) warnings: Vec<String>,
}

/// Sorts the entries of `table` into known keys and problems.
pub(super) fn sort_keys(table: toml::Table) -> Sorted {
    let mut sorted = Sorted::default();
    walk("", table, &mut sorted);
    sorted
}

fn walk(prefix: &str, table: toml::Table, sorted: &mut Sorted) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        if let Some(key) = find(&path) {
            accept(key, &path, value, sorted);
            continue;
        }
        match (value, is_table(&path)) {
            (toml::Value::Table(inner), true) => walk(&path, inner, sorted),
            (toml::Value::Table(_), false) => sorted.problems.push(Problem {
                key: format!("[{path}]"),
                value: None,
                allowed: unknown_table(&path),
            }),
            (value, true) => {
                sorted.problems.push(Problem::new(&path, &value, "this is a table, not a value"))
            }
            (value, false) => sorted.problems.push(Problem::new(&path, &value, &unknown_key(&path, &name))),
        }
    }
}

fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path || key.aliases.contains(&path))
}

fn accept(key: &'static Key, path: &str, value: toml::Value, sorted: &mut Sorted) {
    match key.standing {
        Standing::NotYet => {
            sorted.problems.push(Problem::new(path, &value, "known key, not supported by this build yet"));
        }
        Standing::NoEffect => sorted
            .warnings
            .push(format!("{path} has no effect: thread counts follow the machine's cores and disks")),
        Standing::Supported if sorted.values.contains_key(key.path) => {
            let allowed = format!("the same key is given twice, as {} and as an alias of it", key.path);
            sorted.problems.push(Problem::new(path, &value, &allowed));
        }
        Standing::Supported => {
            sorted.values.insert(key.path, value);
        }
    }
}

fn all_paths() -> impl Iterator<Item = &'static str> {
    KEYS.iter().flat_map(|key| std::iter::once(key.path).chain(key.aliases.iter().copied()))
}

fn table_of(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(table, _)| table)
}

fn leaf_of(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(_, leaf)| leaf)
}

fn is_table(path: &str) -> bool {
    all_paths().any(|known| known.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// The most similar of `candidates`, when one is similar enough to be a likely slip of the pen.
fn nearest<'a>(text: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::normalized_damerau_levenshtein(text, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, candidate)| candidate)
}

fn unknown_table(path: &str) -> String {
    match nearest(path, all_paths().map(table_of).filter(|table| !table.is_empty())) {
        Some(table) => format!("unknown table, did you mean [{table}]?"),
        None => "unknown table".to_owned(),
    }
}

/// A known name in the wrong table names its table; else the nearest key, preferring the same table.
fn unknown_key(path: &str, name: &str) -> String {
    let homes: Vec<String> = all_paths()
        .filter(|known| leaf_of(known) == name)
        .map(|known| match table_of(known) {
            "" => "at the top level, before the first table".to_owned(),
            table => format!("in the table [{table}]"),
        })
        .collect();
    if !homes.is_empty() {
        return format!("this key belongs {}", homes.join(" or "));
    }
    let table = table_of(path);
    let siblings = all_paths().filter(|known| table_of(known) == table);
    let near = nearest(path, siblings)
        .or_else(|| nearest(path, all_paths()))
        .or_else(|| all_paths().find(|known| nearest(name, std::iter::once(leaf_of(known))).is_some()));
    match near {
        Some(known) => format!("unknown key, did you mean {known}?"),
        None => "unknown key".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only_problem(text: &str) -> String {
        let sorted = sort_keys(text.parse().unwrap());
        assert_eq!(sorted.problems.len(), 1, "{:?}", sorted.problems);
        sorted.problems[0].to_string()
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        assert!(only_problem("gprc_port = 1").contains("did you mean grpc_port?"));
        assert!(only_problem("[memory_store]\ncapasity = 1").contains("did you mean memory_store.capacity?"));
        assert!(only_problem("[memory_stor]\ncapacity = 1").contains("did you mean [memory_store]?"));
        assert!(only_problem("zzzzqqqqxxxx = 1").ends_with("unknown key"));
    }

    #[test]
    fn keys_outside_their_table_name_the_table() {
        assert!(only_problem("capacity = 1").contains("belongs in the table [memory_store]"));
        assert!(only_problem("[log]\ntags = []").contains("belongs at the top level"));
    }

    #[test]
    fn keys_of_parts_to_come_are_not_called_unknown() {
        let text = only_problem("[health_service_config]\nalive_app_number_max_limit = 10");
        assert!(text.contains("not supported by this build yet"), "{text}");
    }

    #[test]
    fn aliases_are_the_same_key_and_may_not_be_given_twice() {
        let sorted = sort_keys("[metrics]\nhttp_port = 1".parse().unwrap());
        assert!(sorted.values.contains_key("http_port"));
        assert!(only_problem("http_port = 1\n[metrics]\nhttp_port = 1").contains("given twice"));
    }

    #[test]
    fn tables_and_values_are_not_confused() {
        assert!(only_problem("memory_store = 5").contains("this is a table"));
    }

    #[test]
    fn other_servers_thread_counts_are_warned_about() {
        let sorted = sort_keys("[runtime_config]\nread_thread_num = 100".parse().unwrap());
        assert!(sorted.problems.is_empty());
        assert_eq!(sorted.warnings.len(), 1);
    }
}
