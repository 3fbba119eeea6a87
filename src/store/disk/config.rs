//! Configuration of the local tier: its keys, and the fixed limits of disk calls.
//!
//! A data read or write that misses its limit makes the disk hung, unless other calls completed
//! meanwhile. The limits of reads, names and metadata are constants, and of writes a field.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::log::HandOff;
use crate::schema::kind::{
    DAY, GIB, MIB, SECOND, count, flag, list, optional, path, ratio, seconds, size, word,
};
use crate::schema::{section, words};
use uniffle_io::Disk;
use uniffle_io::blocking::BlockingDisk;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;

words! {
    /// Moment at which a write is complete.
    pub enum SyncWrites {
        /// Once the operating system has the bytes: they survive the process.
        Off = "off",
        /// Once the device has the bytes: they survive a power loss. Writers share their syncs.
        Group = "group",
    }
}

words! {
    /// Data reads that verify block checksums.
    pub enum VerifyReads {
        /// Every read.
        Always = "always",
        /// One read in sixteen.
        Sampled = "sampled",
        /// No read.
        Off = "off",
    }
}

/// Default size of the cache of index records. Counted as process memory without clients
/// (`budget::memory_plan`).
pub const INDEX_CACHE_BYTES: u64 = 16 * MIB;

section! {
    /// Settings of the local tier.
    #[table(
        "localfile_store",
        "Local disks.\n\
         sync = \"off\": flushed data survives kill -9 and upgrades, but not a power loss; with \
         \"group\" it survives both.\n\
         require_mounted unset: an empty directory with another mount point than before is left out. \
         A start is refused if all data directories are empty while the object store or \
         memory_store.backing has records of earlier data, unless require_mounted is false.\n\
         verify_reads: clients verify checksums in any case; only the worker can attribute the \
         damage to a disk."
    )]
    pub struct LocalConfig |machine| {
        /// One directory per disk, not nested. Required with a coordinator_quorum. Default:
        /// uniffle-worker/data below $XDG_STATE_HOME, ~/.local/state or the temp directory.
        #[key("localfile_store.data_paths", list(64, path()), Restart, example "[\"/data1/uniffle\", \"/data2/uniffle\"]")]
        pub paths: Vec<PathBuf> = vec![machine.state_dir.join("data")],
        /// The worker is unhealthy with fewer writable disks (not full, hung or broken); 0 = never.
        #[key(
            "localfile_store.healthy_check_min_disks" or "localfile_store.min_number_of_available_disks",
            count(0..=64), AtOnce
        )]
        pub min_disks: usize = 0,
        /// A disk is full above this usage and gets no new data.
        #[key("localfile_store.disk_high_watermark", ratio(), AtOnce)]
        pub high_watermark: f64 = 0.8,
        /// A full disk gets new data again below this usage.
        #[key("localfile_store.disk_low_watermark", ratio(), AtOnce)]
        pub low_watermark: f64 = 0.7,
        /// Concurrent reads and writes per disk, metadata excluded.
        #[key("localfile_store.disk_max_concurrency", count(1..=1_000_000), Restart)]
        pub max_concurrency_per_disk: usize = 2000,
        /// Concurrent data writes per disk. Index groups have as many permits of their own,
        /// metadata two.
        #[key("localfile_store.write_concurrency_per_disk", count(1..=256), Restart)]
        pub write_concurrency_per_disk: usize = 4,
        /// Interval between two health checks of the disks.
        #[key("localfile_store.disk_healthy_check_interval_sec", seconds(SECOND..=DAY), Restart)]
        pub probe_interval: Duration = 60 * SECOND,
        /// Bypass the page cache on writes if the file system supports it.
        #[key("localfile_store.direct_io", flag(), Restart)]
        pub direct_io: bool = true,
        /// Recover the data in data_paths at start, or delete it (false).
        #[key("localfile_store.recovery", flag(), Restart)]
        pub recovery: bool = true,
        /// Refuse to start if an empty data directory has no mount point of its own. Default: only
        /// if its disk seems not to be mounted.
        #[key("localfile_store.require_mounted", optional(flag()), Restart, example "true")]
        pub require_mounted: Option<bool> = None,
        /// Disk reads that verify block checksums: always, sampled (one in 16) or off. Verifying
        /// costs 8 % of a read's CPU time.
        #[key("localfile_store.verify_reads", word(), Restart)]
        pub verify_reads: VerifyReads = VerifyReads::Always,
        /// Writes that are synced: off = registrations and reports, before they are acknowledged;
        /// group = also data and index, before memory is released.
        #[key("localfile_store.sync", word(), Restart)]
        pub sync: SyncWrites = SyncWrites::Off,
        /// Memory for cached index records, so that first index reads need no disk.
        #[key("localfile_store.index_cache_size", size(0..=16 * GIB), Restart)]
        pub index_cache_bytes: u64 = INDEX_CACHE_BYTES,
        /// Memory for reads of all disks, of which each has a share.
        pub read_memory_bytes: u64 = 64 * MIB,
        /// Time for one write call of at most 16 MiB, queueing included.
        pub write_timeout: Duration = 60 * SECOND,
        /// Interval between two measurements of free space.
        pub space_interval: Duration = 10 * SECOND,
        /// Cached descriptors. At least 1.
        pub descriptors_max: usize = 1024,
        /// Length after which the data of a shuffle on a disk goes to a new file.
        pub data_log_bytes: u64 = u64::MAX,
        /// Largest file that the process may write (RLIMIT_FSIZE).
        pub file_bytes_max: u64 = u64::MAX,
        /// Hand-off record of the metadata log, if this process is the successor of an upgrade.
        pub hand_off: Option<HandOff> = None,
        /// Evidence that the data directories had data, for the error of a refused start.
        pub had_data: Option<String> = None,
    }
}

/// Read calls per disk at a time.
pub const READ_CALLS: usize = 16;

/// Time for one read call of at most 2 MiB, queueing included.
pub(in crate::store) const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Time to open, create, list or rename something.
pub(in crate::store) const NAME_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for one write to a copy of the metadata log, with its sync, or one call on a scratch file.
pub(in crate::store) const METADATA_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of staging buffers of 1 MiB for gathered writes, which are outside the memory
/// region.
const STAGING_BUFFERS_MAX: usize = 64;

impl LocalConfig {
    /// Creates the real disks of [`LocalConfig::paths`].
    pub fn real_disks(&self) -> Vec<Arc<dyn Disk>> {
        let disk = |path: &PathBuf| -> Arc<dyn Disk> {
            let disk = BlockingDisk::new(path, self.write_concurrency_per_disk, READ_CALLS);
            Arc::new(disk.with_max_concurrency(self.max_concurrency_per_disk))
        };
        self.paths.iter().map(disk).collect()
    }

    /// Returns the memory that reads of one of `disks` disks may hold. It is at most the amount
    /// useful to one disk. It leaves enough for the other disks if all of it is stuck.
    pub(super) fn read_share_bytes(&self, disks: usize) -> u64 {
        const USEFUL_BYTES: u64 = (READ_CALLS * READ_CHUNK_BYTES_MAX) as u64;
        (self.read_memory_bytes / (disks as u64 + 1)).clamp(READ_CHUNK_BYTES_MAX as u64, USEFUL_BYTES)
    }

    /// Returns the number of staging buffers: twice the write calls of all disks, at most
    /// [`STAGING_BUFFERS_MAX`].
    pub(super) fn staging_buffers(&self, disks: usize) -> usize {
        (2 * disks * self.write_concurrency_per_disk).min(STAGING_BUFFERS_MAX)
    }
}
