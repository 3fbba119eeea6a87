//! A worker with failing disks, as its coordinator, clients and operators see it (docs/protocol.md
//! §8.5), and the content of heartbeats.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use uniffle_worker::proto::shuffle_server_internal_client::ShuffleServerInternalClient;
use uniffle_worker::proto::{self, DecommissionRequest, ServerStatus, StatusCode};
use uniffle_worker::service::WorkerState;
use uniffle_worker::store::{DiskCondition, Tier};

use super::blocks::{batch, blocks};
use super::fixture::{Setup, WorkerFixture, eventually, key, require};
use super::raw;
use uniffle_testkit::coordinator::{CoordinatorDouble, HeartbeatReply};
use uniffle_testkit::third_tier::ThirdTier;

/// The longest interval allowed. In between, only a change of state is reported.
const SELDOM: &str = "heartbeat_interval_seconds = 3600";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_is_unhealthy_while_too_few_disks_are_healthy() {
    let mut coordinator = CoordinatorDouble::start(HeartbeatReply::Succeed).await;
    let top = format!("coordinator_quorum = [\"{}\"]\n{SELDOM}", coordinator.address);
    let local = "healthy_check_min_disks = 2\ndisk_healthy_check_interval_sec = 1";
    let setup = Setup { top: &top, local, ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    let first = coordinator.heartbeat(|beat| beat.status() == ServerStatus::Active).await;
    assert_eq!(first.is_healthy, None, "is_healthy overrides the status and must not be sent");
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    fixture.push(&key, &batch(0, &blocks(0, 1, 0..5))).await;
    fixture.flush().await;

    // A probe creates a directory of this name, so a file in its place makes the disk fail without
    // privileges.
    let in_the_way = fixture.disks[0].join("probe");
    std::fs::write(&in_the_way, "").unwrap();
    let unhealthy = coordinator.heartbeat(|beat| beat.status() == ServerStatus::Unhealthy).await;
    assert!(unhealthy.available_memory > 0 && unhealthy.tags.contains(&"ss_v5".to_owned()), "{unhealthy:?}");
    assert_eq!(unhealthy.server_id, first.server_id, "the node must keep its id");
    let service = fixture.worker.service();
    service.diagnostics.refresh_metrics(&service.diagnostics.app_statistics());
    assert_eq!(fixture.metric("service_is_healthy") + fixture.metric("is_healthy"), 2.0);

    // Running applications can still write and read on the other disk. An unhealthy worker refuses
    // to be decommissioned, like Java's.
    fixture.push(&key, &batch(1, &blocks(1, 1, 0..5))).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &blocks(0, 1, 0..5)).await;
    fixture.assert_reads(&key, 1, &blocks(1, 1, 0..5)).await;
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let mut internal = ShuffleServerInternalClient::new(channel);
    let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::InvalidRequest, "{}", answer.ret_msg);
    assert_eq!(service.status().state(), WorkerState::Unhealthy);

    std::fs::remove_file(&in_the_way).unwrap();
    coordinator.heartbeat(|beat| beat.status() == ServerStatus::Active).await;
    let answer = internal.decommission(DecommissionRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    coordinator.heartbeat(|beat| beat.status() == ServerStatus::Decommissioning).await;
    drop(internal);
    fixture.finish().await;
    coordinator.stop().await;
}

