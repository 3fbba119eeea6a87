//! Unnamed files for data that a process may lose: block ids that exceed the heap.
//!
//! A file has a name only while it is opened, so it disappears when the process ends. After a kill
//! in that moment, the next start must remove the file.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

use crate::recovery::read::{Directory, DirectoryHealth};
use crate::window::within;
use uniffle_io::{File, WriteOpen};

/// Factory of unnamed files, on the best data directory that accepts one.
#[derive(Debug)]
pub struct Scratch {
    directories: Vec<Directory>,
    /// Directory below each data directory in which a file is created before its name is removed:
    /// the trash, which is emptied regularly, also of names that a kill or a timeout leaves there.
    trash: PathBuf,
    deadline: Duration,
    turn: Mutex<()>,
}

impl Scratch {
    /// Creates the factory without a file. An operation that exceeds `deadline` has failed.
    #[must_use]
    pub fn new(directories: Vec<Directory>, trash: &Path, deadline: Duration) -> Self {
        Self { directories, trash: trash.to_path_buf(), deadline, turn: Mutex::default() }
    }

    /// Waits until no other caller writes. Hold the guard while writing: the buffers are not
    /// charged to a budget, so only one caller at a time may have them.
    pub async fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Creates a file.
    ///
    /// # Errors
    /// `StorageFull` if no directory is writable, otherwise the error of the last one tried.
    pub(crate) async fn file(&self) -> io::Result<ScratchFile> {
        let mut ranked: Vec<_> = self.directories.iter().filter_map(|it| Some((it.rank()?, it))).collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        let mut failed = io::Error::new(io::ErrorKind::StorageFull, "no data directory is writable");
        for (_, directory) in ranked {
            match self.file_in(directory).await {
                Ok(file) => return Ok(file),
                Err(error) => {
                    directory.note(&error);
                    failed = error;
                }
            }
        }
        Err(failed)
    }

    async fn file_in(&self, directory: &Directory) -> io::Result<ScratchFile> {
        let (io, deadline) = (&directory.io, self.deadline);
        let path = self.trash.join(Uuid::new_v4().to_string());
        let new = WriteOpen { create: true, ..WriteOpen::default() };
        let writer = within(deadline, io.open_write(&path, new)).await?;
        let reader = within(deadline, io.open_read(&path)).await;
        // Removes the file, which is empty, at once. Whoever empties the trash may have been first.
        match within(deadline, io.remove_part(&path, 0)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(_) | Err(_) => {}
        }
        Ok(ScratchFile { directory: directory.clone(), writer, reader: reader?, deadline })
    }
}

/// An open unnamed file.
#[derive(Debug)]
pub(crate) struct ScratchFile {
    directory: Directory,
    writer: Arc<dyn File>,
    reader: Arc<dyn File>,
    deadline: Duration,
}

impl ScratchFile {
    pub(crate) async fn write(&self, bytes: Vec<u8>, offset: u64) -> io::Result<()> {
        self.observe(within(self.deadline, self.writer.write_at(vec![Bytes::from(bytes)], offset)).await)
    }

    pub(crate) async fn read(&self, length: usize, offset: u64) -> io::Result<Bytes> {
        self.observe(within(self.deadline, self.reader.read_range(offset..offset + length as u64)).await)
    }

    fn observe<T>(&self, done: io::Result<T>) -> io::Result<T> {
        done.map_err(|error| {
            self.directory.note(&error);
            io::Error::new(error.kind(), format!("{}: {error}", self.directory.label))
        })
    }
}

impl Directory {
    fn note(&self, error: &io::Error) {
        if let Some(health) = self.health.upgrade() {
            DirectoryHealth::failed(&*health, error);
        }
    }
}
