//! Reading what the data directories have of the metadata log: lists, copies, and their frames one by one.
//!
//! Nothing that cannot be read is replaced by a default: it is told to the rule (`proof`) as damage.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use croaring::Treemap;
use futures::future::join_all;
use rustix::io::Errno;
use uuid::Uuid;

pub use super::frame::METADATA;
use super::frame::{self, Entry, Epoch, Frame, Gap, Incarnation};
use super::hand_off::HandOff;
use super::proof::{CopySeen, Judgement, Present, Torn, judge};
use super::resumable::{Resumable, resumable_copies};
use super::shipped::{ShippedLog, ShippedReader};
use uniffle_io::{Disk, File, ReadTarget};

/// Where the log can be read at a moment, by any of the sources; a generation that begins later removes them.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) sources: Vec<Source>,
    pub(super) directories: Vec<Directory>,
    pub(super) deadline: Duration,
}

/// The list of data directories.
pub(super) const MEMBERS: &str = "members";
/// The file of a copy, in a directory of its own, so that it gets its name and loses it at once.
const LOG: &str = "log";
/// The file beside it that says how much of it is acknowledged (`mark`).
pub(super) const MARK: &str = "acknowledged";
/// Bytes read at a time.
const WINDOW_BYTES: u64 = 1 << 20;

/// How a data directory is, as far as the log has to know.
pub trait Health: fmt::Debug + Send + Sync {
    /// None when it cannot be written; the least is the best.
    fn rank(&self) -> Option<u8>;
    /// An operation failed.
    fn failed(&self, error: &io::Error);
}

/// A data directory that is here.
#[derive(Debug, Clone)]
pub struct Directory {
    /// Its identity.
    pub uuid: Uuid,
    /// Its root, for messages.
    pub label: String,
    /// Its files.
    pub io: Arc<dyn Disk>,
    /// How it is; gone with the store, and then nothing is written any more.
    pub health: Weak<dyn Health>,
}

impl Directory {
    /// See [`Health::rank`].
    pub(super) fn rank(&self) -> Option<u8> {
        self.health.upgrade()?.rank()
    }
}

/// Directory of a copy.
pub(super) fn copy_directory(generation: u64, number: usize) -> PathBuf {
    Path::new(METADATA).join(format!("{generation}.{number}"))
}

/// File of a copy.
pub(super) fn copy_file(directory: &Path) -> PathBuf {
    directory.join(LOG)
}

/// Generation in the name of a copy's directory; none of one that was not finished.
pub(super) fn generation_of(name: &str) -> Option<u64> {
    let (generation, number) = name.split_once('.')?;
    number.parse::<usize>().ok()?;
    generation.parse().ok()
}

/// `TimedOut` when it takes too long. The operation itself may run on.
pub(super) async fn within<T>(
    deadline: Duration,
    operation: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let ended = crate::clock::timeout(deadline, operation).await;
    ended.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "disk timeout")))
}

/// What is known of all directories.
#[derive(Debug)]
pub struct Survey {
    pub(super) present: Vec<Present>,
    /// Files of the copies, as in `present`.
    files: Vec<Vec<PathBuf>>,
    /// The highest generation in a name, that of what was not finished included.
    pub(super) generation: u64,
    /// Record of the process before.
    hand_off: Option<HandOff>,
    /// The directories hold files of shuffles.
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

    /// The same with the record of the process before.
    #[must_use]
    pub fn with_hand_off(self, hand_off: Option<HandOff>) -> Self {
        Self { hand_off, ..self }
    }

    /// The same for directories that hold files of shuffles if `has_data`: without a log, these are incomplete.
    #[must_use]
    pub fn beside_data(self, has_data: bool) -> Self {
        Self { has_data, ..self }
    }

    /// What follows from it.
    pub(super) fn judged(&self) -> Judgement {
        let mut judged = judge(&self.present, self.hand_off.as_ref());
        if judged.is_fresh && self.has_data {
            let reason = "there are files of shuffles and no metadata log: unregister the shuffle or run its application again";
            judged.gap = Some(Gap { reason: reason.to_owned(), until_back: Vec::new() });
            judged.is_fresh = false;
        }
        judged
    }

