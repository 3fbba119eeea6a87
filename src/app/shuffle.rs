//! One shuffle: its partitions, reported blocks and losses.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::block_ids::BlockIds;
use super::commits::Commits;
use super::ranges::PartitionRanges;
use super::record_counts::RecordCounts;
use crate::budget::Charge;
use crate::durability::ShuffleLedger;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// One shuffle.
#[derive(Debug)]
pub struct ShuffleState {
    key: ShuffleKey,
    pub(super) ranges: RwLock<PartitionRanges>,
    /// Of the registrations.
    pub(super) charge: Mutex<Charge>,
    /// Its partitions and its bytes on local disks, as quotas count them.
    pub(super) partitions: Mutex<Charge>,
    on_disk: Mutex<Charge>,
    block_ids: Mutex<BlockIds>,
    records: Mutex<RecordCounts>,
    commits: Commits,
    ledger: ShuffleLedger,
    is_unproven: bool,
    /// Digest of the registration that was written down last; 0 = none was.
    noted_registration: AtomicU64,
    /// Touched by sends to partitions beyond the threshold only.
    huge_partitions: Mutex<HashSet<PartitionId>>,
}

impl ShuffleState {
    pub(super) fn new(
        key: ShuffleKey,
        (ranges, charge): (PartitionRanges, Charge),
        (block_ids, records): (BlockIds, RecordCounts),
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
            ledger: ShuffleLedger::default(),
            is_unproven: false,
            noted_registration: AtomicU64::new(0),
            huge_partitions: Mutex::default(),
        }
    }

    /// Its key.
    pub fn key(&self) -> &ShuffleKey {
        &self.key
    }

    /// Whether the partition was registered.
    pub fn has_partition(&self, partition: PartitionId) -> bool {
        self.ranges.read().contains(partition.0)
    }

    /// How many partitions were registered.
    pub fn partition_count(&self) -> u64 {
        self.ranges.read().count()
    }

    /// So much more of it is on local disks, as its application's usage counts it.
    pub fn count_on_disk(&self, counted: Charge) {
        self.on_disk.lock().merge(counted);
    }

    /// Reported block ids.
    pub fn block_ids(&self) -> &Mutex<BlockIds> {
        &self.block_ids
    }

    /// Reported record numbers.
    pub fn records(&self) -> &Mutex<RecordCounts> {
        &self.records
    }

    /// Tasks that committed.
    pub fn commits(&self) -> &Commits {
        &self.commits
    }

    /// What of it is lost.
    pub fn ledger(&self) -> &ShuffleLedger {
        &self.ledger
    }

    /// Refuses its results for `reason`: it may have been registered before the start (`unproven`).
    pub(super) fn mark_unproven(&mut self, reason: &str) {
        self.is_unproven = true;
        let text = format!("it may have been registered before the last start, with reports: {reason}");
        self.ledger.mark_incomplete(text);
    }

    /// Whether the metadata log is to be told why its results are refused.
    pub fn is_unproven(&self) -> bool {
        self.is_unproven
    }

    /// Digest of the registration that was written down last; 0 = none was.
    pub fn noted_registration(&self) -> u64 {
        self.noted_registration.load(Ordering::Relaxed)
    }

    /// See [`ShuffleState::noted_registration`].
    pub fn set_noted_registration(&self, digest: u64) {
        self.noted_registration.store(digest, Ordering::Relaxed);
    }

    /// Marks a partition as huge, for good; true the first time.
    #[must_use]
    pub fn mark_huge(&self, partition: PartitionId) -> bool {
        self.huge_partitions.lock().insert(partition)
    }

    /// How many partitions are marked huge.
    pub fn huge_partition_count(&self) -> usize {
        self.huge_partitions.lock().len()
    }
}
