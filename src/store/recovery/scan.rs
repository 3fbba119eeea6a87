//! Reads the content of a disk: directories, files with their sizes, and logs record by record.
//!
//! Nothing is trusted: a record counts only if its checksums match, and bytes between two records
//! are skipped. A crash leaves a torn record at the end of a log. A write that never completed
//! leaves a hole in it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::log::{FileWindow, within};
use crate::store::DiskCondition;
use crate::store::disk::config::{NAME_TIMEOUT, READ_TIMEOUT, SyncWrites};
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::{APPS, LocalDisk};
use crate::store::disk::log_file::LogKind;
use crate::store::index::codec::{self, IndexGroup};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Number of bytes read at a time.
const WINDOW_BYTES: u64 = 4 << 20;

/// A file of a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct FoundFile {
    pub(in crate::store) kind: LogKind,
    pub(in crate::store) number: u32,
    pub(in crate::store) bytes: u64,
}

/// A shuffle's directory on one disk.
#[derive(Debug)]
pub(in crate::store) struct FoundDirectory {
    pub(in crate::store) disk: Arc<LocalDisk>,
    pub(in crate::store) key: ShuffleKey,
    pub(in crate::store) incarnation: u64,
    pub(in crate::store) path: PathBuf,
    pub(in crate::store) files: Vec<FoundFile>,
    /// True if part of it could not be read.
    pub(in crate::store) has_unread: bool,
}

impl FoundDirectory {
    pub(super) fn files_of(&self, kind: LogKind) -> impl Iterator<Item = &FoundFile> {
        self.files.iter().filter(move |file| file.kind == kind)
    }

    pub(in crate::store) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the lowest number above those of all files.
    pub(in crate::store) fn next_number(&self) -> u32 {
        self.files.iter().map(|file| file.number.saturating_add(1)).max().unwrap_or(0)
    }
}

/// Content of a disk.
#[derive(Debug, Default)]
pub(in crate::store) struct DiskScan {
    pub(in crate::store) directories: Vec<FoundDirectory>,
    /// Directories of applications without entries.
    pub(super) empty_apps: Vec<PathBuf>,
    /// The highest incarnation in the name of an entry that is not a directory. No directory can be
    /// created with that name.
    pub(super) highest_other: u64,
    /// True if part of the disk could not be read.
    pub(in crate::store) has_unread: bool,
}

impl DiskScan {
    /// Adds an entry with the name of an incarnation's directory. `None` means that it is not a
    /// directory.
    fn add(&mut self, found: Option<FoundDirectory>, incarnation: u64) {
        match found {
            Some(found) => {
                self.has_unread |= found.has_unread;
                self.directories.push(found);
            }
            None => self.highest_other = self.highest_other.max(incarnation),
        }
    }
}

/// Parses the name of a shuffle's directory. Returns its key and incarnation.
fn parse_name(app: &AppId, name: &str) -> Option<(ShuffleKey, u64)> {
    let (shuffle, incarnation) = name.split_once('.')?;
    let shuffle = ShuffleId(shuffle.parse().ok()?);
    Some((ShuffleKey::new(app.clone(), shuffle), incarnation.parse().ok()?))
}

/// Parses the kind and number in a log's file name.
fn parse_file(name: &str) -> Option<(LogKind, u32)> {
    let (number, extension) = name.split_once('.')?;
    Some((LogKind::of(extension)?, number.parse().ok()?))
}

/// Runs an operation of a disk within its deadline. A failure is counted against the disk. A hung
/// disk is not called again. A failed disk is called, because its readable data is still served.
async fn with_deadline<T>(disk: &LocalDisk, operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    if disk.condition() == DiskCondition::Hung {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "disk timed out earlier"));
    }
    let result = within(NAME_TIMEOUT, operation).await;
    if let Err(error) = &result {
        disk.note(error);
    }
    result
}

/// Lists a directory. Returns `None` if the entry is not a directory: it is not ours, and says
/// nothing about the disk.
async fn list(disk: &LocalDisk, path: &Path) -> io::Result<Option<Vec<String>>> {
    let listing = async {
        match disk.io.list(path).await {
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(None),
            listed => listed.map(Some),
        }
    };
    let names = with_deadline(disk, listing).await?;
    if names.is_none() {
        let path = disk.io.root().join(path);
        tracing::warn!(
            path = %path.display(),
            "unexpected file in a data directory; ignoring it; move it away"
        );
    }
    Ok(names)
}

fn log_unreadable(disk: &LocalDisk, path: &Path, error: &io::Error) {
    let path = disk.io.root().join(path);
    tracing::error!(path = %path.display(), %error, "cannot read a shuffle's directory or file");
}

