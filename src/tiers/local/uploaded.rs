//! What of the shuffles on the disks lies in a store elsewhere: prefixes of streams, which are not looked for here.
//!
//! A start is told of them before it reads the disks. Below such a place nothing is missing, and what is still there goes.

use std::collections::HashMap;
use std::sync::Arc;

use crate::durability::{LogInStore, PresentIds};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Where the streams of a registration's partitions begin on the disks.
#[derive(Debug, Clone, Default)]
pub struct Prefixes {
    /// Number of the registration.
    pub incarnation: u64,
    /// By partition.
    pub ends: HashMap<PartitionId, u64>,
    /// Blocks that are there. A file is deleted because of what is elsewhere only if each of its blocks is.
    pub present: Arc<PresentIds>,
}

impl Prefixes {
    /// Where a partition's stream begins.
    pub(super) fn end(&self, partition: PartitionId) -> u64 {
        self.ends.get(&partition).copied().unwrap_or(0)
    }

    /// Whether a block is there.
    pub(super) fn has(&self, partition: PartitionId, id: u64) -> bool {
        self.present.held(partition).is_some_and(|ids| ids.contains(id))
    }
}

/// Those of all shuffles.
#[derive(Debug, Clone, Default)]
pub struct Uploaded {
    shuffles: HashMap<ShuffleKey, Prefixes>,
    /// No registration from now on has a lower number: registrations of several machines must not be taken for one.
    pub(super) incarnations_from: u64,
    /// The part of the metadata log that is there.
    pub(super) log: Option<LogInStore>,
}

impl Uploaded {
    /// Registrations begin at number `incarnations_from`.
    #[must_use]
    pub fn new(shuffles: HashMap<ShuffleKey, Prefixes>, incarnations_from: u64, log: LogInStore) -> Self {
        Self { shuffles, incarnations_from, log: Some(log) }
    }

    /// Those of one registration.
    pub(super) fn of(&self, key: &ShuffleKey, incarnation: u64) -> Option<&Prefixes> {
        self.shuffles.get(key).filter(|prefixes| prefixes.incarnation == incarnation)
    }
}
