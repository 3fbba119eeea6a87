//! One mapping of memory, handed out in segments. Most `unsafe` of the crate is in its `copy`,
//! `mapping` and `range`; [`Region`] explains why it is safe.
//!
//! Other modules define who pays ([`uniffle_base::budget`]), which pieces are free ([`buddy`]), and
//! the meaning of the bytes. Freed memory stays resident unless it is discarded, and is reused
//! first. Resident memory never exceeds the region. Miri checks the module on a plain allocation
//! instead of the mapping: `cargo +nightly miri test --manifest-path tests/miri/Cargo.toml`.

pub(super) mod buddy;
mod copy;
mod mapping;
mod pages;
pub(super) mod parts;
mod range;
mod segment;
mod space;

use buddy::{BLOCK_BYTES, UNIT_BYTES};
pub use range::{Fill, Slice};
pub use segment::Segment;
pub use space::Region;

/// Smallest segment, and the alignment unit of every segment.
pub const SEGMENT_BYTES_MIN: usize = UNIT_BYTES;
/// Largest segment.
pub const SEGMENT_BYTES_MAX: usize = BLOCK_BYTES;

#[cfg(test)]
mod tests;
