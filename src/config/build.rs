//! From sorted keys to a [`Config`]: defaults, bounds of each key, then the checks between keys (`check_*`).

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::Duration;

use super::embedded;
use super::hdfs;
use super::keys::Sorted;
use super::machine::Machine;
use super::observe;
use super::reader::{Reader, Unit, absolute_path, size_text};
use super::tls;
use super::{
    Admin, App, CAPACITY_BYTES_MIN, Config, EmbeddedCoordinator, Endpoint, Grpc, GrpcDecommission, Http,
    HybridStore, IoEngine, LocalfileStore, MemoryStore, Problem, Runtime, StoreType, SyncWrites, UrpcRuntime,
    VerifyReads,
};
use crate::listeners::http::admin::Token;
use crate::telemetry::{LogFormat, Rotation, TelemetryConfig, parse_filter};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

const COORDINATORS_MAX: usize = 16;
const TAGS_MAX: usize = 64;
const TAG_CHARS_MAX: usize = 100;
const DATA_PATHS_MAX: usize = 64;
/// Port of the raw TCP listener in embedded mode.
const URPC_PORT: u16 = 21200;

/// Builds a configuration, or says everything that is wrong.
pub(super) fn build(
    sorted: Sorted,
    env: &HashMap<String, String>,
    machine: &Machine,
) -> Result<Config, Vec<Problem>> {
    let mut reader = Reader { values: sorted.values, problems: sorted.problems };
    let names_data_paths = reader.values.contains_key("localfile_store.data_paths");
    let mut config = Config {
        source: None,
        warnings: sorted.warnings,
        store_type: reader.text("store_type", store_type).unwrap_or(StoreType::MemoryLocalfile),
        bind_address: reader.text("bind_address", ip_address).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        grpc_port: reader.port("grpc_port").unwrap_or(21100),
        urpc_port: reader.port("urpc_port"),
        http_port: reader.port("http_port").unwrap_or(19998),
        coordinator_quorum: reader
            .texts("coordinator_quorum", COORDINATORS_MAX, endpoint)
            .unwrap_or_default(),
        tags: reader.texts("tags", TAGS_MAX, tag).unwrap_or_default(),
        heartbeat_interval: reader.duration(
            "heartbeat_interval_seconds",
            10 * SECOND,
            Duration::from_millis(100)..=HOUR,
            Unit::Seconds,
        ),
        decommission_check_interval: reader.duration(
            "decommission_check_interval_sec",
            60 * SECOND,
            SECOND..=HOUR,
            Unit::Seconds,
        ),
        decommission_shutdown: reader.boolean("decommission_shutdown", false),
        shutdown_flush_timeout: reader.duration(
            "shutdown.flush_timeout_sec",
            60 * SECOND,
            Duration::ZERO..=HOUR,
            Unit::Seconds,
        ),
        advertised_ip: worker_ip(&mut reader, env),
        memory: memory(&mut reader, machine),
        localfile: localfile(&mut reader, machine),
        hdfs: hdfs::read(&mut reader, env),
        hybrid: hybrid(&mut reader),
        runtime: runtime(&mut reader, machine),
        log: log(&mut reader, env),
        metrics: observe::metrics(&mut reader),
        tracing: observe::tracing(&mut reader),
        app: app(&mut reader),
        grpc: grpc(&mut reader),
        http: http(&mut reader),
        admin: admin(&mut reader, env),
        tls: tls::read(&mut reader),
        embedded_coordinator: embedded::read(&mut reader),
    };
    if config.urpc_port.is_none() && config.is_embedded() {
        // A first user gets both transports; whoever asks for any free gRPC port gets any free TCP port as well.
        config.urpc_port = Some(if config.grpc_port == 0 { 0 } else { URPC_PORT });
    }
    debug_assert!(reader.values.is_empty(), "keys nobody reads: {:?}", reader.values);

    check_ports(&mut reader, &config);
    check_admin(&mut reader, &config);
    check_memory(&mut reader, &config);
    check_localfile(&mut reader, &config, names_data_paths);
    check_watermarks(&mut reader, &config);
    check_partition_limits(&mut reader, &config);
    check_windows(&mut reader, &config);
    check_quorum(&mut reader, &config);
    embedded::check(&mut reader, &config);
    hdfs::check(&mut reader, &mut config);
    if !config.is_embedded() && config.embedded_coordinator != EmbeddedCoordinator::default() {
        config.warnings.push("[embedded_coordinator] has no effect with a coordinator_quorum".to_owned());
    }
    if reader.problems.is_empty() { Ok(config) } else { Err(reader.problems) }
}

