//! An assignment: validation of the request, size of the answer, and the answer itself.
//!
//! The parent module chooses the servers, and charges an answer to the heap before it is built, so
//! the estimated size must be an upper bound. [`super::assign`] places the ranges.

use super::assign::{AssignmentShape, NodeCandidate, NodeOrder, PartitionSelection, RangePlacement};
use super::nodes::{NODES_MAX, TAGS_MAX};
use crate::proto::{self, StatusCode};
use uniffle_base::budget::HeapFull;

/// Reason why there is no assignment. The text is sent to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssignmentError {
    /// A field of the request is invalid.
    #[error("invalid assignment request: {0}")]
    Invalid(&'static str),
    /// The answer would have too many ranges.
    #[error(
        "{requested} ranges (counted per replica) requested, the limit is {max} \
         (embedded_coordinator.assignment_ranges_max)"
    )]
    TooLarge {
        /// The limit.
        max: u64,
        /// Ranges times replicas.
        requested: u64,
    },
    /// No heap was available for the answer in time, or the answer is larger than the heap allows.
    #[error("{ranges} ranges: {full}")]
    NoHeap {
        /// Number of ranges of the assignment.
        ranges: u64,
        /// The refusal of the heap budget.
        full: HeapFull,
    },
    /// A limitation of Java's `PARTITION_BALANCE`, with Java's text.
    #[error("PartitionNumPerRange must be one")]
    RangeMustBeOne,
    /// Fewer candidates than replicas.
    #[error(
        "There aren't enough shuffle servers: {found} of {wanted} are active and have the tags {tags:?} \
         (alive: {alive})"
    )]
    NotEnough {
        /// Candidates.
        found: usize,
        /// Replicas.
        wanted: usize,
        /// Tags that were required.
        tags: Vec<String>,
        /// Nodes alive.
        alive: usize,
    },
}

impl AssignmentError {
    /// Returns the status code that is sent with the text.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::InvalidRequest,
            Self::TooLarge { .. } | Self::NoHeap { .. } | Self::RangeMustBeOne | Self::NotEnough { .. } => {
                StatusCode::InternalError
            }
        }
    }
}

/// Configured limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct AssignmentBounds {
    /// Maximum number of ranges, counted per replica.
    pub(super) ranges: u64,
    /// Maximum number of servers of a shuffle.
    pub(super) servers: usize,
    pub(super) order: NodeOrder,
}

/// A validated request for an assignment.
#[derive(Debug)]
pub(super) struct AssignmentRequest {
    pub(super) partitions: u64,
    per_range: u64,
    pub(super) ranges: u64,
    pub(super) replicas: usize,
    pub(super) servers: usize,
    concurrency: u64,
}

/// A validated assignment with its servers.
#[derive(Debug)]
pub(super) struct AssignmentPlan {
    pub(super) wanted: AssignmentRequest,
    servers: Vec<proto::ShuffleServerId>,
    pub(super) candidates: Vec<NodeCandidate>,
    placement: RangePlacement,
}

impl AssignmentPlan {
    pub(super) fn new(
        selection: PartitionSelection,
        wanted: AssignmentRequest,
        servers: Vec<proto::ShuffleServerId>,
        candidates: Vec<NodeCandidate>,
    ) -> Result<Self, AssignmentError> {
        let shape = AssignmentShape {
            ranges: index(wanted.ranges),
            replicas: wanted.replicas,
            partitions_per_range: index(wanted.per_range),
            concurrency: index(wanted.concurrency),
        };
        let hosts: Vec<&str> = servers.iter().map(|server| server.ip.as_str()).collect();
        let placement =
            RangePlacement::plan(selection, &hosts, shape).ok_or(AssignmentError::Invalid("no placement"))?;
        Ok(Self { wanted, servers, candidates, placement })
    }

