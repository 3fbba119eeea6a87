//! Ships the metadata log to an object store.
//!
//! Entries are stored in order, as objects that never change (`objects`). Each entry has a
//! position. The store knows an entry once its known position has reached that. Objects that cannot
//! be stored now are stored later, under the same name. A start, a queue that has become too long,
//! and every [`REFRESH`] begin a new generation with a checkpoint of all living entries. Earlier
//! generations are then deleted.
//!
//! Without local disks the store is the only holder of the log. Entries that cannot be stored are
//! then dropped, and their callers get the error.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::sync::{Notify, oneshot};

use super::contents::{Contents, is_over};
use super::error::LogError;
use super::frame::{Encoder, Entry, Epoch, Gap, Incarnation, PAYLOAD_BYTES_MAX};
use super::objects::{LogObject, LogObjects};
use super::read::Snapshot;
use super::shipped::{ShippedLog, ShippedReader};
use crate::budget::{Budget, Charge};
use crate::clock::{Instant, sleep, timeout};
use crate::runtime::Tasks;

/// Maximum age of a generation, so that a bucket rule that deletes objects by age does not delete
/// the log.
pub const REFRESH: Duration = Duration::from_secs(12 * 3600);
/// Number of objects after a checkpoint that begins the next one. A start reads objects with
/// bounded concurrency.
const OBJECTS_MAX: u64 = 1000;
/// Bytes after a checkpoint that begin the next one, unless the checkpoint is larger.
const BYTES_MAX: u64 = 64 << 20;
/// Size of the frames in an object. A longer entry has an object of its own.
const OBJECT_BYTES: usize = 1 << 20;
/// Maximum number of frames in an object.
const OBJECT_FRAMES: usize = 4096;
/// Maximum size of waiting entries. Beyond it, a checkpoint replaces them.
const QUEUE_BYTES_MAX: u64 = 8 << 20;
/// Bookkeeping of a waiting entry in bytes.
const ENTRY_BYTES: u64 = 64;
/// Time for which entries without waiting callers are collected.
const TOGETHER: Duration = Duration::from_secs(1);
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(15);
/// Longest wait of a caller for the store. Longer than the default limits of a request with its
/// retries, so that a store that refuses requests is reported with its own error.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// Pause before the next check whether an earlier generation is still being read.
const GARBAGE_PAUSE: Duration = Duration::from_secs(30);

/// The log on the disks, the source of checkpoints for the store.
pub(super) trait CheckpointSource: fmt::Debug + Send + Sync {
    /// Waits until the log has begun a generation on the disks, or has failed to.
    fn begun(&self) -> BoxFuture<'_, ()>;

    /// Returns where the log can be read now, and which of its shuffles are living.
    fn snapshot(&self) -> BoxFuture<'_, Result<Snapshot, LogError>>;
}

/// Source of a checkpoint.
#[derive(Debug)]
enum Origin {
    Disks(Arc<dyn CheckpointSource>),
    Store,
}

/// Handle of the log in the store. Clones share it.
#[derive(Debug, Clone)]
pub struct Shipper(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified when the task has work.
    wake: Notify,
}

#[derive(Debug)]
struct State {
    /// Waiting entries with their positions.
    queue: VecDeque<(u64, Entry)>,
    charge: Charge,
    has_overflowed: bool,
    /// Position of the last entry.
    end: u64,
    /// Position up to which the store has everything.
    known: u64,
    waiters: Vec<(u64, oneshot::Sender<Result<(), LogError>>)>,
    is_begun: bool,
    /// Error after which nothing is stored.
    ended: Option<LogError>,
    begin: Option<oneshot::Sender<Origin>>,
}

impl State {
    fn push(&mut self, entry: Entry) -> u64 {
        let bytes = bytes_of(&entry);
        self.end += 1;
        let charge = self.charge.budget().force_charge(bytes);
        self.charge.merge(charge);
        self.queue.push_back((self.end, entry));
        self.end
    }

