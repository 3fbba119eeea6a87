//! Invalid input. Each case ends in a clear response or a closed connection, leaks nothing and does
//! not disturb other connections.

use bytes::{BufMut, BytesMut};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use uniffle_wire::reply::ReplyAnswer;
use uniffle_worker::listeners::tcp::TcpConfig;
use uniffle_worker::proto::StatusCode;

use super::fixture::{TcpFixture, block, frame};

/// Returns a frame with any header.
fn raw_frame(message_bytes: i32, kind: u8, body_bytes: i32, rest: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_i32(message_bytes);
    out.put_u8(kind);
    out.put_i32(body_bytes);
    out.put_slice(rest);
    out
}

/// Asserts that `frame` closes its connection while another one works.
async fn closes(frame: &[u8]) {
    let fixture = TcpFixture::new().await;
    let (mut peer, mut other) = (fixture.raw().await, fixture.raw().await);
    peer.say(frame).await;
    peer.expect_close().await;
    assert_eq!(fixture.metric("netty_handle_exception"), 1.0);
    assert_eq!(fixture.used_bytes(), 0);
    other.expect_works(&fixture).await;
    drop((peer, other));
    fixture.finish().await;
}

/// Asserts that a send is refused with `status` and stores nothing, and that the connection works.
async fn refuses(status: StatusCode, frame: &[u8], fixture: TcpFixture) {
    let mut peer = fixture.raw().await;
    peer.say(frame).await;
    let reply = peer.hear().await;
    assert_eq!(reply.answer, ReplyAnswer::Rpc);
    assert_eq!(reply.status, i32::from(status), "{reply:?}");
    assert!(!reply.message.is_empty());
    assert_eq!(fixture.blocks_in_memory().await, []);
    peer.expect_works(&fixture).await;
    drop(peer);
    fixture.finish().await;
}

#[tokio::test]
async fn frame_over_limit_closes_connection() {
    closes(&raw_frame((1 << 30) + 1, 3, 0, &[])).await;
}

#[tokio::test]
async fn frame_of_negative_length_closes_connection() {
    closes(&raw_frame(-1, 3, 0, &[])).await;
}

#[tokio::test]
async fn frame_of_zero_length_closes_connection() {
    closes(&raw_frame(0, 3, 0, &[])).await;
}

#[tokio::test]
async fn negative_body_length_closes_connection() {
    closes(&raw_frame(31, 4, -1, &[])).await;
}

#[tokio::test]
async fn request_with_body_closes_connection() {
    closes(&raw_frame(31, 4, 1, &[0; 32])).await;
}

#[tokio::test]
async fn unknown_frame_type_closes_connection() {
    closes(&raw_frame(31, 99, 0, &[0; 31])).await;
    closes(&raw_frame(31, 255, 0, &[0; 31])).await;
}

#[tokio::test]
async fn response_from_client_closes_connection() {
    for kind in [0, 14, 15, 16, 22, 23, 26] {
        closes(&raw_frame(18, kind, 0, &[0; 18])).await;
    }
}

#[tokio::test]
async fn request_without_complete_id_closes_connection() {
    for kind in [3, 4, 5, 6, 21, 24, 25] {
        closes(&raw_frame(7, kind, 0, &[0; 7])).await;
    }
}

