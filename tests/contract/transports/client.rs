//! A client of the data calls over either transport.
//!
//! Sends are protobuf messages. Reads and all replies are those of the TCP protocol. Each is
//! converted field by field for the other transport, whatever its values, but without placement,
//! storage id and task attempt of reads. Control calls use gRPC with both transports, as in stock
//! clients.

use bytes::{Bytes, BytesMut};
use uniffle_client::grpc::{IndexResponse, MemoryResponse, ShuffleClient};
use uniffle_client::send::{self, Batch, SendForm};
use uniffle_client::tcp::TcpClient;
use uniffle_wire::reply::{Reply, ReplyAnswer, ReplySegment};
use uniffle_wire::request::{
    AnnouncedRange, LocalDataRequest, LocalDataVersion, LocalIndexRequest, MemoryRequest, PartitionTarget,
    Placement, ReadRequest, SendBlock, SendRequest,
};
use uniffle_wire::types::{ShuffleKey, TicketId};
use uniffle_worker::proto::{
    GetLocalShuffleDataRequest, GetLocalShuffleIndexRequest, GetMemoryShuffleDataRequest,
    GetSortedShuffleDataRequest, ReadSegment, SendShuffleDataRequest, ShuffleBlock, ShuffleData,
    ShuffleDataBlockSegment, StatusCode,
};

use crate::grpc::fixture::{Setup, WorkerFixture, key};

/// The transport of a test's data calls.
#[derive(Debug, Clone, Copy)]
pub(super) enum Transport {
    Grpc,
    Tcp,
}

/// A client on one connection.
#[derive(Debug)]
pub(super) enum DataClient {
    Grpc(ShuffleClient),
    Tcp(TcpClient),
}

impl Transport {
    /// Starts a worker, registers shuffle 1 of `app-1` with `ranges`, and connects.
    pub(super) async fn start(
        self,
        setup: Setup<'_>,
        ranges: &[(i32, i32)],
    ) -> (WorkerFixture, DataClient, ShuffleKey) {
        let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
        fixture.client.register(&key, ranges).await.unwrap();
        let client = match self {
            Self::Grpc => DataClient::Grpc(fixture.client.clone()),
            Self::Tcp => DataClient::Tcp(fixture.tcp_client().await),
        };
        (fixture, client, key)
    }
}

