//! Tests of the configuration as a whole; single values are tested in `schema`.

use super::sections::schema;
use super::*;

mod cluster;
mod document;
mod import;
mod names;

use document::{example, reference};
use names::RIFFLE;

const EXAMPLE: &str = include_str!("../../config.toml.example");

/// Command that updates the generated files.
const UPDATE: &str = "UPDATE_DOCS=1 cargo test --lib config";

fn machine() -> Machine {
    Machine { memory_bytes: 10 << 30, cores: 4, state_dir: PathBuf::from("/state") }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, &HashMap::new(), &machine())
}

fn problems(text: &str) -> Vec<String> {
    match parse(text) {
        Err(ConfigError::Invalid { problems, .. }) => problems.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

fn only_problem(text: &str) -> String {
    let found = problems(text);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

fn env(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Returns the example with its commented-out settings (`#: key = …`) enabled.
fn example_with_everything() -> String {
    let uncommented = EXAMPLE.lines().map(|line| match line.strip_prefix("#: ") {
        Some(setting) => setting.to_owned(),
        None => line.to_owned(),
    });
    let is_built_in = |line: &String| cfg!(feature = "otlp") || !line.starts_with("otlp_endpoint");
    uncommented.filter(is_built_in).map(|line| line + "\n").collect()
}

#[test]
fn defaults_are_an_embedded_worker_with_one_disk() {
    let config = parse("").unwrap();
    assert!(config.is_embedded());
    assert_eq!(config.worker.store_type, StoreType::MemoryLocalfile);
    assert_eq!(
        (config.worker.grpc_port, config.worker.http_port, config.worker.urpc_port),
        (21100, 19998, Some(21200))
    );
    assert_eq!(config.memory.capacity_bytes, 4 << 30);
    assert_eq!(config.local.paths, [PathBuf::from("/state/data")]);
    assert_eq!(config.worker.threads, 4);
    assert_eq!(config.log.filter, "info");
}

#[test]
fn tcp_listener_is_open_by_default_in_embedded_mode_only() {
    assert_eq!(parse("grpc_port = 0").unwrap().worker.urpc_port, Some(0));
    let quorum = "coordinator_quorum = [\"c:1\"]\n[localfile_store]\ndata_paths = [\"/d\"]";
    assert_eq!(parse(quorum).unwrap().worker.urpc_port, None);
    assert_eq!(parse("urpc_port = 7").unwrap().worker.urpc_port, Some(7));
}

#[test]
fn example_equals_the_defaults() {
    assert_eq!(parse(EXAMPLE).unwrap(), parse("").unwrap());
}

#[test]
fn generated_files_are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, text) in [("config.toml.example", example()), ("docs/configuration.md", reference())] {
        let path = root.join(name);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let file = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(file == text, "{name} differs from the source: run {UPDATE}");
    }
}

#[test]
fn example_names_every_key_and_only_valid_values() {
    let text = example_with_everything();
    let schema = schema();
    let reader = ValueReader::new(&schema, text.parse().unwrap(), HashMap::new());
    assert!(reader.problems.is_empty(), "{:?}", reader.problems);
    for key in schema.keys.iter().filter(|key| !key.path.is_empty()) {
        let is_absent = key.path == "tracing.otlp_endpoint" && !cfg!(feature = "otlp");
        assert!(is_absent || reader.given.contains(key.path), "key {} is missing in the example", key.path);
    }
    parse(&text).unwrap();
}

#[test]
fn printed_configuration_parses_back() {
    let text = format!(
        "{}\n[embedded_coordinator.client_conf]\n\"rss.x.y\" = 5\n",
        "[memory_store]\nbuffer_ticket_check_interval_sec = \"1500ms\"\n[app_config]\napp_heartbeat_timeout_min = \"90s\""
    );
    for text in ["", EXAMPLE, &text, "coordinator_quorum = [\"[::1]:1\", \"b:2\"]\nstore_type = \"MEMORY\""] {
        let config = parse(text).unwrap();
        assert_eq!(parse(&config.to_toml()).unwrap(), config, "{}", config.to_toml());
    }
    let everything = parse(&example_with_everything()).unwrap();
    assert_eq!(parse(&everything.to_toml()).unwrap(), everything);
    let keys = schema().keys.iter().filter(|key| !key.path.is_empty()).count();
    assert_eq!(everything.entries().len() + usize::from(!cfg!(feature = "otlp")), keys);
}

#[test]
fn shown_configuration_hides_secrets_and_comparison_keeps_them() {
    let text = "[embedded_coordinator]\nremote_storage_path = [\"s3a://ns\"]\n\
                remote_storage_conf = { ns = \"fs.x=plain,fs.s3a.secret.key=hush1,y=hush1\" }\n\
                client_conf = { \"rss.client.password\" = \"hush2\", \"fs.azure.account.key.a\" = \"hush3\" }\n\
                [metrics]\nlabels = { session_token = \"hush4\" }\n";
    let config = parse(text).unwrap();
    let entries: String = config.redacted_entries().values().cloned().collect();
    for shown in [config.to_redacted_toml(), entries] {
        assert!(!shown.contains("hush") && shown.contains("plain"), "{shown}");
        assert!(shown.contains("fs.azure.account.key.a"), "{shown}");
    }
    assert_eq!(parse(&config.to_toml()).unwrap(), config);
    let hidden: Vec<_> =
        schema().keys.iter().map(|key| key.path).filter(|path| redact::is_secret(path)).collect();
    assert_eq!(hidden, Vec::<&str>::new(), "keys of the configuration count as secrets and are not shown");
}

#[cfg(feature = "object")]
#[test]
fn object_store_keys_come_from_environment_and_stay_hidden() {
    let keys = env(&[
        ("AWS_ACCESS_KEY_ID", "hush1"),
        ("AWS_SECRET_ACCESS_KEY", "hush2"),
        ("AWS_SESSION_TOKEN", "hush3"),
    ]);
    let text = "[object_store]\nurl = \"s3://shuffle/x\"\nendpoint = \"http://store:1\"";
    let config = Config::parse(text, &keys, &machine()).unwrap();
    assert!(config.object.path_style && config.warnings.iter().any(|warning| warning.contains("not https")));
    assert_eq!(config.object.secret_key.as_ref().map(|key| key.reveal()), Some("hush2"));
    let entries: String = config.entries().into_values().collect();
    for shown in [config.to_toml(), config.to_redacted_toml(), entries, format!("{config:?}")] {
        assert!(!shown.contains("hush"), "{shown}");
    }
    assert!(config.to_redacted_toml().contains("credentials = \"environment\""));
    let found = problems("[object_store]\nurl = \"s3://shuffle/x\"\ncredentials = \"file\"");
    assert!(found[0].starts_with("object_store.credentials_file"), "{found:?}");
}

#[test]
fn refused_value_is_reported_without_secrets() {
    for text in [
        "[metrics]\npush_gateway_endpoint = \"http://user:hush@gateway:9091\"",
        "[tracing]\notlp_endpoint = \"user:hush@collector\"",
        "[embedded_coordinator]\nclient_conf = { \"my.password\" = [\"hush\"] }",
        "[embedded_coordinator]\nclient_conf = { \"my.password\" = \"hush }",
        "[admin]\ntoken = \"hush\"",
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(!error.contains("hush") && error.contains("<removed>"), "{error}");
    }
}

#[test]
fn all_problems_are_reported_at_once() {
    let text = r#"
        store_type = "MEMORY_S3"
        grpc_port = 70000
        gprc_port = 1
        coordinator_quorum = ["nohost"]
        tags = ["a,b"]
        [memory_store]
        capacity = "1K"
        [localfile_store]
        data_paths = ["relative"]
        disk_low_watermark = 0.9
        [hdfs_store]
        max_concurrency = 0
        allowed_paths = ["/uniffle"]
        [hdfs_store.kerberos_security_config]
        principal = "uniffle"
        [metrics]
        push_interval_sec = 0
        [nonsense]
        a = 1
    "#;
    let found = problems(text);
    for part in [
        "store_type = \"MEMORY_S3\": must be MEMORY, MEMORY_LOCALFILE,",
        "grpc_port = 70000: must be a port",
        "gprc_port = 1: unknown key, did you mean grpc_port?",
        "coordinator_quorum = [\"nohost\"]: must be entries of the form host:port",
        "tags = [\"a,b\"]: must be tags of 1 to 100",
        "memory_store.capacity = \"1K\": must be a size from 16MiB",
        "localfile_store.data_paths = [\"relative\"]: must be absolute paths",
        "localfile_store.disk_low_watermark = 0.9: must be less than",
        "hdfs_store.max_concurrency = 0: ",
        "hdfs_store.allowed_paths = [\"/uniffle\"]: must be paths such as",
        "hdfs_store.kerberos_security_config.principal = \"uniffle\": must be a Kerberos principal",
        "metrics.push_interval_sec = 0: must be a duration from 1s to 1h",
        "[nonsense]: unknown table",
    ] {
        assert!(
            found.iter().any(|problem| problem.starts_with(part)),
            "no problem starts with {part}: {found:#?}"
        );
    }
    assert_eq!(found.len(), 13, "{found:#?}");
    let shown = parse(text).unwrap_err().to_string();
    assert!(shown.contains("13 problems") && shown.lines().count() == 15, "{shown}");
    assert!(shown.ends_with("with `uniffle-worker import FILE`"), "{shown}");
}

#[test]
fn keys_are_checked_against_each_other() {
    let cases = [
        ("grpc_port = 5\nhttp_port = 5", "http_port = 5: must be a port other than that of grpc_port"),
        (
            "grpc_port = 0\nhttp_port = 0\ncoordinator_quorum = [\"a:1\", \"a:1\"]\nstore_type = \"MEMORY\"",
            "each coordinator once",
        ),
        ("[localfile_store]\ndata_paths = [\"/a\", \"/a/\"]", "distinct directories"),
        ("[localfile_store]\ndata_paths = [\"/a\", \"/a/b\"]", "none inside another"),
        ("[localfile_store]\ndata_paths = []", "at least one directory"),
        ("[localfile_store]\ndata_paths = [\"/\"]", "below the root"),
        ("[localfile_store]\nhealthy_check_min_disks = 2", "at most the number of data_paths"),
        (
            "[hybrid_store]\nmemory_spill_low_watermark = 0.8",
            "less than hybrid_store.memory_spill_high_watermark",
        ),
        ("[memory_store]\nbuffer_ticket_timeout_sec = 5", "at most memory_store.buffer_ticket_timeout_sec"),
        ("[grpc]\nstream_window = \"8MiB\"", "at most grpc.connection_window"),
        ("[grpc]\nwindow_total = \"2MiB\"", "at most grpc.window_total"),
        ("heartbeat_interval_seconds = 30", "more than heartbeat_interval_seconds"),
        (
            "[embedded_coordinator.remote_storage_conf]\nh = \"a=b\"",
            "hosts of embedded_coordinator.remote_storage_path",
        ),
        ("coordinator_quorum = [\"a:1\"]", "required with a coordinator_quorum"),
    ];
    for (text, part) in cases {
        let found = problems(text);
        assert!(found.len() == 1 && found[0].contains(part), "expected one problem with {part}: {found:?}");
    }
}

#[test]
fn client_certificates_require_explicit_plain_tcp() {
    let tls = "[tls]\ncert_file = \"/a\"\nkey_file = \"/b\"\nclient_ca_file = \"/c\"\n";
    let refused = only_problem(&format!("urpc_port = 7\n{tls}"));
    assert!(refused.starts_with("urpc_port = 7: must be unset with tls.client_ca_file"), "{refused}");
    assert!(refused.contains("tls.plain_tcp = true"), "{refused}");
    assert_eq!(
        parse(tls).unwrap().worker.urpc_port,
        None,
        "the TCP port must stay closed by default with TLS"
    );
    let open = parse(&format!("urpc_port = 7\n{tls}plain_tcp = true")).unwrap();
    assert_eq!(open.worker.urpc_port, Some(7));
    assert!(open.warnings.iter().any(|warning| warning.starts_with("urpc_port = 7 accepts every caller")));
    // The port is as open as gRPC.
    assert!(parse(&format!("urpc_port = 7\n{tls}listeners = [\"http\"]")).is_ok());
    assert!(parse(&format!("{tls}plain_tcp = true")).unwrap().worker.urpc_port.is_some());
    let without = parse("urpc_port = 7\n[tls]\ncert_file = \"/a\"\nkey_file = \"/b\"").unwrap();
    assert_eq!((without.worker.urpc_port, without.warnings.len()), (Some(7), 0));
    // A reload cannot close the port.
    let renewed = without.renewed(&parse(tls).unwrap());
    assert!(renewed.warnings.iter().any(|warning| warning.contains("urpc_port remains open")));
}

#[test]
fn persistent_memory_needs_no_more_than_private_memory() {
    let with = |backing: &str| {
        parse(&format!("[memory_store]\ncapacity = \"256MB\"\nbacking = \"{backing}\"\n")).unwrap()
    };
    let (private, kept) = (with("private"), with("memfd"));
    assert_eq!(kept.resident_bytes_max(), private.resident_bytes_max());
    assert_eq!((private.warnings.len(), kept.warnings.len()), (0, 0));
}

#[test]
fn memory_is_persistent_by_default_under_systemd() {
    let backing = |text: &str, kept: &str| {
        let env = HashMap::from([("FDSTORE".to_owned(), kept.to_owned())]);
        Config::parse(text, &env, &machine()).unwrap().memory.backing.to_string()
    };
    assert_eq!(backing("", "4096"), "memfd");
    assert_eq!(backing("[memory_store]\nbacking = \"auto\"", "4096"), "memfd");
    assert_eq!(backing("[memory_store]\nbacking = \"private\"", "4096"), "private");
    assert_eq!(backing("[memory_store]\nbacking = \"/dev/shm/worker\"", "0"), "/dev/shm/worker");
    assert_eq!((backing("", "0"), backing("", "")), ("private".to_owned(), "private".to_owned()));
    let forgetful = "[localfile_store]\nrecovery = false";
    assert_eq!(
        backing(forgetful, "4096"),
        "private",
        "memory survives although no metadata log knows its shuffles"
    );
    assert_eq!(parse("").unwrap().memory.backing.to_string(), "private");
}

#[test]
fn excessive_memory_is_reported_with_its_keys() {
    let with = |text: &str| parse(&format!("[memory_store]\ncapacity = \"256MB\"\n{text}")).unwrap();
    let plain = with("");
    assert!(plain.warnings.is_empty() && plain.resident_bytes_max() <= 256_000_000 * 21 / 20 + (200 << 20));
    assert_eq!((plain.grpc.connections_max, plain.tcp.connections_max), (201, 384));
    let more = with("read_buffer_capacity = \"1GiB\"\n[grpc]\nmax_connections = 4096");
    let [warning] = &more.warnings[..] else { panic!("{:?}", more.warnings) };
    for part in [
        "the process may use 19",
        "capacity × 1.05 + 200 MiB = 457 MiB",
        "memory_store.read_buffer_capacity: 1024 MiB, limit 40 MiB",
        "HTTP/2 windows (grpc.window_total, grpc.max_connections): 256 MiB, limit 21 MiB",
        "gRPC requests (grpc.max_connections, grpc.max_streams_total): 320 MiB",
    ] {
        assert!(warning.contains(part), "the warning lacks {part}: {warning}");
    }
    let [warning] = &with("[localfile_store]\nindex_cache_size = \"1GiB\"").warnings[..] else {
        panic!("expected exactly one warning")
    };
    assert!(warning.contains("localfile_store.index_cache_size: 1024 MiB, limit 16 MiB"), "{warning}");
    // Lowering one key leaves room for another.
    let moved = with("read_buffer_capacity = \"60MiB\"\nheap_capacity = \"32MiB\"");
    assert!(moved.warnings.is_empty(), "{:?}", moved.warnings);
    // More connections leave every kind its minimum.
    assert!(more.grpc.stream_budget >= 4 * 4096 && more.grpc.window_budget_bytes < 4096 * 65_535);
    assert_eq!(with("[grpc]\nmax_connections = 20").grpc.connections_max, 20);
}

/// Regression test: the problem named `grpc.connection_window`, which the user had not set.
#[test]
fn threads_without_memory_for_windows_are_reported() {
    let with = |threads: usize, more: &str| {
        format!("[memory_store]\ncapacity = \"64MiB\"\n[runtime_config]\nworker_threads = {threads}\n{more}")
    };
    let refused = only_problem(&with(1024, ""));
    let rest = refused.strip_prefix("runtime_config.worker_threads = 1024: must be at most ").unwrap();
    let (most, rest) = rest.split_once(' ').unwrap();
    assert!(rest.starts_with("with memory_store.capacity = 64MiB"), "{refused}");
    let most: usize = most.parse().unwrap();
    assert!(parse(&with(most, "")).is_ok());
    assert!(only_problem(&with(most + 1, "")).contains(&format!(" at most {most} ")));
    let given = only_problem(&with(1024, "[grpc]\nwindow_total = \"1MiB\""));
    assert!(given.starts_with("grpc.connection_window = 4MiB: must be at most grpc.window_total"), "{given}");
    let wide = only_problem(&with(2, "[grpc]\nconnection_window = \"64MiB\""));
    assert!(wide.starts_with("grpc.connection_window = 64MiB: must be at most grpc.window_total"), "{wide}");
}

#[test]
fn all_problems_of_a_list_are_reported() {
    let listeners = only_problem("[tls]\nlisteners = [\"grpc\", \"htp\", \"ftp\"]");
    assert!(listeners.ends_with("grpc, http or admin, not \"htp\", \"ftp\""), "{listeners}");
    let weights =
        only_problem("[fairness]\nweights = [{ user = \"a\", weight = 0 }, { app = 1, queue = 2 }]");
    for part in
        ["entry 1: 1 to 1000 as `weight`;", "entry 2: not \"queue\", text of 1 to 1024 characters as `app`, "]
    {
        assert!(weights.contains(part), "{weights}");
    }
}

#[test]
fn ineffective_keys_are_warnings() {
    let text = "store_type = \"MEMORY\"\ncoordinator_quorum = [\"a:1\"]\n\
                [embedded_coordinator]\nremote_storage_path = \"hdfs://x/y\"\n[runtime_config]\nread_thread_num = 9";
    assert_eq!(parse(text).unwrap().warnings.len(), 2);
}

/// Regression test: a worker without disks ignored these keys silently.
#[test]
fn keys_of_disks_are_warnings_without_disks() {
    let text = "store_type = \"MEMORY_OBJECT\"\n[object_store]\nurl = \"s3://shuffle/x\"\nendpoint = \"http://store:1\"\n\
                credentials = \"none\"\n[localfile_store]\n\
                data_paths = [\"/d\"]\nrecovery = false\nsync = \"group\"\nrequire_mounted = true";
    let warnings = parse(text).unwrap().warnings;
    for key in ["data_paths", "recovery", "sync", "require_mounted"] {
        let warning = format!("localfile_store.{key} has no effect with store_type MEMORY_OBJECT");
        assert!(warnings.contains(&warning), "{warnings:?}");
    }
}

#[test]
fn removed_key_is_refused_with_release_and_reason() {
    for removed in schema().removed {
        let (table, name) = removed.path.rsplit_once('.').unwrap();
        let problem = only_problem(&format!("[{table}]\n{name} = 1"));
        let expected = format!("{} = 1: removed in {}: {}", removed.path, removed.release, removed.reason);
        assert_eq!(problem, expected);
    }
}

#[test]
fn environment_is_read_from_the_map() {
    let load = |pairs: &[(&str, &str)]| Config::load(None, &env(pairs), &machine());
    let config = load(&[("WORKER_IP", "10.1.2.3"), ("RUST_LOG", "debug"), ("LOG", "warn")]).unwrap();
    assert_eq!(config.worker.advertised, Some("10.1.2.3".parse().unwrap()));
    assert_eq!(config.log.filter, "debug");
    assert_eq!(load(&[("LOG", "warn")]).unwrap().log.filter, "warn");
    for bad in [("WORKER_IP", "my_host"), ("WORKER_IP", "0.0.0.0"), ("RUST_LOG", "a=b=c=notalevel")] {
        let error = load(&[bad]).unwrap_err().to_string();
        assert!(error.contains(bad.0) && error.contains(bad.1), "{error}");
    }
}

#[test]
fn command_line_file_precedes_the_environment() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let first = write("first.toml", "grpc_port = 1");
    let second = write("second.toml", "grpc_port = 2");
    let variables = env(&[("WORKER_CONFIG_PATH", second.to_str().unwrap())]);
    let config = Config::load(Some(&first), &variables, &machine()).unwrap();
    assert_eq!((config.worker.grpc_port, config.source), (1, Some(first)));
    assert_eq!(Config::load(None, &variables, &machine()).unwrap().worker.grpc_port, 2);

    let missing = directory.path().join("missing.toml");
    let error = Config::load(Some(&missing), &HashMap::new(), &machine()).unwrap_err().to_string();
    assert!(error.contains("missing.toml"), "{error}");
    let broken = write("broken.toml", "a = = 1");
    let error = Config::load(Some(&broken), &HashMap::new(), &machine()).unwrap_err().to_string();
    assert!(error.contains("broken.toml") && error.contains("line 1"), "{error}");
    let huge = write("huge.toml", &"#".repeat(usize::try_from(FILE_BYTES_MAX).unwrap() + 1));
    assert!(matches!(
        Config::load(Some(&huge), &HashMap::new(), &machine()),
        Err(ConfigError::Unreadable { .. })
    ));
}

#[test]
fn invalid_values_are_reported_and_never_panic() {
    let values = [
        "-1",
        "0",
        "1.5",
        "nan",
        "inf",
        "9223372036854775807",
        "true",
        "\"\"",
        "\"x\"",
        "\"\\u0000\"",
        "[]",
        "[1]",
        "[\"\"]",
        "{}",
        "{ a = 1 }",
        "{ a = [] }",
        "1979-05-27",
    ];
    for key in schema().keys.iter().filter(|key| !key.path.is_empty()) {
        let mut refused = 0;
        for value in values {
            match parse(&format!("{} = {value}", key.path)) {
                Ok(config) => assert_eq!(parse(&config.to_toml()).unwrap().to_toml(), config.to_toml()),
                Err(error) => {
                    refused += 1;
                    assert!(
                        error.to_string().contains(key.path),
                        "the error does not name key {} = {value}: {error}",
                        key.path
                    );
                }
            }
        }
        assert!(refused > 0, "key {} accepts every value", key.path);
    }
}

#[test]
fn largest_capacity_prints_and_parses() {
    let config = parse("[memory_store]\ncapacity = \"16TiB\"").unwrap();
    assert_eq!(parse(&config.to_toml()).unwrap(), config);
}
