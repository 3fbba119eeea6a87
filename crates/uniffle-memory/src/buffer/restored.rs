//! Restores recovered blocks of an earlier process into a partition.
//!
//! The blocks become the oldest batch of the partition and are visible at once. They are compared
//! with their checksums before they are served, and damaged blocks are hidden. Blocks are charged
//! even beyond the capacity, because they were acknowledged.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::chain::Chain;
use super::sealed::SealedBatch;
use super::unverified::{DAMAGED, Unverified, log_damaged};
use super::{Buffer, CommitOutcome, State, metadata_bytes};
use crate::admission::reservation::BlockCharges;
use crate::persistent::restore::{BlockPosition, RestoredBlock, RestoredPartition};
use uniffle_wire::types::ShuffleKey;

impl Buffer {
    /// Makes the blocks of `restored` visible as the oldest batch of the partition. Must be
    /// called before anything is written to the partition. The bytes of the blocks must be
    /// [verified](Buffer::verify) before they are served.
    pub(crate) fn restore(&self, key: &ShuffleKey, restored: RestoredPartition) -> CommitOutcome {
        let RestoredPartition { blocks, segments, rows, row_count, last_chain } = restored;
        let (count, supply) = (blocks.len() as u64, &self.shared.supply);
        let mut list = self.list(Chain::restored(last_chain, segments), Some(rows));
        list.reserve(blocks.len());
        for RestoredBlock { meta, place } in blocks {
            match place {
                BlockPosition::Chain(at) => list.restore(meta, at),
                BlockPosition::Slices(slices) => list.restore_stray(meta, *slices),
            }
        }
        let bytes = metadata_bytes(count, row_count);
        let paid = BlockCharges {
            permits: supply.blocks.charge_unchecked(count),
            lists: supply.lists.charge_unchecked(bytes),
            capacity: self.budget.charge_unchecked(bytes),
        };
        list.pay_for_segments(&supply.lists);
        let strays = list.strays();
        list.charge(paid);
        list.pay_for_strays(strays, &supply.lists);
        let restored = CommitOutcome { blocks: list.len(), bytes: list.bytes(), ..CommitOutcome::default() };
        let mut state = self.state.lock();
        let State { lists, next_chain, unverified, .. } = &mut *state;
        *next_chain = last_chain + 1;
        let lists = self.made(lists, next_chain);
        let batch = Arc::new(SealedBatch::new(self.partition, list));
        *unverified = Some(Unverified::of(key.clone(), Arc::downgrade(&batch), &self.shared.verification));
        lists.batches.push_back(batch);
        self.received_bytes.fetch_add(restored.bytes, Ordering::Relaxed);
        self.publish_counters(&state);
        restored
    }

    /// Verifies recovered blocks once and hides damaged ones. Takes milliseconds per few MiB.
    pub fn verify(&self) {
        let Some(unverified) = self.state.lock().unverified.clone() else { return };
        let verify = |key: &ShuffleKey, batch: &SealedBatch| self.hide_damaged(key, batch);
        unverified.verify_once(&self.shared.verification, verify);
        self.state.lock().unverified = None;
    }

    fn hide_damaged(&self, key: &ShuffleKey, batch: &SealedBatch) {
        let damaged = batch.list().damaged();
        if damaged.is_empty() {
            return;
        }
        log_damaged(key, self.partition, &batch.list(), &damaged);
        let mut state = self.state.lock();
        batch.list().hide(damaged);
        // A batch without visible blocks has nothing to flush.
        let is_empty = batch.blocks() == 0 && !batch.is_claimed();
        let emptied = state.lists.as_mut().filter(|_| is_empty).and_then(|lists| {
            let at = lists.batches.iter().position(|held| std::ptr::eq(&**held, batch))?;
            lists.batches.remove(at)
        });
        let nothing_left = state.lists.take_if(|lists| lists.is_empty());
        self.publish_counters(&state);
        drop(state);
        drop((emptied, nothing_left));
        self.shared.verification.damage.notify(key, self.partition, DAMAGED);
    }
}
