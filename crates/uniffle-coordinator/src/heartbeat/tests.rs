//! Heartbeats over real sockets, to coordinators that answer, refuse, hang or start late.
//!
//! No sleeps: tests wait for a state on a watch channel. Short intervals make deadlines short.

use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use super::*;
use crate::NodeReport;
use crate::embedded::{EmbeddedConfig, EmbeddedCoordinator};
use crate::proto::ServerStatus;
use crate::proto::coordinator_server_server::CoordinatorServerServer;
use uniffle_base::budget::Heap;
use uniffle_base::schema::network::Network;
use uniffle_testkit::captured_log::CapturedLog;

/// Time limit of one wait. Only a failing test reaches it.
const WAIT_MAX: Duration = Duration::from_secs(20);
const INTERVAL: Duration = Duration::from_millis(100);

/// A bound socket that does not listen, which reserves the port. Connections are refused.
fn bound() -> (Socket, CoordinatorAddress) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address.to_string().parse().unwrap())
}

fn listening(socket: Socket) -> TcpListener {
    socket.listen(16).unwrap();
    socket.set_nonblocking(true).unwrap();
    TcpListener::from_std(socket.into()).unwrap()
}

/// Serves an embedded coordinator on `listener` until `tasks` are cancelled.
fn serve(listener: TcpListener, excluded: &[&str], tasks: &Tasks) -> EmbeddedCoordinator {
    let excluded_nodes = excluded.iter().map(|&id| id.to_owned()).collect();
    let worker_networks = vec![Network::parse("10.0.0.0/8").unwrap()];
    let config = EmbeddedConfig { excluded_nodes, worker_networks, ..Default::default() };
    let coordinator = EmbeddedCoordinator::new(config, &Heap::new(64 << 20), &Registry::new()).unwrap();
    let service = CoordinatorServerServer::new(coordinator.clone());
    let cancelled = tasks.cancelled();
    tasks.spawn("coordinator double", async move {
        // With a shutdown signal, because tonic's connections outlive a dropped server.
        let server = Server::builder().add_service(service);
        let ended = server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), cancelled);
        ended.await.unwrap();
    });
    coordinator
}

fn begin(coordinators: Vec<CoordinatorAddress>, source: ReportSource, tasks: &Tasks) -> Heartbeats {
    let config = HeartbeatConfig { coordinators, interval: INTERVAL };
    start(config, &source, tasks, &Registry::new()).unwrap()
}

fn a_node() -> ReportSource {
    ReportSource::new(|| NodeReport::new("10.0.0.1-21100".into(), [10, 0, 0, 1].into(), 21100))
}

async fn until(heartbeats: &Heartbeats, at: usize, holds: impl Fn(&Link) -> bool) -> Link {
    let mut link = heartbeats.watch(at).unwrap();
    let waited = timeout(WAIT_MAX, link.wait_for(|link| holds(link))).await;
    waited.expect("the link does not reach the state").unwrap().clone()
}

fn up(beats: u64) -> impl Fn(&Link) -> bool {
    move |link| matches!(link, Link::Up { beats: now } if *now >= beats)
}

fn down(link: &Link) -> bool {
    matches!(link, Link::Down { .. })
}

async fn end(tasks: Tasks) {
    tasks.cancel();
    timeout(WAIT_MAX, tasks.drained()).await.expect("tasks do not end after the cancel");
    assert_eq!(tasks.running(), 0);
}

/// Starts heartbeats whose interval and deadline are one hour.
fn begin_hourly(coordinators: Vec<CoordinatorAddress>, source: &ReportSource, tasks: &Tasks) -> Heartbeats {
    let config = HeartbeatConfig { coordinators, interval: Duration::from_secs(3600) };
    start(config, source, tasks, &Registry::new()).unwrap()
}

#[tokio::test]
async fn failing_coordinators_do_not_delay_others() {
    let (tasks, doubles) = (Tasks::new(), Tasks::new());
    let (silent_socket, silent) = bound();
    // The kernel accepts and no process reads, so the call hangs until its deadline.
    let _silent = listening(silent_socket);
    let (_refuses, refusing) = bound();
    let (good_socket, good) = bound();
    let coordinator = serve(listening(good_socket), &[], &doubles);
    let heartbeats = begin_hourly(vec![silent, refusing, good], &a_node(), &tasks);

    until(&heartbeats, 2, up(1)).await;
    heartbeats.beat_now();
    until(&heartbeats, 2, up(2)).await;
    assert_eq!(coordinator.nodes()[0].server.id, "10.0.0.1-21100");
    let Link::Down { reason } = until(&heartbeats, 1, down).await else { unreachable!() };
    assert!(reason.to_lowercase().contains("refused"), "{reason}");
    assert_eq!(heartbeats.links().next().unwrap().1, Link::Untried);
    end(tasks).await;
    end(doubles).await;
}

