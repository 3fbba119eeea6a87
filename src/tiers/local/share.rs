//! A disk's share of the memory for reads. A read takes its part of the shares of its disks before it takes memory, so that
//! reads that are stuck on one disk leave memory to those of the others.

use tokio::sync::{Semaphore, SemaphorePermit};

/// What shares are counted in.
const UNIT_BYTES: usize = 4096;

/// One disk's share.
#[derive(Debug)]
pub(super) struct ReadShare {
    free: Semaphore,
    units: u32,
}

/// A part of a share; it is free again when this is dropped.
pub(super) type ReadTurn<'a> = SemaphorePermit<'a>;

impl ReadShare {
    pub(super) fn new(bytes: usize) -> Self {
        let units = u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX).max(1);
        Self { free: Semaphore::new(usize::try_from(units).unwrap_or(usize::MAX)), units }
    }

    /// A read that is larger than the share gets all of it.
    fn units_of(&self, bytes: usize) -> u32 {
        u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX).min(self.units)
    }

    /// Waits for a part of `bytes`, first come, first served.
    pub(super) async fn take(&self, bytes: usize) -> ReadTurn<'_> {
        self.free.acquire_many(self.units_of(bytes)).await.expect("a share is never closed")
    }

    /// A part of `bytes` if it is free now.
    pub(super) fn try_take(&self, bytes: usize) -> Option<ReadTurn<'_>> {
        self.free.try_acquire_many(self.units_of(bytes)).ok()
    }

    /// Whether a part of `bytes` is free now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.free.available_permits() >= self.units_of(bytes) as usize
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_share_is_used_up_and_comes_back() {
        let share = ReadShare::new(3 * UNIT_BYTES);
        let first = share.take(UNIT_BYTES + 1).await;
        assert!(share.has_room(UNIT_BYTES) && !share.has_room(UNIT_BYTES + 1));
        assert!(share.try_take(2 * UNIT_BYTES).is_none() && share.try_take(1).is_some());
        assert!(share.take(usize::MAX).now_or_never().is_none());
        drop(first);
        drop(share.take(usize::MAX).await);
    }
}
