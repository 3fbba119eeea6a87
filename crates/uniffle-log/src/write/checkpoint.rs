//! A checkpoint: the living entries of the log, which begin a generation on the disks or in the
//! object store.
//!
//! Entries are encoded and counted here, and written in chunks by a sink. A [`CheckpointFilter`]
//! leaves out dead entries, but replaced registrations only if the source is complete and in order.
//! Invariant: the counts of the earlier generation stay valid until the checkpoint is complete,
//! because it can fail.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::LogError;
use crate::contents::{CheckpointFilter, Contents};
use crate::format::frame::{Encoder, FrameContent};
use crate::recovery::read::SourceReader;

/// Size at which collected frames are written. The last frame may exceed it.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Number at which collected frames are written, whatever their size.
pub(crate) const CHUNK_FRAMES: u64 = 4096;

/// Destination of a generation.
pub(crate) trait CheckpointSink: Send {
    /// Error of a write, or of the source of the entries.
    type Error: From<LogError>;

    /// Appends frames with these sequences.
    fn write(
        &mut self,
        chunk: Bytes,
        frames: Range<u64>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// A generation that begins with a checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint<S> {
    pub(crate) sink: S,
    pub(crate) encoder: Encoder,
    pub(crate) contents: Contents,
    /// Sequence of the first frame in `out`.
    first: u64,
    out: BytesMut,
}

impl<S: CheckpointSink> Checkpoint<S> {
    /// Creates an empty generation. `contents` have no entries.
    pub(crate) fn new(generation: u64, contents: Contents, sink: S) -> Self {
        Self { sink, encoder: Encoder::new(generation), contents, first: 0, out: BytesMut::new() }
    }

    /// Adds the marks of `filter`, and the entries from `reader` that `filter` keeps.
    pub(crate) async fn copy(
        &mut self,
        mut filter: CheckpointFilter,
        reader: &mut SourceReader<'_>,
    ) -> Result<(), S::Error> {
        for mark in std::mem::take(&mut filter.marks) {
            self.put(&mark).await?;
        }
        while let Some(entry) = reader.next().await.map_err(LogError::from)? {
            if let Some(entry) = filter.keep(entry) {
                self.put(&entry).await?;
            }
        }
        Ok(())
    }

    /// Adds an entry. Every entry fits: it was in the log before, or is short.
    pub(crate) async fn put(&mut self, entry: &FrameContent) -> Result<(), S::Error> {
        let before = self.out.len();
        let fits = self.encoder.encode(entry, 0, &mut self.out);
        debug_assert!(fits, "the entry fitted into the previous log");
        self.contents.count_entry(entry, (self.out.len() - before) as u64);
        let is_full = self.out.len() >= CHUNK_BYTES || self.encoder.count() - self.first >= CHUNK_FRAMES;
        if is_full { self.flush().await } else { Ok(()) }
    }

    /// Writes all entries that were added.
    pub(crate) async fn flush(&mut self) -> Result<(), S::Error> {
        let frames = self.first..self.encoder.count();
        if !frames.is_empty() {
            self.first = frames.end;
            self.sink.write(self.out.split().freeze(), frames).await?;
        }
        Ok(())
    }
}
