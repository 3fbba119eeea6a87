//! gRPC connections: timeouts of prefaces and requests, and eviction of the longest idle one.
//!
//! Cancelled and stalled calls do not end their connection. The last test is about the stage
//! attempt of sends.

use std::net::SocketAddr;
use std::time::Duration;

use futures::channel::mpsc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use uniffle_client::send::{self, SendForm};

use super::blocks::{batch, block};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::raw;

/// The preface and an empty SETTINGS frame (RFC 9113 §3.4, §6.5).
const BEGINNING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// A PING frame.
const PING: &[u8] = b"\0\0\x08\x06\0\0\0\0\0ping-pin";
/// Delay that a busy machine may add to a deadline.
const WAIT_MAX: Duration = Duration::from_secs(30);

async fn connect_and_send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// Expects the worker to close the connection.
async fn expect_close(mut stream: TcpStream, what: &str) {
    let mut rest = Vec::new();
    let ended = timeout(WAIT_MAX, stream.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "the connection is still open: {what}");
}

/// Sends a PING and expects its response.
async fn expect_pong(stream: &mut TcpStream) {
    stream.write_all(PING).await.unwrap();
    let mut seen = Vec::new();
    let pong = async {
        while !seen.windows(8).any(|bytes| bytes == b"ping-pin") {
            assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "the connection was closed");
        }
    };
    timeout(WAIT_MAX, pong).await.expect("the ping was not answered");
}

