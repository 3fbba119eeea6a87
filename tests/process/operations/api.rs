//! `/api/v1` of a worker with data: the responses match the state of the worker.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uniffle_client::grpc::ReadOptions;
use uniffle_wire::types::PartitionId;
use uniffle_worker::proto::RequireBufferRequest;

use super::fixture::{AdminFixture, eventually};

pub(super) const WAIT_MAX: Duration = Duration::from_secs(20);

impl AdminFixture {
    async fn api(&self, path: &str) -> (StatusCode, Value) {
        let url = format!("http://{}/api/v1{path}", self.worker.addresses().http);
        let answer = reqwest::get(url).await.unwrap();
        let status = answer.status();
        (status, serde_json::from_str(&answer.text().await.unwrap()).unwrap_or_default())
    }

    async fn fetch(&self, path: &str) -> Value {
        let (status, answer) = self.api(path).await;
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        answer
    }

    /// Polls `path` until the response satisfies `should`: figures may be a second old.
    async fn eventually(&self, path: &str, should: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let answer = self.fetch(path).await;
            if should(&answer) {
                return answer;
            }
            assert!(start.elapsed() < WAIT_MAX, "{path}: {answer}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

const ANSWERS_DEADLINE: std::time::Duration = std::time::Duration::from_secs(20);

fn stage<'a>(explanation: &'a Value, name: &str) -> &'a Value {
    explanation["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == json!(name)).unwrap()
}

#[tokio::test]
async fn status_covers_every_component() {
    let fixture = AdminFixture::start().await;
    fixture.push("app-1", 8).await;
    let status = fixture.eventually("/status", |status| status["memory"]["blocks"] == json!(36)).await;
    let age = |status: &Value| status["age_seconds"].as_f64().unwrap();
    assert!(age(&status) < 60.0);
    // Figures are computed once a second, however often they are requested.
    fixture.eventually("/status", |status| age(status) > 0.05).await;
    let node = &status["node"];
    assert_eq!((&node["state"], &node["not_ready"]), (&json!("active"), &Value::Null));
    assert_eq!(node["grpc_port"], json!(fixture.worker.addresses().grpc.port()));
    let memory = &status["memory"];
    assert_eq!(memory["capacity_bytes"], json!(32 << 20));
    assert_eq!(memory["used_bytes"], json!(fixture.worker.memory().used_bytes()));
    assert_eq!(status["tiers"].as_array().unwrap().len(), 2);
    assert_eq!(status["disks"][0]["condition"], json!("healthy"));
    assert!(status["disks"][0]["total_bytes"].as_u64().unwrap() > 0);
    assert_eq!(status["coordinators"][0]["link"], json!("embedded"));
    assert!(status["connections"]["grpc"].as_u64().unwrap() >= 1);
    assert_eq!((&status["apps"]["count"], &status["apps"]["partitions"]), (&json!(1), &json!(8)));
    assert_eq!(status["totals"]["received_bytes"], json!(360_000));
    assert!(status["process"]["resident_bytes"].as_u64().unwrap() > 0);

    let index = fixture.fetch("").await;
    for path in index["paths"].as_array().unwrap() {
        let path = path.as_str().unwrap().trim_start_matches("/api/v1").replace("{id}", "app-1");
        fixture.fetch(&path).await;
    }
    assert_eq!(fixture.fetch("/memory").await["capacity_bytes"], json!(32 << 20));
    for (path, expected) in [
        ("/nonsense", StatusCode::NOT_FOUND),
        ("/apps/unknown/explain", StatusCode::NOT_FOUND),
        ("/apps/..%2F..%2Fetc/explain", StatusCode::NOT_FOUND),
        ("/apps?limit=-1", StatusCode::BAD_REQUEST),
        ("/history?after_ms=x", StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(fixture.api(path).await.0, expected, "{path}");
    }
    fixture.finish().await;
}

#[tokio::test]
async fn removed_data_counts_as_received_but_not_as_stored() {
    let fixture = AdminFixture::start().await;
    let key = fixture.push("app-1", 4).await;
    let received = |answer: &Value| answer["apps"][0]["received_bytes"] == json!(100_000);
    fixture.eventually("/apps", |answer| received(answer)).await;
    fixture.client.unregister(&key).await.unwrap();
    let empty = |answer: &Value| answer["apps"][0]["in_memory_bytes"] == json!(0) && received(answer);
    fixture.eventually("/apps", empty).await;
    fixture.push("app-1", 4).await;
    fixture.client.unregister_app("app-1").await.unwrap();
    let ended = |answer: &Value| answer["gone"][0]["received_bytes"] == json!(200_000);
    fixture.eventually("/apps", ended).await;
    let explanation = fixture.fetch("/apps/app-1/explain").await;
    assert_eq!(explanation["bytes"]["in_memory"], json!(0), "{explanation}");
    assert_eq!(explanation["top_partitions"][0]["in_memory_bytes"], json!(0), "{explanation}");
    fixture.finish().await;
}

#[tokio::test]
async fn applications_are_listed_by_size_up_to_limit() {
    let fixture = AdminFixture::start().await;
    for (app, partitions) in [("small", 1), ("large", 12), ("middle", 4)] {
        fixture.push(app, partitions).await;
    }
    let all = |answer: &Value| {
        let bytes = |app: &Value| app["received_bytes"].as_u64().unwrap();
        answer["apps"].as_array().unwrap().iter().map(bytes).sum::<u64>() == 680_000 + 100_000 + 10_000
    };
    let answer = fixture.eventually("/apps", all).await;
    let names: Vec<_> =
        answer["apps"].as_array().unwrap().iter().map(|app| app["app"].as_str().unwrap()).collect();
    assert_eq!(names, ["large", "middle", "small"]);
    let large = &answer["apps"][0];
    // 1 to 8 blocks in the first partitions, 8 in each of the others; 10,000 bytes each.
    assert_eq!((&large["partitions"], &large["received_bytes"]), (&json!(12), &json!(680_000)));
    assert_eq!(large["largest_partition_bytes"], json!(80_000));
    assert!((large["skew"].as_f64().unwrap() - 80_000.0 / (680_000.0 / 12.0)).abs() < 1e-9, "{large}");
    assert_eq!(large["lost_blocks"], json!(0));
    let answer = fixture.fetch("/apps?limit=1").await;
    assert_eq!((answer["apps"].as_array().unwrap().len(), &answer["count"]), (1, &json!(3)));
    fixture.finish().await;
}

#[tokio::test]
async fn app_is_explained_while_running_and_afterwards() {
    let fixture = AdminFixture::start().await;
    let key = fixture.push("app-1", 3).await;
    // More than half of memory, so a second ticket is refused while the first holds its memory.
    let require = |size| RequireBufferRequest {
        require_size: size,
        app_id: "app-1".to_owned(),
        shuffle_id: 1,
        partition_ids: vec![0],
        ..Default::default()
    };
    fixture.client.require_raw(require(24 << 20)).await.unwrap();
    // Read before the refusal, which starts a flush.
    let options = ReadOptions::default();
    fixture.client.read_partition(&key, PartitionId(2), &options).await.unwrap();
    let refused = fixture.client.require_raw(require(24 << 20)).await.unwrap();
    assert_ne!(refused.status, 0, "{refused:?}");
    fixture.worker.service().lifecycle.flush_all().unwrap();
    eventually("all is on disk", || match fixture.worker.memory().block_count() {
        0 => Ok(()),
        blocks => Err(format!("{blocks} blocks in memory")),
    })
    .await;
    fixture.client.read_partition(&key, PartitionId(2), &options).await.unwrap();

    // A response is counted after its last byte, which the client does not wait for.
    let answers = async {
        loop {
            let explained = fixture.fetch("/apps/app-1/explain").await;
            if stage(&explained, "answer")["count"].as_u64().unwrap() >= 3 {
                return explained;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let explained =
        tokio::time::timeout(ANSWERS_DEADLINE, answers).await.expect("three responses were not recorded");
    assert_eq!((&explained["presence"], &explained["partitions"]), (&json!("known"), &json!(3)));
    let bytes = &explained["bytes"];
    assert_eq!((&bytes["received"], &bytes["on_local_disks"]), (&json!(60_000), &json!(60_000)));
    assert_eq!(bytes["read_from_memory"], json!(30_000));
    assert!(bytes["read_from_disks"].as_u64().unwrap() >= 30_000, "{bytes}");
    for (name, count, bytes) in
        [("receive", 1, 60_000), ("flush_write", 1, 60_000), ("ticket_wait", 1, 24 << 20)]
    {
        let stage = stage(&explained, name);
        assert_eq!((&stage["count"], &stage["bytes"]), (&json!(count), &json!(bytes)), "{name}: {explained}");
    }
    for name in ["flush_queue", "disk_read", "answer"] {
        assert!(stage(&explained, name)["count"].as_u64().unwrap() >= 1, "{name}: {explained}");
    }
    assert_eq!(explained["retries"]["tickets_refused_memory"], json!(1));
    let top = &explained["top_partitions"][0];
    assert_eq!((&top["partition"], &top["received_bytes"]), (&json!(2), &json!(30_000)));
    assert_eq!(explained["losses"], json!([]));
    assert!(!explained["findings"].as_array().unwrap().is_empty());

    fixture.client.unregister_app("app-1").await.unwrap();
    let explained = fixture.fetch("/apps/app-1/explain").await;
    assert_eq!(
        (&explained["presence"], &explained["bytes"]["received"]),
        (&json!("unregistered"), &json!(60_000))
    );
    let gone = &fixture.fetch("/apps").await["gone"][0];
    assert_eq!((&gone["app"], &gone["received_bytes"]), (&json!("app-1"), &json!(60_000)));
    fixture.finish().await;
}

#[tokio::test]
async fn history_can_begin_after_a_given_sample() {
    let fixture = AdminFixture::start().await;
    fixture.push("app-1", 3).await;
    let received = |samples: &Value| {
        let samples = samples["samples"].as_array().unwrap();
        samples.last().map_or(0, |sample| sample["received_bytes"].as_u64().unwrap())
    };
    let times = |samples: &Value| -> Vec<u64> {
        let samples = samples["samples"].as_array().unwrap();
        samples.iter().map(|sample| sample["at_ms"].as_u64().unwrap()).collect()
    };
    let has_both = |history: &Value| received(history) == 60_000 && times(history).len() > 1;
    let all = times(&fixture.eventually("/history", has_both).await);
    let later = times(&fixture.fetch(&format!("/history?after_ms={}", all[0])).await);
    // Another sample may have been taken meanwhile.
    assert!(later.starts_with(&all[1..]), "after the first of {all:?}: {later:?}");
    fixture.finish().await;
}
