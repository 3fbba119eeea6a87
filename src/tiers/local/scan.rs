//! Reads the content of a disk: directories, files with their sizes, and logs record by record.
//!
//! Nothing is trusted: a record counts only if its checksums match, and bytes between two records
//! are skipped. A crash leaves a torn record at the end of a log. A write that never completed
//! leaves a hole in it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::config::SyncWrites;
use super::core::Core;
use super::disk::{APPS, LocalDisk, within};
use super::index::{self, GroupError, IndexGroup};
use super::log::LogKind;
use crate::tiers::DiskCondition;
use uniffle_io::{File, ReadTarget};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Number of bytes read at a time.
const WINDOW_BYTES: u64 = 4 << 20;

/// A file of a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FoundFile {
    pub(super) kind: LogKind,
    pub(super) number: u32,
    pub(super) bytes: u64,
}

/// A shuffle's directory on one disk.
#[derive(Debug)]
pub(super) struct FoundDirectory {
    pub(super) disk: Arc<LocalDisk>,
    pub(super) key: ShuffleKey,
    pub(super) incarnation: u64,
    pub(super) path: PathBuf,
    pub(super) files: Vec<FoundFile>,
    /// True if part of it could not be read.
    pub(super) has_unread: bool,
}

impl FoundDirectory {
    pub(super) fn files_of(&self, kind: LogKind) -> impl Iterator<Item = &FoundFile> {
        self.files.iter().filter(move |file| file.kind == kind)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the lowest number above those of all files.
    pub(super) fn next_number(&self) -> u32 {
        self.files.iter().map(|file| file.number.saturating_add(1)).max().unwrap_or(0)
    }
}

/// Content of a disk.
#[derive(Debug, Default)]
pub(super) struct DiskScan {
    pub(super) directories: Vec<FoundDirectory>,
    /// Directories of applications without entries.
    pub(super) empty_apps: Vec<PathBuf>,
    /// The highest incarnation in the name of an entry that is not a directory. No directory can be
    /// created with that name.
    pub(super) highest_stray: u64,
    /// True if part of the disk could not be read.
    pub(super) has_unread: bool,
}

impl DiskScan {
    /// Adds an entry with the name of an incarnation's directory. `None` means that it is not a
    /// directory.
    fn take(&mut self, found: Option<FoundDirectory>, incarnation: u64) {
        match found {
            Some(found) => {
                self.has_unread |= found.has_unread;
                self.directories.push(found);
            }
            None => self.highest_stray = self.highest_stray.max(incarnation),
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

/// Runs an operation of a disk within its deadline. A failure is counted against the disk. A disk
/// that hung is not asked again. A disk that failed is, because its readable data is served.
async fn ask<T>(
    disk: &LocalDisk,
    deadline: Duration,
    operation: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    if disk.condition() == DiskCondition::Hung {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "disk timed out earlier"));
    }
    let result = within(deadline, operation).await;
    if let Err(error) = &result {
        disk.note(error);
    }
    result
}

/// Lists a directory. Returns `None` if the entry is not a directory: it is not ours, and says
/// nothing about the disk.
async fn list(disk: &LocalDisk, deadline: Duration, path: &Path) -> io::Result<Option<Vec<String>>> {
    let listing = async {
        match disk.io.list(path).await {
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(None),
            listed => listed.map(Some),
        }
    };
    let names = ask(disk, deadline, listing).await?;
    if names.is_none() {
        let path = disk.io.root().join(path);
        tracing::warn!(
            path = %path.display(),
            "unexpected directory in a data directory; ignoring it; move it away"
        );
    }
    Ok(names)
}

/// Lists the content of a disk. Unreadable entries are logged and left out.
pub(super) async fn scan_disk(core: &Core, disk: &Arc<LocalDisk>) -> DiskScan {
    let deadline = core.config.name_timeout;
    let mut scan = DiskScan::default();
    let tell = |path: &Path, error: io::Error| {
        tracing::error!(
            path = %disk.io.root().join(path).display(),
            %error,
            "cannot read a shuffle's directory or file"
        );
    };
    let apps = match ask(disk, deadline, disk.io.list(Path::new(APPS))).await {
        Ok(apps) => apps,
        Err(error) => {
            tell(Path::new(APPS), error);
            scan.has_unread = true;
            return scan;
        }
    };
    for name in apps {
        let path = Path::new(APPS).join(&name);
        let Ok(app) = AppId::parse(&name) else { continue };
        match list(disk, deadline, &path).await {
            Ok(None) => {}
            Ok(Some(names)) if names.is_empty() => scan.empty_apps.push(path),
            Ok(Some(names)) => {
                for (name, (key, incarnation)) in
                    names.iter().filter_map(|name| Some((name, parse_name(&app, name)?)))
                {
                    scan.take(
                        scan_directory(core, disk, path.join(name), key, incarnation).await,
                        incarnation,
                    );
                }
            }
            Err(error) => {
                tell(&path, error);
                scan.has_unread = true;
            }
        }
    }
    scan
}

/// Reads a shuffle's directory. Returns `None` if the entry is not a directory.
async fn scan_directory(
    core: &Core,
    disk: &Arc<LocalDisk>,
    path: PathBuf,
    key: ShuffleKey,
    incarnation: u64,
) -> Option<FoundDirectory> {
    let deadline = core.config.name_timeout;
    let disk = Arc::clone(disk);
    let mut found = FoundDirectory { disk, key, incarnation, path, files: Vec::new(), has_unread: false };
    let disk = Arc::clone(&found.disk);
    let names = match list(&disk, deadline, &found.path).await {
        Ok(names) => names?,
        Err(error) => {
            tracing::error!(
                path = %disk.io.root().join(&found.path).display(),
                %error,
                "cannot read a shuffle's directory or file"
            );
            found.has_unread = true;
            Vec::new()
        }
    };
    for (name, (kind, number)) in names.iter().filter_map(|name| Some((name, parse_file(name)?))) {
        let path = found.path.join(name);
        let size = async { disk.io.open_read(&path).await?.size().await };
        let bytes = ask(&disk, deadline, size).await.unwrap_or_else(|error| {
            tracing::error!(
                path = %disk.io.root().join(&path).display(),
                %error,
                "cannot read a shuffle's directory or file"
            );
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
pub(super) struct Damage {
    /// Number of bytes that belong to no record and are followed by records.
    pub(super) holes_bytes: u64,
    /// Number of bytes at the end that belong to no record.
    pub(super) tail_bytes: u64,
}

/// Reads one log from its beginning.
pub(super) struct LogReader<'a> {
    disk: &'a LocalDisk,
    deadline: Duration,
    file: Arc<dyn File>,
    size: u64,
    /// Offset of `window` in the log.
    start: u64,
    window: Bytes,
    /// Offset at which the next record is searched.
    at: u64,
    damage: Damage,
}

impl<'a> LogReader<'a> {
    pub(super) async fn open(core: &Core, disk: &'a LocalDisk, path: &Path, size: u64) -> io::Result<Self> {
        let opening = match core.config.sync {
            SyncWrites::Off => disk.io.open_read(path),
            // Reads from the device. After a failed sync the page cache may have bytes that a power
            // loss removes.
            SyncWrites::Group => disk.io.open_read_direct(path),
        };
        let file = ask(disk, core.config.name_timeout, opening).await?;
        let deadline = core.config.read_timeout;
        let (window, damage) = (Bytes::new(), Damage::default());
        Ok(Self { disk, deadline, file, size, start: 0, window, at: 0, damage })
    }

    /// Returns the skipped bytes. Complete after the last record.
    pub(super) fn damage(&self) -> Damage {
        self.damage
    }

    /// Returns the next whole group and its offset, or `None` at the end.
    pub(super) async fn next_group(&mut self) -> io::Result<Option<(u64, IndexGroup)>> {
        while self.find(index::MAGIC).await? {
            if let Some(group) = self.try_group().await? {
                return Ok(Some(group));
            }
            self.skip(1);
        }
        Ok(None)
    }

    async fn try_group(&mut self) -> io::Result<Option<(u64, IndexGroup)>> {
        let Some(fixed) = self.bytes(index::HEADER_BYTES as u64).await? else { return Ok(None) };
        let Ok(head_bytes) = index::head_bytes(fixed) else { return Ok(None) };
        let Some(head) = self.bytes(head_bytes as u64).await? else { return Ok(None) };
        let Ok(total) = index::total_bytes(head) else { return Ok(None) };
        let Some(whole) = self.bytes(total).await? else { return Ok(None) };
        let decoded = index::decode(whole);
        Ok(self.accept(decoded))
    }

    fn accept<T>(&mut self, decoded: Result<(T, usize), GroupError>) -> Option<(u64, T)> {
        let (record, bytes) = decoded.ok()?;
        let began = self.at;
        self.at += bytes as u64;
        self.damage.holes_bytes += std::mem::take(&mut self.damage.tail_bytes);
        Some((began, record))
    }

    fn skip(&mut self, bytes: u64) {
        self.at += bytes;
        self.damage.tail_bytes += bytes;
    }

    /// Moves to the next possible beginning of a record. Returns false if there is none.
    async fn find(&mut self, magic: [u8; 4]) -> io::Result<bool> {
        loop {
            if self.bytes(magic.len() as u64).await?.is_none() {
                self.skip(self.size - self.at);
                return Ok(false);
            }
            let window = self.window.get(self.offset()?..).unwrap_or_default();
            match window.windows(magic.len()).position(|bytes| bytes == magic) {
                Some(0) => return Ok(true),
                Some(skipped) => self.skip(skipped as u64),
                // The remaining bytes may be the beginning of a record.
                None => self.skip((window.len() + 1 - magic.len()) as u64),
            }
        }
    }

    /// Returns the search position as an offset in the window.
    fn offset(&self) -> io::Result<usize> {
        usize::try_from(self.at - self.start).map_err(io::Error::other)
    }

    /// Returns the next `len` bytes, or `None` if the log ends before.
    async fn bytes(&mut self, len: u64) -> io::Result<Option<&[u8]>> {
        if self.at.checked_add(len).is_none_or(|end| end > self.size) {
            return Ok(None);
        }
        if self.at < self.start || self.at + len > self.start + self.window.len() as u64 {
            let bytes = len.max(WINDOW_BYTES).min(self.size - self.at);
            let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
            let reading = self.file.read(ReadTarget::one(Box::new(vec![0; bytes]), 0..bytes, self.at));
            let target = ask(self.disk, self.deadline, async {
                let (target, result) = reading.await;
                result.map(|()| target)
            })
            .await?;
            self.window = target.buffer.freeze(bytes);
            self.start = self.at;
        }
        let from = self.offset()?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        Ok(self.window.get(from..from + len))
    }
}