    fn recharge(&mut self) {
        let held = self.queue.iter().map(|(_, entry)| bytes_of(entry)).sum::<u64>();
        drop(self.charge.split_up_to(self.charge.bytes().saturating_sub(held)));
    }

    fn clear(&mut self) {
        self.queue.clear();
        drop(self.charge.split_up_to(u64::MAX));
    }

    fn wait(&mut self, position: u64) -> oneshot::Receiver<Result<(), LogError>> {
        let (done, waiting) = oneshot::channel();
        if let Some(error) = &self.ended {
            // The receiver exists, because the caller is waiting.
            let _ = done.send(Err(error.clone()));
        } else if self.is_begun && position <= self.known {
            let _ = done.send(Ok(()));
        } else {
            self.waiters.push((position, done));
        }
        waiting
    }

    fn advance(&mut self, position: u64) {
        self.known = self.known.max(position);
        for (_, done) in self.waiters.extract_if(.., |(wanted, _)| *wanted <= position) {
            // The caller may have been dropped.
            let _ = done.send(Ok(()));
        }
    }

    fn fail(&mut self, error: &LogError) {
        for (_, done) in self.waiters.drain(..) {
            let _ = done.send(Err(error.clone()));
        }
    }
}

/// Waits for the store until [`WAIT_MAX`].
async fn answer(waiting: oneshot::Receiver<Result<(), LogError>>) -> Result<(), LogError> {
    match timeout(WAIT_MAX, waiting).await {
        Ok(answered) => answered.unwrap_or_else(|_| Err(LogError::told("the worker ends"))),
        Err(_elapsed) => {
            let text = format!("the object store has not answered for {} s", WAIT_MAX.as_secs());
            Err(LogError::of(io::ErrorKind::TimedOut, &text))
        }
    }
}

fn bytes_of(entry: &Entry) -> u64 {
    let content = match entry {
        Entry::Said(_, record) => record.len() as u64,
        Entry::Purged(_) | Entry::Incomplete(..) | Entry::Moved(_) | Entry::Epoch(_) | Entry::Begun => 0,
    };
    ENTRY_BYTES + content
}

