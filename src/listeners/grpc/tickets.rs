//! `requireBuffer`, served without tonic. Every send needs one, more when memory is short, and
//! tonic's codec allocates 16 KiB for each call.
//!
//! `service` decides who gets a ticket.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;

use super::convert::{refusal, success};
use super::message::respond_message;
use crate::proto::{RequireBufferRequest, RequireBufferResponse};
use crate::service::{RequireRequest, Service};

/// Ticket id of a refusal.
const NO_TICKET: i64 = -1;

/// `requireBuffer`
pub(super) async fn require_buffer(
    service: &Arc<Service>,
    waiting: &Semaphore,
    request: RequireBufferRequest,
) -> Result<http::Response<Body>, Status> {
    let asked = RequireRequest {
        app: &request.app_id,
        shuffle: request.shuffle_id,
        bytes: request.require_size,
        partitions: &request.partition_ids,
        partition_sizes: &request.partition_require_sizes,
    };
    let grant = service.ingest.require_buffer_in_line(asked, waiting).await;
    let (require_buffer_id, (status, ret_msg), need_split_partition_ids) = match grant {
        Ok(grant) => (grant.ticket, success(""), grant.split_partitions),
        Err(error) => (NO_TICKET, refusal(service, &error), Vec::new()),
    };
    Ok(respond_message(&RequireBufferResponse {
        require_buffer_id,
        status,
        ret_msg,
        need_split_partition_ids,
    }))
}
