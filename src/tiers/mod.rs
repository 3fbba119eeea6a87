//! Destinations of sealed memory: an ordered list of tiers behind one trait, such as local disks
//! and remote file systems.
//!
//! A tier knows bytes, extents and devices. It never decides what to flush, and knows no status
//! codes. A new tier is a folder here and an entry in the list that the server builds.

mod block_checks;
pub mod error;
mod extent;
mod extent_write;
mod extents;
pub mod hdfs;
pub mod index;
mod index_read;
pub mod local;
#[cfg(feature = "object")]
mod numbers;
pub mod object;
#[cfg(feature = "object")]
pub mod offload;
mod progress;
mod read_share;
mod record_cache;
mod records;
mod recovered;
mod state;
mod stored;
mod streams;
#[cfg(test)]
mod test_blocks;
mod tier;

pub use self::error::{StoreError, StoreErrorKind};
pub use self::extent_write::{ExtentData, ExtentWrite};
pub use self::hdfs::{HdfsConfig, HdfsStore, RemoteHandle};
pub use self::local::{
    DataRead, INDEX_CACHE_BYTES, LocalConfig, LocalStore, Published, ShuffleHandle, SyncWrites, VerifyReads,
};
pub use self::object::ObjectConfig;
pub use self::recovered::{LostExtent, Recovered, RecoveredShuffle, TierHeap};
pub use self::state::{
    DiskCondition, DiskInfo, HdfsState, MountUsage, ObjectStoreState, TierState, by_mount,
};
pub use self::stored::{Stored, StoredShuffle};
pub use self::tier::{
    Admission, Capability, Cause, ChunkRead, Drained, MetadataLog, Purge, RemoteStorage, SavedSettings,
    ServedData, ServedIndex, ServedTier, Tier, TierBatch, TierNames, TierRole, TierShuffle, TierUsage, Tiers,
};

/// The names of the tiers of this crate, for the documentation of metrics.
pub(crate) const BUILT_IN: [TierNames; 3] = [local::NAMES, hdfs::NAMES, object::NAMES];
