//! Registrations, reports and result queries. Their requests or responses can be large, so they
//! bypass tonic, which would hold them outside the heap budget.
//!
//! `service` interprets them.

use std::net::IpAddr;
use std::sync::Arc;

use tonic::Status;
use tonic::body::Body;

use super::convert::{layout, refusal, register_request, verdict};
use crate::listeners::grpc::transport::message::respond_message;
use crate::listeners::grpc::transport::replies::{Head, Payload, from_memory};
use crate::listeners::grpc::transport::request_collector::run_blocking;
use crate::log::{PartitionBlockIds, PartitionRecordCounts, TaskRecordCount};
use crate::proto::{
    GetShuffleResultForMultiPartRequest, GetShuffleResultForMultiPartResponse, GetShuffleResultRequest,
    GetShuffleResultResponse, PartitionStats, PartitionToBlockIds, ReportShuffleResultRequest,
    ReportShuffleResultResponse, ShuffleRegisterRequest, ShuffleRegisterResponse, TaskAttemptIdToRecords,
};
use crate::runtime::BlockingPool;
use crate::service::{ReportRequest, Results, Service, ServiceError};
use uniffle_base::budget::Charge;
use uniffle_wire::types::PartitionId;

/// Above this count, encoding record numbers takes longer than a switch to another thread.
const INLINE_NUMBERS_MAX: usize = 10_000;

/// Tag of the bitmap field, in the responses to both queries.
const BITMAP: u32 = 3;

type HttpAnswer = Result<http::Response<Body>, Status>;

/// `registerShuffle`
pub(in crate::listeners::grpc) async fn register(
    service: &Arc<Service>,
    from: IpAddr,
    mut request: ShuffleRegisterRequest,
) -> HttpAnswer {
    let registered = service.lifecycle.register(register_request(&mut request, from)).await;
    let (status, ret_msg) = verdict(service, registered, "");
    Ok(respond_message(&ShuffleRegisterResponse { status, ret_msg }))
}

/// `reportShuffleResult`
pub(in crate::listeners::grpc) async fn report(
    service: &Arc<Service>,
    request: ReportShuffleResultRequest,
) -> HttpAnswer {
    let partitions = request.partition_to_block_ids.into_iter();
    let records = request.partition_stats.into_iter().map(records_of).collect();
    let report = service.ingest.report(ReportRequest {
        app: &request.app_id,
        shuffle: request.shuffle_id,
        task_attempt: request.task_attempt_id,
        bitmap_count: request.bitmap_num,
        partitions: partitions
            .map(|PartitionToBlockIds { partition_id, block_ids }| PartitionBlockIds {
                partition: PartitionId(partition_id),
                block_ids,
            })
            .collect(),
        records,
    });
    let (status, ret_msg) = verdict(service, report.await, "OK");
    Ok(respond_message(&ReportShuffleResultResponse { status, ret_msg }))
}

/// `getShuffleResult`
pub(in crate::listeners::grpc) async fn result(
    service: &Arc<Service>,
    request: GetShuffleResultRequest,
) -> HttpAnswer {
    let partitions = [request.partition_id];
    let layout = layout(request.block_id_layout);
    let results = service.reads.results(&request.app_id, request.shuffle_id, &partitions, layout).await;
    answer(service, Head::result("OK"), results)
}

/// `getShuffleResultForMultiPart`
pub(in crate::listeners::grpc) async fn result_of_many(
    service: &Arc<Service>,
    pool: &BlockingPool,
    request: GetShuffleResultForMultiPartRequest,
) -> HttpAnswer {
    let layout = layout(request.block_id_layout);
    let results =
        service.reads.results(&request.app_id, request.shuffle_id, &request.partitions, layout).await;
    let (head, results) = match results {
        Ok(Results { bitmap, records, held }) => {
            let (head, held) = head_with(pool, records, held).await?;
            (head, Ok(Results { bitmap, records: Vec::new(), held }))
        }
        refused => (Head::result("OK"), refused),
    };
    answer(service, head, results)
}

/// Builds a head with the record numbers of partitions. Many of them are encoded on a blocking
/// thread.
async fn head_with(
    pool: &BlockingPool,
    records: Vec<PartitionRecordCounts>,
    held: Charge,
) -> Result<(Head, Charge), Status> {
    let numbers: usize = records.iter().map(|it| it.tasks.len()).sum();
    let encoded = move || {
        let mut head = Head::result("OK");
        let partition_stats = records.into_iter().map(stats_of).collect();
        head.fields(&GetShuffleResultForMultiPartResponse { partition_stats, ..Default::default() });
        (head, held)
    };
    run_blocking(pool, numbers <= INLINE_NUMBERS_MAX, encoded).await
}

fn records_of(stats: PartitionStats) -> PartitionRecordCounts {
    let task = |it: TaskAttemptIdToRecords| TaskRecordCount {
        task_attempt: it.task_attempt_id,
        records: it.record_number,
    };
    PartitionRecordCounts {
        partition: PartitionId(stats.partition_id),
        tasks: stats.task_attempt_id_to_records.into_iter().map(task).collect(),
    }
}

fn stats_of(records: PartitionRecordCounts) -> PartitionStats {
    let task = |it: TaskRecordCount| TaskAttemptIdToRecords {
        task_attempt_id: it.task_attempt,
        record_number: it.records,
    };
    PartitionStats {
        partition_id: records.partition.0,
        task_attempt_id_to_records: records.tasks.into_iter().map(task).collect(),
    }
}

/// Builds the response of both queries, which differ only in the fields of the head.
fn answer(service: &Service, head: Head, results: Result<Results, ServiceError>) -> HttpAnswer {
    match results {
        Ok(Results { bitmap, held, .. }) => {
            let length = bitmap.len() as u64;
            let payload = Payload { bytes: length, pieces: vec![bitmap] };
            from_memory(head, BITMAP, payload, true, held)
        }
        Err(error) => {
            let (status, ret_msg) = refusal(service, &error);
            Ok(respond_message(&GetShuffleResultResponse { status, ret_msg, ..Default::default() }))
        }
    }
}
