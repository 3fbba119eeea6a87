//! Snapshots of published streams, from which reads are made.
//!
//! A read through the worker may meet extents on disks and in objects. It is divided into runs of
//! extents of one kind. The local disks read only the runs without objects.

use std::ops::Range;
use std::sync::Arc;

use crate::store::disk::shuffle::DiskShuffle;
use crate::store::extents::extent::{Extent, ExtentList};
use crate::store::extents::extent_list::InStream as _;
use crate::store::extents::streams::Partition;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A snapshot of a partition's stream, or of a part of it.
#[derive(Debug, Clone)]
pub struct StreamView {
    pub(in crate::store) shuffle: Arc<DiskShuffle>,
    pub(in crate::store) partition: PartitionId,
    pub(in crate::store) extents: ExtentList,
    /// Length of the whole stream.
    pub bytes: u64,
    /// Number of blocks of the whole stream.
    pub blocks: u64,
    /// Which extents of the whole stream are in objects.
    pub(in crate::store) in_objects: InObjects,
}

/// Which extents of a stream are in objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum InObjects {
    None,
    Some,
    All,
}

impl InObjects {
    pub(in crate::store) fn of(partition: &Partition) -> Self {
        match partition.in_objects {
            0 => Self::None,
            all if all == partition.extents.len() => Self::All,
            _ => Self::Some,
        }
    }
}

/// Consecutive extents, either all in objects or none.
#[derive(Debug, Clone)]
pub struct ViewRun {
    /// Indexes of the extents.
    pub extents: Range<usize>,
    /// Number of their blocks.
    pub blocks: u64,
    /// True if they are in objects.
    pub is_in_object: bool,
}

impl StreamView {
    /// Takes a snapshot of a range of a stream.
    ///
    /// # Errors
    /// `InvalidRange` if the range is empty or not completely published, `Purged`.
    pub(in crate::store::disk) fn part(
        shuffle: Arc<DiskShuffle>,
        partition: PartitionId,
        range: &Range<u64>,
    ) -> Result<Self, StoreError> {
        // A range may have hundreds of thousands of extents: they are visited without the lock.
        let found = shuffle.with_partition(partition, |found| {
            let it = found.filter(|it| !range.is_empty() && range.end <= it.bytes)?;
            Some((it.extents.part(range.start, range.end), it.bytes, it.blocks, InObjects::of(it)))
        });
        let Some((extents, bytes, blocks, in_objects)) = found else {
            shuffle.require_present()?;
            return Err(shuffle.error(StoreErrorKind::InvalidRange));
        };
        Ok(Self { shuffle, partition, extents, bytes, blocks, in_objects })
    }

    /// Returns an error if an extent of the stream is in an object.
    pub(in crate::store::disk) fn require_on_disks(&self) -> Result<(), StoreError> {
        match self.in_objects {
            InObjects::None => Ok(()),
            InObjects::Some | InObjects::All => Err(self.shuffle.error(StoreErrorKind::InvalidRange)),
        }
    }

    /// Returns the run of extents of a whole stream that begins at index `first`.
    pub fn run_at(&self, first: usize) -> Option<ViewRun> {
        let is_in_object = self.extents.get(first)?.is_in_object();
        let all = self.extents.len();
        if first == 0 && self.in_objects != InObjects::Some {
            return Some(ViewRun { extents: 0..all, blocks: self.blocks, is_in_object });
        }
        let run = self.extents.iter_from(first).take_while(|it| it.is_in_object() == is_in_object);
        let (count, blocks) =
            run.fold((0, 0), |(count, blocks), it| (count + 1, blocks + u64::from(it.blocks)));
        Some(ViewRun { extents: first..first + count, blocks, is_in_object })
    }

    /// Returns the shuffle and its incarnation.
    pub fn registration(&self) -> (&ShuffleKey, u64) {
        (&self.shuffle.key, self.shuffle.incarnation)
    }

    /// Takes a snapshot of a range of the same stream now.
    ///
    /// # Errors
    /// `Purged`, `InvalidRange`.
    pub fn again(&self, range: &Range<u64>) -> Result<Self, StoreError> {
        Self::part(Arc::clone(&self.shuffle), self.partition, range)
    }

    /// Returns whether a part of a range is lost or damaged on a disk.
    pub fn has_hole(&self, range: &Range<u64>) -> bool {
        let mut extents = self.extents.touched(range.start, range.end);
        let is_damaged = |it: &Extent| {
            let place = range.start.max(it.base)..range.end.min(it.end());
            it.is_lost() || (it.is_on_disk() && self.shuffle.damaged.touches(self.partition, &place))
        };
        extents.any(is_damaged)
    }

    /// Returns the end of the run of extents that begins at `range.start`, up to the end of the
    /// range, and whether it is in objects.
    pub fn run_in(&self, range: &Range<u64>) -> (u64, bool) {
        if self.in_objects != InObjects::Some {
            return (range.end, self.in_objects == InObjects::All);
        }
        let mut extents = self.extents.touched(range.start, range.end).peekable();
        let is_in_object = extents.peek().is_some_and(|it| it.is_in_object());
        let other = extents.find(|it| it.is_in_object() != is_in_object);
        (other.map_or(range.end, |it| it.base), is_in_object)
    }
}
