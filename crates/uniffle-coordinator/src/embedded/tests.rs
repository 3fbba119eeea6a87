//! The embedded coordinator through its RPCs, under paused time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use tokio::time::advance;
use tonic::transport::server::TcpConnectInfo;
use tonic::{Code, Request};

use super::assign::{NodeOrder, PartitionSelection};
use super::*;
use crate::identity;
use crate::proto::coordinator_server_server::CoordinatorServer;
use crate::proto::{GetShuffleServerRequest, ServerStatus, StatusCode};
use uniffle_base::budget::memory_plan::divide;
use uniffle_base::schema::network::Network;

fn coordinator(config: EmbeddedConfig) -> EmbeddedCoordinator {
    EmbeddedCoordinator::new(config, &Heap::new(128 << 20), &Registry::new()).unwrap()
}

/// A worker on its own host, with or without a TCP listener.
fn node(host: u8, netty: bool) -> NodeReport {
    let ip = [10, 0, 0, host].into();
    let netty_port = netty.then_some(21200);
    let mut report = NodeReport::new(identity::server_id(ip, 21100, netty_port), ip, 21100);
    report.netty_port = netty_port;
    report.tags = identity::tags(netty, &[]);
    report.available_memory_bytes = 1 << 30;
    report
}

fn with_nodes(hosts: std::ops::Range<u8>) -> EmbeddedCoordinator {
    let coordinator = coordinator(EmbeddedConfig::default());
    for host in hosts {
        coordinator.report(node(host, true)).unwrap();
    }
    coordinator
}

fn request(partitions: i32, replicas: i32, tags: &[&str]) -> GetShuffleServerRequest {
    GetShuffleServerRequest {
        application_id: "app".into(),
        partition_num: partitions,
        partition_num_per_range: 1,
        data_replica: replicas,
        require_tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
        assignment_shuffle_server_number: -1,
        ..Default::default()
    }
}

async fn assignments(
    coordinator: &EmbeddedCoordinator,
    request: GetShuffleServerRequest,
) -> proto::GetShuffleAssignmentsResponse {
    coordinator.get_shuffle_assignments(Request::new(request)).await.unwrap().into_inner()
}

#[tokio::test(start_paused = true)]
async fn one_node_gets_one_assignment_per_range() {
    let coordinator = with_nodes(1..2);
    let answer = assignments(&coordinator, request(5, 1, &["ss_v5", "GRPC_NETTY"])).await;
    assert_eq!(answer.status(), StatusCode::Success);
    let ranges: Vec<(i32, i32)> =
        answer.assignments.iter().map(|a| (a.start_partition, a.end_partition)).collect();
    assert_eq!(ranges, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]);
    let server = &answer.assignments[0].server[0];
    assert_eq!((server.id.as_str(), server.port, server.netty_port), ("10.0.0.1-21100-21200", 21100, 21200));
    assert!(answer.assignments.iter().all(|a| a.server.len() == 1 && a.server[0] == *server));
}

#[tokio::test(start_paused = true)]
async fn assignment_waits_for_first_heartbeats_of_other_workers() {
    let coordinator = with_nodes(1..2);
    coordinator.wait_for_workers(Duration::from_secs(10));
    let began = tokio::time::Instant::now();
    assert!(coordinator.cluster().is_starting);
    let others = async {
        tokio::time::sleep(Duration::from_secs(8)).await;
        coordinator.report(node(2, true)).unwrap();
    };
    let (answer, ()) = tokio::join!(assignments(&coordinator, request(2, 1, &["ss_v5"])), others);
    assert_eq!(began.elapsed(), Duration::from_secs(10));
    let hosts: HashSet<&str> = answer.assignments.iter().map(|it| it.server[0].ip.as_str()).collect();
    assert_eq!(hosts, HashSet::from(["10.0.0.1", "10.0.0.2"]));
    let _ = assignments(&coordinator, request(2, 1, &["ss_v5"])).await;
    assert_eq!(began.elapsed(), Duration::from_secs(10), "the second request must wait too");
    assert!(!coordinator.cluster().is_starting);
}