fn store_type(text: &str) -> Result<StoreType, String> {
    match text.to_ascii_uppercase().as_str() {
        "MEMORY" => Ok(StoreType::Memory),
        "MEMORY_LOCALFILE" => Ok(StoreType::MemoryLocalfile),
        "MEMORY_HDFS" => Ok(StoreType::MemoryHdfs),
        "MEMORY_LOCALFILE_HDFS" => Ok(StoreType::MemoryLocalfileHdfs),
        _ => Err("MEMORY, MEMORY_LOCALFILE, MEMORY_HDFS or MEMORY_LOCALFILE_HDFS".to_owned()),
    }
}

fn ip_address(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| "an IP address, such as 0.0.0.0, 127.0.0.1 or ::".to_owned())
}

fn endpoint(text: &str) -> Result<Endpoint, String> {
    let allowed = || "entries of the form host:port, such as \"coordinator1:21000\"".to_owned();
    let (host, port) = text.rsplit_once(':').ok_or_else(allowed)?;
    let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(allowed)?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_is_sound = match bracketed {
        Some(literal) => literal.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let is_host_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            (1..=253).contains(&host.len()) && host.chars().all(is_host_char)
        }
    };
    if !host_is_sound {
        return Err(allowed());
    }
    Ok(Endpoint { host: bracketed.unwrap_or(host).to_owned(), port })
}

/// Whether `tags` may stand in `tags`; else what is allowed.
///
/// # Errors
/// What is allowed.
pub fn check_tags(tags: &[String]) -> Result<(), String> {
    if tags.len() > TAGS_MAX {
        return Err(format!("at most {TAGS_MAX} tags"));
    }
    tags.iter().try_for_each(|text| tag(text).map(drop))
}

/// Tags are joined with commas in metrics and compared as a set by coordinators.
fn tag(text: &str) -> Result<String, String> {
    let is_sound = |c: char| !c.is_control() && !c.is_whitespace() && c != ',';
    if text.is_empty() || text.chars().count() > TAG_CHARS_MAX || !text.chars().all(is_sound) {
        return Err(format!("tags of 1 to {TAG_CHARS_MAX} characters without blanks or commas"));
    }
    Ok(text.to_owned())
}

fn worker_ip(reader: &mut Reader, env: &HashMap<String, String>) -> Option<IpAddr> {
    let text = env.get("WORKER_IP").filter(|text| !text.is_empty())?;
    let usable = text.trim().parse::<IpAddr>().ok().filter(|ip| !ip.is_unspecified() && !ip.is_multicast());
    if usable.is_none() {
        reader.refuse("WORKER_IP", text, "an IP address that clients can reach");
    }
    usable
}

