//! Errors of the client's operations.
//!
//! An operation consists of calls to one or more peers. If a call fails, the error names the peer
//! or partition, and its source is the last failure. By then all retries are used up, or the
//! failure forbids them ([`is_final`]). Every call has a deadline ([`within`]).

use std::fmt;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use uniffle_wire::types::{BlockId, PartitionId};

use crate::grpc::ClientError;
use crate::proto::StatusCode;

/// Largest number of missing blocks that an error lists.
const MISSING_NAMED: usize = 16;

/// Error of an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument or a setting is invalid.
    #[error("{0}")]
    Invalid(String),
    /// A call to one server or coordinator failed, and no retry is left or allowed.
    #[error("{peer}: {source}")]
    Call {
        /// The server's id or the coordinator's address.
        peer: String,
        /// Error of the last attempt.
        source: ClientError,
    },
    /// The assignment of a coordinator is unusable.
    #[error("unusable assignment from the coordinator: {0}")]
    Assignment(String),
    /// Too few replicas acknowledged a partition's blocks or their report.
    #[error("partition {partition}: {acknowledged} of {needed} replicas acknowledged the write")]
    WriteQuorum {
        /// The partition.
        partition: PartitionId,
        /// Number of replicas that acknowledged.
        acknowledged: usize,
        /// `replicas.write`.
        needed: usize,
        /// The last failure.
        source: Option<Box<Error>>,
    },
    /// Too few replicas answered the query for a partition's blocks.
    #[error("partition {partition}: {answered} of {needed} replicas answered the query for its blocks")]
    ReadQuorum {
        /// The partition, or the first of several.
        partition: PartitionId,
        /// Number of replicas that answered.
        answered: usize,
        /// `replicas.read`.
        needed: usize,
        /// The last failure.
        source: Option<Box<Error>>,
    },
    /// Reported blocks could be read from no tier of any replica.
    #[error("partition {partition}: {missing} of {expected} blocks are missing")]
    MissingBlocks {
        /// The partition.
        partition: PartitionId,
        /// The missing blocks.
        missing: MissingBlocks,
        /// Number of blocks that were reported and wanted.
        expected: u64,
        /// Last failure during the search, if there was one.
        source: Option<Box<Error>>,
    },
    /// A remote file could not be listed or read.
    #[error("{path}: {source}")]
    Remote {
        /// The file or directory.
        path: String,
        /// I/O error.
        source: std::io::Error,
    },
}

impl Error {
    /// Returns a function that wraps the error of a call to `peer`, for [`Result::map_err`].
    pub(crate) fn call(peer: &str) -> impl FnOnce(ClientError) -> Self {
        let peer = peer.to_owned();
        move |source| Self::Call { peer, source }
    }

    /// Returns the error of a call whose task panicked, or was cancelled with its runtime.
    pub(crate) fn unfinished(error: &JoinError) -> Self {
        Self::Invalid(format!("a call did not end: {error}"))
    }
}

/// Blocks that could be read from no replica.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingBlocks {
    /// Number of missing blocks.
    pub count: u64,
    /// The first missing blocks, at most 16.
    pub first: Vec<BlockId>,
}

impl MissingBlocks {
    pub(crate) fn of(missing: &croaring::Treemap) -> Self {
        let first = missing.iter().take(MISSING_NAMED).map(|id| BlockId(id.cast_signed())).collect();
        Self { count: missing.cardinality(), first }
    }
}

impl fmt::Display for MissingBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.count)?;
        for (number, id) in self.first.iter().enumerate() {
            write!(f, "{}{id}", if number == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.count > self.first.len() as u64 { ", …)" } else { ")" })
    }
}

/// Runs `call` with a deadline.
pub(crate) async fn within<T>(
    rpc: &'static str,
    deadline: Duration,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    timeout(deadline, call).await.unwrap_or(Err(ClientError::Timeout { rpc, after: deadline }))
}

/// Returns true for statuses that mean "do not retry" in every protocol version that has them.
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
        result = result.and(ended.unwrap_or_else(|error| Err(Error::unfinished(&error))));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panicked_call_is_no_success() {
        let mut calls = JoinSet::new();
        calls.spawn(async { panic!("boom") });
        calls.spawn(async { Ok(()) });
        let error = first_error(calls).await.unwrap_err().to_string();
        assert!(error.contains("boom"), "{error}");
    }

    #[test]
    fn missing_blocks_are_listed_up_to_a_limit() {
        let few = MissingBlocks::of(&croaring::Treemap::of(&[3, 9]));
        assert_eq!(few.to_string(), "2 (3, 9)");
        let many: croaring::Treemap = (0..1000).collect();
        let many = MissingBlocks::of(&many);
        assert_eq!((many.count, many.first.len()), (1000, 16));
        assert!(many.to_string().ends_with("15, …)"), "{many}");
    }
}
