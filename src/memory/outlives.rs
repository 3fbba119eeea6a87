//! Memory that outlives the process: what an earlier one left is restored, and what is here is left to the next.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleKey};

use super::buffer::Buffer;
use super::config::{MemoryConfig, region_size};
use super::parts::{on_threads, threads_for};
use super::persistent::file::{self, Owner, Refusal};
use super::persistent::restore::LeftShuffle;
use super::{IsElsewhere, KeptMemory, Memory};
use crate::budget::Budget;
use crate::durability::OnDamage;

impl Memory {
    /// Whether [`Memory::open`] would succeed now; nothing is made or touched.
    ///
    /// # Errors
    /// Why not.
    pub fn check(config: &MemoryConfig, owner: &Owner) -> Result<(), Refusal> {
        file::check(&config.backing, owner, region_size(config))
    }

    /// Whether [`Memory::open`] would succeed where a running worker has its memory, once that is empty.
    ///
    /// # Errors
    /// Why not.
    pub fn check_room(config: &MemoryConfig) -> Result<(), Refusal> {
        file::check_room(&config.backing, region_size(config))
    }

    /// Shows what an earlier process left of a shuffle that is registered again and not written to yet, but for blocks that are in
    /// a tier (what `elsewhere` of their partition says). What `made` makes of the ids of what is there now, in the order in which they
    /// are read. Partitions are charged to `heap` beyond what there is: their blocks were acknowledged. Blocks for a while, on more
    /// cores than this one.
    pub fn restore<'a, T: Send>(
        &self,
        key: &ShuffleKey,
        elsewhere: impl Fn(PartitionId) -> IsElsewhere<'a> + Sync,
        heap: &Budget,
        made: impl Fn(PartitionId, Vec<BlockId>) -> T + Sync,
    ) -> Vec<(PartitionId, T)> {
        let (Some(kept), Some(buffers)) = (&self.kept, self.shuffle(key)) else { return Vec::new() };
        let found = kept.leftover.lock().found();
        let named = buffers.name.as_ref().and_then(|name| name.get());
        let (Some(leftover), Some(named)) = (&found, named) else { return Vec::new() };
        let (partitions, next) = (leftover.partitions(key), AtomicUsize::new(0));
        let restore_one = |partition: PartitionId| {
            let left = leftover.take(key, (partition, named), elsewhere(partition), &buffers.budget)?;
            match buffers.buffer_of(partition, |bytes| Ok(heap.force_charge(bytes))) {
                Ok(_) if left.blocks.is_empty() => None,
                Ok(buffer) => {
                    let ids = left.blocks.iter().map(|block| block.meta.block_id).collect();
                    buffer.restore(key, left);
                    Some((partition, made(partition, ids)))
                }
                Err(error) => {
                    tracing::error!(
                        shuffle = %key,
                        %partition,
                        %error,
                        "cannot recover the partition's blocks from memory"
                    );
                    None
                }
            }
        };
        let restore_some = || {
            let taken = std::iter::from_fn(|| partitions.get(next.fetch_add(1, Ordering::Relaxed)));
            taken.filter_map(|(partition, _)| restore_one(*partition)).collect::<Vec<_>>()
        };
        let threads = threads_for(partitions.iter().map(|(_, rows)| rows).sum());
        // One that panics has shown what it has shown; the start fails as it would on this thread.
        on_threads(threads, restore_some).into_iter().flatten().collect()
    }

    /// `on_damage` is told of each partition of which blocks that an earlier process left are damaged, when that is found out and
    /// before the others are served; of what was found out earlier, now. The first one only.
    pub fn on_damage(&self, on_damage: OnDamage) {
        self.shared.verification.hearer.set(on_damage);
    }

    /// Whether an earlier process left something that is not verified: until then what serves it is not for a
    /// runtime's thread.
    #[must_use]
    pub fn has_unverified(&self) -> bool {
        self.shared.verification.buffers.load(Ordering::Relaxed) > 0
    }

    /// Buffers of all shuffles, for a look at what an earlier process left ([`Buffer::verify`]) that no reader has asked for yet.
    #[must_use]
    pub fn buffers(&self) -> Vec<Arc<Buffer>> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|entry| Arc::clone(entry.value())).collect();
        shuffles.iter().flat_map(|shuffle| shuffle.all()).collect()
    }

    /// Whether an earlier process may have left something that is to be restored.
    #[must_use]
    pub fn has_leftover(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.table.was_used())
    }

    /// Shuffles that an earlier process left in a region that outlives it. To be asked before any is registered.
    #[must_use]
    pub fn left_shuffles(&self) -> usize {
        self.kept.as_ref().map_or(0, |kept| kept.table.found_names().len())
    }

    /// Keeps what an earlier process left of shuffles that are not registered and that a later start may know (`is_left`). It is charged
    /// and stays in the region until its shuffle is registered or its application ends. Returns how many blocks that are.
    pub fn keep_for_later(&self, is_left: impl Fn(&ShuffleKey) -> bool) -> usize {
        let Some(kept) = &self.kept else { return 0 };
        let Some(leftover) = kept.leftover.lock().found() else { return 0 };
        let is_left = |key: &ShuffleKey| self.shuffle(key).is_none() && is_left(key);
        let left = leftover.take_left(is_left, &self.shared.budget, &self.shared.supply.blocks);
        let blocks = left.values().map(LeftShuffle::blocks).sum();
        kept.for_later.lock().extend(left);
        blocks
    }

    /// Frees what is kept for a later start of these shuffles.
    pub(super) fn drop_left_for_later(&self, is_over: impl Fn(&ShuffleKey) -> bool) {
        let Some(kept) = &self.kept else { return };
        let mut for_later = kept.for_later.lock();
        if !for_later.is_empty() {
            for_later.retain(|key, _| !is_over(key));
        }
    }

    /// Frees what is kept for a later start of an application, which has ended.
    pub fn forget_app(&self, app: &AppId) {
        self.tickets().forget_app(app);
        self.drop_left_for_later(|key| key.app == *app);
    }

    /// The start is over: what was neither restored nor [kept](Memory::keep_for_later) is free. Blocks that an earlier process left, and
    /// those of them restored.
    pub fn finish_restore(&self) -> (u64, u64) {
        let left = self.kept.as_ref().and_then(|kept| kept.leftover.lock().end());
        let Some(left) = left else { return (0, 0) };
        let found = left.blocks() as u64;
        left.finish();
        self.shared.supply.lists.go_on();
        self.shared.supply.region.settle();
        (found, self.block_count())
    }

    /// Whether a successor can take over what is in memory.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Whether the next process finds what is in memory by itself.
    #[must_use]
    pub fn outlives_process(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.file.has_path()) && !self.backing_vanished()
    }

    /// Returns whether the file that memory lies in was removed, replaced or cut short, as by programs that clean up after a logout.
    /// Logs it once; it stays so.
    pub fn backing_vanished(&self) -> bool {
        let Some(kept) = &self.kept else { return false };
        if kept.has_vanished.load(Ordering::Relaxed) {
            return true;
        }
        let was_cut = kept.file.was_cut();
        let has_vanished = kept.file.has_vanished() || was_cut;
        if has_vanished && !kept.has_vanished.swap(true, Ordering::Relaxed) {
            tracing::error!(
                path = %kept.file.path().unwrap_or(Path::new("")).display(), was_cut,
                "the file of memory_store.backing was removed, replaced or cut short; a kill would lose blocks in \
                 memory; upgrade (SIGUSR2) or restart the worker, which flushes them and creates a new file"
            );
        }
        has_vanished
    }

    /// Why a kill loses what is in memory although it lies in a file, as far as that was noticed.
    #[must_use]
    pub fn backing_fault(&self) -> Option<String> {
        let kept = self.kept.as_ref().filter(|kept| kept.has_vanished.load(Ordering::Relaxed))?;
        let path = kept.file.path()?.display();
        Some(format!(
            "a kill would lose blocks in memory: {path} (memory_store.backing) was removed, replaced or cut \
             short; upgrade or restart the worker"
        ))
    }

    /// Does what the end of this process would have to do for its pages, while it goes on; blocks for a while. Pages that are
    /// touched later come back one by one.
    pub fn unlink_pages(&self) {
        if self.is_kept() {
            self.shared.supply.region.unlink_pages();
        }
    }

    /// From now on memory is the next process's: what is dropped here stays there, and nothing more is committed. If nothing
    /// is in it, nothing is left of it.
    pub fn let_go(&self) {
        let Some(KeptMemory { table, file, for_later, .. }) = &self.kept else { return };
        table.let_go();
        self.shared.supply.region.let_go();
        let mut left = Ok(());
        if self.block_count() == 0 && for_later.lock().is_empty() {
            table.end();
            left = file.remove();
        }
        if let Err(error) = left.and_then(|()| file.unlock()) {
            tracing::warn!(%error, "cannot preserve the memory file for the next process");
        }
    }

    /// The file without a name that it lies in, once more, for a successor.
    ///
    /// # Errors
    /// When it cannot be duplicated.
    pub fn handed_over(&self) -> io::Result<Option<OwnedFd>> {
        self.kept.as_ref().map_or(Ok(None), |kept| kept.file.duplicate())
    }
}
