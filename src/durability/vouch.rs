//! What a process that lets go of the metadata log says of a directory that it cannot take along, because it does not
//! answer: that nothing newer is there. It holds the directory's lock and goes on holding it, so nobody else can have used
//! it; with its word the absence of the directory is no reason to refuse anything. It is said to one successor, not
//! written down: the start after that one has to see the directory again. Pure: no I/O.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The word for the directories that stay behind. A successor of another version reads it: fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Vouch {
    /// Id of the newest epoch there is.
    pub(super) epoch: u64,
    /// Frames that are acknowledged in it.
    pub(super) frames: u64,
    /// Directories that have nothing newer.
    pub(super) without: Vec<[u8; 16]>,
}

impl Vouch {
    /// Whether it is said of a directory.
    pub(super) fn is_for(&self, uuid: Uuid) -> bool {
        self.without.contains(&uuid.into_bytes())
    }
}
