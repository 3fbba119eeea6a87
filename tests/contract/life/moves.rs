//! Simulated runs on disks with offload to an object store.
//!
//! Data is offloaded at once or above a watermark. Disks and store fail and recover independently,
//! also while a stream is divided between them.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt;

use uniffle_testkit::object_fault::FaultyObjects;
use uniffle_wire::types::{BlockId, ShuffleKey};
use uniffle_worker::log::HandOff;
use uniffle_worker::store::object::layout::{Name, parse_key};
use uniffle_worker::store::offload::Watermarks;

use super::Mutation;
use super::history::{History, new_disks};
use super::objects::Objects;
use super::process::ROOT;

/// Capacity of each disk, far above the volume of a run, so that no disk fills up.
const CAPACITY_BYTES: u64 = 64 << 20;
/// Moves everything, or keeps 30 to 130 KB on each disk: about 3 to 12 blocks.
const WATERMARKS: [Watermarks; 2] =
    [Watermarks { high: 1e-9, low: 0.0 }, Watermarks { high: 2e-3, low: 5e-4 }];

/// Covers the pause after a failed request to the store.
const DRAIN_SECONDS: u32 = 300;

impl History {
    /// Returns a run of a worker on disks above an object store.
    pub(crate) fn with_moves(seed: u64, mutation: Mutation) -> Self {
        let mut history = Self::new(seed, mutation);
        history.limit_disks();
        history.watermarks = WATERMARKS[usize::from(history.rng.random::<bool>())];
        history.objects = Some(Objects::default());
        history
    }

    /// Returns such a run whose objects are damaged.
    pub(crate) fn with_moves_and_damage(seed: u64, mutation: Mutation) -> Self {
        let mut history = Self::with_moves(seed, mutation);
        history.objects = Some(Objects { is_damaged: true, ..Objects::default() });
        history
    }

    fn limit_disks(&self) {
        self.disks.iter().for_each(|disk| disk.set_capacity(Some(CAPACITY_BYTES)));
    }

    /// Starts on disks with their current faults and a store, whose requests succeed but whose
    /// objects may be damaged. Returns the blocks that must be served.
    pub(super) async fn start_on_both(
        &mut self,
        store: &FaultyObjects,
        hand_off: Option<HandOff>,
        is_last: bool,
    ) -> BTreeSet<(ShuffleKey, i32, BlockId)> {
        self.heal_the_store(store);
        self.damage_the_store(store, is_last).await;
        let mut there = self.stored_blocks();
        self.count_divided(store, &there).await;
        if self.mutation == Mutation::NoIndexes {
            self.remove_segments(store).await;
        }
        while let Err(error) = self.start_process(hand_off.clone()).await {
            self.resolve_refused_start(&error);
        }
        // The next start removes late arrivals.
        if !is_last {
            self.deliver_late(store).await;
        }
        // Blocks in unreadable directories may not have been moved.
        if self.missing.is_none() && self.unlisted.is_none() {
            there.extend(self.durable_blocks());
        }
        there
    }

    /// Moves everything and continues on empty disks. If something cannot be moved in time, the
    /// disks stay, and the process ends as in a crash.
    pub(super) async fn move_elsewhere(&mut self) {
        self.sends.clear();
        self.heal_the_disks().await;
        for _ in 0..DRAIN_SECONDS {
            let drained = self.service().lifecycle.drain();
            if drained.is_complete() {
                self.tally.machines_left += 1;
                self.expected.values_mut().for_each(|expected| expected.settle(self.life));
                self.disks = new_disks(self.disks.len());
                self.limit_disks();
                self.unsynced.clear();
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.heartbeat();
        }
    }

    /// If the run allows damage, sometimes damages an object, and sometimes delivers late requests
    /// of the previous process.
    async fn damage_the_store(&mut self, store: &FaultyObjects, is_last: bool) {
        if !self.damages_objects() {
            return;
        }
        self.deliver_late(store).await;
        let before = store.snapshot().await;
        if !is_last && self.life() > 1 && self.rng.random_bool(0.4) {
            self.damage_an_object(store, &before).await;
        }
        let mut after = store.snapshot().await;
        let is_log = |key: &str| matches!(parse_key(ROOT, key), Some(Name::Log(..)));
        let is_damaged = before.iter().any(|(key, bytes)| is_log(key) && after.get(key) != Some(bytes));
        if self.mutation == Mutation::DamagedLogDropsData && is_damaged {
            self.remove_segments(store).await;
            after = store.snapshot().await;
        }
        // With the damage, so that a reset of an object to this version does not undo it.
        self.objects.as_mut().expect("the worker has an object store").earlier = after;
    }

    /// Sometimes delivers requests that were not answered.
    async fn deliver_late(&mut self, store: &FaultyObjects) {
        if self.damages_objects() && self.rng.random() {
            self.tally.late_requests += store.deliver().await as u64;
        }
    }

    pub(super) fn damages_objects(&self) -> bool {
        self.objects.as_ref().is_some_and(|objects| objects.is_damaged)
    }

    async fn count_divided(
        &mut self,
        store: &FaultyObjects,
        on_disks: &BTreeSet<(ShuffleKey, i32, BlockId)>,
    ) {
        let objects = store.objects().await;
        let names = objects.iter().filter_map(|(key, _)| parse_key(ROOT, key));
        let key_of = |name| match name {
            Name::Segment(shuffle, _) => Some(shuffle.key),
            Name::Log(..) | Name::Settings(_) => None,
        };
        let moved: BTreeSet<ShuffleKey> = names.filter_map(key_of).collect();
        let here: BTreeSet<&ShuffleKey> = on_disks.iter().map(|(key, ..)| key).collect();
        let divided = moved.iter().filter(|key| here.contains(key)).count() as u64;
        self.tally.divided_shuffles += divided;
        self.tally.whole_disks_moved += u64::from(!moved.is_empty() && here.is_empty());
    }

    /// Deletes all segments: everything that was moved or, without disks, flushed.
    pub(super) async fn remove_segments(&self, store: &FaultyObjects) {
        for (key, _) in store.objects().await {
            let is_segment = matches!(parse_key(ROOT, &key), Some(Name::Segment(..)));
            if is_segment {
                store.remove(&key).await;
            }
        }
    }
}
