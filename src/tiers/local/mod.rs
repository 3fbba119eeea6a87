//! The local disks as one store of extents.
//!
//! A shuffle has a data log and an index log per disk, regardless of the number of partitions. A
//! batch is written to one disk as one sequential range (`write`). It is visible once its index
//! group is published. To readers a partition is one contiguous stream, independent of the disks
//! that hold it.
//!
//! Layout: `<root>/apps/<app>/<shuffle>.<incarnation>/<n>.data|.index`. By default these files are
//! not synced, and survive the process in the page cache. Metadata of shuffles is always synced
//! (`durability`). With [`SyncWrites::Group`] data is on the device before its index group is
//! written, and the group before its extents are visible.

mod append;
mod claim;
pub mod claimable;
mod config;
mod content;
mod core;
mod damage;
mod damaged;
mod disk;
mod failures;
mod fetch;
mod files;
pub mod health;
mod log;
mod marker;
pub(crate) mod metrics;
mod mounts;
mod notes;
mod open;
mod pending;
pub mod placement;
mod publish;
mod purge;
mod read;
mod recover;
mod release;
mod removal;
mod scan;
mod shuffle;
mod store;
mod take_over;
mod tier;
mod verify;
mod view;
mod walk;
mod write;

use super::{extent, index, stored, streams};

#[cfg(test)]
mod tests;

pub use self::config::{INDEX_CACHE_BYTES, LocalConfig, SyncWrites, VerifyReads};
pub use self::marker::MARKER;
pub use self::read::DataRead;
pub use self::release::{Excluded, Moving, Run};
pub use self::store::{LocalStore, ShuffleHandle};
pub use self::view::{StreamView, ViewRun};
pub use self::write::Published;

pub(super) use self::tier::NAMES;
