//! Why an operation of the client failed. [`ClientError`] is why one call did; most variants here carry one.

use std::fmt;

use uniffle_wire::types::{BlockId, PartitionId};

use crate::grpc::ClientError;

/// Missing blocks that an error names.
const MISSING_NAMED: usize = 16;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument or a setting cannot work.
    #[error("{0}")]
    Invalid(String),
    /// A call to one server or coordinator failed, as often as it was tried.
    #[error("{peer}: {source}")]
    Call {
        /// The server's id or the coordinator's address.
        peer: String,
        /// What the last try said.
        source: ClientError,
    },
    /// What a coordinator assigned cannot be used.
    #[error("the coordinator's assignment: {0}")]
    Assignment(String),
    /// Too few replicas took a partition's blocks, or the report of them.
    #[error("partition {partition}: {acknowledged} of {needed} replicas acknowledged the write")]
    WriteQuorum {
        /// The partition.
        partition: PartitionId,
        /// Replicas that did.
        acknowledged: usize,
        /// `replicas.write`.
        needed: usize,
        /// The last failure.
        source: Option<Box<Error>>,
    },
    /// Too few replicas answered which blocks a partition has.
    #[error("partition {partition}: {answered} of {needed} replicas answered which blocks there are")]
    ReadQuorum {
        /// The partition, or the first of several.
        partition: PartitionId,
        /// Replicas that did.
        answered: usize,
        /// `replicas.read`.
        needed: usize,
        /// The last failure.
        source: Option<Box<Error>>,
    },
    /// Reported blocks are in no tier of any replica.
    #[error("partition {partition}: {missing} of {expected} blocks are missing")]
    MissingBlocks {
        /// The partition.
        partition: PartitionId,
        /// Which.
        missing: MissingBlocks,
        /// Blocks that were reported, and wanted.
        expected: u64,
        /// The last failure while they were looked for, if there was one.
        source: Option<Box<Error>>,
    },
    /// A remote file could not be listed or read.
    #[error("{path}: {source}")]
    Remote {
        /// The file or directory.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

impl Error {
    /// For [`Result::map_err`] of a call to `peer`.
    pub(crate) fn call(peer: &str) -> impl FnOnce(ClientError) -> Self {
        let peer = peer.to_owned();
        move |source| Self::Call { peer, source }
    }
}

/// Blocks that no replica has: how many, and the first of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingBlocks {
    /// How many.
    pub count: u64,
    /// The first, at most 16.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_blocks_are_named_up_to_a_bound() {
        let few = MissingBlocks::of(&croaring::Treemap::of(&[3, 9]));
        assert_eq!(few.to_string(), "2 (3, 9)");
        let many: croaring::Treemap = (0..1000).collect();
        let many = MissingBlocks::of(&many);
        assert_eq!((many.count, many.first.len()), (1000, 16));
        assert!(many.to_string().ends_with("15, …)"), "{many}");
    }
}
