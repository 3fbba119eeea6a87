//! Destinations of sealed memory behind one trait ([`Tier`]), and the tiers that clients read
//! through the worker: local disks, an object store, and disks above an object store.
//!
//! A tier knows bytes, extents and devices. It never decides what to flush, and knows no status
//! codes. Each partition is an ordered list of extents with their locations ([`extents`]).

pub mod disk;
mod error;
mod extents;
pub mod index;
pub mod object;
pub mod offload;
mod recovered;
mod recovery;
mod removal;
mod state;
#[cfg(test)]
mod test_blocks;
mod tier;

pub use self::disk::{
    BatchSummary, DataRead, DiskShuffleHandle, INDEX_CACHE_BYTES, LocalConfig, LocalStore, READ_CALLS,
    SyncWrites, VerifyReads,
};
pub use self::error::{StoreError, StoreErrorKind};
pub use self::extents::extent_write::{ExtentData, ExtentWrite};
pub use self::object::ObjectConfig;
pub use self::recovered::{LostExtent, Recovered, RecoveredShuffle, Stored, StoredShuffle, TierHeap};
pub use self::state::{
    DiskCondition, DiskInfo, HdfsState, MountUsage, ObjectStoreState, TierState, by_mount,
};
pub use self::tier::{
    Admission, Capability, Cause, ChunkRead, DrainBacklog, DrainableTier, MaintainedTier, MetadataTier,
    Purge, RegistrationLog, RemoteStorage, SavedSettings, ServedData, ServedIndex, ServedTier, Tier,
    TierBatch, TierNames, TierRole, TierShuffle, TierUsage, Tiers,
};
