//! Allocates pages of a file-backed region ahead of promises. Once the kernel refuses pages,
//! capacity without pages is charged as unavailable.
//!
//! Invariant: while pages are allocated in time, a ticket is granted only for memory that has
//! pages. If others fill the tmpfs, senders get `NO_BUFFER` instead of a promise that cannot be
//! kept. A promise made just before the kernel first refuses pages may fail at the send, and the
//! client sends again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::region::Region;
use uniffle_base::budget::{Budget, Charge};

/// Pages are allocated this far ahead of promises.
const AHEAD_BYTES: u64 = 64 << 20;
/// Interval of checks without a notification: after a refusal, and for charges without a ticket.
const EVERY: Duration = Duration::from_secs(1);

/// Allocates pages for the next promises and charges unavailable capacity to the budget.
#[derive(Debug)]
pub(crate) struct Prefaulter {
    region: Arc<Region>,
    budget: Budget,
    /// Capacity that cannot be promised because it has no pages. Locked while pages are allocated.
    unavailable: Mutex<Charge>,
    /// Copy of the bytes of `unavailable`, readable without the lock.
    unavailable_bytes: AtomicU64,
    wanted: Notify,
}

impl Prefaulter {
    pub(crate) fn new(region: Arc<Region>, budget: Budget) -> Arc<Self> {
        let unavailable = Mutex::new(budget.empty_charge());
        Arc::new(Self {
            region,
            budget,
            unavailable,
            unavailable_bytes: AtomicU64::new(0),
            wanted: Notify::new(),
        })
    }

    /// Requests further pages after a grant, if fewer than half of the lead are left.
    pub(super) fn note_promise(&self) {
        if !self.region.is_refused_pages() && self.lacks(AHEAD_BYTES / 2) {
            self.wanted.notify_one();
        }
    }

    fn target_bytes(&self, lead: u64) -> u64 {
        let promised = self.budget.used().saturating_sub(self.unavailable_bytes());
        promised.saturating_add(lead).min(self.region.capacity_bytes())
    }

    fn lacks(&self, lead: u64) -> bool {
        self.region.ready_bytes() < self.target_bytes(lead)
    }

    /// Returns the bytes of the capacity that cannot be used.
    pub(crate) fn unavailable_bytes(&self) -> u64 {
        self.unavailable_bytes.load(Ordering::Relaxed)
    }

    /// Allocates pages up to the target and updates the unavailable capacity. Takes milliseconds
    /// per 2 MiB: not for a runtime's thread.
    pub(crate) fn prefault(&self) {
        let mut unavailable = self.unavailable.lock();
        let before = unavailable.bytes();
        let error = self.region.take_pages(self.target_bytes(AHEAD_BYTES)).err();
        let lacking = match &error {
            Some(_) => self.region.capacity_bytes() - self.region.ready_bytes(),
            None => 0,
        };
        if lacking < before {
            drop(unavailable.split_up_to(before - lacking));
        } else {
            unavailable.merge(self.budget.charge_unchecked(lacking - before));
        }
        self.unavailable_bytes.store(lacking, Ordering::Relaxed);
        drop(unavailable);
        match error {
            Some(error) if before == 0 => tracing::warn!(
                %error,
                unavailable_bytes = lacking,
                "memory_store.backing is full; this part of the capacity is unavailable until space is \
                 freed there"
            ),
            None if before > 0 => tracing::info!("memory_store.backing has space again"),
            _ => {}
        }
    }

