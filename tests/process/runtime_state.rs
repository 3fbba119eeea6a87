//! Settings changed by calls at run time, and which of them survive an upgrade, a kill and a
//! graceful stop.

use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::block_in_place;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_testkit::eventually;
use uniffle_testkit::s3::S3Server;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_worker::proto::shuffle_server_internal_client::ShuffleServerInternalClient;
use uniffle_worker::proto::{
    AccessClusterRequest, ApplicationInfoRequest, DecommissionRequest, ShuffleServerHeartBeatRequest,
    ShuffleServerId, StatusCode,
};

const TABLES: &str =
    "[admin]\nport = 0\ngrpc_decommission = \"loopback\"\n[embedded_coordinator]\nquota_apps_per_user = 1\n";

async fn call(worker: &WorkerProcess, path: &str, body: &str) -> Value {
    let (status, answer) = answer(worker, path, body).await;
    assert!(status.is_success(), "{path}: {status}: {answer}");
    answer
}

async fn answer(worker: &WorkerProcess, path: &str, body: &str) -> (reqwest::StatusCode, Value) {
    let url = format!("http://127.0.0.1:{}{path}", worker.ready().admin_port.unwrap());
    let answer = reqwest::Client::new().post(url).body(body.to_owned()).send().await.unwrap();
    let status = answer.status();
    (status, serde_json::from_str(&answer.text().await.unwrap()).unwrap())
}

/// Decommissions the worker as a coordinator does. Returns status and text of the response.
async fn decommission_over_grpc(worker: &WorkerProcess) -> (i32, String) {
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut internal = ShuffleServerInternalClient::connect(channel).await.unwrap();
    let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
    (answer.status, answer.ret_msg)
}

fn node(worker: &WorkerProcess) -> Value {
    let page = block_in_place(|| worker.page("/api/v1/node")).unwrap();
    serde_json::from_str(&page).unwrap()
}

fn is_decommissioned(worker: &WorkerProcess) -> bool {
    node(worker)["state"].as_str().unwrap().starts_with("decommission")
}

/// Returns whether the coordinator admits another application of `user`.
async fn admits(worker: &WorkerProcess, user: &str) -> bool {
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.unwrap();
    let request = AccessClusterRequest { user: user.to_owned(), ..Default::default() };
    let answer = coordinator.access_cluster(request).await.unwrap().into_inner();
    answer.status() == StatusCode::Success
}

async fn register(worker: &WorkerProcess, app: &str, user: &str) {
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.unwrap();
    let request =
        ApplicationInfoRequest { app_id: app.to_owned(), user: user.to_owned(), ..Default::default() };
    coordinator.register_application_info(request).await.unwrap();
}

fn state_file(worker: &WorkerProcess) -> PathBuf {
    worker.data_paths()[0].join("uniffle-worker.metadata/state")
}

/// Waits until the state file in the first data directory contains `text`.
async fn saved(worker: &WorkerProcess, text: &str) {
    let path = state_file(worker);
    eventually("the settings are saved", || match std::fs::read_to_string(&path) {
        Ok(state) if state.contains(text) => Ok(()),
        state => Err(format!("{state:?}")),
    })
    .await;
}