impl DataClient {
    /// Returns the forms in which the transport can send blocks.
    pub(super) fn forms(&self) -> &'static [SendForm] {
        match self {
            Self::Grpc(_) => &[SendForm::Classic, SendForm::Contiguous, SendForm::Combined],
            Self::Tcp(_) => &[SendForm::Classic],
        }
    }

    /// Returns `is_end` as the transport reports it: not at all over TCP.
    pub(super) fn reported_end(&self, is_end: bool) -> Option<bool> {
        matches!(self, Self::Grpc(_)).then_some(is_end)
    }

    /// Gets a ticket for `batch` and sends it. Both must succeed.
    pub(super) async fn push(&self, fixture: &WorkerFixture, key: &ShuffleKey, batch: &Batch) {
        let ticket = fixture.client.require_buffer(key, batch).await.unwrap();
        successful(self.send(key, ticket, SendForm::Classic, batch).await);
    }

    /// Sends `batch`. Over TCP the form is ignored.
    pub(super) async fn send(
        &self,
        key: &ShuffleKey,
        ticket: TicketId,
        form: SendForm,
        batch: &Batch,
    ) -> Reply {
        let form = if self.forms().contains(&form) { form } else { SendForm::Classic };
        self.send_request(send::request(key, ticket, form, batch)).await
    }

    /// Sends any request.
    pub(super) async fn send_request(&self, request: SendShuffleDataRequest) -> Reply {
        match self {
            Self::Grpc(client) => {
                let answer = client.raw().send_shuffle_data(request).await.unwrap().into_inner();
                reply(answer.status, answer.ret_msg, ReplyAnswer::Rpc, Bytes::new())
            }
            Self::Tcp(client) => {
                let (request_id, mut frame) = (client.next_request_id(), BytesMut::new());
                tcp_send(request_id, request).encode_frame(&mut frame);
                let reply = client.exchange(request_id, frame.freeze()).await.unwrap();
                assert_eq!(reply.answer, ReplyAnswer::Rpc);
                reply
            }
        }
    }

    /// Sends any read. The reply must be of the request's type, also if it is a refusal.
    pub(super) async fn read(&self, request: ReadRequest<'_>) -> Reply {
        match self {
            Self::Grpc(client) => read_over_grpc(client, &request).await,
            Self::Tcp(client) => {
                let mut frame = BytesMut::new();
                request.encode_frame(&mut frame);
                let reply = client.exchange(request.target().request_id, frame.freeze()).await.unwrap();
                let fits = matches!(
                    (&request, &reply.answer),
                    (ReadRequest::LocalIndex(_), ReplyAnswer::LocalIndex { .. })
                        | (ReadRequest::LocalData(_), ReplyAnswer::LocalData)
                        | (ReadRequest::Memory(_), ReplyAnswer::Memory(_))
                        | (ReadRequest::Sorted(_), ReplyAnswer::Sorted { .. })
                );
                assert!(fits, "{request:?}: {reply:?}");
                reply
            }
        }
    }

    /// Reads memory, which must succeed.
    pub(super) async fn read_memory(&self, request: MemoryRequest<'_>) -> MemoryResponse {
        TcpClient::memory_answer(successful(self.read(ReadRequest::Memory(request)).await)).unwrap()
    }

    /// Reads an index, which must succeed.
    pub(super) async fn read_index(&self, key: &ShuffleKey, partition: i32) -> IndexResponse {
        let request = self.index_request(key, partition);
        TcpClient::index_answer(successful(self.read(ReadRequest::LocalIndex(request)).await)).unwrap()
    }

    /// Returns a partition to read.
    pub(super) fn target<'a>(&self, key: &'a ShuffleKey, partition: i32) -> PartitionTarget<'a> {
        let request_id = match self {
            Self::Grpc(_) => 0,
            Self::Tcp(client) => client.next_request_id(),
        };
        PartitionTarget { request_id, app: key.app.as_str(), shuffle: key.shuffle.0, partition }
    }

    /// Returns a read of up to 1 MiB of memory.
    pub(super) fn memory_request<'a>(&self, key: &'a ShuffleKey, partition: i32) -> MemoryRequest<'a> {
        let (target, read_buffer_size) = (self.target(key, partition), 1 << 20);
        MemoryRequest { target, last_block_id: -1, read_buffer_size, timestamp_ms: 0, task_filter: None }
    }

    /// Returns a read of an index.
    pub(super) fn index_request<'a>(&self, key: &'a ShuffleKey, partition: i32) -> LocalIndexRequest<'a> {
        LocalIndexRequest { target: self.target(key, partition), placement: PLACEMENT }
    }

    /// Returns a read of data of partition 0.
    pub(super) fn data_request<'a>(
        &self,
        key: &'a ShuffleKey,
        offset: i64,
        length: i32,
    ) -> LocalDataRequest<'a> {
        let (target, version) = (self.target(key, 0), LocalDataVersion::V1);
        LocalDataRequest { target, placement: PLACEMENT, offset, length, timestamp_ms: 0, version }
    }
}

const PLACEMENT: Placement = Placement { partitions_per_range: 1, partitions: 1 };

pub(super) fn status(reply: &Reply) -> StatusCode {
    StatusCode::try_from(reply.status).unwrap()
}

pub(super) fn successful(reply: Reply) -> Reply {
    assert_eq!(status(&reply), StatusCode::Success, "{}", reply.message);
    reply
}

/// Asserts that a request was refused with `expected` and no data. Returns the text.
pub(super) fn refused(reply: Reply, expected: StatusCode) -> String {
    assert_eq!((status(&reply), reply.body.len()), (expected, 0), "{}", reply.message);
    assert!(!reply.message.is_empty());
    reply.message
}

fn reply(status: i32, message: String, answer: ReplyAnswer, body: Bytes) -> Reply {
    Reply { request_id: 0, status, message, answer, body }
}

