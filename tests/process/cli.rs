//! Command line of the real binary: output and exit codes.

use std::process::{Command, Output};
use std::time::Duration;

use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uniffle_worker::proto::shuffle_server_internal_client::ShuffleServerInternalClient;
use uniffle_worker::proto::{DecommissionRequest, StatusCode};

fn worker(arguments: &[&str], config: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(&path, config).expect("cannot write the configuration");
    Command::new(env!("CARGO_BIN_EXE_uniffle-worker"))
        .args(arguments)
        .arg("-c")
        .arg(&path)
        .env_remove("WORKER_CONFIG_PATH")
        .env("XDG_STATE_HOME", dir.path())
        .output()
        .expect("cannot start the binary")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn check_accepts_valid_configuration() {
    let output = worker(&["--check"], "grpc_port = 0\nhttp_port = 0\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("is valid"), "{}", text(&output.stdout));
}

#[test]
fn check_reports_all_errors_at_once() {
    let config = "grcp_port = 1\ncapacity = \"1G\"\n[memory_store]\ncapacity = \"tiny\"\n\
                  [hybrid_store]\nmemory_spill_high_watermark = 0.1\nmemory_spill_low_watermark = 0.5\n";
    for arguments in [&["--check"][..], &[]] {
        let output = worker(arguments, config);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        for part in ["grpc_port", "memory_store", "tiny", "memory_spill_low_watermark"] {
            assert!(stderr.contains(part), "{part} is missing: {stderr}");
        }
    }
}

#[test]
fn printed_configuration_is_valid() {
    let first = worker(&["--print-config"], "grpc_port = 1234\n");
    assert!(first.status.success());
    let printed = text(&first.stdout);
    assert!(printed.contains("grpc_port = 1234"), "{printed}");
    let second = worker(&["--print-config"], &printed);
    assert_eq!(text(&second.stdout), printed);
}

#[test]
fn hdfs_without_feature_is_refused_with_reason() {
    for store_type in ["MEMORY_HDFS", "MEMORY_LOCALFILE_HDFS"] {
        let output = worker(&["--check"], &format!("store_type = \"{store_type}\"\n"));
        let stderr = text(&output.stderr);
        assert_eq!(output.status.success(), cfg!(feature = "hdfs"), "{stderr}");
        let is_explained = stderr.contains("store_type") && stderr.contains("this build has no HDFS");
        assert_eq!(is_explained, cfg!(not(feature = "hdfs")), "{stderr}");
    }
}

#[test]
fn start_errors_name_the_key_and_change_nothing() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = worker(&[], &format!("bind_address = \"127.0.0.1\"\ngrpc_port = {port}\nhttp_port = 0\n"));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains(&format!("grpc_port = 127.0.0.1:{port}")),
        "{}",
        text(&output.stderr)
    );

    let foreign = tempfile::tempdir().unwrap();
    std::fs::write(foreign.path().join("thesis.doc"), "precious").unwrap();
    let config =
        format!("grpc_port = 0\nhttp_port = 0\n[localfile_store]\ndata_paths = [{:?}]\n", foreign.path());
    let output = worker(&[], &config);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("data_paths"), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(foreign.path().join("thesis.doc")).unwrap(), "precious");
}

/// Returns stdout of `--check --here`, or stderr if it refuses.
fn examined(config: &str) -> Result<String, String> {
    let output = worker(&["--check", "--here"], config);
    match output.status.code() {
        Some(0) => Ok(text(&output.stdout)),
        code => {
            assert_eq!(code, Some(2), "{}", text(&output.stderr));
            Err(text(&output.stderr))
        }
    }
}

fn with_paths(top: &str, paths: &[&std::path::Path]) -> String {
    format!("bind_address = \"127.0.0.1\"\n{top}\n[localfile_store]\ndata_paths = {paths:?}\n")
}

