//! The share of a device in the memory for reads: a disk, the object store or its read cache.
//!
//! A read reserves part of the shares of its devices together with its memory ([`Turns`]). Reads
//! that are stuck on one device leave memory for reads of others, and reads that wait for memory do
//! not occupy a device. Waiting applications are served in turns.

use std::sync::Arc;

use crate::budget::permit_pool::PermitPool;
use crate::budget::turns::{Turns, UNIT_BYTES};
use uniffle_wire::types::AppId;

/// The share of one device.
#[derive(Debug)]
pub(super) struct ReadShare(Arc<PermitPool>);

impl ReadShare {
    pub(super) fn new(bytes: usize) -> Self {
        Self(PermitPool::new((bytes / UNIT_BYTES).max(1)))
    }

    /// Returns the permits that a read of `bytes` bytes of `app` needs from the shares of its
    /// devices.
    pub(super) fn turns<'a>(shares: impl Iterator<Item = &'a Self>, app: &AppId, bytes: usize) -> Turns {
        Turns::new(app, shares.map(|share| &share.0), bytes)
    }

    /// Returns whether `bytes` bytes could be reserved now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.0.has_room(bytes.div_ceil(UNIT_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use uniffle_io::ReadPermits as _;

    use super::*;

    #[tokio::test]
    async fn stuck_reads_leave_memory_for_other_devices() {
        let (store, cache) = (ReadShare::new(1 << 20), ReadShare::new(1 << 20));
        let app = AppId::parse("app").unwrap();
        let turns = |share, bytes| ReadShare::turns(std::iter::once(share), &app, bytes);
        let stuck = turns(&store, 1 << 20).take().await;
        assert!(!store.has_room(1));
        let next = turns(&store, 1);
        let mut next = next.take();
        assert!(futures::poll!(&mut next).is_pending());
        drop(turns(&cache, 1 << 20).take().await);
        drop(stuck);
        drop(next.await);
    }
}
