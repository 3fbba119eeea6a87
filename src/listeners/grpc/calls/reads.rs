//! The three data reads: decodes a small request, calls the service, and writes the reply by hand.
//!
//! Order, cursors and ranges are decided in `service`; `replies` encodes the reply.

use std::sync::Arc;

use bytes::Bytes;
use tonic::Status;
use tonic::body::Body;

use super::convert::refusal;
use crate::listeners::grpc::transport::message::respond_message;
use crate::listeners::grpc::transport::replies::{Chunks, Head, Payload, from_chunks, from_memory};
use crate::listeners::grpc::transport::request_collector::{INLINE_BYTES_MAX, run_blocking_for};
use crate::metrics::TransitTimes;
use crate::proto::{
    GetLocalShuffleDataRequest, GetLocalShuffleDataResponse, GetLocalShuffleIndexRequest,
    GetLocalShuffleIndexResponse, GetMemoryShuffleDataRequest, GetMemoryShuffleDataResponse, ReadSegment,
};
use crate::runtime::BlockingPool;
use crate::service::{
    MemoryAnswer, MemoryReadRequest, ReadAhead, ReadLimits, ReadRange, RequestedPartition, ResponseWindow,
    Service,
};
use uniffle_wire::request::AnnouncedRange;
use uniffle_wire::types::AppId;

/// Payload fields of the three responses.
const MEMORY_DATA: u32 = 2;
const INDEX_DATA: u32 = 1;
const LOCAL_DATA: u32 = 1;

impl Chunks for ReadAhead {
    async fn next(&mut self) -> Option<Result<Bytes, String>> {
        ReadAhead::next(self).await.map_err(|error| error.to_string()).transpose()
    }
}

/// `getMemoryShuffleData`
pub(in crate::listeners::grpc) async fn memory(
    service: &Arc<Service>,
    transit: &TransitTimes,
    pool: &BlockingPool,
    reading: &ReadLimits,
    request: GetMemoryShuffleDataRequest,
) -> Result<http::Response<Body>, Status> {
    transit.arrived(request.timestamp);
    let filter_bytes = request.serialized_expected_task_ids_bitmap.as_ref().map_or(0, |filter| filter.len());
    let is_quick = filter_bytes <= INLINE_BYTES_MAX
        && !service.reads.may_take_long(&memory_request(&request, reading.window()));
    let (reader, answers) = (Arc::clone(service), reading.window().clone());
    let app = if is_quick { None } else { AppId::parse(&request.app_id).ok() };
    let read = move || reader.reads.read_memory(memory_request(&request, &answers));
    let read = run_blocking_for(app, pool, is_quick, read).await?;
    match read {
        Ok(MemoryAnswer { read, may_copy, response_guard }) => {
            let head = Head::memory(&read.blocks, "OK", read.is_end);
            let payload = Payload { bytes: read.length, pieces: read.data };
            from_memory(head, MEMORY_DATA, payload, may_copy, response_guard)
        }
        Err(error) => {
            let (status, ret_msg) = refusal(service, &error);
            Ok(respond_message(&GetMemoryShuffleDataResponse { status, ret_msg, ..Default::default() }))
        }
    }
}

/// Converts the request for the service.
fn memory_request<'a>(
    request: &'a GetMemoryShuffleDataRequest,
    answers: &'a ResponseWindow,
) -> MemoryReadRequest<'a> {
    // An empty filter is no filter (docs/protocol.md §3.4).
    let task_filter =
        request.serialized_expected_task_ids_bitmap.as_deref().filter(|filter| !filter.is_empty());
    MemoryReadRequest {
        app: &request.app_id,
        shuffle: request.shuffle_id,
        partition: request.partition_id,
        last_block_id: request.last_block_id,
        read_buffer_size: request.read_buffer_size,
        task_filter,
        window: Some(answers),
    }
}

fn target(app: &str, shuffle: i32, partition: i32) -> RequestedPartition<'_> {
    RequestedPartition { app, shuffle, partition }
}

/// `getLocalShuffleIndex`
pub(in crate::listeners::grpc) async fn local_index(
    service: &Arc<Service>,
    reading: &ReadLimits,
    request: GetLocalShuffleIndexRequest,
) -> Result<http::Response<Body>, Status> {
    let target = target(&request.app_id, request.shuffle_id, request.partition_id);
    match service.reads.read_index(reading, target).await {
        Ok(index) => from_chunks(
            Head::local_index("OK", index.data_length),
            INDEX_DATA,
            index.length,
            ReadAhead::of(index.chunks),
            index.admission,
        ),
        Err(error) => {
            let (status, ret_msg) = refusal(service, &error);
            Ok(respond_message(&GetLocalShuffleIndexResponse { status, ret_msg, ..Default::default() }))
        }
    }
}

/// `getLocalShuffleData`
pub(in crate::listeners::grpc) async fn local_data(
    service: &Arc<Service>,
    transit: &TransitTimes,
    reading: &ReadLimits,
    request: GetLocalShuffleDataRequest,
) -> Result<http::Response<Body>, Status> {
    transit.arrived(request.timestamp);
    let target = target(&request.app_id, request.shuffle_id, request.partition_id);
    let range = ReadRange { offset: request.offset, length: request.length };
    match service.reads.read_data(reading, target, range).await {
        Ok(data) => {
            let hint = |it: &ReadSegment| AnnouncedRange { offset: it.offset, length: it.length };
            service.reads.hint(target, request.next_read_segments.iter().map(hint));
            let chunks = ReadAhead::of(data.chunks);
            from_chunks(Head::local_data("OK"), LOCAL_DATA, data.length, chunks, data.admission)
        }
        Err(error) => {
            let (status, ret_msg) = refusal(service, &error);
            Ok(respond_message(&GetLocalShuffleDataResponse { status, ret_msg, ..Default::default() }))
        }
    }
}
