//! Concurrent sends, flushes, purges and stops, a peer that does not read, and requests beyond
//! limits: concurrent calls, oversized messages and odd client properties.

use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, StreamExt};
use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::oneshot;
use tonic::body::Body;
use tower::{Service, ServiceExt};
use uniffle_client::block::Block;
use uniffle_client::grpc::ReadOptions;
use uniffle_client::send::{self, SendForm};
use uniffle_testkit::fault::{Fault, Operation, Rule};
use uniffle_wire::types::{BlockId, PartitionId};
use uniffle_worker::proto::{GetLocalShuffleDataRequest, StatusCode};

use super::blocks::{batch, block, blocks};
use super::fixture::{Setup, WorkerFixture, assert_same, eventually, key};
use super::parts::parts;
use super::raw;

const P: PartitionId = PartitionId(0);

/// docs/architecture.md §6 item 13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_in_flight_are_read_by_age_without_duplicates() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Write, Fault::Hang));
    }
    let mut all: Vec<Block> = Vec::new();
    for round in 0..4 {
        let new = blocks(0, round, 0..3);
        client.push(&key, SendForm::Classic, &batch(0, &new)).await.unwrap();
        all.extend(new);
        // Sends everything again while part of it is in flight.
        client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
        if round < 3 {
            fixture.flusher.flush_all();
        }
    }
    eventually("the writes hang", || match fixture.hung() {
        0 => Err("nothing hangs".to_owned()),
        _ => Ok(()),
    })
    .await;
    let mut seen: Vec<BlockId> = Vec::new();
    loop {
        let answer = client.read_memory(&key, P, seen.last().copied(), 1, None).await.unwrap();
        assert!(seen.len() <= all.len(), "the cursor does not advance");
        match answer.blocks.first() {
            Some(block) => seen.push(block.meta.block_id),
            None => break,
        }
    }
    let order: Vec<BlockId> = all.iter().map(|block| block.meta.block_id).collect();
    assert_eq!(seen, order);
    fixture.heal().await;
    fixture.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    drop(client);
    fixture.finish().await;
}

