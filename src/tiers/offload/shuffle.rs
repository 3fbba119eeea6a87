//! One registration of a shuffle on the disks and, from its first move on, in the store.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{RwLock, RwLockReadGuard};

use crate::budget::{Budget, Charge};
use crate::clock::Instant;
use crate::tiers::local::Stops;
use crate::tiers::object::{Noted, ObjectTier, Uploads};
use crate::tiers::{
    ExtentWrite, MetadataLog, ShuffleHandle, StoreError, StoreErrorKind, TierBatch, TierShuffle,
};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A read that failed may succeed later: so long nothing is tried that stands behind.
pub(super) const STOPS_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Bytes of records that may arrive while the history of a shuffle is copied. With more the copy is given up and tried again later:
/// the store is slower than the shuffle's reports.
const ARRIVED_BYTES_MAX: u64 = 8 << 20;

/// How much the store has of the records of a shuffle.
#[derive(Debug, Default)]
pub(super) enum InStore {
    /// Nothing that a start believes.
    #[default]
    Nothing,
    /// Its history is being copied. New records are acknowledged without the store, and wait here for the copy.
    Copying(Arc<Arrived>),
    /// Everything. New records are acknowledged once the store has them, too.
    Everything(Uploads),
}

/// Records that were acknowledged since the copy of a shuffle's history began.
#[derive(Debug)]
pub(super) struct Arrived(Mutex<Records>);

#[derive(Debug)]
struct Records {
    noted: Vec<Noted>,
    charge: Charge,
    has_too_many: bool,
}

impl Arrived {
    /// None yet. Those that arrive are charged to `memory`.
    pub(super) fn new(memory: &Budget) -> Self {
        Self(Mutex::new(Records { noted: Vec::new(), charge: memory.nothing(), has_too_many: false }))
    }

    fn add(&self, noted: Noted) {
        let mut records = self.0.lock();
        let bytes = match &noted {
            Noted::Said(record) => record.len() as u64,
            Noted::Incomplete(reason) => reason.len() as u64,
            Noted::Local(_) => 0,
        };
        records.has_too_many |= records.charge.bytes() + bytes > ARRIVED_BYTES_MAX;
        if records.has_too_many {
            records.noted.clear();
            drop(records.charge.split_up_to(u64::MAX));
            return;
        }
        let charge = records.charge.budget().force_charge(bytes);
        records.charge.merge(charge);
        records.noted.push(noted);
    }

    /// Takes the records that arrived since the last call, with their charge.
    ///
    /// # Errors
    /// There were too many of them to be kept.
    pub(super) fn take(&self) -> Result<(Vec<Noted>, Charge), StoreError> {
        let mut records = self.0.lock();
        if records.has_too_many {
            let what =
                "reports arrive faster than the object store takes them; the move is tried again later";
            return Err(StoreError::remote(StoreErrorKind::Unhealthy, "copy of the metadata", what));
        }
        let charge = records.charge.split_up_to(u64::MAX);
        Ok((std::mem::take(&mut records.noted), charge))
    }
}

/// Both halves of a registration, and where each partition is cut between them.
#[derive(Debug)]
pub(super) struct Shuffle {
    pub(super) key: ShuffleKey,
    pub(super) local: ShuffleHandle,
    /// Held shared while a record is appended, exclusively while this changes.
    pub(super) in_store: RwLock<InStore>,
    /// The store has all its records.
    pub(super) is_known_there: AtomicBool,
    /// The store says that records of it may be missing, and the disks have proven that none is.
    pub(super) is_called_incomplete: AtomicBool,
    /// A start found it in both. What the process before said on the disks and could not say in the store was acknowledged to nobody,
    /// and is known all the same.
    was_in_both: bool,
    /// The store has a registration of the same shuffle that these disks know nothing of. Neither is changed: nothing is moved, and results
    /// are refused until the shuffle is unregistered.
    pub(super) is_disputed: bool,
    /// Partitions that are cold, with bytes of which some are on the disks.
    cold: Mutex<HashSet<PartitionId>>,
    pub(super) cold_bytes: AtomicU64,
    /// Published bytes at the last look that found nothing that can be moved.
    stuck_at: AtomicU64,
    /// From where on streams could not be read, and since when that is known.
    stops: Mutex<Option<(Instant, Stops)>>,
}

impl Shuffle {
    pub(super) fn new(key: ShuffleKey, local: ShuffleHandle, uploads: Option<Uploads>) -> Self {
        let is_known_there = AtomicBool::new(uploads.is_some());
        Self {
            key,
            local,
            in_store: RwLock::new(uploads.map_or(InStore::Nothing, InStore::Everything)),
            is_known_there,
            is_called_incomplete: AtomicBool::new(false),
            was_in_both: false,
            is_disputed: false,
            cold: Mutex::default(),
            cold_bytes: AtomicU64::new(0),
            stuck_at: AtomicU64::new(u64::MAX),
            stops: Mutex::default(),
        }
    }

    /// One that a start found in both, if that is so.
    pub(super) fn found(key: ShuffleKey, local: ShuffleHandle, uploads: Option<Uploads>) -> Self {
        let was_in_both = uploads.is_some();
        Self { was_in_both, ..Self::new(key, local, uploads) }
    }

