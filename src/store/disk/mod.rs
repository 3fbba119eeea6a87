//! The local disks as one store of extents.
//!
//! A shuffle has few files per disk, regardless of the number of partitions: an open data log and
//! an open index log, and earlier ones. A batch is one range of one data log ([`write`]), visible
//! once its index group is published. Readers see a partition as one stream on any disks.
//!
//! Layout: `<root>/apps/<app>/<shuffle>.<incarnation>/<n>.data|.index`. By default these files are
//! not synced, and survive the process in the page cache; metadata of shuffles is always synced.
//! Invariant with [`SyncWrites::Group`]: data is on the device before its index group is written,
//! and the group before its extents are visible.

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
