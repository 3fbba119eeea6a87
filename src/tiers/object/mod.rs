//! The object tier: blocks in an object store that speaks S3. Clients of type MEMORY_LOCALFILE read
//! them through the worker like local data, without jars or credentials.
//!
//! Batches of a shuffle share *segments*, objects with blocks of many partitions. A shuffle has at
//! least one segment per flush, and another for each
//! [`segment_bytes`](settings::ObjectSettings::segment_bytes) of its data. The number of objects
//! therefore follows the bytes, not the number of partitions. This module does not decide which
//! data is flushed when.

#[cfg(feature = "object")]
mod body;
#[cfg(feature = "object")]
mod cache;
#[cfg(feature = "object")]
mod circuit_breaker;
#[cfg(feature = "object")]
pub mod claim;
#[cfg(feature = "object")]
pub mod client;
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
