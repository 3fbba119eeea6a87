//! A disk's share of the memory for reads. A read takes its part of the shares of its disks together with its memory
//! ([`Turns`]), so that reads that are stuck on one disk leave memory to those of the others, and those that wait for memory
//! leave the disk. Applications that wait are served in turns.

use std::sync::Arc;

use crate::budget::places::{Places, Taken};
use crate::budget::turns::{Turns, UNIT_BYTES};
use uniffle_wire::types::AppId;

/// One disk's share.
#[derive(Debug)]
pub(super) struct ReadShare(Arc<Places>);

impl ReadShare {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Places::new((bytes / UNIT_BYTES).max(1)))
    }

    /// Waits for a part of `bytes` until it is the turn of `app`. A read that is larger than the share gets all of it.
    pub(super) async fn take(&self, app: &AppId, bytes: usize) -> Taken {
        self.0.take(app, bytes.div_ceil(UNIT_BYTES)).await
    }

    /// For a read of `bytes` by way of buffers that may be waited for.
    pub(super) fn turns<'a>(shares: impl Iterator<Item = &'a Self>, app: &AppId, bytes: usize) -> Turns {
        Turns::new(app, shares.map(|share| &share.0), bytes)
    }

    /// Whether a part of `bytes` could be taken now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.0.has_room(bytes.div_ceil(UNIT_BYTES))
    }
}
