//! Prefixes of streams that are in a store elsewhere, and therefore not expected on the disks.
//!
//! A start receives them before it reads the disks. Nothing before the end of such a prefix is
//! missing, and files that remain there are removed.

use std::collections::HashMap;
use std::sync::Arc;

use crate::durability::{LogInStore, PresentIds};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Ends of the uploaded prefixes of a registration: the beginnings of its streams on the disks.
#[derive(Debug, Clone, Default)]
pub struct Prefixes {
    /// Incarnation of the registration.
    pub incarnation: u64,
    /// End of the prefix, by partition.
    pub ends: HashMap<PartitionId, u64>,
    /// Blocks in the other store. A file is deleted because of an upload only if all of its blocks
    /// are there.
    pub present: Arc<PresentIds>,
}

impl Prefixes {
    /// Returns the beginning of a partition's stream on the disks.
    pub(super) fn end(&self, partition: PartitionId) -> u64 {
        self.ends.get(&partition).copied().unwrap_or(0)
    }

    /// Returns whether a block is in the other store.
    pub(super) fn has(&self, partition: PartitionId, id: u64) -> bool {
        self.present.held(partition).is_some_and(|ids| ids.contains(id))
    }
}

/// Uploaded prefixes of all shuffles.
#[derive(Debug, Clone, Default)]
pub struct Uploaded {
    shuffles: HashMap<ShuffleKey, Prefixes>,
    /// Lower bound of new incarnations. Registrations of several machines must not be mistaken for
    /// each other.
    pub(super) incarnations_from: u64,
    /// The part of the metadata log in the other store.
    pub(super) log: Option<LogInStore>,
}

impl Uploaded {
    /// Creates the state. New incarnations begin at `incarnations_from`.
    #[must_use]
    pub fn new(shuffles: HashMap<ShuffleKey, Prefixes>, incarnations_from: u64, log: LogInStore) -> Self {
        Self { shuffles, incarnations_from, log: Some(log) }
    }

    /// Returns the prefixes of one registration.
    pub(super) fn of(&self, key: &ShuffleKey, incarnation: u64) -> Option<&Prefixes> {
        self.shuffles.get(key).filter(|prefixes| prefixes.incarnation == incarnation)
    }
}
