//! What an earlier process left on the disks and in the store, put together.
//!
//! The metadata log of both (`durability`) says which shuffles live, by numbers that are never given twice. Of each, the store has the
//! beginning of its streams, and the disks continue behind it. Segments of a registration that is over are deleted. Nothing on the
//! disks is deleted because of the store, unless it has each block of a file ([`Prefixes`]).
//!
//! Disks that are all empty are not used while the store knows that this worker's had data, unless the worker was drained or the
//! configuration says that they are new.

use std::collections::HashMap;
use std::sync::Arc;

use dashmap::DashMap;
use parking_lot::Mutex;
use prometheus::Registry;

use super::metrics::Metrics;
use super::shuffle::Shuffle;
use super::tier::{OffloadSettings, OffloadTier};
use crate::durability::PresentIds;
use crate::runtime::Tasks;
use crate::tiers::local::{Prefixes, Uploaded};
use crate::tiers::numbers::numbers_from;
use crate::tiers::object::{ObjectTier, Uploads};
use crate::tiers::{
    LocalConfig, LocalStore, Purge, Recovered, RecoveredShuffle, StoreError, StoreErrorKind, Tier as _,
    TierHeap,
};
use uniffle_io::Disk;
use uniffle_wire::types::ShuffleKey;

/// Who knows that the worker's disks had data.
const HALF_OF_IT: &str = "the object store has shuffles of this worker of which a part is on its local disks";

impl OffloadTier {
    /// Opens the disks below a store that is open.
    ///
    /// # Errors
    /// As [`LocalStore::open`]; the store does not answer.
    pub async fn open(
        settings: OffloadSettings,
        (mut config, disks): (LocalConfig, Vec<Arc<dyn Disk>>),
        object: Arc<ObjectTier>,
        (heap, tasks): (impl Into<TierHeap>, Tasks),
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let metrics = Metrics::new(registry);
        let metrics = metrics.map_err(|error| StoreError::io("metrics", std::io::Error::other(error)))?;
        let taken = || StoreError::new(StoreErrorKind::InUse, "the object store is used already");
        let (mut there, store) = object.take_found().ok_or_else(taken)?;
        let prefixes = prefixes(&object, &mut there);
        let present: Vec<_> =
            prefixes.iter().map(|(key, it)| (key.clone(), Arc::clone(&it.present))).collect();
        if store.found.had_disks() && !there.shuffles.is_empty() && !object.is_drained() {
            config.had_data.get_or_insert_with(|| HALF_OF_IT.to_owned());
        }
        let uploaded = Uploaded::new(prefixes, numbers_from(store.found.next_incarnation()), store);
        let heap = heap.into();
        let memory = heap.extents.clone();
        let local = LocalStore::open_beside(config, disks, uploaded, heap, registry).await?;
        local.log().ship_by(object.log());
        let present: HashMap<_, _> =
            present.into_iter().map(|(key, it)| (key, Arc::unwrap_or_clone(it))).collect();
        give_back(&mut there, present);
        let tier = Self {
            settings,
            metrics,
            memory,
            tasks,
            shuffles: DashMap::new(),
            ends: Arc::default(),
            recovered: Mutex::default(),
            is_draining: false.into(),
            wanted: tokio::sync::Notify::new(),
            relieved: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            local,
            object,
        };
        let recovered = tier.put_together(there);
        *tier.recovered.lock() = recovered;
        // From here on disks may have what the store has not.
        tier.object.set_drained(false).await?;
        Ok(Arc::new(tier))
    }

    fn put_together(&self, there: Recovered) -> Recovered {
        let here = self.local.take_recovered();
        let mut told: HashMap<ShuffleKey, RecoveredShuffle> =
            there.shuffles.into_iter().map(|told| (told.key.clone(), told)).collect();
        let mut shuffles = Vec::new();
        for of_disks in here.shuffles {
            let key = of_disks.key.clone();
            let Some(handle) = self.local.handle(&key) else { continue };
            let is_same = |uploads: &Uploads| uploads.incarnation() == handle.incarnation();
            let of_store = self.object.uploads(&key).filter(is_same).and_then(|_| told.remove(&key));
            let shuffle = Shuffle::new(key.clone(), handle, of_disks.is_moved);
            self.shuffles.insert(key, Arc::new(shuffle));
            shuffles.push(match of_store {
                Some(of_store) => united(of_disks, of_store),
                None => of_disks,
            });
        }
        for key in told.into_keys() {
            self.discard_found(&key);
        }
        shuffles.sort_by(|one, other| one.key.cmp(&other.key));
        Recovered {
            shuffles,
            said: here.said,
            missing_disks: here.missing_disks,
            bytes: here.bytes + there.bytes,
            blocks: here.blocks + there.blocks,
            took: here.took + there.took,
        }
    }

    /// Deletes the segments of a registration that is over by the metadata log, unless something of that is missing.
    fn discard_found(&self, key: &ShuffleKey) {
        if self.local.metadata_gap().is_some() {
            tracing::warn!(shuffle = %key, "metadata is missing; keeping segments of an unknown registration");
            return self.object.leave(key);
        }
        if let Some(uploads) = self.object.uploads(key) {
            // Until the store knows it, a start from empty disks would take it for a later one.
            self.ends.lock().insert(key.clone(), uploads.incarnation());
        }
        let deletion = Arc::clone(&self.object).forget(&key.app, std::slice::from_ref(key), Purge::Shuffles);
        if let Some(deletion) = deletion {
            self.tasks.spawn("object clean-up", deletion);
        }
    }
}

/// Returns what both have of one registration.
fn united(here: RecoveredShuffle, there: RecoveredShuffle) -> RecoveredShuffle {
    let RecoveredShuffle { key, incomplete, is_moved, mut present, lost, reason } = here;
    present.merge(there.present);
    let reason = if reason.is_empty() { there.reason } else { reason };
    RecoveredShuffle { key, incomplete, is_moved, present, lost, reason }
}

/// Returns what the store has of shuffles that these disks may have the rest of. What is present there is lent to the prefixes.
fn prefixes(object: &ObjectTier, there: &mut Recovered) -> HashMap<ShuffleKey, Prefixes> {
    let prefixes = there.shuffles.iter_mut().filter_map(|told| {
        let uploads = object.uploads(&told.key)?;
        let present = Arc::new(std::mem::take(&mut told.present));
        let (incarnation, ends) = (uploads.incarnation(), uploads.ends());
        Some((told.key.clone(), Prefixes { incarnation, ends, present }))
    });
    prefixes.collect()
}

fn give_back(there: &mut Recovered, mut present: HashMap<ShuffleKey, PresentIds>) {
    for told in &mut there.shuffles {
        if let Some(present) = present.remove(&told.key) {
            told.present = present;
        }
    }
}
