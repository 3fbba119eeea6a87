//! The local disks as one store of extents.
//!
//! A shuffle has a data log and an index log per disk, regardless of the number of partitions. A
//! batch is written to one disk as one sequential range ([`write`]). It is visible once its index
//! group is published. To readers a partition is one contiguous stream, independent of the disks
//! that hold it.
//!
//! Layout: `<root>/apps/<app>/<shuffle>.<incarnation>/<n>.data|.index`. By default these files are
//! not synced, and survive the process in the page cache. Metadata of shuffles is always synced
//! (`log`). With [`SyncWrites::Group`] data is on the device before its index group is
//! written, and the group before its extents are visible.

pub(super) mod config;
pub(super) mod core;
pub mod directories;
mod files;
pub(super) mod log_file;
pub(crate) mod metrics;
mod open;
pub(super) mod read;
pub(super) mod shuffle;
pub(super) mod store;
mod tier;
pub(super) mod walk;
mod write;

#[cfg(test)]
mod tests;

pub use self::config::{INDEX_CACHE_BYTES, LocalConfig, READ_CALLS, SyncWrites, VerifyReads};
pub use self::directories::marker::MARKER;
pub use self::read::DataRead;
pub use self::read::view::{StreamView, ViewRun};
pub use self::store::{DiskShuffleHandle, LocalStore};
pub(crate) use self::tier::NAMES;
pub use self::write::batch::BatchSummary;
