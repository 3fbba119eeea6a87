//! HTTP requests of Uniffle's Kubernetes operator and dashboard (docs/protocol.md §10.1).

use serde::Deserialize;
use uniffle_testkit::metrics::get;

use super::fixture::{Setup, WorkerFixture, key};

/// Metrics as the operator's webhook reads them (`pkg/webhook/util/util.go`). Values that are no
/// numbers break older versions.
#[derive(Debug, Deserialize)]
struct MetricList {
    metrics: Vec<MetricItem>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetricItem {
    name: String,
    label_names: Vec<String>,
    label_values: Vec<String>,
    value: f32,
}

async fn fetch(fixture: &WorkerFixture, path: &'static str) -> Result<String, String> {
    let port = fixture.worker.addresses().http.port();
    tokio::task::spawn_blocking(move || get(port, path)).await.unwrap()
}

/// Returns the result of the webhook's check before it allows the deletion of a pod.
async fn has_zero_apps(fixture: &WorkerFixture) -> bool {
    let body = fetch(fixture, "/metrics/server").await.unwrap();
    let list: MetricList = serde_json::from_str(&body).unwrap();
    for item in &list.metrics {
        assert_eq!(item.label_names.len(), item.label_values.len(), "{item:?}");
    }
    let apps = list.metrics.iter().find(|item| item.name == "app_num_with_node").unwrap();
    apps.value == 0.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_webhook_sees_when_a_pod_may_be_deleted() {
    let fixture = WorkerFixture::start().await;
    assert!(has_zero_apps(&fixture).await);
    fixture.client.register(&key("app-1", 1), &[(0, 1)]).await.unwrap();
    assert!(!has_zero_apps(&fixture).await);
    fixture.client.unregister_app("app-1").await.unwrap();
    assert!(has_zero_apps(&fixture).await);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dashboard_links_are_served() {
    let fixture = WorkerFixture::start().await;
    for path in ["grpc", "netty", "jvm", "all"].map(|kind| format!("/api/shuffleServer/metrics/{kind}")) {
        let body = fetch(&fixture, path.leak()).await.unwrap();
        assert!(!serde_json::from_str::<MetricList>(&body).unwrap().metrics.is_empty());
    }
    let text = fetch(&fixture, "/api/shuffleServer/prometheus/metrics/all").await.unwrap();
    assert!(text.contains("\napp_num_with_node 0\n"), "{text}");
    let conf = fetch(&fixture, "/api/shuffleServer/conf").await.unwrap();
    assert!(conf.contains(r#"{"argumentKey":"memory_store.capacity","argumentValue":"#), "{conf}");
    let refused = fetch(&fixture, "/api/shuffleServer/stacks").await.unwrap_err();
    assert!(refused.contains("404"), "{refused}");
    fixture.finish().await;

    let fixture = WorkerFixture::with(Setup { tables: "[http]\nprofiles = true", ..Setup::default() }).await;
    let stacks = fetch(&fixture, "/api/shuffleServer/stacks").await.unwrap();
    assert!(stacks.contains("expiry"), "no task name is in the stacks: {stacks}");
    fixture.finish().await;
}
