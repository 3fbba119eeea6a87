//! Errors of this crate.
//!
//! `service` maps every variant to a status that clients know. Several variants share a status;
//! their texts, which clients receive, tell them apart.

use uniffle_base::budget::{HeapFull, NoCapacity};

/// Reason why memory was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Full for now; asking again later may help.
    #[error("memory is full: {requested} bytes requested, {free} free")]
    NoCapacity {
        /// Requested bytes.
        requested: u64,
        /// Free bytes.
        free: u64,
    },
    /// Others wait and are served first; asking again later helps.
    #[error(
        "memory is full for {requested} bytes: the application uses {held} bytes, its fair share is {share} \
         while others wait"
    )]
    OverShare {
        /// Requested bytes.
        requested: u64,
        /// Bytes that the application holds.
        held: u64,
        /// Bytes that the application may hold.
        share: u64,
    },
    /// Larger than any possible ticket; asking again does not help.
    #[error("request of {requested} bytes exceeds the largest possible ticket, {max} bytes")]
    TooLarge {
        /// Requested bytes.
        requested: u64,
        /// Bytes of the largest possible ticket.
        max: u64,
    },
    /// The ticket is unknown, expired, revoked, spent, or of another application.
    #[error("unknown, expired or spent ticket")]
    UnknownTicket,
    /// The payload exceeds the ticket.
    #[error("blocks of {requested} bytes in all exceed the remaining {remaining} bytes of the ticket")]
    TicketOverspent {
        /// Bytes of the blocks.
        requested: u64,
        /// Remaining bytes of the ticket.
        remaining: u64,
    },
    /// The bytes of a send arrived too slowly while others waited for its memory; sending again
    /// later helps.
    #[error("send aborted: slower than {bytes_per_sec} bytes/s while others wait for memory; retry")]
    TooSlow {
        /// Minimum rate.
        bytes_per_sec: u64,
    },
    /// The shuffle was purged meanwhile.
    #[error("the shuffle was purged")]
    Purged,
    /// The limit on blocks in memory is reached; a flush helps.
    #[error("too many blocks in memory, the limit is {max}")]
    TooManyBlocks {
        /// Maximum number of blocks.
        max: u64,
    },
    /// The heap has no room for a new partition.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
}

impl From<NoCapacity> for MemoryError {
    fn from(refusal: NoCapacity) -> Self {
        Self::NoCapacity { requested: refusal.requested, free: refusal.free }
    }
}
