//! Settings changed by calls at run time, and which of them survive an upgrade, a kill and an
//! orderly stop.

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::block_in_place;
use uniffle_testkit::eventually;
use uniffle_testkit::worker::{Setup, Worker};
use uniffle_worker::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_worker::proto::{AccessClusterRequest, ApplicationInfoRequest, StatusCode};

const TABLES: &str = "[admin]\nport = 0\n[embedded_coordinator]\nquota_apps_per_user = 1\n";

async fn call(worker: &Worker, path: &str, body: &str) -> Value {
    let url = format!("http://127.0.0.1:{}{path}", worker.ready().admin_port.expect("an admin listener"));
    let answer = reqwest::Client::new().post(url).body(body.to_owned()).send().await.expect("an answer");
    assert!(answer.status().is_success(), "{path}: {}", answer.status());
    serde_json::from_str(&answer.text().await.expect("a body")).expect("JSON")
}

fn node(worker: &Worker) -> Value {
    let page = block_in_place(|| worker.page("/api/v1/node")).expect("the node");
    serde_json::from_str(&page).expect("JSON")
}

fn is_decommissioned(worker: &Worker) -> bool {
    node(worker)["state"].as_str().expect("a state").starts_with("decommission")
}

/// Returns whether the coordinator admits another application of `user`.
async fn admits(worker: &Worker, user: &str) -> bool {
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.expect("connected");
    let request = AccessClusterRequest { user: user.to_owned(), ..Default::default() };
    let answer = coordinator.access_cluster(request).await.expect("an answer").into_inner();
    answer.status() == StatusCode::Success
}

async fn register(worker: &Worker, app: &str, user: &str) {
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.expect("connected");
    let request =
        ApplicationInfoRequest { app_id: app.to_owned(), user: user.to_owned(), ..Default::default() };
    coordinator.register_application_info(request).await.expect("an answer");
}

/// Waits until the latest settings are in the data directory.
async fn saved(worker: &Worker, text: &str) {
    let path = worker.data_paths()[0].join("uniffle-worker.metadata/state");
    eventually("the settings are saved", || match std::fs::read_to_string(&path) {
        Ok(state) if state.contains(text) => Ok(()),
        state => Err(format!("{state:?}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_survive_upgrade_and_kill() {
    let setup = Setup { name: "runtime-state", capacity: "64M", tables: TABLES, ..Setup::default() };
    let mut worker = Worker::start(&setup);
    call(&worker, "/admin/tags", r#"{"tags": ["night"]}"#).await;
    register(&worker, "app-1", "anna").await;
    assert!(!admits(&worker, "anna").await && admits(&worker, "carl").await);
    call(&worker, "/admin/decommission", "").await;
    for text in ["\"decommission\":true", "night", "anna"] {
        saved(&worker, text).await;
    }
    for by in ["kill", "upgrade"] {
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
        assert!(is_decommissioned(&worker), "after {by}: {}", node(&worker));
        assert_eq!(node(&worker)["tags"], json!(["night"]), "after {by}");
    }
    call(&worker, "/admin/cancel-decommission", "").await;
    saved(&worker, "\"decommission\":false").await;
    block_in_place(|| {
        worker.kill();
        worker.start_again();
    });
    assert!(!is_decommissioned(&worker));
    let (anna, carl) = (admits(&worker, "anna").await, admits(&worker, "carl").await);
    assert!(!anna && carl, "the quota of a user outlives the process: {anna}, {carl}");

    call(&worker, "/admin/decommission", "").await;
    saved(&worker, "\"decommission\":true").await;
    block_in_place(|| {
        worker.signal(Signal::TERM);
        assert!(worker.wait_end().success());
        worker.start_again();
    });
    assert!(!is_decommissioned(&worker), "an orderly stop completes it");
    assert_eq!(node(&worker)["tags"], json!(["night"]));
    block_in_place(|| worker.stop());
}
