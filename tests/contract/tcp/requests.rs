//! Valid requests over TCP: order of replies, bounds of unread replies and of the heap, and
//! eviction of connections. Also which sends are committed in the background.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures::future::join_all;
use tokio::io::AsyncWriteExt as _;
use uniffle_base::budget::HeapKind;
use uniffle_wire::reply::ReplyAnswer;
use uniffle_wire::request::{
    LocalDataRequest, LocalDataVersion, MemoryRequest, PartitionTarget, Placement, ReadRequest, SendRequest,
};
use uniffle_wire::types::PartitionId;
use uniffle_wire::{BlockHeader, BlockSink as _, SendHeader};
use uniffle_worker::proto::StatusCode;

use super::fixture::{APP, PARTITION, SHUFFLE, TcpFixture, block, frame, key, memory_frame};
use uniffle_worker::listeners::tcp::TcpConfig;
use uniffle_worker::service::{Commit, SendSink};

#[tokio::test]
async fn send_in_single_bytes_is_accepted() {
    let fixture = TcpFixture::new().await;
    let mut peer = fixture.raw().await;
    peer.stream.set_nodelay(true).unwrap();
    let blocks = [block(0, 40), block(1, 1), block(2, 300)];
    for byte in &frame(&fixture.request(9, &blocks)) {
        peer.say(&[*byte]).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(peer.hear().await.request_id, 9);
    assert_eq!(fixture.blocks_in_memory().await, blocks.map(|block| block.meta.block_id));
    peer.expect_works(&fixture).await;
    drop(peer);
    fixture.finish().await;
}

/// Returns the same blocks, each in a run of its own.
fn in_runs(request: SendRequest) -> SendRequest {
    let blocks = request.partitions.into_iter().flat_map(|(_, blocks)| blocks);
    let partitions = blocks.zip(0..).map(|(block, number)| (number % 100, vec![block])).collect();
    SendRequest { partitions, ..request }
}

#[tokio::test]
async fn large_sends_commit_in_background_and_respond_in_order() {
    let fixture = TcpFixture::new().await;
    let mut peer = fixture.raw().await;
    let all: Vec<_> = (0..2400).map(|number| block(number, 50)).collect();
    let mut frames = BytesMut::new();
    frames.extend_from_slice(&frame(&in_runs(fixture.request(1, &all[..1200]))));
    frames.extend_from_slice(&frame(&in_runs(fixture.request(2, &all[1200..]))));
    frames.extend_from_slice(&memory_frame(3, PartitionId(1), 1 << 30));
    peer.say(&frames).await;
    for request_id in 1..=3 {
        let reply = peer.hear().await;
        assert_eq!((reply.request_id, reply.status), (request_id, 0), "{reply:?}");
        if let ReplyAnswer::Memory(segments) = reply.answer {
            let seen: Vec<_> = segments.iter().map(|segment| segment.block_id).collect();
            let sent = all.iter().skip(1).step_by(100).map(|block| block.meta.block_id.0);
            assert_eq!(
                seen,
                sent.collect::<Vec<_>>(),
                "the read must return all blocks of the sends before it"
            );
        }
    }
    peer.expect_works(&fixture).await;
    drop(peer);
    fixture.finish().await;
}

#[tokio::test]
async fn small_sends_commit_inline_and_large_ones_in_background() {
    let fixture = TcpFixture::new().await;
    for (runs, blocks, is_background) in
        [(1024, 1024, false), (1025, 1025, true), (1, 8192, false), (1, 8193, true)]
    {
        let mut sink = SendSink::new(Arc::clone(&fixture.service.ingest), 1 << 20);
        let ticket = fixture.ticket(APP, 1 << 20);
        sink.header(SendHeader { app: APP, shuffle: SHUFFLE, ticket: ticket.0 }).unwrap();
        for number in 0..blocks {
            let block = block(number, 1);
            if number < runs {
                sink.partition(i32::try_from((number + 2) % 100).unwrap()).unwrap();
            }
            sink.begin_block(1).unwrap();
            sink.write(&block.data).unwrap();
            let header = BlockHeader {
                block_id: block.meta.block_id.0,
                length: 1,
                uncompressed_length: 1,
                crc: i64::from(block.meta.crc),
                task_attempt_id: 1,
            };
            sink.end_block(header).unwrap();
        }
        match sink.commit() {
            Commit::Done(stored) => {
                assert!(
                    stored.is_ok() && !is_background,
                    "{runs} runs with {blocks} blocks must be stored inline: {stored:?}"
                )
            }
            Commit::Background(mut committing) => {
                assert!(is_background, "{runs} runs with {blocks} blocks must be stored in the background");
                committing.outcome().await.unwrap();
            }
        }
    }
    assert_eq!(
        fixture.blocks_in_memory().await.len(),
        8193,
        "blocks that were sent twice must be stored once"
    );
    fixture.finish().await;
}

#[tokio::test]
async fn concurrent_requests_of_a_connection_are_all_answered() {
    let config = TcpConfig { requests_in_flight_per_connection_max: 4, ..TcpConfig::default() };
    let fixture = TcpFixture::with(config).await;
    let client = fixture.client().await;
    let sends = (0..200).map(|i| {
        let (fixture, client) = (&fixture, &client);
        async move {
            fixture.send(client, &[(PARTITION, vec![block(i, 100)])]).await;
            let reply = client.read_memory(&key(), PARTITION, -1, 1 << 30, None).await.unwrap();
            let ReplyAnswer::Memory(segments) = reply.answer else { panic!() };
            assert!(segments.iter().any(|segment| segment.block_id == block(i, 1).meta.block_id.0));
        }
    });
    join_all(sends).await;
    assert_eq!(fixture.blocks_in_memory().await.len(), 200);
    assert_eq!(fixture.metric("netty_send_shuffle_data_request_total"), 200.0);
    assert_eq!(fixture.metric("total_urpc_request_number"), 401.0);
    drop(client);
    fixture.finish().await;
}

#[tokio::test]
async fn unread_connection_holds_only_its_share() {
    let fixture = TcpFixture::new().await;
    let client = fixture.client().await;
    for number in 0..16 {
        fixture.send(&client, &[(PARTITION, vec![block(number, 1 << 20)])]).await;
    }
    let mut peer = fixture.raw().await;
    let frames: Vec<_> = (0..200).map(|id| memory_frame(id, PARTITION, 1 << 30)).collect();
    peer.say(&frames.concat()).await;
    let answered = fixture.memory.answered().clone();
    let share = answered.capacity() / 8;
    for _ in 0..16 {
        let reply = client.read_memory(&key(), PARTITION, -1, 1, None).await.unwrap();
        assert_eq!(reply.body.len(), 1 << 20, "another reader got an incomplete response");
        // One block beyond the share is allowed, and one more is margin.
        assert!(
            answered.used() <= share + (2 << 20),
            "responses hold {} bytes, the share is {share}",
            answered.used()
        );
    }
    // Requests beyond the share get NO_BUFFER.
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..200 {
        let reply = peer.hear().await;
        taken += reply.body.len() as u64;
        refused += u32::from(reply.status == i32::from(StatusCode::NoBuffer));
    }
    assert!(
        taken <= 2 * share && refused > 150,
        "responses of {taken} bytes were read, the share is {share}, {refused} were refused"
    );
    drop((peer, client));
    fixture.until("nothing is held", |_| answered.used() == 0).await;
    fixture.finish().await;
}

#[tokio::test]
async fn unread_replies_are_dropped_for_requests_waiting_for_heap() {
    // No response is dropped for its own slowness.
    let config = TcpConfig { write_timeout: Duration::from_secs(3600), ..TcpConfig::default() };
    let fixture = TcpFixture::with(config).await;
    let client = fixture.client().await;
    for number in 0..16 {
        fixture.send(&client, &[(PARTITION, vec![block(number, 1 << 20)])]).await;
    }
    let (answered, heap) = (fixture.memory.answered().clone(), fixture.memory.heap().whole().clone());
    let mut peer = fixture.raw_with_small_window().await;
    let request = memory_frame(1, PARTITION, 1 << 30);
    // Sockets take any number of replies at first: requests follow until one reply stays.
    let fill = async {
        let mut sent = 0.0;
        while peer.stream.write_all(&request).await.is_ok() {
            sent += 1.0;
            let is_read =
                |fixture: &TcpFixture| fixture.metric("netty_get_memory_shuffle_data_request_total") >= sent;
            fixture.until("the request was read", is_read).await;
            fixture.until("the reply was taken", |_| answered.used() == 0).await;
        }
        std::future::pending::<()>().await;
    };
    let given_up =
        fixture.until("the reply was dropped", |fixture| fixture.metric("netty_handle_exception") == 1.0);
    tokio::select! {
        biased;
        // Waits all the time: the registered shuffle needs some of it.
        _ = heap.charge(heap.capacity()) => panic!("cannot charge the whole heap"),
        () = given_up => {}
        () = fill => {}
    }
    fixture.until("nothing is pinned", |_| answered.used() == 0).await;
    let reply = client.read_memory(&key(), PARTITION, -1, 1, None).await.unwrap();
    assert_eq!(reply.body.len(), 1 << 20, "another reader got an incomplete response");
    drop((peer, client));
    fixture.finish().await;
}

#[tokio::test]
async fn waiting_local_reads_are_bounded_by_the_heap() {
    // No request gets a permit, so all wait with their memory.
    let config = TcpConfig {
        local_reads_in_flight_max: 0,
        local_read_wait: Duration::from_secs(3600),
        ..TcpConfig::default()
    };
    let fixture = TcpFixture::with(config).await;
    let mut peer = fixture.raw().await;
    let hints = vec![0; 1 << 20];
    let mut frame = BytesMut::new();
    let request = LocalDataRequest {
        target: PartitionTarget { request_id: 1, app: APP, shuffle: SHUFFLE, partition: PARTITION.0 },
        placement: Placement { partitions_per_range: 1, partitions: 1 },
        offset: 0,
        length: 1,
        timestamp_ms: 0,
        version: LocalDataVersion::V3 { storage_id: 0, hints: &hints, task_attempt_id: 0 },
    };
    ReadRequest::LocalData(request).encode_frame(&mut frame);
    let requests = fixture.memory.heap().of(HeapKind::Requests).clone();
    for sent in 0..50 {
        peer.say(&frame).await;
        let used = requests.used();
        assert!(used <= requests.capacity() / 2, "{sent} requests take {used} bytes");
    }
    // Requests without heap get a response that says so. The others continue to wait.
    let waiting = requests.capacity() / 2 / (5 * frame.len() as u64);
    for _ in waiting..50 {
        let reply = peer.hear().await;
        assert_eq!(reply.status, i32::from(StatusCode::NoBuffer));
        assert!(reply.message.contains("heap is full for requests"), "{}", reply.message);
    }
    assert!(
        requests.used() > waiting * frame.len() as u64,
        "{waiting} requests take only {} bytes",
        requests.used()
    );
    drop(peer);
    fixture.finish().await;
    assert_eq!(requests.used(), 0);
}

#[tokio::test]
async fn pipelined_reads_are_answered_in_order() {
    let config = TcpConfig { requests_in_flight_per_connection_max: 3, ..TcpConfig::default() };
    let fixture = TcpFixture::with(config).await;
    let mut peer = fixture.raw().await;
    let frames: Vec<_> = (0..500).map(|id| memory_frame(id, PARTITION, 1)).collect();
    peer.say(&frames.concat()).await;
    for request_id in 0..500 {
        assert_eq!(peer.hear().await.request_id, request_id);
    }
    drop(peer);
    fixture.finish().await;
}

/// A request without heap is refused alone: the connection and its other requests continue.
#[tokio::test]
async fn heap_refusals_do_not_disturb_other_reads() {
    let config = TcpConfig { requests_in_flight_per_connection_max: 3, ..TcpConfig::default() };
    let fixture = TcpFixture::with(config).await;
    let client = fixture.client().await;
    fixture.send(&client, &[(PARTITION, vec![block(0, 1000)])]).await;
    let mut peer = fixture.raw().await;
    let requests = fixture.memory.heap().of(HeapKind::Requests).clone();
    let filter = vec![0; 1000];
    let mut frames = BytesMut::new();
    for request_id in 0..300 {
        let target = PartitionTarget { request_id, app: APP, shuffle: SHUFFLE, partition: PARTITION.0 };
        // Every second request needs heap for its filter.
        let task_filter = (request_id % 2 == 1).then_some(&filter[..]);
        let (last_block_id, read_buffer_size, timestamp_ms) = (-1, 1 << 20, 0);
        let request = MemoryRequest { target, last_block_id, read_buffer_size, timestamp_ms, task_filter };
        ReadRequest::Memory(request).encode_frame(&mut frames);
    }
    let held = requests.charge_unchecked(requests.free());
    // All requests arrive at once, as after a while in which the worker did not read.
    peer.say(&frames).await;
    for request_id in 0..300 {
        let reply = peer.hear().await;
        let (status, bytes) = match request_id % 2 {
            0 => (StatusCode::Success, 1000),
            _ => (StatusCode::NoBuffer, 0),
        };
        assert_eq!((reply.request_id, reply.status), (request_id, i32::from(status)));
        assert!(
            matches!(reply.answer, ReplyAnswer::Memory(_)),
            "the refusal must have the type of the response"
        );
        assert_eq!(reply.body.len(), bytes);
    }
    assert_eq!(requests.used(), held.bytes());
    drop(held);
    peer.expect_works(&fixture).await;
    drop((peer, client));
    fixture.finish().await;
}

#[tokio::test]
async fn least_active_connection_is_evicted() {
    let fixture = TcpFixture::with(TcpConfig { connections_max: 2, ..TcpConfig::default() }).await;
    // Each has a ticket of its own.
    let send = || frame(&fixture.request(1, &[block(0, 10)]));
    let (mut working, mut silent) = (fixture.raw().await, fixture.raw().await);
    working.say(&send()).await;
    assert_eq!(working.hear().await.status, 0);
    let mut third = fixture.raw().await;
    silent.expect_close().await;
    for peer in [&mut third, &mut working] {
        peer.say(&send()).await;
        assert_eq!(peer.hear().await.status, 0);
    }
    fixture.until("two are open", |fixture| fixture.metric("urpc_connection_number") == 2.0).await;
    assert_eq!(fixture.metric("urpc_connection_refused_total"), 1.0);
    drop((working, silent, third));
    fixture.until("places are given back", |fixture| fixture.metric("netty_active_connection") == 0.0).await;
    fixture.finish().await;
}