/// Like MEMORY_HDFS, without a data directory that could be the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_gives_the_reason_of_the_only_tier() {
    let tier = Arc::new(ThirdTier::default());
    let fixture = WorkerFixture::with_tier(Arc::clone(&tier) as Arc<dyn Tier>).await;
    let ready = async || {
        let http = fixture.worker.addresses().http;
        let answer = reqwest::get(format!("http://{http}/health/ready")).await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let answer = async |status: u16| loop {
        let (now, text) = ready().await;
        if now == status {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let until = async |status| timeout(NOTICE_MAX, answer(status)).await.expect("readiness did not change");
    until(200).await;
    tier.complain(Some("all remote stores fail"));
    let text = until(503).await;
    assert!(text.contains("unhealthy: all remote stores fail"), "{text}");
    tier.complain(None);
    until(200).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_reports_memory_disks_and_applications() {
    let mut coordinator = CoordinatorDouble::start(HeartbeatReply::Succeed).await;
    let top =
        format!("coordinator_quorum = [\"{}\"]\nheartbeat_interval_seconds = \"100ms\"", coordinator.address);
    let (fixture, key) =
        (WorkerFixture::with(Setup { top: &top, ..Setup::default() }).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 9)]).await.unwrap();
    fixture.push(&key, &batch(0, &blocks(0, 1, 0..5))).await;
    fixture.flush().await;
    fixture.push(&key, &batch(1, &blocks(1, 1, 0..5))).await;
    let ticket_bytes = 1 << 20;
    fixture.ticket(&key, ticket_bytes).await;

    let total = |from: i32| blocks(from, 1, 0..5).iter().map(|it| it.data.len() as i64).sum::<i64>();
    let beat = coordinator.heartbeat(|beat| beat.pre_allocated_memory >= i64::from(ticket_bytes)).await;
    let [app] = &beat.application_info[..] else { panic!("{:?}", beat.application_info) };
    assert_eq!((app.app_id.as_str(), app.partition_num), ("app-1", 10));
    assert_eq!((app.memory_size, app.local_total_size), (total(1), total(0)));
    assert_eq!(app.total_size, total(0) + total(1));
    assert_eq!(app.local_file_num, 2, "expected a data log and an index log");
    assert_eq!((app.hadoop_file_num, app.hadoop_total_size), (0, 0));
    assert!(beat.used_memory > beat.pre_allocated_memory, "{beat:?}");
    assert_eq!(beat.used_memory + beat.available_memory, 32 << 20);
    let [storage] = &beat.storage_info.values().collect::<Vec<_>>()[..] else {
        panic!("expected one mount: {beat:?}")
    };
    assert!(storage.capacity > 0 && storage.used_bytes > 0, "{storage:?}");
    assert_eq!(beat.is_healthy, None);
    assert!(!beat.version().is_empty() && !beat.git_commit_id().is_empty() && beat.start_time_ms() > 0);
    fixture.finish().await;
    coordinator.stop().await;
}

/// Time for several probes of the disks on a busy machine.
const NOTICE_MAX: Duration = Duration::from_secs(30);

/// `healthy_check_min_disks` is 0, so coordinators see a healthy worker. Running applications
/// should write elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_move_away_while_no_disk_is_writable() {
    let setup = Setup {
        local: "disk_healthy_check_interval_sec = 1",
        tables: "[app_config]\npartition_split_enable = true",
        ..Setup::default()
    };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 2)]).await.unwrap();
    let to_move = async || {
        let request = proto::RequireBufferRequest { partition_ids: vec![2, 0], ..require(&key, 0) };
        let answer = fixture.client.require_raw(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        answer.need_split_partition_ids
    };
    assert_eq!(to_move().await, Vec::<i32>::new());

    let in_the_way: Vec<_> = fixture.disks.iter().map(|disk| disk.join("probe")).collect();
    in_the_way.iter().for_each(|path| std::fs::write(path, "").unwrap());
    let state = || fixture.worker.service().status().state();
    let takes_data = || {
        fixture
            .worker
            .service()
            .tiers()
            .iter()
            .any(|tier| tier.state().disks.iter().any(|disk| disk.condition == DiskCondition::Healthy))
    };
    eventually("no disk takes data", || if takes_data() { Err(format!("{:?}", state())) } else { Ok(()) })
        .await;
    // The state of disks reaches the answers only after the next health check.
    let moving = async |is_moving| while to_move().await.is_empty() == is_moving {};
    timeout(NOTICE_MAX, moving(true)).await.expect("the health check did not notice the failed disks");
    assert_eq!(to_move().await, [2, 0], "partitions without blocks must move too");
    assert_eq!(state(), WorkerState::Active, "the worker must stay active for coordinators");

    in_the_way.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    eventually("a disk takes data", || if takes_data() { Ok(()) } else { Err(String::new()) }).await;
    timeout(NOTICE_MAX, moving(false))
        .await
        .expect("the health check did not notice that the disks work again");
    fixture.finish().await;
}
