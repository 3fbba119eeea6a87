//! Deleting without holding up what is written meanwhile.
//!
//! A file system may take seconds to free a large log, most of all one that is mounted with `discard`, and batches to the
//! same device wait meanwhile. So a directory goes in parts, one at a time on each disk, and as long as batches are on their way
//! there, each part is followed by a pause that is longer than it took. A disk that is short of room gets no pauses.
//!
//! A worker that makes way for a successor begins no part any more: no caller waits for gigabytes to go. What is left lies in the
//! trash, which the successor empties.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::disk::{LocalDisk, TRASH, within};
use crate::clock::{Instant, sleep};

/// Freed in one go.
const PART_BYTES: u64 = 16 << 20;
/// A pause is so many times as long as what it follows: three quarters of the time are for batches.
const PAUSE_FACTOR: u32 = 3;
/// The shortest pause: a file system discards what was freed only after the call.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// The longest.
const PAUSE_MAX: Duration = Duration::from_millis(500);

impl LocalDisk {
    /// Deletes a directory or a file in the trash; one that is gone already is fine. `deadline` is that of each part. Dropped, it
    /// leaves the rest in the trash.
    ///
    /// # Errors
    /// `Interrupted` once removals cease: the rest is left likewise.
    pub(super) async fn delete(&self, path: &Path, deadline: Duration) -> io::Result<()> {
        loop {
            let turn = self.removals_cease.run_until_cancelled(self.removals.acquire()).await;
            let turn = turn.ok_or(io::ErrorKind::Interrupted)?.map_err(io::Error::other)?;
            let began = Instant::now();
            match within(deadline, self.io.remove_part(path, PART_BYTES)).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.is_busy_with_room() {
                let pause = sleep((began.elapsed() * PAUSE_FACTOR).clamp(PAUSE_MIN, PAUSE_MAX));
                self.removals_cease.run_until_cancelled(pause).await;
            }
            drop(turn);
        }
    }

    /// Begins no part of a removal any more, and waits for the one that is under way.
    pub(super) async fn cease_removals(&self) {
        self.removals_cease.cancel();
        // Nobody else waits for a turn any more.
        drop(self.removals.acquire().await);
    }

    /// Deletes everything in the trash.
    pub(super) async fn empty_trash(&self, deadline: Duration) -> io::Result<()> {
        for name in within(deadline, self.io.list(Path::new(TRASH))).await? {
            self.delete(&Path::new(TRASH).join(name), deadline).await?;
        }
        Ok(())
    }
}
