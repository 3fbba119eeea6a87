//! Workers and coordinators together, in this process and over real sockets. Every wait has a
//! deadline.
//!
//! The clusters are two workers with one coordinator, three with two, and one whose coordinators
//! fail.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::types::{PartitionId, TaskAttemptId};
use uniffle_client::{Application, ClientOptions, Cluster, TaskFilter};
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_testkit::config::ConfigLines;
use uniffle_testkit::coordinator::{CoordinatorDouble, HeartbeatReply};
use uniffle_testkit::ports::free_port;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uniffle_worker::proto::shuffle_server_internal_client::ShuffleServerInternalClient;
use uniffle_worker::proto::{self, GetShuffleServerRequest, StatusCode};
use uniffle_worker::server::Worker;

const WAIT_MAX: Duration = Duration::from_secs(20);

/// A heartbeat interval so short that tests may wait for the next heartbeat.
const OFTEN: &str = "heartbeat_interval_seconds = \"100ms\"";

/// Starts a worker on its own ports and directory.
async fn worker(directory: &Path, top: &str, tables: &str) -> Worker {
    let top = format!("{OFTEN}\n{top}");
    let local = "healthy_check_min_disks = 1";
    ConfigLines { top: &top, local, tables, ..ConfigLines::default() }.start(&[directory.join("data")]).await
}

type Coordinator = CoordinatorServerClient<tonic::transport::Channel>;

async fn coordinator_of(worker: &Worker) -> Coordinator {
    CoordinatorServerClient::connect(format!("http://{}", worker.addresses().grpc)).await.unwrap()
}

async fn node_ids(coordinator: &mut Coordinator) -> HashSet<String> {
    let list = coordinator.get_shuffle_server_list(()).await.unwrap().into_inner();
    list.servers.into_iter().map(|server| server.id).collect()
}

