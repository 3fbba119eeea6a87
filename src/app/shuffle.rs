//! One shuffle: its partitions, reports, commits of tasks, lost blocks, bytes for the disk quota,
//! and the registrations that the metadata log has.
//!
//! Each component holds the charges of its data, which are returned on drop. Blocks are in `memory`
//! and `store`; the type of the ledger of lost blocks is in `log`.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};

use super::block_ids::BlockIds;
use super::commits::Commits;
use super::logged_registrations::LoggedRegistrations;
use super::ranges::PartitionRanges;
use super::record_counts::RecordCounts;
use crate::log::ShuffleLedger;
use uniffle_base::budget::Charge;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A registered shuffle.
#[derive(Debug)]
pub struct ShuffleState {
    key: ShuffleKey,
    /// Registered partitions.
    pub partitions: RegisteredPartitions,
    /// Reports of finished task attempts.
    pub reports: Reports,
    /// Committed tasks.
    pub commits: Commits,
    /// Ledger of lost blocks, and the reason if the shuffle is incomplete.
    pub ledger: ShuffleLedger,
    /// Bytes that count for the quota of disk bytes.
    pub on_disk: DiskUsage,
    /// Registrations that the metadata log has. The lock is held while more are written.
    pub logged: tokio::sync::Mutex<LoggedRegistrations>,
}

/// Registered partitions of a shuffle, and which of them are huge.
#[derive(Debug)]
pub struct RegisteredPartitions {
    ranges: RwLock<PartitionRanges>,
    /// Heap charge of the registrations.
    charge: Mutex<Charge>,
    /// Quota charge of the number of partitions.
    quota_charge: Mutex<Charge>,
    /// Sends lock it only for partitions above the threshold of huge ones.
    huge: Mutex<HashSet<PartitionId>>,
}

/// Reported block ids and record counts of a shuffle.
#[derive(Debug)]
pub struct Reports {
    /// Reported block ids.
    pub block_ids: Mutex<BlockIds>,
    /// Reported record counts.
    pub records: Mutex<RecordCounts>,
    /// True once a client has sent a report with mostly known ids.
    omits_repeated_ids: AtomicBool,
}

/// Bytes of a shuffle in the tier that is read through the worker, as quotas count them: on local
/// disks and, if there is one, in the object store.
#[derive(Debug)]
pub struct DiskUsage(Mutex<Charge>);

impl ShuffleState {
    pub(super) fn new(
        key: ShuffleKey,
        partitions: RegisteredPartitions,
        reports: Reports,
        on_disk: DiskUsage,
        ledger: ShuffleLedger,
    ) -> Self {
        let (commits, logged) = (Commits::default(), tokio::sync::Mutex::default());
        Self { key, partitions, reports, commits, ledger, on_disk, logged }
    }

    /// Returns the shuffle's key.
    pub fn key(&self) -> &ShuffleKey {
        &self.key
    }

    /// Marks the shuffle as incomplete, so that its results are refused with `reason`. The metadata
    /// log needs the mark too: the shuffle may have been registered before the start (see
    /// `app::unverified_apps`).
    pub(super) fn mark_unverified(&mut self, reason: &str) {
        self.logged.get_mut().require_incomplete_mark();
        let text =
            format!("the shuffle may have been registered before the last start, with reports: {reason}");
        self.ledger.mark_incomplete(text);
    }
}

impl RegisteredPartitions {
    /// Creates the partitions `ranges` with their charges of heap and quota.
    pub(super) fn new(ranges: PartitionRanges, charge: Charge, quota_charge: Charge) -> Self {
        Self {
            ranges: RwLock::new(ranges),
            charge: Mutex::new(charge),
            quota_charge: Mutex::new(quota_charge),
            huge: Mutex::default(),
        }
    }

    /// Replaces the partitions by `ranges`, which contain them. The charges cover the added ones.
    pub(super) fn replace(&self, ranges: PartitionRanges, charge: Charge, quota_charge: Charge) {
        self.charge.lock().merge(charge);
        self.quota_charge.lock().merge(quota_charge);
        *self.ranges.write() = ranges;
    }

    /// Returns whether the partition was registered.
    pub fn contains(&self, partition: PartitionId) -> bool {
        self.ranges.read().contains(partition.0)
    }

    /// Returns the number of registered partitions.
    pub fn count(&self) -> u64 {
        self.ranges.read().partition_count()
    }

    /// Returns all registered ranges.
    pub fn ranges(&self) -> PartitionRanges {
        self.ranges.read().clone()
    }

    /// Marks a partition as huge permanently. Returns true the first time.
    #[must_use]
    pub fn mark_huge(&self, partition: PartitionId) -> bool {
        self.huge.lock().insert(partition)
    }

    /// Returns the number of partitions marked huge.
    pub fn huge_count(&self) -> usize {
        self.huge.lock().len()
    }
}

impl Reports {
    pub(super) fn new(block_ids: BlockIds, records: RecordCounts) -> Self {
        let (block_ids, records) = (Mutex::new(block_ids), Mutex::new(records));
        Self { block_ids, records, omits_repeated_ids: AtomicBool::new(false) }
    }

    /// Returns whether reports are written to the metadata log without the ids that they repeat.
    pub fn omits_repeated_ids(&self) -> bool {
        self.omits_repeated_ids.load(Ordering::Relaxed)
    }

    /// Records that a report of `all` ids had `new` new ones.
    pub fn record_repetition(&self, new: u64, all: u64) {
        if new < all / 2 {
            self.omits_repeated_ids.store(true, Ordering::Relaxed);
        }
    }
}

impl DiskUsage {
    pub(super) fn new(counted: Charge) -> Self {
        Self(Mutex::new(counted))
    }

    /// Sets the bytes to the result of `occupied`. The closure runs under a lock, so that of two
    /// concurrent calls none can store an older value than the other.
    pub fn set(&self, occupied: impl FnOnce() -> u64) {
        let mut counted = self.0.lock();
        let bytes = occupied();
        let more = counted.budget().charge_unchecked(bytes.saturating_sub(counted.bytes()));
        counted.merge(more);
        let surplus = counted.bytes() - bytes;
        drop(counted.split_up_to(surplus));
    }
}
