//! Recovery at a start: scanning disks, listing the bucket, and rebuilding the extent map.
//! [`take_over`] also writes the records of shuffles later.
//!
//! Invariant: extents keep the bases that clients know, and new ones begin after all bytes that may
//! have been published. A missing part becomes a hole or a reason, never silence.

mod disks;
#[cfg(feature = "object")]
mod object_indexes;
#[cfg(feature = "object")]
pub(super) mod objects;
mod scan;
pub(super) mod take_over;
