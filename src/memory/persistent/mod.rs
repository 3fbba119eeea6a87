//! Memory that outlives the process: a region in a file in memory, with a table from which the next
//! process recovers its blocks.
//!
//! Registrations and reports are in the metadata log, and `service::restore` combines both at a
//! start.
//!
//! # Layout
//!
//! One *row* of 64 bytes describes a block completely: id, task, lengths, checksum, shuffle,
//! partition, read position and offsets of its bytes. Rows are in a separate table, because a
//! sealed chain is written to disk unchanged (`docs/architecture.md` §2.2). Rows point directly to
//! bytes, so nothing else must be consistent. Segments, chains, lists and free pieces are rebuilt
//! from the rows.
//!
//! After the death of a process, all its stores up to some instruction are present in program
//! order. No log and no flush is needed. These invariants hold at every store, and `tests.rs`
//! checks every store of random histories:
//!
//! 1. *The bytes of a committed row are final.* The order is bytes, words of the row, commit word.
//! 2. *Bytes have no other user while a row points to them.* A list clears its rows before it frees
//!    its segments.
//! 3. *Places have no other user while they are committed.* They are cleared, then freed. A name is
//!    freed with its last row.
//! 4. *A purged shuffle is gone at once.* Its name is cleared before the shuffle can be registered
//!    again.
//!
//! A send is acknowledged after all its blocks are committed. Part of an unacknowledged send may be
//! present; it is sent again, and its blocks are deduplicated by their ids. If a published batch
//! still has rows, recovery finds its blocks in the tier's index and uses that copy (`restore`).
//! Tickets and unfinished sends have no rows, so their segments are free. A row contains its chain
//! number and list position, by which a restored partition is sorted: readers continue behind the
//! last block that they have.
//!
//! # Costs
//!
//! A commit writes one cache line beside the payload and takes one lock per run of places. Rows are
//! charged like lists, so the region cedes the same amount. Row pages are allocated in chunks of 64
//! KiB and freed with the last row of a chunk. The unused rest of a chunk is charged too. Private
//! memory has none of this.

pub(super) mod file;
pub(super) mod huge;
pub(super) mod layout;
pub(super) mod left;
pub(super) mod names;
pub(super) mod passed;
mod places;
pub(super) mod restore;
pub(super) mod rows;
pub(super) mod sigbus;
pub(super) mod table;

#[cfg(test)]
mod tests;
