//! What an earlier process left on the disks and in the store, put together.
//!
//! A process counts registrations on its disks from above all numbers that the store has heard of, and from the clock at
//! least. So of two registrations of a shuffle that the store knows the one with the greater number is the later one, on
//! whatever machine it was made and whatever its clock says. What was never moved only clocks put in order: a machine whose
//! clock is ahead by more than it ran is believed there. The store says by which number disks knew its registration last:
//!
//! | on the disks | is |
//! | --- | --- |
//! | the same number | the other half of it: what the store has counts, and the disks go on behind |
//! | one by which disks knew it before | the same registration, which other disks continued meanwhile: both are served, the store proves what was said |
//! | a greater one | another registration: what the store has is of one that is over, and goes |
//! | a smaller one that the store never heard of | another registration: neither is touched, and results are refused |
//! | none | of a machine that was left: the store's goes on here, and what only that machine had is lost |
//!
//! Nothing on the disks is deleted because of a number. A file of data of which everything is in the store goes when the store has each
//! of its blocks ([`Prefixes`]). Disks that are all empty are not used while the store knows that this worker's had data, unless the
//! worker was drained or the configuration says that they are new.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dashmap::DashMap;
use parking_lot::Mutex;
use prometheus::Registry;

use super::metrics::Metrics;
use super::relation::{Relation, relation, remove_found};
use super::shuffle::Shuffle;
use super::tier::{OffloadSettings, OffloadTier};
use crate::durability::PresentIds;
use crate::runtime::Tasks;
use crate::tiers::local::{Prefixes, Uploaded};
use crate::tiers::numbers::numbers_from;
use crate::tiers::object::{Bound, Noted, ObjectTier, Uploads};
use crate::tiers::{
    LocalConfig, LocalStore, Recovered, RecoveredShuffle, ShuffleHandle, StoreError, StoreErrorKind,
    Tier as _, TierHeap,
};
use uniffle_io::Disk;
use uniffle_wire::types::ShuffleKey;

