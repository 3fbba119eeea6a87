//! What a tier finds at the start of a worker that an earlier process left there.

use std::collections::HashMap;

use crate::durability::{IdSet, Said};
use uniffle_wire::types::{PartitionId, ShuffleKey};

pub use crate::durability::LostExtent;

/// What was found of one shuffle.
#[derive(Debug)]
pub struct RecoveredShuffle {
    /// The shuffle.
    pub key: ShuffleKey,
    /// Why records may be missing; none when it is proven that none are.
    pub incomplete: Option<String>,
    /// Blocks that can be read.
    pub present: HashMap<PartitionId, IdSet>,
    /// Extents that are known and cannot be read.
    pub lost: Vec<LostExtent>,
    /// Why more may be missing than is known; empty when nothing is.
    pub reason: String,
}

/// What was found on all disks.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Shuffles, in the order of their keys.
    pub shuffles: Vec<RecoveredShuffle>,
    /// Registrations and reports of all of them.
    pub said: Said,
    /// Data directories that were in use before and are not now.
    pub missing_disks: Vec<String>,
    /// Published bytes that can be read.
    pub bytes: u64,
    /// Their blocks.
    pub blocks: u64,
    /// How long it took.
    pub took: std::time::Duration,
}
