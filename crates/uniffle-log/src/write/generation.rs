//! Compaction of the metadata log: begins a generation with all living entries, in new files of the
//! best directories.
//!
//! Dead entries are left out. A start that cannot resume the copies, and a failed copy, begin a
//! generation too. Each generation is written under a temporary name and renamed. Once a copy has
//! its final name, nothing is acknowledged in an earlier generation. The other directories learn
//! its location from a new epoch.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use rand::RngExt as _;

use super::checkpoint::{Checkpoint, CheckpointSink};
use super::writer::{Copy, MetadataWriter};
use crate::LogError;
use crate::format::frame::{
    Encoder, Epoch, FrameContent, Gap, LINEAGE_AWAY_MAX, LINEAGE_MAX, METADATA, Member,
};
use crate::recovery::proof::members_after;
use crate::recovery::read::{LogCopies, LogCopy, MEMBERS, copy_directory, copy_file, generation_of};
use crate::recovery::resumable::ResumableCopy;
use crate::window::within;
use uniffle_io::{Disk, File, IoClass, Vanished, WriteOpen};

/// Number of copies of the log.
pub(crate) const COPIES: usize = 2;
/// Time for which a failed directory gets no copy, unless there are too few others.
const AVOIDED_FOR: Duration = Duration::from_secs(60);
/// Deadline for the removal of earlier generations, because nothing is acknowledged meanwhile.
/// Remaining ones are harmless.
const REMOVAL_WAIT: Duration = Duration::from_secs(1);

impl MetadataWriter {
    /// Opens the copies that the previous process handed off, to append to them. Returns false if a
    /// new generation has to begin instead.
    pub(crate) async fn resume(&mut self) -> bool {
        let Some(resumable) = self.resumable.take() else { return false };
        let directories: Vec<usize> = resumable.copies.iter().map(|it| it.directory).collect();
        let all: BTreeSet<usize> = (0..self.directories.len()).collect();
        // A disk may have stopped accepting writes, and a new generation would not use it.
        let is_the_same = self.places(&BTreeSet::new()) == directories && self.usable_now() == all;
        if self.is_blind || !is_the_same {
            return false;
        }
        let opened = resumable.copies.iter().map(|ResumableCopy { directory, path }| {
            let io = &*self.directories[*directory].io;
            within(self.deadlines.name, open_copy(io, path, resumable.bytes))
        });
        let opened = join_all(opened.collect::<Vec<_>>()).await;
        let mut copies = Vec::new();
        for (ResumableCopy { directory, path }, file) in resumable.copies.iter().zip(opened) {
            match file {
                Ok(file) => {
                    let (directory, path) = (*directory, path.clone());
                    copies.push(Copy { directory, generation: self.generation, path, file });
                }
                Err(error) => {
                    self.note_failure(*directory, path, &error);
                    return false;
                }
            }
        }
        (self.encoder, self.end, self.spare) = (resumable.encoder, resumable.bytes, None);
        self.opened(copies, all);
        tracing::debug!(generation = self.generation, "metadata log resumed");
        true
    }

    pub(super) fn has_changed(&self) -> bool {
        self.usable_now() != self.usable
    }

    pub(crate) fn usable_now(&self) -> BTreeSet<usize> {
        self.usable(&BTreeSet::new()).collect()
    }

    pub(crate) fn held(&self) -> Vec<usize> {
        self.copies.iter().map(|copy| copy.directory).collect()
    }

    fn usable<'a>(&'a self, excluded: &'a BTreeSet<usize>) -> impl Iterator<Item = usize> + 'a {
        let all = (0..self.directories.len()).filter(|at| !self.unread.contains_key(at));
        all.filter(|at| !excluded.contains(at) && self.directories[*at].rank().is_some())
    }

