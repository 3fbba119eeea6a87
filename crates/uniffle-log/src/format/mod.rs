//! The bytes of the metadata log: frames, marks, and the records in frames.
//!
//! Invariant: a released version of a format is frozen, because later programs must read the logs
//! of earlier ones. A change needs a new version. `plain` is a fast decoder of reports with the
//! same result as `record`. Pure: no I/O.

pub mod frame;
pub(crate) mod plain;
pub(crate) mod record;
