//! Answers requests that are complete: calls the service and encodes the head of the reply.
//!
//! Every refusal goes out in the type that the request's success would have (docs/protocol.md §7.5), with empty lists:
//! clients cast a reply to the type that they expect.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::sync::Semaphore;

use crate::budget::Charge;
use crate::budget::line::Reader;
use crate::clock::timeout;
use crate::proto::StatusCode;
use crate::runtime::Tasks;
use crate::service::{AnswersOfConnection, MemoryAnswer, MemoryReadRequest, ReadAhead, ServiceError};
use uniffle_wire::DecodeError;
use uniffle_wire::frame::FrameType;
use uniffle_wire::reply::{ReplyFields, ReplyPrefix, encode_head};
use uniffle_wire::request::{MemoryRequest, ReadRequest};
use uniffle_wire::types::AppId;

use super::shared::{LISTENER, Shared};
use super::writer::{Body, Outbox, Outgoing, ReplyGuard};

/// Java's word for success, in every reply.
const OK: &str = "OK";
/// Java's words for a read of the server-side merge, which this worker does not do.
const MERGE_DISABLED: &str = "Remote merge is disabled";
/// `MergeState.INTERNAL_ERROR` of Java.
const MERGE_STATE_ERROR: i32 = 3;

/// Local answers that one connection has under way: one on the socket, and one that is ready when it is its turn.
/// So a peer that reads slowly holds one of `TcpConfig::local_reads_in_flight_max`, whatever it asks for.
pub(super) const LOCAL_TURNS: usize = 2;

/// A reply's head and body.
pub(super) type Reply = (Bytes, Body);

/// The reply to a send that was committed.
pub(super) fn sent(shared: &Shared, request_id: i64) -> Reply {
    success(request_id, ReplyFields::Rpc, Body::Empty, 0)
        .unwrap_or_else(|error| refused(shared, FrameType::Send, request_id, &error))
}

/// The reply to a request of type `kind` that was refused.
pub(super) fn refused(shared: &Shared, kind: FrameType, request_id: i64, error: &ServiceError) -> Reply {
    shared.service.note_refusal(LISTENER, error);
    let fields = match kind {
        FrameType::LocalIndex | FrameType::LocalIndexReply | FrameType::LocalIndexV2Reply => {
            ReplyFields::LocalIndex { data_length: 0 }
        }
        FrameType::LocalData
        | FrameType::LocalDataV2
        | FrameType::LocalDataV3
        | FrameType::LocalDataReply => ReplyFields::LocalData,
        FrameType::Memory | FrameType::MemoryReply | FrameType::MemoryV2Reply => ReplyFields::Memory(&[]),
        FrameType::Sorted | FrameType::SortedReply => {
            ReplyFields::Sorted { next_block_id: -1, state: MERGE_STATE_ERROR }
        }
        FrameType::Send | FrameType::RpcReply => ReplyFields::Rpc,
    };
    let prefix = ReplyPrefix { request_id, status: error.status().into(), message: &error.to_string() };
    let mut head = BytesMut::new();
    let encoded = encode_head(prefix, fields, 0, &mut head);
    debug_assert!(encoded.is_ok(), "a refusal fits a frame");
    (head.freeze(), Body::Empty)
}

fn success(
    request_id: i64,
    fields: ReplyFields<'_>,
    body: Body,
    body_bytes: u64,
) -> Result<Reply, ServiceError> {
    let prefix = ReplyPrefix { request_id, status: StatusCode::Success.into(), message: OK };
    let mut head = BytesMut::new();
    encode_head(prefix, fields, body_bytes, &mut head)?;
    Ok((head.freeze(), body))
}

/// The reply to a read of sorted data.
pub(super) fn sorted(shared: &Shared, request_id: i64, message: &[u8]) -> Reply {
    if let Ok(ReadRequest::Sorted(request)) = ReadRequest::decode(FrameType::Sorted, message) {
        shared.metrics.of(FrameType::Sorted).transit().arrived(request.timestamp_ms);
    }
    refused(shared, FrameType::Sorted, request_id, &ServiceError::Unsupported(MERGE_DISABLED))
}

/// The reply to a read of memory.
pub(super) fn memory(
    shared: &Shared,
    answers: &AnswersOfConnection,
    request_id: i64,
    message: &[u8],
) -> Reply {
    let _span = shared.config.traces.begin("tcp getMemoryShuffleData", None);
    read_memory(shared, answers, request_id, message)
        .unwrap_or_else(|error| refused(shared, FrameType::Memory, request_id, &error))
}

