//! Local disks above an object store: what is written goes to the disks, and from there in the background to the store.
//!
//! Of every partition's stream the store has the beginning and the disks have the rest, at the offsets at which the disks
//! published it. Readers see one stream. What is moved is readable in the store before the disks forget it, and a start
//! believes the store: what it has is neither looked for on the disks nor lost there.
//!
//! What a shuffle says (registrations, reports) is in the disks' metadata log. From its first move on it is in the store as
//! well before it is acknowledged, all of it, so that a worker of the same name on an empty machine knows what there should be.
//!
//! | file | does |
//! | --- | --- |
//! | `tier` | both as one tier |
//! | `open` | what an earlier process left in both, put together |
//! | `relation` | how the two halves of a shuffle belong together (pure) |
//! | `mover` | moves what the policy says; how far a drain is |
//! | `policy` | whether something is moved, and what (pure) |
//! | `pass` | one object's worth of a shuffle after the other |
//! | `shuffle`, `history` | a registration in both; what it said before its first move |
//! | `read` | a stream that lies in both |
//! | `metrics` | counters |

mod history;
pub(crate) mod metrics;
mod mover;
mod open;
mod pass;
pub mod policy;
mod read;
mod relation;
mod shuffle;
#[cfg(test)]
mod tests;
mod tier;

pub use self::policy::Watermarks;
pub use self::tier::{OffloadSettings, OffloadTier};
