//! Blocks of an earlier process are restored in memory while the metadata log is still being read: neither needs what the other gives,
//! and a start waits for both.
//!
//! Invariants: a shuffle's blocks are restored after it is registered and once; nobody else touches what was found of it
//! meanwhile ([`Restoring::present`] waits); shuffles are restored one after the other, each on as many cores as it is worth.

use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::budget::Budget;
use crate::durability::IdSet;
use crate::memory::{IsElsewhere, Memory};
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey};

/// Ids of the blocks that are there, by partition.
pub(super) type Present = HashMap<PartitionId, IdSet>;

/// A shuffle whose blocks in memory are to be restored.
struct Job {
    key: ShuffleKey,
    present: Present,
    /// What its partitions are charged to.
    heap: Budget,
    done: oneshot::Sender<Present>,
}

/// What is there of a shuffle, when its blocks in memory are restored.
pub(super) type Awaited = oneshot::Receiver<Present>;

/// Restores shuffles one after the other, on a thread of its own.
pub(super) struct FromMemory {
    memory: Arc<Memory>,
    /// A thread that was begun with the first shuffle.
    begun: Option<(mpsc::Sender<Job>, JoinHandle<()>)>,
}

impl FromMemory {
    pub(super) fn new(memory: &Arc<Memory>) -> Self {
        Self { memory: Arc::clone(memory), begun: None }
    }

    /// Begins to restore what an earlier process had of `key` in memory, of which `present` is elsewhere.
    pub(super) fn begin(&mut self, key: ShuffleKey, present: Present, heap: Budget) -> Awaited {
        let (done, awaited) = oneshot::channel();
        let mut job = Job { key, present, heap, done };
        if self.begun.is_none() {
            let (jobs, begun) = mpsc::channel::<Job>();
            let memory = Arc::clone(&self.memory);
            let work = move || begun.iter().for_each(|job| job.run(&memory));
            let thread = std::thread::Builder::new().name("memory restore".to_owned()).spawn(work);
            self.begun = thread.ok().map(|thread| (jobs, thread));
        }
        if let Some((jobs, _)) = &self.begun {
            match jobs.send(job) {
                Ok(()) => return awaited,
                // It has panicked, which `end` tells.
                Err(mpsc::SendError(back)) => job = back,
            }
        }
        job.run(&self.memory);
        awaited
    }

    /// Waits for what was begun.
    pub(super) fn end(self) {
        let Some((jobs, thread)) = self.begun else { return };
        drop(jobs);
        // A start that could not restore something fails as if it had done it itself.
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

impl Job {
    fn run(self, memory: &Memory) {
        let Self { key, mut present, heap, done } = self;
        let on_disk = |partition: PartitionId| -> IsElsewhere<'_> {
            match present.get(&partition) {
                Some(ids) => Box::new(|id: BlockId| ids.contains(id.0.unsigned_abs())),
                None => Box::new(|_| false),
            }
        };
        let all_of = |partition: PartitionId, in_memory: Vec<BlockId>| {
            let mut ids: Vec<u64> = in_memory.iter().map(|id| id.0.unsigned_abs()).collect();
            ids.sort_unstable();
            let mut all = present.get(&partition).cloned().unwrap_or_default();
            all.add_sorted(&ids);
            all
        };
        let restored = memory.restore(&key, on_disk, &heap, all_of);
        present.extend(restored);
        // The start may have failed meanwhile.
        let _ = done.send(present);
    }
}
