//! Invalid bytes: truncated and mutated messages, huge declared lengths, other protocols and
//! stalled requests (docs/architecture.md §6 items 1, 2 and 12). No memory stays in use, and the
//! worker continues.

use bytes::{Bytes, BytesMut};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uniffle_client::send::{self, SendForm};
use uniffle_wire::types::{PartitionId, ShuffleKey, TicketId};
use uniffle_worker::proto::StatusCode;

use super::blocks::{batch, block, blocks};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::raw::{self, End};

const FORMS: [SendForm; 3] = [SendForm::Classic, SendForm::Contiguous, SendForm::Combined];

/// Returns a valid message of two partitions, without its prefix.
fn message(key: &ShuffleKey, ticket: TicketId, form: SendForm) -> Bytes {
    let parts: Vec<_> =
        (0..2).map(|p| (PartitionId(p), vec![block(p, 1, 0, 20), block(p, 1, 1, 30)])).collect();
    raw::framed(&send::request(key, ticket, form, &parts)).slice(5..)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_message_stores_nothing() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    for form in FORMS {
        let whole = message(&key, TicketId(1), form).len();
        for cut in 0..whole {
            let ticket = fixture.ticket(&key, 1000).await;
            let message = message(&key, ticket, form);
            // The prefix declares only the sent part, as by a broken encoder, or the whole message,
            // and the body ends early.
            let honest = cut % 2 == 0;
            let body = match honest {
                true => raw::prefixed(&message[..cut]),
                false => raw::prefixed(&message).slice(..5 + cut),
            };
            let answer = raw::call(&channel, raw::SEND, vec![body], End::Closed).await;
            if answer.grpc_status == Some(0) {
                let (status, text) = answer.send_status();
                assert!(
                    status != StatusCode::Success && !text.is_empty(),
                    "{form:?} cut at byte {cut} was accepted"
                );
            }
        }
    }
    // Tickets that no send has named exist until they expire or the application ends.
    fixture.client.unregister_app("app-1").await.unwrap();
    fixture.assert_memory_is_free().await;
    drop(channel);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutated_messages_do_not_leak_or_break_the_worker() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let mut rng = StdRng::seed_from_u64(0xbad);
    for round in 0..600 {
        let ticket = fixture.ticket(&key, 1000).await;
        let mut bytes = BytesMut::from(message(&key, ticket, FORMS[round % 3]).as_ref());
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random();
        }
        let answer = raw::call(&channel, raw::SEND, vec![raw::prefixed(&bytes)], End::Closed).await;
        assert!(answer.grpc_status.is_some(), "no gRPC status in round {round}");
    }
    fixture.client.unregister_app("app-1").await.unwrap();
    fixture.assert_memory_is_free().await;
    drop(channel);
    fixture.finish().await;
}

