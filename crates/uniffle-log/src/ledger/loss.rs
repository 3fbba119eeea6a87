//! Lost blocks of a partition, with the reason. Pure: no I/O.

use std::sync::Arc;

use uniffle_wire::types::{BlockId, PartitionId};

use crate::ids::id_set::IdSet;

/// Maximum number of listed id ranges per loss.
const RANGES_MAX: usize = 16;

/// Blocks that were lost together.
#[derive(Debug, Clone, PartialEq)]
pub struct Loss {
    /// Blocks that are still lost.
    pub ids: IdSet,
    /// Bytes of the blocks when they were lost, if known.
    pub bytes: Option<u64>,
    /// Disk or event that caused the loss.
    pub reason: Arc<str>,
    /// Time of detection, in milliseconds since 1970.
    pub at_ms: u64,
}

/// An extent whose data is lost.
#[derive(Debug, Clone)]
pub struct LostExtent {
    /// Partition of the extent.
    pub partition: PartitionId,
    /// Blocks and their lengths.
    pub blocks: Vec<(BlockId, u32)>,
    /// Reason of the loss.
    pub reason: Arc<str>,
}

/// Cause of the loss of missing blocks.
#[derive(Debug, Clone)]
pub struct LossCause {
    /// Extents whose reason is known.
    pub extents: Vec<LostExtent>,
    /// Reason of all other blocks.
    pub reason: Arc<str>,
    /// Time of detection, in milliseconds since 1970.
    pub at_ms: u64,
}

/// Newly lost blocks.
#[derive(Debug, Default, PartialEq)]
pub struct NewLosses {
    /// Losses by reason.
    pub losses: Vec<Loss>,
    /// Number of further blocks, for which there is no heap.
    pub unlisted: u64,
}

/// Returns the first ranges of consecutive ids.
#[must_use]
pub fn ranges(ids: &IdSet) -> Vec<(i64, i64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for id in ids.iter() {
        let full = ranges.len() == RANGES_MAX;
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(id) => *last = id,
            _ if full => break,
            _ => ranges.push((id, id)),
        }
    }
    ranges.into_iter().map(|(first, last)| (first.cast_signed(), last.cast_signed())).collect()
}
