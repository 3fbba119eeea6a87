//! Sealed batches on their way to a worker.
//!
//! The queue has no length limit of its own: each element holds at least one block of memory, so the budget bounds it.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::memory::{Buffer, SealedBatch};
use crate::tiers::{RemoteHandle, ShuffleHandle};
use uniffle_wire::types::{Distribution, ShuffleKey};

use super::tier::Tier;

/// The incarnations that chains were sealed from: they cannot end up in a later shuffle of the same name.
#[derive(Debug, Clone)]
pub(super) struct Handles {
    pub(super) local: Option<ShuffleHandle>,
    pub(super) hdfs: Option<RemoteHandle>,
}

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
    pub(super) failed: Option<Tier>,
    /// Counts it among those of HDFS while it is one.
    pub(super) in_flight: Option<Arc<()>>,
    /// Counts this batch as unfinished while it lives.
    pub(super) _token: Arc<()>,
}

impl Batch {
    /// Payload bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, sealed)| sealed.bytes()).sum()
    }
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    batches: Mutex<VecDeque<Batch>>,
    arrived: Notify,
}

impl Queue {
    pub(super) fn push(&self, batch: Batch) {
        self.batches.lock().push_back(batch);
        self.arrived.notify_one();
    }

    /// The oldest batch; waits for one.
    pub(super) async fn pop(&self) -> Batch {
        loop {
            let arrived = self.arrived.notified();
            if let Some(batch) = self.batches.lock().pop_front() {
                // Permits of `notify_one` do not add up; pass the signal on if there is more to do.
                self.arrived.notify_one();
                return batch;
            }
            arrived.await;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.batches.lock().len()
    }

    /// Forgets what waits (shutdown): its memory goes back.
    pub(super) fn clear(&self) {
        self.batches.lock().clear();
    }
}
