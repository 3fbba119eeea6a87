//! The 13 RPCs of `CoordinatorServer`. The parent module has the logic.
//!
//! As in the Java coordinator, errors are sent as status fields. A gRPC error is used only if the
//! answer has no such field.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use uuid::Uuid;

use super::nodes::InvalidHeartbeat;
use super::{AccessDenied, EmbeddedCoordinator};
use crate::proto::coordinator_server_server::CoordinatorServer;
use crate::proto::{self, StatusCode};
use uniffle_wire::types::AppId;

/// Maximum length of an answer's text, which may repeat long parts of the request (tags).
const TEXT_BYTES_MAX: usize = 1_000;

type RpcResult<T> = Result<Response<T>, Status>;

fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
    text
}

/// Converts a result to status and text. As in Java, the text is empty on success.
fn outcome(result: Result<(), impl std::fmt::Display>) -> (i32, String) {
    match result {
        Ok(()) => (StatusCode::Success.into(), String::new()),
        Err(error) => (StatusCode::InvalidRequest.into(), error.to_string()),
    }
}

#[tonic::async_trait]
impl CoordinatorServer for EmbeddedCoordinator {
    async fn get_shuffle_server_list(
        &self,
        _: Request<()>,
    ) -> RpcResult<proto::GetShuffleServerListResponse> {
        let listed = self.servers().await;
        let (servers, charge) = listed.map_err(|full| Status::resource_exhausted(full.to_string()))?;
        let mut response = Response::new(proto::GetShuffleServerListResponse { servers });
        // The charge is released when the response has been encoded and sent.
        response.extensions_mut().insert(Arc::new(charge));
        Ok(response)
    }

    async fn get_shuffle_server_num(&self, _: Request<()>) -> RpcResult<proto::GetShuffleServerNumResponse> {
        let num = i32::try_from(self.live_nodes(|_| ()).len()).unwrap_or(i32::MAX);
        Ok(Response::new(proto::GetShuffleServerNumResponse { num }))
    }

    async fn get_shuffle_assignments(
        &self,
        request: Request<proto::GetShuffleServerRequest>,
    ) -> RpcResult<proto::GetShuffleAssignmentsResponse> {
        let request = request.into_inner();
        if let Ok(app) = AppId::parse(&request.application_id) {
            self.touch_app(&app, None);
        }
        self.workers_known().await;
        let status = StatusCode::Success.into();
        match self.assign(&request).await {
            Ok((assignments, charge)) => {
                let answer =
                    proto::GetShuffleAssignmentsResponse { status, assignments, ret_msg: String::new() };
                let mut response = Response::new(answer);
                // The charge is released when the response has been encoded and sent.
                response.extensions_mut().insert(Arc::new(charge));
                Ok(response)
            }
            Err(error) => {
                tracing::debug!(shuffle = request.shuffle_id, %error, "assignment refused");
                Ok(Response::new(proto::GetShuffleAssignmentsResponse {
                    status: error.status().into(),
                    assignments: Vec::new(),
                    ret_msg: cut(error.to_string()),
                }))
            }
        }
    }

    async fn heartbeat(
        &self,
        request: Request<proto::ShuffleServerHeartBeatRequest>,
    ) -> RpcResult<proto::ShuffleServerHeartBeatResponse> {
        let peer = request.remote_addr().map(|peer| peer.ip());
        let accepted = self.accept(peer, request.into_inner());
        let is_stranger = accepted.as_ref().is_err_and(InvalidHeartbeat::concerns_networks);
        let (status, ret_msg) = outcome(accepted);
        let status = if is_stranger { StatusCode::AccessDenied.into() } else { status };
        Ok(Response::new(proto::ShuffleServerHeartBeatResponse { status, ret_msg }))
    }

    async fn get_shuffle_data_storage_info(
        &self,
        _: Request<()>,
    ) -> RpcResult<proto::GetShuffleDataStorageInfoResponse> {
        Err(Status::unimplemented("getShuffleDataStorageInfo is not implemented, as in Apache Uniffle"))
    }

    async fn check_service_available(
        &self,
        _: Request<()>,
    ) -> RpcResult<proto::CheckServiceAvailableResponse> {
        let available = !self.live_nodes(|_| ()).is_empty();
        let status = StatusCode::Success.into();
        Ok(Response::new(proto::CheckServiceAvailableResponse { status, available }))
    }

