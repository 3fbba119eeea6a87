//! The single task that writes the metadata log, with group commit.
//!
//! It takes the waiting entries, up to `BATCH_MAX`, and appends them to both copies with one sync
//! each. Invariant: an entry is acknowledged only once it is synced in every copy. A copy that
//! fails or is late is abandoned. The log is then written to the best directories again
//! (`generation`) before it continues.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use croaring::Treemap;
use futures::future::{OptionFuture, join_all};
use tokio::sync::{mpsc, oneshot, watch};

use super::mark::{MARK_PAUSE, MarkedCopy, Marks};
use crate::LogError;
use crate::contents::Contents;
use crate::format::frame::{Encoder, Epoch, FrameContent, Incarnation, METADATA};
use crate::objects::ship::Shipper;
use crate::objects::shipped::ShippedLog;
use crate::recovery::proof::{HandOff, RecoveryDecision};
use crate::recovery::read::{Directory, LogCopies, LogCopy, LogSources, MEMBERS, Snapshot};
use crate::recovery::resumable::Resumable;
use crate::window::within;
use uniffle_base::clock::Instant;
use uniffle_io::{File, Vanished};
use uniffle_wire::types::ShuffleKey;

/// Maximum number of entries written together.
const BATCH_MAX: usize = 1024;
/// Minimum number of dead bytes that justifies a compaction.
const COMPACTION_DEAD_BYTES_MIN: u64 = 8 << 20;

/// Returns whether an error concerns a file and not its directory.
fn wants_new_file(error: &io::Error) -> bool {
    Vanished::of(error) == Some(Vanished::File) || error.kind() == io::ErrorKind::FileTooLarge
}

/// Returns the error of an entry whose incarnation is outdated.
fn outdated(entry: &FrameContent) -> LogError {
    let shuffle = entry.shuffle().map(|it| it.key.to_string()).unwrap_or_default();
    LogError::other(&format!(
        "{shuffle} was registered again or unregistered in metadata that could not be read at the start; restart \
         the worker, or unregister the shuffle"
    ))
}

/// Deadlines of disk operations.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// Deadline of one write with its sync.
    pub write: Duration,
    /// Deadline of most other operations.
    pub name: Duration,
}

/// A recovered record of a shuffle, or `None` at the end.
pub(crate) type RecoveredRecord = Result<Option<(ShuffleKey, Bytes)>, LogError>;

pub(crate) enum LogRequest {
    /// Append an entry. Answered with its position in the log that is copied to the object store.
    Append(FrameContent, oneshot::Sender<Result<u64, LogError>>),
    /// Check the copies, and write them again where needed.
    Settle(oneshot::Sender<()>),
    /// Record that this start may have missed shuffles.
    Blind(oneshot::Sender<()>),
    /// End the gap, if possible.
    EndGap(oneshot::Sender<Result<bool, LogError>>),
    /// Stop writing, and return the hand-off record.
    Release(oneshot::Sender<Result<HandOff, LogError>>),
    /// Return where the log can be read now, and its living shuffles.
    Snapshot(oneshot::Sender<Result<Snapshot, LogError>>),
    /// Send the records of living shuffles.
    SendRecords(mpsc::Sender<RecoveredRecord>),
}

/// A copy that is being written.
#[derive(Debug, Clone)]
pub(crate) struct Copy {
    pub(crate) directory: usize,
    pub(crate) generation: u64,
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<dyn File>,
}

