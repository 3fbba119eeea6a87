//! Files without a name, for what a process may lose: they are gone when it ends, however it ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

use super::read::{Directory, Health, within};
use uniffle_io::{File, ReadTarget, WriteOpen};

/// Where such files are made: on the best data directory that takes one.
#[derive(Debug)]
pub struct Scratch {
    directories: Vec<Directory>,
    /// Directory below each data directory in which a file has its name until it is open. What a kill leaves there is removed.
    place: PathBuf,
    deadline: Duration,
    turn: Mutex<()>,
}

impl Scratch {
    /// No file yet. An operation that takes longer than `deadline` has failed.
    #[must_use]
    pub fn new(directories: Vec<Directory>, place: &Path, deadline: Duration) -> Self {
        Self { directories, place: place.to_path_buf(), deadline, turn: Mutex::default() }
    }

    /// Waits until nobody else writes: the memory that writing takes is there once.
    pub async fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Makes a file.
    ///
    /// # Errors
    /// What the last directory says; none can be written.
    pub(super) async fn file(&self) -> io::Result<ScratchFile> {
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
        let path = self.place.join(Uuid::new_v4().to_string());
        let new = WriteOpen { create: true, ..WriteOpen::default() };
        let writer = within(deadline, io.open_write(&path, new)).await?;
        let reader = within(deadline, io.open_read(&path)).await;
        // Whoever empties the place may have been first.
        match within(deadline, io.remove_part(&path, 0)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(_) | Err(_) => {}
        }
        Ok(ScratchFile { directory: directory.clone(), writer, reader: reader?, deadline })
    }
}

/// An open file without a name.
#[derive(Debug)]
pub(super) struct ScratchFile {
    directory: Directory,
    writer: Arc<dyn File>,
    reader: Arc<dyn File>,
    deadline: Duration,
}

impl ScratchFile {
    pub(super) async fn write(&self, bytes: Vec<u8>, offset: u64) -> io::Result<()> {
        self.noted(within(self.deadline, self.writer.write_at(vec![Bytes::from(bytes)], offset)).await)
    }

    pub(super) async fn read(&self, length: usize, offset: u64) -> io::Result<Bytes> {
        let reading = async {
            let target = ReadTarget::one(Box::new(vec![0; length]), 0..length, offset);
            let (target, result) = self.reader.read(target).await;
            result.map(|()| target.buffer.freeze(length))
        };
        self.noted(within(self.deadline, reading).await)
    }

    fn noted<T>(&self, done: io::Result<T>) -> io::Result<T> {
        done.map_err(|error| {
            self.directory.note(&error);
            io::Error::new(error.kind(), format!("{}: {error}", self.directory.label))
        })
    }
}

impl Directory {
    fn note(&self, error: &io::Error) {
        if let Some(health) = self.health.upgrade() {
            Health::failed(&*health, error);
        }
    }
}
