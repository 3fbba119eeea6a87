//! Sealed batches on their way to a worker; applications take turns.
//!
//! The queue has no length limit of its own: each element holds at least one block of memory, so the budget bounds it.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::Instant;
use crate::memory::{Buffer, SealedBatch};
use crate::tiers::TierShuffle;
use uniffle_wire::types::{AppId, Distribution, ShuffleKey};

use super::turns::Turns;

/// The registrations that chains were sealed from, by tier: they cannot end up in a later shuffle of the same name.
pub(super) type Handles = Arc<[Option<Arc<dyn TierShuffle>>]>;

/// Sealed chains of one shuffle that are written together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) key: ShuffleKey,
    pub(super) handles: Handles,
    pub(super) is_cold: bool,
    pub(super) distribution: Distribution,
    pub(super) parts: Vec<(Arc<Buffer>, Arc<SealedBatch>)>,
    /// When it was sealed.
    pub(super) sealed_at: Instant,
    /// Since when it waits for a worker.
    pub(super) queued: Instant,
    /// How often it could not be written.
    pub(super) failures: u32,
    /// The tier that failed it last.
    pub(super) failed: Option<usize>,
    /// Counts it among those of its tier while it waits for it or is being written.
    pub(super) in_flight: Option<Arc<()>>,
    /// Counts this batch as unfinished while it lives.
    pub(super) _token: Arc<()>,
}

impl Batch {
    /// Payload bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, sealed)| sealed.bytes()).sum()
    }

    /// Takes out the second half of its partitions, for a batch of their own; none of a batch of one partition.
    pub(super) fn cut(&mut self) -> Option<Self> {
        let kept = self.parts.len().div_ceil(2);
        let parts = self.parts.split_off(kept);
        (!parts.is_empty()).then(|| Self {
            key: self.key.clone(),
            handles: Arc::clone(&self.handles),
            parts,
            in_flight: None,
            _token: Arc::clone(&self._token),
            ..*self
        })
    }

    /// Blocks.
    pub(super) fn blocks(&self) -> usize {
        self.parts.iter().map(|(_, sealed)| sealed.blocks()).sum()
    }
}

/// The batches that wait for one tier.
#[derive(Debug, Default)]
pub(super) struct Queue {
    batches: Mutex<Turns<AppId, Batch>>,
    arrived: Notify,
    /// Every batch that waits or is being written holds a clone.
    in_flight: Arc<()>,
}

impl Queue {
    /// `weight` is that of its application.
    pub(super) fn push(&self, mut batch: Batch, weight: u32) {
        batch.in_flight = Some(Arc::clone(&self.in_flight));
        self.batches.lock().push(batch.key.app.clone(), batch.bytes(), weight, batch);
        self.arrived.notify_one();
    }

    /// The batch whose turn it is; waits for one.
    pub(super) async fn pop(&self) -> Batch {
        loop {
            let arrived = self.arrived.notified();
            if let Some(batch) = self.batches.lock().pop() {
                // Permits of `notify_one` do not add up; pass the signal on if there is more to do.
                self.arrived.notify_one();
                return batch;
            }
            arrived.await;
        }
    }

    /// Batches that wait or are being written.
    pub(super) fn in_flight(&self) -> usize {
        Arc::strong_count(&self.in_flight) - 1
    }

    pub(super) fn len(&self) -> usize {
        self.batches.lock().len()
    }

    /// Forgets what waits (shutdown): its memory goes back.
    pub(super) fn clear(&self) {
        self.batches.lock().clear();
    }
}
