//! Registrations, reports and result queries: requests or answers that can be large, so they do not go through tonic,
//! which would hold them outside the heap's budget.
//!
//! Not here: what they mean (`service`).

use std::sync::Arc;

use tonic::Status;
use tonic::body::Body;

use super::convert::{layout, refusal, register_request, verdict};
use super::inbound::{Inbound, nested, numbers};
use super::message::{RequestBody, respond_message};
use super::replies::{Head, from_memory};
use crate::proto::{
    GetShuffleResultForMultiPartRequest, GetShuffleResultRequest, GetShuffleResultResponse,
    ReportShuffleResultRequest, ReportShuffleResultResponse, ShuffleRegisterRequest, ShuffleRegisterResponse,
};
use crate::service::{ReportRequest, Results, Service, ServiceError};
use uniffle_wire::types::PartitionId;

/// The bitmap's field, in the answers to both queries.
const BITMAP: u32 = 3;

type Answer = Result<http::Response<Body>, Status>;

/// `registerShuffle`
pub(super) async fn register<B: RequestBody>(
    service: &Arc<Service>,
    (inbound, request_bytes_max): (&Inbound, u32),
    mut body: B,
) -> Answer {
    let (mut request, _charge): (ShuffleRegisterRequest, _) =
        inbound.message(&mut body, request_bytes_max, nested).await?;
    let (status, ret_msg) =
        verdict(service, service.lifecycle.register(register_request(&mut request)).await, "");
    Ok(respond_message(&ShuffleRegisterResponse { status, ret_msg }))
}

/// `reportShuffleResult`
pub(super) async fn report<B: RequestBody>(
    service: &Arc<Service>,
    (inbound, request_bytes_max): (&Inbound, u32),
    mut body: B,
) -> Answer {
    let (request, _charge): (ReportShuffleResultRequest, _) =
        inbound.message(&mut body, request_bytes_max, nested).await?;
    let partitions = request.partition_to_block_ids.into_iter();
    let report = service.ingest.report(ReportRequest {
        app: &request.app_id,
        shuffle: request.shuffle_id,
        task_attempt: request.task_attempt_id,
        bitmap_count: request.bitmap_num,
        partitions: partitions
            .map(|reported| (PartitionId(reported.partition_id), reported.block_ids))
            .collect(),
    });
    let (status, ret_msg) = verdict(service, report.await, "OK");
    Ok(respond_message(&ReportShuffleResultResponse { status, ret_msg }))
}

/// `getShuffleResult`
pub(super) async fn result<B: RequestBody>(
    service: &Arc<Service>,
    (inbound, request_bytes_max): (&Inbound, u32),
    mut body: B,
) -> Answer {
    let (request, _charge): (GetShuffleResultRequest, _) =
        inbound.message(&mut body, request_bytes_max, numbers).await?;
    let partitions = [request.partition_id];
    let layout = layout(request.block_id_layout);
    answer(service, service.reads.results(&request.app_id, request.shuffle_id, &partitions, layout).await)
}

/// `getShuffleResultForMultiPart`
pub(super) async fn result_of_many<B: RequestBody>(
    service: &Arc<Service>,
    (inbound, request_bytes_max): (&Inbound, u32),
    mut body: B,
) -> Answer {
    let (request, _charge): (GetShuffleResultForMultiPartRequest, _) =
        inbound.message(&mut body, request_bytes_max, numbers).await?;
    let layout = layout(request.block_id_layout);
    answer(
        service,
        service.reads.results(&request.app_id, request.shuffle_id, &request.partitions, layout).await,
    )
}

/// The two answers have the same fields, as far as they have any here.
fn answer(service: &Service, results: Result<Results, ServiceError>) -> Answer {
    match results {
        Ok(Results { bitmap, held }) => {
            from_memory(Head::result("OK"), BITMAP, bitmap.len() as u64, vec![bitmap], held)
        }
        Err(error) => {
            let (status, ret_msg) = refusal(service, &error);
            Ok(respond_message(&GetShuffleResultResponse { status, ret_msg, ..Default::default() }))
        }
    }
}