/// Sends, flushes and unregisters a shuffle repeatedly. Asserts that acknowledged blocks are
/// readable until then.
async fn write_read_unregister(fixture: &WorkerFixture, app: i64) {
    let key = key(&format!("app-{app}"), 1);
    for round in 0..15 {
        fixture.client.register(&key, &[(0, 3)]).await.unwrap();
        let mut all = Vec::new();
        for n in 0..4 {
            let new: Vec<Block> = (0..8).map(|b| block(0, round, n * 8 + b, 3000 + b)).collect();
            let form = [SendForm::Classic, SendForm::Contiguous, SendForm::Combined][n as usize % 3];
            fixture.client.push(&key, form, &batch(0, &new)).await.unwrap();
            all.extend(new);
            if (app + i64::from(n)) % 2 == 0 {
                fixture.begin_flush();
            }
        }
        fixture.assert_reads(&key, 0, &all).await;
        // A send in progress when its shuffle is unregistered may succeed or fail.
        let late = blocks(1, round, 0..50);
        let late = batch(1, &late);
        let (sent, gone) = tokio::join!(
            fixture.client.push(&key, SendForm::Classic, &late),
            fixture.client.unregister(&key)
        );
        gone.unwrap();
        if let Err(error) = sent {
            let status = error.status();
            assert!(matches!(status, Some(StatusCode::NoRegister | StatusCode::InternalError)), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sends_flushes_and_unregistrations_do_not_leak() {
    let fixture = WorkerFixture::start().await;
    futures::future::join_all((0..6).map(|app| write_read_unregister(&fixture, app))).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn started_send_completes_before_the_worker_stops() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..5);
    let ticket = fixture.client.require_buffer(&key, &batch(0, &all)).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &batch(0, &all)));
    let (head, tail) = (message.slice(..1000), message.slice(1000..));
    let (resume, wait) = oneshot::channel::<()>();
    let late = stream::once(async move {
        drop(wait.await);
        tail
    });
    let WorkerFixture { worker, client, dir, .. } = fixture;
    let memory = worker.memory().clone();
    let service = worker.service().clone();
    let channel = raw::connect(worker.addresses().grpc).await;
    let call = async move { raw::call_streamed(&channel, raw::SEND, stream::iter([head]).chain(late)).await };
    let stop = async move {
        eventually("the send has begun", || match memory.tickets().count() {
            0 => Ok(()),
            _ => Err("the ticket exists".to_owned()),
        })
        .await;
        drop(client);
        worker.stop().await
    };
    let release = async move {
        eventually("the worker stops", || match service.status().is_stopping() {
            true => Ok(()),
            false => Err("not stopping".to_owned()),
        })
        .await;
        resume.send(()).unwrap();
    };
    let (answer, tasks_left, ()) = tokio::join!(call, stop, release);
    assert_eq!(answer.send_status().0, StatusCode::Success);
    assert_eq!(tasks_left, 0);
    drop(dir);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_reader_holds_bounded_memory_until_timeout() {
    let setup = Setup {
        memory: "read_buffer_capacity = \"4MiB\"",
        tables: "[grpc]\nanswer_timeout_sec = 1",
        ..Setup::default()
    };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let large = block(0, 1, 0, 16 << 20);
    fixture.client.push(&key, SendForm::Contiguous, &batch(0, std::slice::from_ref(&large))).await.unwrap();
    fixture.flush().await;

    // The channel's windows are smaller than the response. Its headers are awaited, and its body is
    // read only after the timeout.
    let request = GetLocalShuffleDataRequest {
        app_id: "app-1".to_owned(),
        shuffle_id: 1,
        partition_num: 1,
        partition_num_per_range: 1,
        length: 16 << 20,
        ..Default::default()
    };
    let frames = stream::iter([Ok::<_, std::convert::Infallible>(Frame::data(raw::framed(&request)))]);
    let call = Request::post("/rss.common.ShuffleServer/getLocalShuffleData")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(StreamBody::new(frames)))
        .unwrap();
    let mut channel = raw::connect(fixture.worker.addresses().grpc).await;
    let response = channel.ready().await.unwrap().call(call).await.unwrap();
    let pool = fixture.memory().read_pool();
    eventually("the answer has begun", || match pool.used_bytes() {
        0 => Err("no read buffer is in use".to_owned()),
        _ => Ok(()),
    })
    .await;
    assert!(pool.used_bytes() <= 4 << 20);
    eventually("the response is dropped", || match pool.used_bytes() {
        0 => Ok(()),
        held => Err(format!("{held} bytes are held")),
    })
    .await;
    let taken = tokio::time::timeout(Duration::from_secs(5), response.into_body().collect()).await.unwrap();
    assert!(taken.is_err(), "a cut response must reset the stream");
    drop(channel);
    fixture.assert_reads(&key, 0, &[large]).await;
    fixture.finish().await;
}

/// A client with connections of two calls each makes the third call after one of them has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beyond_the_limit_wait_per_connection() {
    let setup = Setup { tables: "[grpc]\nmax_concurrent_streams = 2", ..Setup::default() };
    let fixture = WorkerFixture::with(setup).await;
    let address = fixture.worker.addresses().grpc;
    let channel = raw::connect(address).await;
    let path = "/rss.common.ShuffleServer/appHeartbeat";
    let heartbeat = || vec![raw::prefixed(&[])];
    // The first call tells the client the limit.
    assert_eq!(raw::call(&channel, path, heartbeat(), raw::End::Closed).await.grpc_status, Some(0));
    let stalled = || Box::pin(raw::call(&channel, raw::SEND, heartbeat(), raw::End::Stalled));
    let mut stalled = [stalled(), stalled()];
    for call in &mut stalled {
        assert!(futures::poll!(call.as_mut()).is_pending());
    }
    eventually("two calls are open", || match fixture.metric("grpc_open") {
        2.0 => Ok(()),
        open => Err(format!("{open} calls")),
    })
    .await;
    let mut third = Box::pin(raw::call(&channel, path, heartbeat(), raw::End::Closed));
    assert!(futures::poll!(third.as_mut()).is_pending());
    let other = raw::connect(address).await;
    assert_eq!(raw::call(&other, path, heartbeat(), raw::End::Closed).await.grpc_status, Some(0));
    assert!(futures::poll!(third.as_mut()).is_pending(), "both permits must be taken");
    assert_eq!(fixture.metric("grpc_app_heartbeat_total"), 2.0, "the third request was counted too early");
    drop(stalled);
    assert_eq!(third.await.grpc_status, Some(0));
    drop((channel, other));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_message_is_refused_with_the_limit() {
    let setup = Setup { tables: "[grpc]\nmax_message_size = \"1MiB\"", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let parts = batch(0, &[block(0, 1, 0, 1 << 20)]);
    let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &parts));
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let pieces: Vec<Bytes> = message.chunks(64 << 10).map(Bytes::copy_from_slice).collect();
    let answer = raw::call(&channel, raw::SEND, pieces, raw::End::Closed).await;
    assert_eq!(answer.grpc_status, Some(8), "expected RESOURCE_EXHAUSTED");
    assert!(answer.grpc_message.contains("1048576"), "{}", answer.grpc_message);
    drop(channel);
    fixture.finish().await;
}

/// docs/architecture.md §6 item 11: a client property ends the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_properties_do_not_end_the_worker() {
    use uniffle_client::grpc::register_request;
    let fixture = WorkerFixture::start().await;
    let values = ["", "-1", "99999999999999999999", "NaN", "\0", "true", "1g", "../x", "ä"];
    let keys = [
        "spark.rss.riffle.hardSplitEnabled",
        "spark.rss.client.reassign.enabled",
        "rss.client.blockIdManagerClass",
        "spark.rss.heartbeat.timeout",
        "spark.rss.app.expired.withoutHeartbeat",
        "",
        ".rss.",
    ];
    for (n, value) in values.iter().enumerate() {
        let key = key(&format!("app-{n}"), 1);
        let mut request = register_request(&key, &[(0, 0)]);
        request.properties = keys.iter().map(|name| ((*name).to_owned(), (*value).to_owned())).collect();
        request.user = value.repeat(50);
        fixture.client.register_with(request).await.unwrap();
        fixture.push(&key, &batch(0, &blocks(0, 1, 0..2))).await;
        fixture.assert_reads(&key, 0, &blocks(0, 1, 0..2)).await;
    }
    let key = key("app-many", 1);
    let mut request = register_request(&key, &[(0, 0)]);
    request.properties = (0..20_000).map(|n| (format!("spark.rss.{n}"), "x".repeat(20))).collect();
    drop(fixture.client.register_with(request).await);
    fixture.finish().await;
}