    /// Returns the directories that should have the copies. Current holders are preferred among
    /// equals.
    pub(crate) fn places(&self, excluded: &BTreeSet<usize>) -> Vec<usize> {
        let held = self.held();
        let is_avoided = |at: usize| self.avoided[at].is_some_and(|since| since.elapsed() < AVOIDED_FOR);
        let mut all: Vec<usize> = self.usable(excluded).collect();
        all.sort_by_key(|at| (is_avoided(*at), self.directories[*at].rank(), !held.contains(at), *at));
        all.truncate(COPIES);
        if let ([only], true) = (&all[..], COPIES > 1) {
            all.push(*only);
        }
        // In the order of the held copies, so that two lists of the same places are equal.
        all.sort_unstable();
        all
    }

    /// Begins a generation on the best directories. A directory that fails is added to `excluded`,
    /// and the attempt is repeated without it.
    pub(crate) async fn begin(&mut self, excluded: &mut BTreeSet<usize>) -> Result<(), LogError> {
        let (mut last_error, mut damaged) = (None, Vec::new());
        self.resumable = None;
        loop {
            let places = self.places(excluded);
            if places.is_empty() {
                let nothing = || match self.unread.values().next() {
                    Some(unread) => {
                        LogError::other(&format!("{unread}; nothing is acknowledged until it is readable"))
                    }
                    None => LogError::other("no data directory is writable"),
                };
                return Err(last_error.unwrap_or_else(nothing));
            }
            let usable: BTreeSet<usize> = self.usable(excluded).collect();
            let directories = usable.iter().map(|at| &self.directories[*at]);
            let voters: Vec<_> = directories.map(|it| Member::new(it.uuid, &it.label)).collect();
            let members = members_after(&self.epoch, &voters).map_err(|text| LogError::other(&text))?;
            let is_whole = members.len() == usable.len();
            let epoch = self.next_epoch(members, &places, is_whole);
            self.generation += 1;
            match Box::pin(self.write_generation(&epoch, &places, &usable)).await {
                Ok(copies) => {
                    self.commit(epoch, copies, usable).await;
                    return Ok(());
                }
                Err(GenerationError::At { directory, error, may_be_known }) => {
                    excluded.insert(directory);
                    last_error = Some(error);
                    if may_be_known && epoch.id != self.epoch.id {
                        // A directory that has seen the epoch may return.
                        self.epoch.lineage.push(epoch.id);
                    }
                    // Once the new generation may have its final name, nothing may be appended to
                    // the current one.
                    self.is_open &= !may_be_known;
                }
                Err(GenerationError::Source(error)) => self.change_source(&mut damaged, error)?,
            }
        }
    }

    /// Replaces a source that cannot be read by another one, or by the readable parts of all. Adds
    /// the parts of the former source to `damaged`.
    fn change_source(&mut self, damaged: &mut Vec<LogCopy>, error: LogError) -> Result<(), LogError> {
        damaged.append(&mut self.source.parts.clone());
        match self.others.pop() {
            Some(other) => {
                tracing::warn!(%error, "cannot read a copy of the metadata log; reading another one");
                self.source = other;
            }
            None if self.can_salvage(&error) => self.salvage(std::mem::take(damaged), &error),
            None => return Err(error),
        }
        Ok(())
    }

    /// Returns whether another program has damaged all copies of the log that this process wrote.
    fn can_salvage(&self, error: &LogError) -> bool {
        error.kind == io::ErrorKind::InvalidData && self.is_begun.load(Ordering::Acquire)
    }

    /// Continues with the readable records of damaged copies. Others are lost, so living shuffles
    /// are incomplete for the next start. This process still knows all of their records.
    fn salvage(&mut self, damaged: Vec<LogCopy>, error: &LogError) {
        tracing::error!(
            %error,
            "another program damaged all copies of the metadata log; after the next start or upgrade, results of \
             the present shuffles are refused"
        );
        let reason = format!("the metadata log was damaged while it was in use: {error}");
        self.damage.send_replace(Some(reason.as_str().into()));
        let living = self.contents.living();
        self.damaged.extend(living.iter().map(|shuffle| shuffle.number));
        let gap = Gap { reason, until_returned: Vec::new() };
        self.contents.mark_incomplete(&living, &gap);
        self.epoch.gap.get_or_insert(gap);
        // The directories learn of the gap by a new epoch.
        self.is_open = false;
        let all = damaged.into_iter().map(|part| LogCopy { frames: u64::MAX, ..part });
        self.source = LogCopies { parts: all.collect(), shipped: None };
    }

