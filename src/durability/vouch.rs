//! What a process that lets go of the metadata log says to its successor: how much there is, all of it acknowledged and on the device in
//! every copy, and that nothing more is written. And of a directory that it cannot take along, because it does not answer: that
//! nothing newer is there. It holds the directory's lock and goes on holding it, so nobody else can have used
//! it; with its word the absence of the directory is no reason to refuse anything. It is said to one successor, not
//! written down: the start after that one has to see the directory again. Pure: no I/O.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The word for the log, and for the directories that stay behind. A successor of another version reads it: fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Vouch {
    /// Id of the newest epoch there is.
    pub(super) epoch: u64,
    /// Frames that are acknowledged in it.
    pub(super) frames: u64,
    /// Which files have them; 0 from a process that does not say.
    #[serde(default)]
    pub(super) generation: u64,
    /// Directories that have nothing newer.
    pub(super) without: Vec<[u8; 16]>,
}

impl Vouch {
    /// Whether no directory stays behind.
    #[must_use]
    pub fn is_of_all(&self) -> bool {
        self.without.is_empty()
    }

    /// Whether it is said of a directory.
    pub(super) fn is_for(&self, uuid: Uuid) -> bool {
        self.without.contains(&uuid.into_bytes())
    }
}
