//! Memory that outlives the process: a region in a file in memory, with what the next process needs to read it.
//!
//! Not here: registrations and reports, which are in the metadata log, and what a start does with both (`service::restore`).
//!
//! | file | holds |
//! | --- | --- |
//! | [`layout`] | header, names and rows as words; pure |
//! | [`table`], [`names`], [`rows`] | the front of the region: commits, and what takes them back |
//! | `places` | which places of it are free, and which have pages; pure |
//! | [`file`] | the file: opened, locked, judged, or refused by name |
//! | [`left`] | what is in a file that the configuration does not name any more |
//! | [`passed`] | the file, from the process before |
//! | [`huge`] | whether it is in huge pages, as a word at the start |
//! | [`restore`] | what an earlier process left, as lists of blocks |
//!
//! # The layout, and why
//!
//! One *row* of 64 bytes per block says everything: id, task, lengths, checksum, shuffle, partition, place in the order of
//! its partition, and where its bytes lie. It stands in a table of its own and not beside the payload, since a sealed chain is
//! written to disk as it lies (`docs/architecture.md` §2.2). Rows point straight to bytes, so nothing else has to be
//! consistent: segments, chains, lists and the free pieces of the region are made anew from the rows.
//!
//! After the death of a process all its stores up to some instruction are there, in program order: no log and no flush is
//! needed. What must hold at every store is only this, and `tests.rs` looks at every store of random histories:
//!
//! 1. *A committed row's bytes are final.* Bytes are written, then the words of the row, then its commit word.
//! 2. *Bytes are nobody else's while a row points to them.* A list clears its rows before it gives back its segments.
//! 3. *Places are nobody else's while they are committed*: cleared, then free. A name is free when its last row is.
//! 4. *A purged shuffle is gone at once*: its name is cleared before the shuffle can be registered again.
//!
//! A send is answered after all its blocks are committed. One that was not answered may be there in part; it is sent again and
//! its blocks are dropped by their ids. A batch whose tier has it, but whose rows are still there, is found in that tier's index
//! and taken from there (`restore`). Tickets and unfinished sends have no rows, so their segments are free.
//!
//! Order matters to readers: they go on behind the last block that they have. So a row has the number of its chain and its
//! place in the list, by which a restored partition is sorted.
//!
//! # Costs
//!
//! A commit is 64 bytes beside the payload: one cache line, no lock beyond the one that takes places for a whole run. Rows
//! are charged as lists are, so the region cedes as much. Their pages come in chunks of 64 KiB and go when no row of a chunk is
//! left; what a chunk has beyond its rows is charged likewise. Private memory has none of this.

pub(super) mod file;
pub(super) mod huge;
pub(super) mod layout;
pub(super) mod left;
pub(super) mod names;
pub(super) mod passed;
mod places;
pub(super) mod restore;
pub(super) mod rows;
pub(super) mod table;

#[cfg(test)]
mod tests;
