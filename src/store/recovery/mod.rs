//! Recovery at a start: scanning disks, listing the bucket, and rebuilding the extent map.

mod disks;
#[cfg(feature = "object")]
mod object_indexes;
#[cfg(feature = "object")]
pub(super) mod objects;
mod scan;
pub(super) mod take_over;
