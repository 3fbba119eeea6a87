//! Answers complete requests: calls the service and encodes the head of the reply.
//!
//! A refusal has the message type of the request's success (docs/protocol.md §7.5), with empty
//! lists, since clients cast a reply to the type they expect.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::proto::StatusCode;
use crate::runtime::Tasks;
use crate::service::{
    MemoryAnswer, MemoryReadRequest, ReadAhead, ReadLimits, ReadRange, RequestedPartition, ResponseWindow,
    ServiceError,
};
use uniffle_base::budget::Charge;
use uniffle_wire::DecodeError;
use uniffle_wire::frame::FrameType;
use uniffle_wire::reply::{ReplyFields, ReplyPrefix, encode_head};
use uniffle_wire::request::{MemoryRequest, ReadRequest};
use uniffle_wire::types::AppId;

use super::shared::{LISTENER, TcpListenerState};
use super::writer::{Outbox, Outgoing, ReplyBody, ReplyGuard};

/// Java's text of success, in every successful reply.
const OK: &str = "OK";
/// Java's text for a read of the server-side merge, which this worker does not offer.
const MERGE_DISABLED: &str = "Remote merge is disabled";
/// `MergeState.INTERNAL_ERROR` of Java.
const MERGE_STATE_ERROR: i32 = 3;

/// Maximum number of local responses in progress per connection: one on the socket and one ready. A
/// slow peer thus holds at most two of `TcpConfig::local_reads_in_flight_max`, whatever it
/// requests.
pub(super) const LOCAL_READS_MAX: usize = 2;

/// A reply whose head is encoded.
pub(super) struct TcpReply {
    pub(super) head: Bytes,
    pub(super) body: ReplyBody,
}

/// Returns the reply to a committed send.
pub(super) fn sent(shared: &TcpListenerState, request_id: i64) -> TcpReply {
    success(request_id, ReplyFields::Rpc, ReplyBody::Empty, 0)
        .unwrap_or_else(|error| refused(shared, FrameType::Send, request_id, &error))
}

/// Returns the reply to a refused request of type `kind`.
pub(super) fn refused(
    shared: &TcpListenerState,
    kind: FrameType,
    request_id: i64,
    error: &ServiceError,
) -> TcpReply {
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
    debug_assert!(encoded.is_ok(), "the text of a refusal must fit into a frame");
    TcpReply { head: head.freeze(), body: ReplyBody::Empty }
}

fn success(
    request_id: i64,
    fields: ReplyFields<'_>,
    body: ReplyBody,
    body_bytes: u64,
) -> Result<TcpReply, ServiceError> {
    let prefix = ReplyPrefix { request_id, status: StatusCode::Success.into(), message: OK };
    let mut head = BytesMut::new();
    encode_head(prefix, fields, body_bytes, &mut head)?;
    Ok(TcpReply { head: head.freeze(), body })
}

/// Returns the reply to a read of sorted data.
pub(super) fn sorted(shared: &TcpListenerState, request_id: i64, message: &[u8]) -> TcpReply {
    if let Ok(ReadRequest::Sorted(request)) = ReadRequest::decode(FrameType::Sorted, message) {
        shared.metrics.of(FrameType::Sorted).transit().arrived(request.timestamp_ms);
    }
    refused(shared, FrameType::Sorted, request_id, &ServiceError::Unsupported(MERGE_DISABLED))
}

/// Returns the reply to a memory read.
pub(super) fn memory(
    shared: &TcpListenerState,
    answers: &ResponseWindow,
    request_id: i64,
    message: &[u8],
) -> TcpReply {
    let _span = shared.config.traces.begin("tcp getMemoryShuffleData", None);
    read_memory(shared, answers, request_id, message)
        .unwrap_or_else(|error| refused(shared, FrameType::Memory, request_id, &error))
}

fn read_memory(
    shared: &TcpListenerState,
    answers: &ResponseWindow,
    request_id: i64,
    message: &[u8],
) -> Result<TcpReply, ServiceError> {
    let ReadRequest::Memory(request) = ReadRequest::decode(FrameType::Memory, message)? else {
        return Err(DecodeError::UnknownType(FrameType::Memory.id()).into());
    };
    shared.metrics.of(FrameType::Memory).transit().arrived(request.timestamp_ms);
    let MemoryAnswer { read, may_copy: _, response_guard } =
        shared.service.reads.read_memory(memory_request(&request, answers))?;
    success(
        request_id,
        ReplyFields::Memory(&read.blocks),
        ReplyBody::Pieces(read.data, response_guard),
        read.length,
    )
}

