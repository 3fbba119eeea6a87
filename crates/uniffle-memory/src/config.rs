//! Configuration of the memory store: capacity, backing and promises.
//!
//! Invariant: programs of different versions compare [`MemoryConfig::kept_as`] in an upgrade, so
//! its form must not change.

use std::time::Duration;

use super::persistent;
use super::persistent::file::{Backing, RegionSize};
use uniffle_base::budget::memory_plan::{divide, slack};
use uniffle_base::schema::kind::{DAY, GIB, MIB, SECOND, TIB, count, parsed, seconds, size, word};
use uniffle_base::schema::{section, words};

/// Minimum capacity: room for a handful of the largest segments.
const CAPACITY_BYTES_MIN: u64 = 16 << 20;

words! {
    /// Memory that gets huge pages (2 MiB).
    pub enum HugePages {
        /// All memory, but blocks only after their first use, unless [`Prefault::Idle`].
        Auto = "auto",
        /// All memory, from its first use.
        On = "on",
        /// No memory.
        Off = "off",
    }
}

/// Pages of the memory for blocks, where the machine has huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockPages {
    /// Huge from the first use.
    Huge,
    /// Small at the first use. Later the kernel replaces them by huge pages in the background.
    HugeAfterUse,
    /// Small.
    Small,
}

words! {
    /// Time at which the pages of block memory are allocated.
    pub enum Prefault {
        /// At the first request that uses them.
        Off = "off",
        /// After the start, by a thread of the lowest priority.
        Idle = "idle",
    }
}

section! {
    /// How much memory there is and how it is promised.
    #[table(
        "memory_store",
        "Memory for shuffle blocks and for disk reads.\n\
         Ticket requests that wait for memory are served fairly among applications. At most 128 \
         of one application and 512 in all may wait, and half of the streams of a connection.\n\
         While others wait, a ticket unused for half a second is revoked if its application \
         exceeds its fair share.\n\
         Defaults that are derived from capacity are parts of capacity × 1.05 + 200 MiB \
         (docs/operations.md).\n\
         backing = \"private\": memory that ends with the process.\n\
         backing = \"memfd\": an unnamed file that an upgrade hands over, and that systemd's file \
         descriptor store preserves.\n\
         backing = a directory of a tmpfs: the next process recovers the blocks, however this one \
         ended (docs/persistent-memory.md).\n\
         backing = \"auto\": memfd if systemd preserves it (FDSTORE is set) and there are local \
         disks with recovery, else private.\n\
         memfd and a directory need local disks.\n\
         huge_pages = \"auto\": blocks get small pages at first, because the first use of huge ones can be \
         slow on a virtual machine. The kernel (khugepaged) replaces used pages by huge ones in the \
         background, about 100 MB a minute. Until then flushes cost about a tenth more.\n\
         huge_pages = \"on\" suits hosts that have memory ready, and prefault = \"idle\" machines that \
         only run the worker: blocks then have huge pages from the start."
    )]
    pub struct MemoryConfig |machine| {
        /// Memory for blocks, reserved or stored. Default: 40 % of the machine's or container's
        /// memory, 256 MiB to 16 GiB, never above 50 %.
        #[key("memory_store.capacity", size(CAPACITY_BYTES_MIN..=16 * TIB), Restart, example "\"10G\"")]
        pub capacity_bytes: u64 = default_capacity_bytes(machine.memory_bytes),
        /// Memory for disk reads in progress, in addition to capacity. Default: derived from
        /// capacity, at least 40 MiB.
        #[key("memory_store.read_buffer_capacity", size(4 * MIB..=64 * GIB), Restart, example "\"64MiB\"")]
        pub read_capacity_bytes: u64 = divide(capacity_bytes, machine.cores).reads,
        /// Heap for requests, registrations, reports, block metadata and responses, in addition to
        /// capacity. Default: derived from capacity, at least 68 MiB + 1/64 of it.
        #[key("memory_store.heap_capacity", size(32 * MIB..=TIB), Restart, example "\"1GiB\"")]
        pub heap_bytes: u64 = divide(capacity_bytes, machine.cores).heap,
        /// Lifetime of an unused ticket.
        #[key("memory_store.buffer_ticket_timeout_sec", seconds(SECOND..=DAY), Restart)]
        pub ticket_timeout: Duration = 20 * SECOND,
        /// Maximum number of outstanding tickets.
        #[key("memory_store.buffer_ticket_max_count", count(1..=100_000_000), NextUse)]
        pub tickets_max: usize = 1_000_000,
        /// Maximum number of blocks in memory; it bounds their metadata. Default: one per 512 bytes
        /// of capacity.
        #[key("memory_store.block_max_count", count(1000..=1 << 32), Restart, example "20000000")]
        pub blocks_max: u64 = (capacity_bytes / 512).min(1 << 32),
        /// Place of blocks in memory; see above.
        #[key("memory_store.backing", parsed("auto, private, memfd or a directory of a tmpfs", Backing::parse), Restart)]
        pub backing: Backing = Backing::Auto,
        /// Huge pages (2 MiB) for memory: auto = for blocks after their first use, on = at once, off =
        /// never.
        #[key("memory_store.huge_pages", word(), Restart)]
        pub huge_pages: HugePages = HugePages::Auto,
        /// Allocation of pages for block memory: off = on first use, idle = after the start by a
        /// background thread, up to the whole capacity.
        #[key("memory_store.prefault", word(), Restart)]
        pub prefault: Prefault = Prefault::Off,
    }
}