    /// Returns whether there is neither a log nor a file of a shuffle.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.judged().is_fresh
    }

    /// Directories that did not answer, and how.
    pub(super) fn unread(&self) -> BTreeMap<usize, String> {
        let unread = self.present.iter().enumerate().filter(|(_, it)| it.is_unread);
        unread.map(|(at, it)| (at, it.damaged.join("; "))).collect()
    }

    /// Returns the copies to which a start may append.
    pub(super) fn resumable(&self, judged: &Judgement) -> Option<Resumable> {
        let places = resumable_copies(&self.present, judged, self.hand_off.as_ref())?;
        let (directory, copy) = *places.first()?;
        let file = |(directory, copy): &(usize, usize)| (*directory, self.files[*directory][*copy].clone());
        Some(Resumable::new(places.iter().map(file).collect(), &self.present[directory].copies[copy]))
    }

    /// The copies at these places, to be read as far as they fit; `whole` copies are read only up to where they stop.
    pub(super) fn source(&self, places: &[(usize, usize)], is_proven: bool) -> Source {
        let part = |(directory, copy): &(usize, usize)| {
            let seen = &self.present[*directory].copies[*copy];
            Part {
                directory: *directory,
                path: self.files[*directory][*copy].clone(),
                generation: seen.generation,
                epoch: seen.epoch,
                frames: if is_proven { seen.frames } else { u64::MAX },
                file: None,
            }
        };
        Source { parts: places.iter().map(part).collect(), shipped: None }
    }
}

/// What is known of one directory.
struct Seen {
    present: Present,
    files: Vec<PathBuf>,
    generation: u64,
}

async fn survey_one(directory: &Directory, deadline: Duration) -> Seen {
    let mut present = Present { uuid: directory.uuid, path: directory.label.clone(), ..Present::default() };
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
            if says_nothing(&error) {
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

/// Whether an error says nothing of a file's content, which may be intact: no permission, no answer, no descriptor. What
/// cannot be asked is not damaged, and must not be written over.
fn says_nothing(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    error.kind() == io::ErrorKind::TimedOut
        || matches!(
            errno,
            Some(Errno::ACCESS | Errno::PERM | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR)
        )
}

/// The newest epoch that a directory knows, whosever it is: by its list, or else by what its newest copy of the log begins with.
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
        if let Some(Frame { sequence: 0, entry: Entry::Epoch(epoch), .. }) = reader.next().await {
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
        Frame { generation, entry: Entry::Epoch(epoch), .. } => Ok(Some((generation, *epoch))),
        _ => Err(io::Error::other("not a list of data directories")),
    }
}

/// What stands beside a copy; nothing that can be read says nothing.
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
        Err(error) if says_nothing(&error) => return Err(error),
        Err(error) => {
            seen.torn = Some(Torn { at: 0, why: error.to_string(), frames_follow: false });
            return Ok((seen, None));
        }
    };
    let mut first = None;
    while let Some(frame) = reader.next().await {
        seen.newest = seen.newest.max((frame.sequence, u64::from(frame.batch)));
        if let (0, Entry::Epoch(epoch)) = (frame.sequence, frame.entry) {
            first = Some(*epoch);
        }
    }
    (seen.frames, seen.bytes, seen.crc) = (reader.fitting, reader.fitting_bytes, reader.previous);
    seen.torn = reader.torn;
    seen.epoch = first.as_ref().map(|epoch| epoch.id);
    Ok((seen, first))
}

/// Reads one copy from its beginning.
struct CopyReader {
    file: Arc<dyn File>,
    deadline: Duration,
    generation: u64,
    size: u64,
    /// Where `window` begins.
    start: u64,
    window: Bytes,
    at: u64,
    previous: u32,
    /// Frames that fit, from the beginning, and their bytes.
    fitting: u64,
    fitting_bytes: u64,
    torn: Option<Torn>,
}

impl CopyReader {
    async fn open(io: &dyn Disk, path: &Path, generation: u64, deadline: Duration) -> io::Result<Self> {
        Self::of(within(deadline, io.open_read(path)).await?, generation, deadline).await
    }

    async fn of(file: Arc<dyn File>, generation: u64, deadline: Duration) -> io::Result<Self> {
        let size = within(deadline, file.size()).await?;
        Ok(Self {
            file,
            deadline,
            generation,
            size,
            start: 0,
            window: Bytes::new(),
            at: 0,
            previous: 0,
            fitting: 0,
            fitting_bytes: 0,
            torn: None,
        })
    }

