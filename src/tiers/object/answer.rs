//! What reads of index and data have in common: bytes that are left, and that nothing comes after an error.

use std::sync::Arc;

use bytes::Bytes;

use super::core::Core;
use super::shuffle::Shuffle;
use crate::tiers::{StoreError, StoreErrorKind};

/// How much of a read is left. After an error it gives nothing more.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) core: Arc<Core>,
    pub(super) shuffle: Arc<Shuffle>,
    /// Bytes that were not given yet.
    left: u64,
    failed: bool,
}

impl Answer {
    /// One of `left` bytes.
    pub(super) fn new(core: &Arc<Core>, shuffle: Arc<Shuffle>, left: u64) -> Self {
        Self { core: Arc::clone(core), shuffle, left, failed: false }
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// Of what is left at most `max`.
    pub(super) fn next_len(&self, max: usize) -> usize {
        usize::try_from(self.left).unwrap_or(max).min(max)
    }

    /// Begins a chunk of at most `max` bytes; 0 at the end. It counts as failed until it has [ended](Self::end): also when the
    /// caller gives up in between.
    ///
    /// # Errors
    /// One before has failed.
    pub(super) fn begin(&mut self, max: usize) -> Result<usize, StoreError> {
        if self.failed {
            return Err(self.shuffle.error(StoreErrorKind::Corrupt));
        }
        let len = self.next_len(max);
        self.failed = len > 0;
        Ok(len)
    }

    /// The chunk that was begun, or the error as its reader is told.
    ///
    /// # Errors
    /// That of `chunk`.
    pub(super) fn end(&mut self, chunk: Result<Bytes, StoreError>) -> Result<Option<Bytes>, StoreError> {
        let chunk = chunk.map_err(|error| {
            let error = self.core.condition.for_reader(error, self.core.settings.expected_back);
            self.shuffle.require_present().err().unwrap_or(error)
        })?;
        self.failed = false;
        self.left -= chunk.len() as u64;
        Ok(Some(chunk))
    }
}
