//! The admin listener: the effect of each call, who may call, and the audit log of calls.

use reqwest::{Method, StatusCode};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_wire::types::PartitionId;
use uniffle_worker::proto::shuffle_server_internal_client::ShuffleServerInternalClient;
use uniffle_worker::proto::{
    CancelDecommissionRequest, DecommissionRequest, GetShuffleServerRequest, StatusCode as Code,
};
use uniffle_worker::service::WorkerState;
use uniffle_worker::store::LocalStore;

use super::api::WAIT_MAX;
use super::fixture::{AdminFixture, eventually};
use uniffle_testkit::s3::S3Server;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const TOKEN: &str = "correct-horse-battery-staple";

/// Every call, with a valid body.
const CALLS: &[(&str, &str)] = &[
    ("/admin/decommission", ""),
    ("/admin/cancel-decommission", ""),
    ("/admin/tags", r#"{"tags": ["stolen"]}"#),
    ("/admin/drain", ""),
    ("/admin/flush", ""),
    ("/admin/apps/app-1/purge", ""),
    ("/admin/coordinator/forget", r#"{"id": "w-1"}"#),
    ("/admin/log-level", r#"{"filter": "off"}"#),
    ("/admin/reload", ""),
    ("/admin/orphans", ""),
    ("/admin/orphans/remove", r#"{"worker": "w-1"}"#),
    ("/admin/heap-profile/activate", ""),
    ("/admin/heap-profile/deactivate", ""),
];

#[tokio::test]
async fn decommission_can_be_cancelled() {
    let fixture = AdminFixture::start().await;
    let state = || fixture.worker.service().status().state();
    let (status, answer) = fixture.call("/admin/decommission", "").await;
    // Decommissioned once the worker has noticed that no application is left.
    assert!(answer["state"].as_str().unwrap().starts_with("decommission"), "{answer}");
    assert_eq!((status, &answer["apps"]), (StatusCode::OK, &json!(0)));
    assert!(matches!(state(), WorkerState::Decommissioning | WorkerState::Decommissioned));
    let (status, answer) = fixture.call("/admin/cancel-decommission", "").await;
    assert_eq!((status, answer["state"].as_str()), (StatusCode::OK, Some("active")));
    assert_eq!(state(), WorkerState::Active);
    fixture.worker.service().status().set_unhealthy(true);
    for call in ["/admin/decommission", "/admin/drain"] {
        let (status, answer) = fixture.call(call, "").await;
        assert_eq!(status, StatusCode::OK, "{call} of an unhealthy worker: {answer}");
        let state = answer["state"].as_str().unwrap();
        assert!(state.starts_with("decommission"), "{answer}");
        let (_, answer) = fixture.call("/admin/cancel-decommission", "").await;
        assert_eq!(answer["state"], "unhealthy");
    }
    fixture.finish().await;
}

#[tokio::test]
async fn lost_node_is_removed_from_the_list_on_request() {
    let fixture = AdminFixture::with("[embedded_coordinator]\nnode_timeout_sec = 2").await;
    fixture.heartbeat_once("w-1").await;
    let lost = async || {
        let http = fixture.worker.addresses().http;
        let view = reqwest::get(format!("http://{http}/api/v1/cluster")).await.unwrap().text().await.unwrap();
        serde_json::from_str::<serde_json::Value>(&view).unwrap()["lost"].clone()
    };
    let began = Instant::now();
    while lost().await != json!(["w-1"]) {
        assert!(began.elapsed() < WAIT_MAX, "the node is not lost: {}", lost().await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let coordinator = fixture.worker.addresses().grpc.to_string();
    for call in ["status", "top"] {
        let listed = super::ctl::run(&["ctl", call, "--coordinator", &coordinator]).await;
        let row = listed.stdout.lines().find(|line| line.starts_with("w-1 ")).unwrap_or_default();
        assert!(listed.code == 3 && row.contains(" lost "), "{call}: {}{}", listed.stdout, listed.stderr);
    }
    let admin_port = fixture.worker.addresses().admin.unwrap().port().to_string();
    let asked = ["ctl", "orphans", "--coordinator", &coordinator, "--admin-port", &admin_port];
    let refused = super::ctl::run(&asked).await.failed(1);
    assert!(refused.contains("w-1: not asked") && refused.contains("has no object store"), "{refused}");
    let call = || fixture.call("/admin/coordinator/forget", r#"{"id": "w-1"}"#);
    assert_eq!(call().await, (StatusCode::OK, json!({ "forgotten": "w-1" })));
    // The view may be a second out of date.
    while lost().await != json!([]) {
        assert!(began.elapsed() < 2 * WAIT_MAX, "the node is not removed: {}", lost().await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let (status, answer) = call().await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{answer}");
    fixture.finish().await;
}

#[tokio::test]
async fn changed_tags_reach_coordinator_at_once() {
    let fixture = AdminFixture::start().await;
    let channel = format!("http://{}", fixture.worker.addresses().grpc);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.unwrap();
    let request = GetShuffleServerRequest {
        application_id: "app-1".to_owned(),
        partition_num: 1,
        partition_num_per_range: 1,
        data_replica: 1,
        assignment_shuffle_server_number: -1,
        require_tags: vec!["night".to_owned()],
        ..Default::default()
    };
    let (status, answer) = fixture.call("/admin/tags", r#"{"tags": ["night", "ssd"]}"#).await;
    assert_eq!((status, answer), (StatusCode::OK, json!({ "tags": ["night", "ssd"] })));
    let start = Instant::now();
    loop {
        let answer = coordinator.get_shuffle_assignments(request.clone()).await.unwrap().into_inner();
        if answer.assignments.iter().any(|range| !range.server.is_empty()) {
            break;
        }
        assert!(start.elapsed() < WAIT_MAX, "the coordinator does not know the new tags");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for bad in [r#"{"tags": ["a,b"]}"#, r#"{"tags": "a"}"#, r#"{"tag": []}"#, "", "\u{0}"] {
        let (status, answer) = fixture.call("/admin/tags", bad).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad}: {answer}");
    }
    fixture.finish().await;
}

#[tokio::test]
async fn flush_and_purge_calls_empty_memory_and_app() {
    let fixture = AdminFixture::start().await;
    let key = fixture.push("app-1", 3).await;
    fixture.push("app-10", 3).await;
    let (status, answer) = fixture.call("/admin/flush", "").await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let local = fixture.worker.service().tiers().find::<LocalStore>().unwrap();
    eventually("everything is on disk", || {
        match local.view(&key, PartitionId(2)).map_or(0, |view| view.bytes) {
            30_000 if fixture.worker.memory().block_count() == 0 => Ok(()),
            bytes => Err(format!("{bytes} bytes")),
        }
    })
    .await;
    let (status, answer) = fixture.call("/admin/apps/app-1/purge", "").await;
    assert_eq!((status, answer), (StatusCode::OK, json!({ "purged": "app-1" })));
    let apps =
        || fixture.worker.service().apps().apps().iter().map(|app| app.id().to_string()).collect::<Vec<_>>();
    assert_eq!(apps(), ["app-10"]);
    for unknown in ["app-1", "..%2Fx", "%00", "a%20b"] {
        let (status, _) = fixture.call(&format!("/admin/apps/{unknown}/purge"), "").await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{unknown}");
    }
    assert_eq!(apps(), ["app-10"]);
    fixture.finish().await;
}

#[tokio::test]
async fn log_filter_of_foreign_logging_is_not_replaced() {
    let fixture = AdminFixture::start().await;
    let (status, answer) = fixture.call("/admin/log-level", r#"{"filter": "debug"}"#).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(answer["error"].as_str().unwrap().contains("not the worker's"), "{answer}");
    fixture.finish().await;
}

#[tokio::test]
async fn calls_without_token_reveal_and_change_nothing() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{TOKEN}\n")).unwrap();
    let admin = format!("token_file = {:?}", file.path());
    let server = S3Server::start().await;
    let fixture = AdminFixture::above_objects(&server, &admin).await;
    fixture.push("app-1", 2).await;
    let before = fixture.worker.memory().block_count();
    let wrong = TOKEN.replace('c', "d");
    for (path, body) in CALLS.iter().chain([&("/admin/nonsense", "")]) {
        for offered in [None, Some(wrong.as_str()), Some(""), Some(&TOKEN[1..])] {
            let request = fixture.admin(Method::POST, path).body(*body);
            let request = match offered {
                Some(token) => request.bearer_auth(token),
                None => request,
            };
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::UNAUTHORIZED, "{path} with {offered:?} was not refused");
        }
        let answer = fixture.admin(Method::GET, path).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
        let answer = fixture.admin(Method::GET, path).bearer_auth(TOKEN).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED, "GET {path} was accepted");
    }
    assert_eq!(fixture.worker.service().status().state(), WorkerState::Active);
    assert_eq!(
        (fixture.worker.service().apps().app_count(), fixture.worker.memory().block_count()),
        (1, before)
    );
    assert_eq!(fixture.metric("admin_calls_total", "denied"), (5 * (CALLS.len() + 1)) as f64);

    for (path, status) in [
        ("/admin/orphans", StatusCode::OK),
        ("/admin/decommission", StatusCode::OK),
        ("/admin/nonsense", StatusCode::NOT_FOUND),
    ] {
        let answer = fixture.admin(Method::POST, path).bearer_auth(TOKEN).send().await.unwrap();
        assert_eq!(answer.status(), status, "{path}");
    }
    fixture.finish().await;
    server.stop().await;
}

/// The data HTTP listener is open to everybody, so it must serve none of the calls.
#[tokio::test]
async fn data_listener_serves_no_admin_call() {
    let server = S3Server::start().await;
    let fixture = AdminFixture::above_objects(&server, "").await;
    fixture.push("app-1", 1).await;
    for (path, body) in CALLS {
        for method in [Method::POST, Method::GET, Method::PUT, Method::DELETE] {
            let url = format!("http://{}{path}", fixture.worker.addresses().http);
            let answer =
                reqwest::Client::new().request(method.clone(), url).body(*body).send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{method} {path}");
        }
    }
    assert_eq!(fixture.worker.service().status().state(), WorkerState::Active);
    assert_eq!(fixture.worker.service().apps().app_count(), 1);
    fixture.finish().await;
    server.stop().await;
}

/// Uniffle's own call has no token. The caller's address decides; by default coordinators may.
#[tokio::test]
async fn grpc_decommission_requires_a_permitted_address() {
    let cases = [
        ("", "", false),
        ("", "grpc_decommission = \"off\"", false),
        ("", "grpc_decommission = \"loopback\"", true),
        ("", "grpc_decommission = \"open\"", true),
        // No process listens there; only the address of the caller counts.
        ("coordinator_quorum = [\"localhost:1\"]", "", true),
        ("coordinator_quorum = [\"127.0.0.2:1\", \"no-such-host.invalid:1\"]", "", false),
        ("coordinator_quorum = [\"127.0.0.1:1\"]", "grpc_decommission = \"off\"", false),
        // Coordinators whose calls come from other addresses.
        ("coordinator_quorum = [\"127.0.0.2:1\"]", "grpc_decommission_networks = [\"127.0.0.0/30\"]", true),
        ("coordinator_quorum = [\"127.0.0.2:1\"]", "grpc_decommission_networks = [\"10.0.0.0/8\"]", false),
        ("", "grpc_decommission = \"off\"\ngrpc_decommission_networks = [\"127.0.0.1\"]", true),
    ];
    for (top, admin, is_heard) in cases {
        let fixture = AdminFixture::with_file(top, admin).await;
        let channel = format!("http://{}", fixture.worker.addresses().grpc);
        let mut internal = ShuffleServerInternalClient::connect(channel).await.unwrap();
        let state = || fixture.worker.service().status().state();
        let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
        let cancelled =
            internal.cancel_decommission(CancelDecommissionRequest {}).await.unwrap().into_inner();
        if is_heard {
            assert_eq!(answer.status(), Code::Success, "{top} {admin}: {}", answer.ret_msg);
            assert_eq!(cancelled.status(), Code::Success, "{}", cancelled.ret_msg);
        } else {
            for (status, text) in
                [(answer.status(), answer.ret_msg.clone()), (cancelled.status(), cancelled.ret_msg.clone())]
            {
                assert_eq!(status, Code::AccessDenied, "{top} {admin}: {text}");
                assert!(text.contains("admin.grpc_decommission"), "{text}");
            }
            fixture.call("/admin/decommission", "").await;
            internal.cancel_decommission(CancelDecommissionRequest {}).await.unwrap();
            assert_ne!(state(), WorkerState::Active, "{top} {admin}");
        }
        fixture.call("/admin/cancel-decommission", "").await;
        assert_eq!(state(), WorkerState::Active);
        drop(internal);
        fixture.finish().await;
    }
}

#[tokio::test]
async fn requests_are_bounded_and_browser_origins_refused() {
    let fixture = AdminFixture::start().await;
    let huge = format!(r#"{{"tags": ["{}"]}}"#, "x".repeat(70_000));
    let answer = fixture.admin(Method::POST, "/admin/tags").body(huge).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let page = fixture.admin(Method::POST, "/admin/decommission").header("Origin", "http://evil.example");
    assert_eq!(page.send().await.unwrap().status(), StatusCode::FORBIDDEN);
    let mut stream = TcpStream::connect(fixture.worker.addresses().admin.unwrap()).await.unwrap();
    let head = format!("POST /admin/flush?{} HTTP/1.1\r\nHost: x\r\n\r\n", "q".repeat(9_000));
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(String::from_utf8_lossy(&answer).starts_with("HTTP/1.1 4"), "{answer:?}");
    assert_eq!(fixture.worker.service().status().state(), WorkerState::Active);
    fixture.finish().await;
}

/// Runs in its own process, because only that writes to its log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_audited_and_unauthorized_ones_rate_limited() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), TOKEN).unwrap();
    let tables: &str = format!("[admin]\nport = 0\ntoken_file = {:?}", file.path()).leak();
    let setup = Setup { name: "audited", tables, capacity: "32M", ..Setup::default() };
    let worker = tokio::task::spawn_blocking(move || WorkerProcess::start(&setup)).await.unwrap();
    let client = reqwest::Client::new();
    let call = |path: &str, token: &str| {
        let url = format!("http://127.0.0.1:{}{path}", worker.ready().admin_port.unwrap());
        client.post(url).bearer_auth(token).send()
    };
    let wrong = TOKEN.replace('c', "d");
    for _ in 0..50 {
        assert_eq!(call("/admin/flush", &wrong).await.unwrap().status(), StatusCode::UNAUTHORIZED);
    }
    assert_eq!(call("/admin/decommission", TOKEN).await.unwrap().status(), StatusCode::OK);
    assert_eq!(call("/admin/apps/none/purge", TOKEN).await.unwrap().status(), StatusCode::NOT_FOUND);
    let log = worker.log();
    assert!(!log.contains(TOKEN) && !log.contains(&wrong), "{log}");
    let audit: Vec<_> = log.lines().filter(|line| line.contains(" audit: ")).collect();
    let denied = audit.iter().filter(|line| line.contains("result=\"denied\"")).count();
    assert!((1..10).contains(&denied), "50 denied calls caused {denied} lines: {audit:?}");
    let ok = audit.iter().find(|line| line.contains("result=\"ok\"")).unwrap();
    // Without applications it is soon decommissioned.
    for part in ["call=/admin/decommission", "peer=127.0.0.1:", "state\\\":\\\"decommission"] {
        assert!(ok.contains(part), "{part} is missing: {ok}");
    }
    let failed = audit.iter().find(|line| line.contains("result=\"failed\"")).unwrap();
    assert!(failed.contains("/admin/apps/none/purge") && failed.contains("unknown application"), "{failed}");
    tokio::task::spawn_blocking(move || worker.stop()).await.unwrap();
}
