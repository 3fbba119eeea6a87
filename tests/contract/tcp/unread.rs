//! Memory responses that many connections leave unread.

use std::time::Duration;

use tokio::time::timeout;
use uniffle_base::budget::HeapKind;
use uniffle_client::send::{Batch, require_size};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey};
use uniffle_worker::listeners::tcp::TcpConfig;
use uniffle_worker::proto::StatusCode;

use super::fixture::{PARTITION, SHUFFLE, TcpFixture, block, key, memory_frame};

const OTHER: &str = "other";
const MIB: u64 = 1 << 20;
const PEERS: usize = 3;
const REQUESTS: i64 = 512;
const UNWRITTEN: PartitionId = PartitionId(3);
/// Longer than any response takes. The peers are disconnected much later.
const WAIT: Duration = Duration::from_secs(60);

/// Returns the requests of a connection: four responses of a block, which its socket does not take,
/// then empty ones.
fn reads() -> Vec<u8> {
    let read = |id| memory_frame(id, if id < 4 { PARTITION } else { UNWRITTEN }, 1);
    (0..REQUESTS).map(read).collect::<Vec<_>>().concat()
}

/// The write timeout and the limit of requests have no effect here: only the shares of connections
/// and applications bound these responses.
#[tokio::test]
async fn unread_responses_of_many_connections_delay_no_other_reader() {
    let config = TcpConfig {
        requests_in_flight_per_connection_max: 512,
        write_timeout: Duration::from_secs(3600),
        ..TcpConfig::default()
    };
    let fixture = TcpFixture::with(config).await;
    fixture.register(OTHER).await;
    let client = fixture.client().await;
    let other = ShuffleKey::new(AppId::parse(OTHER).unwrap(), ShuffleId(SHUFFLE));
    let batch: &Batch = &[(PARTITION, vec![block(0, 1 << 20)])];
    fixture.send(&client, batch).await;
    let ticket = fixture.ticket(OTHER, require_size(batch).unwrap() * 2);
    client.send(&other, ticket, batch).await.unwrap();

    let (answered, heap) = (fixture.memory.answered().clone(), fixture.memory.heap().clone());
    let mut peers = Vec::new();
    for _ in 0..PEERS {
        let mut peer = fixture.raw_with_small_window().await;
        peer.say(&reads()).await;
        peers.push(peer);
    }
    // Two peers have at most 1,024 requests, so all three hold some.
    let is_held = |fixture: &TcpFixture| fixture.metric("urpc_request_number") > 1024.0;
    fixture.until("more than 1,024 requests are held", is_held).await;
    for key in [&other, &key()].repeat(8) {
        let read = timeout(WAIT, client.read_memory(key, PARTITION, -1, 1, None)).await;
        let reply = read.expect("an unread response delays another reader").unwrap();
        assert_eq!(reply.status, i32::from(StatusCode::Success), "{key}: {}", reply.message);
        assert_eq!(reply.body.len() as u64, MIB);
        let (used, share) = (answered.used(), answered.capacity() / 8);
        // The response of `client` may not be released yet.
        assert!(
            used > 0 && used <= PEERS as u64 * share + MIB,
            "responses hold {used} bytes, the share of a connection is {share}"
        );
        let lists = heap.of(HeapKind::Answers);
        assert!(lists.used() <= lists.capacity() / 2, "lists take {} bytes", lists.used());
    }
    assert!(is_held(&fixture), "responses were released although the peers have read nothing");
    drop(peers);
    fixture.until("nothing is pinned", |_| answered.used() == 0).await;
    drop(client);
    fixture.service.lifecycle.unregister_app(OTHER).unwrap();
    fixture.finish().await;
}