    /// Ends the gap by a new epoch, unless a directory that may have newer metadata is away or
    /// unreadable. Shuffles in the log stay incomplete. Returns whether there is no gap any more.
    pub(crate) async fn end_gap(&mut self) -> Result<bool, LogError> {
        let is_awaited = |member: &Member| {
            let until_returned = self.epoch.gap.as_ref().map(|gap| &gap.until_returned);
            let ends_it = until_returned.is_some_and(|all| all.contains(member.uuid().as_bytes()));
            self.is_away(member) && (member.may_recover_alone || member.votes && ends_it)
        };
        let may_return = !self.unread.is_empty() || self.epoch.members.iter().any(is_awaited);
        if !self.is_open || may_return {
            return Ok(false);
        }
        let Some(gap) = self.epoch.gap.take() else { return Ok(true) };
        // The directories learn of the end by a new epoch.
        self.is_open = false;
        let begun = self.begin(&mut BTreeSet::new()).await;
        if begun.is_err() {
            self.epoch.gap = Some(gap);
        }
        begun.map(|()| true)
    }

    fn next_epoch(&mut self, members: Vec<Member>, places: &[usize], is_whole: bool) -> Epoch {
        let holders: Vec<_> = places.iter().map(|at| self.directories[*at].uuid.into_bytes()).collect();
        // An absent directory may know any of these epochs. They are compared when it returns.
        let remembered = if is_whole { LINEAGE_MAX } else { LINEAGE_AWAY_MAX };
        let is_the_same = self.is_open && members == self.epoch.members && holders == self.epoch.holders;
        let id = if is_the_same { self.epoch.id } else { rand::rng().random_range(1..=u64::MAX) };
        let next = if is_the_same { self.epoch.clone() } else { self.epoch.next(id, remembered) };
        let blind_starts = next.blind_starts + u32::from(std::mem::take(&mut self.is_blind));
        Epoch { members, holders, blind_starts, next_incarnation: self.contents.next_incarnation, ..next }
    }

    /// Writes all living entries to files of a new generation, renames them, and informs the other
    /// directories.
    async fn write_generation(
        &mut self,
        epoch: &Epoch,
        places: &[usize],
        usable: &BTreeSet<usize>,
    ) -> Result<Vec<Copy>, GenerationError> {
        let mut copies: Vec<Copy> = Vec::new();
        for (number, at) in places.iter().enumerate() {
            let directory = unfinished(&copy_directory(self.generation, number));
            let path = copy_file(&directory);
            let file =
                self.create(*at, &directory, &path).await.map_err(|error| self.fail(*at, &path, &error))?;
            copies.push(Copy { directory: *at, generation: self.generation, path, file });
        }
        let spare = self.create_spare(places[0], self.contents.living_bytes).await;
        let (source, directories, deadline) =
            (self.source.clone(), self.directories.clone(), self.deadlines.name);
        let (generation, contents) = (self.generation, self.contents.next());
        let filter = self.contents.filter(source.order());
        let sink = CopySink { writer: self, copies: &copies, spare, end: 0 };
        let mut checkpoint = Checkpoint::new(generation, contents, sink);
        checkpoint.put(&FrameContent::Epoch(Box::new(epoch.clone()))).await?;
        checkpoint.copy(filter, &mut source.read(&directories, deadline)).await?;
        checkpoint.flush().await?;
        let Checkpoint { encoder, contents, sink: CopySink { end, spare, .. }, .. } = checkpoint;
        let writer = &*self;
        let finishing = copies.iter().enumerate().map(|(number, copy)| async move {
            let directory = copy_directory(generation, number);
            let file = writer.finish(copy, &directory, end).await?;
            Ok((copy_file(&directory), file))
        });
        // Finished together, because a start waits for their syncs.
        let finished: Vec<io::Result<_>> = join_all(finishing.collect::<Vec<_>>()).await;
        for (copy, finished) in copies.iter_mut().zip(finished) {
            match finished {
                Ok((path, file)) => (copy.path, copy.file) = (path, file),
                Err(error) => return Err(self.fail(copy.directory, &copy.path, &error).known()),
            }
        }
        let is_known = self.is_open && epoch.id == self.epoch.id;
        let list = self.list(epoch);
        let targets: Vec<usize> = if is_known { Vec::new() } else { usable.iter().copied().collect() };
        let writes = targets.iter().map(|at| self.write_members(*at, list.clone()));
        let results = join_all(writes.collect::<Vec<_>>()).await;
        for (at, result) in targets.into_iter().zip(results) {
            result.map_err(|error| self.fail(at, &Path::new(METADATA).join(MEMBERS), &error).known())?;
        }
        (self.encoder, self.end, self.spare) = (encoder, end, spare);
        self.contents.replace_with(contents);
        Ok(copies)
    }

