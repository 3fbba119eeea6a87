//! Offload: local disks, if there are any, above an object store. Batches are written to the disks,
//! and their data is offloaded in the background. Without disks, batches are written to the store.
//!
//! The extent map of the disks has the offset and the location of each extent. An offload copies
//! extents and then changes their location, so readers see one stream. After a start, an extent
//! that both have is read from the store.
//!
//! The metadata log of the disks is copied to the store in the background. After the first offload
//! of a shuffle, its records are in the store before they are acknowledged. A worker with the same
//! id on an empty machine therefore detects missing blocks.

#[cfg(feature = "object")]
mod offloader;
#[cfg(feature = "object")]
mod open;
#[cfg(feature = "object")]
mod pass;
#[cfg(feature = "object")]
pub mod policy;
#[cfg(feature = "object")]
mod read;
pub(super) mod release;
#[cfg(feature = "object")]
mod shuffle;
#[cfg(feature = "object")]
mod shuffle_log;
#[cfg(feature = "object")]
#[cfg(test)]
mod tests;
#[cfg(feature = "object")]
mod tier;

#[cfg(feature = "object")]
pub use self::policy::Watermarks;
pub use self::release::{ChosenExtents, Excluded, Run};
#[cfg(feature = "object")]
pub(crate) use self::tier::Metrics;
#[cfg(feature = "object")]
pub use self::tier::{LocalDisks, OffloadSettings, OffloadTier};