fn memory(reader: &mut Reader, machine: &Machine) -> MemoryStore {
    let capacity_bytes =
        reader.size("memory_store.capacity", machine.default_capacity_bytes(), CAPACITY_BYTES_MIN..=16 * TIB);
    MemoryStore {
        capacity_bytes,
        ticket_timeout: reader.duration(
            "memory_store.buffer_ticket_timeout_sec",
            300 * SECOND,
            SECOND..=DAY,
            Unit::Seconds,
        ),
        ticket_check_interval: reader.duration(
            "memory_store.buffer_ticket_check_interval_sec",
            10 * SECOND,
            Duration::from_millis(100)..=HOUR,
            Unit::Seconds,
        ),
        ticket_max_count: reader.count("memory_store.buffer_ticket_max_count", 1_000_000, 1..=100_000_000),
        read_capacity_bytes: reader.size("memory_store.read_buffer_capacity", 64 * MIB, 4 * MIB..=64 * GIB),
        block_max_count: reader.integer(
            "memory_store.block_max_count",
            (capacity_bytes / 512).min(1 << 32),
            1000..=1 << 32,
        ),
    }
}

fn localfile(reader: &mut Reader, machine: &Machine) -> LocalfileStore {
    LocalfileStore {
        data_paths: reader
            .paths("localfile_store.data_paths", DATA_PATHS_MAX)
            .unwrap_or_else(|| vec![machine.state_dir.join("data")]),
        healthy_check_min_disks: reader.count(
            "localfile_store.healthy_check_min_disks",
            0,
            0..=DATA_PATHS_MAX,
        ),
        disk_high_watermark: reader.ratio("localfile_store.disk_high_watermark", 0.8),
        disk_low_watermark: reader.ratio("localfile_store.disk_low_watermark", 0.7),
        disk_max_concurrency: reader.count("localfile_store.disk_max_concurrency", 2000, 1..=1_000_000),
        write_concurrency_per_disk: reader.count("localfile_store.write_concurrency_per_disk", 4, 1..=256),
        disk_healthy_check_interval: reader.duration(
            "localfile_store.disk_healthy_check_interval_sec",
            60 * SECOND,
            SECOND..=DAY,
            Unit::Seconds,
        ),
        direct_io: reader.boolean("localfile_store.direct_io", true),
        recovery: reader.boolean("localfile_store.recovery", true),
        io_engine: reader.text("localfile_store.io_engine", io_engine).unwrap_or(IoEngine::Blocking),
        verify_reads: reader
            .text("localfile_store.verify_reads", verify_reads)
            .unwrap_or(VerifyReads::Always),
        sync: reader.text("localfile_store.sync", sync_writes).unwrap_or(SyncWrites::Off),
        index_cache_bytes: reader.size("localfile_store.index_cache_size", 16 * MIB, 0..=16 * GIB),
    }
}

fn hybrid(reader: &mut Reader) -> HybridStore {
    HybridStore {
        memory_spill_high_watermark: reader.ratio("hybrid_store.memory_spill_high_watermark", 0.8),
        memory_spill_low_watermark: reader.ratio("hybrid_store.memory_spill_low_watermark", 0.2),
        memory_single_buffer_max_spill_size_bytes: reader.size(
            "hybrid_store.memory_single_buffer_max_spill_size",
            256 * MIB,
            MIB..=TIB,
        ),
        huge_partition_memory_single_buffer_max_spill_size_bytes: reader.size(
            "hybrid_store.huge_partition_memory_single_buffer_max_spill_size",
            128_000_000,
            MIB..=TIB,
        ),
        memory_spill_to_cold_threshold_size_bytes: reader.size(
            "hybrid_store.memory_spill_to_cold_threshold_size",
            128_000_000,
            1..=TIB,
        ),
        memory_spill_to_hdfs_concurrency: reader.count(
            "hybrid_store.memory_spill_to_hdfs_concurrency",
            500,
            1..=10_000,
        ),
    }
}

fn runtime(reader: &mut Reader, machine: &Machine) -> Runtime {
    Runtime {
        worker_threads: reader.count("runtime_config.worker_threads", machine.cores.clamp(1, 1024), 1..=1024),
        blocking_threads: reader.count("runtime_config.blocking_threads", 256, 4..=4096),
        urpc: reader.text("runtime_config.urpc_runtime", urpc_runtime).unwrap_or(UrpcRuntime::PerCore),
    }
}

