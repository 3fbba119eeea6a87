//! `ShuffleServerInternal`: what coordinators and administrators call.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::convert::verdict;
use crate::proto::shuffle_server_internal_server::ShuffleServerInternal;
use crate::proto::{
    CancelDecommissionRequest, CancelDecommissionResponse, DecommissionRequest, DecommissionResponse,
};
use crate::service::Service;

/// See the module doc.
#[derive(Debug)]
pub(super) struct InternalCalls {
    service: Arc<Service>,
}

impl InternalCalls {
    pub(super) fn new(service: Arc<Service>) -> Self {
        Self { service }
    }
}

#[tonic::async_trait]
impl ShuffleServerInternal for InternalCalls {
    async fn decommission(
        &self,
        _: Request<DecommissionRequest>,
    ) -> Result<Response<DecommissionResponse>, Status> {
        let (status, ret_msg) = verdict(self.service.decommission(), "");
        Ok(Response::new(DecommissionResponse { status, ret_msg }))
    }

    async fn cancel_decommission(
        &self,
        _: Request<CancelDecommissionRequest>,
    ) -> Result<Response<CancelDecommissionResponse>, Status> {
        let (status, ret_msg) = verdict(self.service.cancel_decommission(), "");
        Ok(Response::new(CancelDecommissionResponse { status, ret_msg }))
    }
}