#[tokio::test]
async fn silent_coordinator_is_reported_down_once() {
    let log = CapturedLog::of_this_thread();
    let tasks = Tasks::new();
    let (socket, silent) = bound();
    let _silent = listening(socket);
    let heartbeats = begin(vec![silent.clone()], a_node(), &tasks);
    let mut link = heartbeats.watch(0).unwrap();
    for _ in 0..3 {
        timeout(WAIT_MAX, link.changed()).await.unwrap().unwrap();
        assert!(down(&link.borrow_and_update()));
    }
    end(tasks).await;
    let log = log.text();
    assert_eq!(log.matches("heartbeat failed").count(), 1, "{log}");
    assert!(log.contains(&silent.to_string()), "{log}");
}

#[tokio::test]
async fn late_coordinator_is_found_and_found_again() {
    let (tasks, doubles) = (Tasks::new(), Tasks::new());
    let (socket, address) = bound();
    let heartbeats = begin(vec![address], a_node(), &tasks);
    until(&heartbeats, 0, down).await;

    let again = socket.try_clone().unwrap();
    serve(listening(socket), &[], &doubles);
    until(&heartbeats, 0, up(2)).await;

    // The server stops. The second descriptor keeps the port and listens without serving.
    end(doubles).await;
    until(&heartbeats, 0, down).await;

    let doubles = Tasks::new();
    let back = serve(listening(again), &[], &doubles);
    until(&heartbeats, 0, up(2)).await;
    assert_eq!(back.nodes().len(), 1);
    end(tasks).await;
    end(doubles).await;
}

#[tokio::test]
async fn refusing_coordinator_is_down_with_its_text() {
    let (tasks, doubles) = (Tasks::new(), Tasks::new());
    let (socket, address) = bound();
    serve(listening(socket), &[], &doubles);
    let nameless = ReportSource::new(|| NodeReport::new(String::new(), [10, 0, 0, 1].into(), 21100));
    let heartbeats = begin(vec![address], nameless, &tasks);
    let Link::Down { reason } = until(&heartbeats, 0, down).await else { unreachable!() };
    assert!(reason.contains("status 9") && reason.contains("id must have"), "{reason}");
    end(tasks).await;
    end(doubles).await;
}

#[tokio::test]
async fn change_triggers_an_immediate_heartbeat() {
    let (tasks, doubles) = (Tasks::new(), Tasks::new());
    let (socket, address) = bound();
    let coordinator = serve(listening(socket), &[], &doubles);
    let (set_status, status) = watch::channel(ServerStatus::Active);
    let source = ReportSource::new(move || {
        let mut report = NodeReport::new("10.0.0.1-21100".into(), [10, 0, 0, 1].into(), 21100);
        report.status = *status.borrow();
        report
    });
    // Only the nudge can cause the second heartbeat.
    let heartbeats = begin_hourly(vec![address], &source, &tasks);
    until(&heartbeats, 0, up(1)).await;
    set_status.send_replace(ServerStatus::Decommissioning);
    heartbeats.beat_now();
    until(&heartbeats, 0, up(2)).await;
    assert_eq!(coordinator.nodes()[0].status, ServerStatus::Decommissioning);
    end(tasks).await;
    end(doubles).await;
}

/// A report sums over all partitions, so it is not made on a runtime thread.
#[tokio::test]
async fn report_is_made_off_the_runtime_threads() {
    let (tasks, doubles) = (Tasks::new(), Tasks::new());
    let (socket, address) = bound();
    serve(listening(socket), &[], &doubles);
    let (made_on, made) = watch::channel(None);
    let source = ReportSource::new(move || {
        made_on.send_replace(Some(std::thread::current().id()));
        NodeReport::new("10.0.0.1-21100".into(), [10, 0, 0, 1].into(), 21100)
    });
    let heartbeats = begin_hourly(vec![address], &source, &tasks);
    until(&heartbeats, 0, up(1)).await;
    assert_ne!(*made.borrow(), Some(std::thread::current().id()));
    end(tasks).await;
    end(doubles).await;
}

#[tokio::test]
async fn heartbeats_continue_without_handle_until_cancelled() {
    let (tasks, doubles) = (Tasks::new(), Tasks::new());
    let (socket, address) = bound();
    serve(listening(socket), &[], &doubles);
    let heartbeats = begin(vec![address], a_node(), &tasks);
    let mut link = heartbeats.watch(0).unwrap();
    drop(heartbeats);
    timeout(WAIT_MAX, link.wait_for(up(3))).await.unwrap().unwrap();
    end(tasks).await;
    assert!(link.has_changed().is_err());
    end(doubles).await;
}

#[test]
fn addresses_are_host_and_port() {
    for good in ["localhost:21000", " 10.0.0.1:1 ", "[::1]:65535", "a-b.c:80"] {
        assert!(good.parse::<CoordinatorAddress>().is_ok(), "{good}");
    }
    for bad in [
        "",
        "localhost",
        ":21000",
        "host:",
        "host:0",
        "host:65536",
        "http://host:1",
        "a@b:1",
        "a b:1",
        "h:1/x",
    ] {
        assert!(bad.parse::<CoordinatorAddress>().is_err(), "{bad}");
    }
}

#[test]
fn causes_are_reported_and_long_texts_truncated() {
    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);
    assert_eq!(describe(&Outer(std::io::Error::other("inner"))), "outer: inner");
    assert_eq!(short(&"é".repeat(1000)).len(), 300);
}
