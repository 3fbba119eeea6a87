//! Local disks above an object store. Writes go to the disks, and data moves to the store in the
//! background.
//!
//! The extent map of the disks has the offset and the location of each extent. A move copies extents
//! and then changes their location, so readers see one stream. At a start the store has precedence:
//! its extents are not read from the disks.
//!
//! The metadata log of the disks is copied to the store in the background. After the first move of a
//! shuffle, its records are in the store before they are acknowledged, so a worker of the same id on
//! an empty machine finds missing blocks.
//!
//! | file | does |
//! | --- | --- |
//! | `tier` | both as one tier |
//! | `open` | recovery of both |
//! | `mover` | moves the data that the policy selects; progress of a drain |
//! | `policy` | selection of data to move (pure) |
//! | `pass` | upload of a shuffle's data, object after object |
//! | `shuffle`, `log` | a registration in both; when its records are acknowledged |
//! | `read` | reads of streams that are in both |
//! | `metrics` | counters |

mod log;
pub(crate) mod metrics;
mod mover;
mod open;
mod pass;
pub mod policy;
mod read;
mod shuffle;
#[cfg(test)]
mod tests;
mod tier;

pub use self::policy::Watermarks;
pub use self::tier::{OffloadSettings, OffloadTier};
