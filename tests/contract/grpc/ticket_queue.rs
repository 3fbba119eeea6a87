//! Backpressure: ticket requests wait for memory up to a timeout, and block no other calls.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use uniffle_client::send::{SendForm, require_size};
use uniffle_wire::types::{PartitionId, ShuffleKey, TicketId};
use uniffle_worker::proto::{RequireBufferResponse, StatusCode};

use super::blocks::{batch, block};
use super::fixture::{Setup, WorkerFixture, eventually, key, require};

/// Longer than any test.
const PATIENT: &str = "buffer_ticket_wait_sec = 30";
/// A ticket beside which none of 3 MiB fits.
const MOST: i32 = 13 << 20;

async fn fixture(memory: &str, tables: &str) -> (WorkerFixture, ShuffleKey, ShuffleKey) {
    let setup = Setup { capacity: "16MiB", memory, tables, ..Setup::default() };
    let fixture = WorkerFixture::with(setup).await;
    let (holder, other) = (key("app-1", 1), key("app-2", 1));
    for key in [&holder, &other] {
        fixture.client.register(key, &[(0, 1)]).await.unwrap();
    }
    (fixture, holder, other)
}

/// Calls in progress. Dropping the set cancels them.
type Asked = JoinSet<RequireBufferResponse>;

/// Requests tickets on the connection of all other calls.
fn ask(fixture: &WorkerFixture, key: &ShuffleKey, bytes: i32, count: usize) -> Asked {
    let mut asked = JoinSet::new();
    for _ in 0..count {
        let (client, request) = (fixture.client.clone(), require(key, bytes));
        asked.spawn(async move { client.require_raw(request).await.unwrap() });
    }
    asked
}

async fn next(asked: &mut Asked) -> RequireBufferResponse {
    asked.join_next().await.unwrap().unwrap()
}

async fn wait_in_line(fixture: &WorkerFixture, count: usize) {
    eventually("requests wait in line", || match fixture.worker.service().ingest.tickets_in_line() {
        waiting if waiting == count => Ok(()),
        waiting => Err(format!("{waiting} of {count}")),
    })
    .await;
}

fn granted(answer: &RequireBufferResponse) -> TicketId {
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    TicketId(answer.require_buffer_id)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_ticket_does_not_block_other_grpc_calls() {
    let (fixture, holder, other) = fixture(PATIENT, "").await;
    let all = vec![block(0, 1, 0, 11 << 20)];
    let ticket = fixture.ticket(&holder, MOST).await;
    let mut waiting = ask(&fixture, &other, 8 << 20, 1);
    wait_in_line(&fixture, 1).await;
    // The send that frees memory uses the same connection.
    fixture.client.heartbeat("app-2").await.unwrap();
    fixture.client.send(&holder, ticket, SendForm::Classic, &batch(0, &all)).await.unwrap();
    fixture.assert_reads(&holder, 0, &all).await;
    fixture.flush().await;
    let ticket = granted(&next(&mut waiting).await);
    let late = vec![block(1, 1, 0, 7 << 20)];
    fixture.client.send(&other, ticket, SendForm::Classic, &batch(1, &late)).await.unwrap();
    fixture.assert_reads(&other, 1, &late).await;
    assert_eq!(fixture.metric("total_require_buffer_failed"), 0.0, "a request was refused");
    assert_eq!(fixture.metric("tickets_granted_in_line_total"), 1.0);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_tickets_do_not_block_tcp_frames() {
    let (fixture, holder, other) = fixture(PATIENT, "").await;
    let client = fixture.tcp_client().await;
    let ticket = fixture.ticket(&holder, MOST).await;
    let small = vec![(PartitionId(0), vec![block(0, 1, 0, 100_000)])];
    let first = fixture.ticket(&holder, require_size(&small).unwrap() * 2).await;
    let mut waiting = ask(&fixture, &holder, 3 << 20, 3);
    let mut of_other = ask(&fixture, &other, 3 << 20, 1);
    wait_in_line(&fixture, 4).await;
    client.send(&holder, first, &small).await.unwrap();
    let large = vec![(PartitionId(1), vec![block(1, 2, 0, 11 << 20)])];
    client.send(&holder, ticket, &large).await.unwrap();
    fixture.flush().await;
    granted(&next(&mut of_other).await);
    for _ in 0..3 {
        let late = vec![(PartitionId(1), vec![block(1, 3, 0, 2 << 20)])];
        client.send(&holder, granted(&next(&mut waiting).await), &late).await.unwrap();
    }
    fixture.assert_reads(&holder, 0, &small[0].1).await;
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_ticket_is_refused_after_timeout_or_cancelled() {
    let (fixture, holder, other) = fixture("buffer_ticket_wait_sec = \"300ms\"", "").await;
    fixture.ticket(&holder, MOST).await;
    let began = Instant::now();
    let answer = next(&mut ask(&fixture, &other, 8 << 20, 1)).await;
    assert_eq!((answer.status(), answer.require_buffer_id), (StatusCode::NoBuffer, -1));
    assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
    fixture.finish().await;

    let (fixture, holder, other) = self::fixture(PATIENT, "").await;
    fixture.ticket(&holder, MOST).await;
    let gone = ask(&fixture, &other, 8 << 20, 1);
    wait_in_line(&fixture, 1).await;
    drop(gone);
    wait_in_line(&fixture, 0).await;
    // An application that is unregistered while it waits gets no ticket.
    let mut gone = ask(&fixture, &other, 8 << 20, 1);
    wait_in_line(&fixture, 1).await;
    fixture.client.unregister_app("app-2").await.unwrap();
    fixture.client.unregister_app("app-1").await.unwrap();
    assert_eq!(next(&mut gone).await.status(), StatusCode::NoRegister);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tickets_wait_on_at_most_half_of_the_streams() {
    let (fixture, holder, other) = fixture(PATIENT, "[grpc]\nmax_concurrent_streams = 4").await;
    fixture.ticket(&holder, MOST).await;
    let mut waiting = ask(&fixture, &other, 8 << 20, 2);
    wait_in_line(&fixture, 2).await;
    let third = next(&mut ask(&fixture, &other, 8 << 20, 1)).await;
    assert_eq!(third.status(), StatusCode::NoBuffer, "the third request must be refused at once");
    fixture.client.heartbeat("app-2").await.unwrap();
    fixture.client.unregister_app("app-1").await.unwrap();
    // They fit one after the other.
    granted(&next(&mut waiting).await);
    fixture.client.unregister_app("app-2").await.unwrap();
    assert_eq!(next(&mut waiting).await.status(), StatusCode::NoRegister);
    fixture.finish().await;
}
