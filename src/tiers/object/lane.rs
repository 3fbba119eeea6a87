//! What waits for a segment of a shuffle, and which number the next one has.

use tokio::sync::oneshot;

use super::segment::Prepared;
use crate::tiers::StoreError;

/// A batch that is to be written.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) batch: Prepared,
    pub(super) done: oneshot::Sender<Result<(), StoreError>>,
}

/// Numbers of segments.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// The largest that was given, also to uploads that failed.
    pub(super) last_number: u32,
    /// That of the segment that was published last; 0 = none.
    pub(super) published: u32,
}
