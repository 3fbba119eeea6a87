//! Slow peers under paused time, where the clock advances whenever everything is idle.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use uniffle_worker::listeners::tcp::TcpConfig;

use super::fixture::{PARTITION, TcpFixture, block, frame, memory_frame};

/// Like [`TcpFixture::until`], but the paused time advances between two checks.
async fn until_later(fixture: &TcpFixture, what: &str, reached: impl Fn(&TcpFixture) -> bool) {
    for _ in 0..3600 {
        if reached(fixture) {
            return;
        }
        sleep(Duration::from_secs(1)).await;
    }
    panic!("timed out: {what}");
}

/// The default `frame_timeout` is 30 s.
#[tokio::test(start_paused = true)]
async fn stalled_send_is_dropped_and_its_memory_freed() {
    let fixture = TcpFixture::new().await;
    let mut peer = fixture.raw().await;
    let bytes = frame(&fixture.request(1, &[block(0, 1 << 20)]));
    peer.say(&bytes[..bytes.len() / 2]).await;
    let start = Instant::now();
    peer.expect_close().await;
    assert!(start.elapsed() >= Duration::from_secs(29), "{:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(35), "{:?}", start.elapsed());
    assert_eq!(fixture.used_bytes(), 0);
    drop(peer);
    fixture.finish().await;
}

/// The default `fill_timeout` is 120 s.
#[tokio::test(start_paused = true)]
async fn slow_send_is_dropped_at_the_fill_deadline() {
    let fixture = TcpFixture::new().await;
    let mut peer = fixture.raw().await;
    let bytes = frame(&fixture.request(1, &[block(0, 1 << 20)]));
    let start = Instant::now();
    let mut sent = 0;
    for byte in &bytes {
        // The kernel accepts the first write after the worker has closed, but not the second.
        if tokio::io::AsyncWriteExt::write_all(&mut peer.stream, &[*byte]).await.is_err() {
            break;
        }
        sent += 1;
        sleep(Duration::from_secs(1)).await;
    }
    assert!((119..125).contains(&sent), "{sent}");
    assert!(start.elapsed() < Duration::from_secs(130));
    assert_eq!(fixture.used_bytes(), 0);
    drop(peer);
    fixture.finish().await;
}

/// The default `opening_timeout` is 30 s.
#[tokio::test(start_paused = true)]
async fn connection_without_header_is_closed() {
    let fixture = TcpFixture::new().await;
    let header = frame(&fixture.request(1, &[block(0, 10)]))[..3].to_vec();
    for bytes in [&[], &header[..]] {
        let mut peer = fixture.raw().await;
        peer.say(bytes).await;
        let start = Instant::now();
        peer.expect_close().await;
        assert!(start.elapsed() < Duration::from_secs(35), "{:?}", start.elapsed());
    }
    fixture.finish().await;
}

/// The default `idle_timeout` is 15 minutes. Java clients close theirs after 10 minutes.
#[tokio::test(start_paused = true)]
async fn idle_connection_is_closed_after_its_timeout() {
    let fixture = TcpFixture::new().await;
    let mut peer = fixture.raw().await;
    peer.expect_works(&fixture).await;
    for _ in 0..3 {
        sleep(Duration::from_secs(14 * 60)).await;
        let request = fixture.request(1, &[block(0, 10)]);
        peer.say(&frame(&request)).await;
        assert_eq!(peer.hear().await.status, 0);
    }
    let start = Instant::now();
    peer.expect_close().await;
    assert!(start.elapsed() >= Duration::from_secs(14 * 60));
    assert_eq!(fixture.metric("netty_handle_exception"), 0.0);
    drop(peer);
    fixture.finish().await;
}

/// Backpressure: a peer that does not read its replies is not read either, and finally dropped.
/// The default `write_timeout` is 120 s.
#[tokio::test(start_paused = true)]
async fn peer_that_stops_reading_is_dropped_and_memory_freed() {
    let config = TcpConfig { requests_in_flight_per_connection_max: 8, ..TcpConfig::default() };
    let fixture = TcpFixture::with(config).await;
    let client = fixture.client().await;
    let blocks: Vec<_> = (0..16).map(|i| block(i, 1 << 20)).collect();
    fixture.send(&client, &[(PARTITION, blocks)]).await;
    drop(client);
    // A normal window might take all responses.
    let mut peer = fixture.raw_with_small_window().await;
    let frames: Vec<_> = (0..100).map(|id| memory_frame(id, PARTITION, 1 << 30)).collect();
    let start = Instant::now();
    peer.say(&frames.concat()).await;
    until_later(&fixture, "dropped", |fixture| fixture.metric("netty_handle_exception") > 0.0).await;
    assert!(start.elapsed() >= Duration::from_secs(119), "{:?}", start.elapsed());
    // At most 8 requests are in progress. Up to 4 more have their responses in socket buffers.
    let begun = fixture.metric("netty_get_memory_shuffle_data_request_total");
    assert!(begun <= 12.0, "{begun}");
    drop(peer);
    fixture.finish().await;
}
