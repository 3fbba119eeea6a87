//! Reads of memory and disk: cursors, ranges, filters, hints, and refusals.

use std::sync::Arc;

use croaring::Treemap;
use tokio::net::TcpListener;
use uniffle_client::block::Block;
use uniffle_client::read::encode_bitmap;
use uniffle_client::send::SendForm;
use uniffle_testkit::eventually;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_wire::request::{LocalDataRequest, LocalDataVersion, MemoryRequest, ReadRequest, SortedRequest};
use uniffle_wire::types::{BlockId, PartitionId};
use uniffle_worker::listeners::tcp::{TcpConfig, TcpServer};
use uniffle_worker::proto::StatusCode;

use super::client::{DataClient, Transport, refused, status, successful};
use crate::grpc::blocks::{batch, block, blocks, payload};
use crate::grpc::fixture::{Setup, assert_same, connect_tcp, key};
use crate::grpc::parts::parts;

over_both_transports!(
    memory_read_starts_at_cursor_and_ends_at_limit,
    only_stored_ranges_are_returned,
    read_ahead_hints_are_never_refused,
    invalid_filter_is_refused_and_empty_one_ignored,
    sorted_read_is_refused_with_the_java_text,
    failed_disk_read_is_an_error_and_never_short,
);

fn ids(blocks: &[Block]) -> Vec<BlockId> {
    blocks.iter().map(|block| block.meta.block_id).collect()
}

async fn memory_read_starts_at_cursor_and_ends_at_limit(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 0)]).await;
    let all = blocks(0, 7, 0..10);
    client.push(&fixture, &key, &batch(0, &all)).await;
    let read = async |after: Option<BlockId>, read_buffer_size| {
        let last_block_id = after.map_or(-1, |id| id.0);
        let request = MemoryRequest { last_block_id, read_buffer_size, ..client.memory_request(&key, 0) };
        let read = client.read_memory(request).await;
        (ids(&read.blocks), read.is_end)
    };
    let (more, end) = (client.reported_end(false), client.reported_end(true));

    // 500 + 501 exceed 1,000: the block that reaches the limit is the last.
    assert_eq!(read(None, 1000).await, (ids(&all[..2]), more));
    assert_eq!(read(Some(all[1].meta.block_id), 1 << 20).await, (ids(&all[2..]), end));
    assert_eq!(read(Some(all[9].meta.block_id), 1000).await, (Vec::new(), end));
    // A limit of zero returns one block. A read of exactly all bytes does not report the end.
    assert_eq!(read(None, 0).await, (ids(&all[..1]), more));
    let exact = i32::try_from(payload(&all)).unwrap();
    assert_eq!(read(None, exact).await, (ids(&all), more));
    let mut seen: Vec<BlockId> = Vec::new();
    loop {
        let (next, _) = read(seen.last().copied(), 600).await;
        if next.is_empty() {
            break;
        }
        seen.extend(next);
    }
    assert_eq!(seen, ids(&all));
    drop(client);
    fixture.finish().await;
}

async fn only_stored_ranges_are_returned(transport: Transport) {
    let (fixture, client, mine) = transport.start(Setup::default(), &[(0, 0)]).await;
    let other = key("app-2", 1);
    fixture.client.register(&other, &[(0, 0)]).await.unwrap();
    // Responses have several chunks.
    let all: Vec<Block> = (0..40).map(|n| block(0, 1, n, 100_000)).collect();
    for key in [&mine, &other] {
        client.push(&fixture, key, &batch(0, &all)).await;
    }
    fixture.flush().await;
    let index = client.read_index(&mine, 0).await;
    assert!(index.records.iter().map(|record| record.meta).eq(all.iter().map(|block| block.meta)));
    assert_eq!((index.data_length, index.storage_ids), (Some(4_000_000), Vec::new()));
    let stored: Vec<u8> = all.iter().flat_map(|block| block.data.to_vec()).collect();
    for (offset, length) in [(0, 4_000_000), (1, 3_999_998), (123_456, 7), (3_999_999, 1)] {
        let range = client.data_request(&mine, offset, length);
        let data = successful(client.read(ReadRequest::LocalData(range)).await).body;
        let (start, length) = (usize::try_from(offset).unwrap(), usize::try_from(length).unwrap());
        assert!(data == stored[start..start + length], "wrong bytes in {offset}+{length}");
    }

    let outside = [
        (0, 4_000_001),
        (3_999_999, 2),
        (4_000_000, 1),
        (4_000_001, 1),
        (0, i32::MAX),
        (1 << 40, 1),
        (i64::MAX, 1),
        (i64::MAX, i32::MAX),
    ];
    for (offset, length) in outside {
        let range = client.data_request(&mine, offset, length);
        let reply = client.read(ReadRequest::LocalData(range)).await;
        let status = status(&reply);
        assert!(matches!(status, StatusCode::InternalError | StatusCode::InvalidRequest), "{status:?}");
        refused(reply, status);
    }
    for (offset, length) in [(-1, 10), (i64::MIN, 10), (0, -1), (0, i32::MIN), (-1, -1)] {
        let range = client.data_request(&mine, offset, length);
        refused(client.read(ReadRequest::LocalData(range)).await, StatusCode::InvalidRequest);
    }
    drop(client);
    fixture.finish().await;
}

