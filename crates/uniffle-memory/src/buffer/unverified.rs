//! Verifies recovered blocks of an earlier process once, before they are served.
//!
//! Bytes that a process wrote to the memory file remain when it dies. But others can write to that
//! file, and memory has faults. A block that does not match its sender's checksum is hidden, and a
//! listener is notified ([`crate::Memory::on_damage`]). Blocks without a checksum (0) are accepted.
//! Blocks that this process received were checked on arrival.
//!
//! Checksums take CPU time, so this must not run on a runtime's thread. Readers, the flusher and a
//! scan after the start all call `Buffer::verify`. The first caller verifies and the others wait.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::list::BlockList;
use super::sealed::SealedBatch;
use uniffle_base::damage::DamageNotifier;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Maximum number of damaged blocks that the log names.
const NAMED_MAX: usize = 10;

/// Reason reported for damaged blocks.
pub(super) const DAMAGED: &str = "recovered blocks in memory are corrupt";

/// Verification state of all buffers of one memory.
#[derive(Default)]
pub(crate) struct Verification {
    /// Number of buffers with unverified blocks.
    pub(crate) buffers: AtomicUsize,
    /// Notified of a partition with damaged blocks before its other blocks are served.
    pub(crate) damage: DamageNotifier,
}

/// Unverified blocks of one buffer.
#[derive(Debug)]
pub(super) struct Unverified {
    is_pending: AtomicBool,
    /// Locked during verification.
    batch: Mutex<Option<(ShuffleKey, Weak<SealedBatch>)>>,
}

impl Unverified {
    /// Registers `batch` of an earlier process as unverified.
    pub(super) fn of(key: ShuffleKey, batch: Weak<SealedBatch>, of_all: &Verification) -> Arc<Self> {
        of_all.buffers.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { is_pending: AtomicBool::new(true), batch: Mutex::new(Some((key, batch))) })
    }

    /// Calls `verify` with the batch if it is unverified and still exists. Concurrent callers wait.
    pub(super) fn verify_once(&self, of_all: &Verification, verify: impl FnOnce(&ShuffleKey, &SealedBatch)) {
        if !self.is_pending.load(Ordering::Acquire) {
            return;
        }
        let mut pending = self.batch.lock();
        let Some((key, batch)) = pending.take() else { return };
        if let Some(batch) = batch.upgrade() {
            verify(&key, &batch);
        }
        self.clear(of_all);
    }

    /// Marks the buffer as verified, also if it is purged and serves nothing.
    pub(super) fn clear(&self, of_all: &Verification) {
        if self.is_pending.swap(false, Ordering::Release) {
            of_all.buffers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Logs the damaged blocks of `list`.
pub(super) fn log_damaged(key: &ShuffleKey, partition: PartitionId, list: &BlockList, damaged: &[u32]) {
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