fn io_engine(text: &str) -> Result<IoEngine, String> {
    match text {
        "blocking" => Ok(IoEngine::Blocking),
        "io_uring" if cfg!(feature = "io-uring") => Ok(IoEngine::Uring),
        "io_uring" => Err("this program was built without the feature io-uring".to_owned()),
        _ => Err("blocking or io_uring is allowed".to_owned()),
    }
}

fn verify_reads(text: &str) -> Result<VerifyReads, String> {
    match text {
        "always" => Ok(VerifyReads::Always),
        "sampled" => Ok(VerifyReads::Sampled),
        "off" => Ok(VerifyReads::Off),
        _ => Err("always, sampled or off".to_owned()),
    }
}

fn sync_writes(text: &str) -> Result<SyncWrites, String> {
    match text {
        "off" => Ok(SyncWrites::Off),
        "group" => Ok(SyncWrites::Group),
        _ => Err("off or group".to_owned()),
    }
}

fn urpc_runtime(text: &str) -> Result<UrpcRuntime, String> {
    match text {
        "per_core" => Ok(UrpcRuntime::PerCore),
        "shared" => Ok(UrpcRuntime::Shared),
        _ => Err("per_core or shared is allowed".to_owned()),
    }
}

fn log(reader: &mut Reader, env: &HashMap<String, String>) -> TelemetryConfig {
    let set = |name: &str| env.get(name).filter(|text| !text.trim().is_empty()).cloned();
    let (name, filter) = match (set("RUST_LOG"), set("LOG")) {
        (Some(filter), _) => ("RUST_LOG", filter),
        (None, Some(filter)) => ("LOG", filter),
        (None, None) => {
            ("log.filter", reader.text("log.filter", |text| Ok(text.to_owned())).unwrap_or("info".to_owned()))
        }
    };
    reader.values.remove("log.filter"); // the environment's takes its place
    if let Err(error) = parse_filter(&filter) {
        reader.refuse(
            name,
            &filter,
            &format!("a filter such as \"info\" or \"uniffle_worker=debug\" ({error})"),
        );
    }
    let rotation = |text: &str| match text.to_ascii_lowercase().as_str() {
        "daily" => Ok(Rotation::Daily),
        "hourly" => Ok(Rotation::Hourly),
        "never" => Ok(Rotation::Never),
        _ => Err("Daily, Hourly or Never".to_owned()),
    };
    let format = |text: &str| match text.to_ascii_lowercase().as_str() {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("text or json".to_owned()),
    };
    TelemetryConfig {
        directory: reader.text("log.path", absolute_path),
        rotation: reader.text("log.rotation", rotation).unwrap_or(Rotation::Daily),
        files_max: reader.count("log.max_files", 14, 1..=10_000),
        format: reader.text("log.format", format).unwrap_or(LogFormat::Text),
        filter,
    }
}

fn app(reader: &mut Reader) -> App {
    App {
        heartbeat_timeout: reader.duration(
            "app_config.app_heartbeat_timeout_min",
            300 * SECOND,
            10 * SECOND..=7 * DAY,
            Unit::Minutes,
        ),
        partition_limit_enable: reader.boolean("app_config.partition_limit_enable", true),
        partition_limit_threshold_bytes: reader.size(
            "app_config.partition_limit_threshold",
            20_000_000_000,
            MIB..=1024 * TIB,
        ),
        partition_limit_memory_backpressure_ratio: reader
            .ratio("app_config.partition_limit_memory_backpressure_ratio", 0.2),
        partition_split_enable: reader.boolean("app_config.partition_split_enable", false),
        partition_split_threshold_bytes: reader.size(
            "app_config.partition_split_threshold",
            40_000_000_000,
            MIB..=1024 * TIB,
        ),
        partition_hard_limit_bytes: reader.optional_size("app_config.partition_hard_limit", MIB..=1024 * TIB),
    }
}

