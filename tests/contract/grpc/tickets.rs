//! Tickets and the memory of sends: docs/protocol.md §2.4 and §4.4, docs/architecture.md §6 items
//! 2, 9 and 15.

use std::time::Duration;

use futures::stream::{self, StreamExt};
use tokio::sync::oneshot;
use tokio::time::sleep;
use uniffle_client::grpc::Backoff;
use uniffle_client::send::{self, SendForm};
use uniffle_wire::types::PartitionId;
use uniffle_worker::clock::Instant;
use uniffle_worker::proto::StatusCode;

use super::blocks::{batch, block, blocks};
use super::fixture::{Setup, WorkerFixture, eventually, key, require};
use super::parts::parts;
use super::raw;

/// Expires every unredeemed ticket. Returns their number.
fn expire_tickets(fixture: &WorkerFixture) -> usize {
    fixture.memory().expire_tickets(Instant::now() + Duration::from_secs(3600))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_of_a_started_send_does_not_expire() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..5);
    let ticket = fixture.client.require_buffer(&key, &batch(0, &all)).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &batch(0, &all)));
    let (head, tail) = (message.slice(..1000), message.slice(1000..));
    let (resume, expired) = oneshot::channel::<()>();
    let late = stream::once(async move {
        expired.await.unwrap();
        tail
    });
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let pieces = stream::iter([head]).chain(late);
    let begun_and_expired = async {
        eventually("the ticket is redeemed", || match fixture.memory().tickets().count() {
            0 => Ok(()),
            count => Err(format!("{count} tickets")),
        })
        .await;
        assert_eq!(expire_tickets(&fixture), 0, "a spent ticket has expired");
        resume.send(()).unwrap();
    };
    let (answer, ()) = tokio::join!(raw::call_streamed(&channel, raw::SEND, pieces), begun_and_expired);
    assert_eq!(answer.send_status().0, StatusCode::Success);
    fixture.assert_reads(&key, 0, &all).await;
    drop(channel);
    fixture.finish().await;
}

/// Deduplication: a client that repeats a send adds no block in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resent_blocks_are_deduplicated() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    fixture.push(&key, &batch(0, &all)).await;
    let used = fixture.memory().budget().used();
    for _ in 0..3 {
        fixture.push(&key, &batch(0, &all)).await;
    }
    assert_eq!(fixture.memory().block_count(), 10);
    let memory = fixture.client.read_memory(&key, PartitionId(0), None, 1 << 20, None).await.unwrap();
    assert_eq!(memory.blocks.len(), 10, "each id must be returned once, or a cursor could loop");
    // Resent blocks leave holes in the buffer's chain, bounded by the size of the sends.
    assert!(fixture.memory().budget().used() <= 4 * used + (64 << 10));
    fixture.flush().await;
    // After a flush the copy is stored too, which is legal: readers count each id once.
    fixture.push(&key, &batch(0, &all)).await;
    fixture.assert_reads(&key, 0, &all).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &all).await;
    fixture.assert_memory_is_free().await;
    fixture.finish().await;
}

