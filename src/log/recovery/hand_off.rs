//! Hand-off of the metadata log to the successor that this process becomes. Pure: no I/O.
//!
//! The outgoing process closes its log and records what is durable in every copy. The successor
//! appends to these copies if all of it is confirmed (`resumable`, `resume`).

use serde::{Deserialize, Serialize};

/// Hand-off record of the outgoing process: the log is closed and its `frames` records are durable
/// in every copy. Successors of other versions read it, so fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HandOff {
    /// Id of the newest epoch.
    pub(in crate::log) epoch: u64,
    /// Number of acknowledged frames in the epoch.
    pub(in crate::log) frames: u64,
    /// Generation of the files with these frames.
    pub(in crate::log) generation: u64,
}
