//! Sends: sizes and order of blocks, and sends that are refused as a whole. Also reads of an
//! unknown application.

use bytes::Bytes;
use uniffle_client::block::Block;
use uniffle_client::send::{self, SendForm};
use uniffle_wire::request::{MemoryRequest, ReadRequest};
use uniffle_wire::types::{PartitionId, TicketId};
use uniffle_worker::proto::{SendShuffleDataRequest, ShuffleBlock, StatusCode};

use super::client::{Transport, refused, status, successful};
use crate::grpc::blocks::{batch, block, blocks};
use crate::grpc::fixture::{Setup, key};

over_both_transports!(
    blocks_from_1_byte_to_64_mib_are_served,
    repeated_partition_entries_are_merged,
    invalid_sends_store_nothing_and_leak_nothing,
    send_to_unregistered_partition_stores_nothing,
    send_to_unknown_shuffle_is_refused_and_spends_ticket,
    data_calls_of_unknown_app_return_no_register,
);

async fn blocks_from_1_byte_to_64_mib_are_served(transport: Transport) {
    let setup = Setup { capacity: "200MiB", ..Setup::default() };
    let (fixture, client, key) = transport.start(setup, &[(0, 0)]).await;
    // Lengths around page, segment and chunk sizes.
    let lengths = [1, 2, 31, 4095, 4096, 4097, 65_537, 1 << 20, (2 << 20) - 1, (2 << 20) + 1, 64 << 20];
    let all: Vec<Block> = (0..).zip(lengths).map(|(n, length)| block(0, 1, n, length)).collect();
    let (small, large) = all.split_at(8);
    client.push(&fixture, &key, &batch(0, small)).await;
    let ticket = fixture.client.require_buffer(&key, &batch(0, large)).await.unwrap();
    successful(client.send(&key, ticket, SendForm::Contiguous, &batch(0, large)).await);
    let read = client.read_memory(client.memory_request(&key, 0)).await;
    assert!(read.blocks == small, "blocks differ in a field or in their order");
    // Larger than the limit of the request, and returned completely.
    let (last_block_id, read_buffer_size) = (all[9].meta.block_id.0, 1);
    let request = MemoryRequest { last_block_id, read_buffer_size, ..client.memory_request(&key, 0) };
    let read = client.read_memory(request).await;
    assert_eq!(read.is_end, client.reported_end(false));
    assert!(read.blocks == all[10..]);
    fixture.assert_reads(&key, 0, &all).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &all).await;
    drop(client);
    fixture.finish().await;
}

async fn repeated_partition_entries_are_merged(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 99)]).await;
    let entry = |n: u32| {
        let partition = i32::try_from(n % 100).unwrap();
        (PartitionId(partition), vec![block(partition, 1, n, 50)])
    };
    // The last two entries of partition 0 are adjacent.
    let parts: Vec<_> = (0..200).chain([300, 400]).map(entry).collect();
    for form in client.forms() {
        let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
        successful(client.send(&key, ticket, *form, &parts).await);
    }
    for partition in 0..100 {
        let of_partition = parts.iter().filter(|(id, _)| id.0 == partition);
        let expected: Vec<Block> = of_partition.flat_map(|(_, blocks)| blocks.clone()).collect();
        let read = client.read_memory(client.memory_request(&key, partition)).await;
        assert_eq!(read.blocks, expected);
    }
    drop(client);
    fixture.finish().await;
}

fn last_block(request: &mut SendShuffleDataRequest) -> &mut ShuffleBlock {
    request.shuffle_data.last_mut().unwrap().block.last_mut().unwrap()
}

type Corruption = fn(&mut SendShuffleDataRequest);

/// Invalid values that both protocols can express, with the status of the refusal.
const INVALID: [(&str, StatusCode, Corruption); 9] = [
    ("no entries", StatusCode::InternalError, |request| request.shuffle_data.clear()),
    ("entries without blocks", StatusCode::InternalError, |request| {
        request.shuffle_data.iter_mut().for_each(|part| part.block.clear());
    }),
    ("an empty first block", StatusCode::InternalError, |request| {
        let first = &mut request.shuffle_data[0].block[0];
        (first.length, first.data) = (0, Bytes::new());
    }),
    ("an empty last block", StatusCode::InternalError, |request| {
        let last = last_block(request);
        (last.length, last.data) = (0, Bytes::new());
    }),
    ("a wrong checksum in the last block", StatusCode::InternalError, |request| last_block(request).crc ^= 1),
    ("a checksum of 33 bits", StatusCode::InvalidRequest, |request| last_block(request).crc = 1 << 32),
    ("a negative checksum", StatusCode::InvalidRequest, |request| last_block(request).crc = -1),
    ("the block id -1", StatusCode::InvalidRequest, |request| last_block(request).block_id = -1),
    ("the uncompressed length -1", StatusCode::InvalidRequest, |request| {
        last_block(request).uncompress_length = -1;
    }),
];

