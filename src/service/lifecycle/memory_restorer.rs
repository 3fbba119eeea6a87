//! Restores recovered blocks in memory while the metadata log is still being read. Later records do
//! not depend on the blocks, and a start waits for both.
//!
//! Invariants: a shuffle's blocks are restored once, after its registration was read. The shuffle's
//! present ids are not accessed meanwhile: [`MemoryRestorer::end`] is called first. Shuffles are
//! restored one after another, each on as many cores as its size justifies.

use std::collections::HashSet;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::log::PresentIds;
use crate::memory::{IsElsewhere, Memory};
use crate::store::Tiers;
use uniffle_base::budget::Budget;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey};

/// A shuffle whose blocks in memory are to be restored.
struct RestoreJob {
    key: ShuffleKey,
    present: PresentIds,
    /// Budget that its partitions are charged to.
    heap: Budget,
    done: oneshot::Sender<PresentIds>,
}

/// Receives the block ids of a shuffle, including those in memory, once its blocks are restored.
pub(super) type RestoredIds = oneshot::Receiver<PresentIds>;

/// Restores shuffles one after another on a thread of its own.
pub(super) struct MemoryRestorer {
    memory: Arc<Memory>,
    tiers: TierIds,
    /// The thread and its queue, created for the first shuffle.
    begun: Option<(mpsc::Sender<RestoreJob>, JoinHandle<()>)>,
}

impl MemoryRestorer {
    /// Creates the restorer. Must be called on a runtime.
    pub(super) fn new(memory: &Arc<Memory>, tiers: &Tiers) -> Self {
        let tiers = TierIds { tiers: tiers.clone(), runtime: Handle::current() };
        Self { memory: Arc::clone(memory), tiers, begun: None }
    }

    /// Begins to restore the recovered blocks of `key` in memory. `present` holds the ids that
    /// exist elsewhere.
    pub(super) fn begin(&mut self, key: ShuffleKey, present: PresentIds, heap: Budget) -> RestoredIds {
        let (done, awaited) = oneshot::channel();
        let mut job = RestoreJob { key, present, heap, done };
        if self.begun.is_none() {
            let (jobs, begun) = mpsc::channel::<RestoreJob>();
            let (memory, tiers) = (Arc::clone(&self.memory), self.tiers.clone());
            let work = move || begun.iter().for_each(|job| job.run(&memory, &tiers));
            let thread = std::thread::Builder::new().name("memory restore".to_owned()).spawn(work);
            self.begun = thread.ok().map(|thread| (jobs, thread));
        }
        if let Some((jobs, _)) = &self.begun {
            match jobs.send(job) {
                Ok(()) => return awaited,
                // The thread has panicked; `end` propagates the panic.
                Err(mpsc::SendError(back)) => job = back,
            }
        }
        job.run(&self.memory, &self.tiers);
        awaited
    }

    /// Waits for all restores that have begun.
    pub(super) fn end(self) {
        let Some((jobs, thread)) = self.begun else { return };
        drop(jobs);
        // If a restore panicked, the start fails as if it had run inline.
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

impl RestoreJob {
    fn run(self, memory: &Memory, tiers: &TierIds) {
        let Self { key, mut present, heap, done } = self;
        let in_tier: HashSet<PartitionId> = present.in_tier().collect();
        let on_disk = |partition: PartitionId| -> IsElsewhere<'_> {
            match present.held(partition) {
                Some(ids) => Box::new(|id: BlockId| ids.contains(id.0.unsigned_abs())),
                None if in_tier.contains(&partition) => {
                    let ids = tiers.sorted(&key, partition);
                    Box::new(move |id: BlockId| ids.binary_search(&id.0.unsigned_abs()).is_ok())
                }
                None => Box::new(|_| false),
            }
        };
        let ids_of = |_, in_memory: Vec<BlockId>| -> Vec<u64> {
            in_memory.iter().map(|id| id.0.unsigned_abs()).collect()
        };
        let restored = memory.restore(&key, on_disk, &heap, ids_of);
        restored.into_iter().for_each(|(partition, ids)| present.add(partition, &ids));
        // The start may have failed meanwhile.
        let _ = done.send(present);
    }
}

/// Reads block ids from the tiers, for partitions whose ids [`PresentIds`] does not hold.
#[derive(Clone)]
struct TierIds {
    tiers: Tiers,
    runtime: Handle,
}

impl TierIds {
    /// Returns the sorted ids of a partition's blocks in the tiers. Ids that cannot be read are
    /// missing; their blocks are then both in memory and in a tier.
    fn sorted(&self, key: &ShuffleKey, partition: PartitionId) -> Vec<u64> {
        let (found, ids) = mpsc::channel();
        let (tiers, key) = (self.tiers.clone(), key.clone());
        self.runtime.spawn(async move {
            let mut ids = Vec::new();
            for tier in tiers.iter() {
                if let Err(error) = tier.visit_present(&key, partition, &mut |id| ids.push(id)).await {
                    tracing::error!(
                        shuffle = %key,
                        %partition,
                        %error,
                        "cannot read the block ids of the partition"
                    );
                }
            }
            ids.sort_unstable();
            // The receiver waits below.
            let _ = found.send(ids);
        });
        ids.recv().unwrap_or_default()
    }
}
