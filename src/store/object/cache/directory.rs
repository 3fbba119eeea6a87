//! One directory of the cache: an unlinked file of slots, which the system deletes when the process
//! ends.
//!
//! The caller disables a directory for a while after a failure or a timeout
//! ([`CacheDirectory::disable`]). The cache continues with the other directories.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Instant;
use crate::log::within;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use uniffle_io::{Disk, File, ReadTarget, WriteOpen};
use uuid::Uuid;

/// Timeout of one disk call. A disk that takes longer is no better than the store.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for which a directory is disabled after a failure.
const DISABLED_FOR: Duration = Duration::from_secs(60);

/// Prefix of the subdirectory that exists only while the file is created.
const PREFIX: &str = "uniffle-worker.cache.";

#[derive(Debug)]
struct CacheFiles {
    write: Arc<dyn File>,
    read: Arc<dyn File>,
}

/// A directory whose file of slots is created on first use.
#[derive(Debug)]
pub(super) struct CacheDirectory {
    disk: Arc<dyn Disk>,
    files: OnceCell<CacheFiles>,
    disabled_until: Mutex<Option<Instant>>,
}

impl CacheDirectory {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk, files: OnceCell::new(), disabled_until: Mutex::new(None) }
    }

    /// Returns whether the directory is enabled.
    pub(super) fn is_enabled(&self) -> bool {
        self.disabled_until.lock().is_none_or(|until| Instant::now() >= until)
    }

    /// Disables the directory for a while.
    pub(super) fn disable(&self, error: &io::Error) {
        let root = self.disk.root().display();
        *self.disabled_until.lock() = Some(Instant::now() + DISABLED_FOR);
        tracing::warn!(
            %root,
            %error,
            "cannot use a directory of object_store.cache_dirs; disabling it for a minute"
        );
    }

    /// Creates the file, unless it is already open.
    pub(super) async fn open(&self) -> io::Result<()> {
        within(CALL_TIMEOUT, self.files()).await.map(|_| ())
    }

    async fn files(&self) -> io::Result<&CacheFiles> {
        self.files.get_or_try_init(|| async { open(&*self.disk).await }).await
    }

    /// Writes `pieces` one after the other, beginning at `offset` of the file.
    pub(super) async fn write(&self, pieces: Vec<Bytes>, offset: u64) -> io::Result<()> {
        within(CALL_TIMEOUT, async { self.files().await?.write.write_at(pieces, offset).await }).await
    }

    /// Fills the parts of `target`.
    pub(super) async fn read(&self, target: ReadTarget) -> io::Result<ReadTarget> {
        let read = async {
            let (target, read) = self.files().await?.read.read(target).await;
            read.map(|()| target)
        };
        within(CALL_TIMEOUT, read).await
    }
}

/// Creates the file, opens it and unlinks it. Removes subdirectories that a crashed process or a
/// timeout left. No other worker may use the directory.
async fn open(disk: &dyn Disk) -> io::Result<CacheFiles> {
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
    Ok(CacheFiles { write, read })
}
