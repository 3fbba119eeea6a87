//! Reads the metadata log: lists and copies in the data directories, generations in the object
//! store (`object_file`), and their frames one by one.
//!
//! Invariant: unreadable data and a truncated file (a torn tail) are reported to the rule (`proof`)
//! as damage, and never replaced by a default. Only an unreadable mark counts as 0.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use croaring::Treemap;
use futures::future::join_all;
use rustix::io::Errno;
use uuid::Uuid;

use super::proof::{CopyPlace, CopySeen, DirectoryScan, HandOff, RecoveryDecision, Torn, decide_recovery};
use super::resumable::{Resumable, ResumableCopy, resumable_copies};
use crate::contents::{CheckpointFilter, Order};
use crate::format::frame::{self, Epoch, Frame, FrameContent, Gap, Incarnation, METADATA};
use crate::window::{FileWindow, within};
use uniffle_io::{Disk, File};

/// Sources from which the log can be read at a moment. A later generation removes them.
#[derive(Debug)]
pub(crate) struct LogSources {
    pub(crate) sources: Vec<LogCopies>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) deadline: Duration,
}

/// File with the list of data directories.
pub(crate) const MEMBERS: &str = "members";
/// File of a copy. It has a directory of its own, so that it can be renamed and removed at once.
const LOG: &str = "log";
/// File beside the copy that states how much of it is acknowledged (`mark`).
pub(crate) const MARK: &str = "acknowledged";
/// Number of bytes read at a time.
const WINDOW_BYTES: u64 = 1 << 20;
/// Like [`WINDOW_BYTES`], for the object store: its requests have deadlines of their own, and a
/// window is several concurrent ones.
const STORE_WINDOW_BYTES: u64 = 16 << 20;

/// Health of a data directory for the log.
pub trait DirectoryHealth: fmt::Debug + Send + Sync {
    /// Returns the rank of the directory, or `None` if it cannot be written. The lowest rank is the
    /// best.
    fn rank(&self) -> Option<u8>;
    /// Notes a failed operation.
    fn failed(&self, error: &io::Error);
}

/// A present data directory.
#[derive(Debug, Clone)]
pub struct Directory {
    /// Identity of the directory.
    pub uuid: Uuid,
    /// Root of the directory, for messages.
    pub label: String,
    /// Files of the directory.
    pub io: Arc<dyn Disk>,
    /// Health of the directory. Dropped with the store, after which nothing is written.
    pub health: Weak<dyn DirectoryHealth>,
}

impl Directory {
    /// Returns the rank, see [`DirectoryHealth::rank`].
    pub(crate) fn rank(&self) -> Option<u8> {
        self.health.upgrade()?.rank()
    }
}

/// Returns the directory of a copy.
pub(crate) fn copy_directory(generation: u64, number: usize) -> PathBuf {
    Path::new(METADATA).join(format!("{generation}.{number}"))
}

/// Returns the file of a copy.
pub(crate) fn copy_file(directory: &Path) -> PathBuf {
    directory.join(LOG)
}

/// Returns the generation in the name of a copy's directory, or `None` for an unfinished one.
pub(crate) fn generation_of(name: &str) -> Option<u64> {
    let (generation, number) = name.split_once('.')?;
    number.parse::<usize>().ok()?;
    generation.parse().ok()
}

/// State of all directories.
#[derive(Debug)]
pub struct Survey {
    pub(crate) present: Vec<DirectoryScan>,
    /// Files of the copies, in the order of `present`.
    files: Vec<Vec<PathBuf>>,
    /// The highest generation in a name, including those of unfinished copies.
    pub(crate) generation: u64,
    /// Hand-off record of the previous process.
    hand_off: Option<HandOff>,
    /// True if the directories have files of shuffles.
    has_data: bool,
}

impl Survey {
    /// Reads every directory's list and copies.
    pub async fn take(directories: &[Directory], deadline: Duration) -> Self {
        let seen = directories.iter().map(|directory| survey_one(directory, deadline));
        let (mut present, mut files, mut generation) = (Vec::new(), Vec::new(), 0);
        for seen in join_all(seen.collect::<Vec<_>>()).await {
            present.push(seen.present);
            files.push(seen.files);
            generation = generation.max(seen.generation);
        }
        Self { present, files, generation, hand_off: None, has_data: false }
    }

    /// Adds the hand-off record of the previous process.
    #[must_use]
    pub fn with_hand_off(self, hand_off: Option<HandOff>) -> Self {
        Self { hand_off, ..self }
    }

