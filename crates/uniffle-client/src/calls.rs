//! Deadlines and outcomes of calls to any peer.
//!
//! Every call of the client has a deadline. This module does not retry; callers ask [`is_final`]
//! before they do.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::Error;
use crate::grpc::ClientError;
use crate::proto::StatusCode;

/// Runs `call` with a deadline.
pub(crate) async fn within<T>(
    rpc: &'static str,
    deadline: Duration,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    timeout(deadline, call).await.unwrap_or(Err(ClientError::Timeout { rpc, after: deadline }))
}

/// Returns true for statuses that mean "do not retry" in every version of the protocol.
pub(crate) fn is_final(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NoRegister
            | StatusCode::AppNotFound
            | StatusCode::InternalNotRetryError
            | StatusCode::ExceedHugePartitionHardLimit
            | StatusCode::HardSplitFromServer
            | StatusCode::AccessDenied
    )
}

/// Waits for all calls. Returns the first error.
pub(crate) async fn first_error(mut calls: JoinSet<Result<(), Error>>) -> Result<(), Error> {
    let mut result = Ok(());
    while let Some(ended) = calls.join_next().await {
        // A call is only cancelled when its runtime shuts down.
        result = result.and(ended.unwrap_or(Ok(())));
    }
    result
}
