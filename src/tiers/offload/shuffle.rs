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

use crate::clock::Instant;
use crate::tiers::local::Stops;
use crate::tiers::object::{Noted, ObjectTier, Uploads};
use crate::tiers::{ExtentWrite, MetadataLog, ShuffleHandle, StoreError, TierBatch, TierShuffle};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A read that failed may succeed later: so long nothing is tried that stands behind.
pub(super) const STOPS_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Both halves of a registration, and where each partition is cut between them.
#[derive(Debug)]
pub(super) struct Shuffle {
    pub(super) key: ShuffleKey,
    pub(super) local: ShuffleHandle,
    /// Its registration in the store. Who appends what it says holds this shared, who begins or ends to have it in both alone.
    pub(super) uploads: RwLock<Option<Uploads>>,
    /// The store has all that it said.
    pub(super) is_known_there: AtomicBool,
    /// The store says that records of it may be missing, and the disks have proven that none is.
    pub(super) is_called_incomplete: AtomicBool,
    /// A start found it in both. What the process before said on the disks and could not say in the store was acknowledged to nobody,
    /// and is known all the same.
    was_in_both: bool,
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
            uploads: RwLock::new(uploads),
            is_known_there,
            is_called_incomplete: AtomicBool::new(false),
            was_in_both: false,
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
    /// Where a record goes beside the disks. Nothing goes anywhere while a start could believe an earlier registration that is over
    /// in the store: where this one's disks are not there, it would give what that one said for what this one did.
    async fn uploads(&self) -> Result<RwLockReadGuard<'_, Option<Uploads>>, StoreError> {
        // A move that begins and fails makes such a one: not between the two.
        let uploads = self.shuffle.uploads.read().await;
        self.object.end_earlier(&self.shuffle.key).await?;
        Ok(uploads)
    }
}

impl MetadataLog for BothLogs {
    /// What is known of the disks alone is not: said again, it is written to both.
    fn is_recovered_durable(&self) -> bool {
        !self.shuffle.was_in_both && self.local.is_recovered_durable()
    }

    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let append = async move {
            let uploads = self.uploads().await?;
            self.local.append(record.clone()).await?;
            match &*uploads {
                Some(uploads) => uploads.note(&[Noted::Said(record)]).await,
                None => Ok(()),
            }
        };
        append.boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        let mark = async move {
            let uploads = self.uploads().await?;
            self.local.mark_incomplete(reason).await?;
            match &*uploads {
                Some(uploads) => uploads.note(&[Noted::Incomplete(reason.to_owned())]).await,
                None => Ok(()),
            }
        };
        mark.boxed()
    }
}