    /// Sets whether the directories have files of shuffles. Without a log, these are incomplete.
    #[must_use]
    pub fn with_data(self, has_data: bool) -> Self {
        Self { has_data, ..self }
    }

    /// Returns the recovery decision.
    pub(crate) fn decision(&self) -> RecoveryDecision {
        let mut decision = decide_recovery(&self.present, self.hand_off.as_ref());
        if decision.is_fresh && self.has_data {
            let reason =
                "shuffle files exist without a metadata log; unregister the shuffle or rerun its application";
            decision.gap = Some(Gap { reason: reason.to_owned(), until_returned: Vec::new() });
            decision.is_fresh = false;
        }
        decision
    }

    /// Returns whether there is neither a log nor a file of a shuffle.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.decision().is_fresh
    }

    /// Returns the directories that could not be read, with the errors.
    pub(crate) fn unread(&self) -> BTreeMap<usize, String> {
        let unread = self.present.iter().enumerate().filter(|(_, it)| it.is_unread);
        unread.map(|(at, it)| (at, it.damaged.join("; "))).collect()
    }

    /// Returns the copies to which a start may append.
    pub(crate) fn resumable(&self, decision: &RecoveryDecision) -> Option<Resumable> {
        let places = resumable_copies(&self.present, decision, self.hand_off.as_ref())?;
        let first = *places.first()?;
        let file = |&CopyPlace { directory, copy }: &CopyPlace| ResumableCopy {
            directory,
            path: self.files[directory][copy].clone(),
        };
        Some(Resumable::new(places.iter().map(file).collect(), self.seen(first)))
    }

    /// Returns a source of the copies at `places`. If `is_proven`, a copy is read only up to the
    /// end of its valid frames.
    pub(crate) fn source(&self, places: &[CopyPlace], is_proven: bool) -> LogCopies {
        let part = |place: &CopyPlace| {
            let seen = self.seen(*place);
            LogCopy {
                directory: Some(place.directory),
                path: self.files[place.directory][place.copy].clone(),
                generation: seen.generation,
                epoch: seen.epoch,
                frames: if is_proven { seen.frames } else { u64::MAX },
                file: None,
            }
        };
        LogCopies { parts: places.iter().map(part).collect(), shipped: None }
    }

    fn seen(&self, place: CopyPlace) -> &CopySeen {
        &self.present[place.directory].copies[place.copy]
    }
}

/// State of one directory.
struct Seen {
    present: DirectoryScan,
    files: Vec<PathBuf>,
    generation: u64,
}

async fn survey_one(directory: &Directory, deadline: Duration) -> Seen {
    let mut present =
        DirectoryScan { uuid: directory.uuid, path: directory.label.clone(), ..DirectoryScan::default() };
    let (mut files, mut highest) = (Vec::new(), 0);
    let names = match within(deadline, directory.io.list(Path::new(METADATA))).await {
        Ok(names) => names,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                present.damaged.push(format!("cannot list {}/{METADATA}: {error}", directory.label));
                present.is_unread = true;
            }
            return Seen { present, files, generation: highest };
        }
    };
    for generation in names.iter().filter_map(|name| name.split_once('.')?.0.parse::<u64>().ok()) {
        highest = highest.max(generation);
    }
    match read_members(&*directory.io, deadline).await {
        Ok(members) => present.epochs.extend(members),
        Err(error) => {
            present.damaged.push(format!("{}/{METADATA}/{MEMBERS}: {error}", directory.label));
            if is_inconclusive(&error) {
                present.is_unread = true;
                return Seen { present, files, generation: highest };
            }
        }
    }
    for (name, generation) in names.iter().filter_map(|name| Some((name, generation_of(name)?))) {
        let path = copy_file(&Path::new(METADATA).join(name));
        let (seen, epoch) = match survey_copy(directory, &path, generation, deadline).await {
            Ok(seen) => seen,
            Err(error) => {
                present.damaged.push(format!("{}/{}: {error}", directory.label, path.display()));
                present.is_unread = true;
                return Seen { present, files, generation: highest };
            }
        };
        present.epochs.extend(epoch.map(|epoch| (generation, epoch)));
        present.copies.push(seen);
        files.push(path);
    }
    Seen { present, files, generation: highest }
}

/// Returns whether an error reveals nothing about a file's content, which may be intact: no
/// permission, no answer, no descriptor. Such a file is not damaged, and must not be overwritten.
fn is_inconclusive(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    error.kind() == io::ErrorKind::TimedOut
        || matches!(
            errno,
            Some(Errno::ACCESS | Errno::PERM | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR)
        )
}

