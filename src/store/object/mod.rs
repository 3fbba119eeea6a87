//! Extents in an object store that speaks S3. Clients of type MEMORY_LOCALFILE read them through
//! the worker like local data, without jars or credentials.
//!
//! A *segment* is an object with blocks of many partitions of one shuffle. Batches that are written
//! at the same time share segments of about [`segment_bytes`](ObjectSettings::segment_bytes), and a
//! lone batch has its own. The number of objects therefore follows the bytes and the flushes, not
//! the number of partitions. This module does not decide which data is flushed when.

#[cfg(feature = "object")]
mod bucket;
#[cfg(feature = "object")]
mod cache;
#[cfg(feature = "object")]
pub(super) mod circuit_breaker;
#[cfg(feature = "object")]
pub mod claim;
#[cfg(feature = "object")]
pub mod client;
mod config;
#[cfg(feature = "object")]
pub(super) mod core;
#[cfg(feature = "object")]
pub mod layout;
pub mod location;
#[cfg(feature = "object")]
pub(super) mod log_objects;
pub(crate) mod metrics;
#[cfg(feature = "object")]
pub(super) mod read;
#[cfg(feature = "object")]
pub(super) mod shuffle;
#[cfg(feature = "object")]
#[cfg(test)]
mod tests;
#[cfg(feature = "object")]
pub(super) mod upload;
#[cfg(feature = "object")]
mod workers;

#[cfg(feature = "object")]
pub use self::bucket::Bucket;
pub use self::config::{Credentials, ObjectConfig, Secret, UploadCheck};
#[cfg(feature = "object")]
pub use self::core::ObjectSettings;
pub(crate) use self::metrics::NAMES;
#[cfg(feature = "object")]
pub use self::upload::intake::Uploads;
#[cfg(feature = "object")]
pub use self::upload::segment::ExtentIndex;
#[cfg(feature = "object")]
pub use self::upload::uploader::ExtentSource;
#[cfg(feature = "object")]
pub use self::workers::{RemovalReport, WorkerObjects};