    fn fail(&mut self, at: usize, path: &Path, error: &io::Error) -> GenerationError {
        self.note_failure(at, path, error);
        let error = LogError::new(self.directories[at].io.root().join(path), error);
        GenerationError::At { directory: at, error, may_be_known: false }
    }

    async fn create(&self, at: usize, directory: &Path, path: &Path) -> io::Result<Arc<dyn File>> {
        let io = &self.directories[at].io;
        within(self.deadlines.name, async {
            io.create_dir_all(directory).await?;
            io.open_write(path, WriteOpen { create: true, class: IoClass::Metadata, ..WriteOpen::default() })
                .await
        })
        .await
    }

    /// Syncs a copy of `bytes` bytes and renames it. Returns the file opened by its final name,
    /// where a start looks for it.
    async fn finish(&self, copy: &Copy, directory: &Path, bytes: u64) -> io::Result<Arc<dyn File>> {
        let io = &self.directories[copy.directory].io;
        within(self.deadlines.write, copy.file.sync()).await?;
        within(self.deadlines.name, async {
            let unfinished = unfinished(directory);
            io.sync_dir(&unfinished).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.rename(&unfinished, directory).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.sync_dir(Path::new("")).await?;
            open_copy(&**io, &copy_file(directory), bytes).await
        })
        .await
    }

    fn list(&self, epoch: &Epoch) -> Vec<u8> {
        let (mut out, mut encoder) = (BytesMut::new(), Encoder::new(self.generation));
        let fits = encoder.encode(&FrameContent::Epoch(Box::new(epoch.clone())), 0, &mut out);
        debug_assert!(fits, "an epoch fits into a frame");
        out.to_vec()
    }

    async fn write_members(&self, at: usize, list: Vec<u8>) -> io::Result<()> {
        let io = &self.directories[at].io;
        let path = Path::new(METADATA).join(MEMBERS);
        let temporary = unfinished(&path);
        within(self.deadlines.name, async {
            io.create_dir_all(Path::new(METADATA)).await?;
            io.write_small(&temporary, list).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.rename(&temporary, &path).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.sync_dir(Path::new("")).await
        })
        .await
    }

    async fn commit(&mut self, epoch: Epoch, copies: Vec<Copy>, usable: BTreeSet<usize>) {
        tracing::debug!(generation = self.generation, copies = ?copies, "started the metadata log");
        if let Some(shipper) = self.shipper.as_ref().filter(|_| epoch.id != self.epoch.id) {
            shipper.add([FrameContent::Epoch(Box::new(epoch.clone()))]);
        }
        self.epoch = epoch;
        self.shipped = None;
        self.opened(copies, usable);
        let cleaning = self.usable.iter().map(|at| self.remove_earlier(*at));
        join_all(cleaning.collect::<Vec<_>>()).await;
    }