#[tokio::test(start_paused = true)]
async fn replicas_are_on_different_hosts() {
    let coordinator = coordinator(EmbeddedConfig::default());
    for host in 1..4 {
        for port in [21100, 21101, 21102] {
            let mut report = node(host, false);
            report.grpc_port = port;
            report.id = identity::server_id(report.ip, port, None);
            coordinator.report(report).unwrap();
        }
    }
    let answer = assignments(&coordinator, request(100, 3, &["ss_v5"])).await;
    assert_eq!(answer.assignments.len(), 100);
    for range in answer.assignments {
        let hosts: HashSet<String> = range.server.into_iter().map(|server| server.ip).collect();
        assert_eq!(hosts.len(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn netty_client_is_refused_without_tcp_listener() {
    let coordinator = coordinator(EmbeddedConfig::default());
    coordinator.report(node(1, false)).unwrap();
    assert_eq!(
        assignments(&coordinator, request(1, 1, &["ss_v5", "GRPC"])).await.status(),
        StatusCode::Success
    );
    let answer = assignments(&coordinator, request(1, 1, &["ss_v5", "GRPC_NETTY"])).await;
    assert_eq!(answer.status(), StatusCode::InternalError);
    assert!(answer.assignments.is_empty());
    assert!(answer.ret_msg.contains("GRPC_NETTY"), "{}", answer.ret_msg);
    for (tag, status) in [("GRPC", StatusCode::Success), ("GRPC_NETTY", StatusCode::AccessDenied)] {
        let access = proto::AccessClusterRequest { tags: vec![tag.into()], ..Default::default() };
        let answer = coordinator.access_cluster(Request::new(access)).await.unwrap().into_inner();
        assert_eq!(answer.status(), status);
        assert_eq!(answer.uuid.is_empty(), status != StatusCode::Success);
        assert_eq!(answer.ret_msg.is_empty(), status == StatusCode::Success);
    }
    assert_eq!(coordinator.0.metrics.counts.access_requests_total.get(), 2);
    assert_eq!(coordinator.0.metrics.counts.candidates_denied_total.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn nonsensical_numbers_are_invalid() {
    let coordinator = with_nodes(1..2);
    let mut wrong = vec![request(-1, 1, &[]), request(0, 1, &[]), request(1, 0, &[]), request(1, -3, &[])];
    for per_range in [0, -1, i32::MIN] {
        wrong.push(GetShuffleServerRequest { partition_num_per_range: per_range, ..request(1, 1, &[]) });
    }
    wrong.push(request(1, 1, &["t"; TAGS_MAX + 1]));
    for request in wrong {
        let answer = assignments(&coordinator, request.clone()).await;
        assert_eq!(answer.status(), StatusCode::InvalidRequest, "{request:?}");
        assert!(!answer.ret_msg.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn huge_partition_number_is_refused_before_allocation() {
    let coordinator = with_nodes(1..3);
    for request in [request(i32::MAX, 1, &[]), request(1 << 17, 2, &[]), request(1, i32::MAX, &[])] {
        let answer = assignments(&coordinator, request).await;
        assert_eq!(answer.status(), StatusCode::InternalError);
        let text = "the limit is 131072 (embedded_coordinator.assignment_ranges_max)";
        assert!(answer.ret_msg.contains(text), "{}", answer.ret_msg);
    }
    let largest = assignments(&coordinator, request(1 << 17, 1, &[])).await;
    assert_eq!(largest.assignments.len(), 1 << 17);
}

/// The capacity of the example in the documentation of `[embedded_coordinator]`, which fits about
/// 115,000 ranges.
#[tokio::test(start_paused = true)]
async fn assignment_beyond_the_heap_is_refused_with_its_key() {
    let heap = Heap::new(divide(256_000_000, 2).heap);
    let coordinator = EmbeddedCoordinator::new(EmbeddedConfig::default(), &heap, &Registry::new()).unwrap();
    coordinator.report(node(1, true)).unwrap();
    let before = tokio::time::Instant::now();
    let refused = assignments(&coordinator, request(1 << 17, 1, &[])).await;
    assert_eq!(refused.status(), StatusCode::InternalError);
    assert!(refused.ret_msg.contains("memory_store.heap_capacity"), "{}", refused.ret_msg);
    assert_eq!(before.elapsed(), Duration::ZERO, "a request that cannot be answered later must fail at once");
    let fits = assignments(&coordinator, request(110_000, 1, &[])).await;
    assert_eq!(fits.assignments.len(), 110_000, "{}", fits.ret_msg);
}

#[tokio::test(start_paused = true)]
async fn concurrent_assignments_stay_within_the_heap() {
    let heap = Heap::new(128 << 20);
    let coordinator = EmbeddedCoordinator::new(EmbeddedConfig::default(), &heap, &Registry::new()).unwrap();
    coordinator.report(node(1, true)).unwrap();
    let answers = heap.of(HeapKind::Answers);
    let ask = || coordinator.get_shuffle_assignments(Request::new(request(1 << 17, 1, &[])));
    let first = ask().await.unwrap();
    let (one, held) = (answers.used(), first.get_ref().assignments.len() as u64);
    // Per replica: a list entry, a server and its two texts, and their encoded form.
    assert!(one > held * 150 && one < answers.capacity(), "one answer with {held} ranges takes {one} bytes");
    let fit = answers.capacity() / one;
    let mut others: Vec<_> = Vec::new();
    for _ in 1..fit {
        others.push(ask().await.unwrap());
    }
    // Refused after 10 s, which the paused clock skips, because no answer was sent.
    let refused = ask().await.unwrap();
    assert!(answers.used() <= answers.capacity());
    let text = &refused.get_ref().ret_msg;
    assert!(
        text.contains("heap is full for answers") && text.contains("memory_store.heap_capacity"),
        "{text}"
    );
    assert_eq!(refused.get_ref().status(), StatusCode::InternalError);
    let mut next = std::pin::pin!(ask());
    assert!(futures::poll!(&mut next).is_pending());
    drop(first);
    assert_eq!(next.await.unwrap().get_ref().assignments.len(), 1 << 17);
    drop((others, refused));
    assert_eq!(heap.whole().used(), 0);
}

#[tokio::test(start_paused = true)]
async fn wide_ranges_need_the_basic_strategy() {
    let wide = |partitions, per_range| GetShuffleServerRequest {
        partition_num_per_range: per_range,
        ..request(partitions, 1, &[])
    };
    let answer = assignments(&with_nodes(1..2), wide(10, 4)).await;
    assert_eq!(
        (answer.status(), answer.ret_msg.as_str()),
        (StatusCode::InternalError, "PartitionNumPerRange must be one")
    );
    let basic = coordinator(EmbeddedConfig { node_order: NodeOrder::Basic, ..Default::default() });
    basic.report(node(1, true)).unwrap();
    let answer = assignments(&basic, wide(10, 4)).await;
    let ranges: Vec<(i32, i32)> =
        answer.assignments.iter().map(|a| (a.start_partition, a.end_partition)).collect();
    assert_eq!(ranges, [(0, 3), (4, 7), (8, 11)]);
    let answer = assignments(&basic, wide(i32::MAX, i32::MAX)).await;
    assert_eq!(answer.assignments[0].end_partition, i32::MAX - 1);
}

#[tokio::test(start_paused = true)]
async fn too_few_nodes_are_reported_with_numbers() {
    let coordinator = with_nodes(1..3);
    let answer = assignments(&coordinator, request(4, 3, &[])).await;
    assert_eq!(answer.status(), StatusCode::InternalError);
    assert!(answer.ret_msg.starts_with("There aren't enough shuffle servers: 2 of 3"), "{}", answer.ret_msg);
    let faulty = GetShuffleServerRequest {
        faulty_server_ids: vec!["10.0.0.1-21100-21200".into()],
        ..request(1, 2, &[])
    };
    assert_eq!(assignments(&coordinator, faulty).await.status(), StatusCode::InternalError);
}

#[tokio::test(start_paused = true)]
async fn server_count_is_between_replicas_and_maximum() {
    let coordinator = with_nodes(1..13);
    let used = |answer: &proto::GetShuffleAssignmentsResponse| {
        let ids = answer.assignments.iter().flat_map(|a| &a.server).map(|s| s.id.clone());
        ids.collect::<HashSet<_>>().len()
    };
    for (wanted, replicas, expected) in [(-1, 1, 9), (4, 1, 4), (100, 1, 9), (1, 3, 3)] {
        let request = GetShuffleServerRequest {
            assignment_shuffle_server_number: wanted,
            ..request(40, replicas, &[])
        };
        assert_eq!(used(&assignments(&coordinator, request).await), expected, "{wanted} {replicas}");
    }
}

#[tokio::test(start_paused = true)]
async fn second_assignment_goes_to_less_loaded_nodes() {
    let coordinator = with_nodes(1..3);
    let one_server =
        || GetShuffleServerRequest { assignment_shuffle_server_number: 1, ..request(10, 1, &[]) };
    let first = assignments(&coordinator, one_server()).await.assignments[0].server[0].id.clone();
    let second = assignments(&coordinator, one_server()).await.assignments[0].server[0].id.clone();
    assert_ne!(first, second);
}

#[tokio::test(start_paused = true)]
async fn silent_node_is_not_assigned_after_thirty_seconds() {
    let coordinator = with_nodes(1..3);
    advance(Duration::from_secs(20)).await;
    coordinator.report(node(2, true)).unwrap();
    advance(Duration::from_secs(11)).await;
    let list = coordinator.get_shuffle_server_list(Request::new(())).await.unwrap().into_inner();
    assert_eq!(list.servers.iter().map(|s| s.ip.as_str()).collect::<Vec<_>>(), ["10.0.0.2"]);
    advance(Duration::from_secs(20)).await;
    assert_eq!(coordinator.get_shuffle_server_num(Request::new(())).await.unwrap().into_inner().num, 0);
    let service = coordinator.check_service_available(Request::new(())).await.unwrap().into_inner();
    assert!(!service.available);
    assert_eq!(assignments(&coordinator, request(1, 1, &[])).await.status(), StatusCode::InternalError);
}

#[tokio::test(start_paused = true)]
async fn node_expiry_does_not_count_pauses() {
    uniffle_base::clock::testing::ticked(async {
        let coordinator = with_nodes(1..3);
        for _ in 0..3 {
            advance(Duration::from_secs(3600)).await;
            assert_eq!(
                coordinator.nodes().len(),
                2,
                "nodes were lost during a time without heartbeats of any node"
            );
            tokio::time::sleep(Duration::from_secs(9)).await;
        }
        assert_eq!(coordinator.nodes().len(), 2);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(coordinator.nodes().is_empty());
    })
    .await;
}

/// Waits until the only node has reported after the clock moved.
async fn reported(coordinator: &EmbeddedCoordinator) {
    for _ in 0..10_000 {
        if coordinator.cluster().nodes[0].silent_for == Duration::ZERO {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("the node does not report");
}

#[tokio::test(start_paused = true)]
async fn own_worker_stays_while_it_reports() {
    let coordinator = coordinator(EmbeddedConfig::default());
    let tasks = Tasks::new();
    let source = ReportSource::new(|| node(1, true));
    coordinator.keep_reporting(source, Duration::from_secs(10), &tasks);
    assert_eq!(coordinator.nodes().len(), 1, "the node must report before the first tick");
    for _ in 0..12 {
        advance(Duration::from_secs(10)).await;
        reported(&coordinator).await;
    }
    assert_eq!(coordinator.nodes().len(), 1);
    tasks.cancel();
    tasks.drained().await;
    advance(Duration::from_secs(31)).await;
    assert!(coordinator.nodes().is_empty());
}

/// A report sums over all partitions, so only the first one, at the start, is made on a runtime
/// thread.
#[tokio::test(start_paused = true)]
async fn own_report_is_made_off_the_runtime_threads() {
    let coordinator = coordinator(EmbeddedConfig::default());
    let (tasks, here) = (Tasks::new(), std::thread::current().id());
    let made_here = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&made_here);
    let source = ReportSource::new(move || {
        counted.fetch_add(usize::from(std::thread::current().id() == here), Ordering::Relaxed);
        node(1, true)
    });
    coordinator.keep_reporting(source, Duration::from_secs(10), &tasks);
    advance(Duration::from_secs(10)).await;
    reported(&coordinator).await;
    advance(Duration::from_secs(1)).await;
    coordinator.report_now();
    reported(&coordinator).await;
    assert_eq!(made_here.load(Ordering::Relaxed), 1);
    tasks.cancel();
    tasks.drained().await;
}

#[tokio::test(start_paused = true)]
async fn decommissioning_or_excluded_node_gets_no_partitions() {
    let coordinator = with_nodes(1..2);
    let mut leaving = node(1, true);
    leaving.status = ServerStatus::Decommissioning;
    coordinator.report(leaving).unwrap();
    assert_eq!(assignments(&coordinator, request(1, 1, &[])).await.status(), StatusCode::InternalError);
    coordinator.report(node(1, true)).unwrap();
    assert_eq!(assignments(&coordinator, request(1, 1, &[])).await.status(), StatusCode::Success);
    coordinator.set_excluded(HashSet::from(["10.0.0.1-21100-21200".to_owned()]));
    assert_eq!(assignments(&coordinator, request(1, 1, &[])).await.status(), StatusCode::InternalError);
}

#[tokio::test(start_paused = true)]
async fn both_conf_calls_return_the_storage_type() {
    let coordinator = coordinator(EmbeddedConfig::default());
    let old = coordinator.fetch_client_conf(Request::new(())).await.unwrap().into_inner();
    let new = coordinator.fetch_client_conf_v2(Request::new(Default::default())).await.unwrap().into_inner();
    assert_eq!(old, new);
    assert_eq!(old.status(), StatusCode::Success);
    assert_eq!(
        (old.client_conf[0].key.as_str(), old.client_conf[0].value.as_str()),
        ("rss.storage.type", "MEMORY_LOCALFILE")
    );
}

#[tokio::test(start_paused = true)]
async fn remote_storage_is_empty_or_sticky() {
    let fetch = async |coordinator: &EmbeddedCoordinator, app: &str| {
        let request = proto::FetchRemoteStorageRequest { app_id: app.to_owned() };
        coordinator.fetch_remote_storage(Request::new(request)).await.unwrap().into_inner()
    };
    let none = fetch(&coordinator(EmbeddedConfig::default()), "a").await;
    assert_eq!((none.status(), none.remote_storage), (StatusCode::Success, Some(Default::default())));

    let settings = |host: &str| (host.to_owned(), "k=v,w".to_owned());
    let config = EmbeddedConfig {
        remote_storage_paths: vec!["hdfs://nn1:8020/rss".to_owned(), "hdfs://nn2/rss".to_owned()],
        remote_storage_conf: ["nn1", "nn2"].map(settings).into(),
        ..Default::default()
    };
    let coordinator = coordinator(config);
    let mut paths = HashMap::new();
    for app in ["a", "b", "a", "b"] {
        let answer = fetch(&coordinator, app).await.remote_storage.unwrap();
        assert_eq!(answer.remote_storage_conf[0].value, "v,w");
        let path = paths.entry(app).or_insert_with(|| answer.path.clone());
        assert_eq!(*path, answer.path);
    }
    assert_ne!(paths["a"], paths["b"]);
    assert_eq!(fetch(&coordinator, "../x").await.status(), StatusCode::InvalidRequest);
}

#[tokio::test(start_paused = true)]
async fn known_and_unknown_apps_are_accepted_if_valid() {
    let coordinator = coordinator(EmbeddedConfig::default());
    let heartbeat = async |app: &str| {
        let request = proto::AppHeartBeatRequest { app_id: app.to_owned() };
        coordinator.app_heartbeat(Request::new(request)).await.unwrap().into_inner().status()
    };
    assert_eq!(heartbeat("a").await, StatusCode::Success);
    assert_eq!(heartbeat("a/b").await, StatusCode::InvalidRequest);
    let info = proto::ApplicationInfoRequest { app_id: "a".into(), user: "u".into(), ..Default::default() };
    let answer = coordinator.register_application_info(Request::new(info)).await.unwrap().into_inner();
    assert_eq!((answer.status(), answer.ret_msg.as_str()), (StatusCode::Success, ""));
    coordinator.sweep();
    assert_eq!(coordinator.0.apps.lock().users(), [("u".to_owned(), 1)].into());
    assert_eq!(coordinator.0.metrics.counts.apps_total.get(), 1);
    advance(Duration::from_secs(61)).await;
    coordinator.sweep();
    assert_eq!(coordinator.0.apps.lock().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn remaining_calls_respond_as_in_java() {
    let coordinator = coordinator(EmbeddedConfig::default());
    let report = coordinator.report_client_operation(Request::new(Default::default())).await.unwrap();
    assert_eq!(report.into_inner().status(), StatusCode::Success);
    let storage = coordinator.get_shuffle_data_storage_info(Request::new(())).await.unwrap_err();
    assert_eq!(storage.code(), Code::Unimplemented);
    let heartbeat = coordinator.heartbeat(Request::new(Default::default())).await.unwrap().into_inner();
    assert_eq!(heartbeat.status(), StatusCode::InvalidRequest);
}

/// Sends a heartbeat of the worker on host 3 from `peer`. Returns the status and text of the
/// answer.
async fn beat_from(coordinator: &EmbeddedCoordinator, peer: [u8; 4]) -> (StatusCode, String) {
    let mut request = Request::new(node(3, false).into_request());
    let remote_addr = Some((peer, 40_000).into());
    request.extensions_mut().insert(TcpConnectInfo { local_addr: None, remote_addr });
    let answer = coordinator.heartbeat(request).await.unwrap().into_inner();
    (answer.status(), answer.ret_msg)
}

#[tokio::test(start_paused = true)]
async fn workers_outside_the_allowed_networks_do_not_join() {
    // Both the caller's and the reported address must be local or allowed.
    let closed = with_nodes(1..2);
    for peer in [[127, 0, 0, 1], [10, 0, 0, 3]] {
        let (status, text) = beat_from(&closed, peer).await;
        assert_eq!(status, StatusCode::AccessDenied);
        assert!(text.contains("embedded_coordinator.worker_networks") && text.contains("10.0.0.3"), "{text}");
    }
    let unknown = closed.heartbeat(Request::new(node(3, false).into_request())).await.unwrap();
    assert_eq!(unknown.into_inner().status(), StatusCode::AccessDenied);
    assert_eq!(closed.nodes().len(), 1);
    let worker_networks = vec![Network::parse("10.0.0.0/24").unwrap()];
    let open = coordinator(EmbeddedConfig { worker_networks, ..EmbeddedConfig::default() });
    assert_eq!(beat_from(&open, [192, 0, 2, 1]).await.0, StatusCode::AccessDenied);
    assert_eq!(beat_from(&open, [10, 0, 0, 9]).await, (StatusCode::Success, String::new()));
    assert_eq!(open.nodes()[0].server.ip, "10.0.0.3");
    // The caller's address does not matter if the reported worker is the own one.
    open.report(node(3, false)).unwrap();
    assert_eq!(beat_from(&open, [192, 0, 2, 1]).await, (StatusCode::Success, String::new()));
}

proptest! {
    #[test]
    fn every_partition_is_covered_exactly_once(
        partitions in 1i32..300,
        per_range in 1i32..6,
        replicas in 1i32..4,
        nodes in 3u8..12,
        concurrency in -1i32..400,
        wanted in -1i32..12,
        round in any::<bool>(),
    ) {
        let config = EmbeddedConfig {
            node_order: if per_range == 1 { NodeOrder::PartitionBalance } else { NodeOrder::Basic },
            partition_selection: if round { PartitionSelection::Round } else { PartitionSelection::Continuous },
            ..Default::default()
        };
        let coordinator = coordinator(config);
        for host in 0..nodes {
            coordinator.report(node(host, true)).unwrap();
        }
        let request = GetShuffleServerRequest {
            partition_num_per_range: per_range,
            estimate_task_concurrency: concurrency,
            assignment_shuffle_server_number: wanted,
            ..request(partitions, replicas, &["GRPC"])
        };
        let (assignments, _) = coordinator.plan(&request).unwrap().assignments();
        let mut next = 0;
        for assignment in &assignments {
            prop_assert_eq!(assignment.start_partition, next);
            prop_assert_eq!(assignment.end_partition, next + per_range - 1);
            next = assignment.end_partition + 1;
            let ids: HashSet<&str> = assignment.server.iter().map(|s| s.id.as_str()).collect();
            prop_assert_eq!(i32::try_from(ids.len()).unwrap(), replicas);
            prop_assert_eq!(ids.len(), assignment.server.len());
        }
        prop_assert!((partitions..partitions + per_range).contains(&next));
    }
}