async fn read_ahead_hints_are_never_refused(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 0)]).await;
    let all = blocks(0, 1, 0..5);
    client.push(&fixture, &key, &batch(0, &all)).await;
    fixture.flush().await;
    let length = i64::try_from(payload(&all)).unwrap();
    let hostile = [(-1, 5), (0, -1), (5, 0), (0, length + 1), (i64::MAX, i64::MAX), (i64::MIN, i64::MIN)];
    // The metric is a sum over all cases. Only the first 16 hints of a request are taken.
    for (hints, bytes_so_far) in [
        (hostile.to_vec(), 0),
        (vec![(0, 1); 100_000], 16),
        (vec![(1, length - 1)], length + 15),
        (vec![(0, 50), (50, 50)], length + 115),
    ] {
        let numbers = hints.iter().flat_map(|(offset, length): &(i64, i64)| [*offset, *length]);
        let hints: Vec<u8> = numbers.flat_map(i64::to_be_bytes).collect();
        let version = LocalDataVersion::V3 { storage_id: 0, hints: &hints, task_attempt_id: 0 };
        let request = LocalDataRequest { version, ..client.data_request(&key, 0, 100) };
        assert_eq!(successful(client.read(ReadRequest::LocalData(request)).await).body.len(), 100);
        #[expect(clippy::cast_precision_loss, reason = "a few")]
        let bytes_so_far = bytes_so_far as f64;
        eventually("the hints are taken", || match fixture.metric("read_hint_bytes") {
            taken if taken == bytes_so_far => Ok(()),
            taken => Err(taken.to_string()),
        })
        .await;
    }
    drop(client);
    fixture.finish().await;
}

async fn invalid_filter_is_refused_and_empty_one_ignored(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 0)]).await;
    let all = blocks(0, 1, 0..5);
    client.push(&fixture, &key, &batch(0, &all)).await;
    let good = encode_bitmap(&Treemap::of(&[1, 2, 1 << 40]));
    let mut filters: Vec<Vec<u8>> = (1..good.len()).map(|cut| good[..cut].to_vec()).collect();
    // Counts of maps and containers that do not exist, and arbitrary bytes.
    filters.push([&[0][..], &[0x7F, 0xFF, 0xFF, 0xFF]].concat());
    filters.push([&[0][..], &[0, 0, 0, 1, 0, 0, 0, 0, 0x3A, 0x30, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]].concat());
    filters.push(vec![0xFF; 100]);
    filters.push(vec![0xFF; 100_000]);
    let request = |filter| MemoryRequest { task_filter: Some(filter), ..client.memory_request(&key, 0) };
    for filter in &filters {
        let reply = client.read(ReadRequest::Memory(request(filter))).await;
        let text = refused(reply, StatusCode::InternalError);
        assert!(text.contains("bitmap"), "{text}");
    }
    for filter in [&[], &good[..]] {
        assert_eq!(ids(&client.read_memory(request(filter)).await.blocks), ids(&all));
    }
    drop(client);
    fixture.finish().await;
}

async fn sorted_read_is_refused_with_the_java_text(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 0)]).await;
    let request = SortedRequest { target: client.target(&key, 0), block_id: 0, length: 1, timestamp_ms: 0 };
    let text = refused(client.read(ReadRequest::Sorted(request)).await, StatusCode::InternalError);
    assert_eq!(text, "Remote merge is disabled");
    drop(client);
    fixture.finish().await;
}

async fn failed_disk_read_is_an_error_and_never_short(transport: Transport) {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let control = fixture.client().await;
    let client = match transport {
        Transport::Grpc => DataClient::Grpc(control.clone()),
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (service, tasks) = (Arc::clone(&fixture.service), &fixture.tasks);
            TcpServer::start(TcpConfig::default(), listener, service, tasks, &fixture.registry).unwrap();
            DataClient::Tcp(connect_tcp(address).await)
        }
    };
    control.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    control.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    fixture.flusher.flush_all();
    fixture.flushed().await;
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)));
    }
    let read = async || client.read(ReadRequest::LocalData(client.data_request(&key, 0, 1000))).await;
    refused(read().await, StatusCode::InternalError);
    fixture.heal().await;
    assert_eq!(successful(read().await).body.len(), 1000);
    let read = control.read_partition(&key, PartitionId(0), &Default::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    drop((client, control));
    fixture.finish().await;
}
