//! Batches on their way out of a buffer: what is committed is taken as one, and dropped once it is readable in the next tier.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::super::list::BlockList;
use super::super::sealed::{InFlight, SealedBatch};
use super::{Buffer, State};

/// A moment of a buffer: what was committed until then is in chains with lower numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(u64);

/// What is in memory of blocks that were committed before a [`Mark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Nothing: it was flushed, or the shuffle is gone.
    Nothing,
    /// Some, and all of it is on its way.
    InFlight,
    /// Some that no flush has taken.
    Waiting,
}

impl Buffer {
    /// Takes what is committed as a batch to be flushed; `None` if there is nothing. Never waits for fills. A buffer
    /// whose list was closed, for its bytes or its blocks, gives its oldest batch not taken yet.
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
        let claimed = batch.claim(InFlight {
            _charged: self.shared.in_flight.force_charge(batch.charged_bytes()),
            _blocks: self.shared.in_flight_blocks.force_charge(batch.blocks() as u64),
        });
        debug_assert!(claimed, "claimed under the lock only");
        self.publish_counters(state);
        state.overdue &= self.active_blocks() > 0;
        Some(batch)
    }

    /// As [`Buffer::seal`], unless `batches_max` batches are in flight: then it is overdue, and the end of one of them is
    /// to seal it.
    pub fn seal_within(&self, batches_max: usize) -> Option<Arc<SealedBatch>> {
        let mut state = self.state.lock();
        let batches = state.lists.iter().flat_map(|lists| &lists.batches);
        if batches.filter(|batch| batch.is_claimed()).count() < batches_max {
            return self.seal_locked(&mut state);
        }
        state.overdue = true;
        None
    }

    /// Whether it was to be sealed and had too many batches in flight, and still has blocks from then.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.state.lock().overdue
    }

    /// The moment.
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark(self.state.lock().next_chain)
    }

    /// What is left of `mark` and before. Blocks that came soon after may count as before.
    #[must_use]
    pub fn before(&self, mark: Mark) -> Before {
        let state = self.state.lock();
        let Some(lists) = &state.lists else { return Before::Nothing };
        let is_before = |list: &BlockList| list.chain.id() < mark.0 && !list.is_empty();
        let mut batches = lists.batches.iter().filter(|batch| is_before(batch.list())).peekable();
        let nothing_flies = batches.peek().is_none();
        if is_before(&lists.active) || batches.any(|batch| !batch.is_claimed()) {
            return Before::Waiting;
        }
        if nothing_flies { Before::Nothing } else { Before::InFlight }
    }

    /// Drops `batch` from what readers see: it is readable in the next tier. Its memory is free as soon as
    /// neither the batch nor bytes of it are held.
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