async fn invalid_sends_store_nothing_and_leak_nothing(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 2)]).await;
    let parts: Vec<_> = (0..3).map(|p| (PartitionId(p), blocks(p, 1, 0..4))).collect();
    for (name, expected, corrupt) in INVALID {
        let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
        let mut request = send::request(&key, ticket, SendForm::Classic, &parts);
        corrupt(&mut request);
        let reply = client.send_request(request).await;
        assert_eq!((name, status(&reply)), (name, expected));
        refused(reply, expected);
        fixture.assert_memory_is_free().await;
        let again = client.send(&key, ticket, SendForm::Classic, &parts).await;
        refused(again, StatusCode::InternalError);
    }
    for partition in 0..3 {
        fixture.assert_reads(&key, partition, &[]).await;
    }
    client.push(&fixture, &key, &parts).await;
    fixture.assert_reads(&key, 2, &blocks(2, 1, 0..4)).await;
    drop(client);
    fixture.finish().await;
}

async fn send_to_unregistered_partition_stores_nothing(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 1)]).await;
    let parts: Vec<_> = (0..3).map(|p| (PartitionId(p), blocks(p, 1, 0..4))).collect();
    for form in client.forms() {
        let ticket = fixture.client.require_buffer(&key, &parts).await.unwrap();
        let text = refused(client.send(&key, ticket, *form, &parts).await, StatusCode::NoRegister);
        assert!(text.contains("partition 2"), "{text}");
        fixture.assert_memory_is_free().await;
    }
    for partition in [-1, i32::MIN, i32::MAX] {
        let ticket = fixture.ticket(&key, 1000).await;
        let parts = batch(partition, &[block(0, 1, 0, 10)]);
        refused(client.send(&key, ticket, SendForm::Classic, &parts).await, StatusCode::NoRegister);
    }
    client.push(&fixture, &key, &parts[..2]).await;
    drop(client);
    fixture.finish().await;
}

async fn send_to_unknown_shuffle_is_refused_and_spends_ticket(transport: Transport) {
    let (fixture, client, known) = transport.start(Setup::default(), &[(0, 0)]).await;
    let parts = batch(0, &blocks(0, 1, 0..1));
    let ticket = fixture.client.require_buffer(&known, &parts).await.unwrap();
    let unknown = key("app-1", 99);
    refused(client.send(&unknown, ticket, SendForm::Classic, &parts).await, StatusCode::NoRegister);
    fixture.assert_memory_is_free().await;
    refused(client.send(&known, ticket, SendForm::Classic, &parts).await, StatusCode::InternalError);
    client.push(&fixture, &known, &parts).await;
    drop(client);
    fixture.finish().await;
}

async fn data_calls_of_unknown_app_return_no_register(transport: Transport) {
    let (fixture, client, known) = transport.start(Setup::default(), &[(0, 0)]).await;
    let (unknown, parts) = (key("stranger", 1), batch(0, &blocks(0, 1, 0..1)));
    for ticket in [fixture.ticket(&known, 1000).await, TicketId(i64::MAX)] {
        refused(client.send(&unknown, ticket, SendForm::Classic, &parts).await, StatusCode::NoRegister);
    }
    let memory = MemoryRequest { task_filter: Some(&[]), ..client.memory_request(&unknown, 0) };
    for read in [
        ReadRequest::Memory(memory),
        ReadRequest::LocalIndex(client.index_request(&unknown, 0)),
        ReadRequest::LocalData(client.data_request(&unknown, 0, 1)),
    ] {
        assert_eq!(refused(client.read(read).await, StatusCode::NoRegister), "NO_REGISTER");
    }
    assert_eq!(fixture.worker.service().apps().app_count(), 1);
    client.push(&fixture, &known, &parts).await;
    drop(client);
    fixture.finish().await;
}