#[test]
fn check_here_leaves_the_machine_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let (empty, missing) = (dir.path().join("empty"), dir.path().join("a/b/missing"));
    std::fs::create_dir(&empty).unwrap();
    let config = with_paths("grpc_port = 0\nhttp_port = 0\nurpc_port = 0", &[&empty, &missing]);
    let listing = examined(&config).expect("the check failed");
    for part in ["ports are free", "2 data directories are usable", "advertised address is 127.0.0.1"] {
        assert!(listing.contains(part), "{part} is missing: {listing}");
    }
    assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(worker(&["--here"], &config).status.code(), Some(2), "--here must require --check");
}

#[test]
fn check_here_refuses_ports_with_their_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let dir = tempfile::tempdir().unwrap();
    for (key, others) in [
        ("grpc_port", "http_port = 0"),
        ("http_port", "grpc_port = 0"),
        ("urpc_port", "grpc_port = 0\nhttp_port = 0"),
    ] {
        let config = with_paths(&format!("{key} = {port}\n{others}"), &[&dir.path().join("d")]);
        let listing = examined(&config).expect_err("a port in use was accepted");
        for part in [&format!("{key} = 127.0.0.1:{port}"), "must be a free port", "ss -ltnp"] {
            assert!(listing.contains(part), "{part} is missing: {listing}");
        }
    }
    let config = with_paths("grpc_port = 0\nhttp_port = 0", &[&dir.path().join("d")]);
    let listing = examined(&config.replace("127.0.0.1", "192.0.2.1"))
        .expect_err("the address of another machine was accepted");
    assert!(listing.contains("bind_address must be an address of this machine"), "{listing}");
}

#[test]
fn check_here_refuses_unusable_directories() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("foreign")).unwrap();
    std::fs::write(path("foreign/thesis.doc"), "precious").unwrap();
    std::fs::write(path("file"), "x").unwrap();
    let ports = "grpc_port = 0\nhttp_port = 0";
    for (unusable, why) in [
        (path("foreign"), "content of another program"),
        (path("file"), "must be a directory"),
        (path("file/below"), "must be a directory"),
        ("/proc/uniffle".into(), "must be a directory"),
    ] {
        let listing = examined(&with_paths(ports, &[&path("good"), &unusable]))
            .expect_err("an unusable directory was accepted");
        let named = format!("localfile_store.data_paths: {}", unusable.display());
        assert!(listing.contains(&named) && listing.contains(why), "{listing}");
        assert!(!listing.contains("/good"), "{listing}");
    }
    assert!(!path("good").exists());

    // A directory that a running worker has claimed.
    let running = WorkerProcess::start(&Setup { name: "check-here", capacity: "64M", ..Setup::default() });
    let used = running.data_paths()[0].clone();
    let listing = examined(&with_paths(ports, &[&used])).expect_err("a directory in use was accepted");
    assert!(
        listing.contains("in use by another process") && listing.contains(&used.display().to_string()),
        "{listing}"
    );
    running.assert_no_error_logged();
}

#[test]
fn check_here_lists_the_problems_of_all_kinds() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("foreign")).unwrap();
    for name in ["foreign/thesis.doc", "file"] {
        std::fs::write(path(name), "precious").unwrap();
    }
    let top = format!("grpc_port = 0\nhttp_port = {port}");
    let config = with_paths(&top, &[&path("foreign"), &path("file")])
        + &format!("[tls]\ncert_file = {0:?}\nkey_file = {0:?}\nca_file = {0:?}\n", path("missing.pem"))
        + &format!("listeners = [\"http\"]\n[admin]\nport = 0\ntoken_file = {:?}\n", path("token"))
        + &format!("[log]\npath = {:?}\n[memory_store]\ncapacity = \"15TiB\"\n", path("file/logs"));
    let listing = examined(&config).expect_err("a worker that cannot start was accepted");
    for part in [
        "memory_store.capacity: blocks may use 15.0 TiB",
        &format!("http_port = 127.0.0.1:{port}"),
        &format!("localfile_store.data_paths: {}", path("foreign").display()),
        &format!("localfile_store.data_paths: {}", path("file").display()),
        "tls.cert_file = ",
        "tls.key_file = ",
        "tls.ca_file = ",
        "admin.token_file = ",
        "log.path = ",
    ] {
        assert_eq!(listing.matches(part).count(), 1, "expected {part} once: {listing}");
    }
    let listing = text(&worker(&["--check"], &config).stderr);
    for (part, count) in [("15.0 TiB", 1), ("tls.ca_file", 1), ("admin.token_file", 1), ("http_port", 0)] {
        assert_eq!(listing.matches(part).count(), count, "expected {part} {count} times: {listing}");
    }
}

