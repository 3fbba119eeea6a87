//! The object tier: blocks in an object store, read through the worker like local data.
//!
//! To clients of type MEMORY_LOCALFILE it is local data: they ask for the index of a partition and for ranges of it, and
//! need no jars and no credentials. Batches of a shuffle share *segments*, objects that hold many partitions, so the number
//! of objects follows the bytes. A shuffle has a segment per flush at least, and one more for each
//! [`segment_bytes`](settings::ObjectSettings::segment_bytes) of it.
//!
//! | file | does |
//! | --- | --- |
//! | `layout` | keys, and the format of a segment (pure) |
//! | `client` | requests to a store that speaks S3 |
//! | `config`, `location` | how the store is reached, as it is configured |
//! | `settings`, `metrics` | sizes; counters |
//! | `claim` | which process writes below the worker's prefix |
//! | `condition` | whether the store works |
//! | `core` | what all parts share |
//! | `streams`, `shuffle` | what is published; one registration |
//! | `segment`, `lane` | a segment while it is filled; what waits for one |
//! | `group` | jobs that are done together (pure) |
//! | `upload`, `log` | segments and the metadata log on their way into the store |
//! | `intake` | what is moved here from local disks |
//! | `cache` | chunks of segments on local disks |
//! | `fetch`, `body`, `reads`, `turns` | ranges of objects, and what is answered; whether they are of the cache or of the store; whose turn it is |
//! | `index_read`, `data_read`, `answer`, `verify` | reads of clients |
//! | `purge`, `recover` | deletion by prefix; what an earlier process left |
//! | `indexes` | which segments and blocks of a shuffle are there |
//! | `workers` | what workers have below the URL, also those that are gone |
//! | `tier` | the tier |
//!
//! Not here: requests, credentials, retries (the client of the store, behind `object_store::ObjectStore`), and what is
//! flushed when.

#[cfg(feature = "object")]
#[cfg(feature = "object")]
mod body;
#[cfg(feature = "object")]
mod cache;
#[cfg(feature = "object")]
pub mod claim;
#[cfg(feature = "object")]
pub mod client;
#[cfg(feature = "object")]
mod condition;
mod config;
#[cfg(feature = "object")]
mod core;
#[cfg(feature = "object")]
mod data_read;
#[cfg(feature = "object")]
mod fetch;
#[cfg(feature = "object")]
mod group;
#[cfg(feature = "object")]
mod index_read;
#[cfg(feature = "object")]
mod indexes;
#[cfg(feature = "object")]
mod intake;
#[cfg(feature = "object")]
mod lane;
#[cfg(feature = "object")]
pub mod layout;
pub mod location;
#[cfg(feature = "object")]
mod log;
#[cfg_attr(not(feature = "object"), expect(dead_code, reason = "it is described, and nothing counts"))]
pub(crate) mod metrics;
mod names;
#[cfg(feature = "object")]
mod purge;
#[cfg(feature = "object")]
mod reads;
#[cfg(feature = "object")]
mod recover;
#[cfg(feature = "object")]
mod saved;
#[cfg(feature = "object")]
mod segment;
pub mod settings;
#[cfg(feature = "object")]
mod shuffle;
#[cfg(test)]
#[cfg(feature = "object")]
mod tests;
#[cfg(feature = "object")]
mod tier;
#[cfg(feature = "object")]
#[cfg(feature = "object")]
mod upload;
#[cfg(feature = "object")]
mod verify;
#[cfg(feature = "object")]
mod workers;

pub use self::config::{Credentials, ObjectConfig, Secret, UploadCheck};
#[cfg(feature = "object")]
pub use self::intake::Uploads;
pub(super) use self::names::NAMES;
#[cfg(feature = "object")]
pub use self::segment::Moved;
pub use self::settings::ObjectSettings;
#[cfg(feature = "object")]
pub use self::tier::ObjectTier;
#[cfg(feature = "object")]
pub use self::upload::Source;
#[cfg(feature = "object")]
pub use self::workers::{Removed, WorkerObjects};