fn grpc(reader: &mut Reader) -> Grpc {
    Grpc {
        max_message_bytes: reader.size("grpc.max_message_size", GIB, MIB..=2 * GIB - 1),
        max_connections: reader.count("grpc.max_connections", 4096, 1..=100_000),
        max_concurrent_streams: reader.count("grpc.max_concurrent_streams", 256, 1..=65_535),
        max_streams_total: reader.count("grpc.max_streams_total", 8192, 256..=10_000_000),
        stream_window_bytes: reader.size("grpc.stream_window", MIB, 64 * KIB..=64 * MIB),
        connection_window_bytes: reader.size("grpc.connection_window", 4 * MIB, 64 * KIB..=512 * MIB),
        window_total_bytes: reader.size("grpc.window_total", 64 * MIB, 64 * KIB..=64 * GIB),
        max_frame_bytes: reader.size("grpc.max_frame_size", MIB, 16 * KIB..=8 * MIB),
        request_timeout: reader.duration(
            "grpc.request_timeout_sec",
            120 * SECOND,
            SECOND..=HOUR,
            Unit::Seconds,
        ),
    }
}

fn http(reader: &mut Reader) -> Http {
    Http {
        max_connections: reader.count("http.max_connections", 64, 1..=10_000),
        request_timeout: reader.duration(
            "http.request_timeout_sec",
            30 * SECOND,
            SECOND..=600 * SECOND,
            Unit::Seconds,
        ),
    }
}

fn admin(reader: &mut Reader, env: &HashMap<String, String>) -> Admin {
    let token = env.get("WORKER_ADMIN_TOKEN").filter(|text| !text.is_empty()).and_then(|text| {
        let token = Token::parse(text);
        if let Err(allowed) = token {
            reader.refuse("WORKER_ADMIN_TOKEN", "(hidden)", &allowed.to_string());
        }
        token.ok()
    });
    Admin {
        port: reader.port("admin.port"),
        bind_address: reader
            .text("admin.bind_address", ip_address)
            .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        token_file: reader.text("admin.token_file", absolute_path),
        token,
        grpc_decommission: reader
            .text("admin.grpc_decommission", grpc_decommission)
            .unwrap_or(GrpcDecommission::Coordinators),
    }
}

fn grpc_decommission(text: &str) -> Result<GrpcDecommission, String> {
    let found = GrpcDecommission::ALL.into_iter().find(|who| who.as_str() == text);
    found.ok_or_else(|| "coordinators, loopback, open or off".to_owned())
}

/// Whoever reaches the administration can stop the node's work, so that more than this machine needs a token.
fn check_admin(reader: &mut Reader, config: &Config) {
    let admin = &config.admin;
    let has_token = admin.token.is_some() || admin.token_file.is_some();
    if !admin.bind_address.is_loopback() && !has_token {
        let allowed = "a loopback address; any other needs admin.token_file or WORKER_ADMIN_TOKEN";
        reader.refuse("admin.bind_address", admin.bind_address, allowed);
    }
    if let (Some(_), Some(file)) = (&admin.token, &admin.token_file) {
        reader.refuse("admin.token_file", file.display(), "one of it and WORKER_ADMIN_TOKEN");
    }
}

fn check_ports(reader: &mut Reader, config: &Config) {
    let mut taken = HashMap::new();
    let ports = [
        ("grpc_port", Some(config.grpc_port)),
        ("urpc_port", config.urpc_port),
        ("http_port", Some(config.http_port)),
        ("admin.port", config.admin.port),
    ];
    for (key, port) in ports {
        let Some(port) = port.filter(|port| *port != 0) else { continue };
        if let Some(other) = taken.insert(port, key) {
            reader.refuse(key, port, &format!("a port other than that of {other}"));
        }
    }
}

fn check_memory(reader: &mut Reader, config: &Config) {
    let memory = &config.memory;
    if memory.ticket_check_interval > memory.ticket_timeout {
        let interval = humantime::format_duration(memory.ticket_check_interval);
        reader.refuse(
            "memory_store.buffer_ticket_check_interval_sec",
            interval,
            "at most memory_store.buffer_ticket_timeout_sec",
        );
    }
}