/// Full memory exerts backpressure on writers through refused tickets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backpressure_refuses_tickets_until_memory_is_freed() {
    let setup = Setup { capacity: "16MiB", memory: "buffer_ticket_wait_sec = 0", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 7)]).await.unwrap();
    let writer = |task: i64| {
        let (client, key) = (fixture.client.clone(), key.clone());
        async move {
            for sequence in 0..8 {
                let parts: Vec<_> =
                    (0..8).map(|p| (PartitionId(p), vec![block(p, task, sequence, 128 << 10)])).collect();
                client.push(&key, SendForm::Contiguous, &parts).await.unwrap();
            }
        }
    };
    // 64 MiB through 16 MiB, sent faster than it is flushed.
    futures::future::join_all((0..8).map(writer)).await;
    let refusals = fixture.metric("total_require_buffer_failed");
    assert!(refusals > 0.0, "no writer had to wait, so the test checks nothing");
    let (tickets, bytes) = fixture.histogram("ticket_bytes");
    assert!(tickets == 64 && bytes >= f64::from(64 << 20), "{tickets} tickets of {bytes} bytes were granted");
    let (sends, seconds) = fixture.histogram("ticket_lifetime_seconds");
    assert!(sends == 64 && seconds > 0.0, "{sends} sends came {seconds} s after their tickets");
    let (waits, seconds) = fixture.histogram("ticket_wait_seconds");
    assert!((1..=64).contains(&waits) && seconds > 0.0, "{waits} waits took {seconds} s");
    for partition in 0..8 {
        let all: Vec<_> =
            (0..8).flat_map(|task| (0..8).map(move |n| block(partition, task, n, 128 << 10))).collect();
        fixture.assert_reads(&key, partition, &all).await;
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_ticket_reserves_nothing_and_has_id_minus_1() {
    let setup = Setup { capacity: "16MiB", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.ticket(&key, 12 << 20).await;
    let reserved = fixture.memory().tickets().pre_allocated_bytes();
    let answer = fixture.client.require_raw(require(&key, 8 << 20)).await.unwrap();
    assert_eq!((answer.status(), answer.require_buffer_id), (StatusCode::NoBuffer, -1));
    assert!(answer.ret_msg.contains("8392704") || answer.ret_msg.contains("8388608"), "{}", answer.ret_msg);
    assert_eq!(fixture.memory().tickets().pre_allocated_bytes(), reserved);

    fixture.client.unregister_app("app-1").await.unwrap();
    fixture.assert_memory_is_free().await;
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.ticket(&key, 8 << 20).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn negative_or_too_large_ticket_is_invalid() {
    let setup = Setup { capacity: "16MiB", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    for size in [-1, i32::MIN] {
        let answer = fixture.client.require_raw(require(&key, size)).await.unwrap();
        assert_eq!((answer.status(), answer.require_buffer_id), (StatusCode::InvalidRequest, -1));
        assert!(answer.ret_msg.contains(&size.to_string()), "{}", answer.ret_msg);
    }
    for size in [16 << 20, i32::MAX] {
        let answer = fixture.client.require_raw(require(&key, size)).await.unwrap();
        assert_eq!((answer.status(), answer.require_buffer_id), (StatusCode::InvalidRequest, -1));
        let limit = (16 << 20) - 4096;
        assert!(answer.ret_msg.contains(&limit.to_string()), "{}", answer.ret_msg);
    }
    fixture.assert_memory_is_free().await;
    fixture.ticket(&key, 0).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excess_of_a_ticket_is_freed_after_the_send() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = vec![block(0, 1, 0, 1000)];
    // A TCP client requests about twice its data. This test requests a thousand times as much.
    let ticket = fixture.ticket(&key, 1 << 20).await;
    fixture.client.send(&key, ticket, SendForm::Classic, &batch(0, &all)).await.unwrap();
    assert_eq!(fixture.memory().tickets().pre_allocated_bytes(), 0);
    let used = fixture.memory().budget().used();
    assert!(used <= 8 << 10, "a block of 1000 bytes takes {used} bytes");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn number_of_tickets_is_bounded() {
    let setup = Setup { memory: "buffer_ticket_max_count = 10", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    for _ in 0..10 {
        fixture.ticket(&key, 1).await;
    }
    let answer = fixture.client.require_raw(require(&key, 1)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::NoBuffer);
    assert_eq!(expire_tickets(&fixture), 10);
    fixture.assert_memory_is_free().await;
    fixture.ticket(&key, 1).await;
    fixture.finish().await;
}

/// Expiry of an unused ticket returns its memory.
#[tokio::test(start_paused = true)]
async fn tickets_expire_in_the_background() {
    let fixture = parts().start().await;
    fixture.memory.tickets().require(&key("app-1", 1).app, 1000, 1).unwrap();
    sleep(Duration::from_secs(20)).await;
    assert_eq!(fixture.memory.tickets().count(), 1, "a ticket must not expire before 30 s");
    sleep(Duration::from_secs(20)).await;
    assert_eq!(fixture.memory.tickets().count(), 0);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_block_does_not_pin_its_request() {
    let setup = Setup {
        tables: "[hybrid_store]\nmemory_single_buffer_max_spill_size = \"1MiB\"",
        ..Setup::default()
    };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let (large, small) = (block(0, 1, 0, 8 << 20), block(1, 1, 0, 100));
    let parts = [(PartitionId(1), vec![small.clone()]), (PartitionId(0), vec![large.clone()])];
    fixture.push(&key, &parts).await;
    // The large partition is flushed by its own threshold. The small one stays.
    eventually("the large partition is on disk", || match fixture.memory().block_count() {
        1 => Ok(()),
        count => Err(format!("{count} blocks in memory")),
    })
    .await;
    eventually("the request's memory is free", || match fixture.memory().budget().used() {
        used if used <= 8 << 10 => Ok(()),
        used => Err(format!("{used} bytes for a block of 100")),
    })
    .await;
    fixture.assert_reads(&key, 0, &[large]).await;
    fixture.assert_reads(&key, 1, &[small]).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_worker_grants_no_ticket() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.worker.service().status().stop(uniffle_worker::service::Stopping::ForGood);
    let once =
        fixture.client.clone().with_backoff(Backoff { attempts: 1, ..super::fixture::short_backoff() });
    let answer = once.require_buffer(&key, &batch(0, &blocks(0, 1, 0..1))).await;
    assert_eq!(answer.unwrap_err().status(), Some(StatusCode::NoBuffer));
    drop(once);
    fixture.finish().await;
}