/// Writer of the log.
pub(crate) struct MetadataWriter {
    pub(crate) directories: Vec<Directory>,
    pub(crate) deadlines: Deadlines,
    pub(crate) epoch: Epoch,
    pub(crate) generation: u64,
    pub(crate) contents: Contents,
    /// Current copies.
    pub(crate) copies: Vec<Copy>,
    /// If false, a generation has to be resumed or begun before the next write.
    pub(crate) is_open: bool,
    /// Unnamed copy of the generation, if there is one.
    pub(crate) spare: Option<Copy>,
    pub(crate) encoder: Encoder,
    /// Length of the frames in each copy, in bytes.
    pub(crate) end: u64,
    /// Source of the complete log.
    pub(crate) source: LogCopies,
    /// Alternative sources, used if `source` fails.
    pub(crate) others: Vec<LogCopies>,
    /// Copies of the previous process that can be appended to, until a generation is resumed or
    /// begun.
    pub(crate) resumable: Option<Resumable>,
    pub(crate) avoided: Vec<Option<Instant>>,
    /// Directories whose metadata could not be read at start, with the errors. They are not
    /// overwritten, because their content would be lost.
    pub(crate) unread: BTreeMap<usize, String>,
    /// Directories that were writable when the epoch began.
    pub(crate) usable: BTreeSet<usize>,
    pub(crate) is_blind: bool,
    /// True once the recovered records were delivered. They must not change before.
    pub(crate) has_sent_records: bool,
    /// Incarnations that were found only after the start. This process does not serve them.
    pub(crate) unserved: BTreeMap<ShuffleKey, u64>,
    /// Incarnations that this process serves although the log that was found after the start has
    /// later ones, or their end.
    pub(crate) outdated: Treemap,
    pub(crate) marks: Marks,
    /// Shipper to the object store, if there is one.
    pub(crate) shipper: Option<Shipper>,
    /// The log of earlier processes in the object store, until a generation has begun.
    pub(crate) shipped: Option<Arc<ShippedLog>>,
    /// True if that log has living registrations that the directories do not have.
    pub(crate) has_strangers: bool,
    /// Why the records of `damaged` shuffles are incomplete in the log, while one of them lives.
    pub(crate) damage: watch::Sender<Option<Arc<str>>>,
    pub(crate) damaged: Treemap,
    /// True once this process has begun or resumed a generation.
    pub(crate) is_begun: Arc<AtomicBool>,
    /// True once this process has tried to begin a generation, successfully or not.
    pub(crate) was_tried: watch::Sender<bool>,
}