#[test]
fn keys_of_other_servers_point_to_import() {
    for foreign in [
        "rss.rpc.server.port 19999\nrss.storage.basePath /data1\n",
        "rss.rpc.server.port = 19999\n",
        "[rss.server]\nmerge = 1\n",
        "[zookeeper_discovery]\naddress = \"z:1\"\n",
    ] {
        let output = worker(&["--check"], foreign);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("`uniffle-worker import FILE`"), "{stderr}");
    }
    let typo = worker(&["--check"], "grcp_port = 1\n");
    assert!(!text(&typo.stderr).contains("import"), "{}", text(&typo.stderr));
}

#[test]
fn outdated_directory_is_refused_unchanged() {
    let old = tempfile::tempdir().unwrap();
    let claim = "uniffle-worker local store 1\n00000000-0000-0000-0000-000000000007\n";
    let files = [("uniffle-worker.claim", claim), ("uniffle-worker.peers", "era 0\n")];
    for (name, content) in files {
        std::fs::write(old.path().join(name), content).unwrap();
    }
    let config =
        format!("grpc_port = 0\nhttp_port = 0\n[localfile_store]\ndata_paths = [{:?}]\n", old.path());
    let output = worker(&[], &config);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let refusal = format!("{}: directory was written by version 0.1.0", old.path().display());
    assert!(stderr.contains(&refusal) && stderr.contains("start with an empty directory"), "{stderr}");
    assert_eq!(std::fs::read_dir(old.path()).unwrap().count(), files.len());
    for (name, content) in files {
        assert_eq!(std::fs::read_to_string(old.path().join(name)).unwrap(), content);
    }
}

#[test]
fn version_contains_the_commit() {
    let output = Command::new(env!("CARGO_BIN_EXE_uniffle-worker"))
        .arg("--version")
        .output()
        .expect("cannot start the binary");
    let git = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    // A source archive has no commit unless the build was given one.
    let commit = match (option_env!("WORKER_GIT_COMMIT"), git) {
        (Some(given), _) => given.chars().take(12).collect(),
        (None, Ok(git)) if git.status.success() => text(&git.stdout),
        _ => "unknown".to_owned(),
    };
    let expected = format!("uniffle-worker {} ({})", env!("CARGO_PKG_VERSION"), commit.trim());
    assert_eq!(text(&output.stdout).trim(), expected);
}

#[test]
fn start_logs_program_and_configuration_in_one_line() {
    let worker = WorkerProcess::start(&Setup { name: "start-line", capacity: "64M", ..Setup::default() });
    let log = worker.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(" starting version=")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    let (version, path) = (env!("CARGO_PKG_VERSION"), worker.data_paths()[0].display().to_string());
    let id = format!("id=\"127.0.0.1-{}", worker.ready().grpc_port);
    let version = format!("version=\"{version}\" commit=\"");
    for part in [&version, "config=", "config.toml", &id, "store_type=", "capacity=\"61.0 MiB\"", &path] {
        assert!(lines[0].contains(part), "{part} is missing: {}", lines[0]);
    }
    assert!(!log.contains("Some(") && !log.contains("None"), "{log}");
    let builds = worker.metrics().total_of("uniffle_worker_build_info", "commit=\"");
    assert_eq!(builds, Some(1.0));
    worker.stop();
}

