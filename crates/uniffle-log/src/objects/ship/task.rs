//! The task that stores the log: it begins generations, and appends waiting entries to the current
//! one.
//!
//! Invariant: an object keeps its name and bytes until it is stored or a new generation replaces
//! it. A repeated write then changes nothing, even if an earlier one has succeeded unnoticed.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rand::RngExt as _;

use super::super::object_file::ObjectFile;
use super::super::shipped::ShippedLog;
use super::queue::{CheckpointSource, LogOrigin, ShipperState};
use crate::LogError;
use crate::contents::{Contents, Order};
use crate::format::frame::{Epoch, FrameContent, Gap, Incarnation};
use crate::objects::object::LogObjects;
use crate::recovery::read::{LogCopies, Snapshot};
use crate::write::checkpoint::{CHUNK_BYTES, CHUNK_FRAMES, Checkpoint, CheckpointSink as _};
use uniffle_base::budget::Budget;
use uniffle_base::clock::{Instant, sleep};

/// Maximum age of a generation, so that a bucket rule that deletes objects by age does not delete
/// the log.
pub const REFRESH: Duration = Duration::from_secs(12 * 3600);
/// Number of objects after a checkpoint that begins the next one, or eight times the checkpoint's
/// objects if these are more. A start reads objects with bounded concurrency.
pub(super) const OBJECTS_MAX: usize = 1000;
/// Bytes after a checkpoint that begin the next one, or twice the checkpoint's if these are more.
const BYTES_MAX: u64 = 64 << 20;
/// Time for which entries without waiting callers are collected.
const TOGETHER: Duration = Duration::from_secs(1);
/// Backoff: pause after a failed attempt. Further failures double it, up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(15);
/// Pause before the next check whether an earlier generation is still being read.
const GARBAGE_PAUSE: Duration = Duration::from_secs(30);

/// An object that the store has not confirmed.
#[derive(Debug)]
struct Pending {
    frames: Range<u64>,
    bytes: Bytes,
    /// Position up to which the store has everything once the object is stored.
    position: u64,
}

/// Size of a part of a generation.
#[derive(Debug, Default, Clone, Copy)]
struct Size {
    objects: usize,
    bytes: u64,
}

impl Size {
    fn of(file: &ObjectFile) -> Self {
        Self { objects: file.objects(), bytes: file.bytes() }
    }
}

pub(super) struct Task {
    shared: Arc<ShipperState>,
    origin: LogOrigin,
    /// The log of earlier processes, until the first generation has begun.
    found: Option<Arc<ShippedLog>>,
    /// The same log, while it is being read.
    read: Weak<ShippedLog>,
    /// Epoch of a log without disks, which each checkpoint repeats. Its members are the directories
    /// of earlier processes. Its id is 0: no directory knows the records that follow.
    epoch: Epoch,
    /// The last generation that was attempted.
    generation: u64,
    /// The current generation. Its contents are maintained if the store is the only holder.
    current: Checkpoint<ObjectFile>,
    pending: Option<Pending>,
    /// Size of the checkpoint of the current generation.
    checkpoint: Size,
    begun_at: Option<Instant>,
    has_garbage: bool,
}

impl Task {
    pub(super) fn new(
        shared: Arc<ShipperState>,
        objects: &Arc<dyn LogObjects>,
        memory: &Budget,
        origin: LogOrigin,
        found: Arc<ShippedLog>,
        start: u32,
    ) -> Self {
        let generation = u64::from(start) << 32;
        let file = ObjectFile::new(objects, memory, generation, rand::rng().random());
        // Directories have no data of shuffles that have ended.
        let members = found.epoch.members.iter().filter(|_| found.has_content()).cloned().collect();
        let epoch = Epoch {
            members,
            next_incarnation: found.next_incarnation(),
            gap: found.unknown_gap().map(for_good),
            ..Epoch::default()
        };
        Self {
            shared,
            origin,
            read: Arc::downgrade(&found),
            epoch,
            found: Some(found),
            generation,
            current: Checkpoint::new(generation, Contents::default(), file),
            pending: None,
            checkpoint: Size::default(),
            begun_at: None,
            has_garbage: false,
        }
    }