/// Lists the content of a disk. Unreadable entries are logged and set `has_unread`.
pub(super) async fn scan_disk(disk: &Arc<LocalDisk>) -> DiskScan {
    let mut scan = DiskScan::default();
    let apps = match with_deadline(disk, disk.io.list(Path::new(APPS))).await {
        Ok(apps) => apps,
        Err(error) => {
            log_unreadable(disk, Path::new(APPS), &error);
            scan.has_unread = true;
            return scan;
        }
    };
    for name in apps {
        let path = Path::new(APPS).join(&name);
        let Ok(app) = AppId::parse(&name) else { continue };
        match list(disk, &path).await {
            Ok(None) => {}
            Ok(Some(names)) if names.is_empty() => scan.empty_apps.push(path),
            Ok(Some(names)) => {
                for (name, (key, incarnation)) in
                    names.iter().filter_map(|name| Some((name, parse_name(&app, name)?)))
                {
                    scan.add(scan_directory(disk, path.join(name), key, incarnation).await, incarnation);
                }
            }
            Err(error) => {
                log_unreadable(disk, &path, &error);
                scan.has_unread = true;
            }
        }
    }
    scan
}

/// Reads a shuffle's directory. Returns `None` if the entry is not a directory.
async fn scan_directory(
    disk: &Arc<LocalDisk>,
    path: PathBuf,
    key: ShuffleKey,
    incarnation: u64,
) -> Option<FoundDirectory> {
    let disk = Arc::clone(disk);
    let mut found = FoundDirectory { disk, key, incarnation, path, files: Vec::new(), has_unread: false };
    let disk = Arc::clone(&found.disk);
    let names = match list(&disk, &found.path).await {
        Ok(names) => names?,
        Err(error) => {
            log_unreadable(&disk, &found.path, &error);
            found.has_unread = true;
            Vec::new()
        }
    };
    for (name, (kind, number)) in names.iter().filter_map(|name| Some((name, parse_file(name)?))) {
        let path = found.path.join(name);
        let size = async { disk.io.open_read(&path).await?.size().await };
        let bytes = with_deadline(&disk, size).await.unwrap_or_else(|error| {
            log_unreadable(&disk, &path, &error);
            found.has_unread = true;
            // The file's number is in use even if its size is unknown.
            0
        });
        found.files.push(FoundFile { kind, number, bytes });
    }
    Some(found)
}

/// Bytes of a log that belong to no whole record.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct IndexLogDamage {
    /// Number of bytes that belong to no record and are followed by records.
    pub(super) holes_bytes: u64,
    /// Number of bytes at the end that belong to no record.
    pub(super) tail_bytes: u64,
}

/// Reads one log from its beginning.
pub(super) struct LogReader<'a> {
    disk: &'a LocalDisk,
    /// Positioned where the next record is searched.
    window: FileWindow,
    damage: IndexLogDamage,
}

impl<'a> LogReader<'a> {
    pub(in crate::store) async fn open(
        core: &DiskCore,
        disk: &'a LocalDisk,
        path: &Path,
        size: u64,
    ) -> io::Result<Self> {
        let opening = match core.config.sync {
            SyncWrites::Off => disk.io.open_read(path),
            // Reads from the device. After a failed sync the page cache may have bytes that a power
            // loss removes.
            SyncWrites::Group => disk.io.open_read_direct(path),
        };
        let file = with_deadline(disk, opening).await?;
        let window = FileWindow::new(file, size, WINDOW_BYTES, READ_TIMEOUT);
        Ok(Self { disk, window, damage: IndexLogDamage::default() })
    }

    /// Returns the skipped bytes. Complete after the last record.
    pub(in crate::store) fn damage(&self) -> IndexLogDamage {
        self.damage
    }

    /// Returns the next whole group and its offset, or `None` at the end.
    pub(super) async fn next_group(&mut self) -> io::Result<Option<(u64, IndexGroup)>> {
        let next = self.find_group().await;
        next.inspect_err(|error| self.disk.note(error))
    }

    async fn find_group(&mut self) -> io::Result<Option<(u64, IndexGroup)>> {
        loop {
            let before = self.window.at;
            let is_found = self.window.find(codec::MAGIC).await?;
            let at = self.window.at;
            self.damage.tail_bytes += at - before;
            if !is_found {
                return Ok(None);
            }
            if let Some((group, bytes)) = self.try_group().await? {
                self.window.at += bytes as u64;
                self.damage.holes_bytes += std::mem::take(&mut self.damage.tail_bytes);
                return Ok(Some((at, group)));
            }
            self.window.at += 1;
            self.damage.tail_bytes += 1;
        }
    }

    async fn try_group(&mut self) -> io::Result<Option<(IndexGroup, usize)>> {
        let Some(fixed) = self.window.bytes(codec::HEADER_BYTES as u64).await? else { return Ok(None) };
        let Ok(head_bytes) = codec::head_bytes(&fixed) else { return Ok(None) };
        let Some(head) = self.window.bytes(head_bytes as u64).await? else { return Ok(None) };
        let Ok(total) = codec::total_bytes(&head) else { return Ok(None) };
        let Some(whole) = self.window.bytes(total).await? else { return Ok(None) };
        Ok(codec::decode(&whole).ok())
    }
}