    /// Makes `copies` the destination of later entries.
    pub(crate) fn opened(&mut self, copies: Vec<Copy>, usable: BTreeSet<usize>) {
        (self.copies, self.usable, self.is_open) = (copies, usable, true);
        self.is_begun.store(true, Ordering::Release);
        self.read_from_copies();
    }

    /// Removes earlier generations and unfinished files. The next generation removes the remaining
    /// ones.
    async fn remove_earlier(&self, at: usize) {
        let io = &self.directories[at].io;
        let removing = async {
            for name in io.list(Path::new(METADATA)).await? {
                let is_old = match generation_of(&name) {
                    Some(generation) => generation < self.generation,
                    None => name.ends_with(UNFINISHED),
                };
                if is_old && name != MEMBERS && name.contains('.') && !name.starts_with(MEMBERS) {
                    io.remove_dir_all(&Path::new(METADATA).join(name)).await?;
                }
            }
            Ok(())
        };
        if let Err(error) = within(REMOVAL_WAIT, removing).await {
            tracing::debug!(
                disk = %self.directories[at].label,
                %error,
                "cannot delete earlier copies of the metadata log"
            );
        }
    }
}

/// Opens a copy of `bytes` bytes to append to it. Fails with [`Vanished::File`] if another program
/// has changed its length.
pub(crate) async fn open_copy(io: &dyn Disk, path: &Path, bytes: u64) -> io::Result<Arc<dyn File>> {
    let how = WriteOpen { class: IoClass::Metadata, is_named: true, ..WriteOpen::default() };
    let file = io.open_write(path, how).await?;
    if file.size().await? == bytes { Ok(file) } else { Err(Vanished::File.into()) }
}

/// The copies of a generation on the disks, which are written together.
struct CopySink<'a> {
    writer: &'a mut MetadataWriter,
    copies: &'a [Copy],
    /// The unnamed copy, until a write to it fails.
    spare: Option<Copy>,
    /// Length of each copy in bytes.
    end: u64,
}

impl CheckpointSink for CopySink<'_> {
    type Error = GenerationError;

    async fn write(&mut self, chunk: Bytes, _: Range<u64>) -> Result<(), GenerationError> {
        let (end, deadline) = (self.end, self.writer.deadlines.write);
        let writes = self.copies.iter().map(|copy| {
            let writing = copy.file.write_at(vec![chunk.clone()], end);
            within(deadline, writing)
        });
        let results = join_all(writes.collect::<Vec<_>>()).await;
        for (copy, result) in self.copies.iter().zip(results) {
            result.map_err(|error| self.writer.fail(copy.directory, &copy.path, &error))?;
        }
        self.end += chunk.len() as u64;
        if let Some(spare) = self.spare.take() {
            self.spare = MetadataWriter::append_to_spare(spare, chunk, end, deadline).await;
        }
        Ok(())
    }
}

/// Reason why a generation was not written.
enum GenerationError {
    /// A directory failed.
    At {
        directory: usize,
        error: LogError,
        /// True if a directory may know the epoch.
        may_be_known: bool,
    },
    /// The source of the entries cannot be read.
    Source(LogError),
}

impl From<LogError> for GenerationError {
    fn from(error: LogError) -> Self {
        Self::Source(error)
    }
}

impl GenerationError {
    fn known(self) -> Self {
        match self {
            Self::At { directory, error, .. } => Self::At { directory, error, may_be_known: true },
            Self::Source(_) => self,
        }
    }
}

/// Suffix of unfinished files.
const UNFINISHED: &str = ".new";

pub(super) fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(UNFINISHED);
    name.into()
}