impl Shipper {
    /// Opens the log for start number `start` of the worker, after the found entries. Nothing is
    /// stored before [`begin`](Self::begin) or `MetadataLog::ship_by`.
    #[must_use]
    pub fn open(
        objects: Arc<dyn LogObjects>,
        found: &Arc<ShippedLog>,
        start: u32,
        memory: &Budget,
        tasks: &Tasks,
    ) -> Self {
        let (begin, begun) = oneshot::channel();
        let state = State {
            queue: VecDeque::new(),
            charge: memory.nothing(),
            has_overflowed: false,
            end: 0,
            known: 0,
            waiters: Vec::new(),
            is_begun: false,
            ended: None,
            begin: Some(begin),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: Notify::new() });
        let (task_shared, memory, found) = (Arc::clone(&shared), memory.clone(), Arc::clone(found));
        let (ending, cancelled) = (Self(Arc::clone(&shared)), tasks.cancelled());
        tasks.spawn("object metadata", async move {
            let shipping = async {
                let Ok(origin) = begun.await else { return };
                Task::new(task_shared, (objects, memory), (origin, found), start).run().await;
            };
            tokio::select! {
                biased;
                () = cancelled => {}
                () = shipping => {}
            }
            ending.end(LogError::told("the worker ends"));
        });
        Self(shared)
    }

    /// Begins to store the contents of the disks' log.
    pub(super) fn begin_from_disks(&self, log: Arc<dyn CheckpointSource>) {
        self.begin_from(Origin::Disks(log));
    }

    /// Begins to store entries of a worker without disks. Repeated calls change nothing.
    pub fn begin(&self) {
        self.begin_from(Origin::Store);
    }

    fn begin_from(&self, origin: Origin) {
        if let Some(begin) = self.0.state.lock().begin.take() {
            // The task may have ended.
            let _ = begin.send(origin);
        }
    }

    /// Adds entries that are on the disks. Returns the position of the last.
    pub(super) fn add(&self, entries: impl IntoIterator<Item = Entry>) -> u64 {
        let mut state = self.0.state.lock();
        if state.ended.is_some() {
            return state.end;
        }
        for entry in entries {
            state.push(entry);
        }
        if state.charge.bytes() > QUEUE_BYTES_MAX {
            state.clear();
            state.has_overflowed = true;
        }
        let end = state.end;
        drop(state);
        self.0.wake.notify_one();
        end
    }

    /// Adds a record of a shuffle of a worker without disks, and waits until the store has it.
    /// `is_first` marks the first record of the shuffle.
    ///
    /// # Errors
    /// The store does not take the record or does not answer, or the record is too long.
    pub async fn append(&self, shuffle: Incarnation, record: Bytes, is_first: bool) -> Result<(), LogError> {
        if record.len() > PAYLOAD_BYTES_MAX / 2 {
            return Err(LogError::of(io::ErrorKind::InvalidInput, "the metadata record is too long"));
        }
        let moved = is_first.then(|| Entry::Moved(shuffle.clone()));
        self.store(moved.into_iter().chain([Entry::Said(shuffle, record)])).await
    }

    /// Marks a shuffle of a worker without disks as incomplete for `reason`, and waits until the
    /// store has the mark.
    ///
    /// # Errors
    /// The store does not take it.
    pub async fn mark_incomplete(&self, shuffle: Incarnation, reason: &str) -> Result<(), LogError> {
        let gap = Gap { reason: reason.to_owned(), until_back: Vec::new() };
        self.store([Entry::Incomplete(shuffle, gap)]).await
    }

    async fn store(&self, entries: impl IntoIterator<Item = Entry>) -> Result<(), LogError> {
        let waiting = {
            let mut state = self.0.state.lock();
            if state.ended.is_none() {
                for entry in entries {
                    state.push(entry);
                }
            }
            let end = state.end;
            state.wait(end)
        };
        self.0.wake.notify_one();
        answer(waiting).await
    }

    /// Adds the end of a shuffle of a worker without disks. Returns its position.
    pub fn purge(&self, shuffle: Incarnation) -> u64 {
        let mut state = self.0.state.lock();
        if state.ended.is_some() {
            return state.end;
        }
        // Without disks a long queue is never dropped: nothing else has its entries.
        let end = state.push(Entry::Purged(shuffle));
        drop(state);
        self.0.wake.notify_one();
        end
    }

    /// Adds an entry without effect, and returns its position. Once the store has it, a write to
    /// the store has succeeded since.
    pub fn add_mark(&self) -> u64 {
        self.add([Entry::Begun])
    }

    /// Returns the position of the last entry.
    #[must_use]
    pub fn end_position(&self) -> u64 {
        self.0.state.lock().end
    }

    /// Returns whether the store has everything up to a position.
    #[must_use]
    pub fn knows(&self, position: u64) -> bool {
        self.0.state.lock().known >= position
    }

    /// Returns whether this process has begun a generation in the store.
    #[must_use]
    pub fn is_begun(&self) -> bool {
        self.0.state.lock().is_begun
    }

    /// Waits until the store has everything up to a position, and a generation of this process has
    /// begun.
    ///
    /// # Errors
    /// The next attempt to store it failed, or the store does not answer.
    pub async fn known(&self, position: u64) -> Result<(), LogError> {
        let waiting = {
            let mut state = self.0.state.lock();
            state.wait(position)
        };
        self.0.wake.notify_one();
        answer(waiting).await
    }

    fn end(&self, error: LogError) {
        let mut state = self.0.state.lock();
        state.fail(&error);
        state.clear();
        state.ended.get_or_insert(error);
    }
}

