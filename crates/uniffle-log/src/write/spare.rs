//! The spare: a third copy of the current generation, in an unnamed file.
//!
//! Other programs cannot reach it. If they damage both copies while the worker runs, the next
//! generation is read from the spare, and no record is lost. It is never synced, and ends with the
//! process: it does not count as a copy. A spare that fails is abandoned, and written again when
//! there is room.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;

use super::generation::{COPIES, unfinished};
use super::writer::{Copy, MetadataWriter};
use crate::recovery::read::{copy_directory, copy_file};
use crate::window::within;
use uniffle_io::{IoClass, WriteOpen};

/// Deadline for its creation, because nothing is acknowledged meanwhile.
const CREATION_WAIT: Duration = Duration::from_secs(1);
/// Number of bytes that a directory must have free beside the spare, so that it takes no space from
/// the copies.
const ROOM_BYTES: u64 = 64 << 20;
/// Number of bytes copied at a time.
const CHUNK_BYTES: u64 = 1 << 20;

impl MetadataWriter {
    /// Creates an empty spare in a directory that has room for `bytes` bytes. Returns `None` if
    /// that fails.
    pub(super) async fn create_spare(&self, directory: usize, bytes: u64) -> Option<Copy> {
        let generation = self.generation;
        let (io, place) = (&self.directories[directory].io, unfinished(&copy_directory(generation, COPIES)));
        let path: PathBuf = copy_file(&place);
        let created = within(CREATION_WAIT, async {
            if io.space().await?.free_bytes < bytes.saturating_add(ROOM_BYTES) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            io.create_dir_all(&place).await?;
            let how = WriteOpen { create: true, class: IoClass::Metadata, ..WriteOpen::default() };
            let file = io.open_write(&path, how).await?;
            io.remove_dir_all(&place).await?;
            Ok(file)
        });
        match created.await {
            Ok(file) => Some(Copy { directory, generation, path, file }),
            Err(error) => {
                tracing::debug!(%error, "cannot create the unnamed copy of the metadata log");
                None
            }
        }
    }

    /// Appends to `spare`. Returns it, or `None` if it failed.
    pub(super) async fn append_to_spare(
        spare: Copy,
        bytes: Bytes,
        end: u64,
        deadline: Duration,
    ) -> Option<Copy> {
        match within(deadline, spare.file.write_at(vec![bytes], end)).await {
            Ok(()) => Some(spare),
            Err(error) => {
                tracing::debug!(%error, "cannot write the unnamed copy of the metadata log");
                None
            }
        }
    }

    /// Writes a missing spare from the first copy. A generation that was resumed has none.
    pub(super) async fn restore_spare(&mut self) {
        let Some(first) = self.copies.first().cloned().filter(|_| self.is_open && self.spare.is_none())
        else {
            return;
        };
        let Some(spare) = self.create_spare(first.directory, self.end).await else { return };
        match self.copy_to_spare(&first, &spare).await {
            Ok(()) => {
                self.spare = Some(spare);
                self.read_from_copies();
            }
            Err(error) => tracing::debug!(%error, "cannot write the unnamed copy of the metadata log"),
        }
    }

    async fn copy_to_spare(&self, from: &Copy, spare: &Copy) -> io::Result<()> {
        let mut at = 0;
        while at < self.end {
            let end = self.end.min(at + CHUNK_BYTES);
            let chunk = within(self.deadlines.name, from.file.read_range(at..end)).await?;
            within(self.deadlines.write, spare.file.write_at(vec![chunk], at)).await?;
            at = end;
        }
        Ok(())
    }
}
