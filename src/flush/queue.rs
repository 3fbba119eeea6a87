//! Queue of the sealed batches that wait for the workers of one tier, with fairness between
//! applications.
//!
//! The queue has no length limit of its own: each element holds at least one block of memory, so
//! the memory budget bounds it. A batch carries the registrations of its shuffle in the tiers from
//! before its seal, so it must not reach a later shuffle with the same key.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::Instant;
use crate::memory::{Buffer, SealedBatch};
use crate::store::TierShuffle;
use uniffle_base::sched::FairQueue;
use uniffle_wire::types::{AppId, Distribution, ShuffleKey};

/// Registrations, by tier, of the shuffle that chains were sealed from. Chains written through them
/// cannot reach a later shuffle of the same name.
pub(super) type Handles = Arc<[Option<Arc<dyn TierShuffle>>]>;

/// Sealed chains of one shuffle that are written together.
#[derive(Debug)]
pub(super) struct FlushBatch {
    pub(super) key: ShuffleKey,
    pub(super) handles: Handles,
    pub(super) is_cold: bool,
    pub(super) distribution: Distribution,
    pub(super) parts: Vec<(Arc<Buffer>, Arc<SealedBatch>)>,
    /// Time of the seal.
    pub(super) sealed_at: Instant,
    /// Time since which the batch waits for a worker.
    pub(super) queued: Instant,
    /// Number of failed writes.
    pub(super) failures: u32,
    /// The tier that failed to write it last.
    pub(super) failed: Option<usize>,
    /// Counts the batch in its tier while it waits for the tier or is being written.
    pub(super) in_flight: Option<Arc<()>>,
    /// Counts this batch as unfinished while it is alive.
    pub(super) _token: Arc<()>,
}

impl FlushBatch {
    /// Returns the payload bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, sealed)| sealed.bytes()).sum()
    }

    /// Splits off the second half of the partitions as a batch. Returns `None` for a batch of one
    /// partition.
    pub(super) fn cut(&mut self) -> Option<Self> {
        let first_half = self.parts.len().div_ceil(2);
        let parts = self.parts.split_off(first_half);
        (!parts.is_empty()).then(|| Self {
            key: self.key.clone(),
            handles: Arc::clone(&self.handles),
            parts,
            in_flight: None,
            _token: Arc::clone(&self._token),
            ..*self
        })
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.parts.iter().map(|(_, sealed)| sealed.blocks()).sum()
    }
}

/// The batches that wait for one tier.
#[derive(Debug, Default)]
pub(super) struct FlushQueue {
    batches: Mutex<FairQueue<AppId, FlushBatch>>,
    arrived: Notify,
    /// Cloned by every batch that waits or is being written.
    in_flight: Arc<()>,
}

impl FlushQueue {
    /// Adds a batch. `weight` is the weight of its application.
    pub(super) fn push(&self, mut batch: FlushBatch, weight: u32) {
        batch.in_flight = Some(Arc::clone(&self.in_flight));
        let (app, bytes) = (batch.key.app.clone(), batch.bytes());
        self.batches.lock().push(&app, bytes, weight, batch);
        self.arrived.notify_one();
    }

    /// Returns the next batch in fair order. Waits until there is one.
    pub(super) async fn pop(&self) -> FlushBatch {
        loop {
            let arrived = self.arrived.notified();
            if let Some(batch) = self.batches.lock().pop() {
                // Permits of `notify_one` do not accumulate, so pass the signal on.
                self.arrived.notify_one();
                return batch;
            }
            arrived.await;
        }
    }

    /// Returns the number of batches that wait or are being written.
    pub(super) fn in_flight(&self) -> usize {
        Arc::strong_count(&self.in_flight) - 1
    }

    pub(super) fn len(&self) -> usize {
        self.batches.lock().len()
    }

    /// Drops the waiting batches at shutdown. Their blocks stay in memory.
    pub(super) fn clear(&self) {
        self.batches.lock().clear();
    }
}
