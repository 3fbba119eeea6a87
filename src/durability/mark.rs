//! How much of a copy of the metadata log is acknowledged, in a file beside it.
//!
//! A copy that was cut between two frames fits to its end, and one whose last frame is damaged looks like one whose last
//! write was interrupted. Where both copies are damaged alike, a mark tells that something acknowledged is gone. It is written
//! behind the acknowledgements, when nothing waits, and not synced, so that it costs no answer any time: an old, torn or
//! missing one says less, and none says what is not so.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use super::frame::encode_mark;
use super::read::{Directory, MARK, within};
use crate::clock::Instant;
use uniffle_io::{File, Lane, Vanished, WriteOpen};

/// So long nothing was to be written before it is.
pub(super) const MARK_PAUSE: Duration = Duration::from_millis(10);
/// It is written so often, if there always is.
const MARK_EVERY: Duration = Duration::from_millis(50);
/// Entries that come meanwhile wait for it.
const MARK_DEADLINE: Duration = Duration::from_secs(1);

/// The marks that are written.
#[derive(Debug, Default)]
pub(super) struct Marks {
    generation: u64,
    /// Of the copies; none where it could not be made.
    files: Vec<Option<Arc<dyn File>>>,
    frames: u64,
    written: Option<Instant>,
}

impl Marks {
    /// Whether less is marked than so many frames of a generation.
    pub(super) fn are_behind(&self, generation: u64, frames: u64) -> bool {
        (self.generation, self.frames) != (generation, frames)
    }

    /// Whether they are behind for long.
    pub(super) fn are_due(&self) -> bool {
        self.written.is_none_or(|at| at.elapsed() >= MARK_EVERY)
    }

    /// Writes beside `logs` that so many frames are acknowledged. What cannot be written says less.
    pub(super) async fn write(&mut self, logs: &[(&Directory, PathBuf)], generation: u64, frames: u64) {
        if self.generation != generation || self.files.len() != logs.len() {
            let made = logs.iter().map(|(directory, log)| within(MARK_DEADLINE, create(directory, log)));
            self.files = join_all(made.collect::<Vec<_>>()).await.into_iter().map(Result::ok).collect();
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

async fn create(directory: &Directory, log: &Path) -> io::Result<Arc<dyn File>> {
    let path = log.with_file_name(MARK);
    directory
        .io
        .open_write(&path, WriteOpen { create: true, direct: false, lane: Lane::Metadata, is_named: true })
        .await
}
