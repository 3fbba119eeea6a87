//! What waits for a segment of a shuffle, and which number the next one has.

use tokio::sync::oneshot;

use super::segment::Prepared;
use crate::budget::{Budget, Charge};
use crate::tiers::StoreError;

/// A batch that is to be written.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) batch: Prepared,
    pub(super) waiter: Waiter,
}

/// Who waits for a batch, and what is held for it until it is answered.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) done: oneshot::Sender<Result<(), StoreError>>,
    pub(super) _making: Making,
}

/// Heap for the records and extents of a batch while its segment is made. All of them together have a bound; a batch takes
/// its part once, before it is prepared, and waits for nothing that another batch could keep from it.
#[derive(Debug)]
pub(super) struct Making {
    _part: Charge,
    _held: Charge,
}

impl Making {
    /// Waits for a part of `all`; `held` is charged too, whether there is room or not.
    pub(super) async fn begin(all: &Budget, held: &Budget, bytes: u64) -> Self {
        // One that is larger than all there is gets all of it.
        let part = all.charge(bytes.min(all.capacity())).await;
        let _part = part.unwrap_or_else(|_| all.force_charge(bytes));
        Self { _part, _held: held.force_charge(bytes) }
    }
}

/// Numbers of segments.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// The largest that was given, also to uploads that failed.
    pub(super) last_number: u32,
    /// That of the segment that was published last; 0 = none.
    pub(super) published: u32,
}