/// Replaces the process after a kill, or by an upgrade. `by` is "kill" or "upgrade".
fn replace_process(worker: &mut WorkerProcess, by: &str) {
    block_in_place(|| match by {
        "kill" => {
            worker.kill();
            worker.start_again();
        }
        _ => {
            worker.begin_upgrade();
            worker.finish_upgrade();
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_survive_upgrade_and_kill() {
    let setup = Setup { name: "runtime-state", capacity: "64M", tables: TABLES, ..Setup::default() };
    let mut worker = WorkerProcess::start(&setup);
    call(&worker, "/admin/tags", r#"{"tags": ["night"]}"#).await;
    register(&worker, "app-1", "anna").await;
    assert!(!admits(&worker, "anna").await && admits(&worker, "carl").await);
    call(&worker, "/admin/decommission", "").await;
    saved(&worker, "anna").await;
    for by in ["kill", "upgrade"] {
        replace_process(&mut worker, by);
        assert!(is_decommissioned(&worker), "the decommission was lost by {by}: {}", node(&worker));
        assert_eq!(node(&worker)["tags"], json!(["night"]), "the tags were lost by {by}");
    }
    call(&worker, "/admin/cancel-decommission", "").await;
    replace_process(&mut worker, "kill");
    assert!(!is_decommissioned(&worker));
    let (anna, carl) = (admits(&worker, "anna").await, admits(&worker, "carl").await);
    assert!(!anna && carl, "the quota of a user must outlive the process: {anna}, {carl}");

    call(&worker, "/admin/decommission", "").await;
    block_in_place(|| {
        worker.signal(Signal::TERM);
        assert!(worker.wait_end().success());
        worker.start_again();
    });
    assert!(!is_decommissioned(&worker), "a graceful stop must complete the decommission");
    assert_eq!(node(&worker)["tags"], json!(["night"]));
    block_in_place(|| worker.stop());
}

/// Sends a heartbeat of a worker that does not exist.
async fn heartbeat(worker: &WorkerProcess, id: &str) {
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.unwrap();
    let server =
        ShuffleServerId { id: id.to_owned(), ip: "127.0.0.1".to_owned(), port: 1, ..Default::default() };
    let request = ShuffleServerHeartBeatRequest { server_id: Some(server), ..Default::default() };
    let answer = coordinator.heartbeat(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_nodes_survive_upgrade_and_kill() {
    let tables = "[admin]\nport = 0\n[embedded_coordinator]\nnode_timeout_sec = 2\n";
    let setup = Setup { name: "lost-nodes", capacity: "64M", tables, ..Setup::default() };
    let mut worker = WorkerProcess::start(&setup);
    heartbeat(&worker, "gone").await;
    heartbeat(&worker, "replaced").await;
    let lost = |worker: &WorkerProcess, expected: f64| {
        let count = worker.metrics().expect("lost_server_num");
        if count == expected { Ok(()) } else { Err(format!("{count} nodes are lost")) }
    };
    eventually("both are lost", || lost(&worker, 2.0)).await;
    call(&worker, "/admin/coordinator/forget", r#"{"id": "replaced"}"#).await;
    // Its last heartbeat is before the upgrade, and its timeout ends after it.
    heartbeat(&worker, "dying").await;
    saved(&worker, "dying").await;
    for by in ["upgrade", "kill"] {
        replace_process(&mut worker, by);
        eventually(&format!("lost after {by}"), || lost(&worker, 2.0)).await;
        let page = block_in_place(|| worker.page("/api/v1/cluster")).unwrap();
        let cluster: Value = serde_json::from_str(&page).unwrap();
        assert_eq!(cluster["lost"], json!(["dying", "gone"]), "the lost nodes were forgotten by {by}");
    }
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_without_disks_survive_upgrade_and_kill() {
    let server = S3Server::start().await;
    let (mut worker, _keys) = crate::upgrade_objects::start_with(&server, TABLES);
    // No wait: the admin calls are answered once the whole state is saved, also the user.
    register(&worker, "app-1", "anna").await;
    call(&worker, "/admin/tags", r#"{"tags": ["night"]}"#).await;
    call(&worker, "/admin/decommission", "").await;
    for by in ["upgrade", "kill", "kill"] {
        replace_process(&mut worker, by);
        assert!(is_decommissioned(&worker), "the decommission was lost by {by}: {}", node(&worker));
        assert_eq!(node(&worker)["tags"], json!(["night"]), "the tags were lost by {by}");
    }
    call(&worker, "/admin/cancel-decommission", "").await;
    replace_process(&mut worker, "kill");
    assert!(!is_decommissioned(&worker), "{}", node(&worker));
    assert_eq!(node(&worker)["tags"], json!(["night"]));
    let (anna, carl) = (admits(&worker, "anna").await, admits(&worker, "carl").await);
    assert!(!anna && carl, "the quota of a user must outlive the process: {anna}, {carl}");
    block_in_place(|| worker.stop());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_succeeds_only_after_its_setting_is_saved() {
    let setup = Setup { name: "saved-settings", capacity: "64M", tables: TABLES, ..Setup::default() };
    let worker = WorkerProcess::start(&setup);
    let file = state_file(&worker);
    let text = || std::fs::read_to_string(&file).unwrap_or_default();
    // Takes the place of the temporary file, so no file can be written.
    let obstacle = file.with_extension("new");
    std::fs::create_dir(&obstacle).unwrap();
    let path = file.display().to_string();
    for (call, body) in [
        ("/admin/tags", r#"{"tags": ["night"]}"#),
        ("/admin/cancel-decommission", ""),
        ("/admin/decommission", ""),
    ] {
        let (status, answer) = answer(&worker, call, body).await;
        assert_eq!(status, 500, "{call}: {answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(&path) && error.contains("not saved"), "{call}: {error}");
    }
    let drained = call(&worker, "/admin/drain", "").await;
    assert!(drained["not_saved"].as_str().is_some_and(|error| error.contains(&path)), "{drained}");
    let (status, error) = decommission_over_grpc(&worker).await;
    assert!(status == i32::from(StatusCode::InternalError) && error.contains(&path), "{status}: {error}");
    assert!(is_decommissioned(&worker) && node(&worker)["tags"] == json!(["night"]));
    let warning = "cannot save the settings made at run time";
    assert_eq!(worker.log().matches(warning).count(), 1, "{}", worker.log());

    std::fs::remove_dir(&obstacle).unwrap();
    assert_eq!(decommission_over_grpc(&worker).await.0, i32::from(StatusCode::Success));
    assert!(text().contains("\"decommission\":true") && text().contains("night"), "{}", text());
    call(&worker, "/admin/cancel-decommission", "").await;
    assert!(text().contains("\"decommission\":false"), "{}", text());
    call(&worker, "/admin/tags", r#"{"tags": ["day"]}"#).await;
    assert!(text().contains("day"), "{}", text());
    block_in_place(|| worker.stop());
}
