//! Data of shuffles in the object store below the disks, as found by a start.
//!
//! A start receives it before it reads the disks. Extents in objects are not expected on the disks,
//! and files without other extents are removed.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::log::{LogInStore, PresentIds};
use crate::store::extents::extent::Extent;
use uniffle_base::budget::Charge;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Data of a registration in the object store.
#[derive(Debug)]
pub struct StoredShuffle {
    /// Incarnation of the registration.
    pub(in crate::store) incarnation: u64,
    /// Extents of each partition, by base and without overlaps.
    pub(in crate::store) extents: HashMap<PartitionId, BTreeMap<u64, Extent>>,
    /// Blocks of these extents.
    pub(in crate::store) present: PresentIds,
    /// Reason why unknown blocks may be missing, or empty.
    pub(in crate::store) reason: String,
    /// Memory of the extents.
    pub(in crate::store) _charge: Charge,
}

/// Returns an extent that overlaps a part of a partition's stream.
pub(in crate::store) fn overlapping(extents: &BTreeMap<u64, Extent>, place: Range<u64>) -> Option<&Extent> {
    let before = extents.range(..place.end).next_back().map(|(_, extent)| extent);
    before.filter(|extent| extent.base + extent.length > place.start)
}

/// Data of all shuffles in the object store.
#[derive(Debug, Default)]
pub struct Stored {
    /// Registrations with data.
    pub shuffles: HashMap<ShuffleKey, StoredShuffle>,
    /// Lower bound of new incarnations. Registrations of several machines must not be mistaken for
    /// each other.
    pub incarnations_from: u64,
    /// The part of the metadata log in the object store.
    pub log: Option<LogInStore>,
}
