//! What of a shuffle is to be copied from a disk, in the order of the partitions, and how it lies there.
//!
//! A shuffle may have hundreds of thousands of extents, and its writers and readers wait for the lock of its streams. So a few hundred
//! are looked at under it at a time, and no list of a partition is kept from one look to the next: what was exchanged, released or
//! lost meanwhile is seen as it is.

use std::iter::Peekable;
use std::vec::IntoIter;

use super::policy::Scattered;
use super::window::Window;
use crate::tiers::extents::InStream as _;
use crate::tiers::local::disk::LocalDisk;
use crate::tiers::local::extent::Extent;
use crate::tiers::local::index::occupied_bytes;
use crate::tiers::local::shuffle::Shuffle;
use crate::tiers::local::walk::{partitions_of, turn};
use uniffle_wire::types::PartitionId;

/// Extents of a partition that are looked at under the lock: some 10 KiB that are copied.
const TOGETHER_MAX: usize = 256;

/// The extents of a shuffle that are copied from a disk.
pub(super) struct Originals<'a> {
    shuffle: &'a Shuffle,
    disk: &'a LocalDisk,
    /// Those that are left, the present one first.
    partitions: Peekable<IntoIter<PartitionId>>,
    /// Where of the present one it goes on.
    base: u64,
    looked: usize,
}

impl<'a> Originals<'a> {
    pub(super) async fn of(shuffle: &'a Shuffle, disk: &'a LocalDisk) -> Self {
        let mut partitions = partitions_of(shuffle).await;
        partitions.sort_unstable();
        Self { shuffle, disk, partitions: partitions.into_iter().peekable(), base: 0, looked: 0 }
    }

    /// The next ones; empty at the end. Extents with damaged blocks stay where they are, as do those that no window can have.
    pub(super) async fn next_window(&mut self) -> Window {
        let mut window = Window::default();
        while let Some(id) = self.partitions.peek().copied() {
            let some = self.look(id);
            for extent in &some {
                let is_damaged = || self.shuffle.damaged.touches(id, &(extent.base..extent.end()));
                let is_wanted = self.is_one(extent) && Window::fits(extent) && !is_damaged();
                if is_wanted && !window.take(id, extent) {
                    return window;
                }
                self.base = extent.end();
            }
            self.go_on(some.len()).await;
        }
        window
    }

    /// How all of them lie there.
    pub(super) async fn scattered(mut self) -> Scattered {
        let (mut all, mut before) = (Scattered::default(), None);
        while let Some(id) = self.partitions.peek().copied() {
            let some = self.look(id);
            for extent in some.iter().filter(|it| self.is_one(it)) {
                all.add(extent, before.filter(|(partition, _)| *partition == id).map(|(_, place)| place));
                before = Some((id, (extent.data_log, extent.data_offset() + occupied_bytes(extent.length))));
            }
            self.base = some.last().map_or(self.base, Extent::end);
            self.go_on(some.len()).await;
        }
        all
    }

    /// The next extents of the present partition.
    fn look(&self, id: PartitionId) -> Vec<Extent> {
        self.shuffle.extents_from(id, self.base, TOGETHER_MAX)
    }

    /// Goes on behind so many that were looked at together.
    async fn go_on(&mut self, together: usize) {
        if together < TOGETHER_MAX {
            self.partitions.next();
            self.base = 0;
        }
        turn(&mut self.looked, 1 + together).await;
    }

    /// Whether an extent is to be copied from the disk: one that lies there in a log that was not put in order.
    fn is_one(&self, extent: &Extent) -> bool {
        !extent.is_lost() && {
            let log = self.shuffle.log_at(extent.data_log);
            log.disk.index == self.disk.index && !log.is_in_order()
        }
    }
}

impl Scattered {
    /// One more extent; `before` is where in a log that of the same partition before it ends.
    fn add(&mut self, extent: &Extent, before: Option<(u16, u64)>) {
        self.partitions += u64::from(before.is_none());
        self.runs += u64::from(before != Some((extent.data_log, extent.data_offset())));
        self.bytes += occupied_bytes(extent.length);
        self.oversized += u64::from(!Window::fits(extent));
    }
}
