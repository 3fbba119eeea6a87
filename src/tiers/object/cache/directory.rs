//! One directory of the cache: a file of slots that has no name, so that nothing of it outlives the process.
//!
//! A directory whose disk fails or does not answer is left alone for a while; the cache goes on with the others.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Instant, timeout};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use uniffle_io::{Disk, File, ReadTarget, WriteOpen};
use uuid::Uuid;

/// How long a call may take; then the store is quicker.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a directory is left alone after a failure.
const PAUSE: Duration = Duration::from_secs(60);

/// What the names of its directories begin with, of which one is there only while it is opened.
const PREFIX: &str = "uniffle-worker.cache.";

#[derive(Debug)]
struct Files {
    write: Arc<dyn File>,
    read: Arc<dyn File>,
}

/// Its file is made when it is first needed.
#[derive(Debug)]
pub(super) struct Directory {
    disk: Arc<dyn Disk>,
    files: OnceCell<Files>,
    failing_until: Mutex<Option<Instant>>,
}

impl Directory {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk, files: OnceCell::new(), failing_until: Mutex::new(None) }
    }

    /// Whether it is worth trying.
    pub(super) fn works(&self) -> bool {
        self.failing_until.lock().is_none_or(|until| Instant::now() >= until)
    }

    /// From now on it is left alone for a while.
    pub(super) fn fail(&self, error: &io::Error) {
        let root = self.disk.root().display();
        *self.failing_until.lock() = Some(Instant::now() + PAUSE);
        tracing::warn!(
            %root,
            %error,
            "cannot use a directory of object_store.cache_dirs; disabling it for a minute"
        );
    }

    /// Makes its file anew, unless that was done.
    pub(super) async fn open(&self) -> io::Result<()> {
        within(self.files()).await.map(|_| ())
    }

    async fn files(&self) -> io::Result<&Files> {
        self.files.get_or_try_init(|| async { open(&*self.disk).await }).await
    }

    /// Writes `pieces` one behind the other from `offset` of its file.
    pub(super) async fn write(&self, pieces: Vec<Bytes>, offset: u64) -> io::Result<()> {
        within(async { self.files().await?.write.write_at(pieces, offset).await }).await
    }

    /// Fills the parts of `target`.
    pub(super) async fn read(&self, target: ReadTarget) -> io::Result<ReadTarget> {
        let read = async {
            let (target, read) = self.files().await?.read.read(target).await;
            read.map(|()| target)
        };
        within(read).await
    }
}

async fn within<T>(call: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "disk timeout")),
    }
}

/// A file that is open and has no name any more; what an earlier process left before it got so far is removed.
async fn open(disk: &dyn Disk) -> io::Result<Files> {
    let here = Path::new("");
    disk.create_dir_all(here).await?;
    for name in disk.list(here).await?.iter().filter(|name| name.starts_with(PREFIX)) {
        disk.remove_dir_all(Path::new(name)).await?;
    }
    let directory = format!("{PREFIX}{}", Uuid::new_v4());
    let directory = Path::new(&directory);
    disk.create_dir_all(directory).await?;
    let slots = directory.join("slots");
    let write = disk.open_write(&slots, WriteOpen { create: true, ..WriteOpen::default() }).await?;
    let read = disk.open_read(&slots).await?;
    disk.remove_dir_all(directory).await?;
    Ok(Files { write, read })
}
