//! The bytes of the metadata log: frames, and the records in them. Pure: no I/O.
//!
//! Invariant: a released version of a format is frozen, because later programs must read the logs
//! of earlier ones. A change needs a new version.

pub mod frame;
pub(crate) mod plain;
pub(crate) mod record;