async fn until_nodes(coordinator: &mut Coordinator, count: usize) -> HashSet<String> {
    let start = Instant::now();
    loop {
        let ids = node_ids(coordinator).await;
        if ids.len() == count {
            return ids;
        }
        assert!(start.elapsed() < WAIT_MAX, "the coordinator does not list {count} nodes: {ids:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn assign(
    coordinator: &mut Coordinator,
    replicas: i32,
    faulty: &[&str],
) -> proto::GetShuffleAssignmentsResponse {
    let request = GetShuffleServerRequest {
        application_id: "app".into(),
        partition_num: 10,
        partition_num_per_range: 1,
        data_replica: replicas,
        require_tags: vec!["ss_v5".into(), "GRPC".into()],
        assignment_shuffle_server_number: -1,
        faulty_server_ids: faulty.iter().map(|&id| id.to_owned()).collect(),
        ..Default::default()
    };
    coordinator.get_shuffle_assignments(request).await.unwrap().into_inner()
}

fn servers(answer: &proto::GetShuffleAssignmentsResponse) -> HashSet<String> {
    answer.assignments.iter().flat_map(|it| &it.server).map(|server| server.id.clone()).collect()
}

#[tokio::test]
async fn worker_coordinates_another_worker() {
    let (dir_a, dir_b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let embedded = "[embedded_coordinator]\nnode_timeout_sec = 2\nremote_storage_path = [\"hdfs://nn:8020/rss\"]\n\
                    remote_storage_conf = { nn = \"a=b,c\" }\nclient_conf = { \"rss.x.y\" = 5 }\n";
    let a = worker(dir_a.path(), "", embedded).await;
    let quorum = format!("coordinator_quorum = [\"{}\"]", a.addresses().grpc);
    let b = worker(dir_b.path(), &quorum, "").await;
    let mut coordinator = coordinator_of(&a).await;
    let ids = until_nodes(&mut coordinator, 2).await;
    let id_of = |worker: &Worker| {
        let addresses = worker.addresses();
        let id = format!("127.0.0.1-{}", addresses.grpc.port());
        addresses.tcp.map_or(id.clone(), |urpc| format!("{id}-{}", urpc.port()))
    };
    assert_eq!(ids, HashSet::from([id_of(&a), id_of(&b)]));

    let spread = assign(&mut coordinator, 1, &[]).await;
    assert_eq!((servers(&spread), spread.assignments.len()), (ids.clone(), 10));
    let replicated = assign(&mut coordinator, 2, &[]).await;
    assert!(
        replicated.assignments.iter().all(|it| it.server.len() == 2 && it.server[0].id != it.server[1].id)
    );
    let without_b = assign(&mut coordinator, 1, &[&id_of(&b)]).await;
    assert_eq!(servers(&without_b), HashSet::from([id_of(&a)]));
    assert_eq!(assign(&mut coordinator, 3, &[]).await.status(), StatusCode::InternalError);

    let conf = coordinator.fetch_client_conf(()).await.unwrap().into_inner().client_conf;
    let conf: HashMap<_, _> = conf.into_iter().map(|item| (item.key, item.value)).collect();
    assert_eq!((conf["rss.storage.type"].as_str(), conf["rss.x.y"].as_str()), ("MEMORY_LOCALFILE", "5"));
    let request = proto::FetchRemoteStorageRequest { app_id: "app".into() };
    let storage = coordinator.fetch_remote_storage(request).await.unwrap().into_inner();
    let storage = storage.remote_storage.expect("a remote storage is configured");
    assert_eq!(storage.path, "hdfs://nn:8020/rss");
    assert_eq!(storage.remote_storage_conf[0].value, "b,c");

    // A decommissioned worker gets no new assignments, and a stopped one is removed.
    let address = format!("http://{}", b.addresses().grpc);
    let mut internal = ShuffleServerInternalClient::connect(address).await.unwrap();
    internal.decommission(proto::DecommissionRequest::default()).await.unwrap();
    let start = Instant::now();
    while servers(&assign(&mut coordinator, 1, &[]).await).len() > 1 {
        assert!(start.elapsed() < WAIT_MAX, "a worker that is decommissioned is assigned");
        sleep(Duration::from_millis(20)).await;
    }
    drop(internal);
    assert_eq!(b.stop().await, 0);
    assert_eq!(until_nodes(&mut coordinator, 1).await, HashSet::from([id_of(&a)]));
    drop(coordinator);
    assert_eq!(a.stop().await, 0);
}

/// Regression test: calls that arrived while the worker opened its listeners found no node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_assignment_of_a_start_has_the_own_worker() {
    for _ in 0..5 {
        let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
        let mut first = JoinSet::new();
        first.spawn(async move {
            let start = Instant::now();
            loop {
                match CoordinatorServerClient::connect(format!("http://127.0.0.1:{port}")).await {
                    Ok(mut coordinator) => return assign(&mut coordinator, 1, &[]).await,
                    Err(error) => assert!(start.elapsed() < WAIT_MAX, "{error}"),
                }
                sleep(Duration::from_millis(1)).await;
            }
        });
        let worker = worker(directory.path(), &format!("grpc_port = {port}"), "").await;
        let answer = first.join_next().await.unwrap().unwrap();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        assert_eq!(worker.stop().await, 0);
    }
}

/// Otherwise a coordinator that has just started would assign everything to its own worker.
#[tokio::test]
async fn assignments_wait_for_other_workers() {
    let (dir_a, dir_b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tables = "[embedded_coordinator]\nnode_timeout_sec = 600\nworker_networks = [\"127.0.0.0/8\"]\n";
    // Workers have an interval of the heartbeats to join, here longer than the test.
    let top = "heartbeat_interval_seconds = 300";
    let a = ConfigLines { top, local: "healthy_check_min_disks = 1", tables, ..ConfigLines::default() };
    let a = a.start(&[dir_a.path().join("data")]).await;
    let (mut coordinator, mut asking) = (coordinator_of(&a).await, coordinator_of(&a).await);
    let quorum = format!("coordinator_quorum = [\"{}\"]", a.addresses().grpc);
    let joining = async {
        let b = worker(dir_b.path(), &quorum, "").await;
        until_nodes(&mut coordinator, 2).await;
        b
    };
    let b = tokio::select! {
        biased;
        early = assign(&mut asking, 1, &[]) => panic!("assigned to {:?} before other workers joined", servers(&early)),
        b = joining => b,
    };
    drop((coordinator, asking));
    assert_eq!((a.stop().await, b.stop().await), (0, 0));
}

/// A worker that joins receives application data and HTTP requests.
#[tokio::test]
async fn worker_joins_from_allowed_networks_only() {
    let forged = proto::ShuffleServerHeartBeatRequest {
        server_id: Some(proto::ShuffleServerId {
            id: "10.6.6.6-21100".to_owned(),
            ip: "10.6.6.6".to_owned(),
            port: 21100,
            ..Default::default()
        }),
        ..Default::default()
    };
    let here = proto::ShuffleServerId { ip: "127.0.0.2".to_owned(), ..forged.server_id.clone().unwrap() };
    for (networks, status) in [("[]", StatusCode::AccessDenied), ("[\"10.6.0.0/16\"]", StatusCode::Success)] {
        let directory = tempfile::tempdir().unwrap();
        let tables = format!("[embedded_coordinator]\nworker_networks = {networks}\n");
        let worker = worker(directory.path(), "", &tables).await;
        let mut coordinator = coordinator_of(&worker).await;
        let answer = coordinator.heartbeat(forged.clone()).await.unwrap().into_inner();
        assert_eq!(answer.status(), status, "{}", answer.ret_msg);
        let names_the_key = answer.ret_msg.contains("embedded_coordinator.worker_networks");
        assert_eq!(names_the_key, status == StatusCode::AccessDenied, "{}", answer.ret_msg);
        let of_this_machine =
            proto::ShuffleServerHeartBeatRequest { server_id: Some(here.clone()), ..Default::default() };
        let answer = coordinator.heartbeat(of_this_machine).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        until_nodes(&mut coordinator, 2).await;
        drop(coordinator);
        assert_eq!(worker.stop().await, 0);
    }
}

#[tokio::test]
async fn cluster_continues_after_a_coordinator_dies() {
    let directories: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let ports = [free_port(), free_port()];
    let members = ports.map(|port| format!("127.0.0.1:{port}"));
    let quorum = format!("coordinator_quorum = {members:?}");
    let embedded = "[embedded_coordinator]\nenable = true\nnode_timeout_sec = 2\n";
    let top = ports.map(|port| format!("grpc_port = {port}\n{quorum}"));
    let a = worker(directories[0].path(), &top[0], embedded).await;
    let b = worker(directories[1].path(), &top[1], embedded).await;
    let c = worker(directories[2].path(), &quorum, "").await;
    let (mut of_a, mut of_b) = (coordinator_of(&a).await, coordinator_of(&b).await);
    let ids = until_nodes(&mut of_a, 3).await;
    assert_eq!(until_nodes(&mut of_b, 3).await, ids, "each worker must report to both coordinators");
    assert_eq!(servers(&assign(&mut of_b, 1, &[]).await), ids);

    let options = ClientOptions::default().with(|options| options.rpc_timeout = Duration::from_secs(5));
    let cluster = Cluster::new(&members, options).unwrap();
    let application = cluster.application("app-1").await.unwrap();
    write_and_read(&application, ShuffleId(0)).await;
    // The coordinator of `b` knows the application's data on all workers.
    let start = Instant::now();
    let view = loop {
        let view = cluster_view(&b).await;
        if view["apps"][0]["total_bytes"].as_u64() == Some(4 * 10_000) {
            break view;
        }
        assert!(start.elapsed() < WAIT_MAX, "{view}");
        sleep(Duration::from_millis(100)).await;
    };
    let reported: HashSet<String> =
        view["nodes"].as_array().unwrap().iter().map(|node| text(&node["id"])).collect();
    assert_eq!((reported, text(&view["apps"][0]["app"])), (ids, "app-1".to_owned()));
    for node in view["nodes"].as_array().unwrap() {
        assert_eq!(
            (text(&node["state"]), node["disks"].as_array().map(Vec::len)),
            ("active".to_owned(), Some(1))
        );
        assert!(node["available_bytes"].as_u64().is_some_and(|free| free > 30 << 20), "{node}");
    }
    assert_explained(&b, &c, &view).await;
    let status =
        reqwest::get(format!("http://{}/api/v1/cluster", c.addresses().http)).await.unwrap().status();
    assert_eq!(status, 404, "a worker without a coordinator must return 404");

    drop(of_a);
    assert_eq!(a.stop().await, 0);
    assert_eq!(until_nodes(&mut of_b, 2).await.len(), 2);
    write_and_read(&application, ShuffleId(1)).await;
    assert_eq!(
        cluster_view(&b).await["lost"].as_array().map(Vec::len),
        Some(0),
        "a worker that stopped cleanly counts as lost"
    );
    // One of the servers has stopped.
    drop(application.unregister().await);
    drop((of_b, cluster));
    assert_eq!(c.stop().await, 0);
    assert_eq!(b.stop().await, 0);
}

/// Writes and reads a shuffle of four partitions with a block each.
async fn write_and_read(application: &Application, id: ShuffleId) {
    let shuffle = application.register_shuffle(id, 4).await.unwrap();
    let mut writer = shuffle.writer(TaskAttemptId(0)).unwrap();
    for partition in 0..4 {
        writer.write(PartitionId(partition), vec![7_u8; 10_000]).await.unwrap();
    }
    writer.finish().await.unwrap();
    for partition in 0..4 {
        let mut reader = shuffle.reader(PartitionId(partition), &TaskFilter::all()).await.unwrap();
        let block = reader.next().await.unwrap().unwrap();
        assert_eq!(block.data, vec![7_u8; 10_000]);
        assert!(reader.next().await.unwrap().is_none());
    }
}

/// A worker with a coordinator shows the whole application. One without says that it cannot.
async fn assert_explained(with: &Worker, without: &Worker, view: &Value) {
    let it = api(with, "cluster/apps/app-1/explain").await;
    assert_eq!(
        (&it["app"], &it["presence"], &it["unanswered"]),
        (&"app-1".into(), &"known".into(), &json!([]))
    );
    assert_eq!(
        (&it["bytes"]["received"], &it["shuffles"]),
        (&view["apps"][0]["total_bytes"], &1.into()),
        "{it}"
    );
    let names = |list: &Value| list.as_array().unwrap().iter().map(text).collect::<HashSet<_>>();
    let workers = it["workers"].as_array().unwrap().iter().map(|worker| worker["worker"].clone());
    let (reported, known) = (names(&workers.collect()), names(&view["apps"][0]["nodes"]));
    assert!(reported.is_superset(&known) && !known.is_empty(), "{reported:?}, {known:?}");
    let unknown = api(with, "cluster/apps/..%2Fx/explain").await;
    assert_eq!(unknown["error"], "no worker knows this application (any more)");
    let alone = api(without, "cluster/apps/app-1/explain").await;
    assert!(text(&alone["error"]).starts_with("this worker has no coordinator"), "{alone}");
}

async fn cluster_view(worker: &Worker) -> Value {
    api(worker, "cluster").await
}

async fn api(worker: &Worker, path: &str) -> Value {
    let answer = reqwest::get(format!("http://{}/api/v1/{path}", worker.addresses().http)).await;
    serde_json::from_str(&answer.unwrap().text().await.unwrap()).unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Binds a free port.
async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test]
async fn failing_coordinators_do_not_delay_the_worker() {
    let (dir_a, dir_b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // A half-open coordinator that never reads, one that refuses connections, and one that starts
    // late.
    let (_half_open, silent) = listener().await;
    let (closed, refusing) = listener().await;
    drop(closed);
    // Outside the ephemeral range, so that no connection takes it before the worker below listens.
    let late = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let quorum = format!("coordinator_quorum = [\"{silent}\", \"{refusing}\", \"{late}\"]");
    let b = worker(dir_b.path(), &quorum, "").await;
    // The worker serves although no coordinator ever responded.
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", b.addresses().grpc)).unwrap();
    channel.connect().await.expect("the gRPC listener is open");
    let a = ConfigLines {
        store_type: "MEMORY",
        top: &format!("grpc_port = {}", late.port()),
        ..ConfigLines::default()
    }
    .start(&[dir_a.path().join("data")])
    .await;
    let mut coordinator = coordinator_of(&a).await;
    until_nodes(&mut coordinator, 2).await;
    drop(coordinator);
    assert_eq!(b.stop().await, 0);
    assert_eq!(a.stop().await, 0);
}

#[tokio::test]
async fn failed_heartbeats_are_retried_per_coordinator() {
    let mut good = CoordinatorDouble::start(HeartbeatReply::Succeed).await;
    let mut refusing = CoordinatorDouble::start(HeartbeatReply::Refuse(StatusCode::AccessDenied)).await;
    let mut failing = CoordinatorDouble::start(HeartbeatReply::Fail).await;
    // Slower than the interval, which is the deadline of a heartbeat.
    let mut slow = CoordinatorDouble::start(HeartbeatReply::Delay(Duration::from_secs(3600))).await;
    let doubles = [&good, &refusing, &failing, &slow].map(|double| format!("\"{}\"", double.address));
    let directory = tempfile::tempdir().unwrap();
    let worker =
        worker(directory.path(), &format!("coordinator_quorum = [{}]", doubles.join(", ")), "").await;
    let accepting = || {
        let families = worker.registry().gather();
        let family = families.iter().find(|family| family.name() == "coordinators_up").unwrap();
        family.get_metric()[0].get_gauge().get_value()
    };
    for double in [&mut good, &mut refusing, &mut failing, &mut slow] {
        double.beats(5).await;
    }
    good.beats(1).await;
    assert_eq!(accepting(), 1.0);
    for double in [&refusing, &failing, &slow] {
        double.behave(HeartbeatReply::Succeed);
    }
    let start = Instant::now();
    while accepting() < 4.0 {
        assert!(start.elapsed() < WAIT_MAX, "only {} of 4 coordinators are up", accepting());
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(worker.stop().await, 0);
    for double in [good, refusing, failing, slow] {
        double.stop().await;
    }
}

#[tokio::test]
async fn end_of_last_app_triggers_heartbeat() {
    let mut coordinator = CoordinatorDouble::start(HeartbeatReply::Succeed).await;
    let directory = tempfile::tempdir().unwrap();
    // The next regular heartbeat is an hour away.
    let top =
        format!("coordinator_quorum = [\"{}\"]\nheartbeat_interval_seconds = 3600", coordinator.address);
    let data = [directory.path().join("data")];
    let local = "healthy_check_min_disks = 1";
    let worker = ConfigLines { top: &top, local, ..ConfigLines::default() }.start(&data).await;
    let first = coordinator.heartbeat(|_| true).await;
    assert_eq!(first.server_id.as_ref().unwrap().netty_port, netty_port(&worker));
    assert_eq!(first.display_metrics["app_num_with_node"], "0");
    let client = ShuffleClient::connect(worker.addresses().grpc).await.unwrap();
    for app in ["app-1", "app-2"] {
        let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(1));
        client.register(&key, &[(0, 9)]).await.unwrap();
    }
    let mut internal =
        ShuffleServerInternalClient::connect(format!("http://{}", worker.addresses().grpc)).await.unwrap();
    internal.decommission(proto::DecommissionRequest::default()).await.unwrap();
    let reported = coordinator.heartbeat(|it| it.status() == proto::ServerStatus::Decommissioning).await;
    let shown = |name: &str| reported.display_metrics[name].as_str();
    assert_eq!((shown("app_num_with_node"), shown("partition_num_with_node")), ("2", "20"));
    assert_eq!((shown("event_queue_size"), shown("in_flush_buffer_size")), ("0", "0"));
    assert_eq!(shown("storage_used_bytes"), "0");
    for app in ["app-1", "app-2"] {
        client.unregister_app(app).await.unwrap();
    }
    coordinator.heartbeat(|it| it.application_info.is_empty()).await;
    drop((client, internal));
    assert_eq!(worker.stop().await, 0);
    coordinator.stop().await;
}

/// Returns the TCP port of `worker` as its heartbeats report it.
fn netty_port(worker: &Worker) -> i32 {
    worker.addresses().tcp.map_or(-1, |address| i32::from(address.port()))
}