    /// Returns an upper bound of the answer's heap: the message, and a doubling buffer with its
    /// bytes.
    pub(super) fn answer_bytes(&self) -> u64 {
        /// Overhead of the allocation of each string and list.
        const ALLOCATION: usize = 16;
        const FIELDS: usize = 24;
        let texts = |server: &proto::ShuffleServerId| server.id.len() + server.ip.len();
        let texts = self.servers.iter().map(texts).max().unwrap_or(0);
        let message = size_of::<proto::ShuffleServerId>() + texts + 2 * ALLOCATION;
        let of_server = message + 2 * (texts + FIELDS);
        let of_range = size_of::<proto::PartitionRangeAssignment>() + ALLOCATION + 2 * FIELDS;
        let replicas = self.wanted.replicas as u64;
        self.wanted.ranges.saturating_mul(of_range as u64 + replicas.saturating_mul(of_server as u64))
    }

    /// Returns an assignment per range, and the number of partitions given to each server.
    pub(super) fn assignments(&self) -> (Vec<proto::PartitionRangeAssignment>, Vec<u64>) {
        let Self { wanted, servers, placement, .. } = self;
        let mut given = vec![0; servers.len()];
        let mut assignments = Vec::with_capacity(placement.ranges());
        for k in 0..placement.ranges() {
            let mut server = Vec::with_capacity(wanted.replicas);
            for at in placement.servers_of(k) {
                given[at] += wanted.per_range;
                server.push(servers[at].clone());
            }
            let (start_partition, end_partition) = wanted.bounds(k);
            assignments.push(proto::PartitionRangeAssignment { start_partition, end_partition, server });
        }
        (assignments, given)
    }
}

impl AssignmentRequest {
    pub(super) fn check(
        request: &proto::GetShuffleServerRequest,
        bounds: AssignmentBounds,
    ) -> Result<Self, AssignmentError> {
        let positive = |number: i32, text: &'static str| match u64::try_from(number) {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(AssignmentError::Invalid(text)),
        };
        let partitions = positive(request.partition_num, "partitionNum must be positive")?;
        let per_range = positive(request.partition_num_per_range, "partitionNumPerRange must be positive")?;
        let replicas = positive(request.data_replica, "dataReplica must be positive")?;
        if request.require_tags.len() > TAGS_MAX {
            return Err(AssignmentError::Invalid("at most 64 tags may be required"));
        }
        if request.faulty_server_ids.len() > NODES_MAX {
            return Err(AssignmentError::Invalid("more faulty servers than a cluster can have"));
        }
        let ranges = partitions.div_ceil(per_range);
        let requested = ranges.saturating_mul(replicas);
        if requested > bounds.ranges {
            return Err(AssignmentError::TooLarge { requested, max: bounds.ranges });
        }
        if bounds.order == NodeOrder::PartitionBalance && per_range != 1 {
            return Err(AssignmentError::RangeMustBeOne);
        }
        let nodes_max = bounds.servers;
        let asked_servers = usize::try_from(request.assignment_shuffle_server_number).unwrap_or(0);
        let servers = if (1..nodes_max).contains(&asked_servers) { asked_servers } else { nodes_max };
        let replicas = index(replicas);
        let concurrency = u64::try_from(request.estimate_task_concurrency).unwrap_or(0).min(partitions);
        Ok(Self { partitions, per_range, ranges, replicas, servers: servers.max(replicas), concurrency })
    }

    /// Returns the first and last partition of range `k`. As in Java, the last range may end after
    /// the last partition.
    fn bounds(&self, k: usize) -> (i32, i32) {
        let start = k as u64 * self.per_range;
        let end = start + self.per_range - 1;
        (i32::try_from(start).unwrap_or(i32::MAX), i32::try_from(end).unwrap_or(i32::MAX))
    }
}

/// Converts a number that is at most `i32::MAX` or `RANGES_MAX`, which fits into `usize`.
fn index(number: u64) -> usize {
    usize::try_from(number).expect("the number is at most i32::MAX or RANGES_MAX")
}
