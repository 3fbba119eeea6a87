//! Why memory was not given. Each variant exists because `service` answers it differently.

use crate::budget::{HeapFull, NoCapacity};

/// A refusal of this module.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Full for now; asking again later may help.
    #[error("memory is full: {asked} bytes requested, {free} free")]
    NoCapacity {
        /// What was asked for.
        asked: u64,
        /// What was free.
        free: u64,
    },
    /// Others wait, and it is their turn; asking again later helps.
    #[error(
        "memory is full for {asked} bytes: the application uses {held} bytes, its fair share is {share} \
         while others wait"
    )]
    OverShare {
        /// What was asked for.
        asked: u64,
        /// What the application holds.
        held: u64,
        /// What it may hold.
        share: u64,
    },
    /// More than there will ever be; asking again does not help.
    #[error("request of {asked} bytes exceeds the largest possible ticket, {max} bytes")]
    TooLarge {
        /// What was asked for.
        asked: u64,
        /// The largest grant.
        max: u64,
    },
    /// No such ticket, or of another application, or expired, or spent.
    #[error("unknown, expired or spent ticket")]
    UnknownTicket,
    /// More payload than the ticket was for.
    #[error("block of {asked} bytes exceeds the remaining {left} bytes of the ticket")]
    TicketOverspent {
        /// Bytes of the block.
        asked: u64,
        /// Bytes left.
        left: u64,
    },
    /// The bytes of a send came too slowly while others waited for its memory; sending again later helps.
    #[error("send aborted: slower than {bytes_per_sec} bytes/s while others wait for memory; retry")]
    TooSlow {
        /// The least rate.
        bytes_per_sec: u64,
    },
    /// The shuffle was purged meanwhile.
    #[error("the buffer was evicted")]
    Evicted,
    /// The limit on blocks in memory is reached; a flush helps.
    #[error("too many blocks in memory, the limit is {max}")]
    TooManyBlocks {
        /// The limit.
        max: u64,
    },
    /// No heap for a partition that is new.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
}

impl From<NoCapacity> for MemoryError {
    fn from(refusal: NoCapacity) -> Self {
        Self::NoCapacity { asked: refusal.asked, free: refusal.free }
    }
}
