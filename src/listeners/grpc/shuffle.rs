//! The small calls of `ShuffleServer` through tonic. The five hot methods never get here (`router`).

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::convert::{layout, not_offered, refusal, register_request, success, verdict};
use crate::metrics::TransitTimes;
use crate::proto::{self, shuffle_server_server::ShuffleServer};
use crate::service::{ReportRequest, Service};
use uniffle_wire::types::PartitionId;

type Answer<T> = Result<Response<T>, Status>;

/// Answers every call of a shuffle's life but the five hot ones.
#[derive(Debug)]
pub(super) struct ShuffleCalls {
    service: Arc<Service>,
    sorted_transit: TransitTimes,
}

impl ShuffleCalls {
    pub(super) fn new(service: Arc<Service>, sorted_transit: TransitTimes) -> Self {
        Self { service, sorted_transit }
    }
}

fn answer<T>(message: T) -> Answer<T> {
    Ok(Response::new(message))
}

fn taken_by_path<T>() -> Answer<T> {
    Err(Status::internal("this method is served ahead of the router"))
}

#[tonic::async_trait]
impl ShuffleServer for ShuffleCalls {
    async fn register_shuffle(
        &self,
        request: Request<proto::ShuffleRegisterRequest>,
    ) -> Answer<proto::ShuffleRegisterResponse> {
        let mut request = request.into_inner();
        let (status, ret_msg) =
            verdict(&self.service, self.service.register(register_request(&mut request)).await, "");
        answer(proto::ShuffleRegisterResponse { status, ret_msg })
    }

    async fn unregister_shuffle(
        &self,
        request: Request<proto::ShuffleUnregisterRequest>,
    ) -> Answer<proto::ShuffleUnregisterResponse> {
        let request = request.into_inner();
        let (status, ret_msg) = verdict(
            &self.service,
            self.service.unregister_shuffle(&request.app_id, request.shuffle_id),
            "OK",
        );
        answer(proto::ShuffleUnregisterResponse { status, ret_msg })
    }

    async fn unregister_shuffle_by_app_id(
        &self,
        request: Request<proto::ShuffleUnregisterByAppIdRequest>,
    ) -> Answer<proto::ShuffleUnregisterByAppIdResponse> {
        let (status, ret_msg) =
            verdict(&self.service, self.service.unregister_app(&request.into_inner().app_id), "OK");
        answer(proto::ShuffleUnregisterByAppIdResponse { status, ret_msg })
    }

    async fn app_heartbeat(
        &self,
        request: Request<proto::AppHeartBeatRequest>,
    ) -> Answer<proto::AppHeartBeatResponse> {
        let (status, ret_msg) =
            verdict(&self.service, self.service.heartbeat(&request.into_inner().app_id), "");
        answer(proto::AppHeartBeatResponse { status, ret_msg })
    }

    async fn report_shuffle_result(
        &self,
        request: Request<proto::ReportShuffleResultRequest>,
    ) -> Answer<proto::ReportShuffleResultResponse> {
        let request = request.into_inner();
        let partitions = request.partition_to_block_ids.into_iter();
        let report = self.service.report(ReportRequest {
            app: &request.app_id,
            shuffle: request.shuffle_id,
            task_attempt: request.task_attempt_id,
            bitmap_count: request.bitmap_num,
            partitions: partitions
                .map(|reported| (PartitionId(reported.partition_id), reported.block_ids))
                .collect(),
        });
        let (status, ret_msg) = verdict(&self.service, report.await, "OK");
        answer(proto::ReportShuffleResultResponse { status, ret_msg })
    }

    async fn get_shuffle_result(
        &self,
        request: Request<proto::GetShuffleResultRequest>,
    ) -> Answer<proto::GetShuffleResultResponse> {
        let request = request.into_inner();
        let partitions = [request.partition_id];
        let layout = layout(request.block_id_layout);
        let result = self.service.results(&request.app_id, request.shuffle_id, &partitions, layout).await;
        let ((status, ret_msg), serialized_bitmap) = match result {
            Ok(bitmap) => (success("OK"), bitmap),
            Err(error) => (refusal(&self.service, &error), bytes::Bytes::new()),
        };
        answer(proto::GetShuffleResultResponse { status, ret_msg, serialized_bitmap })
    }

    async fn get_shuffle_result_for_multi_part(
        &self,
        request: Request<proto::GetShuffleResultForMultiPartRequest>,
    ) -> Answer<proto::GetShuffleResultForMultiPartResponse> {
        let request = request.into_inner();
        let layout = layout(request.block_id_layout);
        let result =
            self.service.results(&request.app_id, request.shuffle_id, &request.partitions, layout).await;
        let ((status, ret_msg), serialized_bitmap) = match result {
            Ok(bitmap) => (success("OK"), bitmap),
            Err(error) => (refusal(&self.service, &error), bytes::Bytes::new()),
        };
        let partition_stats = Vec::new();
        answer(proto::GetShuffleResultForMultiPartResponse {
            status,
            ret_msg,
            serialized_bitmap,
            partition_stats,
        })
    }

    /// Storage without a memory part only; Spark with MEMORY_* never calls it (docs/protocol.md §2.6).
    async fn commit_shuffle_task(
        &self,
        _: Request<proto::ShuffleCommitRequest>,
    ) -> Answer<proto::ShuffleCommitResponse> {
        let (status, ret_msg) = not_offered("Not supported");
        answer(proto::ShuffleCommitResponse { commit_count: 0, status, ret_msg })
    }

    async fn finish_shuffle(
        &self,
        _: Request<proto::FinishShuffleRequest>,
    ) -> Answer<proto::FinishShuffleResponse> {
        let (status, ret_msg) = success("");
        answer(proto::FinishShuffleResponse { status, ret_msg })
    }

    async fn start_sort_merge(
        &self,
        _: Request<proto::StartSortMergeRequest>,
    ) -> Answer<proto::StartSortMergeResponse> {
        let (status, ret_msg) = not_offered("Remote merge is disabled, cannot report StartSortMerge!");
        answer(proto::StartSortMergeResponse { status, ret_msg })
    }

    async fn get_sorted_shuffle_data(
        &self,
        request: Request<proto::GetSortedShuffleDataRequest>,
    ) -> Answer<proto::GetSortedShuffleDataResponse> {
        self.sorted_transit.arrived(request.get_ref().timestamp);
        let (status, ret_msg) = not_offered("Remote merge is disabled");
        answer(proto::GetSortedShuffleDataResponse { status, ret_msg, ..Default::default() })
    }

    async fn require_buffer(
        &self,
        _: Request<proto::RequireBufferRequest>,
    ) -> Answer<proto::RequireBufferResponse> {
        taken_by_path()
    }

    async fn send_shuffle_data(
        &self,
        _: Request<proto::SendShuffleDataRequest>,
    ) -> Answer<proto::SendShuffleDataResponse> {
        taken_by_path()
    }

    async fn get_local_shuffle_index(
        &self,
        _: Request<proto::GetLocalShuffleIndexRequest>,
    ) -> Answer<proto::GetLocalShuffleIndexResponse> {
        taken_by_path()
    }

    async fn get_local_shuffle_data(
        &self,
        _: Request<proto::GetLocalShuffleDataRequest>,
    ) -> Answer<proto::GetLocalShuffleDataResponse> {
        taken_by_path()
    }

    async fn get_memory_shuffle_data(
        &self,
        _: Request<proto::GetMemoryShuffleDataRequest>,
    ) -> Answer<proto::GetMemoryShuffleDataResponse> {
        taken_by_path()
    }
}