/// Returns the newest epoch that a directory knows, regardless of its owner. It is read from its
/// list, or else from the beginning of its newest readable copy of the log.
pub async fn newest_epoch(io: &dyn Disk, deadline: Duration) -> Option<Epoch> {
    if let Ok(Some((_, epoch))) = read_members(io, deadline).await {
        return Some(epoch);
    }
    let names = within(deadline, io.list(Path::new(METADATA))).await.ok()?;
    let mut copies: Vec<_> = names.iter().filter_map(|name| Some((generation_of(name)?, name))).collect();
    copies.sort_unstable();
    for (generation, name) in copies.into_iter().rev() {
        let path = copy_file(&Path::new(METADATA).join(name));
        let Ok(mut reader) = CopyReader::open(io, &path, generation, deadline).await else { continue };
        if let Some(Frame { sequence: 0, entry: FrameContent::Epoch(epoch), .. }) = reader.next().await {
            return Some(*epoch);
        }
    }
    None
}

async fn read_members(io: &dyn Disk, deadline: Duration) -> io::Result<Option<(u64, Epoch)>> {
    let path = Path::new(METADATA).join(MEMBERS);
    let bytes = match within(deadline, io.read_small(&path)).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    match frame::decode(&bytes).map_err(io::Error::other)? {
        Frame { generation, entry: FrameContent::Epoch(epoch), .. } => Ok(Some((generation, *epoch))),
        _ => Err(io::Error::other("not a list of data directories")),
    }
}

/// Returns the number of acknowledged frames according to the mark beside a copy. An unreadable
/// mark counts as 0.
async fn read_mark(directory: &Directory, log: &Path, generation: u64, deadline: Duration) -> u64 {
    let read = within(deadline, directory.io.read_small(&log.with_file_name(MARK))).await;
    read.map_or(0, |mark| frame::decode_mark(&mark, generation))
}

async fn survey_copy(
    directory: &Directory,
    path: &Path,
    generation: u64,
    deadline: Duration,
) -> io::Result<(CopySeen, Option<Epoch>)> {
    let mut seen = CopySeen {
        path: directory.io.root().join(path).display().to_string(),
        generation,
        epoch: None,
        frames: 0,
        bytes: 0,
        crc: 0,
        newest: (0, 0),
        acknowledged: read_mark(directory, path, generation, deadline).await,
        torn: None,
    };
    let mut reader = match CopyReader::open(&*directory.io, path, generation, deadline).await {
        Ok(reader) => reader,
        Err(error) if is_inconclusive(&error) => return Err(error),
        Err(error) => {
            seen.torn = Some(Torn { at: 0, why: error.to_string(), frames_follow: false });
            return Ok((seen, None));
        }
    };
    let mut first = None;
    while let Some(frame) = reader.next().await {
        seen.newest = seen.newest.max((frame.sequence, u64::from(frame.batch)));
        if let (0, FrameContent::Epoch(epoch)) = (frame.sequence, frame.entry) {
            first = Some(*epoch);
        }
    }
    (seen.frames, seen.bytes, seen.crc) = (reader.fitting, reader.fitting_bytes, reader.previous);
    seen.torn = reader.torn;
    seen.epoch = first.as_ref().map(|epoch| epoch.id);
    Ok((seen, first))
}

/// Reads one copy from its beginning.
#[derive(Debug)]
struct CopyReader {
    window: FileWindow,
    generation: u64,
    previous: u32,
    /// Number of valid frames from the beginning.
    fitting: u64,
    fitting_bytes: u64,
    torn: Option<Torn>,
    /// Kind of the failed read that tore it.
    failed: Option<io::ErrorKind>,
}

impl CopyReader {
    async fn open(io: &dyn Disk, path: &Path, generation: u64, deadline: Duration) -> io::Result<Self> {
        Self::of(within(deadline, io.open_read(path)).await?, generation, WINDOW_BYTES, deadline).await
    }

    async fn of(file: Arc<dyn File>, generation: u64, step: u64, deadline: Duration) -> io::Result<Self> {
        let size = within(deadline, file.size()).await?;
        Ok(Self {
            window: FileWindow::new(file, size, step, deadline),
            generation,
            previous: 0,
            fitting: 0,
            fitting_bytes: 0,
            torn: None,
            failed: None,
        })
    }

