//! Memory that outlives the process: a region in a file in memory, with a table from which the next
//! process recovers its blocks.
//!
//! *Rows* of 64 bytes describe a block completely (one, and one more per three further pieces), so
//! segments, chains, lists and free pieces are rebuilt from the rows. After the death of a process,
//! all its stores up to some instruction are present in program order. No log and no flush is
//! needed. [`table::BlockTable`] has the invariants of the stores. Registrations and reports are in
//! the metadata log; `service::restore` combines both. Private memory has no table.

pub(super) mod file;
pub(super) mod huge;
pub(super) mod layout;
pub(super) mod names;
pub(super) mod orphaned;
pub(super) mod recovery;
pub(super) mod restore;
pub(super) mod rows;
pub(super) mod sigbus;
mod slots;
pub(super) mod table;

#[cfg(test)]
mod tests;
