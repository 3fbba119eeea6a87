//! Progress of a read in chunks.

/// Remaining length of a read. After a failed chunk, a read returns only errors.
#[derive(Debug)]
pub(super) struct RemainingRead {
    left: u64,
    failed: bool,
}

impl RemainingRead {
    /// Creates the progress of a read of `left` bytes.
    pub(super) fn new(left: u64) -> Self {
        Self { left, failed: false }
    }

    /// Returns the remaining bytes.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// Returns the remaining bytes, at most `max`.
    pub(super) fn next_len(&self, max: usize) -> usize {
        usize::try_from(self.left).unwrap_or(max).min(max)
    }

    /// Begins a chunk of at most `max` bytes. Returns its length, which is 0 at the end, or `None`
    /// after a failed chunk. A chunk counts as failed until it has [ended](Self::end), because the
    /// caller may drop it.
    pub(super) fn begin(&mut self, max: usize) -> Option<usize> {
        let len = self.next_len(max);
        let is_open = !self.failed;
        self.failed |= len > 0;
        is_open.then_some(len)
    }

    /// Ends a chunk of `len` bytes.
    pub(super) fn end(&mut self, len: usize) {
        self.failed = false;
        self.left -= len as u64;
    }
}