    /// Returns the next frame whose own checksum matches, regardless of the frames before it.
    /// Returns `None` at the end or after a failed read.
    async fn next(&mut self) -> Option<Frame> {
        // Thousands of records are in memory between two reads.
        tokio::task::coop::consume_budget().await;
        match self.try_next().await {
            Ok(next) => next,
            Err(error) => {
                self.tear(&error.to_string());
                self.failed = Some(error.kind());
                None
            }
        }
    }

    async fn try_next(&mut self) -> io::Result<Option<Frame>> {
        while !self.window.is_at_end() {
            match self.try_frame().await? {
                Ok((frame, bytes)) => {
                    self.window.at += bytes as u64;
                    self.accept(&frame, bytes as u64);
                    return Ok(Some(frame));
                }
                Err(why) => {
                    self.tear(&why);
                    self.window.at += 1;
                    self.window.find(frame::MAGIC).await?;
                }
            }
        }
        Ok(None)
    }

    /// Counts a frame that continues the valid ones, or notes that one before it is missing.
    fn accept(&mut self, frame: &Frame, bytes: u64) {
        let fits = frame.sequence == self.fitting && frame.previous == self.previous;
        match &mut self.torn {
            None if fits => {
                (self.fitting, self.previous) = (self.fitting + 1, frame.crc);
                self.fitting_bytes = self.window.at;
            }
            None => {
                let why = "the record before this one is missing".to_owned();
                self.torn = Some(Torn { at: self.window.at - bytes, why, frames_follow: true });
            }
            Some(torn) => torn.frames_follow = true,
        }
    }

    /// Notes the truncation or damage at which the valid frames end.
    fn tear(&mut self, why: &str) {
        let at = self.window.at;
        self.torn.get_or_insert_with(|| Torn { at, why: why.to_owned(), frames_follow: false });
    }

    async fn try_frame(&mut self) -> io::Result<Result<(Frame, usize), String>> {
        let Some(header) = self.window.bytes(frame::HEADER_BYTES as u64).await? else {
            return Ok(Err("file is truncated".to_owned()));
        };
        let total = match frame::total_bytes(&header) {
            Ok(total) => total,
            Err(why) => return Ok(Err(why)),
        };
        let Some(whole) = self.window.bytes(total as u64).await? else {
            return Ok(Err("file is truncated".to_owned()));
        };
        Ok(frame::decode(&whole).and_then(|frame| match frame.generation == self.generation {
            true => Ok((frame, total)),
            false => Err("record belongs to another file".to_owned()),
        }))
    }
}

/// A copy to be read, or a generation in the object store.
#[derive(Debug, Clone)]
pub(crate) struct LogCopy {
    /// Index of the directory, or `None` in the object store.
    pub(crate) directory: Option<usize>,
    pub(crate) path: PathBuf,
    pub(crate) generation: u64,
    /// Id of the epoch, or `None` in the object store or if the beginning of the copy is damaged.
    pub(crate) epoch: Option<u64>,
    /// Number of frames to read from the beginning, or [`u64::MAX`] for all that can be read.
    pub(crate) frames: u64,
    /// The open file, if this process writes it or it is in the object store. It can be read even
    /// after its name is removed.
    pub(crate) file: Option<Arc<dyn File>>,
}

/// The log at a moment: where it can be read, and which of its shuffles are living.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) places: LogSources,
    pub(crate) epoch: Epoch,
    pub(crate) filter: CheckpointFilter,
}

/// Copies from which the current contents of the log can be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogCopies {
    pub(crate) parts: Vec<LogCopy>,
    /// Shuffles whose records are from the object store, not the disks, if both have parts.
    pub(crate) shipped: Option<Treemap>,
}

impl LogCopies {
    /// Returns the order of the entries.
    pub(crate) fn order(&self) -> Order {
        match (&self.parts[..], &self.shipped) {
            ([only], None) if only.frames == u64::MAX => Order::Partial,
            ([_], None) => Order::Complete,
            _ => Order::None,
        }
    }

    /// Returns a reader of all entries, each once, in the order of the copy.
    pub(crate) fn read<'a>(&self, directories: &'a [Directory], deadline: Duration) -> SourceReader<'a> {
        SourceReader {
            directories,
            deadline,
            parts: self.parts.clone().into_iter(),
            open: None,
            seen: HashMap::new(),
            shipped: self.shipped.clone(),
            entry_bytes: 0,
            damage: None,
        }
    }

    /// Returns a reader of a source in the object store.
    pub(crate) fn read_stored(&self) -> SourceReader<'static> {
        self.read(&[], Duration::MAX)
    }
}