#[test]
fn decommissioned_worker_exits_after_last_app() {
    let top = "decommission_shutdown = true\ndecommission_check_interval_sec = 1";
    let made_tables = "[admin]\ngrpc_decommission = \"loopback\"".to_owned();
    let worker = WorkerProcess::start(&Setup { name: "retiring", top, made_tables, ..Setup::default() });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let port = worker.ready().grpc_port;
    let client = runtime.block_on(async {
        let client = ShuffleClient::connect(([127, 0, 0, 1], port).into()).await.unwrap();
        let key = ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(1));
        client.register(&key, &[(0, 0)]).await.unwrap();
        let address = format!("http://127.0.0.1:{port}");
        let mut internal = ShuffleServerInternalClient::connect(address).await.unwrap();
        let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        client
    });
    wait_until("a check found the application", Duration::from_secs(20), || {
        let log = worker.log();
        if log.contains("waiting for applications to end") { Ok(()) } else { Err(log) }
    });
    runtime.block_on(client.unregister_app("app-1")).unwrap();
    drop(client);
    // Ends the runtime and its connections.
    drop(runtime);
    worker.assert_no_error_logged();
    worker.ends("once it is decommissioned");
}

#[test]
fn imported_configuration_is_valid() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let import = |path: &std::path::Path| {
        let output = Command::new(env!("CARGO_BIN_EXE_uniffle-worker")).arg("import").arg(path).output();
        output.expect("cannot start the binary")
    };
    let java = "rss.storage.type MEMORY_LOCALFILE\nrss.coordinator.quorum c:1\nrss.storage.basePath /data1\n\
                rss.server.buffer.capacity 1g\nrss.server.merge.enable true\n";
    let without_memory = |store_type| {
        let quorum = "rss.coordinator.quorum c:1\nrss.storage.basePath /data1";
        format!("rss.storage.type {store_type}\n{quorum}\n")
    };
    for (name, text) in [
        ("server.conf", java),
        ("server.conf", without_memory("LOCALFILE").as_str()),
        #[cfg(feature = "hdfs")]
        ("server.conf", without_memory("LOCALFILE_HDFS").as_str()),
        #[cfg(feature = "hdfs")]
        ("server.conf", without_memory("HDFS").as_str()),
        ("riffle.toml", "grpc_port = 7\n[health_service_config]\nalive_app_number_max_limit = 1\n"),
    ] {
        let output = import(&write(name, text));
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text_of(&output));
        let checked = worker(&["--check"], &text_of(&output));
        assert!(checked.status.success(), "{}{}", text_of(&output), String::from_utf8_lossy(&checked.stderr));
    }
    let secret =
        "store_type = \"MEMORY\"\n[embedded_coordinator]\nclient_conf = { \"my.password\" = \"hush\" }\n";
    let secret = import(&write("riffle.toml", secret));
    assert!(secret.status.success() && text_of(&secret).contains("hush"), "{}", text_of(&secret));
    let warning = text(&secret.stderr);
    assert!(
        warning.contains("secrets are in the output, under embedded_coordinator.client_conf"),
        "{warning}"
    );
    assert!(!warning.contains("hush"), "{warning}");
    let incomplete = import(&write("server.conf", "rss.coordinator.quorum c:1"));
    assert_eq!(incomplete.status.code(), Some(2));
    assert!(text(&incomplete.stderr).contains("localfile_store.data_paths"), "{}", text(&incomplete.stderr));
    assert_eq!(import(&dir.path().join("nowhere")).status.code(), Some(2));
    let refused = import(&write("server.conf", "rss.storage.type S3\nrss.server.buffer.capacity 40xx\n"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(text_of(&refused).contains("# store_type"), "{}", text_of(&refused));
    for part in ["store_type", "rss.server.buffer.capacity 40xx: must be a size"] {
        assert!(text(&refused.stderr).contains(part), "{part} is missing: {}", text(&refused.stderr));
    }
    assert_eq!(import(&write("server.conf", "")).status.code(), Some(2));
}

fn text_of(output: &Output) -> String {
    text(&output.stdout)
}