/// Converts a send with data in its blocks.
fn tcp_send(request_id: i64, request: SendShuffleDataRequest) -> SendRequest {
    let block = |block: ShuffleBlock| SendBlock {
        block_id: block.block_id,
        crc: block.crc,
        task_attempt_id: block.task_attempt_id,
        data: block.data,
        uncompressed_length: block.uncompress_length,
        ..SendBlock::default()
    };
    let partition =
        |part: ShuffleData| (part.partition_id, part.block.into_iter().map(block).collect::<Vec<_>>());
    SendRequest {
        request_id,
        app: request.app_id,
        shuffle: request.shuffle_id,
        ticket: request.require_buffer_id,
        partitions: request.shuffle_data.into_iter().map(partition).collect(),
        timestamp_ms: request.timestamp,
    }
}

async fn read_over_grpc(client: &ShuffleClient, request: &ReadRequest<'_>) -> Reply {
    let PartitionTarget { app, shuffle: shuffle_id, partition: partition_id, .. } = *request.target();
    let (mut raw, app_id) = (client.raw(), app.to_owned());
    match request {
        ReadRequest::Memory(request) => {
            let request = GetMemoryShuffleDataRequest {
                app_id,
                shuffle_id,
                partition_id,
                last_block_id: request.last_block_id,
                read_buffer_size: request.read_buffer_size,
                timestamp: request.timestamp_ms,
                serialized_expected_task_ids_bitmap: request.task_filter.map(Bytes::copy_from_slice),
            };
            let answer = raw.get_memory_shuffle_data(request).await.unwrap().into_inner();
            let segments = answer.shuffle_data_block_segments.iter().map(segment).collect();
            let fields = match answer.is_end {
                Some(is_end) => ReplyAnswer::MemoryV2 { segments, is_end },
                None => ReplyAnswer::Memory(segments),
            };
            reply(answer.status, answer.ret_msg, fields, answer.data)
        }
        ReadRequest::LocalIndex(_) => {
            let request = GetLocalShuffleIndexRequest {
                app_id,
                shuffle_id,
                partition_id,
                ..GetLocalShuffleIndexRequest::default()
            };
            let answer = raw.get_local_shuffle_index(request).await.unwrap().into_inner();
            let (data_length, storage_ids) = (answer.data_file_len, Some(answer.storage_ids));
            let fields = ReplyAnswer::LocalIndex { data_length, storage_ids };
            reply(answer.status, answer.ret_msg, fields, answer.index_data)
        }
        ReadRequest::LocalData(request) => {
            let hint = |it: AnnouncedRange| ReadSegment { offset: it.offset, length: it.length };
            let request = GetLocalShuffleDataRequest {
                app_id,
                shuffle_id,
                partition_id,
                offset: request.offset,
                length: request.length,
                timestamp: request.timestamp_ms,
                next_read_segments: request.hints().map(hint).collect(),
                ..GetLocalShuffleDataRequest::default()
            };
            let answer = raw.get_local_shuffle_data(request).await.unwrap().into_inner();
            reply(answer.status, answer.ret_msg, ReplyAnswer::LocalData, answer.data)
        }
        ReadRequest::Sorted(request) => {
            let (merged_block_id, timestamp) = (request.block_id, request.timestamp_ms);
            let request =
                GetSortedShuffleDataRequest { app_id, shuffle_id, partition_id, merged_block_id, timestamp };
            let answer = raw.get_sorted_shuffle_data(request).await.unwrap().into_inner();
            let (next_block_id, state) = (answer.next_block_id, answer.m_state);
            reply(answer.status, answer.ret_msg, ReplyAnswer::Sorted { next_block_id, state }, answer.data)
        }
    }
}

fn segment(segment: &ShuffleDataBlockSegment) -> ReplySegment {
    ReplySegment {
        block_id: segment.block_id,
        offset: i32::try_from(segment.offset).unwrap(),
        length: segment.length,
        uncompressed_length: segment.uncompress_length,
        crc: segment.crc,
        task_attempt_id: segment.task_attempt_id,
    }
}
