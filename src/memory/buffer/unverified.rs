//! What an earlier process left in memory is compared with its checksums before it is served, once.
//!
//! Stores of a process that dies are whole; a file in memory can still be written to by others, and memory has faults. A block
//! that does not have the checksum that its sender gave is not shown, and its shuffle is told ([`super::super::Memory::on_damage`]).
//! One of which the sender gave none (0) is taken as it is; what this process received was looked at when it came.
//!
//! A core sums several GB/s, so it is not for a runtime's thread. Readers, the flusher and a look at everything after the start
//! all ask (`Buffer::verify`); the first does it and the others wait.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::super::list::BlockList;
use super::super::sealed::SealedBatch;
use crate::durability::Hearer;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Damaged blocks that the log names.
const NAMED_MAX: usize = 10;

/// Why damaged blocks are lost.
pub(super) const DAMAGED: &str = "recovered blocks in memory are corrupt";

/// Of all buffers of one memory.
#[derive(Default)]
pub(in crate::memory) struct Verification {
    /// Buffers that have something that is not verified.
    pub(in crate::memory) buffers: AtomicUsize,
    /// Told of a partition of which something is damaged, before the rest is served.
    pub(in crate::memory) hearer: Hearer,
}

/// Of one buffer.
#[derive(Debug)]
pub(super) struct Unverified {
    is_left: AtomicBool,
    /// Held while it is looked at.
    batch: Mutex<Option<(ShuffleKey, Weak<SealedBatch>)>>,
}

impl Unverified {
    /// `batch` is of an earlier process.
    pub(super) fn of(key: ShuffleKey, batch: Weak<SealedBatch>, of_all: &Verification) -> Arc<Self> {
        of_all.buffers.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { is_left: AtomicBool::new(true), batch: Mutex::new(Some((key, batch))) })
    }

    /// Calls `look` with what is not verified, if it is still there. Those that come meanwhile wait.
    pub(super) fn look_once(&self, of_all: &Verification, look: impl FnOnce(&ShuffleKey, &SealedBatch)) {
        if !self.is_left.load(Ordering::Acquire) {
            return;
        }
        let mut left = self.batch.lock();
        let Some((key, batch)) = left.take() else { return };
        if let Some(batch) = batch.upgrade() {
            look(&key, &batch);
        }
        self.clear(of_all);
    }

    /// Nobody is given anything any more, or all was looked at.
    pub(super) fn clear(&self, of_all: &Verification) {
        if self.is_left.swap(false, Ordering::Release) {
            of_all.buffers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Names the damaged blocks of `list` in the log.
pub(super) fn say_damaged(key: &ShuffleKey, partition: PartitionId, list: &BlockList, damaged: &[u32]) {
    let named = damaged.iter().take(NAMED_MAX);
    let first: Vec<i64> = named.map(|at| list.meta(*at as usize).block_id.0).collect();
    tracing::error!(
        shuffle = %key, %partition, blocks = damaged.len(), ?first,
        "recovered blocks in memory are corrupt and lost"
    );
}

impl std::fmt::Debug for Verification {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verification").field("buffers", &self.buffers).finish_non_exhaustive()
    }
}
