//! Local disks above an object store: what is written goes to the disks, and from there in the background to the store.
//!
//! The disks assign the place of each extent in its stream, and know whether it is on a disk or in an object. A move copies extents
//! and then changes their location. Readers see one stream. At a start the store has precedence: its extents are not looked for on
//! the disks.
//!
//! The disks' metadata log is copied to the store in the background. From its first move on, a shuffle's records are in the store
//! before they are acknowledged, so that a worker of the same name on an empty machine knows what there should be.
//!
//! | file | does |
//! | --- | --- |
//! | `tier` | both as one tier |
//! | `open` | what an earlier process left in both, put together |
//! | `mover` | moves what the policy says; how far a drain is |
//! | `policy` | whether something is moved, and what (pure) |
//! | `pass` | one object's worth of a shuffle after the other |
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
