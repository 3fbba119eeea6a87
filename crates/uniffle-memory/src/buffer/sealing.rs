//! Sealing and release of batches.
//!
//! A seal takes all committed blocks as one batch, or the oldest list that was closed at its limit.
//! It never waits for blocks that are being written; these join the batch until its write begins. A
//! release drops a batch once it is readable in the next tier. In between readers see the batch in
//! memory, so a block may be seen in both tiers but is never missing.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::list::BlockList;
use super::sealed::{InFlightCharges, SealedBatch};
use super::{Buffer, State};

/// A point in time of a buffer: blocks committed before it are in chains with lower numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitMark(u64);

/// State of the blocks that were committed before a [`CommitMark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlierBlocks {
    /// No such block is in memory: all were flushed, or the shuffle was purged.
    Nothing,
    /// Some are in memory, and all of them are being flushed.
    InFlight,
    /// Some in memory are not in a flush yet.
    Waiting,
}

impl Buffer {
    /// Takes the committed blocks as a batch to be flushed, or returns `None` if there are none.
    /// Never waits for fills. If a list was closed at its limit of bytes or blocks, returns the
    /// oldest batch that is not taken yet.
    pub fn seal(&self) -> Option<Arc<SealedBatch>> {
        self.seal_locked(&mut self.state.lock())
    }

    fn seal_locked(&self, state: &mut MutexGuard<'_, State>) -> Option<Arc<SealedBatch>> {
        let State { lists, next_chain, .. } = &mut **state;
        let lists = lists.as_mut()?;
        let is_waiting = |batch: &&Arc<SealedBatch>| !batch.is_claimed();
        let batch = match lists.batches.iter().find(is_waiting).cloned() {
            Some(waiting) => waiting,
            None if lists.active.is_empty() => return None,
            None => self.rotate(lists, next_chain),
        };
        let claimed = batch.claim(InFlightCharges {
            _charged: self.shared.in_flight.charge_unchecked(batch.charged_bytes()),
            _blocks: self.shared.in_flight_blocks.charge_unchecked(batch.blocks() as u64),
        });
        debug_assert!(claimed, "batches are claimed only under the lock");
        self.publish_counters(state);
        state.overdue &= self.active_blocks() > 0;
        Some(batch)
    }

    /// Seals like [`Buffer::seal`] unless `batches_max` batches are in flight. Otherwise the buffer
    /// becomes overdue and is sealed when one of them ends.
    pub fn seal_within(&self, batches_max: usize) -> Option<Arc<SealedBatch>> {
        let mut state = self.state.lock();
        let batches = state.lists.iter().flat_map(|lists| &lists.batches);
        if batches.filter(|batch| batch.is_claimed()).count() < batches_max {
            return self.seal_locked(&mut state);
        }
        state.overdue = true;
        None
    }

    /// Returns whether a seal was postponed because too many batches were in flight, and blocks
    /// from then are still present.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.state.lock().overdue
    }

    /// Returns a mark of this moment.
    #[must_use]
    pub fn mark(&self) -> CommitMark {
        CommitMark(self.state.lock().next_chain)
    }

    /// Returns the state of the blocks committed before `mark`. Blocks committed soon after it may
    /// be included.
    #[must_use]
    pub fn before(&self, mark: CommitMark) -> EarlierBlocks {
        let state = self.state.lock();
        let Some(lists) = &state.lists else { return EarlierBlocks::Nothing };
        let is_before = |list: &BlockList| list.chain.id() < mark.0 && !list.is_empty();
        let mut batches = lists.batches.iter().filter(|batch| is_before(&batch.list())).peekable();
        let none_in_flight = batches.peek().is_none();
        if is_before(&lists.active) || batches.any(|batch| !batch.is_claimed()) {
            return EarlierBlocks::Waiting;
        }
        if none_in_flight { EarlierBlocks::Nothing } else { EarlierBlocks::InFlight }
    }

    /// Hides `batch`, which is now readable in the next tier, from readers. Its memory is freed as
    /// soon as neither the batch nor bytes of it are held.
    pub fn release(&self, batch: &Arc<SealedBatch>) {
        let mut state = self.state.lock();
        let released = state.lists.as_mut().and_then(|lists| {
            let at = lists.batches.iter().position(|held| Arc::ptr_eq(held, batch))?;
            lists.batches.remove(at)
        });
        let emptied = state.lists.take_if(|lists| lists.is_empty());
        self.publish_counters(&state);
        drop(state);
        drop((released, emptied));
    }
}