/// An object whose last request did not succeed.
#[derive(Debug)]
struct Pending {
    object: LogObject,
    bytes: Bytes,
    /// Position up to which the store has everything once the object is stored.
    position: u64,
}

/// Size of a part of a generation.
#[derive(Debug, Default, Clone, Copy)]
struct Size {
    objects: u64,
    bytes: u64,
}

struct Task {
    shared: Arc<Shared>,
    objects: Arc<dyn LogObjects>,
    memory: Budget,
    origin: Origin,
    /// The log of earlier processes, until the first generation has begun.
    found: Option<Arc<ShippedLog>>,
    /// The same log, while it is being read.
    read: Weak<ShippedLog>,
    /// Reason why unknown shuffles may exist. Each checkpoint of a log without disks repeats it.
    unknown_gap: Option<String>,
    generation: u64,
    process: u32,
    encoder: Encoder,
    /// Contents of the current generation. Maintained if the store is the only holder.
    contents: Contents,
    parts: Vec<LogObject>,
    pending: Option<Pending>,
    checkpoint: Size,
    behind: Size,
    begun_at: Option<Instant>,
    attempts: usize,
    has_garbage: bool,
}

impl Task {
    fn new(
        shared: Arc<Shared>,
        (objects, memory): (Arc<dyn LogObjects>, Budget),
        (origin, found): (Origin, Arc<ShippedLog>),
        start: u32,
    ) -> Self {
        Self {
            shared,
            objects,
            memory,
            origin,
            read: Arc::downgrade(&found),
            unknown_gap: found.unknown_gap().map(str::to_owned),
            found: Some(found),
            generation: u64::from(start) << 32,
            process: rand::rng().random(),
            encoder: Encoder::new(0),
            contents: Contents::default(),
            parts: Vec::new(),
            pending: None,
            checkpoint: Size::default(),
            behind: Size::default(),
            begun_at: None,
            attempts: 0,
            has_garbage: false,
        }
    }

