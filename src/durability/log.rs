//! The worker's metadata log: what shuffles said and must not be forgotten, in two copies.
//!
//! An entry is acknowledged once it is on the device in both copies, on two directories where two can be written. One task
//! writes: it takes all entries that wait, appends them to both copies with one sync each, and answers all. A copy that
//! fails or is late is given up: what there is is written once more, to the best directories, as a new *generation* under
//! a new epoch that the other directories learn, and only then goes it on. A generation is written beside and renamed; once
//! one has its name, nothing is acknowledged in an earlier one any more.
//!
//! What is dead (shuffles that were purged) is left out of the next generation, which is begun when it is the larger part.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use croaring::Treemap;
use futures::future::join_all;
use rand::RngExt as _;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use uuid::Uuid;

use super::frame::{Encoder, Entry, Epoch, Gap, Incarnation, Member};
use super::legacy::{LIST, Legacy};
use super::mark::{MARK_PAUSE, Marks};
use super::proof::{Judgement, judge, members_after};
use super::read::{
    Directory, MEMBERS, METADATA, Part, Source, Survey, copy_directory, copy_file, generation_of, within,
};
use crate::runtime::Tasks;
use uniffle_io::{File, Lane, WriteOpen};
use uniffle_wire::types::ShuffleKey;

/// Copies of the log.
const COPIES: usize = 2;
/// Entries that wait. Each stands for a request, of which listeners bound number and bytes.
const WAITING_MAX: usize = 4096;
/// Entries written together.
const BATCH_MAX: usize = 1024;
/// Bytes encoded before they are written, when a generation begins.
const CHUNK_BYTES: usize = 1 << 20;
/// A directory that failed gets no copy for so long, unless there is no other.
const AVOIDED_FOR: Duration = Duration::from_secs(60);
/// Nothing is acknowledged while earlier generations are removed; they are in nobody's way.
const REMOVAL_WAIT: Duration = Duration::from_secs(1);
/// Less dead than this is not worth a new generation.
const DEAD_BYTES_MIN: u64 = 8 << 20;

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// One write with its sync.
    pub write: Duration,
    /// Anything else.
    pub name: Duration,
}

/// Why nothing was written.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub struct LogError {
    /// Directory or file concerned.
    pub path: PathBuf,
    /// What kind of failure it was.
    pub kind: io::ErrorKind,
    text: String,
}

impl LogError {
    fn new(path: impl AsRef<Path>, error: &io::Error) -> Self {
        Self { path: path.as_ref().to_path_buf(), kind: error.kind(), text: error.to_string() }
    }

    fn told(text: &str) -> Self {
        Self { path: METADATA.into(), kind: io::ErrorKind::Other, text: text.to_owned() }
    }
}

/// What was found of a shuffle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundShuffle {
    /// Its incarnation.
    pub incarnation: u64,
    /// What it said.
    pub said: Vec<Bytes>,
    /// Why something that it said may be missing.
    pub incomplete: Option<String>,
}

/// What an earlier process left.
#[derive(Debug, Default)]
pub struct Found {
    /// Shuffles that were not purged.
    pub shuffles: BTreeMap<ShuffleKey, FoundShuffle>,
    /// Directories that are not here and may have data of them.
    pub absent: Vec<(Uuid, String)>,
    /// Why there may be shuffles that are not known, now or from an earlier start on.
    pub gap: Option<String>,
    /// Whether this start found it out.
    pub has_new_gap: bool,
    /// Starts before that could not see everything.
    pub blind_starts: u32,
    /// Greater than any incarnation that the log knows.
    pub next_incarnation: u64,
}

enum Request {
    Append(Entry, oneshot::Sender<Result<(), LogError>>),
    /// Look whether the copies are where they should be.
    Settle(oneshot::Sender<()>),
    /// This start could not see everything.
    Blind(oneshot::Sender<()>),
}

/// The log; clones share it. It ends with the last of them.
#[derive(Debug, Clone)]
pub struct MetadataLog {
    requests: mpsc::Sender<Request>,
    gap: Option<Arc<str>>,
}