    /// Allocates pages ahead of promises until it is dropped.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut every = tokio::time::interval(EVERY);
        loop {
            tokio::select! {
                () = self.wanted.notified() => {}
                _ = every.tick() => {}
            }
            let is_idle = !self.region.is_refused_pages() && !self.lacks(AHEAD_BYTES);
            if is_idle && self.unavailable_bytes() == 0 {
                continue;
            }
            let prefaulter = Arc::clone(&self);
            let taken = tokio::task::spawn_blocking(move || prefaulter.prefault()).await;
            if let Err(error) = taken {
                tracing::error!(%error, "cannot allocate memory pages; retrying");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use prometheus::Registry;

    use super::*;
    use crate::{Backing, BlockFill, Buffer, Memory, MemoryConfig, MemoryError, Owner};
    use uniffle_base::budget::HeapKind;
    use uniffle_wire::types::{
        AppId, BlockId, BlockMeta, Distribution, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId,
    };

    const MIB: u64 = 1 << 20;

    fn opened(file: Option<OwnedFd>) -> Arc<Memory> {
        let config = MemoryConfig {
            capacity_bytes: 16 * MIB,
            read_capacity_bytes: 4 * MIB,
            heap_bytes: 96 * MIB,
            ticket_timeout: Duration::from_secs(300),
            tickets_max: 1000,
            blocks_max: 20_000,
            backing: Backing::Memfd,
            ..MemoryConfig::default()
        };
        let owner = Owner { node: "10.0.0.1-19999".to_owned(), boot: 7 };
        Memory::open(&config, &owner, file, &Registry::new()).unwrap()
    }

    fn app() -> AppId {
        AppId::parse("app").unwrap()
    }

    fn buffer(memory: &Memory) -> Arc<Buffer> {
        let heap = memory.heap().of(HeapKind::Partitions);
        let shuffle = memory.register(&ShuffleKey::new(app(), ShuffleId(0)), Distribution::Normal);
        shuffle.buffer(PartitionId(0), heap).unwrap()
    }

    fn send(memory: &Memory, ids: std::ops::Range<i64>, length: u32) -> Result<(), MemoryError> {
        let ticket = memory.tickets().require(&app(), u64::from(length) * ids.clone().count() as u64, 1)?;
        let mut funds = memory.tickets().redeem(&app(), ticket)?;
        let buffer = buffer(memory);
        let mut blocks: Vec<(BlockMeta, BlockFill)> = Vec::new();
        for id in ids {
            let mut fill = buffer.reserve(length, &mut funds)?;
            fill.write(&vec![7; length as usize]);
            let meta = BlockMeta {
                block_id: BlockId(id),
                task_attempt_id: TaskAttemptId(1),
                length,
                uncompressed_length: length,
                crc: 0,
            };
            blocks.push((meta, fill));
        }
        buffer.commit(blocks, &mut funds).map(drop)
    }

    fn is_no_buffer(sent: Result<(), MemoryError>) -> bool {
        matches!(sent, Err(MemoryError::NoCapacity { .. }))
    }

    fn end(memory: &Memory) {
        drop(memory.forget(&ShuffleKey::new(app(), ShuffleId(0))));
        assert_eq!((memory.used_bytes(), memory.block_count(), memory.unavailable_bytes()), (0, 0, 0));
        let region = &memory.shared.supply.region;
        assert_eq!(region.free_bytes(), region.capacity_bytes());
    }

    #[test]
    fn memory_without_pages_is_unavailable_until_faulted() {
        let memory = opened(None);
        let region = &memory.shared.supply.region;
        region.limit_pages(usize::try_from(7 * MIB).unwrap());
        memory.prefaulter.as_ref().unwrap().prefault();
        assert_eq!(region.ready_bytes(), 6 * MIB, "only whole blocks may be ready");
        assert_eq!(memory.unavailable_bytes(), region.capacity_bytes() - 6 * MIB);
        // The region is 2 MiB larger than the budget, so the charge leaves 4 of the 6 MiB.
        assert!(is_no_buffer(send(&memory, 0..5, 1 << 20)));
        send(&memory, 0..3, 1 << 20).unwrap();
        assert!(is_no_buffer(send(&memory, 3..5, 1 << 20)));
        region.limit_pages(usize::MAX);
        memory.prefaulter.as_ref().unwrap().prefault();
        assert_eq!(memory.unavailable_bytes(), 0);
        send(&memory, 3..15, 1 << 20).unwrap();
        end(&memory);
    }

    /// No pages were allocated ahead.
    #[test]
    fn send_without_pages_is_refused() {
        let memory = opened(None);
        memory.shared.supply.region.limit_pages(usize::try_from(2 * MIB).unwrap());
        assert!(is_no_buffer(send(&memory, 0..10, 1 << 18)), "only 8 of 10 pieces have pages");
        memory.shared.supply.region.limit_pages(usize::try_from(3 * MIB).unwrap());
        assert!(is_no_buffer(send(&memory, 0..14, 1 << 20)));
        memory.shared.supply.region.limit_pages(usize::MAX);
        memory.prefaulter.as_ref().unwrap().prefault();
        send(&memory, 0..13, 1 << 20).unwrap();
        end(&memory);
    }

    #[test]
    fn only_blocks_without_row_pages_are_refused() {
        let memory = opened(None);
        memory.prefaulter.as_ref().unwrap().prefault();
        send(&memory, 0..4000, 1).unwrap();
        memory.shared.supply.region.limit_pages(0);
        assert!(is_no_buffer(send(&memory, 4000..8000, 1)));
        // The chunk of the last block has rows for 32 more blocks.
        send(&memory, 4000..4032, 1).unwrap();
        drop(memory.forget(&ShuffleKey::new(app(), ShuffleId(0))));
        // The freed rows are reused. No others are available.
        send(&memory, 0..4032, 1).unwrap();
        assert!(is_no_buffer(send(&memory, 4032..4033, 1)));
        end(&memory);
    }

    #[test]
    fn ceded_segment_without_pages_is_excluded() {
        let memory = opened(None);
        memory.prefaulter.as_ref().unwrap().prefault();
        let region = &memory.shared.supply.region;
        let charge = memory.budget().try_charge(MIB).unwrap();
        let mut piece = region.allocate(1 << 20, charge).unwrap();
        piece.discard();
        region.limit_pages(0);
        drop(piece);
        assert_eq!(region.ready_bytes(), region.capacity_bytes() - MIB);
        assert_eq!(region.free_bytes(), region.ready_bytes());
        memory.prefaulter.as_ref().unwrap().prefault();
        assert_eq!(memory.unavailable_bytes(), MIB);
        region.limit_pages(usize::MAX);
        memory.prefaulter.as_ref().unwrap().prefault();
        end(&memory);
    }

    #[test]
    fn recovered_holes_get_pages_before_writes() {
        let memory = opened(None);
        send(&memory, 0..5, 1 << 20).unwrap();
        let region = &memory.shared.supply.region;
        assert_eq!(region.ready_bytes(), 6 * MIB);
        let charge = memory.budget().try_charge(MIB).unwrap();
        region.allocate(1 << 20, charge).unwrap().discard();
        let mut ceded = region.allocate(1 << 20, memory.budget().try_charge(MIB).unwrap()).unwrap();
        ceded.discard();
        let file = memory.duplicate_for_successor().unwrap().unwrap();
        memory.release();
        // The segment does not get its pages again, as after a kill.
        region.limit_pages(0);
        drop(ceded);
        drop(memory);
        let memory = opened(Some(file));
        let key = ShuffleKey::new(app(), ShuffleId(0));
        memory.register(&key, Distribution::Normal);
        let heap = memory.heap().of(HeapKind::Partitions);
        let restored = memory.restore(&key, |_| Box::new(|_| false), heap, |_, ids| ids.len());
        assert_eq!(restored, [(PartitionId(0), 5)]);
        let region = &memory.shared.supply.region;
        region.limit_pages(0);
        assert_eq!(memory.finish_restore(), (5, 5));
        assert_eq!((region.ready_bytes(), region.free_bytes()), (5 * MIB, region.capacity_bytes() - 6 * MIB));
        assert!(is_no_buffer(send(&memory, 5..6, 4096)));
        region.limit_pages(usize::MAX);
        memory.prefaulter.as_ref().unwrap().prefault();
        send(&memory, 5..6, 1 << 20).unwrap();
        end(&memory);
    }

    /// A successor finds much more free memory than it makes ready at once.
    #[test]
    fn deferred_pages_are_faulted_on_demand() {
        let memory = opened(None);
        send(&memory, 0..1, 1 << 20).unwrap();
        memory.register(&ShuffleKey::new(app(), ShuffleId(1)), Distribution::Normal);
        let pieces: Vec<_> = (0..13)
            .map(|_| {
                let charge = memory.budget().try_charge(MIB).unwrap();
                memory.shared.supply.region.allocate(1 << 20, charge).unwrap()
            })
            .collect();
        let file = memory.duplicate_for_successor().unwrap().unwrap();
        memory.release();
        drop((pieces, memory));
        let memory = opened(Some(file));
        let key = ShuffleKey::new(app(), ShuffleId(0));
        memory.register(&key, Distribution::Normal);
        let heap = memory.heap().of(HeapKind::Partitions);
        memory.restore(&key, |_| Box::new(|_| false), heap, |_, _| ());
        // A block at the end of the region, so that the space before it counts as used.
        let region = &memory.shared.supply.region;
        region.claim(13 << 20, 1 << 20, memory.budget().try_charge(MIB).unwrap()).unwrap();
        assert_eq!(memory.finish_restore(), (1, 1));
        assert!(region.ready_bytes() < 8 * MIB, "{}", region.ready_bytes());
        // No pages were allocated ahead.
        send(&memory, 1..13, 1 << 20).unwrap();
        memory.prefaulter.as_ref().unwrap().prefault();
        end(&memory);
    }
}