    pub(super) async fn run(mut self) {
        if let LogOrigin::Disks(log) = &self.origin {
            // A start does not wait for this.
            tokio::select! {
                () = log.begun() => {}
                () = self.waited_for() => {}
            }
        }
        let mut pause = PAUSE_MIN;
        loop {
            match self.step().await {
                Ok(()) => pause = PAUSE_MIN,
                Err(error) => {
                    let is_over = error.kind == io::ErrorKind::ResourceBusy;
                    self.fail(error, is_over);
                    if is_over {
                        return;
                    }
                    self.rest(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    fn is_only_holder(&self) -> bool {
        matches!(self.origin, LogOrigin::Store)
    }

    fn fail(&self, error: LogError, is_over: bool) {
        let mut state = self.shared.state.lock();
        if !state.waiters.is_empty() {
            tracing::warn!(%error, "cannot write registrations or reports to the object store; they are not acknowledged");
        }
        if self.is_only_holder() {
            // The callers of these entries get the error now. Ends of shuffles are stored later.
            state.queue.retain(|(_, entry)| matches!(entry, FrameContent::Purged(_)));
            state.recharge();
        }
        state.fail(&error);
        if is_over {
            state.clear();
            state.ended = Some(error);
        }
    }

    /// Waits for the backoff `pause` after a failure, or until a caller waits for the store.
    async fn rest(&self, pause: Duration) {
        tokio::select! {
            () = self.waited_for() => {}
            () = sleep(pause) => {}
        }
    }

    async fn waited_for(&self) {
        while self.shared.state.lock().waiters.is_empty() {
            self.shared.wake.notified().await;
        }
    }

    async fn step(&mut self) -> Result<(), LogError> {
        if self.is_only_holder() {
            // The next generation depends on whether the store has the object.
            self.put_pending().await?;
        }
        if self.is_due() {
            self.begin().await?;
        }
        if self.has_garbage && self.read.strong_count() == 0 {
            self.delete_earlier().await;
        }
        self.put_pending().await?;
        if self.wait().await {
            self.take();
            self.put_pending().await?;
        }
        Ok(())
    }

    fn is_due(&self) -> bool {
        let (all, checkpoint) = (Size::of(&self.current.sink), self.checkpoint);
        let is_long = all.objects - checkpoint.objects >= OBJECTS_MAX.max(8 * checkpoint.objects)
            || all.bytes - checkpoint.bytes > BYTES_MAX.max(2 * checkpoint.bytes);
        let is_old = self.begun_at.is_none_or(|at| at.elapsed() >= REFRESH);
        is_long || is_old || self.shared.state.lock().has_overflowed
    }

    /// Waits until there are entries to store. Returns false if there is other work.
    async fn wait(&self) -> bool {
        let mut together = None;
        loop {
            let woken = self.shared.wake.notified();
            let until = {
                let state = self.shared.state.lock();
                let is_urgent = !state.waiters.is_empty() || self.is_only_holder();
                if state.has_overflowed {
                    return false;
                }
                match state.queue.is_empty() {
                    true => None,
                    false if is_urgent || state.charge.bytes() > CHUNK_BYTES as u64 => return true,
                    false => Some(*together.get_or_insert_with(|| Instant::now() + TOGETHER)),
                }
            };
            let refresh = self.begun_at.map_or(Duration::ZERO, |at| REFRESH.saturating_sub(at.elapsed()));
            let idle = if self.has_garbage { GARBAGE_PAUSE } else { refresh };
            let pause = until.map_or(idle, |until| until.saturating_duration_since(Instant::now()));
            tokio::select! {
                biased;
                () = woken => {}
                () = sleep(pause) => return until.is_some(),
            }
        }
    }

    /// Creates an object from waiting entries. Without disks, a shuffle's first record is followed
    /// by the mark that all later ones are acknowledged by the store, and an epoch ends the gap.
    fn take(&mut self) {
        let is_only_holder = self.is_only_holder();
        let Checkpoint { encoder, contents, .. } = &mut self.current;
        let (first, mut out, mut position) = (encoder.count(), BytesMut::new(), 0);
        let mut state = self.shared.state.lock();
        while encoder.count() - first < CHUNK_FRAMES
            && out.len() < CHUNK_BYTES
            && let Some((at, mut entry)) = state.pop()
        {
            if let FrameContent::Epoch(epoch) = &mut entry
                && is_only_holder
            {
                self.epoch.gap = None;
                **epoch = epoch_of(&mut self.epoch, contents);
            }
            let mark = match &entry {
                FrameContent::Record(shuffle, _) if is_only_holder && contents.wants_mark(shuffle) => {
                    Some(FrameContent::Moved(shuffle.clone()))
                }
                _ => None,
            };
            for entry in std::iter::once(entry).chain(mark) {
                let before = out.len();
                if encoder.encode(&entry, 0, &mut out) && is_only_holder {
                    contents.count_entry(&entry, (out.len() - before) as u64);
                }
            }
            position = at;
        }
        state.recharge();
        let frames = first..encoder.count();
        if !frames.is_empty() {
            self.pending = Some(Pending { frames, bytes: out.freeze(), position });
        }
    }

    /// Stores the pending object, with the same bytes and name on each attempt.
    async fn put_pending(&mut self) -> Result<(), LogError> {
        if let Some(pending) = &self.pending {
            self.current.sink.write(pending.bytes.clone(), pending.frames.clone()).await?;
            self.shared.state.lock().advance(pending.position);
            self.pending = None;
        }
        Ok(())
    }

    /// Begins a generation with a checkpoint of all living entries.
    async fn begin(&mut self) -> Result<(), LogError> {
        self.generation += 1;
        let file = self.current.sink.sibling(self.generation);
        let mut next = Checkpoint::new(self.generation, Contents::default(), file);
        let position = self.fill(&mut next).await?;
        (self.checkpoint, self.current) = (Size::of(&next.sink), next);
        (self.found, self.pending, self.begun_at) = (None, None, Some(Instant::now()));
        self.has_garbage = true;
        let mut state = self.shared.state.lock();
        state.is_begun = true;
        state.advance(position);
        Ok(())
    }

    /// Writes a checkpoint. Returns the position that it covers.
    async fn fill(&mut self, next: &mut Checkpoint<ObjectFile>) -> Result<u64, LogError> {
        let LogOrigin::Disks(log) = &self.origin else {
            let known = self.shared.state.lock().known;
            self.copy_store(next).await?;
            return Ok(known);
        };
        let covered = {
            // All waiting entries are already on the disks.
            let mut state = self.shared.state.lock();
            state.clear();
            state.has_overflowed = false;
            state.end
        };
        let copied = self.copy_disks(&**log, next).await;
        if copied.is_err() {
            self.shared.state.lock().has_overflowed = true;
        }
        copied.map(|()| covered)
    }

    /// Writes the living entries of the disks' log.
    async fn copy_disks(
        &self,
        log: &dyn CheckpointSource,
        next: &mut Checkpoint<ObjectFile>,
    ) -> Result<(), LogError> {
        let Snapshot { epoch, filter, places } = log.snapshot().await?;
        next.put(&FrameContent::Epoch(Box::new(epoch))).await?;
        // Each attempt uses another copy.
        let attempt = usize::try_from(self.generation & u64::from(u32::MAX)).unwrap_or(0);
        let source = &places.sources[attempt % places.sources.len()];
        next.copy(filter, &mut source.read(&places.directories, places.deadline)).await?;
        next.put(&FrameContent::Begun).await?;
        next.flush().await
    }

    /// Writes the living entries of the log in the store. If some of them cannot be read, all of
    /// its shuffles become incomplete.
    async fn copy_store(&mut self, next: &mut Checkpoint<ObjectFile>) -> Result<(), LogError> {
        let (contents, gap, source) = match &self.found {
            Some(found) => (&found.contents, found.gap(), found.source.clone()),
            None => {
                let parts = vec![self.current.sink.part()];
                (&self.current.contents, None, LogCopies { parts, shipped: None })
            }
        };
        next.put(&FrameContent::Epoch(Box::new(epoch_of(&mut self.epoch, contents)))).await?;
        let mut reader = source.read_stored();
        next.copy(contents.filter(Order::Complete), &mut reader).await?;
        if let Some(reason) = gap.map(str::to_owned).or(reader.damage) {
            self.epoch.gap.get_or_insert_with(|| for_good(&reason));
            next.put(&FrameContent::Epoch(Box::new(self.epoch.clone()))).await?;
            for (key, found) in next.contents.shuffles() {
                let shuffle = Incarnation { key, number: found.incarnation };
                next.put(&FrameContent::Incomplete(shuffle, for_good(&reason))).await?;
            }
        }
        next.put(&FrameContent::Begun).await?;
        next.flush().await
    }

    /// Deletes earlier generations. The remaining ones are deleted with the next generation.
    async fn delete_earlier(&mut self) {
        let deleting = async {
            let ObjectFile { store, generation, .. } = &self.current.sink;
            let mut all = store.list().await?;
            all.retain(|it| it.object.generation < *generation);
            if all.is_empty() { Ok(()) } else { store.delete(all).await }
        };
        if let Err(error) = deleting.await {
            tracing::warn!(%error, "cannot delete earlier objects of the metadata log yet; retrying");
        }
        self.has_garbage = false;
    }
}

/// Returns a gap that the return of directories does not end.
fn for_good(reason: &str) -> Gap {
    Gap { reason: reason.to_owned(), until_returned: Vec::new() }
}

/// Returns the epoch of a log without disks, after the incarnations in `contents`.
fn epoch_of(epoch: &mut Epoch, contents: &Contents) -> Epoch {
    epoch.next_incarnation = epoch.next_incarnation.max(contents.next_incarnation);
    epoch.clone()
}