impl MetadataLog {
    /// Takes over what the directories have, by the rule (`proof`), and begins a new epoch on them. `legacy` is what was
    /// found in the format of earlier versions, where no log is. A log that cannot be begun now is tried again with every
    /// entry, which is refused until then.
    pub async fn open(
        directories: Vec<Directory>,
        survey: Survey,
        legacy: Option<Legacy>,
        deadlines: Deadlines,
        tasks: &Tasks,
    ) -> (Self, Found) {
        let mut judged = match &legacy {
            Some(legacy) => legacy.judged(),
            None => judge(&survey.present),
        };
        judged.generation = judged.generation.max(survey.generation);
        if let Some(gap) = &judged.gap {
            tracing::error!(
                reason = gap.reason,
                "what was acknowledged is not proven complete: results of all shuffles there are, and of unknown ones, \
                 are refused"
            );
        }
        let source = survey.source(&judged.sources, judged.gap.is_none());
        let unread = survey.unread();
        for reason in unread.values() {
            tracing::error!(reason, "a data directory has no part in the metadata log until the next start");
        }
        let mut writer = Writer { unread, ..Writer::new(directories, deadlines, judged.clone(), source) };
        let found = writer.take_over(&judged, legacy).await;
        if let Err(error) = writer.begin(&mut BTreeSet::new()).await {
            tracing::error!(%error, "the metadata log cannot be written: nothing new is acknowledged until it can");
        }
        let gap = found.gap.as_deref().map(Arc::from);
        let (requests, receiver) = mpsc::channel(WAITING_MAX);
        let cancelled = tasks.cancelled();
        tasks.spawn("metadata log", async move {
            tokio::select! {
                biased;
                () = cancelled => {}
                () = writer.run(receiver) => {}
            }
        });
        (Self { requests, gap }, found)
    }

    /// Why it is not known which shuffles there were.
    #[must_use]
    pub fn gap(&self) -> Option<Arc<str>> {
        self.gap.clone()
    }

    /// Appends what a shuffle said: when this returns `Ok` it outlives process and power. Goes on when it is dropped.
    ///
    /// # Errors
    /// Too few directories can be written, or it is too long.
    pub async fn append(&self, shuffle: Incarnation, said: Bytes) -> Result<(), LogError> {
        self.ask(Entry::Said(shuffle, said)).await
    }

    /// Forgets a shuffle, whose files may be removed from then on.
    ///
    /// # Errors
    /// As [`MetadataLog::append`].
    pub async fn purge(&self, shuffle: Incarnation) -> Result<(), LogError> {
        self.ask(Entry::Purged(shuffle)).await
    }

    /// Brings the copies to where they should be as the directories are now.
    pub async fn settle(&self) {
        let (done, settled) = oneshot::channel();
        if self.requests.send(Request::Settle(done)).await.is_ok() {
            // An error, too, means that it is done.
            let _: Result<(), _> = settled.await;
        }
    }

    /// This start could not see everything: what it numbers is not to be numbered so by others.
    pub async fn count_blind_start(&self) {
        let (done, counted) = oneshot::channel();
        if self.requests.send(Request::Blind(done)).await.is_ok() {
            let _: Result<(), _> = counted.await;
        }
    }

