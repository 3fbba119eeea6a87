//! Local disks above an object store: what is written goes to the disks, and from there in the background to the store.
//!
//! Of every partition's stream the store has the beginning and the disks have the rest, at the offsets at which the disks
//! published it. Readers see one stream. What is moved is readable in the store before the disks forget it, and a start
//! believes the store: what it has is neither looked for on the disks nor lost there.
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
//! | `read` | a stream that lies in both |
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
