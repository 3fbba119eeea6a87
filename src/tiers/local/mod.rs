//! The local disks as one store of extents.
//!
//! Per shuffle and disk there is a data log and an index log, whatever the number of partitions. A batch goes to one
//! disk as one sequential range ([`write`](LocalStore::write)), gets its place in the partitions' streams in the
//! shuffle's publish lane, and is visible from then on. To readers a partition is one contiguous stream; they do not learn
//! which disks hold it.
//!
//! From the top to the bottom; a file imports only what stands below it:
//!
//! | file | does |
//! | --- | --- |
//! | `tier` | the store as a [`Tier`](crate::tiers::Tier) |
//! | `open`, `take_over`, `recover`, `sorted`, `scan` | claims, and makes what an earlier process left the store's own |
//! | `let_go` | for a successor that runs beside this process |
//! | `purge`, `removal` | removal and maintenance, each disk by itself; deleting in parts |
//! | `release`, `uploaded` | giving up what lies elsewhere by now; what a start is told of that |
//! | `store` | the shuffles, and the parts that write and read them |
//! | `batch`, `publish`, `write`, `append` | disk by disk; index group, then visibility; data; logs and syncs |
//! | `read`, `damage`, `verify`, `fetch` | index and data streams; what a disk does not give back becomes a hole; checksums |
//! | `forgotten` | what a shuffle had that is gone |
//! | `core` | disks, open files, cached records and metrics |
//! | `shuffle`, `lane`, `deletes`, `notes` | state of one shuffle, what it publishes next, what is left to delete and to note |
//! | `walk` | going through a shuffle's partitions some at a time |
//! | `extent`, `failures`, `damaged` | where blocks are, which reads failed, which blocks are damaged |
//! | `files`, `log`, `sync` | descriptors, append-only files, group commit |
//! | `claim`, `claimable` | which directories are ours; for a successor too |
//! | `content`, `mounts` | what a directory holds before it is claimed (pure); which are empty for want of a mount |
//! | `disk`, `marker`, `health`, `share` | space and health of one directory, and by what it is known; its share of the memory for reads |
//! | `index`, `placement`, `pace`, `config` | index groups; which disk takes a batch, how fast it was lately (pure); settings |
//!
//! Layout: `<root>/apps/<app>/<shuffle>.<incarnation>/<n>.data|.index`. By default these are not synced: a process
//! that dies leaves its writes to the page cache. Metadata of shuffles always is (`durability`). With [`SyncWrites::Group`]
//! data is on the device before its index group is written, the group before its extents are visible, and what an earlier
//! process left before it is taken over: a power loss takes nothing that was acknowledged.

mod append;
mod batch;
mod claim;
pub mod claimable;
mod config;
mod content;
mod core;
mod damage;
mod damaged;
mod deletes;
mod disk;
mod extent;
mod failures;
mod fetch;
mod files;
mod forgotten;
pub mod health;
pub mod index;
mod lane;
mod let_go;
mod log;
mod marker;
pub(crate) mod metrics;
mod mounts;
mod notes;
mod open;
pub mod pace;
pub mod placement;
mod publish;
mod purge;
mod read;
mod recover;
mod release;
mod removal;
mod scan;
mod share;
mod shuffle;
mod sorted;
mod store;
mod streams;
mod sync;
mod take_over;
mod tier;
mod uploaded;
mod verify;
mod walk;
mod write;

#[cfg(test)]
mod tests;

pub use self::batch::Published;
pub use self::config::{INDEX_CACHE_BYTES, LetGo, LocalConfig, SyncWrites, VerifyReads};
pub use self::marker::MARKER;
pub use self::read::{DataRead, IndexRead};
pub use self::release::{Moving, Oldest, Run, Stops};
pub use self::store::{LocalStore, ShuffleHandle};
pub use self::uploaded::{Prefixes, Uploaded};

pub(super) use self::tier::NAMES;
