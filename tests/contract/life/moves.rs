//! The same histories on disks from which data is moved to an object store meanwhile: all of it as soon as it is there, or what is beyond
//! a watermark. Both fail and come back, each at times of its own, and what is wrong with the disks when a life begins may be so while
//! part of a stream is in the store.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt;

use uniffle_testkit::object_fault::FaultyObjects;
use uniffle_wire::types::{BlockId, ShuffleKey};
use uniffle_worker::tiers::LetGo;
use uniffle_worker::tiers::object::layout::{Name, parse_key};
use uniffle_worker::tiers::offload::Watermarks;

use super::Mutation;
use super::history::{History, new_disks};
use super::objects::Objects;
use super::process::ROOT;

/// Of each disk, and far more than a history writes: no disk is full of it.
const CAPACITY_BYTES: u64 = 64 << 20;
/// Everything is moved; or some tens of blocks stay.
const WATERMARKS: [Watermarks; 2] =
    [Watermarks { high: 1e-9, low: 0.0 }, Watermarks { high: 2e-3, low: 5e-4 }];

/// A store that failed is left alone for a while.
const DRAIN_SECONDS: u32 = 300;

impl History {
    /// A history of a worker on disks above an object store.
    pub(crate) fn with_moves(seed: u64, mutation: Mutation) -> Self {
        let mut history = Self::new(seed, mutation);
        history.limit_disks();
        history.watermarks = WATERMARKS[usize::from(history.rng.random::<bool>())];
        history.objects = Some(Objects::default());
        history
    }

    /// One above a store whose objects are damaged.
    pub(crate) fn with_moves_and_damage(seed: u64, mutation: Mutation) -> Self {
        let mut history = Self::with_moves(seed, mutation);
        history.objects = Some(Objects { is_damaged: true, ..Objects::default() });
        history
    }

    fn limit_disks(&self) {
        self.disks.iter().for_each(|disk| disk.set_capacity(Some(CAPACITY_BYTES)));
    }

    /// What must be found there by a worker that finds both as trouble has left them.
    pub(super) async fn start_on_both(
        &mut self,
        store: &FaultyObjects,
        let_go: LetGo,
        is_last: bool,
    ) -> BTreeSet<(ShuffleKey, i32, BlockId)> {
        self.heal_the_store(store);
        self.damage_the_store(store, is_last).await;
        let mut there = self.stored_blocks();
        self.count_divided(store, &there).await;
        if self.mutation == Mutation::NoIndexes {
            self.remove_segments(store).await;
        }
        while let Err(error) = self.start_process(let_go.clone()).await {
            self.leave_out(&error);
        }
        // What arrives now the next start removes.
        if !is_last {
            self.deliver_late(store).await;
        }
        // What a directory has that cannot be found now may not have been moved.
        if self.missing.is_none() && self.unlisted.is_none() {
            there.extend(self.durable_blocks());
        }
        there
    }

    /// Everything is moved, and the next life finds it from empty disks. Where something cannot be moved, it is a crash.
    pub(super) async fn move_elsewhere(&mut self) {
        self.sends.clear();
        self.heal_the_disks().await;
        for _ in 0..DRAIN_SECONDS {
            let drained = self.service().lifecycle.drain();
            if drained.may_go() {
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

    /// Where a history has it: an object is damaged, and what was asked of the store in the life before is done now.
    async fn damage_the_store(&mut self, store: &FaultyObjects, is_last: bool) {
        if !self.damages_objects() {
            return;
        }
        self.deliver_late(store).await;
        let before = store.snapshot().await;
        if !is_last && self.life() > 1 && self.rng.random_bool(0.4) {
            self.damage_an_object(store, &before).await;
        }
        // What is damaged stays so.
        let after = store.snapshot().await;
        self.objects.as_mut().expect("there is a store").earlier = after;
    }

    /// Sometimes, what was not answered is done.
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
        let moved: BTreeSet<ShuffleKey> = names
            .filter(|(_, name)| matches!(name, Name::Segment(_)))
            .map(|(shuffle, _)| shuffle.key)
            .collect();
        let here: BTreeSet<&ShuffleKey> = on_disks.iter().map(|(key, ..)| key).collect();
        let divided = moved.iter().filter(|key| here.contains(key)).count() as u64;
        self.tally.divided_shuffles += divided;
        self.tally.whole_disks_moved += u64::from(!moved.is_empty() && here.is_empty());
    }

    /// Everything that was moved is gone.
    pub(super) async fn remove_segments(&self, store: &FaultyObjects) {
        for (key, _) in store.objects().await {
            let is_segment = matches!(parse_key(ROOT, &key), Some((_, Name::Segment(_))));
            if is_segment {
                store.remove(&key).await;
            }
        }
    }
}
