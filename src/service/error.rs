//! Why a request was refused, and the one mapping to the protocol's status codes.
//!
//! The text goes to `retMsg`. Clients before 0.10 retry codes above 10, which they do not know (docs/protocol.md §1.4);
//! they get `NO_REGISTER` instead, the only "do not retry" that every version understands.

use crate::app::{Counted, OverQuota, RangeError, RegisterError, ReportError};
use crate::budget::heap::HeapFull;
use crate::memory::MemoryError;
use crate::proto::StatusCode;
use crate::tiers::StoreError;
use uniffle_wire::DecodeError;
use uniffle_wire::types::InvalidAppId;

/// A refused request.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The app, shuffle or partition is not known here. The text is Java's literal.
    #[error("NO_REGISTER")]
    NotRegistered,
    /// As above, with what was not found.
    #[error("{0} is not registered")]
    NotRegisteredPart(String),
    /// The app was known to an earlier process, and its registration was not found; with the reason.
    #[error("{0}")]
    Forgotten(String),
    /// The id is no application id.
    #[error("{0}")]
    InvalidApp(#[from] InvalidAppId),
    /// A partition range is none.
    #[error("{0}")]
    InvalidRange(#[from] RangeError),
    /// A field has a value that it cannot have.
    #[error("{field} is {value}, {allowed}")]
    InvalidField {
        /// Name on the wire.
        field: &'static str,
        /// As sent.
        value: i64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A field is larger than is kept of it.
    #[error("{field} has {size} {unit}, the limit is {max}")]
    FieldTooLarge {
        /// Name on the wire.
        field: &'static str,
        /// As sent.
        size: usize,
        /// What is counted.
        unit: &'static str,
        /// The limit.
        max: usize,
    },
    /// The request contradicts itself or what it announced.
    #[error("{0}")]
    Malformed(String),
    /// The request breaks its format.
    #[error("{0}")]
    Undecodable(#[from] DecodeError),
    /// A block's bytes do not have the checksum that came with them.
    #[error("crc of block {block} is {actual:#010x}, the request says {announced:#010x}; nothing was stored")]
    BlockCrc {
        /// Block id.
        block: i64,
        /// Sent.
        announced: u32,
        /// Computed.
        actual: u32,
    },
    /// A registration that is not taken.
    #[error("registration refused: {0}")]
    Register(#[from] RegisterError),
    /// More than an application or a user may have.
    #[error(transparent)]
    Quota(#[from] OverQuota),
    /// No heap for what the request needs.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
    /// See [`ReportError`].
    #[error("{0}")]
    Report(#[from] ReportError),
    /// The memory tier refused.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// The local tier failed.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// A huge partition has filled its share of the memory. The text begins as the Java server's.
    #[error(
        "Huge partition is limited to writing. partition {partition} has received {received} bytes and has \
         {in_memory} in memory, the limit there is {max}"
    )]
    HugePartitionWaits {
        /// Partition id.
        partition: i32,
        /// Bytes.
        received: u64,
        /// Bytes, those in flight included.
        in_memory: u64,
        /// Allowed in memory.
        max: u64,
    },
    /// A partition may not grow any more.
    #[error(
        "partition {partition} would have {coming} bytes, the limit is {max} \
         (app_config.partition_hard_limit); do not retry"
    )]
    PartitionTooLarge {
        /// Partition id.
        partition: i32,
        /// Bytes it would have.
        coming: u64,
        /// The hard limit.
        max: u64,
        /// Whether the client knows the code for it, see [`crate::app::App::is_since_0_10`].
        client_knows_code: bool,
    },
    /// Blocks that were reported are in no tier any more.
    #[error("{0}")]
    Lost(String),
    /// Whether blocks that are wanted are lost is being found out.
    #[error("{0}")]
    Unverified(String),
    /// A disk does not answer: what it holds may be readable again later.
    #[error("{0}")]
    DiskHangs(StoreError),
    /// The node's state does not allow it.
    #[error("{0}")]
    WrongState(&'static str),
    /// No memory for a read came free in time.
    #[error("read memory is full: {asked} bytes were not granted within {waited_ms} ms")]
    NoReadMemory {
        /// Bytes.
        asked: u64,
        /// How long was waited.
        waited_ms: u64,
    },
    /// Answers from memory that are not taken hold what the application or the connection may have of it.
    #[error("unread responses use {pinned} bytes of memory, the limit per {whose} is {max}; retry")]
    TooManyAnswers {
        /// Bytes.
        pinned: u64,
        /// The limit.
        max: u64,
        /// Of an application or a connection.
        whose: &'static str,
    },
    /// The worker is about to stop.
    #[error("the worker is stopping")]
    Stopping,
    /// The remote path cannot be used.
    #[error("{0}")]
    RemoteStorage(StoreError),
    /// All there is below memory is HDFS, and the client does not look there.
    #[error(
        "registration has no remote path, which store_type MEMORY_HDFS requires; set \
         spark.rss.storage.type=MEMORY_HDFS and spark.rss.remote.storage.path"
    )]
    NoRemoteStorage,
    /// A commit has waited for the tiers below memory, in vain.
    #[error("memory was not flushed within {seconds} s")]
    NotFlushed {
        /// How long was waited.
        seconds: u64,
    },
    /// Something that this server does not do.
    #[error("{0}")]
    Unsupported(&'static str),
}

/// The kind of fault of what breaks the format.
pub(super) const MALFORMED: &str = "malformed request";

impl ServiceError {
    /// Whether the budget of the heap refused it.
    #[must_use]
    pub fn is_no_heap(&self) -> bool {
        matches!(self, Self::Report(ReportError::NoHeap(_)) | Self::NoHeap(_))
    }

    /// What the client did wrong, if it did: an operator should hear of it. Not what is everyday: short memory, late
    /// calls of applications that are gone, older attempts, calls that this server does not offer.
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
            Self::Quota(OverQuota { kind: (_, Counted::OpenReads), .. }) => None,
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
                | MemoryError::Evicted
                | MemoryError::TooManyBlocks { .. },
            )
            | Self::NotRegistered
            | Self::NotRegisteredPart(_)
            | Self::Forgotten(_)
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
            | Self::Unsupported(_) => None,
        }
    }

    /// The code that goes to the client.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotRegistered | Self::NotRegisteredPart(_) | Self::Forgotten(_) => StatusCode::NoRegister,
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
            | Self::Quota(OverQuota { kind: (_, Counted::OpenReads), .. })
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
        MemoryError::Evicted => StatusCode::NoRegister,
        MemoryError::UnknownTicket
        | MemoryError::TicketOverspent { .. }
        | MemoryError::TooManyBlocks { .. } => StatusCode::InternalError,
    }
}
