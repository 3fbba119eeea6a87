//! Whose turn it is to have memory for a read: readers of the store and readers of the cache have turns of their own, so a
//! store that does not answer keeps no memory from what is in the cache. Applications that wait are served in turns.

use std::sync::Arc;

use crate::budget::places::Places;
use crate::budget::turns::{self, UNIT_BYTES};
use uniffle_wire::types::AppId;

/// Of the memory for reads those of the store have this part, and those of the cache.
const TURNS_DIVISOR: u64 = 3;

/// The turns of readers.
#[derive(Debug)]
pub(super) struct Turns {
    of_store: Arc<Places>,
    of_cache: Arc<Places>,
}

impl Turns {
    pub(super) fn new(read_memory_bytes: u64) -> Self {
        let share = usize::try_from(read_memory_bytes / TURNS_DIVISOR).unwrap_or(usize::MAX);
        let places = || Places::new((share / UNIT_BYTES).max(1));
        Self { of_store: places(), of_cache: places() }
    }

    /// Whether a reader of the store with so many bytes would have its turn at once.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.of_store.has_room(bytes.div_ceil(UNIT_BYTES))
    }

    /// The turn of `app` with a buffer and what is held beside it, of `bytes` together.
    pub(super) fn of(&self, is_cached: bool, app: &AppId, bytes: usize) -> turns::Turns {
        let places = if is_cached { &self.of_cache } else { &self.of_store };
        turns::Turns::new(app, [places], bytes)
    }
}

#[cfg(test)]
mod tests {
    use uniffle_io::ReadPermits as _;

    use super::*;

    #[tokio::test]
    async fn stuck_store_readers_leave_memory_for_cache_readers() {
        let turns = Turns::new(3 << 20);
        let app = AppId::parse("app").unwrap();
        let stuck = turns.of(false, &app, 1 << 20).take().await;
        assert!(!turns.has_room(1));
        let next = turns.of(false, &app, 1);
        let mut next = next.take();
        assert!(futures::poll!(&mut next).is_pending());
        drop(turns.of(true, &app, 1 << 20).take().await);
        drop(stuck);
        drop(next.await);
    }
}