fn check_localfile(reader: &mut Reader, config: &Config, names_data_paths: bool) {
    if !config.store_type.has_local() {
        return;
    }
    let key = "localfile_store.data_paths";
    let paths = &config.localfile.data_paths;
    // The default directory is for a first try on one machine; a cluster's disks are to be named.
    if !names_data_paths && !config.is_embedded() {
        reader.refuse(key, "(absent)", "needed with a coordinator_quorum: one directory per disk");
    }
    if paths.is_empty() {
        reader.refuse(key, "[]", "at least one directory for store_type MEMORY_LOCALFILE");
    }
    for (at, path) in paths.iter().enumerate() {
        if path == Path::new("/") {
            reader.refuse(key, "/", "a directory of its own below the root");
        }
        let overlaps = |other: &&std::path::PathBuf| path.starts_with(other) || other.starts_with(path);
        if let Some(other) = paths.iter().take(at).find(overlaps) {
            let allowed =
                format!("distinct directories, none inside another; {} is listed too", other.display());
            reader.refuse(key, path.display(), &allowed);
        }
    }
    let min_disks = config.localfile.healthy_check_min_disks;
    if min_disks > paths.len() {
        let allowed = format!("at most the number of data_paths, {}", paths.len());
        reader.refuse("localfile_store.healthy_check_min_disks", min_disks, &allowed);
    }
}

fn check_watermarks(reader: &mut Reader, config: &Config) {
    let pairs = [
        (
            "localfile_store.disk_low_watermark",
            config.localfile.disk_low_watermark,
            "localfile_store.disk_high_watermark",
            config.localfile.disk_high_watermark,
        ),
        (
            "hybrid_store.memory_spill_low_watermark",
            config.hybrid.memory_spill_low_watermark,
            "hybrid_store.memory_spill_high_watermark",
            config.hybrid.memory_spill_high_watermark,
        ),
    ];
    for (low_key, low, high_key, high) in pairs {
        if low >= high {
            reader.refuse(low_key, low, &format!("less than {high_key} ({high})"));
        }
    }
}

fn check_partition_limits(reader: &mut Reader, config: &Config) {
    let app = &config.app;
    if app.partition_limit_memory_backpressure_ratio <= 0.0 {
        let key = "app_config.partition_limit_memory_backpressure_ratio";
        reader.refuse(key, app.partition_limit_memory_backpressure_ratio, "more than 0.0");
    }
    let Some(hard_limit) = app.partition_hard_limit_bytes else { return };
    if app.partition_split_enable && hard_limit < app.partition_split_threshold_bytes {
        let allowed = "at least app_config.partition_split_threshold, or no partition is ever split";
        reader.refuse("app_config.partition_hard_limit", size_text(hard_limit), allowed);
    }
}

fn check_windows(reader: &mut Reader, config: &Config) {
    let Grpc { stream_window_bytes, connection_window_bytes, window_total_bytes, .. } = config.grpc;
    if stream_window_bytes > connection_window_bytes {
        reader.refuse(
            "grpc.stream_window",
            size_text(stream_window_bytes),
            &format!("at most grpc.connection_window ({})", size_text(connection_window_bytes)),
        );
    }
    if connection_window_bytes > window_total_bytes {
        reader.refuse(
            "grpc.connection_window",
            size_text(connection_window_bytes),
            &format!("at most grpc.window_total ({})", size_text(window_total_bytes)),
        );
    }
}

fn check_quorum(reader: &mut Reader, config: &Config) {
    let mut seen = HashSet::new();
    for endpoint in &config.coordinator_quorum {
        if !seen.insert(endpoint) {
            reader.refuse("coordinator_quorum", endpoint, "each coordinator once");
        }
    }
}
