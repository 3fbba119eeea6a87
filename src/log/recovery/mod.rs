//! A start's work on the metadata log: reading its copies, deciding whether they prove that no
//! acknowledged record is missing, and continuing the log.

pub mod proof;
pub(super) mod read;
pub(super) mod resumable;
pub(super) mod take_over;
