//! Marks: files beside the copies of the metadata log that record how much is acknowledged.
//!
//! A copy looks complete after its truncation between two frames. One whose last frame is damaged
//! looks like an interrupted write. If both copies are damaged alike, a mark shows that an
//! acknowledged record is missing. Marks are written after the acknowledgements, while nothing
//! waits, or every [`MARK_EVERY`] although entries wait. They are not synced. An old, torn or
//! missing mark understates the count, and none overstates it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use crate::format::frame::encode_mark;
use crate::recovery::read::{Directory, MARK};
use crate::window::within;
use uniffle_base::clock::Instant;
use uniffle_io::{File, IoClass, Vanished, WriteOpen};

/// Idle time after which a mark is written.
pub(super) const MARK_PAUSE: Duration = Duration::from_millis(10);
/// Interval after which a mark is written although entries wait.
const MARK_EVERY: Duration = Duration::from_millis(50);
/// Deadline of a mark, because entries wait for it meanwhile.
const MARK_DEADLINE: Duration = Duration::from_secs(1);

/// A copy of the log, beside which its mark is written.
pub(crate) struct MarkedCopy<'a> {
    pub(crate) directory: &'a Directory,
    pub(crate) path: &'a Path,
}

/// Marks of the current copies.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    generation: u64,
    /// File per copy, or `None` if it could not be opened.
    files: Vec<Option<Arc<dyn File>>>,
    frames: u64,
    written: Option<Instant>,
}

impl Marks {
    /// Returns whether the marks cover less than `frames` frames of a generation.
    pub(super) fn are_behind(&self, generation: u64, frames: u64) -> bool {
        (self.generation, self.frames) != (generation, frames)
    }

    /// Returns whether the marks have been behind for long.
    pub(super) fn are_due(&self) -> bool {
        self.written.is_none_or(|at| at.elapsed() >= MARK_EVERY)
    }

    /// Writes beside `copies` that `frames` frames are acknowledged. A mark that cannot be written
    /// understates the count.
    pub(crate) async fn write(&mut self, copies: &[MarkedCopy<'_>], generation: u64, frames: u64) {
        if self.generation != generation || self.files.len() != copies.len() {
            let opened = copies.iter().map(|copy| within(MARK_DEADLINE, open(copy)));
            self.files = join_all(opened.collect::<Vec<_>>()).await.into_iter().map(Result::ok).collect();
        }
        let mark = encode_mark(generation, frames);
        let files = self.files.iter().flatten();
        let writes = files.map(|file| within(MARK_DEADLINE, file.write_at(vec![mark.clone()], 0)));
        let mut has_vanished = false;
        for error in join_all(writes.collect::<Vec<_>>()).await.into_iter().filter_map(Result::err) {
            tracing::debug!(%error, "cannot write the mark of acknowledged records");
            has_vanished |= Vanished::of(&error).is_some();
        }
        if has_vanished {
            self.files.clear();
        }
        (self.generation, self.frames, self.written) = (generation, frames, Some(Instant::now()));
    }
}

/// Opens the mark of a copy. It exists if an earlier process wrote to the copy, or if the file was
/// truncated meanwhile.
async fn open(copy: &MarkedCopy<'_>) -> io::Result<Arc<dyn File>> {
    let path = copy.path.with_file_name(MARK);
    let open = |create| {
        let how = WriteOpen { create, direct: false, class: IoClass::Metadata, is_named: true };
        copy.directory.io.open_write(&path, how)
    };
    match open(true).await {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open(false).await,
        opened => opened,
    }
}
