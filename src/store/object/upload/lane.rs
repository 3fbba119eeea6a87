//! Batches that wait for a segment of a shuffle, and the numbers of its segments.

use tokio::sync::oneshot;

use super::segment::Prepared;
use crate::store::{ShuffleHandle, StoreError};
use uniffle_base::budget::{Budget, Charge};

/// A batch to be written.
#[derive(Debug)]
pub(in crate::store::object) struct Job {
    pub(in crate::store::object) batch: Prepared,
    /// Streams to which its extents are appended.
    pub(super) streams: ShuffleHandle,
    pub(super) waiter: Waiter,
}

/// Response channel of a batch, with the memory charged until the response.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(in crate::store::object) done: oneshot::Sender<Result<(), StoreError>>,
    pub(super) _making: Making,
}

/// Heap for the records and extents of a batch while its segment is made, out of a bounded budget
/// for all batches. A batch takes its share once, before it is prepared, so batches cannot
/// deadlock.
#[derive(Debug)]
pub(super) struct Making {
    _part: Charge,
    _held: Charge,
}

impl Making {
    /// Waits for a share of `all`. Also charges `held`, even beyond its capacity.
    pub(in crate::store::object) async fn begin(all: &Budget, held: &Budget, bytes: u64) -> Self {
        // A batch larger than the capacity takes all of it.
        let part = all.charge(bytes.min(all.capacity())).await;
        let _part = part.unwrap_or_else(|_| all.force_charge(bytes));
        Self { _part, _held: held.force_charge(bytes) }
    }
}

/// Numbers of a shuffle's segments.
#[derive(Debug, Default)]
pub(in crate::store) struct Lane {
    /// Largest number in use, also by failed uploads.
    pub(in crate::store) last_number: u32,
    /// Number of the segment published last, or 0.
    pub(in crate::store) published: u32,
}