    /// The next frame whose own checksum fits, whatever is before it; `None` at the end.
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if self.at >= self.size {
                return None;
            }
            match self.try_frame().await {
                Ok(Ok((frame, bytes))) => {
                    self.at += bytes as u64;
                    self.accept(&frame, bytes as u64);
                    return Some(frame);
                }
                Ok(Err(why)) => {
                    self.tear(&why);
                    if !self.find().await {
                        return None;
                    }
                }
                Err(error) => {
                    self.tear(&error.to_string());
                    return None;
                }
            }
        }
    }

    /// Takes a frame of so many bytes, behind which it is now.
    fn accept(&mut self, frame: &Frame, bytes: u64) {
        let fits = frame.sequence == self.fitting && frame.previous == self.previous;
        match &mut self.torn {
            None if fits => {
                (self.fitting, self.previous) = (self.fitting + 1, frame.crc);
                self.fitting_bytes = self.at;
            }
            None => {
                let why = "a record before it is missing".to_owned();
                self.torn = Some(Torn { at: self.at - bytes, why, frames_follow: true });
            }
            Some(torn) => torn.frames_follow = true,
        }
    }

    fn tear(&mut self, why: &str) {
        let at = self.at;
        self.torn.get_or_insert_with(|| Torn { at, why: why.to_owned(), frames_follow: false });
    }

    async fn try_frame(&mut self) -> io::Result<Result<(Frame, usize), String>> {
        let Some(header) = self.bytes(frame::HEADER_BYTES as u64).await? else {
            return Ok(Err("file is truncated".to_owned()));
        };
        let total = match frame::total_bytes(&header) {
            Ok(total) => total,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let Some(whole) = self.bytes(total as u64).await? else {
            return Ok(Err("file is truncated".to_owned()));
        };
        let frame = frame::decode(&whole).map_err(|error| error.to_string());
        Ok(frame.and_then(|frame| match frame.generation == self.generation {
            true => Ok((frame, total)),
            false => Err("it belongs to another file".to_owned()),
        }))
    }

    /// Moves to the next place behind this one where a frame may begin; false when there is none.
    async fn find(&mut self) -> bool {
        self.at += 1;
        loop {
            let left = self.size.saturating_sub(self.at);
            if left < frame::HEADER_BYTES as u64 {
                return false;
            }
            let Ok(Some(window)) = self.bytes(left.min(WINDOW_BYTES)).await else { return false };
            match window.windows(frame::MAGIC.len()).position(|bytes| bytes == frame::MAGIC) {
                Some(skipped) => {
                    self.at += skipped as u64;
                    return true;
                }
                None => self.at += (window.len() + 1 - frame::MAGIC.len()) as u64,
            }
        }
    }

    /// The next `len` bytes, or `None` when the file ends before.
    async fn bytes(&mut self, len: u64) -> io::Result<Option<Bytes>> {
        if self.at.checked_add(len).is_none_or(|end| end > self.size) {
            return Ok(None);
        }
        if self.at < self.start || self.at + len > self.start + self.window.len() as u64 {
            let bytes = len.max(WINDOW_BYTES).min(self.size - self.at);
            let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
            let reading = self.file.read(ReadTarget::one(Box::new(vec![0; bytes]), 0..bytes, self.at));
            let target = within(self.deadline, async {
                let (target, result) = reading.await;
                result.map(|()| target)
            });
            self.window = target.await?.buffer.freeze(bytes);
            self.start = self.at;
        }
        let from = usize::try_from(self.at - self.start).map_err(io::Error::other)?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        Ok(Some(self.window.slice(from..from + len)))
    }
}

/// A copy that is to be read.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Index of the directory.
    pub(super) directory: usize,
    pub(super) path: PathBuf,
    pub(super) generation: u64,
    /// None where the beginning of the copy is damaged.
    pub(super) epoch: Option<u64>,
    /// So many frames from the beginning; all that can be read if it is [`u64::MAX`].
    pub(super) frames: u64,
    /// The open file, if this process writes it: it can be read when its name is gone.
    pub(super) file: Option<Arc<dyn File>>,
}

/// The log at a moment: where it can be read, and which of its shuffles live.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) places: Places,
    pub(super) epoch: Epoch,
    pub(super) purged: Treemap,
    pub(super) incomplete: Vec<(Incarnation, Gap)>,
    pub(super) moved: Vec<Incarnation>,
}

/// Where the present contents of the log can be read.
#[derive(Debug, Clone, Default)]
pub(super) struct Source {
    pub(super) parts: Vec<Part>,
    /// The log in the object store, if it is needed, and the shuffles of which its records count, and not those of the parts.
    pub(super) shipped: Option<(Arc<ShippedLog>, Treemap)>,
}

