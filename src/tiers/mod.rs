//! Where sealed memory goes: the local disks, and remote file systems.
//!
//! A store knows bytes, extents and disks. It never decides what to flush, and knows no status code.

pub mod error;
pub mod hdfs;
pub mod local;

pub use self::error::{StoreError, StoreErrorKind};
pub use self::hdfs::{HdfsConfig, HdfsStore, RemoteHandle, RemoteStorage};
pub use self::local::{
    DataRead, DiskCondition, DiskInfo, ExtentData, ExtentWrite, IndexRead, LocalConfig, LocalStore,
    LostExtent, MountUsage, Published, Recovered, RecoveredShuffle, ShuffleHandle, ShuffleUsage, SyncWrites,
    Unreadable, VerifyReads,
};
