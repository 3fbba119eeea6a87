//! Tests of the configuration as a whole; single values are tested in `reader`, names in `keys`.

use super::keys::{KEYS, Standing};
use super::*;

const EXAMPLE: &str = include_str!("../../config.toml.example");

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

fn env(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The example with its commented-out settings (`# key = …`, no blank line before the sign) switched on.
fn example_with_everything() -> String {
    let uncommented = EXAMPLE.lines().map(|line| match line.strip_prefix("#: ") {
        Some(setting) => setting.to_owned(),
        None => line.to_owned(),
    });
    uncommented.map(|line| line + "\n").collect()
}

#[test]
fn defaults_are_an_embedded_worker_with_one_disk() {
    let config = parse("").unwrap();
    assert!(config.is_embedded());
    assert_eq!(config.store_type, StoreType::MemoryLocalfile);
    assert_eq!((config.grpc_port, config.http_port, config.urpc_port), (21100, 19998, Some(21200)));
    assert_eq!(config.memory.capacity_bytes, 4 << 30);
    assert_eq!(config.localfile.data_paths, [PathBuf::from("/state/data")]);
    assert_eq!(config.runtime.worker_threads, 4);
    assert_eq!(config.log.filter, "info");
}

#[test]
fn the_tcp_listener_is_open_by_default_in_embedded_mode_only() {
    assert_eq!(parse("grpc_port = 0").unwrap().urpc_port, Some(0));
    let quorum = "coordinator_quorum = [\"c:1\"]\n[localfile_store]\ndata_paths = [\"/d\"]";
    assert_eq!(parse(quorum).unwrap().urpc_port, None);
    assert_eq!(parse("urpc_port = 7").unwrap().urpc_port, Some(7));
}

#[test]
fn the_example_equals_the_defaults() {
    assert_eq!(parse(EXAMPLE).unwrap(), parse("").unwrap());
}

#[test]
fn the_example_names_every_key_and_only_valid_values() {
    let text = example_with_everything();
    let sorted = keys::sort_keys(text.parse().unwrap());
    assert!(sorted.problems.is_empty(), "{:?}", sorted.problems);
    let supported = KEYS.iter().filter(|key| key.standing == Standing::Supported);
    for key in supported {
        assert!(sorted.values.contains_key(key.path), "{} is not in the example", key.path);
    }
    parse(&text).unwrap();
}

#[test]
fn the_printed_configuration_parses_back() {
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
    let printed = keys::sort_keys(everything.to_toml().parse().unwrap());
    let supported = KEYS.iter().filter(|key| key.standing == Standing::Supported).count();
    assert_eq!(printed.values.len(), supported, "a key is missing in print.rs");
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
        "store_type = \"MEMORY_S3\": MEMORY, MEMORY_LOCALFILE,",
        "grpc_port = 70000: a port",
        "gprc_port = 1: unknown key, did you mean grpc_port?",
        "coordinator_quorum = [\"nohost\"]: entries of the form host:port",
        "tags = [\"a,b\"]: tags of 1 to 100",
        "memory_store.capacity = \"1K\": a size from 16MiB",
        "localfile_store.data_paths = [\"relative\"]: absolute paths",
        "localfile_store.disk_low_watermark = 0.9: less than",
        "hdfs_store.max_concurrency = 0: ",
        "hdfs_store.allowed_paths = [\"/uniffle\"]: paths such as",
        "hdfs_store.kerberos_security_config.principal = \"uniffle\": a Kerberos principal",
        "metrics.push_interval_sec = 0: a duration from 1s to 1h",
        "[nonsense]: unknown table",
    ] {
        assert!(found.iter().any(|problem| problem.starts_with(part)), "{part} in {found:#?}");
    }
    assert_eq!(found.len(), 13, "{found:#?}");
    let shown = parse(text).unwrap_err().to_string();
    assert!(shown.contains("13 problems") && shown.lines().count() == 14, "{shown}");
}

#[test]
fn keys_are_checked_against_each_other() {
    let cases = [
        ("grpc_port = 5\nhttp_port = 5", "http_port = 5: a port other than that of grpc_port"),
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
        ("coordinator_quorum = [\"a:1\"]", "needed with a coordinator_quorum"),
    ];
    for (text, part) in cases {
        let found = problems(text);
        assert!(found.len() == 1 && found[0].contains(part), "{part} in {found:?}");
    }
}

#[test]
fn coordinators_are_host_and_port() {
    let config = parse("store_type = \"memory\"\ncoordinator_quorum = \"a-1.b:21000, [::1]:5\"").unwrap();
    let shown: Vec<String> = config.coordinator_quorum.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["a-1.b:21000", "[::1]:5"]);
    for bad in ["a", "a:", ":1", "a:0", "a:65536", "a b:1", "::1:5", "http://a:1", "[x]:1"] {
        assert_eq!(
            problems(&format!("store_type = \"MEMORY\"\ncoordinator_quorum = [\"{bad}\"]")).len(),
            1,
            "{bad}"
        );
    }
}

#[test]
fn aliases_of_older_servers_are_read() {
    let text = "[metrics]\nhttp_port = 7\n[localfile_store]\nmin_number_of_available_disks = 1";
    let config = parse(text).unwrap();
    assert_eq!((config.http_port, config.localfile.healthy_check_min_disks), (7, 1));
}

#[test]
fn what_has_no_effect_is_a_warning() {
    let text = "store_type = \"MEMORY\"\ncoordinator_quorum = [\"a:1\"]\n\
                [embedded_coordinator]\nremote_storage_path = \"hdfs://x/y\"\n[runtime_config]\nread_thread_num = 9";
    assert_eq!(parse(text).unwrap().warnings.len(), 2);
}

#[test]
fn the_environment_is_read_from_the_map() {
    let load = |pairs: &[(&str, &str)]| Config::load(None, &env(pairs), &machine());
    let config = load(&[("WORKER_IP", "10.1.2.3"), ("RUST_LOG", "debug"), ("LOG", "warn")]).unwrap();
    assert_eq!(config.advertised_ip, Some("10.1.2.3".parse().unwrap()));
    assert_eq!(config.log.filter, "debug");
    assert_eq!(load(&[("LOG", "warn")]).unwrap().log.filter, "warn");
    for bad in [("WORKER_IP", "myhost"), ("WORKER_IP", "0.0.0.0"), ("RUST_LOG", "a=b=c=notalevel")] {
        let error = load(&[bad]).unwrap_err().to_string();
        assert!(error.contains(bad.0) && error.contains(bad.1), "{error}");
    }
}

#[test]
fn the_file_is_the_one_of_the_command_line_then_of_the_environment() {
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
    assert_eq!((config.grpc_port, config.source), (1, Some(first)));
    assert_eq!(Config::load(None, &variables, &machine()).unwrap().grpc_port, 2);

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
fn no_value_of_any_key_is_taken_silently_or_panics() {
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
    for key in KEYS {
        let mut refused = 0;
        for value in values {
            match parse(&format!("{} = {value}", key.path)) {
                Ok(config) => assert_eq!(parse(&config.to_toml()).unwrap().to_toml(), config.to_toml()),
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains(key.path), "{} = {value}: {error}", key.path);
                }
            }
        }
        assert!(refused > 0 || key.standing == Standing::NoEffect, "{} takes everything", key.path);
    }
}

#[test]
fn the_largest_capacity_prints_and_parses() {
    let config = parse("[memory_store]\ncapacity = \"16TiB\"").unwrap();
    assert_eq!(parse(&config.to_toml()).unwrap(), config);
}
