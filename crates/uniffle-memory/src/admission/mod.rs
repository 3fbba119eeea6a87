//! Decides who may use how much memory, and when: tickets, fair shares and buffers for reads.
//!
//! [`ticket`] promises memory to senders by the rules of [`fair`]. A [`reservation`] holds the
//! promised memory, first for the ticket and then for the send that spends it. [`prefaulter`]
//! allocates pages before they are promised, and [`metadata_reserve`] leaves a part of the region
//! unused for block lists. Nothing here stores blocks.

pub mod fair;
pub(super) mod fair_shares;
pub(super) mod metadata_reserve;
pub(super) mod prefaulter;
pub(super) mod read_pool;
pub(super) mod reservation;
pub(super) mod ticket;