impl Source {
    /// All entries but the epochs, each once; in the order of the copy.
    pub(super) fn read<'a>(&self, directories: &'a [Directory], deadline: Duration) -> SourceReader<'a> {
        let parts = self.parts.clone().into_iter();
        let shipped = self.shipped.as_ref().map(|(log, from_it)| (log.reader(), from_it.clone()));
        SourceReader {
            directories,
            deadline,
            parts,
            open: None,
            seen: HashMap::new(),
            shipped,
            entry_bytes: 0,
        }
    }
}

/// A generation: each counts its records from 0. A copy whose beginning is damaged is taken for one of its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Written {
    Known { epoch: u64, generation: u64 },
    Unknown { directory: usize, path: PathBuf },
}

impl Written {
    fn of(part: &Part) -> Self {
        match part.epoch {
            Some(epoch) => Self::Known { epoch, generation: part.generation },
            None => Self::Unknown { directory: part.directory, path: part.path.clone() },
        }
    }
}

/// See [`Source::read`].
pub(super) struct SourceReader<'a> {
    directories: &'a [Directory],
    deadline: Duration,
    parts: std::vec::IntoIter<Part>,
    open: Option<(Part, CopyReader)>,
    /// Sequences by generation: its copies say the same.
    seen: HashMap<Written, Treemap>,
    shipped: Option<(ShippedReader, Treemap)>,
    /// Of the entry that was read last.
    entry_bytes: u64,
}

impl SourceReader<'_> {
    /// Bytes of the entry that was read last.
    pub(super) fn entry_bytes(&self) -> u64 {
        self.entry_bytes
    }

    /// The next entry.
    ///
    /// # Errors
    /// A copy of which a number of frames is wanted has less, or cannot be read.
    pub(super) async fn next(&mut self) -> io::Result<Option<Entry>> {
        while let Some(entry) = self.next_of_parts().await? {
            if !matches!(&entry, Entry::Said(shuffle, _) if self.is_shipped(shuffle)) {
                return Ok(Some(entry));
            }
        }
        loop {
            let Some((reader, _)) = &mut self.shipped else { return Ok(None) };
            let next = reader.next().await.map_err(|error| io::Error::new(error.kind, error.to_string()))?;
            let Some((entry, bytes)) = next else { return Ok(None) };
            self.entry_bytes = bytes;
            match &entry {
                Entry::Epoch(_) | Entry::Begun => {}
                Entry::Said(shuffle, _) if !self.is_shipped(shuffle) => {}
                Entry::Said(..) | Entry::Purged(_) | Entry::Incomplete(..) | Entry::Moved(_) => {
                    return Ok(Some(entry));
                }
            }
        }
    }

    fn is_shipped(&self, shuffle: &Incarnation) -> bool {
        self.shipped.as_ref().is_some_and(|(_, from_it)| from_it.contains(shuffle.number))
    }

    async fn next_of_parts(&mut self) -> io::Result<Option<Entry>> {
        loop {
            let Some((part, reader)) = &mut self.open else {
                let Some(part) = self.parts.next() else { return Ok(None) };
                let directory = &self.directories[part.directory];
                let opened = match &part.file {
                    Some(file) => CopyReader::of(Arc::clone(file), part.generation, self.deadline).await,
                    None => {
                        CopyReader::open(&*directory.io, &part.path, part.generation, self.deadline).await
                    }
                };
                match opened {
                    Ok(reader) => self.open = Some((part, reader)),
                    Err(error) if part.frames != u64::MAX => return Err(error),
                    Err(_) => {}
                }
                continue;
            };
            let is_over = reader.fitting >= part.frames;
            let before = reader.at;
            let frame = if is_over { None } else { reader.next().await };
            self.entry_bytes = reader.at - before;
            let Some(frame) = frame else {
                if part.frames != u64::MAX && reader.fitting < part.frames {
                    let why = reader.torn.as_ref().map_or("file is too short", |torn| torn.why.as_str());
                    return Err(io::Error::other(format!("{}: {why}", part.path.display())));
                }
                self.open = None;
                continue;
            };
            let is_new = self.seen.entry(Written::of(part)).or_default().add_checked(frame.sequence);
            if is_new && !matches!(frame.entry, Entry::Epoch(_)) {
                return Ok(Some(frame.entry));
            }
        }
    }
}

#[cfg(test)]
mod tests;
