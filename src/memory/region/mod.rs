//! One mapping of memory, handed out in segments. Most `unsafe` of the crate is in its `copy`,
//! `mapping` and `range`.
//!
//! Other modules define who pays ([`super::budget`]), which pieces are free ([`super::buddy`]), and
//! the meaning of the bytes.
//!
//! # Why this is safe
//!
//! A [`Segment`] is the only handle that can hand out ranges of its piece, and its cursor only
//! moves forward, so two [`Fill`]s never overlap. A range is either *filling* (exactly one `Fill`,
//! which alone may write) or *frozen* (any number of [`Slice`]s, which may only read). Freezing
//! consumes the `Fill`. [`Segment::slice`] returns a `Slice` only inside ranges that were frozen
//! before and passed to [`Segment::absorb`].
//!
//! Every handle holds the piece by `Arc`. A piece returns to the buddy only when no handle is left,
//! and the mapping lives as long as any piece. Bytes are always initialised: the mapping starts as
//! zeros and is only ever overwritten, so `&mut [u8]` over old content is sound. The caller must
//! not expose old content.
//!
//! Freed memory stays resident and is reused first (see `buddy`), so resident memory never exceeds
//! the region. Only ceded memory ([`Segment::discard`]) is given back to the kernel.
//!
//! A region may also be in a file in memory ([`Region::shared`]), with a *front* of words before
//! the segments. [`super::persistent`] accesses the front only as atomic words, and no segment
//! extends into it. Its pages are allocated before they are touched (`pages`).
//!
//! Miri checks it on a plain allocation instead of the mapping (needs `rustup +nightly component
//! add miri`):
//!
//! `cargo +nightly miri test --manifest-path tests/miri/Cargo.toml`

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

/// Smallest segment, and the alignment unit of every segment.
pub const SEGMENT_BYTES_MIN: usize = UNIT_BYTES;
/// Largest segment.
pub const SEGMENT_BYTES_MAX: usize = BLOCK_BYTES;

#[cfg(test)]
mod tests;
