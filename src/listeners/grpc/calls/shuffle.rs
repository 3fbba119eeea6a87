//! Small calls of `ShuffleServer`, served through tonic.
//!
//! Hot and large calls are routed by their path before tonic sees them (`router`), so they have no
//! methods here. Calls of the server-side merge are refused, because it is not supported.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::convert::{not_offered, verdict};
use crate::metrics::TransitTimes;
use crate::proto::{self, shuffle_server_server::ShuffleServer};
use crate::service::Service;

type CallAnswer<T> = Result<Response<T>, Status>;

/// Serves the small calls.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct ShuffleCalls {
    service: Arc<Service>,
    sorted_transit: TransitTimes,
}

impl ShuffleCalls {
    pub(in crate::listeners::grpc) fn new(service: Arc<Service>, sorted_transit: TransitTimes) -> Self {
        Self { service, sorted_transit }
    }
}

fn answer<T>(message: T) -> CallAnswer<T> {
    Ok(Response::new(message))
}

#[tonic::async_trait]
impl ShuffleServer for ShuffleCalls {
    async fn unregister_shuffle(
        &self,
        request: Request<proto::ShuffleUnregisterRequest>,
    ) -> CallAnswer<proto::ShuffleUnregisterResponse> {
        let request = request.into_inner();
        let ended = self.service.lifecycle.end_shuffle(&request.app_id, request.shuffle_id).await;
        let (status, ret_msg) = verdict(&self.service, ended, "OK");
        answer(proto::ShuffleUnregisterResponse { status, ret_msg })
    }

    async fn unregister_shuffle_by_app_id(
        &self,
        request: Request<proto::ShuffleUnregisterByAppIdRequest>,
    ) -> CallAnswer<proto::ShuffleUnregisterByAppIdResponse> {
        let ended = self.service.lifecycle.end_app(&request.into_inner().app_id).await;
        let (status, ret_msg) = verdict(&self.service, ended, "OK");
        answer(proto::ShuffleUnregisterByAppIdResponse { status, ret_msg })
    }

    async fn app_heartbeat(
        &self,
        request: Request<proto::AppHeartBeatRequest>,
    ) -> CallAnswer<proto::AppHeartBeatResponse> {
        let (status, ret_msg) =
            verdict(&self.service, self.service.lifecycle.heartbeat(&request.into_inner().app_id), "");
        answer(proto::AppHeartBeatResponse { status, ret_msg })
    }

    /// Called only by clients whose storage has no memory part. Clients of MEMORY_* never call it
    /// (docs/protocol.md §2.6).
    async fn commit_shuffle_task(
        &self,
        request: Request<proto::ShuffleCommitRequest>,
    ) -> CallAnswer<proto::ShuffleCommitResponse> {
        let request = request.into_inner();
        let committed = self.service.ingest.commit_task(&request.app_id, request.shuffle_id).await;
        let commit_count = *committed.as_ref().unwrap_or(&0);
        let (status, ret_msg) = verdict(&self.service, committed.map(drop), "OK");
        answer(proto::ShuffleCommitResponse { commit_count, status, ret_msg })
    }

    async fn finish_shuffle(
        &self,
        request: Request<proto::FinishShuffleRequest>,
    ) -> CallAnswer<proto::FinishShuffleResponse> {
        let request = request.into_inner();
        let finished = self.service.ingest.finish_shuffle(&request.app_id, request.shuffle_id).await;
        let (status, ret_msg) = verdict(&self.service, finished, "");
        answer(proto::FinishShuffleResponse { status, ret_msg })
    }

    async fn start_sort_merge(
        &self,
        _: Request<proto::StartSortMergeRequest>,
    ) -> CallAnswer<proto::StartSortMergeResponse> {
        let (status, ret_msg) = not_offered("Remote merge is disabled, can not report StartSortMerge!");
        answer(proto::StartSortMergeResponse { status, ret_msg })
    }

    async fn get_sorted_shuffle_data(
        &self,
        request: Request<proto::GetSortedShuffleDataRequest>,
    ) -> CallAnswer<proto::GetSortedShuffleDataResponse> {
        self.sorted_transit.arrived(request.get_ref().timestamp);
        let (status, ret_msg) = not_offered("Remote merge is disabled");
        answer(proto::GetSortedShuffleDataResponse { status, ret_msg, ..Default::default() })
    }
}