impl MetadataWriter {
    pub(crate) fn new(
        directories: Vec<Directory>,
        deadlines: Deadlines,
        decision: RecoveryDecision,
        source: LogCopies,
    ) -> Self {
        let gap = decision.carried(decision.epoch.gap.as_ref());
        let generation = decision.generation;
        let epoch = Epoch { gap, ..decision.epoch };
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
            spare: None,
            encoder: Encoder::new(generation),
            end: 0,
            source,
            others: Vec::new(),
            resumable: None,
            avoided,
            unread: BTreeMap::new(),
            usable: BTreeSet::new(),
            is_blind: false,
            has_sent_records: false,
            unserved: BTreeMap::new(),
            outdated: Treemap::new(),
            marks: Marks::default(),
            shipper: None,
            shipped: None,
            has_strangers: false,
            damage: watch::Sender::default(),
            damaged: Treemap::new(),
            is_begun: Arc::default(),
            was_tried: watch::Sender::new(false),
        }
    }

    pub(crate) async fn run(mut self, mut requests: mpsc::Receiver<LogRequest>) {
        let mut waiting = Vec::new();
        while self.wait_for(&mut requests, &mut waiting).await > 0 {
            let (mut entries, mut answers) = (Vec::new(), Vec::new());
            let (mut settled, mut receivers, mut releasing) = (Vec::new(), Vec::new(), None);
            let (mut looking, mut ending) = (Vec::new(), Vec::new());
            for request in waiting.drain(..) {
                match request {
                    LogRequest::Append(entry, done) if self.is_outdated(&entry) => {
                        // The caller may have been dropped.
                        let _ = done.send(Err(outdated(&entry)));
                    }
                    LogRequest::Append(entry, done) => {
                        let ended = self.replaced_by(&entry).map(FrameContent::Purged);
                        answers.extend(ended.iter().map(|_| oneshot::channel().0));
                        entries.extend(ended);
                        entries.push(entry);
                        answers.push(done);
                    }
                    LogRequest::Settle(done) => settled.push(done),
                    LogRequest::SendRecords(to) => receivers.push(to),
                    LogRequest::Snapshot(done) => looking.push(done),
                    LogRequest::EndGap(done) => ending.push(done),
                    LogRequest::Release(done) => releasing = Some(done),
                    LogRequest::Blind(done) => {
                        self.is_blind = true;
                        settled.push(done);
                    }
                }
            }
            let results = self.append(&entries).await;
            for (done, result) in answers.into_iter().zip(results) {
                // The caller may have been dropped.
                let _ = done.send(result);
            }
            if !looking.is_empty() && !self.is_open {
                // The error is returned by `snapshot` below.
                let _: Result<(), _> = self.open(&mut BTreeSet::new()).await;
            }
            for done in looking {
                let _ = done.send(self.snapshot());
            }
            for to in receivers {
                self.send_records(&to).await;
                self.has_sent_records = true;
            }
            if self.has_sent_records && !*self.was_tried.borrow() {
                self.begin_first().await;
            }
            for done in ending {
                let _ = done.send(self.end_gap().await);
            }
            self.compact_or_repair(!settled.is_empty() || releasing.is_some()).await;
            if let Some(done) = releasing {
                let _ = done.send(self.hand_off());
                return;
            }
        }
    }

    /// Returns the unserved incarnation that the entry's registration replaces. Its number may be
    /// the greater one, so it must be purged in the log.
    fn replaced_by(&self, entry: &FrameContent) -> Option<Incarnation> {
        let shuffle = entry.shuffle()?;
        let number = *self.unserved.get(&shuffle.key)?;
        let is_replaced = number != shuffle.number && !self.contents.is_purged(number);
        is_replaced.then(|| Incarnation { key: shuffle.key.clone(), number })
    }

    /// Returns whether an entry must not be acknowledged because its incarnation is outdated: a
    /// start would not find it, or find it without the records of the later incarnation. The end of
    /// the incarnation is written.
    fn is_outdated(&self, entry: &FrameContent) -> bool {
        let is_end = matches!(entry, FrameContent::Purged(_));
        !is_end && entry.shuffle().is_some_and(|it| self.outdated.contains(it.number))
    }

    /// Begins or resumes a generation for the first time. Waiting callers continue even if it
    /// fails.
    pub(crate) async fn begin_first(&mut self) {
        if !self.is_open
            && let Err(error) = self.open(&mut BTreeSet::new()).await
        {
            tracing::error!(
                %error,
                "cannot write the metadata log; nothing is acknowledged until it is writable"
            );
        }
        self.was_tried.send_replace(true);
    }

    /// Resumes the generation of the previous process, or begins one ([`MetadataWriter::begin`]).
    async fn open(&mut self, excluded: &mut BTreeSet<usize>) -> Result<(), LogError> {
        if self.resume().await { Ok(()) } else { self.begin(excluded).await }
    }

    /// Returns where the complete log can be read now, and its living shuffles.
    fn snapshot(&self) -> Result<Snapshot, LogError> {
        if !self.is_open {
            return Err(LogError::other("the metadata log is not writable"));
        }
        let sources = std::iter::once(&self.source).chain(&self.others).cloned().collect();
        let (directories, deadline) = (self.directories.clone(), self.deadlines.name);
        Ok(Snapshot {
            places: LogSources { sources, directories, deadline },
            epoch: Epoch { next_incarnation: self.contents.next_incarnation, ..self.epoch.clone() },
            filter: self.contents.filter(self.source.order()),
        })
    }

    /// Returns the hand-off record for a successor.
    fn hand_off(&self) -> Result<HandOff, LogError> {
        if !self.is_open {
            return Err(LogError::other("the metadata log is not writable"));
        }
        let (epoch, frames, generation) = (self.epoch.id, self.encoder.count(), self.generation);
        Ok(HandOff { epoch, frames, generation })
    }

    /// Waits for requests. Writes the mark of acknowledged frames meanwhile.
    async fn wait_for(
        &mut self,
        requests: &mut mpsc::Receiver<LogRequest>,
        waiting: &mut Vec<LogRequest>,
    ) -> usize {
        if self.is_open && self.marks.are_behind(self.generation, self.encoder.count()) {
            let soon = uniffle_base::clock::timeout(MARK_PAUSE, requests.recv_many(waiting, BATCH_MAX)).await;
            match soon {
                Ok(received) if !self.marks.are_due() => return received,
                soon => {
                    let copies = self.copies.iter();
                    let copies = copies
                        .map(|it| MarkedCopy { directory: &self.directories[it.directory], path: &it.path });
                    let copies: Vec<_> = copies.collect();
                    self.marks.write(&copies, self.generation, self.encoder.count()).await;
                    if let Ok(received) = soon {
                        return received;
                    }
                }
            }
        }
        requests.recv_many(waiting, BATCH_MAX).await
    }

    /// Writes entries. Uses other directories if those with the copies fail.
    async fn append(&mut self, entries: &[FrameContent]) -> Vec<Result<u64, LogError>> {
        let (mut excluded, mut renewed) = (BTreeSet::new(), BTreeSet::new());
        if entries.is_empty() {
            return Vec::new();
        }
        // Every iteration except the last excludes a further directory, or gives one a new file for
        // the first time.
        loop {
            if !self.is_open
                && let Err(error) = self.open(&mut excluded).await
            {
                return entries.iter().map(|_| Err(error.clone())).collect();
            }
            let before = (self.encoder.clone(), self.end);
            let (bytes, sizes) = self.encode(entries);
            let all = std::mem::take(&mut self.copies);
            let (kept, failed) = self.write_all(all, bytes).await;
            let is_out =
                |(copy, wants_new_file): &&(Copy, bool)| !wants_new_file || renewed.contains(&copy.directory);
            excluded.extend(failed.iter().filter(is_out).map(|(copy, _)| copy.directory));
            renewed.extend(failed.iter().map(|(copy, _)| copy.directory));
            let failed: Vec<Copy> = failed.into_iter().map(|(copy, _)| copy).collect();
            excluded.retain(|at| kept.iter().all(|copy| copy.directory != *at));
            if kept.is_empty() {
                // No copy is known to have the entry. This process never reads bytes after the last
                // acknowledged frame.
                (self.encoder, self.end) = before;
                (self.copies, self.is_open) = (failed, false);
                continue;
            }
            self.copies = kept;
            for (entry, size) in entries.iter().zip(&sizes) {
                size.iter().for_each(|size| self.contents.count_entry(entry, *size));
            }
            if !self.damaged.is_empty() && self.damaged.is_subset(&self.contents.purged) {
                self.damaged.clear();
                self.damage.send_replace(None);
            }
            self.read_from_copies();
            if !failed.is_empty() {
                self.is_open = false;
                if let Err(error) = self.begin(&mut excluded).await {
                    return entries.iter().map(|_| Err(error.clone())).collect();
                }
            }
            let too_long = || LogError::other("the metadata record is too long");
            let written = entries.iter().zip(&sizes).filter(|(_, size)| size.is_some());
            let position = self.shipper.as_ref().map_or(0, |it| it.add(written.map(|it| it.0.clone())));
            return sizes.into_iter().map(|size| size.map(|_| position).ok_or_else(too_long)).collect();
        }
    }

    /// Encodes `entries`. Returns the frames and their sizes. An entry that is too long is left out
    /// and has `None`.
    fn encode(&mut self, entries: &[FrameContent]) -> (Bytes, Vec<Option<u64>>) {
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

    /// Appends to all copies. Returns the successful and the failed ones. A failed one has whether
    /// a new file in its directory may work.
    async fn write_all(&mut self, copies: Vec<Copy>, bytes: Bytes) -> (Vec<Copy>, Vec<(Copy, bool)>) {
        let (end, deadline) = (self.end, self.deadlines.write);
        let length = bytes.len() as u64;
        let writes = copies
            .iter()
            .map(|copy| within(deadline, Arc::clone(&copy.file).write_synced(vec![bytes.clone()], end)));
        let writes = join_all(writes.collect::<Vec<_>>());
        let spare = self.spare.take().map(|spare| Self::append_to_spare(spare, bytes.clone(), end, deadline));
        let (results, spare) = tokio::join!(writes, OptionFuture::from(spare));
        self.spare = spare.flatten();
        self.end += length;
        let (mut kept, mut failed) = (Vec::new(), Vec::new());
        for (copy, result) in copies.into_iter().zip(results) {
            match result {
                Ok(()) => kept.push(copy),
                Err(error) => {
                    self.note_failure(copy.directory, &copy.path, &error);
                    failed.push((copy, wants_new_file(&error)));
                }
            }
        }
        (kept, failed)
    }

    /// Logs the failure of a copy. Unless only its file is affected, other directories are
    /// preferred for a while.
    pub(crate) fn note_failure(&mut self, directory: usize, path: &Path, error: &io::Error) {
        let disk = &self.directories[directory];
        let path = disk.io.root().join(path);
        if wants_new_file(error) {
            return tracing::error!(
                path = %path.display(),
                %error,
                "cannot append to a copy of the metadata log; writing a new copy"
            );
        }
        tracing::warn!(
            path = %path.display(),
            %error,
            "cannot write a copy of the metadata log; using another directory"
        );
        if let Some(health) = disk.health.upgrade() {
            health.failed(error);
        }
        self.avoided[directory] = Some(Instant::now());
    }

    pub(super) fn read_from_copies(&mut self) {
        let (epoch, frames) = (self.epoch.id, self.encoder.count());
        let source = |copy: &Copy| {
            let (directory, path, generation) = (Some(copy.directory), copy.path.clone(), copy.generation);
            let (epoch, file) = (Some(epoch), Some(Arc::clone(&copy.file)));
            let parts = vec![LogCopy { directory, path, generation, epoch, frames, file }];
            LogCopies { parts, shipped: None }
        };
        // The last one is tried first.
        self.others = self.copies.iter().skip(1).chain(&self.spare).map(source).collect();
        self.source = self.copies.first().map(source).expect("a generation has at least one copy");
    }

    /// Verifies that the files of the log are where a start looks for them. If not, closes the log,
    /// so that it is written again.
    async fn look_for_files(&mut self) {
        if !self.is_open {
            return;
        }
        let deadline = self.deadlines.name;
        for copy in self.copies.clone() {
            let verified = within(deadline, copy.file.verify()).await;
            if let Some(error) = verified.err().filter(wants_new_file) {
                self.note_failure(copy.directory, &copy.path, &error);
                self.is_open = false;
            }
        }
        let members = Path::new(METADATA).join(MEMBERS);
        for directory in self.usable.iter().map(|at| &self.directories[*at]) {
            let read = within(deadline, directory.io.read_small(&members)).await;
            if read.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) && directory.rank().is_some()
            {
                tracing::error!(
                    disk = directory.label,
                    "the list of data directories was removed; writing it again"
                );
                self.is_open = false;
            }
        }
    }

    /// Compacts the log if most of it is dead entries. If `repairs`, also writes missing or
    /// misplaced copies.
    async fn compact_or_repair(&mut self, repairs: bool) {
        if repairs {
            self.look_again().await;
            self.look_for_files().await;
            self.restore_spare().await;
        }
        let needs_compaction =
            self.contents.dead_bytes > COMPACTION_DEAD_BYTES_MIN.max(self.contents.living_bytes);
        let is_misplaced = repairs && (self.places(&BTreeSet::new()) != self.held() || self.has_changed());
        let needs_rewrite = repairs && (self.is_blind || !self.is_open);
        if !(needs_compaction || is_misplaced || needs_rewrite) {
            return;
        }
        let excluded = &mut BTreeSet::new();
        // The check of a start may come before its first entry.
        let written = if self.is_open { self.begin(excluded).await } else { self.open(excluded).await };
        if let Err(error) = written {
            tracing::warn!(%error, "cannot rewrite the metadata log; retrying");
            // Retried after as many dead bytes, not after each batch.
            self.contents.dead_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests;
