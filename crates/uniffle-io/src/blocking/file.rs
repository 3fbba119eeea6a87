//! An open file: its calls run on blocking threads and hold permits of its disk.

use std::fs::OpenOptions;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::gates::{CallGate, blocking, run_permitted};
use super::read;
use crate::progress::WriteProgress;
use crate::vanished::{ExpectedFile, Root};
use crate::{BoxFuture, File, FileId, IoClass, ReadTarget, WriteOpen};

/// An open file, and whether it bypasses the page cache.
#[derive(Debug)]
pub(super) struct OpenedFile {
    file: std::fs::File,
    direct: bool,
    /// Set for a named file that is open for writing.
    expected: Option<ExpectedFile>,
}

impl OpenedFile {
    /// Writes, and checks that the file still exists at its path. Runs all steps in one call on one
    /// thread.
    fn append(&self, pieces: Vec<Bytes>, offset: u64, synced: bool) -> io::Result<()> {
        let bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if let Some(expected) = &self.expected {
            expected.require_unchanged(&self.file)?;
        }
        self.write(pieces, offset)?;
        if synced {
            self.file.sync_data()?;
        }
        let Some(expected) = &self.expected else { return Ok(()) };
        expected.wrote(&self.file, offset + bytes)?;
        expected.require_place()
    }

    fn write(&self, pieces: Vec<Bytes>, offset: u64) -> io::Result<()> {
        let mut progress = WriteProgress::new(pieces, offset, self.direct);
        while !progress.is_done() {
            let slices: Vec<_> = progress.next().map(IoSlice::new).collect();
            let written = rustix::io::pwritev(&self.file, &slices, progress.offset());
            progress.advance(written.map_err(io::Error::from))?;
        }
        Ok(())
    }
}

/// Opens for writing. Falls back to the page cache if the file system rejects `O_DIRECT` (EINVAL).
pub(super) fn open_write(path: PathBuf, how: WriteOpen, root: Root) -> io::Result<OpenedFile> {
    let mut options = OpenOptions::new();
    // Metadata logs are read back through the same descriptor: a removed log is still complete
    // there.
    options.write(true).read(how.class == IoClass::Metadata);
    let (file, direct) = if how.direct {
        match options.clone().create_new(how.create).custom_flags(direct_flag()).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                // Linux may have created the file before it rejected the flag.
                options.create(how.create);
                (options.open(&path)?, false)
            }
            opened => (opened?, true),
        }
    } else {
        (options.create_new(how.create).open(&path)?, false)
    };
    let is_exact = how.class == IoClass::Metadata;
    let expected = || ExpectedFile::new(root, path, &file, is_exact);
    let expected = how.is_named.then(expected).transpose()?;
    Ok(OpenedFile { file, direct, expected })
}

/// Opens for reading, with the same fallback.
pub(super) fn open_read(path: &Path, direct: bool) -> io::Result<OpenedFile> {
    let mut options = OpenOptions::new();
    options.read(true);
    let opened = |file, direct| OpenedFile { file, direct, expected: None };
    if direct {
        match options.clone().custom_flags(direct_flag()).open(path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            file => return file.map(|file| opened(file, true)),
        }
    }
    options.open(path).map(|file| opened(file, false))
}

fn direct_flag() -> i32 {
    rustix::fs::OFlags::DIRECT.bits().cast_signed()
}

/// An open file of a [`BlockingDisk`].
#[derive(Debug)]
pub(super) struct BlockingFile {
    pub(super) open: Arc<OpenedFile>,
    pub(super) writes: CallGate,
    pub(super) reads: CallGate,
}

impl File for BlockingFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let open = Arc::clone(&self.open);
        Box::pin(blocking(self.writes.clone(), move || open.append(pieces, offset, false)))
    }

    /// One round trip to a blocking thread instead of two.
    fn write_synced(self: Arc<Self>, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let open = Arc::clone(&self.open);
        Box::pin(blocking(self.writes.clone(), move || open.append(pieces, offset, true)))
    }

    fn read(&self, mut target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        let (open, reads) = (Arc::clone(&self.open), self.reads.clone());
        Box::pin(async move {
            let permit = reads.enter().await;
            let joined = tokio::task::spawn_blocking(move || {
                let result = read::fill(&open.file, open.direct, &mut target);
                drop(permit);
                (target, result)
            });
            // The buffer was lost together with its thread.
            joined.await.unwrap_or_else(|error| (ReadTarget::lost(), Err(io::Error::other(error))))
        })
    }

    fn advise(&self, ranges: Vec<Range<u64>>) -> BoxFuture<'static, io::Result<()>> {
        let Some(permits) = self.reads.try_enter() else { return Box::pin(std::future::ready(Ok(()))) };
        let open = Arc::clone(&self.open);
        Box::pin(run_permitted(permits, move || {
            ranges.into_iter().try_for_each(|range| read::advise(&open.file, range))
        }))
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        let open = Arc::clone(&self.open);
        Box::pin(blocking(self.writes.clone(), move || open.file.sync_data()))
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        let open = Arc::clone(&self.open);
        Box::pin(blocking(self.reads.clone(), move || Ok(open.file.metadata()?.len())))
    }

    fn id(&self) -> Option<FileId> {
        self.open.expected.as_ref().map(ExpectedFile::id)
    }

    fn verify(&self) -> BoxFuture<'static, io::Result<()>> {
        let open = Arc::clone(&self.open);
        Box::pin(blocking(self.reads.clone(), move || {
            let Some(expected) = &open.expected else { return Ok(()) };
            expected.require_unchanged(&open.file)?;
            expected.require_place()
        }))
    }
}