fn read_memory(
    shared: &Shared,
    answers: &AnswersOfConnection,
    request_id: i64,
    message: &[u8],
) -> Result<Reply, ServiceError> {
    let ReadRequest::Memory(request) = ReadRequest::decode(FrameType::Memory, message)? else {
        return Err(DecodeError::UnknownType(FrameType::Memory.id()).into());
    };
    shared.metrics.of(FrameType::Memory).transit().arrived(request.timestamp_ms);
    let MemoryAnswer { read, may_copy: _, answering } =
        shared.service.reads.read_memory(memory_request(&request, answers))?;
    success(request_id, ReplyFields::Memory(&read.blocks), Body::Pieces(read.data, answering), read.length)
}

/// Whether a read of memory may take longer than a runtime's thread has. One that is not understood is refused at once.
pub(super) fn may_take_long(shared: &Shared, answers: &AnswersOfConnection, message: &[u8]) -> bool {
    match ReadRequest::decode(FrameType::Memory, message) {
        Ok(ReadRequest::Memory(request)) => {
            shared.service.reads.may_take_long(&memory_request(&request, answers))
        }
        Ok(_) | Err(_) => false,
    }
}

/// What the service is asked.
fn memory_request<'a>(
    request: &MemoryRequest<'a>,
    answers: &'a AnswersOfConnection,
) -> MemoryReadRequest<'a> {
    MemoryReadRequest {
        app: request.target.app,
        shuffle: request.target.shuffle,
        partition: request.target.partition,
        last_block_id: request.last_block_id,
        read_buffer_size: request.read_buffer_size,
        task_filter: request.task_filter,
        of_connection: Some(answers),
    }
}

/// A read request that has come whole, with what it is charged until its answer is there.
#[derive(Debug)]
pub(super) struct ReadMessage {
    pub(super) bytes: Vec<u8>,
    pub(super) charge: Charge,
}

/// A read of local index or data, a task of its own.
#[derive(Debug)]
pub(super) struct LocalRead {
    pub(super) shared: Arc<Shared>,
    pub(super) outbox: Outbox,
    pub(super) connection: Tasks,
    pub(super) turns: Arc<Semaphore>,
    pub(super) kind: FrameType,
    pub(super) request_id: i64,
    pub(super) message: ReadMessage,
    pub(super) guard: ReplyGuard,
}

impl LocalRead {
    /// Answers, unless the connection ends before.
    pub(super) async fn run(mut self) {
        let cancelled = self.connection.cancelled();
        let name = if self.kind == FrameType::LocalIndex {
            "tcp getLocalShuffleIndex"
        } else {
            "tcp getLocalShuffleData"
        };
        let span = self.shared.config.traces.begin(name, None);
        let (head, body) = tokio::select! {
            biased;
            answer = self.answer() => match answer {
                Ok(reply) => reply,
                Err(error) => refused(&self.shared, self.kind, self.request_id, &error),
            },
            () = cancelled => return,
        };
        drop(span);
        self.outbox.post(Outgoing { head, body, guard: self.guard });
    }

    async fn answer(&mut self) -> Result<Reply, ServiceError> {
        let request = ReadRequest::decode(self.kind, &self.message.bytes)?;
        // The index's request does not say when it was sent.
        if let ReadRequest::LocalData(request) = &request {
            self.guard.counted.metrics().transit().arrived(request.timestamp_ms);
        }
        self.guard.turn = Arc::clone(&self.turns).acquire_owned().await.ok();
        let wait = self.shared.config.local_read_wait;
        let service = &self.shared.service;
        let target = request.target();
        // An id that is none is refused by the service.
        if let Ok(app) = AppId::parse(target.app) {
            let reader = Reader { app: Some(app), weight: 1 };
            let place = timeout(wait, self.shared.local_reads.take(&reader, 1)).await;
            let waited_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            self.guard.local_read =
                Some(place.map_err(|_| ServiceError::NoReadMemory { asked: 0, waited_ms })?);
        }
        let (fields, length, chunks) = match &request {
            ReadRequest::LocalIndex(_) => {
                let answer = service.reads.read_index(target.app, target.shuffle, target.partition).await?;
                let data_length = i64::try_from(answer.data_length).unwrap_or(i64::MAX);
                (ReplyFields::LocalIndex { data_length }, answer.length, answer.chunks)
            }
            ReadRequest::LocalData(range) => {
                let (offset, length) = (range.offset, range.length);
                let answer = service
                    .reads
                    .read_data(target.app, target.shuffle, target.partition, offset, length)
                    .await?;
                service.reads.hint(target.app, target.shuffle, target.partition, range.hints());
                (ReplyFields::LocalData, answer.length, answer.chunks)
            }
            ReadRequest::Memory(_) | ReadRequest::Sorted(_) => {
                return Err(DecodeError::UnknownType(self.kind.id()).into());
            }
        };
        let body =
            if length == 0 { Body::Empty } else { Body::Stream { length, chunks: ReadAhead::of(chunks) } };
        success(self.request_id, fields, body, length)
    }
}
