//! A disk's share of the memory for reads. A read takes its part of the shares of its disks before it takes memory, so that
//! reads that are stuck on one disk leave memory to those of the others. Applications that wait are served in turns.

use std::sync::Arc;

use crate::budget::places::{Places, Taken};
use uniffle_wire::types::AppId;

/// What shares are counted in.
const UNIT_BYTES: usize = 4096;

/// One disk's share.
#[derive(Debug)]
pub(super) struct ReadShare(Arc<Places>);

/// A part of a share; it is free again when this is dropped.
pub(super) type ReadTurn = Taken;

impl ReadShare {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Places::new((bytes / UNIT_BYTES).max(1)))
    }

    /// Waits for a part of `bytes` until it is the turn of `app`. A read that is larger than the share gets all of it.
    pub(super) async fn take(&self, app: &AppId, bytes: usize) -> ReadTurn {
        self.0.take(app, bytes.div_ceil(UNIT_BYTES)).await
    }

    /// A part of `bytes` if no one has to wait for it.
    pub(super) fn try_take(&self, bytes: usize) -> Option<ReadTurn> {
        self.0.try_take(bytes.div_ceil(UNIT_BYTES))
    }

    /// Whether a part of `bytes` could be taken now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.0.has_room(bytes.div_ceil(UNIT_BYTES))
    }
}