/// Returns a varint of `value`.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(u8::try_from(value & 0x7F).unwrap() | 0x80);
        value >>= 7;
    }
    bytes.push(u8::try_from(value).unwrap());
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiny_frames_with_huge_lengths_are_refused_at_once() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let channel = raw::connect(fixture.worker.addresses().grpc).await;

    // A gRPC prefix without a message, for which the worker does not wait.
    let claim = Bytes::from_static(&[0, 0xFF, 0xFF, 0xFF, 0xFF]);
    let answer = raw::call(&channel, raw::SEND, vec![claim.clone()], End::Stalled).await;
    assert_eq!(answer.grpc_status, Some(8), "expected RESOURCE_EXHAUSTED: {}", answer.grpc_message);
    for path in ["getMemoryShuffleData", "getLocalShuffleIndex", "getLocalShuffleData", "registerShuffle"] {
        let path = format!("/rss.common.ShuffleServer/{path}");
        let answer = raw::call(&channel, &path, vec![claim.clone()], End::Stalled).await;
        assert_ne!(answer.grpc_status, Some(0), "{path}: {}", answer.grpc_message);
    }

    // Within a message: each field that has a length.
    let head = [&[0x0A, 5][..], b"app-1", &[0x10, 1]].concat();
    let fields: [(&str, &[u8]); 5] = [
        ("appId", &[0x0A]),
        ("shuffleData", &[0x22]),
        ("block", &[0x22, 20, 0x08, 0, 0x12]),
        ("data", &[0x22, 20, 0x08, 0, 0x12, 16, 0x2A]),
        ("field 7", &[0x3A]),
    ];
    for (name, field) in fields {
        for huge in [1 << 20, i32::MAX as u64, u64::from(u32::MAX), 1 << 40, u64::MAX] {
            let ticket = fixture.ticket(&key, 1000).await;
            let body = [&head[..], &[0x18], &varint(ticket.0.cast_unsigned()), field, &varint(huge)].concat();
            let body = [body, vec![0; 30]].concat();
            let answer = raw::call(&channel, raw::SEND, vec![raw::prefixed(&body)], End::Closed).await;
            let (status, text) = answer.send_status();
            assert_ne!(status, StatusCode::Success, "{name} of {huge} bytes was accepted: {text}");
        }
    }

    // A block with a declared length of 2^31−1 bytes, which the ticket does not cover.
    let ticket = fixture.ticket(&key, 1000).await;
    let mut parts = batch(0, &blocks(0, 1, 0..1));
    parts[0].1[0].meta.length = i32::MAX.unsigned_abs();
    for form in [SendForm::Contiguous, SendForm::Combined] {
        let refused = fixture.client.send(&key, ticket, form, &parts).await.unwrap_err();
        assert!(refused.status().is_some(), "{refused}");
    }
    fixture.client.unregister_app("app-1").await.unwrap();
    fixture.assert_memory_is_free().await;
    drop(channel);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn million_partitions_in_one_request_are_refused() {
    let setup = Setup { memory: "heap_capacity = \"512MiB\"", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, i32::MAX)]).await.unwrap();
    let mut request = super::fixture::require(&key, 1000);
    request.partition_ids = (0..1_000_001).collect();
    let answer = fixture.client.require_raw(request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::InvalidRequest, "{}", answer.ret_msg);
    assert!(answer.ret_msg.contains("1000000"), "{}", answer.ret_msg);
    fixture.push(&key, &batch(i32::MAX, &blocks(0, 1, 0..2))).await;
    fixture.assert_reads(&key, i32::MAX, &blocks(0, 1, 0..2)).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnect_within_message_leaves_nothing() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    for form in FORMS {
        let parts = batch(0, &[block(0, 1, 0, 2 << 20)]);
        let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
        let message = raw::framed(&send::request(&key, ticket, form, &parts));
        let half = message.slice(..message.len() / 2);
        let channel = raw::connect(fixture.worker.addresses().grpc).await;
        let began = eventually("the send has begun", || match fixture.memory().tickets().count() {
            0 if fixture.memory().budget().used() > 0 => Ok(()),
            _ => Err("the ticket exists".to_owned()),
        });
        tokio::select! {
            answer = raw::call(&channel, raw::SEND, vec![half], End::Stalled) => panic!("{answer:?}"),
            () = began => {}
        }
        drop(channel);
        fixture.assert_memory_is_free().await;
    }
    fixture.assert_reads(&key, 0, &[]).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_message_is_aborted_after_timeout() {
    let setup = Setup { tables: "[grpc]\nrequest_timeout_sec = 1", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let parts = batch(0, &[block(0, 1, 0, 1 << 20)]);
    let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &parts));
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let half = message.slice(..message.len() / 2);
    let answer = raw::call(&channel, raw::SEND, vec![half], End::Stalled).await;
    assert_eq!(answer.grpc_status, Some(4), "expected DEADLINE_EXCEEDED: {}", answer.grpc_message);
    fixture.assert_memory_is_free().await;
    // The connection still works.
    let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &parts));
    let answer = raw::call(&channel, raw::SEND, vec![message], End::Closed).await;
    assert_eq!(answer.send_status().0, StatusCode::Success);
    drop(channel);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_protocols_on_the_grpc_port_are_closed() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    let address = fixture.worker.addresses().grpc;
    let openings: [&[u8]; 4] = [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /rss.common.ShuffleServer/appHeartbeat HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xFC, 0x03, 0x03],
        &[0xFF; 64],
    ];
    for opening in openings {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(opening).await.unwrap();
        // Half-closed, because a short opening could still become a preface.
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // A reset also ends the connection.
        drop(socket.read_to_end(&mut answer).await);
        assert!(answer.len() < 1000, "the response has {} bytes", answer.len());
    }
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_grpc_calls_get_a_status() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let unknown = ["/", "/rss.common.ShuffleServer/noSuchCall", "/rss.common.NoService/x"];
    for path in unknown {
        let answer = raw::call(&channel, path, vec![raw::prefixed(&[])], End::Closed).await;
        assert_eq!(answer.grpc_status, Some(12), "expected UNIMPLEMENTED for {path}");
    }
    let compressed = Bytes::from_static(&[1, 0, 0, 0, 1, 0]);
    let answer = raw::call(&channel, raw::SEND, vec![compressed], End::Closed).await;
    assert_eq!(answer.grpc_status, Some(12), "{}", answer.grpc_message);
    for body in [vec![], vec![Bytes::from_static(&[0, 0])]] {
        let answer = raw::call(&channel, raw::SEND, body, End::Closed).await;
        assert_ne!(answer.grpc_status, Some(0));
    }
    // Two messages in a unary call.
    let ticket = fixture.ticket(&key, 1000).await;
    let one = raw::prefixed(&message(&key, ticket, SendForm::Classic));
    let answer = raw::call(&channel, raw::SEND, vec![one.clone(), one], End::Closed).await;
    if answer.grpc_status == Some(0) {
        assert_ne!(answer.send_status().0, StatusCode::Success);
    }
    fixture.assert_memory_is_free().await;
    drop(channel);
    fixture.finish().await;
}
