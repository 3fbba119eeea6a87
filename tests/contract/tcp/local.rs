//! Reads of the local tier over TCP.

use bytes::BytesMut;
use uniffle_client::block::Block;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_wire::reply::ReplyAnswer;
use uniffle_wire::request::{LocalDataRequest, LocalDataVersion, PartitionTarget, Placement, ReadRequest};
use uniffle_worker::proto::StatusCode;

use super::fixture::{APP, PARTITION, SHUFFLE, TcpFixture, block, key};

fn joined(blocks: &[Block]) -> Vec<u8> {
    blocks.iter().flat_map(|block| block.data.iter().copied()).collect()
}

#[tokio::test]
async fn index_and_data_match_published_blocks() {
    let fixture = TcpFixture::new().await;
    let client = fixture.client().await;
    let blocks: Vec<_> = (0..40).map(|i| block(i, 100_000)).collect();
    fixture.store(&blocks).await;
    let index = client.read_index(&key(), PARTITION).await.unwrap();
    assert_eq!(index.answer, ReplyAnswer::LocalIndex { data_length: 4_000_000, storage_ids: None });
    assert_eq!(index.body.len(), 40 * 40);
    let all = joined(&blocks);
    for (offset, length) in [(0, 4_000_000), (1, 3_999_998), (123_456, 7), (3_999_999, 1)] {
        let data = client.read_data(&key(), PARTITION, offset, length).await.unwrap();
        let (start, length) = (usize::try_from(offset).unwrap(), usize::try_from(length).unwrap());
        assert!(data.body == all[start..start + length], "{offset}, {length}");
    }
    drop((index, client));
    fixture.finish().await;
}

#[tokio::test]
async fn unpublished_range_is_refused() {
    let fixture = TcpFixture::new().await;
    let client = fixture.client().await;
    fixture.store(&[block(0, 100)]).await;
    for (offset, length) in [(0, 101), (100, 1), (-1, 1), (0, -1), (i64::MAX, 1), (i64::MAX, i32::MAX)] {
        let refused = client.read_data(&key(), PARTITION, offset, length).await.unwrap_err();
        assert!(refused.status().is_some(), "{offset}, {length}: {refused}");
    }
    assert_eq!(client.read_data(&key(), PARTITION, 0, 100).await.unwrap().body.len(), 100);
    drop(client);
    fixture.finish().await;
}

#[tokio::test]
async fn hints_for_next_reads_are_accepted() {
    let fixture = TcpFixture::new().await;
    fixture.store(&[block(0, 100)]).await;
    let mut peer = fixture.raw().await;
    let hostile = [(-1, 5), (0, -1), (5, 0), (0, 101), (i64::MAX, i64::MAX), (i64::MIN, i64::MIN)];
    let rounds = [(vec![(0, 50), (50, 50)], 100.0), (hostile.to_vec(), 100.0), (vec![(0, 1); 10_000], 116.0)];
    for (hints, bytes) in rounds {
        let pairs = hints.iter().flat_map(|(offset, length): &(i64, i64)| [*offset, *length]);
        let hints: Vec<u8> = pairs.flat_map(i64::to_be_bytes).collect();
        let request = LocalDataRequest {
            target: PartitionTarget { request_id: 1, app: APP, shuffle: SHUFFLE, partition: PARTITION.0 },
            placement: Placement { partitions_per_range: 1, partitions: 1 },
            offset: 0,
            length: 100,
            timestamp_ms: 0,
            version: LocalDataVersion::V3 { storage_id: 0, hints: &hints, task_attempt_id: 0 },
        };
        let mut frame = BytesMut::new();
        ReadRequest::LocalData(request).encode_frame(&mut frame);
        peer.say(&frame).await;
        assert_eq!(peer.hear().await.body.len(), 100);
        fixture.until("the hints are taken", |fixture| fixture.metric("read_hint_bytes") >= bytes).await;
        assert_eq!(fixture.metric("read_hint_bytes"), bytes);
    }
    drop(peer);
    fixture.finish().await;
}

#[tokio::test]
async fn many_local_reads_share_the_read_memory() {
    let fixture = TcpFixture::new().await;
    let blocks: Vec<_> = (0..30).map(|i| block(i, 100_000)).collect();
    fixture.store(&blocks).await;
    let all = joined(&blocks);
    // 60 responses of 3 MB in flight with 8 MiB of read memory.
    let clients = [fixture.client().await, fixture.client().await, fixture.client().await];
    let key = key();
    let reads = (0..60).map(|i| clients[i % 3].read_data(&key, PARTITION, 0, 3_000_000));
    for read in futures::future::join_all(reads).await {
        assert!(read.unwrap().body == all);
    }
    drop(clients);
    fixture.finish().await;
}

#[tokio::test]
async fn hung_disk_blocks_neither_memory_reads_nor_sends() {
    let fixture = TcpFixture::new().await;
    let client = fixture.client().await;
    fixture.store(&[block(0, 100)]).await;
    fixture.faults.add(Rule::always(Operation::Read, Fault::Hang));
    let key = key();
    let mut hung = Box::pin(client.read_data(&key, PARTITION, 0, 100));
    assert!(futures::poll!(&mut hung).is_pending());
    fixture.until("the disk hangs", |fixture| fixture.faults.hung() > 0).await;
    let in_progress = |fixture: &TcpFixture| {
        ["netty_get_local_shuffle_data_request", "urpc_request_number", "read_local_data_file_thread_num"]
            .map(|name| fixture.metric(name))
    };
    assert_eq!(in_progress(&fixture), [1.0; 3]);
    assert_eq!(fixture.metric("read_local_data_file_buffer_size"), 100.0);
    for i in 1..20 {
        fixture.send(&client, &[(PARTITION, vec![block(i, 1000)])]).await;
        client.read_memory(&key, PARTITION, -1, 1 << 20, None).await.unwrap();
    }
    assert!(futures::poll!(&mut hung).is_pending());
    fixture.faults.clear();
    fixture.faults.release().await;
    assert_eq!((&mut hung).await.unwrap().body.len(), 100);
    drop(hung);
    fixture.until("the read is answered", |fixture| in_progress(fixture) == [0.0; 3]).await;
    drop(client);
    fixture.finish().await;
}

#[tokio::test]
async fn disk_error_before_response_returns_a_status() {
    let fixture = TcpFixture::new().await;
    let client = fixture.client().await;
    fixture.store(&[block(0, 100)]).await;
    fixture.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)));
    let refused = client.read_data(&key(), PARTITION, 0, 100).await.unwrap_err();
    assert_eq!(refused.status(), Some(StatusCode::InternalError));
    fixture.faults.clear();
    assert!(client.read_data(&key(), PARTITION, 0, 100).await.is_ok());
    drop(client);
    fixture.finish().await;
}

#[tokio::test]
async fn disk_error_within_response_closes_connection() {
    let fixture = TcpFixture::new().await;
    let (client, other) = (fixture.client().await, fixture.client().await);
    let blocks: Vec<_> = (0..40).map(|i| block(i, 100_000)).collect();
    fixture.store(&blocks).await;
    fixture.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).after(1));
    let cut =
        client.read_data(&key(), PARTITION, 0, 4_000_000).await.map(|reply| reply.body.len()).unwrap_err();
    assert_eq!(cut.status(), None, "{cut}");
    fixture.faults.clear();
    assert!(other.read_data(&key(), PARTITION, 0, 4_000_000).await.unwrap().body == joined(&blocks));
    assert!(fixture.metric("netty_handle_exception") >= 1.0);
    drop((client, other));
    fixture.finish().await;
}