    async fn app_heartbeat(
        &self,
        request: Request<proto::AppHeartBeatRequest>,
    ) -> RpcResult<proto::AppHeartBeatResponse> {
        let app = AppId::parse(&request.into_inner().app_id);
        let (status, ret_msg) = outcome(app.map(|app| self.touch_app(&app, None)));
        Ok(Response::new(proto::AppHeartBeatResponse { status, ret_msg }))
    }

    async fn report_client_operation(
        &self,
        _: Request<proto::ReportShuffleClientOpRequest>,
    ) -> RpcResult<proto::ReportShuffleClientOpResponse> {
        let status = StatusCode::Success.into();
        Ok(Response::new(proto::ReportShuffleClientOpResponse { status, ret_msg: String::new() }))
    }

    async fn register_application_info(
        &self,
        request: Request<proto::ApplicationInfoRequest>,
    ) -> RpcResult<proto::ApplicationInfoResponse> {
        let request = request.into_inner();
        let app = AppId::parse(&request.app_id);
        let (status, ret_msg) = outcome(app.map(|app| self.touch_app(&app, Some(&request.user))));
        Ok(Response::new(proto::ApplicationInfoResponse { status, ret_msg }))
    }

    async fn access_cluster(
        &self,
        request: Request<proto::AccessClusterRequest>,
    ) -> RpcResult<proto::AccessClusterResponse> {
        self.workers_known().await;
        let (metrics, verdict) = (&self.0.metrics, self.access(&request.into_inner()));
        metrics.counts.access_requests_total.inc();
        let response = match verdict {
            Ok(()) => proto::AccessClusterResponse {
                status: StatusCode::Success.into(),
                ret_msg: String::new(),
                uuid: Uuid::new_v4().to_string(),
            },
            Err(denied) => {
                match &denied {
                    AccessDenied::Nodes { .. } => metrics.counts.candidates_denied_total.inc(),
                    AccessDenied::Load { .. } => metrics.counts.load_denied_total.inc(),
                    AccessDenied::Quota { .. } => metrics.counts.quota_denied_total.inc(),
                }
                proto::AccessClusterResponse {
                    status: StatusCode::AccessDenied.into(),
                    ret_msg: cut(denied.to_string()),
                    uuid: String::new(),
                }
            }
        };
        Ok(Response::new(response))
    }

    async fn fetch_client_conf(&self, _: Request<()>) -> RpcResult<proto::FetchClientConfResponse> {
        Ok(Response::new(self.client_conf()))
    }

    async fn fetch_client_conf_v2(
        &self,
        _: Request<proto::FetchClientConfRequest>,
    ) -> RpcResult<proto::FetchClientConfResponse> {
        Ok(Response::new(self.client_conf()))
    }

    async fn fetch_remote_storage(
        &self,
        request: Request<proto::FetchRemoteStorageRequest>,
    ) -> RpcResult<proto::FetchRemoteStorageResponse> {
        let response = match AppId::parse(&request.into_inner().app_id) {
            // Without a configured storage the message is empty, not absent (docs/protocol.md
            // §9.7).
            Ok(app) => proto::FetchRemoteStorageResponse {
                status: StatusCode::Success.into(),
                remote_storage: Some(self.remote_storage(&app).unwrap_or_default()),
            },
            Err(_) => proto::FetchRemoteStorageResponse {
                status: StatusCode::InvalidRequest.into(),
                remote_storage: None,
            },
        };
        Ok(Response::new(response))
    }
}

impl EmbeddedCoordinator {
    fn client_conf(&self) -> proto::FetchClientConfResponse {
        const STORAGE_TYPE: &str = "rss.storage.type";
        let config = &self.0.config;
        let own = [(STORAGE_TYPE, config.storage_type.as_str())];
        let own = own.into_iter().filter(|(key, _)| !config.client_conf.contains_key(*key));
        let configured = config.client_conf.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let item = |(key, value): (&str, &str)| proto::ClientConfItem {
            key: key.to_owned(),
            value: value.to_owned(),
        };
        proto::FetchClientConfResponse {
            status: StatusCode::Success.into(),
            ret_msg: String::new(),
            client_conf: own.chain(configured).map(item).collect(),
        }
    }
}