/// Returns an HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_of_cancelled_calls_does_not_end_the_connection() {
    const CALLS: u32 = 5000;
    let fixture = WorkerFixture::start().await;
    let path = b"/rss.common.ShuffleServer/appHeartbeat";
    // POST and http of the static table, then a literal that is not indexed (RFC 7541 section
    // 6.2.2).
    let head = [&[0x83, 0x86, 0x04, u8::try_from(path.len()).unwrap()], &path[..]].concat();
    let call = |stream: u32| [frame(1, 4, stream, &head), frame(3, 0, stream, &8u32.to_be_bytes())].concat();
    let mut burst = BEGINNING.to_vec();
    burst.extend((0..CALLS).flat_map(|number| call(2 * number + 1)));
    let mut stream = connect_and_send(fixture.worker.addresses().grpc, &burst).await;
    expect_pong(&mut stream).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_without_preface_is_closed_and_others_may_idle() {
    let setup = Setup { tables: "[grpc]\nopening_timeout_sec = 1", ..Setup::default() };
    let fixture = WorkerFixture::with(setup).await;
    let address = fixture.worker.addresses().grpc;
    let mut idle = connect_and_send(address, BEGINNING).await;
    expect_pong(&mut idle).await;
    let half = BEGINNING.len() - 4;
    for (what, opening) in [
        ("silent", &BEGINNING[..0]),
        ("a byte of the preface", &BEGINNING[..1]),
        ("the preface alone", &BEGINNING[..24]),
        ("half of SETTINGS", &BEGINNING[..half]),
    ] {
        expect_close(connect_and_send(address, opening).await, what).await;
    }
    // Opened before the closed ones.
    expect_pong(&mut idle).await;
    drop(idle);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_prefaces_do_not_block_new_connections() {
    let setup =
        Setup { tables: "[grpc]\nmax_connections = 4\nopening_timeout_sec = 3600", ..Setup::default() };
    let fixture = WorkerFixture::with(setup).await;
    let address = fixture.worker.addresses().grpc;
    let mut idle = connect_and_send(address, BEGINNING).await;
    expect_pong(&mut idle).await;
    let mut halves = Vec::new();
    for _ in 0..20 {
        halves.push(connect_and_send(address, b"P").await);
    }
    let path = "/rss.common.ShuffleServer/appHeartbeat";
    let newcomer = raw::connect(address).await;
    let answer = raw::call(&newcomer, path, vec![raw::prefixed(&[])], raw::End::Closed).await;
    assert_eq!(answer.grpc_status, Some(0));
    // Connections that sent their preface remain: the fixture's client, this one and the new one.
    expect_pong(&mut idle).await;
    for half in halves.drain(..10) {
        expect_close(half, "a half-sent preface beyond the limit").await;
    }
    assert!(fixture.metric("grpc_refused_connection_total") >= 10.0);
    drop((halves, newcomer, idle));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn longest_idle_connection_is_evicted() {
    let setup = Setup { tables: "[grpc]\nmax_connections = 3", ..Setup::default() };
    let fixture = WorkerFixture::with(setup).await;
    let address = fixture.worker.addresses().grpc;
    let (mut first, mut second) =
        (connect_and_send(address, BEGINNING).await, connect_and_send(address, BEGINNING).await);
    expect_pong(&mut first).await;
    expect_pong(&mut second).await;
    // After these calls of the fixture's client and `first`, `second` is idle longest.
    fixture.client.register(&key("app-1", 1), &[(0, 0)]).await.unwrap();
    expect_pong(&mut first).await;
    let mut third = connect_and_send(address, BEGINNING).await;
    expect_pong(&mut third).await;
    expect_close(second, "the idlest").await;
    expect_pong(&mut first).await;
    assert_eq!(fixture.metric("grpc_refused_connection_total"), 1.0);
    drop((first, third));
    eventually("places are given back", || match fixture.metric("grpc_server_connection_number") {
        1.0 => Ok(()),
        open => Err(format!("{open} connections")),
    })
    .await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_connection_ends_its_call() {
    let fixture =
        WorkerFixture::with(Setup { tables: "[grpc]\nmax_connections = 2", ..Setup::default() }).await;
    let address = fixture.worker.addresses().grpc;
    fixture.client.register(&key("app-1", 1), &[(0, 0)]).await.unwrap();
    let path = "/rss.common.ShuffleServer/appHeartbeat";
    let (pieces, body) = mpsc::unbounded();
    let heartbeat = raw::prefixed(&[0x0A, 5, b'a', b'p', b'p', b'-', b'1']);
    pieces.unbounded_send(heartbeat.slice(..8)).unwrap();
    // The heartbeat call never ended, so its connection is the least active of the two.
    let leaving = raw::connect(address).await;
    let others = async {
        eventually("the call has begun", || match fixture.metric("grpc_open") {
            1.0 => Ok(()),
            open => Err(format!("{open} calls")),
        })
        .await;
        let newcomer = raw::connect(address).await;
        let answer = raw::call(&newcomer, path, vec![heartbeat.clone()], raw::End::Closed).await;
        assert_eq!(answer.grpc_status, Some(0));
        assert_eq!(fixture.metric("grpc_refused_connection_total"), 1.0);
        pieces.unbounded_send(heartbeat.slice(8..)).unwrap();
        pieces.close_channel();
        newcomer
    };
    let (answer, newcomer) = tokio::join!(raw::call_streamed(&leaving, path, body), others);
    assert_eq!(answer.grpc_status, Some(0), "{}", answer.grpc_message);
    eventually("the connection is closed", || match fixture.metric("grpc_server_connection_number") {
        2.0 => Ok(()),
        open => Err(format!("{open} connections")),
    })
    .await;
    // The client continues on another connection.
    let again = raw::call(&leaving, path, vec![heartbeat.clone()], raw::End::Closed).await;
    assert_eq!(again.grpc_status, Some(0));
    drop((leaving, newcomer));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_request_is_aborted_and_its_connection_continues() {
    let setup = Setup { tables: "[grpc]\nframe_timeout_sec = 1", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let parts = batch(0, &[block(0, 1, 0, 1 << 20)]);
    let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &parts));
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let half = message.slice(..message.len() / 2);
    let answer = raw::call(&channel, raw::SEND, vec![half], raw::End::Stalled).await;
    assert_eq!(answer.grpc_status, Some(4), "expected DEADLINE_EXCEEDED: {}", answer.grpc_message);
    assert!(answer.grpc_message.contains("grpc.frame_timeout_sec"), "{}", answer.grpc_message);
    fixture.assert_memory_is_free().await;
    let heartbeat = vec![raw::prefixed(&[])];
    let path = "/rss.common.ShuffleServer/appHeartbeat";
    assert_eq!(raw::call(&channel, path, heartbeat, raw::End::Closed).await.grpc_status, Some(0));
    drop(channel);
    fixture.finish().await;
}

/// Clients since 0.10 send Spark's number, which starts at 0 again when a later job recomputes the
/// shuffle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lower_stage_attempt_is_accepted() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let mut all = Vec::new();
    for (sequence, attempt) in [(0, 3), (1, 0), (2, 1)] {
        let block = block(0, 1, sequence, 1000);
        let parts = batch(0, std::slice::from_ref(&block));
        let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
        let mut request = send::request(&key, ticket, SendForm::Classic, &parts);
        request.stage_attempt_number = attempt;
        let answer = raw::call(&channel, raw::SEND, vec![raw::framed(&request)], raw::End::Closed).await;
        assert_eq!(answer.send_status(), (uniffle_worker::proto::StatusCode::Success, "OK".to_owned()));
        all.push(block);
    }
    fixture.assert_reads(&key, 0, &all).await;
    drop(channel);
    fixture.finish().await;
}