    /// One that a start found on the disks, while the store has another registration of it.
    pub(super) fn disputed(key: ShuffleKey, local: ShuffleHandle) -> Self {
        Self { is_disputed: true, ..Self::new(key, local, None) }
    }

    /// What a partition has from this place of its stream on cannot be read, and is not moved for now.
    pub(super) fn stop(&self, partition: PartitionId, at: u64) {
        let mut stops = self.stops.lock();
        let (_, places) = stops.get_or_insert_with(|| (Instant::now(), Stops::new()));
        places.insert(partition, at);
    }

    /// Where nothing is moved that stands behind.
    pub(super) fn stops(&self) -> Stops {
        self.stops.lock().as_ref().map_or_else(Stops::new, |(_, places)| places.clone())
    }

    /// What could not be read long ago is tried again.
    pub(super) fn forget_old_stops(&self) {
        let is_old = |(since, _): &mut (Instant, Stops)| since.elapsed() >= STOPS_FORGOTTEN_AFTER;
        if self.stops.lock().take_if(is_old).is_some() {
            self.stuck_at.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Of so many published bytes none could be moved; looked at again when there are more of them.
    pub(super) fn set_stuck(&self, bytes: u64) {
        self.stuck_at.store(bytes, Ordering::Relaxed);
    }

    /// Whether of so many published bytes none can be moved, as far as was looked.
    pub(super) fn is_stuck(&self, bytes: u64) -> bool {
        bytes == self.stuck_at.load(Ordering::Relaxed)
    }

    /// Takes what is cold, which is to be moved.
    pub(super) fn take_cold(&self) -> Cold<'_> {
        let mut cold = self.cold.lock();
        let (partitions, bytes) = (std::mem::take(&mut *cold), self.cold_bytes.swap(0, Ordering::Relaxed));
        Cold { shuffle: self, partitions, bytes }
    }

    /// Takes note of what of a batch is cold.
    fn note_cold(&self, extents: &[(PartitionId, u64)], cold_bytes: u64) {
        let cold = extents.iter().filter(|(_, length)| *length > cold_bytes);
        for (partition, length) in cold {
            self.add_cold([*partition], *length);
        }
    }

    fn add_cold(&self, partitions: impl IntoIterator<Item = PartitionId>, bytes: u64) {
        let mut cold = self.cold.lock();
        cold.extend(partitions);
        self.cold_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Partitions that are cold and on their way. Dropped before they are moved, they are cold as before.
#[derive(Debug)]
pub(super) struct Cold<'a> {
    shuffle: &'a Shuffle,
    pub(super) partitions: HashSet<PartitionId>,
    bytes: u64,
}

impl Cold<'_> {
    /// What can be moved of them is in the store.
    pub(super) fn done(mut self) {
        self.partitions.clear();
        self.bytes = 0;
    }
}

impl Drop for Cold<'_> {
    fn drop(&mut self) {
        self.shuffle.add_cold(self.partitions.drain(), self.bytes);
    }
}

/// A registration that takes batches.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) shuffle: Arc<Shuffle>,
    /// An extent that is longer is cold.
    pub(super) cold_bytes: u64,
}

impl TierShuffle for Handle {
    fn is_accepting(&self) -> bool {
        TierShuffle::is_accepting(&self.shuffle.local)
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let of = |extent: &ExtentWrite| (extent.partition, extent.length);
        let extents: Vec<_> = batch.extents.iter().map(of).collect();
        let write = async move {
            TierShuffle::write(&self.shuffle.local, batch).await?;
            self.shuffle.note_cold(&extents, self.cold_bytes);
            Ok(())
        };
        write.boxed()
    }
}

/// What a registration says, for the disks and the store.
pub(super) struct BothLogs {
    pub(super) local: Arc<dyn MetadataLog>,
    pub(super) object: Arc<ObjectTier>,
    pub(super) shuffle: Arc<Shuffle>,
}

impl BothLogs {
    /// Appends a record to the disks' log, by `append`, and hands it to the store as far as that has the shuffle's records. No record is
    /// acknowledged while a start could believe an earlier registration that is over: where this one's disks are missing, it would take that
    /// one's records for this one's.
    async fn append_to_both(
        &self,
        noted: Noted,
        append: BoxFuture<'_, Result<(), StoreError>>,
    ) -> Result<(), StoreError> {
        // A move that begins and fails makes such a registration: not between the two.
        let in_store: RwLockReadGuard<'_, InStore> = self.shuffle.in_store.read().await;
        if !self.shuffle.is_disputed {
            self.object.end_earlier(&self.shuffle.key).await?;
        }
        append.await?;
        match &*in_store {
            InStore::Nothing => Ok(()),
            InStore::Copying(arrived) => {
                arrived.add(noted);
                Ok(())
            }
            InStore::Everything(uploads) => uploads.note(&[noted]).await,
        }
    }
}

impl MetadataLog for BothLogs {
    /// What is known of the disks alone is not: said again, it is written to both.
    fn is_recovered_durable(&self) -> bool {
        !self.shuffle.was_in_both && self.local.is_recovered_durable()
    }

    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        self.append_to_both(Noted::Said(record.clone()), self.local.append(record)).boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        self.append_to_both(Noted::Incomplete(reason.to_owned()), self.local.mark_incomplete(reason)).boxed()
    }
}