    async fn run(mut self) {
        if let Origin::Disks(log) = &self.origin {
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
        matches!(self.origin, Origin::Store)
    }

    fn fail(&self, error: LogError, is_over: bool) {
        let mut state = self.shared.state.lock();
        if !state.waiters.is_empty() {
            tracing::warn!(%error, "cannot write registrations or reports to the object store; they are not acknowledged");
        }
        if self.is_only_holder() {
            // The callers of these entries get the error now. Ends of shuffles are stored later.
            state.queue.retain(|(_, entry)| matches!(entry, Entry::Purged(_)));
            state.recharge();
        }
        state.fail(&error);
        if is_over {
            state.clear();
            state.ended = Some(error);
        }
    }

    /// Pauses after a failure, until a caller waits for the store.
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
        let is_long = self.behind.objects >= OBJECTS_MAX.max(8 * self.checkpoint.objects)
            || self.behind.bytes > BYTES_MAX.max(2 * self.checkpoint.bytes);
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
                    false if is_urgent || state.charge.bytes() > OBJECT_BYTES as u64 => return true,
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

    /// Creates an object from waiting entries.
    fn take(&mut self) {
        let (first, mut out) = (self.encoder.count(), BytesMut::new());
        let (mut position, mut frames, mut taken) = (0, 0, Vec::new());
        {
            let mut state = self.shared.state.lock();
            while frames < OBJECT_FRAMES
                && out.len() < OBJECT_BYTES
                && let Some((at, entry)) = state.queue.pop_front()
            {
                let before = out.len();
                if self.encoder.encode(&entry, 0, &mut out) {
                    frames += 1;
                    taken.push((entry, (out.len() - before) as u64));
                }
                position = at;
            }
            state.recharge();
        }
        if self.is_only_holder() {
            taken.iter().for_each(|(entry, bytes)| self.contents.took(entry, *bytes));
        }
        if frames > 0 {
            self.pending = Some(Pending { object: self.object(first), bytes: out.freeze(), position });
        }
    }

    /// Returns the object of the frames since `first`.
    fn object(&self, first: u64) -> LogObject {
        let frames = u32::try_from(self.encoder.count() - first).unwrap_or(u32::MAX);
        LogObject { generation: self.generation, process: self.process, first, frames }
    }

    /// Stores the pending object, with the same bytes and name on each attempt.
    async fn put_pending(&mut self) -> Result<(), LogError> {
        let Some(pending) = &self.pending else { return Ok(()) };
        let charge = self.memory.force_charge(pending.bytes.len() as u64);
        self.objects.put(pending.object, pending.bytes.clone()).await?;
        // Released before any waiter is notified that the object is stored.
        drop(charge);
        self.behind.objects += 1;
        self.behind.bytes += pending.bytes.len() as u64;
        self.parts.push(pending.object);
        self.shared.state.lock().advance(pending.position);
        self.pending = None;
        Ok(())
    }

    /// Begins a generation with a checkpoint of all living entries.
    async fn begin(&mut self) -> Result<(), LogError> {
        let before = std::mem::take(&mut self.parts);
        let known = self.shared.state.lock().known;
        self.generation += 1;
        self.attempts += 1;
        let mut writing = Checkpoint::of(self);
        let written = match (&self.origin, &self.found) {
            (Origin::Disks(log), _) => writing.copy_disks(&self.shared, &**log, self.attempts).await,
            (Origin::Store, Some(found)) => {
                writing.copy_store(found.reader(), &found.contents, found.gap()).await.map(|()| known)
            }
            (Origin::Store, None) => {
                let reader = ShippedReader::new(Arc::clone(&self.objects), &self.memory, before.clone());
                writing.copy_store(reader, &self.contents, None).await.map(|()| known)
            }
        };
        let position = match written {
            Ok(position) => position,
            Err(error) => {
                self.parts = before;
                return Err(error);
            }
        };
        (self.encoder, self.parts, self.contents) = (writing.encoder, writing.parts, writing.contents);
        (self.checkpoint, self.behind) = (writing.size, Size::default());
        self.unknown_gap = writing.unknown_gap;
        (self.found, self.pending, self.begun_at) = (None, None, Some(Instant::now()));
        self.has_garbage = true;
        let mut state = self.shared.state.lock();
        state.is_begun = true;
        state.advance(position);
        Ok(())
    }

    /// Deletes earlier generations. The remaining ones are deleted with the next generation.
    async fn delete_earlier(&mut self) {
        let deleting = async {
            let mut all = self.objects.list().await?;
            all.retain(|(object, _)| object.generation < self.generation);
            if all.is_empty() { Ok(()) } else { self.objects.delete(all).await }
        };
        if let Err(error) = deleting.await {
            tracing::warn!(%error, "cannot delete earlier objects of the metadata log yet; retrying");
        }
        self.has_garbage = false;
    }
}

/// A checkpoint that is being written.
struct Checkpoint {
    objects: Arc<dyn LogObjects>,
    memory: Budget,
    generation: u64,
    process: u32,
    encoder: Encoder,
    first: u64,
    out: BytesMut,
    parts: Vec<LogObject>,
    size: Size,
    contents: Contents,
    unknown_gap: Option<String>,
}

impl Checkpoint {
    fn of(task: &Task) -> Self {
        Self {
            objects: Arc::clone(&task.objects),
            memory: task.memory.clone(),
            generation: task.generation,
            process: task.process,
            encoder: Encoder::new(task.generation),
            first: 0,
            out: BytesMut::new(),
            parts: Vec::new(),
            size: Size::default(),
            contents: Contents::default(),
            unknown_gap: task.unknown_gap.clone(),
        }
    }

