//! Hand-off of the metadata log to the successor that this process becomes. Pure: no I/O.
//!
//! The outgoing process closes its log and says what is durable in every copy. The successor appends to these copies if all is
//! as it was told (`resumable`, `resume`).

use serde::{Deserialize, Serialize};

/// Hand-off record of the outgoing process: the log is closed and its `frames` records are durable in every copy. A successor
/// of another version reads it: fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HandOff {
    /// Id of the newest epoch.
    pub(super) epoch: u64,
    /// Acknowledged frames in it.
    pub(super) frames: u64,
    /// Generation of the files that hold them.
    pub(super) generation: u64,
}
