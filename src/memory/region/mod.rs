//! One mapping of memory, handed out in segments; with its `copy`, `mapping` and `range`, and `io::uring`, the only `unsafe` of the crate.
//!
//! Not here: who pays ([`super::budget`]), which piece is free ([`super::buddy`]), what the bytes mean.
//!
//! # Why this is safe
//!
//! A [`Segment`] is the only handle that can hand out ranges of its piece, and its cursor only moves forward: two
//! [`Fill`]s never overlap. A range is either *filling* (exactly one `Fill`, which alone may write) or *frozen* (any
//! number of [`Slice`]s, which may only read), and a `Fill` is consumed by freezing. [`Segment::slice`] gives a
//! `Slice` only inside ranges that were frozen before and told to the segment by [`Segment::absorb`]. Every handle
//! holds the piece by `Arc`, so a piece returns to the buddy only when no handle is left, and the mapping lives as
//! long as any piece. Bytes are always initialised: the mapping starts as zeroes and is only ever overwritten, so
//! `&mut [u8]` over old content is sound (what may be *shown* is the caller's care).
//!
//! Freed memory stays resident and is reused first (see `buddy`), so resident memory never exceeds the region; only what is
//! ceded ([`Segment::discard`]) goes back to the kernel.
//!
//! A region may also lie in a file in memory ([`Region::shared`]), with a *front* of words before the segments. What
//! [`super::persistent`] keeps there is only ever touched as atomic words, and no segment reaches into it. Its pages are taken
//! before they are touched (`pages`).
//!
//! Checked by Miri on a plain allocation instead of the mapping:
//! `cargo +nightly miri test --manifest-path tests/miri/Cargo.toml` (seconds; needs `rustup +nightly component add miri`).

mod copy;
mod mapping;
mod pages;
mod range;
mod segment;
mod space;

use super::buddy::{BLOCK_BYTES, UNIT_BYTES};
pub use range::{Fill, Slice};
pub use segment::Segment;
pub use space::Region;

/// Smallest segment, and the unit of alignment of every segment.
pub const SEGMENT_BYTES_MIN: usize = UNIT_BYTES;
/// Largest segment.
pub const SEGMENT_BYTES_MAX: usize = BLOCK_BYTES;

#[cfg(test)]
mod tests;
