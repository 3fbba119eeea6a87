//! Reasons for refusing a request, and the one mapping to the protocol's status codes.
//!
//! The text goes to `retMsg`. Clients before 0.10 retry codes above 10, which they do not know
//! (docs/protocol.md §1.4). They get `NO_REGISTER` instead, the only "do not retry" code that every
//! version understands. Callers must not choose a code themselves.

use crate::app::{OverQuota, QuotaKind, QuotaResource, RangeError, RegisterError, ReportError};
use crate::memory::MemoryError;
use crate::proto::StatusCode;
use crate::store::StoreError;
use uniffle_base::budget::heap::HeapFull;
use uniffle_wire::DecodeError;
use uniffle_wire::types::InvalidAppId;

/// A refused request.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The app, shuffle or partition is not registered. The text is Java's literal.
    #[error("NO_REGISTER")]
    NotRegistered,
    /// The named item is not registered.
    #[error("{0} is not registered")]
    NotRegisteredPart(String),
    /// The app may have been known to an earlier process, and is not registered now. Holds the
    /// reason.
    #[error("{0}")]
    NoLongerRegistered(String),
    /// The application id is invalid.
    #[error("{0}")]
    InvalidApp(#[from] InvalidAppId),
    /// A partition range is invalid.
    #[error("{0}")]
    InvalidRange(#[from] RangeError),
    /// A field has a value outside its domain.
    #[error("{field} is {value}, {allowed}")]
    InvalidField {
        /// Name on the wire.
        field: &'static str,
        /// Value as sent.
        value: i64,
        /// Allowed values.
        allowed: &'static str,
    },
    /// A field exceeds the size that is stored.
    #[error("{field} has {size} {unit}, the limit is {max}")]
    FieldTooLarge {
        /// Name on the wire.
        field: &'static str,
        /// Size as sent.
        size: usize,
        /// Unit of the size.
        unit: &'static str,
        /// The limit.
        max: usize,
    },
    /// The request contradicts itself or its announcement.
    #[error("{0}")]
    Malformed(String),
    /// The request violates its format.
    #[error("{0}")]
    Undecodable(#[from] DecodeError),
    /// A block's bytes do not match the checksum sent with them.
    #[error("crc of block {block} is {actual:#010x}, the request says {announced:#010x}; nothing was stored")]
    BlockCrc {
        /// Block id.
        block: i64,
        /// Checksum as sent.
        announced: u32,
        /// Computed checksum.
        actual: u32,
    },
    /// A registration was refused.
    #[error("registration refused: {0}")]
    Register(#[from] RegisterError),
    /// A quota of the application or user is exceeded.
    #[error(transparent)]
    Quota(#[from] OverQuota),
    /// The heap has no room for the request.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
    /// Settings made at run time are in effect but in no file or object. Holds the path and the
    /// error of each.
    #[error("in effect, but not saved, so a restart forgets it: {0}; the worker retries")]
    NotSaved(String),
    /// See [`ReportError`].
    #[error("{0}")]
    Report(#[from] ReportError),
    /// Memory refused.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// A tier failed.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// A huge partition has filled its share of the memory. The text begins like the Java server's.
    #[error(
        "Huge partition is limited to writing. partition {partition} has received {received} bytes and has \
         {in_memory} in memory, the limit there is {max}"
    )]
    HugePartitionWaits {
        /// Partition id.
        partition: i32,
        /// Received bytes.
        received: u64,
        /// Bytes in memory, including those in flight.
        in_memory: u64,
        /// Maximum bytes in memory.
        max: u64,
    },
    /// The partition has reached its hard limit.
    #[error(
        "partition {partition} would have {total} bytes, the limit is {max} \
         (app_config.partition_hard_limit); do not retry"
    )]
    PartitionTooLarge {
        /// Partition id.
        partition: i32,
        /// Size the partition would have.
        total: u64,
        /// The hard limit.
        max: u64,
        /// True if the client knows the status code for it, see
        /// [`crate::app::App::is_since_0_10`].
        client_knows_code: bool,
    },
    /// Reported blocks are no longer in any tier.
    #[error("{0}")]
    Lost(String),
    /// The worker is still checking whether requested blocks are lost.
    #[error("{0}")]
    Unverified(String),
    /// A disk is unresponsive. Its data may be readable again later.
    #[error("{0}")]
    DiskHangs(StoreError),
    /// The node's state does not allow the request.
    #[error("{0}")]
    WrongState(&'static str),
    /// No read memory, or no permit to read, was granted in time.
    #[error("read memory or permits to read are used up: waited {waited_ms} ms for {requested} bytes")]
    NoReadMemory {
        /// Requested bytes, or 0 if a permit was missing.
        requested: u64,
        /// Waiting time.
        waited_ms: u64,
    },
    /// Unconsumed memory responses fill the limit of the application or connection.
    #[error("unread responses use {pinned} bytes of memory, the limit per {whose} is {max}; retry")]
    TooManyAnswers {
        /// Bytes of these responses.
        pinned: u64,
        /// The limit.
        max: u64,
        /// Owner of the limit: an application or a connection.
        whose: &'static str,
    },
    /// The worker is about to stop, or is being drained.
    #[error("the worker is stopping")]
    Stopping,
    /// The remote path cannot be used.
    #[error("{0}")]
    RemoteStorage(StoreError),
    /// HDFS is the only tier below memory, and the client does not read it.
    #[error(
        "registration has no remote path, which store_type MEMORY_HDFS requires; set \
         spark.rss.storage.type=MEMORY_HDFS and spark.rss.remote.storage.path"
    )]
    NoRemoteStorage,
    /// A commit waited for a flush to the tiers below memory without success.
    #[error("memory was not flushed within {seconds} s")]
    NotFlushed {
        /// Waiting time.
        seconds: u64,
    },
    /// Work on a thread of the worker panicked, or ended without a result at a stop.
    #[error("{0}")]
    Unfinished(String),
    /// This server does not support the operation.
    #[error("{0}")]
    Unsupported(&'static str),
}

/// Fault kind of requests that violate the format.
pub(super) const MALFORMED: &str = "malformed request";

impl ServiceError {
    /// Returns the kind of fault of the client, for logs and metrics. Returns `None` for faults of
    /// the worker, such as failed disks, and for normal conditions: full memory, late calls of
    /// ended applications, unsupported calls.
    #[must_use]
    pub fn client_fault(&self) -> Option<&'static str> {
        match self {
            Self::InvalidApp(_)
            | Self::InvalidRange(_)
            | Self::InvalidField { .. }
            | Self::FieldTooLarge { .. } => Some("invalid value"),
            Self::Report(ReportError::NoHeap(_))
            | Self::Register(RegisterError::NoHeap(_))
            | Self::Memory(MemoryError::NoHeap(_))
            | Self::NoHeap(_) => None,
            Self::Malformed(_) | Self::Undecodable(_) | Self::Report(_) => Some(MALFORMED),
            Self::BlockCrc { .. } => Some("checksum"),
            Self::Quota(OverQuota { kind: QuotaKind { resource: QuotaResource::OpenReads, .. }, .. }) => None,
            Self::Quota(_) | Self::Register(RegisterError::Quota(_)) => Some("quota"),
            Self::Register(_) => Some("too many applications, shuffles or ranges"),
            Self::PartitionTooLarge { .. } => Some("partition beyond the hard limit"),
            Self::RemoteStorage(_) | Self::NoRemoteStorage => Some("remote storage"),
            Self::Memory(MemoryError::UnknownTicket | MemoryError::TicketOverspent { .. }) => Some("ticket"),
            Self::Memory(MemoryError::TooLarge { .. }) => Some("invalid value"),
            Self::Memory(MemoryError::TooSlow { .. }) => Some("slow send"),
            Self::Memory(
                MemoryError::NoCapacity { .. }
                | MemoryError::OverShare { .. }
                | MemoryError::Purged
                | MemoryError::TooManyBlocks { .. },
            )
            | Self::NotRegistered
            | Self::NotRegisteredPart(_)
            | Self::NoLongerRegistered(_)
            | Self::HugePartitionWaits { .. }
            | Self::Store(_)
            | Self::Lost(_)
            | Self::Unverified(_)
            | Self::DiskHangs(_)
            | Self::WrongState(_)
            | Self::NoReadMemory { .. }
            | Self::TooManyAnswers { .. }
            | Self::Stopping
            | Self::NotFlushed { .. }
            | Self::Unfinished(_)
            | Self::NotSaved(_)
            | Self::Unsupported(_) => None,
        }
    }

    /// Returns the status code for the client.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotRegistered | Self::NotRegisteredPart(_) | Self::NoLongerRegistered(_) => {
                StatusCode::NoRegister
            }
            Self::InvalidApp(_)
            | Self::InvalidRange(_)
            | Self::InvalidField { .. }
            | Self::FieldTooLarge { .. }
            | Self::RemoteStorage(_)
            | Self::NoRemoteStorage
            | Self::WrongState(_) => StatusCode::InvalidRequest,
            Self::HugePartitionWaits { .. } => StatusCode::NoBufferForHugePartition,
            Self::PartitionTooLarge { client_knows_code: true, .. } => {
                StatusCode::ExceedHugePartitionHardLimit
            }
            Self::PartitionTooLarge { client_knows_code: false, .. } => StatusCode::NoRegister,
            Self::Memory(error) => memory_status(error),
            Self::NoReadMemory { .. }
            | Self::TooManyAnswers { .. }
            | Self::NoHeap(_)
            | Self::Quota(OverQuota { kind: QuotaKind { resource: QuotaResource::OpenReads, .. }, .. })
            | Self::Stopping
            | Self::Unverified(_)
            | Self::DiskHangs(_) => StatusCode::NoBuffer,
            Self::Malformed(_)
            | Self::Undecodable(_)
            | Self::BlockCrc { .. }
            | Self::Register(_)
            | Self::Quota(_)
            | Self::Report(_)
            | Self::Store(_)
            | Self::Lost(_)
            | Self::NotFlushed { .. }
            | Self::Unfinished(_)
            | Self::NotSaved(_)
            | Self::Unsupported(_) => StatusCode::InternalError,
        }
    }
}

fn memory_status(error: &MemoryError) -> StatusCode {
    match error {
        MemoryError::NoCapacity { .. }
        | MemoryError::OverShare { .. }
        | MemoryError::TooSlow { .. }
        | MemoryError::NoHeap(_) => StatusCode::NoBuffer,
        MemoryError::TooLarge { .. } => StatusCode::InvalidRequest,
        MemoryError::Purged => StatusCode::NoRegister,
        MemoryError::UnknownTicket
        | MemoryError::TicketOverspent { .. }
        | MemoryError::TooManyBlocks { .. } => StatusCode::InternalError,
    }
}
