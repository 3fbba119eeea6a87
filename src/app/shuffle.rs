//! One shuffle: its partitions, reported blocks, and losses.
//!
//! It holds the charges of its registrations and of its partitions and bytes on disk, which are
//! returned when it is dropped. Once a partition is marked as huge, it stays huge. Blocks are in
//! `memory` and `store`; the ledger of lost blocks is in `log`.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};

use super::block_ids::BlockIds;
use super::commits::Commits;
use super::noted::NotedRegistrations;
use super::ranges::PartitionRanges;
use super::record_counts::RecordCounts;
use crate::budget::Charge;
use crate::log::ShuffleLedger;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A registered shuffle.
#[derive(Debug)]
pub struct ShuffleState {
    key: ShuffleKey,
    pub(super) ranges: RwLock<PartitionRanges>,
    /// Heap charge of the registrations.
    pub(super) charge: Mutex<Charge>,
    /// Partitions and bytes on local disks, as quotas count them.
    pub(super) partitions: Mutex<Charge>,
    on_disk: Mutex<Charge>,
    block_ids: Mutex<BlockIds>,
    records: Mutex<RecordCounts>,
    commits: Commits,
    ledger: ShuffleLedger,
    is_unproven: bool,
    repeats_reports: AtomicBool,
    noted: tokio::sync::Mutex<NotedRegistrations>,
    /// Touched only by sends to partitions beyond the threshold.
    huge_partitions: Mutex<HashSet<PartitionId>>,
}

impl ShuffleState {
    pub(super) fn new(
        key: ShuffleKey,
        (ranges, charge): (PartitionRanges, Charge),
        (block_ids, records, ledger): (BlockIds, RecordCounts, ShuffleLedger),
        (partitions, on_disk): (Charge, Charge),
    ) -> Self {
        Self {
            key,
            ranges: RwLock::new(ranges),
            charge: Mutex::new(charge),
            partitions: Mutex::new(partitions),
            on_disk: Mutex::new(on_disk),
            block_ids: Mutex::new(block_ids),
            records: Mutex::new(records),
            commits: Commits::default(),
            ledger,
            is_unproven: false,
            repeats_reports: AtomicBool::new(false),
            noted: tokio::sync::Mutex::default(),
            huge_partitions: Mutex::default(),
        }
    }

    /// Returns the shuffle's key.
    pub fn key(&self) -> &ShuffleKey {
        &self.key
    }

    /// Returns whether the partition was registered.
    pub fn has_partition(&self, partition: PartitionId) -> bool {
        self.ranges.read().contains(partition.0)
    }

    /// Returns the number of registered partitions.
    pub fn partition_count(&self) -> u64 {
        self.ranges.read().count()
    }

    /// Sets the shuffle's counted bytes on local disks to the result of `occupied`. The closure
    /// runs under a lock, so that the latest value wins.
    pub fn count_on_disk(&self, occupied: impl FnOnce() -> u64) {
        let mut counted = self.on_disk.lock();
        let bytes = occupied();
        let more = counted.budget().force_charge(bytes.saturating_sub(counted.bytes()));
        counted.merge(more);
        let surplus = counted.bytes() - bytes;
        drop(counted.split_up_to(surplus));
    }

    /// Returns the reported block ids.
    pub fn block_ids(&self) -> &Mutex<BlockIds> {
        &self.block_ids
    }

    /// Returns the reported record counts.
    pub fn records(&self) -> &Mutex<RecordCounts> {
        &self.records
    }

    /// Returns the committed tasks.
    pub fn commits(&self) -> &Commits {
        &self.commits
    }

    /// Returns the ledger of lost data.
    pub fn ledger(&self) -> &ShuffleLedger {
        &self.ledger
    }

    /// Marks the shuffle's results as refused for `reason`: it may have been registered before the
    /// start (`unproven`).
    pub(super) fn mark_unproven(&mut self, reason: &str) {
        self.is_unproven = true;
        let text =
            format!("the shuffle may have been registered before the last start, with reports: {reason}");
        self.ledger.mark_incomplete(text);
    }

    /// Returns whether the metadata log must record why the results are refused.
    pub fn is_unproven(&self) -> bool {
        self.is_unproven
    }

    /// Returns the registrations that the metadata log has. The lock is held while more are
    /// written.
    pub fn noted(&self) -> &tokio::sync::Mutex<NotedRegistrations> {
        &self.noted
    }

    /// Returns all registered ranges.
    pub fn ranges(&self) -> PartitionRanges {
        self.ranges.read().clone()
    }

    /// Returns whether reports are to be written without the ids that they repeat.
    pub fn repeats_reports(&self) -> bool {
        self.repeats_reports.load(Ordering::Relaxed)
    }

    /// Records that a report of `all` ids had `new` new ones.
    pub fn note_repetition(&self, new: u64, all: u64) {
        if new < all / 2 {
            self.repeats_reports.store(true, Ordering::Relaxed);
        }
    }

    /// Marks a partition as huge permanently. Returns true the first time.
    #[must_use]
    pub fn mark_huge(&self, partition: PartitionId) -> bool {
        self.huge_partitions.lock().insert(partition)
    }

    /// Returns the number of partitions marked huge.
    pub fn huge_partition_count(&self) -> usize {
        self.huge_partitions.lock().len()
    }
}