/// Why the disks' log of a registration that was taken over proves nothing alone.
const SAID_BEFORE: &str = "what it said before it was taken over is in the object store alone";
/// Why results of a shuffle are refused of which the disks and the store have different registrations.
const DISPUTED: &str = "the object store has a later registration of it that these disks do not know: unregister it, or run its application again";
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
        let bound: HashMap<ShuffleKey, Bound> =
            object.take_bound().into_iter().map(|bound| (bound.key.clone(), bound)).collect();
        let mut there = object.take_recovered();
        let prefixes = prefixes(&object, &bound, &mut there);
        let present: Vec<_> =
            prefixes.iter().map(|(key, it)| (key.clone(), Arc::clone(&it.present))).collect();
        let had_disks = bound.values().any(|bound| !bound.locals.is_empty());
        if had_disks && !object.is_drained() {
            config.had_data.get_or_insert_with(|| HALF_OF_IT.to_owned());
        }
        let uploaded = Uploaded::new(prefixes, numbers_from(above_all(bound.values())));
        let heap = heap.into();
        let memory = heap.extents.clone();
        let local = LocalStore::open_beside(config, disks, uploaded, heap, registry).await?;
        let present: HashMap<_, _> =
            present.into_iter().map(|(key, it)| (key, Arc::unwrap_or_clone(it))).collect();
        give_back(&mut there, present);
        let tier = Self {
            settings,
            metrics,
            memory,
            tasks,
            shuffles: DashMap::new(),
            recovered: Mutex::default(),
            is_draining: false.into(),
            wanted: tokio::sync::Notify::new(),
            relieved: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            local,
            object,
        };
        let recovered = tier.put_together(bound, there).await?;
        *tier.recovered.lock() = recovered;
        // From here on disks may have what the store has not.
        tier.object.set_drained(false).await?;
        Ok(Arc::new(tier))
    }

    async fn put_together(
        &self,
        mut bound: HashMap<ShuffleKey, Bound>,
        mut there: Recovered,
    ) -> Result<Recovered, StoreError> {
        let here = self.local.take_recovered();
        let mut told: HashMap<ShuffleKey, RecoveredShuffle> =
            std::mem::take(&mut there.shuffles).into_iter().map(|told| (told.key.clone(), told)).collect();
        let (mut shuffles, mut wanted) = (Vec::new(), HashSet::new());
        for of_disks in here.shuffles {
            let key = of_disks.key.clone();
            let Some(handle) = self.local.handle(&key) else { continue };
            let (shuffle, told) = match bound.remove(&key).zip(told.remove(&key)) {
                None => (Shuffle::found(key.clone(), handle, None), of_disks),
                Some((bound, of_store)) => self.join(handle, bound, of_disks, of_store).await?,
            };
            if shuffle.is_known_there.load(Ordering::Relaxed) {
                wanted.insert(key.clone());
            }
            self.shuffles.insert(key, Arc::new(shuffle));
            shuffles.push(told);
        }
        for (key, bound) in bound {
            let Some(of_store) = told.remove(&key) else { continue };
            // One of which pages are gone is taken over and refused: nothing says that disks know it, or that they do not. Nothing was moved
            // before all that it had said was here, so what has segments was not given up.
            let was_given_up = !bound.is_whole && !bound.has_gap && !bound.has_segments;
            if bound.has_lost_registration {
                shuffles.push(of_store);
                continue;
            }
            if was_given_up || bound.registrations.is_empty() {
                self.discard_object(&key);
                continue;
            }
            wanted.insert(key);
            shuffles.push(self.take_over(&bound, of_store).await?);
        }
        shuffles.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(Recovered {
            shuffles,
            said: here.said.then(there.said, wanted),
            missing_disks: here.missing_disks,
            bytes: here.bytes + there.bytes,
            blocks: here.blocks + there.blocks,
            took: here.took + there.took,
        })
    }

    /// Puts both halves of a shuffle together.
    async fn join(
        &self,
        handle: ShuffleHandle,
        bound: Bound,
        mut of_disks: RecoveredShuffle,
        of_store: RecoveredShuffle,
    ) -> Result<(Shuffle, RecoveredShuffle), StoreError> {
        let (key, number) = (bound.key.clone(), handle.incarnation());
        let uploads = self.object.uploads(&key);
        let gone = || StoreError::new(StoreErrorKind::NotFound, key.to_string());
        let mut is_called_incomplete = bound.is_called_incomplete;
        let told = match relation(number, &bound, &of_disks, &of_store) {
            Relation::Over => {
                tracing::info!(shuffle = %key, "the object store has an earlier registration, which is over; deleting it there");
                self.discard_object(&key);
                return Ok((Shuffle::found(key, handle, None), of_disks));
            }
            Relation::Disputed => {
                tracing::error!(shuffle = %key, number, "{DISPUTED}");
                self.object.leave(&key);
                of_disks.incomplete = Some(DISPUTED.to_owned());
                return Ok((Shuffle::disputed(key, handle), of_disks));
            }
            Relation::Same => {
                is_called_incomplete &= of_disks.incomplete.is_none();
                united(of_disks, of_store)
            }
            Relation::Continued => {
                tracing::warn!(shuffle = %key, number, "other disks continued it meanwhile; what only those have is lost");
                // The store first, as in a take-over.
                uploads.as_ref().ok_or_else(gone)?.note(&[Noted::Local(number)]).await?;
                self.local.mark_incomplete(&handle, SAID_BEFORE).await?;
                of_disks.incomplete.get_or_insert_with(|| SAID_BEFORE.to_owned());
                is_called_incomplete = false;
                united(of_disks, of_store)
            }
            Relation::Torn => {
                tracing::error!(shuffle = %key, number, "pages of its metadata in the object store are lost; the disks lack blocks that are there");
                remove_found(&mut of_disks.lost, &of_store.present);
                let ends = uploads.as_ref().ok_or_else(gone)?.ends();
                self.local.release(&handle, ends.into_iter().collect()).await?;
                is_called_incomplete = of_disks.incomplete.is_none();
                united(of_disks, of_store)
            }
        };
        let shuffle = Shuffle::found(key, handle, uploads);
        shuffle.is_called_incomplete.store(is_called_incomplete, Ordering::Release);
        Ok((shuffle, told))
    }

    /// Goes on here with a registration that only the store has. The store hears of the number first: disks that knew a
    /// registration of which the store does not would be believed. The disks' log hears first that it has not all: what was
    /// said before is in the store alone, and so is the proof of it, also for later starts.
    async fn take_over(&self, bound: &Bound, told: RecoveredShuffle) -> Result<RecoveredShuffle, StoreError> {
        let key = &bound.key;
        let gone = || StoreError::new(StoreErrorKind::NotFound, key.to_string());
        let uploads: Uploads = self.object.uploads(key).ok_or_else(gone)?;
        let handle = self.local.adopt(key, &uploads.ends());
        uploads.note(&[Noted::Local(handle.incarnation())]).await?;
        self.local.mark_incomplete(&handle, SAID_BEFORE).await?;
        for registration in &bound.registrations {
            self.local.append_metadata(&handle, registration).await?;
        }
        let shuffle = Shuffle::new(key.clone(), handle, Some(uploads));
        self.shuffles.insert(key.clone(), Arc::new(shuffle));
        tracing::info!(shuffle = %key, "taken over from the object store");
        Ok(told)
    }
}

/// What both have of one registration. What is proven by one of them is proven; disks that took it over prove nothing.
fn united(here: RecoveredShuffle, there: RecoveredShuffle) -> RecoveredShuffle {
    let mut present = here.present;
    present.merge(there.present);
    let reason = if here.reason.is_empty() { there.reason } else { here.reason };
    let incomplete = here.incomplete.and(there.incomplete);
    RecoveredShuffle { key: here.key, incomplete, present, lost: here.lost, reason }
}

/// What the store has of shuffles that these disks may have the rest of. What is present of them there is lent to the prefixes.
fn prefixes(
    object: &ObjectTier,
    bound: &HashMap<ShuffleKey, Bound>,
    there: &mut Recovered,
) -> HashMap<ShuffleKey, Prefixes> {
    let prefixes = there.shuffles.iter_mut().filter_map(|told| {
        let bound = bound.get(&told.key).filter(|bound| bound.is_whole && !bound.locals.is_empty())?;
        let ends = object.uploads(&told.key)?.ends();
        let present = Arc::new(std::mem::take(&mut told.present));
        Some((told.key.clone(), Prefixes { incarnations: bound.locals.clone(), ends, present }))
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

/// A number that no disks know a registration by which the store has.
fn above_all<'a>(bound: impl Iterator<Item = &'a Bound>) -> u64 {
    bound.flat_map(|bound| &bound.locals).max().map_or(0, |number| number.saturating_add(1))
}