/// A generation, which counts its records from 0. A copy with a damaged beginning counts as a
/// generation of its own, and so does each part in the object store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Written {
    Known { epoch: u64, generation: u64 },
    Unknown { directory: Option<usize>, path: PathBuf },
}

impl Written {
    fn of(part: &LogCopy) -> Self {
        match part.epoch {
            Some(epoch) => Self::Known { epoch, generation: part.generation },
            None => Self::Unknown { directory: part.directory, path: part.path.clone() },
        }
    }
}

/// Reader of the entries of a source, see [`LogCopies::read`].
#[derive(Debug)]
pub(crate) struct SourceReader<'a> {
    directories: &'a [Directory],
    deadline: Duration,
    parts: std::vec::IntoIter<LogCopy>,
    open: Option<(LogCopy, CopyReader)>,
    /// Sequences seen by generation, because its copies have the same entries.
    seen: HashMap<Written, Treemap>,
    shipped: Option<Treemap>,
    /// Size of the last entry.
    pub(crate) entry_bytes: u64,
    /// Reason why entries are missing in the object store.
    pub(crate) damage: Option<String>,
}

impl SourceReader<'_> {
    /// Returns the next entry.
    ///
    /// # Errors
    /// A copy with a known number of frames cannot be read or has fewer (`InvalidData`), or the
    /// object store does not answer.
    pub(crate) async fn next(&mut self) -> io::Result<Option<FrameContent>> {
        loop {
            let Some((part, reader)) = &mut self.open else {
                let Some(part) = self.parts.next() else { return Ok(None) };
                match self.open(&part).await {
                    Ok(reader) => self.open = Some((part, reader)),
                    Err(error) if part.frames != u64::MAX => return Err(error),
                    Err(_) => {}
                }
                continue;
            };
            let is_over = reader.fitting >= part.frames;
            let before = reader.window.at;
            let frame = if is_over { None } else { reader.next().await };
            self.entry_bytes = reader.window.at - before;
            let Some(Frame { sequence, entry, .. }) = frame else {
                let ended = Self::ended(self.directories, part, reader);
                self.damage = self.damage.take().or(ended?);
                self.open = None;
                continue;
            };
            let is_elsewhere = |shuffle: &Incarnation| {
                let shipped = self.shipped.as_ref().map(|all| all.contains(shuffle.number));
                shipped.is_some_and(|is_shipped| is_shipped != part.directory.is_none())
            };
            let is_new = self.seen.entry(Written::of(part)).or_default().add_checked(sequence);
            if is_new && !matches!(&entry, FrameContent::Record(shuffle, _) if is_elsewhere(shuffle)) {
                return Ok(Some(entry));
            }
        }
    }

    async fn open(&self, part: &LogCopy) -> io::Result<CopyReader> {
        match (&part.file, part.directory.map(|at| &*self.directories[at].io)) {
            (Some(file), None) => {
                CopyReader::of(Arc::clone(file), part.generation, STORE_WINDOW_BYTES, Duration::MAX).await
            }
            (Some(file), Some(_)) => {
                CopyReader::of(Arc::clone(file), part.generation, WINDOW_BYTES, self.deadline).await
            }
            (None, Some(io)) => CopyReader::open(io, &part.path, part.generation, self.deadline).await,
            (None, None) => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Returns why a part in the object store lacks entries.
    ///
    /// # Errors
    /// The end of the part was not reached.
    fn ended(directories: &[Directory], part: &LogCopy, reader: &CopyReader) -> io::Result<Option<String>> {
        let path = match part.directory {
            Some(at) => directories[at].io.root().join(&part.path),
            None => Path::new("metadata log in the object store").join(&part.path),
        };
        let why = reader.torn.as_ref().map_or("file is too short", |torn| torn.why.as_str());
        let is_short = part.frames != u64::MAX && reader.fitting < part.frames;
        if is_short || (part.directory.is_none() && reader.failed.is_some()) {
            let kind = reader.failed.unwrap_or(io::ErrorKind::InvalidData);
            return Err(io::Error::new(kind, format!("{}: {why}", path.display())));
        }
        let torn = reader.torn.as_ref().filter(|_| part.directory.is_none());
        Ok(torn.map(|_| {
            format!("records of the {} are missing from number {} on: {why}", path.display(), reader.fitting)
        }))
    }
}

#[cfg(test)]
mod tests;