#[tokio::test]
async fn other_protocols_close_connection() {
    closes(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n").await;
    closes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
}

#[tokio::test]
async fn oversized_read_is_refused_in_its_response_type() {
    let fixture = TcpFixture::with(TcpConfig { read_request_bytes_max: 1000, ..TcpConfig::default() }).await;
    let mut peer = fixture.raw().await;
    let mut message = BytesMut::new();
    message.put_i64(77);
    message.put_bytes(0, 2000);
    peer.say(&raw_frame(2008, 6, 0, &message)).await;
    let reply = peer.hear().await;
    assert_eq!((reply.request_id, reply.answer), (77, ReplyAnswer::Memory(vec![])));
    assert_eq!(reply.status, i32::from(StatusCode::InternalError));
    peer.expect_works(&fixture).await;
    drop(peer);
    fixture.finish().await;
}

#[tokio::test]
async fn invalid_reads_are_refused_in_their_response_type() {
    let fixture = TcpFixture::new().await;
    let mut peer = fixture.raw().await;
    for kind in [4, 5, 6, 21, 24, 25] {
        // A request id and an appId of 2^31 - 1 bytes.
        let mut message = BytesMut::new();
        message.put_i64(i64::from(kind));
        message.put_i32(i32::MAX);
        message.put_bytes(0xff, 60);
        peer.say(&raw_frame(72, kind, 0, &message)).await;
        let reply = peer.hear().await;
        assert_eq!(reply.request_id, i64::from(kind));
        assert!(reply.status != 0 && reply.body.is_empty());
        let fits = match (kind, &reply.answer) {
            (4, ReplyAnswer::LocalIndex { data_length: 0, storage_ids: None })
            | (21, ReplyAnswer::Sorted { .. }) => true,
            (5 | 24 | 25, ReplyAnswer::LocalData) => true,
            (6, ReplyAnswer::Memory(segments)) => segments.is_empty(),
            _ => false,
        };
        assert!(fits, "{kind}: {reply:?}");
    }
    peer.expect_works(&fixture).await;
    drop(peer);
    fixture.finish().await;
}

#[tokio::test]
async fn app_id_without_valid_utf8_is_refused() {
    let fixture = TcpFixture::new().await;
    let mut bytes = frame(&fixture.request(1, &[block(0, 100)])).to_vec();
    bytes[9 + 12] = 0xff;
    refuses(StatusCode::InternalError, &bytes, fixture).await;
}

#[tokio::test]
async fn inconsistent_counts_are_refused() {
    // Offsets in the frame: partition count, block count, data length; see docs/protocol.md §7.4.
    for (at, value) in [(9 + 27, 2), (9 + 27, 0), (9 + 27, -1), (9 + 27, i32::MAX), (9 + 35, 2), (9 + 35, 0)]
    {
        let fixture = TcpFixture::new().await;
        let mut bytes = frame(&fixture.request(1, &[block(0, 100)])).to_vec();
        bytes[at..at + 4].copy_from_slice(&i32::to_be_bytes(value));
        refuses(StatusCode::InternalError, &bytes, fixture).await;
    }
    for (at, value) in
        [(9 + 35, i32::MAX), (9 + 35, -1), (9 + 75, 99), (9 + 75, 101), (9 + 75, i32::MAX), (9 + 75, -1)]
    {
        let fixture = TcpFixture::new().await;
        let mut bytes = frame(&fixture.request(1, &[block(0, 100)])).to_vec();
        bytes[at..at + 4].copy_from_slice(&i32::to_be_bytes(value));
        refuses(StatusCode::InternalError, &bytes, fixture).await;
    }
}

#[tokio::test]
async fn block_outside_its_partition_or_shuffle_is_refused() {
    for at in [9 + 39, 9 + 55] {
        let fixture = TcpFixture::new().await;
        let mut bytes = frame(&fixture.request(1, &[block(0, 100)])).to_vec();
        bytes[at + 3] ^= 1;
        refuses(StatusCode::InternalError, &bytes, fixture).await;
    }
}

#[tokio::test]
async fn trailing_bytes_are_refused() {
    let fixture = TcpFixture::new().await;
    let bytes = frame(&fixture.request(1, &[block(0, 100)]));
    let length = i32::try_from(bytes.len() - 9 + 5).unwrap();
    let mut longer = raw_frame(length, 3, 0, &bytes[9..]);
    longer.put_bytes(0, 5);
    refuses(StatusCode::InternalError, &longer, fixture).await;
}

#[tokio::test]
async fn truncated_send_is_refused() {
    let fixture = TcpFixture::new().await;
    let bytes = frame(&fixture.request(1, &[block(0, 100)]));
    let cut = bytes.len() - 9 - 20;
    let shorter = raw_frame(i32::try_from(cut).unwrap(), 3, 0, &bytes[9..9 + cut]);
    refuses(StatusCode::InternalError, &shorter, fixture).await;
}

#[tokio::test]
async fn frame_inside_another_is_refused() {
    let fixture = TcpFixture::new().await;
    let (first, second) =
        (frame(&fixture.request(1, &[block(0, 100)])), frame(&fixture.request(2, &[block(1, 100)])));
    // The second frame begins in the middle of the first one's data. The first is refused because
    // of its checksum or counts. Then the stream is out of step and ends.
    let mut bytes = first[..first.len() / 2].to_vec();
    bytes.extend_from_slice(&second);
    bytes.extend_from_slice(&first[first.len() / 2..]);
    let mut peer = fixture.raw().await;
    peer.say(&bytes).await;
    while let Ok(reply) = peer.try_hear().await {
        assert_ne!(reply.status, 0, "{reply:?}");
    }
    assert_eq!(fixture.blocks_in_memory().await, []);
    let mut other = fixture.raw().await;
    other.expect_works(&fixture).await;
    drop((peer, other));
    fixture.finish().await;
}

#[tokio::test]
async fn disconnect_within_frame_leaves_nothing() {
    let fixture = TcpFixture::new().await;
    let bytes = frame(&fixture.request(1, &[block(0, 3000), block(1, 1 << 20)]));
    for (before, cut) in (0u8..).zip([5, 9, 15, 40, 85, 2000, 3100, 100_000, bytes.len() - 1]) {
        let request = fixture.request(1, &[block(0, 3000), block(1, 1 << 20)]);
        let mut peer = fixture.raw().await;
        peer.say(&frame(&request)[..cut]).await;
        drop(peer);
        // The connection may not be accepted yet, and counts before it releases its memory.
        let cuts = f64::from(before + 1);
        fixture
            .until("the connection is cut", |fixture| fixture.metric("netty_handle_exception") >= cuts)
            .await;
        fixture.until("closed", |fixture| fixture.metric("netty_active_connection") == 0.0).await;
        fixture
            .memory
            .expire_tickets(uniffle_worker::clock::Instant::now() + std::time::Duration::from_secs(1000));
        fixture.until(&format!("memory is back, cut at {cut}"), |fixture| fixture.used_bytes() == 0).await;
        assert_eq!(fixture.blocks_in_memory().await, []);
    }
    assert_eq!(fixture.metric("netty_handle_exception"), 9.0);
    fixture.finish().await;
}

/// Returns the number in the variable `name`, or `default`. With `TCP_CASES=10000000 TCP_SEED=7`,
/// `cargo test --test contract mutated` runs for hours.
fn number_from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[tokio::test]
async fn mutated_frames_never_break_the_listener() {
    let fixture = TcpFixture::new().await;
    let mut random = ChaCha8Rng::seed_from_u64(number_from_env("TCP_SEED", 1));
    for _ in 0..number_from_env("TCP_CASES", 10_000) {
        let request = fixture.request(1, &[block(0, 50), block(1, 1), block(2, 200)]);
        let mut bytes = frame(&request).to_vec();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(4..bytes.len());
            bytes[at] = random.random();
        }
        let mut peer = fixture.raw().await;
        peer.say(&bytes).await;
        tokio::io::AsyncWriteExt::shutdown(&mut peer.stream).await.ok();
        while peer.try_hear().await.is_ok() {}
        fixture
            .memory
            .expire_tickets(uniffle_worker::clock::Instant::now() + std::time::Duration::from_secs(1000));
    }
    let mut other = fixture.raw().await;
    other.expect_works(&fixture).await;
    drop(other);
    fixture.finish().await;
}
