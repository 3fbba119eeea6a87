//! A start's work on the metadata log: reading its copies, deciding whether they prove that no
//! acknowledged record is missing, and continuing the log.

pub mod proof;
pub(crate) mod read;
pub(crate) mod resumable;
pub(crate) mod take_over;
