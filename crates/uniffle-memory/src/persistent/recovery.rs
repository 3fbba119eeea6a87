//! Recovery of memory that outlives the process, and its release to the next process.
//!
//! A start opens the memory and restores the blocks of registered shuffles. It keeps blocks of
//! shuffles that a later start may register, and frees all others. A stop releases the memory to
//! the next process. While the file has no slot for a registered shuffle, its blocks in memory are
//! lost if the process is killed; [`Memory::run_ahead`] tries again to find slots.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::interval;
use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleKey};

use super::file::{self, MemoryFileError, Owner};
use super::restore::RetainedShuffle;
use super::sigbus;
use crate::buffer::Buffer;
use crate::buffer::shuffle::ShuffleBuffers;
use crate::config::{MemoryConfig, region_size};
use crate::region::parts::{on_threads, threads_for};
use crate::{InMemory, IsElsewhere, Memory, PersistentMemory};
use uniffle_base::LogLimiter;
use uniffle_base::budget::Budget;
use uniffle_base::damage::DamageListener;

/// Interval between attempts to find slots for unprotected shuffles.
const PROTECT_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between log lines about shuffles without a slot.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

impl Memory {
    /// Checks whether [`Memory::open`] would succeed now. Creates and touches nothing.
    ///
    /// # Errors
    /// The reason why it would fail.
    pub fn check_backing_file(config: &MemoryConfig, owner: &Owner) -> Result<(), MemoryFileError> {
        file::check(&config.backing, owner, region_size(config))
    }

    /// Checks whether [`Memory::open`] would succeed after the running worker has flushed its own
    /// memory and deleted the file. Creates and touches nothing.
    ///
    /// # Errors
    /// The reason why it would fail.
    pub fn check_free_space(config: &MemoryConfig) -> Result<(), MemoryFileError> {
        file::check_free_space(&config.backing, region_size(config))
    }