    /// Writes the contents of the disks' log. Returns the position that it covers.
    async fn copy_disks(
        &mut self,
        shared: &Shared,
        log: &dyn CheckpointSource,
        attempt: usize,
    ) -> Result<u64, LogError> {
        let covered = {
            // All waiting entries are already on the disks.
            let mut state = shared.state.lock();
            state.clear();
            state.has_overflowed = false;
            state.end
        };
        let written = self.copy_from(log, attempt).await;
        if written.is_err() {
            shared.state.lock().has_overflowed = true;
        }
        written.map(|()| covered)
    }

    async fn copy_from(&mut self, log: &dyn CheckpointSource, attempt: usize) -> Result<(), LogError> {
        let snapshot = log.snapshot().await?;
        let Snapshot { epoch, purged, marks, places } = &snapshot;
        self.put(&Entry::Epoch(Box::new(epoch.clone()))).await?;
        for mark in marks {
            self.put(mark).await?;
        }
        let source = &places.sources[attempt % places.sources.len()];
        let mut reader = source.read(&places.directories, places.deadline);
        while let Some(entry) = reader.next().await? {
            tokio::task::coop::consume_budget().await;
            if matches!(entry, Entry::Said(..)) && !is_over(purged, &entry) {
                self.put(&entry).await?;
            }
        }
        self.end().await
    }

    /// Writes the living entries of the log in the store. If some of them cannot be read, all of
    /// its shuffles become incomplete.
    async fn copy_store(
        &mut self,
        mut reader: ShippedReader,
        contents: &Contents,
        gap: Option<&str>,
    ) -> Result<(), LogError> {
        let next_incarnation = contents.next_incarnation;
        let epoch = |reason: Option<&str>| {
            let gap = reason.map(|reason| Gap { reason: reason.to_owned(), until_back: Vec::new() });
            Entry::Epoch(Box::new(Epoch { next_incarnation, gap, ..Epoch::default() }))
        };
        self.put(&epoch(self.unknown_gap.as_deref())).await?;
        for mark in contents.marks() {
            self.put(&mark).await?;
        }
        let mut replacements = contents.replacements.clone();
        while let Some((entry, _)) = reader.next().await? {
            let is_record = matches!(entry, Entry::Said(..));
            if is_record && !is_over(&contents.purged, &entry) && !replacements.replace(&entry) {
                self.put(&entry).await?;
            }
        }
        if let Some(reason) = gap.map(str::to_owned).or(reader.damage) {
            let unknown = self.unknown_gap.get_or_insert_with(|| reason.clone());
            let epoch = epoch(Some(unknown));
            self.put(&epoch).await?;
            for (key, found) in self.contents.shuffles() {
                let gap = Gap { reason: reason.clone(), until_back: Vec::new() };
                self.put(&Entry::Incomplete(Incarnation { key, number: found.incarnation }, gap)).await?;
            }
        }
        self.end().await
    }

    async fn put(&mut self, entry: &Entry) -> Result<(), LogError> {
        let before = self.out.len();
        if !self.encoder.encode(entry, 0, &mut self.out) {
            return Err(LogError::told("a record of the metadata log is too long for the object store"));
        }
        self.contents.took(entry, (self.out.len() - before) as u64);
        let frames = self.encoder.count() - self.first;
        if self.out.len() >= OBJECT_BYTES || frames >= OBJECT_FRAMES as u64 {
            self.flush().await?;
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), LogError> {
        self.put(&Entry::Begun).await?;
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), LogError> {
        let frames = u32::try_from(self.encoder.count() - self.first).unwrap_or(u32::MAX);
        if frames == 0 {
            return Ok(());
        }
        let (generation, process, first) = (self.generation, self.process, self.first);
        let object = LogObject { generation, process, first, frames };
        let bytes = self.out.split().freeze();
        let _charge = self.memory.force_charge(bytes.len() as u64);
        self.size.objects += 1;
        self.size.bytes += bytes.len() as u64;
        self.objects.put(object, bytes).await?;
        self.first = self.encoder.count();
        self.parts.push(object);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
