//! A disk's share of the memory for reads.
//!
//! A read reserves part of the shares of its disks together with its memory ([`Turns`]). Reads that
//! are stuck on one disk leave memory for reads of other disks, and reads that wait for memory do
//! not occupy a disk. Waiting applications are served in turns.

use std::sync::Arc;

use crate::budget::places::Places;
use crate::budget::turns::{Turns, UNIT_BYTES};
use uniffle_wire::types::AppId;

/// One disk's share.
#[derive(Debug)]
pub(super) struct ReadShare(Arc<Places>);

impl ReadShare {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Places::new((bytes / UNIT_BYTES).max(1)))
    }

    /// Returns the permits that a read of `bytes` bytes of `app` needs from the shares of its
    /// disks.
    pub(super) fn turns<'a>(shares: impl Iterator<Item = &'a Self>, app: &AppId, bytes: usize) -> Turns {
        Turns::new(app, shares.map(|share| &share.0), bytes)
    }

    /// Returns whether `bytes` bytes could be reserved now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.0.has_room(bytes.div_ceil(UNIT_BYTES))
    }
}
