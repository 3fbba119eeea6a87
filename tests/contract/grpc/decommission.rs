//! Decommission of a worker (docs/protocol.md §2.14), and a worker whose coordinators are down.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_worker::proto::shuffle_server_internal_client::ShuffleServerInternalClient;
use uniffle_worker::proto::{
    CancelDecommissionRequest, DecommissionRequest, GetShuffleServerRequest, StatusCode,
};
use uniffle_worker::service::WorkerState;

use super::blocks::{batch, blocks};
use super::fixture::{Setup, WorkerFixture, key};
use super::raw;

/// Returns whether the coordinator assigns partitions to this worker.
async fn is_assigned(channel: &Channel) -> bool {
    let request = GetShuffleServerRequest {
        application_id: "app-1".to_owned(),
        partition_num: 2,
        partition_num_per_range: 1,
        data_replica: 1,
        assignment_shuffle_server_number: -1,
        ..Default::default()
    };
    let mut coordinator = CoordinatorServerClient::new(channel.clone());
    let answer = coordinator.get_shuffle_assignments(request).await.unwrap().into_inner();
    answer.status() == StatusCode::Success && answer.assignments.iter().all(|range| !range.server.is_empty())
}

async fn until_assigned(channel: &Channel, wanted: bool) {
    let start = Instant::now();
    while is_assigned(channel).await != wanted {
        assert!(start.elapsed() < Duration::from_secs(20), "the worker does not become assigned = {wanted}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decommissioned_worker_gets_no_assignments_and_serves_its_app() {
    let tables = "[admin]\ngrpc_decommission = \"loopback\"";
    let setup = Setup { top: "heartbeat_interval_seconds = 1", tables, ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    until_assigned(&channel, true).await;
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    fixture.push(&key, &batch(0, &blocks(0, 1, 0..5))).await;

    let mut internal = ShuffleServerInternalClient::new(channel.clone());
    for _ in 0..2 {
        let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    }
    let status = || fixture.worker.service().status().state();
    assert_eq!(status(), WorkerState::Decommissioning);
    until_assigned(&channel, false).await;

    fixture.push(&key, &batch(1, &blocks(1, 1, 0..5))).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &blocks(0, 1, 0..5)).await;
    fixture.assert_reads(&key, 1, &blocks(1, 1, 0..5)).await;
    fixture.worker.service().lifecycle.check_decommission();
    assert_eq!(status(), WorkerState::Decommissioning, "an application is still registered");

    let answer = internal.cancel_decommission(CancelDecommissionRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success);
    assert_eq!(status(), WorkerState::Active);
    until_assigned(&channel, true).await;
    fixture.client.unregister_app("app-1").await.unwrap();

    let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success);
    // The worker does this once a minute.
    fixture.worker.service().lifecycle.check_decommission();
    assert_eq!(status(), WorkerState::Decommissioned, "no application is registered any more");
    drop((internal, channel));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_with_unreachable_coordinators_serves() {
    // Nothing listens on port 1.
    let setup = Setup {
        top: "coordinator_quorum = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\nheartbeat_interval_seconds = 1",
        ..Setup::default()
    };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.push(&key, &batch(0, &blocks(0, 1, 0..5))).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &blocks(0, 1, 0..5)).await;
    fixture.finish().await;
}