    /// Restores recovered blocks of a shuffle that is registered again and not written to yet.
    /// `elsewhere` returns a predicate for each partition. Blocks for which the predicate is true
    /// are in a tier and are skipped.
    ///
    /// Returns the result of `made` for each partition with restored blocks. `made` receives their
    /// ids in read order. Partitions are charged to `heap` even beyond its capacity, because their
    /// blocks were acknowledged. Runs on several threads and returns when all have ended.
    pub fn restore<'a, T: Send>(
        &self,
        key: &ShuffleKey,
        elsewhere: impl Fn(PartitionId) -> IsElsewhere<'a> + Sync,
        heap: &Budget,
        made: impl Fn(PartitionId, Vec<BlockId>) -> T + Sync,
    ) -> Vec<(PartitionId, T)> {
        let (Some(persistent), Some(buffers)) = (&self.persistent, self.shuffle(key)) else {
            return Vec::new();
        };
        let found = persistent.recovered.lock().found();
        let name = buffers.name.as_ref().and_then(|name| name.get());
        let (Some(recovered), Some(name)) = (&found, name) else { return Vec::new() };
        let (partitions, next) = (recovered.partitions(key), AtomicUsize::new(0));
        let restore_one = |partition: PartitionId| {
            let restored = recovered.take(key, partition, name, elsewhere(partition), &buffers.budget)?;
            match buffers.buffer_of(partition, |bytes| Ok(heap.charge_unchecked(bytes))) {
                Ok(_) if restored.blocks.is_empty() => None,
                Ok(buffer) => {
                    let ids = restored.blocks.iter().map(|block| block.meta.block_id).collect();
                    buffer.restore(key, restored);
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
        // A panic of one of the threads is propagated, so the start fails. Partitions restored
        // before it stay visible.
        on_threads(threads, restore_some).into_iter().flatten().collect()
    }

    /// Sets the listener for partitions with damaged recovered blocks. It is notified when damage
    /// is found and before the other blocks are served. Damage found earlier is reported now. Only
    /// the first call has an effect.
    pub fn on_damage(&self, on_damage: DamageListener) {
        self.shared.verification.damage.set(on_damage);
    }

    /// Returns whether some recovered blocks are unverified. Serving such blocks verifies them
    /// first, which takes too long for a thread of the async runtime.
    #[must_use]
    #[inline]
    pub fn has_unverified(&self) -> bool {
        self.shared.verification.buffers.load(Ordering::Relaxed) > 0
    }

    /// Returns the buffers of all shuffles, to verify recovered blocks ([`Buffer::verify`]) that no
    /// reader has requested yet.
    #[must_use]
    pub fn buffers(&self) -> Vec<Arc<Buffer>> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|entry| Arc::clone(entry.value())).collect();
        shuffles.iter().flat_map(|shuffle| shuffle.all()).collect()
    }

    /// Returns whether an earlier process may have left blocks to recover.
    #[must_use]
    pub fn has_leftover(&self) -> bool {
        self.persistent.as_ref().is_some_and(|persistent| persistent.table.was_used())
    }

    /// Returns the number of shuffles that an earlier process left. Must be called before any
    /// shuffle is registered.
    #[must_use]
    pub fn recoverable_shuffles(&self) -> usize {
        self.persistent.as_ref().map_or(0, |persistent| persistent.table.found_names().len())
    }

    /// Keeps recovered blocks of unregistered shuffles for which `is_awaited` is true: a later
    /// start may register them. The blocks are charged and stay in the region until their shuffle
    /// is registered or its application ends. Returns the number of blocks.
    pub fn keep_for_later(&self, is_awaited: impl Fn(&ShuffleKey) -> bool) -> usize {
        let Some(persistent) = &self.persistent else { return 0 };
        let Some(recovered) = persistent.recovered.lock().found() else { return 0 };
        let is_awaited = |key: &ShuffleKey| self.shuffle(key).is_none() && is_awaited(key);
        let shuffles = recovered.take_shuffles(is_awaited, &self.shared.budget, &self.shared.supply.blocks);
        let blocks = shuffles.values().map(RetainedShuffle::blocks).sum();
        persistent.retained.lock().extend(shuffles);
        blocks
    }

    /// Returns the number of blocks in memory that can be flushed: all except the kept ones.
    #[must_use]
    pub fn flushable_blocks(&self) -> u64 {
        let kept = |it: &PersistentMemory| it.retained.lock().values().map(RetainedShuffle::rows).sum();
        self.block_count().saturating_sub(self.persistent.as_ref().map_or(0, kept))
    }

    /// Returns the in-memory amounts per shuffle, including [kept](Memory::keep_for_later)
    /// shuffles.
    #[must_use]
    pub fn contents_with_kept(&self) -> Vec<InMemory> {
        let mut contents = self.contents();
        if let Some(persistent) = &self.persistent {
            contents.extend(persistent.retained.lock().iter().map(|(key, kept)| kept.contents(key)));
        }
        contents
    }

    /// Frees the blocks of kept shuffles for which `is_over` is true.
    pub(crate) fn drop_retained(&self, is_over: impl Fn(&ShuffleKey) -> bool) {
        let Some(persistent) = &self.persistent else { return };
        let mut retained = persistent.retained.lock();
        if !retained.is_empty() {
            retained.retain(|key, _| !is_over(key));
        }
    }

    /// Frees the kept blocks and the tickets of an application that has ended.
    pub fn forget_app(&self, app: &AppId) {
        self.tickets().forget_app(app);
        self.drop_retained(|key| key.app == *app);
    }

    /// Ends the recovery and frees blocks that were neither restored nor
    /// [kept](Memory::keep_for_later). Returns the number of blocks that an earlier process left,
    /// and the number that are now in memory.
    pub fn finish_restore(&self) -> (u64, u64) {
        let recovered = self.persistent.as_ref().and_then(|persistent| persistent.recovered.lock().end());
        let Some(recovered) = recovered else { return (0, 0) };
        let found = recovered.blocks() as u64;
        recovered.finish();
        self.shared.supply.lists.resume();
        self.shared.supply.region.settle();
        (found, self.block_count())
    }

    /// Returns whether a successor can take over the memory.
    #[must_use]
    pub fn is_transferable(&self) -> bool {
        self.persistent.is_some()
    }

    /// Returns whether the next process finds the memory by its path.
    #[must_use]
    pub fn outlives_process(&self) -> bool {
        self.persistent.as_ref().is_some_and(|persistent| persistent.file.has_path())
            && !self.backing_vanished()
    }

    /// Returns whether the file of the memory was removed, replaced or truncated, for example by
    /// programs that clean up after a logout. Logs it once, and the result stays true.
    pub fn backing_vanished(&self) -> bool {
        let Some(persistent) = &self.persistent else { return false };
        if persistent.has_vanished.load(Ordering::Relaxed) {
            return true;
        }
        let was_truncated = persistent.file.was_truncated();
        let has_vanished = persistent.file.has_vanished() || was_truncated;
        if has_vanished && !persistent.has_vanished.swap(true, Ordering::Relaxed) {
            tracing::error!(
                path = %persistent.file.path().unwrap_or(Path::new("")).display(), was_truncated,
                "the file of memory_store.backing was removed, replaced or truncated; a kill would lose blocks in \
                 memory; upgrade (SIGUSR2) or restart the worker, which flushes them and creates a new file"
            );
        }
        has_vanished
    }

    /// Installs a handler of SIGBUS, with which the process survives an access to memory whose file
    /// was truncated. Missing pages then read as zeros.
    ///
    /// # Errors
    /// If the kernel refuses the handler.
    pub fn survive_truncation(&self) -> io::Result<()> {
        let Some(PersistentMemory { file, .. }) = &self.persistent else { return Ok(()) };
        let shown = file.path().map_or("a memfd".to_owned(), |path| path.display().to_string());
        sigbus::guard(Arc::downgrade(file), &shown)
    }

    /// Returns the reason why a kill loses blocks although the memory is in a file, if this was
    /// noticed.
    #[must_use]
    pub fn backing_fault(&self) -> Option<String> {
        let persistent = self.persistent.as_ref().filter(|it| it.has_vanished.load(Ordering::Relaxed))?;
        let path = persistent.file.path()?.display();
        Some(format!(
            "a kill would lose blocks in memory: {path} (memory_store.backing) was removed, replaced or \
             truncated; upgrade or restart the worker"
        ))
    }

    /// Unmaps the pages now, so that the process exits faster later. Takes long, so it must run on
    /// a blocking thread. Pages that are touched later are mapped again one by one.
    pub fn unlink_pages(&self) {
        if self.is_transferable() {
            self.shared.supply.region.unlink_pages();
        }
    }

    /// Releases the memory to the next process: dropping blocks no longer removes them, and nothing
    /// more is committed. A file without blocks is deleted.
    pub fn release(&self) {
        let Some(PersistentMemory { table, file, retained, .. }) = &self.persistent else { return };
        table.release();
        self.shared.supply.region.release();
        let mut removed = Ok(());
        if self.block_count() == 0 && retained.lock().is_empty() {
            table.end();
            removed = file.remove();
        }
        if let Err(error) = removed.and_then(|()| file.unlock()) {
            tracing::warn!(%error, "cannot preserve the memory file for the next process");
        }
    }

    /// Returns a duplicate of the unnamed file for a successor, or `None` if there is no such file.
    ///
    /// # Errors
    /// When it cannot be duplicated.
    pub fn duplicate_for_successor(&self) -> io::Result<Option<OwnedFd>> {
        self.persistent.as_ref().map_or(Ok(None), |persistent| persistent.file.duplicate())
    }

    /// Returns the number of shuffles whose blocks in memory are lost if the process is killed,
    /// although the memory outlives it. The file had no slot for these shuffles when they were
    /// registered.
    #[must_use]
    pub fn unprotected_shuffles(&self) -> u64 {
        self.persistent.as_ref().map_or(0, |persistent| persistent.table.unprotected())
    }

    /// Tries again to find slots for unprotected shuffles. May take milliseconds per shuffle: not
    /// for a runtime's thread.
    pub fn protect_shuffles(&self) {
        let lack =
            |shuffle: &Arc<ShuffleBuffers>| shuffle.name.as_ref().is_some_and(|name| name.is_partial());
        let lacking: Vec<_> =
            self.shuffles.iter().filter(|shuffle| lack(shuffle)).map(|it| Arc::clone(&it)).collect();
        lacking.iter().for_each(|shuffle| shuffle.protect());
    }

    /// Allocates pages ahead of promises, and slots for unprotected shuffles, until the memory is
    /// dropped. Returns at once for private memory.
    pub async fn run_ahead(self: Arc<Self>) {
        let (prefaulter, memory) = (self.prefaulter.clone(), Arc::downgrade(&self));
        drop(self);
        if let Some(prefaulter) = prefaulter {
            let protected = memory.clone();
            let unprotected = move || Some(memory.upgrade()?.unprotected_shuffles());
            let protect = move || {
                let memory = protected.upgrade()?;
                memory.protect_shuffles();
                Some(memory.unprotected_shuffles())
            };
            tokio::join!(prefaulter.run(), protect_each_second(unprotected, protect));
        }
    }
}

/// Tries once a second until it is dropped. `unprotected` returns the number of shuffles without a
/// slot, and `protect` the number left after an attempt. `None` from `unprotected` ends the loop.
async fn protect_each_second(
    unprotected: impl Fn() -> Option<u64>,
    protect: impl Fn() -> Option<u64> + Clone + Send + 'static,
) {
    let (mut ticks, limiter) = (interval(PROTECT_INTERVAL), LogLimiter::new(1, LOG_INTERVAL));
    let mut is_logged = false;
    loop {
        ticks.tick().await;
        let Some(waiting) = unprotected() else { return };
        if waiting > 0 {
            let protecting = tokio::task::spawn_blocking(protect.clone());
            let Ok(Some(shuffles @ 1..)) = protecting.await else { continue };
            if limiter.pass().is_some() {
                let text = "memory_store.backing is full; a kill would lose blocks in memory of some \
                     shuffles; free space there";
                tracing::warn!(shuffles, "{text}");
                is_logged = true;
            }
        } else if std::mem::take(&mut is_logged) {
            tracing::info!("memory_store.backing has space for all shuffles again");
        }
    }
}
