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
//! | a greater one | another registration: what the store has is of one that is over, and goes |
//! | a smaller one, or none | of a machine that was left: the store's goes on here, and what only that machine had is lost |

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dashmap::DashMap;
use parking_lot::Mutex;
use prometheus::Registry;

use super::metrics::Metrics;
use super::shuffle::Shuffle;
use super::tier::{OffloadSettings, OffloadTier};
use crate::budget::Budget;
use crate::runtime::Tasks;
use crate::tiers::local::{Prefixes, Uploaded};
use crate::tiers::numbers::numbers_from;
use crate::tiers::object::{Bound, Noted, ObjectTier, Uploads};
use crate::tiers::{
    LocalConfig, LocalStore, Recovered, RecoveredShuffle, StoreError, StoreErrorKind, Tier as _,
};
use uniffle_io::Disk;
use uniffle_wire::types::ShuffleKey;

/// Why the disks' log of a registration that was taken over proves nothing alone.
const SAID_BEFORE: &str = "what it said before it was taken over is in the object store alone";

impl OffloadTier {
    /// Opens the disks below a store that is open.
    ///
    /// # Errors
    /// As [`LocalStore::open`]; the store does not answer.
    pub async fn open(
        settings: OffloadSettings,
        (config, disks): (LocalConfig, Vec<Arc<dyn Disk>>),
        object: Arc<ObjectTier>,
        (memory, tasks): (&Budget, Tasks),
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let metrics = Metrics::new(registry);
        let metrics = metrics.map_err(|error| StoreError::io("metrics", std::io::Error::other(error)))?;
        let bound: HashMap<ShuffleKey, Bound> =
            object.take_bound().into_iter().map(|bound| (bound.key.clone(), bound)).collect();
        let prefixes = bound.values().filter(|bound| bound.is_whole).filter_map(|bound| {
            let ends = object.uploads(&bound.key)?.ends();
            Some((bound.key.clone(), Prefixes { incarnation: bound.local?, ends }))
        });
        let uploaded = Uploaded::new(prefixes.collect(), numbers_from(above_all(bound.values())));
        let local = LocalStore::open_beside(config, disks, uploaded, memory, registry).await?;
        let tier = Self {
            settings,
            metrics,
            memory: memory.clone(),
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
        let recovered = tier.put_together(bound).await?;
        *tier.recovered.lock() = recovered;
        Ok(Arc::new(tier))
    }

    async fn put_together(&self, mut bound: HashMap<ShuffleKey, Bound>) -> Result<Recovered, StoreError> {
        let (here, mut there) = (self.local.take_recovered(), self.object.take_recovered());
        let mut told: HashMap<ShuffleKey, RecoveredShuffle> =
            std::mem::take(&mut there.shuffles).into_iter().map(|told| (told.key.clone(), told)).collect();
        let (mut shuffles, mut wanted) = (Vec::new(), HashSet::new());
        for of_disks in here.shuffles {
            let key = of_disks.key.clone();
            let Some(handle) = self.local.handle(&key) else { continue };
            let of_store = bound.remove(&key).zip(told.remove(&key));
            let mut is_called_incomplete = false;
            let (uploads, told) = match of_store {
                None => (None, of_disks),
                Some((bound, of_store)) => {
                    let number = bound.local.unwrap_or(bound.incarnation);
                    if !bound.is_whole || handle.incarnation() > number {
                        tracing::info!(shuffle = %key, "what the object store has is of a registration that is over, it goes");
                        self.discard_object(&key);
                        (None, of_disks)
                    } else if bound.local == Some(handle.incarnation()) {
                        is_called_incomplete = bound.is_called_incomplete && of_disks.incomplete.is_none();
                        wanted.insert(key.clone());
                        (self.object.uploads(&key), united(of_disks, of_store))
                    } else {
                        tracing::warn!(shuffle = %key, "what the disks have is older than what the object store has, it goes");
                        self.local.purge(&key).await;
                        wanted.insert(key);
                        shuffles.push(self.take_over(&bound, of_store).await?);
                        continue;
                    }
                }
            };
            let shuffle = Shuffle::found(key.clone(), handle, uploads);
            shuffle.is_called_incomplete.store(is_called_incomplete, Ordering::Release);
            self.shuffles.insert(key, Arc::new(shuffle));
            shuffles.push(told);
        }
        for (key, bound) in bound {
            let Some(of_store) = told.remove(&key) else { continue };
            // One of which pages are gone is taken over and refused: nothing says that disks know it, or that they do not.
            let was_given_up = !bound.is_whole && !bound.has_gap;
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
    for (partition, ids) in there.present {
        present.entry(partition).or_default().add_all(&ids);
    }
    let reason = if here.reason.is_empty() { there.reason } else { here.reason };
    let incomplete = here.incomplete.and(there.incomplete);
    RecoveredShuffle { key: here.key, incomplete, present, lost: here.lost, reason }
}

/// A number that no disks know a registration by which the store has.
fn above_all<'a>(bound: impl Iterator<Item = &'a Bound>) -> u64 {
    bound.filter_map(|bound| bound.local).max().map_or(0, |number| number.saturating_add(1))
}