    async fn ask(&self, entry: Entry) -> Result<(), LogError> {
        let (done, answer) = oneshot::channel();
        let ended = || LogError::told("the worker ends");
        self.requests.send(Request::Append(entry, done)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

/// A copy that is written.
#[derive(Debug, Clone)]
struct Copy {
    directory: usize,
    generation: u64,
    path: PathBuf,
    file: Arc<dyn File>,
}

/// What the log holds.
#[derive(Debug, Default)]
struct Contents {
    /// Bytes of living shuffles, by incarnation.
    living: HashMap<u64, u64>,
    living_bytes: u64,
    dead_bytes: u64,
    /// Shuffles that are gone.
    purged: Treemap,
    incomplete: HashMap<u64, (Incarnation, Gap)>,
    next_incarnation: u64,
}

impl Contents {
    fn is_purged(&self, incarnation: u64) -> bool {
        self.purged.contains(incarnation)
    }

    /// An entry of so many bytes is in the log.
    fn took(&mut self, entry: &Entry, bytes: u64) {
        let Some(shuffle) = entry.shuffle() else { return };
        self.next_incarnation = self.next_incarnation.max(shuffle.number.saturating_add(1));
        match entry {
            Entry::Said(..) | Entry::Incomplete(..) if !self.is_purged(shuffle.number) => {
                *self.living.entry(shuffle.number).or_default() += bytes;
                self.living_bytes += bytes;
            }
            Entry::Purged(_) => {
                self.purged.add(shuffle.number);
                self.incomplete.remove(&shuffle.number);
                let freed = self.living.remove(&shuffle.number).unwrap_or(0);
                self.living_bytes -= freed;
                self.dead_bytes += freed + bytes;
            }
            Entry::Epoch(_) | Entry::Said(..) | Entry::Incomplete(..) => self.dead_bytes += bytes,
        }
    }

    /// Nothing is in the generation that begins.
    fn begin(&mut self) {
        self.living.clear();
        (self.living_bytes, self.dead_bytes) = (0, 0);
    }
}

/// The one who writes.
struct Writer {
    directories: Vec<Directory>,
    deadlines: Deadlines,
    epoch: Epoch,
    generation: u64,
    contents: Contents,
    /// Empty, or of a generation that nothing may be appended to any more: a new one has to begin.
    copies: Vec<Copy>,
    is_open: bool,
    encoder: Encoder,
    /// Bytes of the copies that hold frames.
    end: u64,
    /// Where all of it can be read ...
    source: Source,
    /// ... or else here.
    others: Vec<Source>,
    /// Taken over from the format of earlier versions, until it is written.
    legacy: Vec<Entry>,
    avoided: Vec<Option<Instant>>,
    /// Directories whose metadata could not be read at the start, and why: written over, what they know would be gone.
    unread: BTreeMap<usize, String>,
    /// Directories that could be written when the epoch began.
    usable: BTreeSet<usize>,
    is_blind: bool,
    marks: Marks,
}

impl Writer {
    fn new(directories: Vec<Directory>, deadlines: Deadlines, judged: Judgement, source: Source) -> Self {
        let gap = judged.carried(judged.epoch.gap.as_ref());
        let generation = judged.generation;
        let epoch = Epoch { gap, ..judged.epoch };
        let contents = Contents { next_incarnation: epoch.next_incarnation, ..Contents::default() };
        let avoided = vec![None; directories.len()];
        Self {
            directories,
            deadlines,
            epoch,
            generation,
            contents,
            copies: Vec::new(),
            is_open: false,
            encoder: Encoder::new(generation),
            end: 0,
            source,
            others: Vec::new(),
            legacy: Vec::new(),
            avoided,
            unread: BTreeMap::new(),
            usable: BTreeSet::new(),
            is_blind: false,
            marks: Marks::default(),
        }
    }

    /// Reads all there is.
    async fn take_over(&mut self, judged: &Judgement, legacy: Option<Legacy>) -> Found {
        let mut said = HashMap::new();
        self.legacy = legacy.map(|legacy| legacy.entries).unwrap_or_default();
        for entry in self.legacy.clone() {
            self.absorb(entry, &mut said);
        }
        let (source, directories) = (self.source.clone(), self.directories.clone());
        let mut reader = source.read(&directories, self.deadlines.name);
        let unreadable = loop {
            match reader.next().await {
                Ok(Some(entry)) => self.absorb(entry, &mut said),
                Ok(None) => break None,
                Err(error) => {
                    tracing::error!(%error, "the metadata log cannot be read again");
                    break Some(Gap { reason: error.to_string(), until_back: Vec::new() });
                }
            }
        };
        self.epoch.gap = self.epoch.gap.take().or_else(|| unreadable.clone());
        let mut shuffles: BTreeMap<ShuffleKey, FoundShuffle> = BTreeMap::new();
        for (number, (key, said)) in said.into_iter().filter(|(number, _)| !self.contents.is_purged(*number))
        {
            let found = shuffles.entry(key).or_default();
            if found.said.is_empty() || found.incarnation < number {
                *found = FoundShuffle { incarnation: number, said, incomplete: None };
            }
        }
        let earlier = std::mem::take(&mut self.contents.incomplete);
        for (key, found) in &mut shuffles {
            let gap = judged.carried(earlier.get(&found.incarnation).map(|(_, gap)| gap));
            if let Some(gap) = gap.or_else(|| unreadable.clone()) {
                found.incomplete = Some(gap.reason.clone());
                let shuffle = Incarnation { key: key.clone(), number: found.incarnation };
                self.contents.incomplete.insert(found.incarnation, (shuffle, gap));
            }
        }
        let kept: Treemap = shuffles.values().map(|found| found.incarnation).collect();
        self.drop_others(&kept);
        if shuffles.is_empty() {
            // What is away has nothing of a living shuffle.
            let here: Vec<Uuid> = self.directories.iter().map(|it| it.uuid).collect();
            self.epoch.members.retain(|member| member.votes || here.contains(&member.uuid()));
        }
        let absent = self.epoch.members.iter().filter(|member| self.is_away(member));
        Found {
            absent: absent.map(|member| (member.uuid(), member.path.clone())).collect(),
            gap: self.epoch.gap.as_ref().map(|gap| gap.reason.clone()),
            has_new_gap: judged.gap.is_some() || unreadable.is_some(),
            blind_starts: self.epoch.blind_starts,
            next_incarnation: self.contents.next_incarnation,
            shuffles,
        }
    }

    /// Takes an entry of what an earlier process left; the order makes no difference but for what one shuffle said.
    fn absorb(&mut self, entry: Entry, said: &mut HashMap<u64, (ShuffleKey, Vec<Bytes>)>) {
        self.contents.took(&entry, 0);
        match entry {
            Entry::Said(shuffle, content) => {
                said.entry(shuffle.number).or_insert_with(|| (shuffle.key, Vec::new())).1.push(content);
            }
            Entry::Incomplete(shuffle, gap) => {
                self.contents.incomplete.insert(shuffle.number, (shuffle, gap));
            }
            Entry::Purged(_) | Entry::Epoch(_) => {}
        }
    }

    /// Incarnations that a later one has replaced are as good as purged.
    fn drop_others(&mut self, kept: &Treemap) {
        let all: Vec<u64> = self.contents.living.keys().copied().collect();
        self.contents.purged.extend(all.into_iter().filter(|number| !kept.contains(*number)));
    }

    fn is_away(&self, member: &Member) -> bool {
        self.directories.iter().all(|directory| directory.uuid != member.uuid())
    }

    async fn run(mut self, mut requests: mpsc::Receiver<Request>) {
        let mut waiting = Vec::new();
        while self.wait_for(&mut requests, &mut waiting).await > 0 {
            let (mut entries, mut answers) = (Vec::new(), Vec::new());
            let mut settled = Vec::new();
            for request in waiting.drain(..) {
                match request {
                    Request::Append(entry, done) => {
                        entries.push(entry);
                        answers.push(done);
                    }
                    Request::Settle(done) => settled.push(done),
                    Request::Blind(done) => {
                        self.is_blind = true;
                        settled.push(done);
                    }
                }
            }
            let results = self.append(&entries).await;
            for (done, result) in answers.into_iter().zip(results) {
                // Whoever asked may be gone.
                let _ = done.send(result);
            }
            self.tidy(!settled.is_empty()).await;
        }
    }

    /// Waits for requests, and marks meanwhile what is acknowledged.
    async fn wait_for(
        &mut self,
        requests: &mut mpsc::Receiver<Request>,
        waiting: &mut Vec<Request>,
    ) -> usize {
        if self.is_open && self.marks.are_behind(self.generation, self.encoder.count()) {
            let soon = tokio::time::timeout(MARK_PAUSE, requests.recv_many(waiting, BATCH_MAX)).await;
            match soon {
                Ok(received) if !self.marks.are_due() => return received,
                soon => {
                    let logs: Vec<_> = self
                        .copies
                        .iter()
                        .map(|it| (&self.directories[it.directory], it.path.clone()))
                        .collect();
                    self.marks.write(&logs, self.generation, self.encoder.count()).await;
                    if let Ok(received) = soon {
                        return received;
                    }
                }
            }
        }
        requests.recv_many(waiting, BATCH_MAX).await
    }

    /// Writes entries, on other directories when those that have the copies fail.
    async fn append(&mut self, entries: &[Entry]) -> Vec<Result<(), LogError>> {
        let mut excluded = BTreeSet::new();
        if entries.is_empty() {
            return Vec::new();
        }
        // Every turn but the last leaves out a directory more.
        loop {
            if !self.is_open
                && let Err(error) = self.begin(&mut excluded).await
            {
                return entries.iter().map(|_| Err(error.clone())).collect();
            }
            let before = (self.encoder.clone(), self.end);
            let (bytes, sizes) = self.encode(entries);
            let all = std::mem::take(&mut self.copies);
            let (kept, failed) = self.write_all(all, bytes).await;
            excluded.extend(failed.iter().map(|copy| copy.directory));
            excluded.retain(|at| kept.iter().all(|copy| copy.directory != *at));
            if kept.is_empty() {
                // No copy has it; what the files hold behind the last acknowledged frame is never read.
                (self.encoder, self.end) = before;
                (self.copies, self.is_open) = (failed, false);
                continue;
            }
            self.copies = kept;
            for (entry, size) in entries.iter().zip(&sizes) {
                self.contents.took(entry, size.unwrap_or(0));
            }
            self.read_from_copies();
            if !failed.is_empty() {
                self.is_open = false;
                if let Err(error) = self.begin(&mut excluded).await {
                    return entries.iter().map(|_| Err(error.clone())).collect();
                }
            }
            let too_long = || LogError::told("the record is too long");
            return sizes.into_iter().map(|size| size.map(drop).ok_or_else(too_long)).collect();
        }
    }

    /// The frames of `entries`, and how long each is; none of one that is too long, which is left out.
    fn encode(&mut self, entries: &[Entry]) -> (Bytes, Vec<Option<u64>>) {
        let mut out = BytesMut::new();
        let mut batch = 0;
        let sizes = entries.iter().map(|entry| {
            let before = out.len();
            let fits = self.encoder.encode(entry, batch, &mut out);
            batch += u32::from(fits);
            fits.then(|| (out.len() - before) as u64)
        });
        let sizes = sizes.collect();
        (out.freeze(), sizes)
    }

    /// Appends to all copies; those that have it, and those that failed.
    async fn write_all(&mut self, copies: Vec<Copy>, bytes: Bytes) -> (Vec<Copy>, Vec<Copy>) {
        let (end, deadline) = (self.end, self.deadlines.write);
        let length = bytes.len() as u64;
        let writes = copies.iter().map(|copy| {
            let (file, bytes) = (Arc::clone(&copy.file), bytes.clone());
            within(deadline, async move {
                file.write_at(vec![bytes], end).await?;
                file.sync().await
            })
        });
        let results = join_all(writes.collect::<Vec<_>>()).await;
        self.end += length;
        let (mut kept, mut failed) = (Vec::new(), Vec::new());
        for (copy, result) in copies.into_iter().zip(results) {
            match result {
                Ok(()) => kept.push(copy),
                Err(error) => {
                    self.blame(copy.directory, &copy.path, &error);
                    failed.push(copy);
                }
            }
        }
        (kept, failed)
    }

    /// A directory failed: others are better for a while.
    fn blame(&mut self, directory: usize, path: &Path, error: &io::Error) {
        let disk = &self.directories[directory];
        let path = disk.io.root().join(path);
        tracing::warn!(path = %path.display(), %error, "a copy of the metadata log cannot be written, it goes elsewhere");
        if let Some(health) = disk.health.upgrade() {
            health.failed(error);
        }
        self.avoided[directory] = Some(Instant::now());
    }

    fn read_from_copies(&mut self) {
        let (epoch, frames) = (self.epoch.id, self.encoder.count());
        let source = |copy: &Copy| {
            let (directory, path, generation) = (copy.directory, copy.path.clone(), copy.generation);
            Source { parts: vec![Part { directory, path, generation, epoch, frames }] }
        };
        self.others = self.copies.iter().skip(1).map(source).collect();
        self.source = self.copies.first().map(source).expect("a generation has a copy");
    }

    /// After a batch: a better place for the copies, or less of what is dead.
    async fn tidy(&mut self, is_asked: bool) {
        let is_mostly_dead = self.contents.dead_bytes > DEAD_BYTES_MIN.max(self.contents.living_bytes);
        let is_misplaced = is_asked && (self.places(&BTreeSet::new()) != self.held() || self.has_changed());
        let wants_more = is_asked && (self.is_blind || !self.is_open);
        if !(is_mostly_dead || is_misplaced || wants_more) {
            return;
        }
        if let Err(error) = self.begin(&mut BTreeSet::new()).await {
            tracing::warn!(%error, "the metadata log cannot be written anew");
        }
    }

    fn has_changed(&self) -> bool {
        let usable: BTreeSet<usize> = self.usable(&BTreeSet::new()).collect();
        usable != self.usable
    }

    fn held(&self) -> Vec<usize> {
        self.copies.iter().map(|copy| copy.directory).collect()
    }

    fn usable<'a>(&'a self, excluded: &'a BTreeSet<usize>) -> impl Iterator<Item = usize> + 'a {
        let all = (0..self.directories.len()).filter(|at| !self.unread.contains_key(at));
        all.filter(|at| !excluded.contains(at) && self.directories[*at].rank().is_some())
    }

    /// Directories that should have the copies; those that have them stay if they are as good as any.
    fn places(&self, excluded: &BTreeSet<usize>) -> Vec<usize> {
        let held = self.held();
        let is_avoided = |at: usize| self.avoided[at].is_some_and(|since| since.elapsed() < AVOIDED_FOR);
        let mut all: Vec<usize> = self.usable(excluded).collect();
        all.sort_by_key(|at| (is_avoided(*at), self.directories[*at].rank(), !held.contains(at), *at));
        all.truncate(COPIES);
        if let ([only], true) = (&all[..], COPIES > 1) {
            all.push(*only);
        }
        // In the order in which they are held, so that two lists of the same places are equal.
        all.sort_unstable();
        all
    }

    /// Begins a generation on the best directories. Each that fails is added to `excluded`, and it is tried without it.
    async fn begin(&mut self, excluded: &mut BTreeSet<usize>) -> Result<(), LogError> {
        let mut last_error = None;
        loop {
            let places = self.places(excluded);
            if places.is_empty() {
                let nothing = || match self.unread.values().next() {
                    Some(unread) => LogError::told(&format!("{unread}: start again when it can be read")),
                    None => LogError::told("no data directory can be written"),
                };
                return Err(last_error.unwrap_or_else(nothing));
            }
            let usable: BTreeSet<usize> = self.usable(excluded).collect();
            let named: Vec<(Uuid, String)> = usable
                .iter()
                .map(|at| (self.directories[*at].uuid, self.directories[*at].label.clone()))
                .collect();
            let members = members_after(&self.epoch, &named).map_err(|text| LogError::told(&text))?;
            let epoch = self.next_epoch(members, &places);
            self.generation += 1;
            match self.write_generation(&epoch, &places, &usable).await {
                Ok(copies) => {
                    self.commit(epoch, copies, usable).await;
                    return Ok(());
                }
                Err(Failed::At { directory, error, may_be_known }) => {
                    excluded.insert(directory);
                    last_error = Some(error);
                    if may_be_known && epoch.id != self.epoch.id {
                        // A directory that has seen it may come back.
                        self.epoch.lineage.push(epoch.id);
                    }
                    // What has its name must not be outlived by what is older.
                    self.is_open &= !may_be_known;
                }
                Err(Failed::Source(error)) => match self.others.pop() {
                    Some(other) => self.source = other,
                    None => return Err(error),
                },
            }
        }
    }

    fn next_epoch(&mut self, members: Vec<Member>, places: &[usize]) -> Epoch {
        let holders = places.iter().map(|at| self.directories[*at].uuid.into_bytes()).collect();
        let is_the_same = self.is_open && members == self.epoch.members;
        let id = if is_the_same { self.epoch.id } else { rand::rng().random_range(1..=u64::MAX) };
        let next = if is_the_same { self.epoch.clone() } else { self.epoch.next(id) };
        let blind_starts = next.blind_starts + u32::from(std::mem::take(&mut self.is_blind));
        Epoch { members, holders, blind_starts, next_incarnation: self.contents.next_incarnation, ..next }
    }

    /// Writes all that lives to files of a new generation, gives them their names, and tells the other directories.
    async fn write_generation(
        &mut self,
        epoch: &Epoch,
        places: &[usize],
        usable: &BTreeSet<usize>,
    ) -> Result<Vec<Copy>, Failed> {
        let mut copies: Vec<Copy> = Vec::new();
        for (number, at) in places.iter().enumerate() {
            let directory = unfinished(&copy_directory(self.generation, number));
            let path = copy_file(&directory);
            let file =
                self.create(*at, &directory, &path).await.map_err(|error| self.fail(*at, &path, &error))?;
            copies.push(Copy { directory: *at, generation: self.generation, path, file });
        }
        let (frames, end) = self.fill(epoch, &copies).await?;
        for (number, copy) in copies.iter_mut().enumerate() {
            let directory = copy_directory(self.generation, number);
            if let Err(error) = self.finish(copy, &directory).await {
                return Err(self.fail(copy.directory, &copy.path, &error).known());
            }
            copy.path = copy_file(&directory);
        }
        let is_known = self.is_open && epoch.id == self.epoch.id;
        let list = self.list(epoch);
        let told: Vec<usize> = if is_known { Vec::new() } else { usable.iter().copied().collect() };
        let writes = told.iter().map(|at| self.write_members(*at, list.clone()));
        let results = join_all(writes.collect::<Vec<_>>()).await;
        for (at, result) in told.into_iter().zip(results) {
            result.map_err(|error| self.fail(at, &Path::new(METADATA).join(MEMBERS), &error).known())?;
        }
        (self.encoder, self.end) = (frames, end);
        Ok(copies)
    }

    fn fail(&mut self, at: usize, path: &Path, error: &io::Error) -> Failed {
        self.blame(at, path, error);
        let error = LogError::new(self.directories[at].io.root().join(path), error);
        Failed::At { directory: at, error, may_be_known: false }
    }

    async fn create(&self, at: usize, directory: &Path, path: &Path) -> io::Result<Arc<dyn File>> {
        let io = &self.directories[at].io;
        within(self.deadlines.name, async {
            io.create_dir_all(directory).await?;
            io.open_write(path, WriteOpen { create: true, lane: Lane::Metadata, ..WriteOpen::default() })
                .await
        })
        .await
    }

    /// Fills all copies with the epoch and what lives. The encoder behind it, and how many bytes there are.
    async fn fill(&mut self, epoch: &Epoch, copies: &[Copy]) -> Result<(Encoder, u64), Failed> {
        let mut fill = Fill { encoder: Encoder::new(self.generation), out: BytesMut::new(), end: 0 };
        fill.put(&Entry::Epoch(Box::new(epoch.clone())));
        self.contents.begin();
        let marks: Vec<_> = self.contents.incomplete.values().cloned().collect();
        for (shuffle, gap) in marks {
            self.put(&mut fill, &Entry::Incomplete(shuffle, gap), copies).await?;
        }
        for entry in self.legacy.clone() {
            self.put_if_it_lives(&mut fill, &entry, copies).await?;
        }
        let (source, directories) = (self.source.clone(), self.directories.clone());
        let mut reader = source.read(&directories, self.deadlines.name);
        loop {
            match reader.next().await {
                Ok(Some(entry)) => self.put_if_it_lives(&mut fill, &entry, copies).await?,
                Ok(None) => break,
                Err(error) => return Err(Failed::Source(LogError::new(METADATA, &error))),
            }
        }
        self.write_chunk(&mut fill, copies).await?;
        Ok((fill.encoder, fill.end))
    }

    async fn put_if_it_lives(
        &mut self,
        fill: &mut Fill,
        entry: &Entry,
        copies: &[Copy],
    ) -> Result<(), Failed> {
        match entry {
            Entry::Said(shuffle, _) if !self.contents.is_purged(shuffle.number) => {
                self.put(fill, entry, copies).await
            }
            // Marks are written anew.
            Entry::Said(..) | Entry::Incomplete(..) | Entry::Epoch(_) | Entry::Purged(_) => Ok(()),
        }
    }

    async fn put(&mut self, fill: &mut Fill, entry: &Entry, copies: &[Copy]) -> Result<(), Failed> {
        let bytes = fill.put(entry);
        self.contents.took(entry, bytes);
        if fill.out.len() >= CHUNK_BYTES { self.write_chunk(fill, copies).await } else { Ok(()) }
    }

    async fn write_chunk(&mut self, fill: &mut Fill, copies: &[Copy]) -> Result<(), Failed> {
        let bytes = fill.out.split().freeze();
        let length = bytes.len() as u64;
        let writes = copies.iter().map(|copy| {
            let writing = copy.file.write_at(vec![bytes.clone()], fill.end);
            within(self.deadlines.write, writing)
        });
        let results = join_all(writes.collect::<Vec<_>>()).await;
        for (copy, result) in copies.iter().zip(results) {
            result.map_err(|error| self.fail(copy.directory, &copy.path, &error))?;
        }
        fill.end += length;
        Ok(())
    }

    /// Brings a copy to the device and gives it its name.
    async fn finish(&self, copy: &Copy, directory: &Path) -> io::Result<()> {
        let io = &self.directories[copy.directory].io;
        within(self.deadlines.write, copy.file.sync()).await?;
        within(self.deadlines.name, async {
            let unfinished = unfinished(directory);
            io.sync_dir(&unfinished).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.rename(&unfinished, directory).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.sync_dir(Path::new("")).await
        })
        .await
    }

    fn list(&self, epoch: &Epoch) -> Vec<u8> {
        let (mut out, mut encoder) = (BytesMut::new(), Encoder::new(self.generation));
        let fits = encoder.encode(&Entry::Epoch(Box::new(epoch.clone())), 0, &mut out);
        debug_assert!(fits, "an epoch is small");
        out.to_vec()
    }

    async fn write_members(&self, at: usize, list: Vec<u8>) -> io::Result<()> {
        let io = &self.directories[at].io;
        let path = Path::new(METADATA).join(MEMBERS);
        let beside = unfinished(&path);
        within(self.deadlines.name, async {
            io.create_dir_all(Path::new(METADATA)).await?;
            io.write_small(&beside, list).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.rename(&beside, &path).await?;
            io.sync_dir(Path::new(METADATA)).await?;
            io.sync_dir(Path::new("")).await
        })
        .await
    }

    async fn commit(&mut self, epoch: Epoch, copies: Vec<Copy>, usable: BTreeSet<usize>) {
        tracing::debug!(generation = self.generation, copies = ?copies, "metadata log begun");
        (self.epoch, self.copies, self.is_open) = (epoch, copies, true);
        self.usable = usable;
        self.legacy.clear();
        self.read_from_copies();
        let cleaning = self.usable.iter().map(|at| self.remove_earlier(*at));
        join_all(cleaning.collect::<Vec<_>>()).await;
    }

    /// Removes earlier generations and what was not finished; what cannot be removed is removed by the next.
    async fn remove_earlier(&self, at: usize) {
        let io = &self.directories[at].io;
        let removing = async {
            // The list of an earlier version would be believed if all of this were lost.
            if io.read_small(Path::new(LIST)).await.is_ok() {
                let aside = unfinished(&Path::new(METADATA).join("earlier"));
                io.create_dir_all(&aside).await?;
                io.rename(Path::new(LIST), &aside.join(LIST)).await?;
            }
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
            tracing::debug!(disk = %self.directories[at].label, %error, "earlier copies of the metadata log stay");
        }
    }
}

/// Frames on their way into a generation.
struct Fill {
    encoder: Encoder,
    out: BytesMut,
    end: u64,
}

impl Fill {
    /// Bytes of its frame. What was taken once is not too long.
    fn put(&mut self, entry: &Entry) -> u64 {
        let before = self.out.len();
        let fits = self.encoder.encode(entry, 0, &mut self.out);
        debug_assert!(fits, "it was in the log before");
        (self.out.len() - before) as u64
    }
}

enum Failed {
    /// A directory.
    At {
        directory: usize,
        error: LogError,
        /// Whether a directory may have heard of the epoch.
        may_be_known: bool,
    },
    /// What there is cannot be read.
    Source(LogError),
}

impl Failed {
    fn known(self) -> Self {
        match self {
            Self::At { directory, error, .. } => Self::At { directory, error, may_be_known: true },
            Self::Source(_) => self,
        }
    }
}

/// What ends the name of what is being written.
const UNFINISHED: &str = ".new";

fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(UNFINISHED);
    name.into()
}
