//! Configuration reload by an admin call, by SIGHUP and by the file watcher.
//!
//! Changed keys are applied, and keys that need a restart are only reported. An invalid file is
//! refused as a whole, with all its errors, and the old configuration remains. So is a torn one,
//! unless it is a complete configuration.

use std::io::Write as _;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::json;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::fixture::{AdminFixture, eventually};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const NEW: &str = "[hybrid_store]\nmemory_spill_high_watermark = 0.5\nmemory_spill_low_watermark = 0.1\n\
    [app_config]\napp_heartbeat_timeout_min = \"77s\"\npartition_limit_threshold = \"2MiB\"\n\
    [log]\nfilter = \"info\"\nmax_files = 3\n";

#[tokio::test]
async fn reload_applies_keys_and_reports_restart_keys() {
    let fixture = AdminFixture::with_file("tags = [\"old\"]", "").await;
    let service = fixture.worker.service();
    fixture.rewrite("tags = [\"new\"]\nurpc_port = 1", NEW);
    let (status, answer) = fixture.call("/admin/reload", "").await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let expected = json!({
        "changed": [
            "app_config.app_heartbeat_timeout_min", "app_config.partition_limit_threshold",
            "hybrid_store.memory_spill_high_watermark", "hybrid_store.memory_spill_low_watermark", "tags",
        ],
        "waiting_for_restart": ["log.max_files", "urpc_port"],
    });
    assert_eq!(answer, expected);
    let limits = service.flusher().unwrap().limits();
    assert_eq!(
        (limits.high_watermark, limits.low_watermark, limits.huge_partition_bytes),
        (0.5, 0.1, 2 << 20)
    );
    assert_eq!(service.ingest.partition_limits().huge_bytes, Some(2 << 20));
    let key = ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    assert_eq!(service.apps().find(&key.app).unwrap().activity.timeout(), Duration::from_secs(77));

    // Keys that need a restart are reported again. An operator's setting persists until the file's
    // value changes.
    fixture.call("/admin/tags", r#"{"tags": ["mine"]}"#).await;
    let (_, answer) = fixture.call("/admin/reload", "").await;
    assert_eq!(answer, json!({ "changed": [], "waiting_for_restart": ["log.max_files", "urpc_port"] }));
    let tags = || async {
        let url = format!("http://{}/api/v1/node", fixture.worker.addresses().http);
        let text = reqwest::get(url).await.unwrap().text().await.unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["tags"].clone()
    };
    assert_eq!(tags().await, json!(["mine"]));
    fixture.rewrite("tags = [\"newer\"]", "");
    fixture.call("/admin/reload", "").await;
    assert_eq!(tags().await, json!(["newer"]));
    // The file watcher may have reloaded as well.
    assert!(fixture.metric("config_reloads_total", "ok") >= 3.0);
    fixture.finish().await;
}

#[tokio::test]
async fn reloaded_quotas_are_applied_and_shown() {
    let fixture = AdminFixture::with_file("", "").await;
    let key = fixture.push("app-1", 4).await;
    fixture.rewrite("", "[quota]\napp_partitions = 3");
    let (_, answer) = fixture.call("/admin/reload", "").await;
    assert_eq!(answer["changed"], json!(["quota.app_partitions"]));
    let more = ShuffleKey::new(key.app.clone(), ShuffleId(2));
    let refused = fixture.client.register(&more, &[(0, 0)]).await.unwrap_err().to_string();
    assert!(refused.contains("quota.app_partitions is 3: 4 in use, 1 more requested"), "{refused}");
    let get = async |path: &str| {
        let url = format!("http://{}/{path}", fixture.worker.addresses().http);
        reqwest::get(url).await.unwrap().text().await.unwrap()
    };
    let metrics = get("metrics").await;
    for (name, value) in [("quota_used", 4), ("quota_max", 3), ("quota_refused_total", 1)] {
        let line = format!("{name}{{quota=\"quota.app_partitions\"}} {value}");
        assert!(metrics.lines().any(|it| it == line), "line {line} is missing: {metrics}");
    }
    let of = |text: String| serde_json::from_str::<serde_json::Value>(&text).unwrap()["quotas"][0].clone();
    let mut expected =
        json!({ "quota": "quota.app_partitions", "max": 3, "used": 4, "by": "app-1", "refused": 1 });
    assert_eq!(of(get("api/v1/status").await), expected);
    expected["by"] = serde_json::Value::Null;
    assert_eq!(of(get("api/v1/apps/app-1/explain").await), expected);
    fixture.rewrite("", "");
    fixture.call("/admin/reload", "").await;
    fixture.client.register(&more, &[(0, 99)]).await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn invalid_file_is_refused_with_all_errors() {
    let fixture = AdminFixture::with_file("tags = [\"old\"]", "").await;
    let before = fixture.worker.service().flusher().unwrap().limits();
    fixture.rewrite("tags = [\"new\"]", NEW);
    let whole = fixture.written();
    // A prefix of a file is refused, unless it is a complete configuration.
    let torn: Vec<String> = (1..whole.len()).step_by(17).map(|end| whole[..end].to_owned()).collect();
    let wrong =
        "tags = [\"new\"]\n[hybrid_store]\nmemory_spill_high_watermark = 7.0\n[memory_store]\ncapasity = 1\n";
    fixture.write(wrong);
    let (status, answer) = fixture.call("/admin/reload", "").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let reasons = answer["error"].as_str().unwrap();
    assert!(reasons.contains("memory_spill_high_watermark") && reasons.contains("capasity"), "{reasons}");
    // Valid in itself, but this timeout cannot change while the worker runs.
    fixture.rewrite("", "[embedded_coordinator]\nnode_timeout_sec = 600");
    let text =
        fixture.written().replace("heartbeat_interval_seconds = 1", "heartbeat_interval_seconds = 300");
    fixture.write(&text);
    let (status, answer) = fixture.call("/admin/reload", "").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    let reasons = answer["error"].as_str().unwrap();
    assert!(reasons.contains("need a restart") && reasons.contains("node_timeout_sec"), "{reasons}");
    let mut refused = 2;
    for text in torn {
        fixture.write(&text);
        let (status, answer) = fixture.call("/admin/reload", "").await;
        if status == StatusCode::BAD_REQUEST {
            refused += 1;
            continue;
        }
        // The missing tail was optional, so the prefix is a complete configuration.
        assert_eq!(status, StatusCode::OK, "{answer}");
    }
    assert!(refused > 10, "only {refused} torn files were refused");
    assert!(fixture.metric("config_reloads_total", "refused") >= f64::from(refused));
    fixture.rewrite("tags = [\"old\"]", "");
    let (status, _) = fixture.call("/admin/reload", "").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(fixture.worker.service().flusher().unwrap().limits(), before);
    fixture.finish().await;
}

/// A reload changes the heartbeat interval of a running worker.
#[tokio::test]
async fn reloaded_heartbeat_interval_is_applied() {
    let coordinator = AdminFixture::start().await;
    let quorum = format!("coordinator_quorum = [\"{}\"]", coordinator.worker.addresses().grpc);
    let fixture = AdminFixture::with_file(&quorum, "").await;
    let beats = || fixture.metric("coordinator_heartbeats_total", "ok");
    eventually("the first heartbeat", || if beats() > 0.0 { Ok(()) } else { Err(String::new()) }).await;
    let text =
        fixture.written().replace("heartbeat_interval_seconds = 1", "heartbeat_interval_seconds = \"100ms\"");
    fixture.write(&text);
    fixture.call("/admin/reload", "").await;
    let before = beats();
    eventually("twenty more", || if beats() > before + 20.0 { Ok(()) } else { Err(format!("{}", beats())) })
        .await;
    fixture.finish().await;
    coordinator.finish().await;
}

/// In a process, triggered as init systems and configuration management do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signal_and_file_change_both_reload() {
    // The environment overrides the log filter of the file, so the variable must be empty.
    let env = vec![("RUST_LOG", String::new())];
    let setup = Setup { name: "reloaded", capacity: "32M", env, ..Setup::default() };
    let worker = tokio::task::spawn_blocking(move || WorkerProcess::start(&setup)).await.unwrap();
    let worker = tokio::task::spawn_blocking(move || {
        let path = worker.dir().join("config.toml");
        let text = std::fs::read_to_string(&path).unwrap();
        let wait_for_log = |what: &str, parts: &[&str]| {
            wait_until(what, Duration::from_secs(20), || {
                let log = worker.log();
                let there = log.lines().any(|line| parts.iter().all(|part| line.contains(part)));
                there.then_some(()).ok_or_else(|| format!("{parts:?} is not in {log}"))
            });
        };
        // Only the file watcher. It does not read the first half, because the file changes again at
        // once.
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        std::fs::write(&path, format!("tags = [\"by-file\"]\n{text}\n[log]\nfilter = \"debug\"")).unwrap();
        wait_for_log(
            "the configuration file is loaded again",
            &["trigger=\"file\"", "result=\"ok\"", "tags", "log.filter"],
        );
        let mut stranger = std::net::TcpStream::connect(("127.0.0.1", worker.ready().http_port)).unwrap();
        stranger.write_all(b"nonsense\r\n\r\n").unwrap();
        wait_for_log("debug lines are logged", &["DEBUG", "http connection"]);
        // By signal, with an invalid file.
        std::fs::write(&path, format!("tags = [\"a,b\"]\nnonsense = 1\n{text}")).unwrap();
        let pid = rustix::process::Pid::from_raw(i32::try_from(worker.ready().pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
        wait_for_log(
            "the signal triggers a reload",
            &["trigger=\"signal\"", "result=\"refused\"", "the old configuration remains"],
        );
        assert!(worker.log().contains("nonsense"));
        assert!(worker.page("/api/v1/node").unwrap().contains("by-file"));
        worker
    })
    .await
    .unwrap();
    tokio::task::spawn_blocking(move || worker.stop()).await.unwrap();
}