/// Returns 40 % of the memory, from 256 MiB to 16 GiB, in whole 2 MiB blocks. On a small machine
/// the result may be below 256 MiB, so that it does not exceed half of the memory.
fn default_capacity_bytes(memory_bytes: u64) -> u64 {
    const LEAST: u64 = 256 << 20;
    const MOST: u64 = 16 << 30;
    const BLOCK: u64 = 2 << 20;
    let share = (memory_bytes / 5).saturating_mul(2).clamp(LEAST, MOST);
    let capacity = share.min(memory_bytes / 2).max(CAPACITY_BYTES_MIN);
    capacity / BLOCK * BLOCK
}

impl MemoryConfig {
    /// Returns whether read buffers get huge pages.
    #[must_use]
    pub fn has_huge_read_pages(&self) -> bool {
        self.huge_pages != HugePages::Off
    }

    /// Returns the pages that blocks get.
    #[must_use]
    pub fn block_pages(&self) -> BlockPages {
        match self.huge_pages {
            HugePages::On => BlockPages::Huge,
            HugePages::Auto if self.prefault == Prefault::Idle => BlockPages::Huge,
            HugePages::Auto => BlockPages::HugeAfterUse,
            HugePages::Off => BlockPages::Small,
        }
    }

    /// Returns a description of the memory from which a successor decides whether it can take it
    /// over. `None` for private memory.
    #[must_use]
    pub fn kept_as(&self) -> Option<String> {
        let RegionSize { bytes, blocks } = region_size(self);
        let version = persistent::layout::VERSION;
        (!self.backing.is_private()).then(|| format!("{version} {} {bytes} {blocks}", self.backing))
    }

    /// Returns whether this configuration can take over memory described by `kept_as`: of the same
    /// layout version and backing, and no larger.
    #[must_use]
    pub fn can_follow(&self, kept_as: &str) -> bool {
        let parts = |text: &str| {
            let mut parts = text.rsplitn(3, ' ');
            let (_blocks, bytes, kind) = (parts.next()?, parts.next()?.parse::<u64>().ok()?, parts.next()?);
            Some((bytes, kind.to_owned()))
        };
        let own = self.kept_as().and_then(|own| parts(&own));
        own.zip(parts(kept_as))
            .is_some_and(|((bytes, kind), (was, was_kind))| kind == was_kind && bytes >= was)
    }
}

/// Returns the size of the region that a configuration needs.
pub(super) fn region_size(config: &MemoryConfig) -> RegionSize {
    let capacity = config.capacity_bytes;
    RegionSize { bytes: capacity.saturating_add(slack(capacity)), blocks: blocks_max(config) }
}

pub(super) fn blocks_max(config: &MemoryConfig) -> u64 {
    config.blocks_max.min(u64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_other_layout_or_kind_is_not_taken_over() {
        let of = |backing: Backing, capacity_bytes| MemoryConfig {
            backing,
            capacity_bytes,
            ..MemoryConfig::default()
        };
        let config = of(Backing::Memfd, 1 << 30);
        let own = config.kept_as().unwrap();
        assert!(config.can_follow(&own) && of(Backing::Memfd, 2 << 30).can_follow(&own), "{own}");
        assert!(!of(Backing::Memfd, 1 << 29).can_follow(&own));
        let version = persistent::layout::VERSION.to_string();
        let older = own.replacen(&version, "1", 1);
        assert!(older.starts_with("1 memfd ") && !config.can_follow(&older), "{older}");
        assert!(!of(Backing::Directory("/dev/shm".into()), 1 << 30).can_follow(&own));
        for private in [Backing::Private, Backing::Auto] {
            let config = of(private, 1 << 30);
            assert!(config.kept_as().is_none() && !config.can_follow(&own));
        }
    }

    #[test]
    fn auto_gives_huge_pages_at_once_to_prefaulted_blocks() {
        let with = |huge_pages, prefault| {
            let config = MemoryConfig { huge_pages, prefault, ..MemoryConfig::default() };
            (config.block_pages(), config.has_huge_read_pages())
        };
        assert_eq!(with(HugePages::Auto, Prefault::Off), (BlockPages::HugeAfterUse, true));
        assert_eq!(with(HugePages::Auto, Prefault::Idle), (BlockPages::Huge, true));
        assert_eq!(with(HugePages::On, Prefault::Off), (BlockPages::Huge, true));
        assert_eq!(with(HugePages::Off, Prefault::Idle), (BlockPages::Small, false));
    }

    #[test]
    fn capacity_is_a_share_within_bounds() {
        assert_eq!(default_capacity_bytes(10 << 30), 4 << 30);
        assert_eq!(default_capacity_bytes(1 << 40), 16 << 30);
        assert_eq!(default_capacity_bytes(600 << 20), 256 << 20);
        assert_eq!(default_capacity_bytes(256 << 20), 128 << 20);
        assert_eq!(default_capacity_bytes(0), CAPACITY_BYTES_MIN);
    }
}