/// Returns whether a memory read may take too long for a runtime thread. A malformed one is refused
/// at once.
pub(super) fn may_take_long(shared: &TcpListenerState, answers: &ResponseWindow, message: &[u8]) -> bool {
    match ReadRequest::decode(FrameType::Memory, message) {
        Ok(ReadRequest::Memory(request)) => {
            shared.service.reads.may_take_long(&memory_request(&request, answers))
        }
        Ok(_) | Err(_) => false,
    }
}

/// Returns the application of a memory read.
pub(super) fn memory_reader(message: &[u8]) -> Option<AppId> {
    match ReadRequest::decode(FrameType::Memory, message) {
        Ok(ReadRequest::Memory(request)) => AppId::parse(request.target.app).ok(),
        Ok(_) | Err(_) => None,
    }
}

/// Converts the request for the service.
fn memory_request<'a>(request: &MemoryRequest<'a>, answers: &'a ResponseWindow) -> MemoryReadRequest<'a> {
    MemoryReadRequest {
        app: request.target.app,
        shuffle: request.target.shuffle,
        partition: request.target.partition,
        last_block_id: request.last_block_id,
        read_buffer_size: request.read_buffer_size,
        task_filter: request.task_filter,
        window: Some(answers),
    }
}

/// A complete read request, with its charge until the response is ready.
#[derive(Debug)]
pub(super) struct ReadMessage {
    pub(super) bytes: Vec<u8>,
    pub(super) charge: Charge,
}

/// A read of local index or data, which runs as its own task.
#[derive(Debug)]
pub(super) struct LocalRead {
    pub(super) shared: Arc<TcpListenerState>,
    pub(super) outbox: Outbox,
    pub(super) connection: Tasks,
    pub(super) limits: Arc<ReadLimits>,
    pub(super) kind: FrameType,
    pub(super) request_id: i64,
    pub(super) message: ReadMessage,
    pub(super) guard: ReplyGuard,
}

impl LocalRead {
    /// Answers the request, unless the connection ends first.
    pub(super) async fn run(mut self) {
        let cancelled = self.connection.cancelled();
        let name = if self.kind == FrameType::LocalIndex {
            "tcp getLocalShuffleIndex"
        } else {
            "tcp getLocalShuffleData"
        };
        let span = self.shared.config.traces.begin(name, None);
        let TcpReply { head, body } = tokio::select! {
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

    async fn answer(&mut self) -> Result<TcpReply, ServiceError> {
        let request = ReadRequest::decode(self.kind, &self.message.bytes)?;
        // Index requests have no timestamp.
        if let ReadRequest::LocalData(request) = &request {
            self.guard.counted.metrics().transit().arrived(request.timestamp_ms);
        }
        let (reads, target) = (&self.shared.service.reads, request.target());
        let target =
            RequestedPartition { app: target.app, shuffle: target.shuffle, partition: target.partition };
        let (fields, length, chunks, admission) = match &request {
            ReadRequest::LocalIndex(_) => {
                let answer = reads.read_index(&self.limits, target).await?;
                let data_length = i64::try_from(answer.data_length).unwrap_or(i64::MAX);
                (ReplyFields::LocalIndex { data_length }, answer.length, answer.chunks, answer.admission)
            }
            ReadRequest::LocalData(range) => {
                let bytes = ReadRange { offset: range.offset, length: range.length };
                let answer = reads.read_data(&self.limits, target, bytes).await?;
                reads.hint(target, range.hints());
                (ReplyFields::LocalData, answer.length, answer.chunks, answer.admission)
            }
            ReadRequest::Memory(_) | ReadRequest::Sorted(_) => {
                return Err(DecodeError::UnknownType(self.kind.id()).into());
            }
        };
        self.guard.admission = Some(admission);
        let body = if length == 0 {
            ReplyBody::Empty
        } else {
            ReplyBody::Stream { length, chunks: ReadAhead::of(chunks) }
        };
        success(self.request_id, fields, body, length)
    }
}
