//! A registration of a shuffle on the disks and, after its first offload, in the store. Without
//! disks, it is in the store from the beginning.
//!
//! Invariant: from the first offload until its end, its records are acknowledged only once the
//! store has them. The mark of the first offload is never removed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::release::Excluded;
use crate::clock::Instant;
use crate::store::object::{Bucket, Uploads};
use crate::store::{DiskShuffleHandle, StoreError, TierBatch, TierShuffle};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Time after which a shuffle whose offload failed has its usual place in a drain again.
pub(super) const FAILED_FOR: Duration = Duration::from_secs(10);

/// Time after which excluded extents are tried again: a read that failed may succeed later.
pub(super) const EXCLUDED_FOR: Duration = Duration::from_secs(600);

/// A registration, and the state of its offload.
#[derive(Debug)]
pub(super) struct TieredShuffle {
    pub(super) key: ShuffleKey,
    pub(super) local: DiskShuffleHandle,
    /// Objects that batches are written to, in a worker without disks.
    direct: Option<Uploads>,
    /// True if records are acknowledged only once the store has them.
    is_offloaded: AtomicBool,
    /// True if this process has made sure that the store has all records.
    is_known: AtomicBool,
    /// Cold partitions that may have data on the disks.
    cold: Mutex<HashSet<PartitionId>>,
    pub(super) cold_bytes: AtomicU64,
    /// Published bytes when the last check found nothing offloadable.
    stuck_at: AtomicU64,
    /// Time of the latest offload if it failed.
    last_failure: Mutex<Option<Instant>>,
    /// Unreadable extents, and the time of the first failure.
    excluded: Mutex<Option<(Instant, Excluded)>>,
}

impl TieredShuffle {
    /// Returns a registration. `is_offloaded` is true if an earlier process has offloaded data of
    /// it. `direct` has its objects if there are no disks.
    pub(super) fn new(
        key: ShuffleKey,
        local: DiskShuffleHandle,
        is_offloaded: bool,
        direct: Option<Uploads>,
    ) -> Self {
        Self {
            key,
            local,
            is_offloaded: AtomicBool::new(is_offloaded || direct.is_some()),
            is_known: AtomicBool::new(direct.is_some()),
            direct,
            cold: Mutex::default(),
            cold_bytes: AtomicU64::new(0),
            stuck_at: AtomicU64::new(u64::MAX),
            last_failure: Mutex::default(),
            excluded: Mutex::default(),
        }
    }

    /// Returns whether records are acknowledged only once the store has them.
    pub(super) fn is_offloaded(&self) -> bool {
        self.is_offloaded.load(Ordering::SeqCst)
    }

    pub(super) fn set_offloaded(&self) {
        self.is_offloaded.store(true, Ordering::SeqCst);
    }

    /// Returns whether this process has made sure that the store has all records.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Acquire)
    }

    pub(super) fn set_known(&self) {
        self.is_known.store(true, Ordering::Release);
    }

    /// Records the outcome of an offload. Returns whether it is a failure without another shortly
    /// before, to be logged.
    pub(super) fn note_offload(&self, has_failed: bool) -> bool {
        let mut last = self.last_failure.lock();
        let is_first = last.is_none_or(|at| at.elapsed() >= FAILED_FOR);
        *last = has_failed.then(Instant::now);
        has_failed && is_first
    }

    /// Returns the time of the latest offload if it failed less than [`FAILED_FOR`] ago.
    pub(super) fn last_failure(&self) -> Option<Instant> {
        self.last_failure.lock().filter(|at| at.elapsed() < FAILED_FOR)
    }

    /// Excludes the extent at `base` of a partition's stream from offloads, because it cannot be
    /// read.
    pub(super) fn exclude(&self, partition: PartitionId, base: u64) {
        let mut excluded = self.excluded.lock();
        excluded.get_or_insert_with(|| (Instant::now(), Excluded::new())).1.insert((partition, base));
    }

    /// Returns the extents that are excluded from offloads now.
    pub(super) fn excluded(&self) -> Excluded {
        self.excluded.lock().as_ref().map_or_else(Excluded::new, |(_, extents)| extents.clone())
    }

    /// Ends the exclusion of extents after [`EXCLUDED_FOR`].
    pub(super) fn forget_old_exclusions(&self) {
        let is_old = |(since, _): &mut (Instant, Excluded)| since.elapsed() >= EXCLUDED_FOR;
        if self.excluded.lock().take_if(is_old).is_some() {
            self.stuck_at.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Records that none of `bytes` published bytes can be offloaded. The next check is due when
    /// this number changes, or when exclusions end.
    pub(super) fn set_stuck(&self, bytes: u64) {
        self.stuck_at.store(bytes, Ordering::Relaxed);
    }

    /// Returns whether the last check found that none of `bytes` published bytes can be offloaded.
    pub(super) fn is_stuck(&self, bytes: u64) -> bool {
        bytes == self.stuck_at.load(Ordering::Relaxed)
    }

    /// Takes the cold partitions in order to offload them.
    pub(super) fn take_cold(&self) -> Cold<'_> {
        let mut cold = self.cold.lock();
        let (partitions, bytes) = (std::mem::take(&mut *cold), self.cold_bytes.swap(0, Ordering::Relaxed));
        Cold { shuffle: self, partitions, bytes }
    }

    fn add_cold(&self, partitions: impl IntoIterator<Item = PartitionId>, bytes: u64) {
        let mut cold = self.cold.lock();
        cold.extend(partitions);
        self.cold_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Cold partitions that are being offloaded. If dropped before [`Cold::done`], they are cold again.
#[derive(Debug)]
pub(super) struct Cold<'a> {
    shuffle: &'a TieredShuffle,
    pub(super) partitions: HashSet<PartitionId>,
    bytes: u64,
}

impl Cold<'_> {
    /// Ends the offload. The store has all offloadable data of the partitions.
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

/// A registration to which batches are written.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) shuffle: Arc<TieredShuffle>,
    pub(super) object: Arc<Bucket>,
    /// Length above which an extent makes its partition cold.
    pub(super) cold_bytes: u64,
}

impl TierShuffle for Handle {
    fn is_accepting(&self) -> bool {
        match &self.shuffle.direct {
            Some(objects) => objects.is_accepting(),
            None => TierShuffle::is_accepting(&self.shuffle.local),
        }
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let cold = batch.extents.iter().filter(|extent| extent.length > self.cold_bytes);
        let cold: Vec<_> = cold.map(|extent| (extent.partition, extent.length)).collect();
        let write = async move {
            if let Some(objects) = &self.shuffle.direct {
                return objects.write(&self.shuffle.local, batch.extents).await;
            }
            let _writing = self.object.require_disks().await?;
            let DiskShuffleHandle { writer, shuffle } = &self.shuffle.local;
            writer.write(shuffle, batch.extents, batch.is_last).await?;
            cold.into_iter().for_each(|(partition, length)| self.shuffle.add_cold([partition], length));
            Ok(())
        };
        write.boxed()
    }
}
