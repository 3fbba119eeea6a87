//! The scheduler: wakes on pressure or tick, asks the policy, seals victims, queues batches.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::sync::{OwnedRwLockWriteGuard, RwLock as Gate, Semaphore, watch};
use tokio::time::{Duration, MissedTickBehavior, interval};

use crate::app::{App, AppRegistry};
use crate::clock::{Instant, sleep, timeout_at};
use crate::memory::{Before, Buffer, Candidate, Memory, SealedBatch, ShuffleBuffers};
use crate::runtime::Tasks;
use crate::tiers::{TierRole, TierShuffle, Tiers};
use uniffle_wire::types::{AppId, Distribution, ShuffleKey};

use super::FlushConfig;
use super::metrics::FlushMetrics;
use super::placement::{self, Readiness, TierView};
use super::policy::{self, Goal, Usage};
use super::queue::{Batch, Handles, Queue};

/// Partitions that one batch may hold: bounds its index group and the time that its publishing holds the shuffle's lane.
const BATCH_PARTS_MAX: usize = 4096;

/// Blocks that a batch of several partitions may hold, likewise: 64 MiB of blocks of 4 KiB.
const BATCH_BLOCKS_MAX: usize = 16 << 10;

/// Blocks of all batches that are being written at a time, at least; a batch with more goes alone.
const BLOCKS_AT_ONCE_MIN: u64 = 128 << 10;
/// ... and one for so many bytes of the capacity: four hundred batches of blocks of 14 KiB at 100 GB.
const BLOCKS_AT_ONCE_DIVISOR: u64 = 64 << 10;

/// Every so many ticks memory of aborted sends is looked for: it walks all partitions.
const TICKS_PER_SWEEP: u32 = 10;

/// Above so many partitions that were ever written to, they are gone through on a blocking thread: some 100 ns each.
const INLINE_PARTITIONS_MAX: u64 = 4096;

/// Between two looks whether memory is empty.
const EMPTYING_LOOK: Duration = Duration::from_millis(10);

/// The flusher of one worker.
#[derive(Debug)]
pub struct Flusher {
    pub(super) config: FlushConfig,
    limits: RwLock<policy::Limits>,
    pub(super) memory: Arc<Memory>,
    pub(super) tiers: Tiers,
    /// One per tier.
    pub(super) queues: Vec<Queue>,
    pub(super) tasks: Tasks,
    pub(super) metrics: FlushMetrics,
    /// A permit for each block that is being written, and how many there are.
    pub(super) blocks: (Semaphore, u32),
    /// Every batch holds a clone: their number is the number of batches that are not in the store yet.
    batch_token: Arc<()>,
    wake: tokio::sync::Notify,
    /// True while memory is to be emptied before the process ends: batches that failed do not wait long for their next try, and
    /// every tier is tried.
    pub(super) hurry: watch::Sender<bool>,
    /// Passed by every batch that is written.
    pub(super) gate: Arc<Gate<()>>,
    /// Closes the gate while it is there.
    resting: Mutex<Option<OwnedRwLockWriteGuard<()>>>,
    /// Whose accounts are told; the service brings them.
    apps: OnceLock<Arc<AppRegistry>>,
    /// Largest request refused since the scheduler last looked.
    refused_bytes: AtomicU64,
}

impl Flusher {
    /// Starts the scheduler and its workers in `tasks`.
    ///
    /// # Errors
    /// A metric name that is taken in `registry`.
    pub fn start(
        config: FlushConfig,
        memory: Arc<Memory>,
        tiers: impl Into<Tiers>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let tiers = tiers.into();
        let names: Vec<_> = tiers.iter().map(|tier| tier.capability().names).collect();
        let blocks = (memory.capacity_bytes() / BLOCKS_AT_ONCE_DIVISOR).max(BLOCKS_AT_ONCE_MIN);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let flusher = Arc::new(Self {
            metrics: FlushMetrics::new(registry, &names)?,
            limits: RwLock::new(config.limits),
            config,
            memory,
            queues: tiers.iter().map(|_| Queue::default()).collect(),
            tiers,
            tasks: tasks.clone(),
            blocks: (Semaphore::new(blocks as usize), blocks),
            batch_token: Arc::new(()),
            wake: tokio::sync::Notify::new(),
            hurry: watch::Sender::new(false),
            gate: Arc::default(),
            resting: Mutex::default(),
            apps: OnceLock::new(),
            refused_bytes: AtomicU64::new(0),
        });
        let scheduler = Arc::clone(&flusher);
        tasks.spawn_again("flush scheduler", move || Arc::clone(&scheduler).schedule());
        for (index, tier) in flusher.tiers.iter().enumerate() {
            for _ in 0..tier.capability().writers {
                let worker = Arc::clone(&flusher);
                tasks.spawn_again("flush worker", move || Arc::clone(&worker).work(index));
            }
        }
        Ok(flusher)
    }

    /// Watermarks and bounds as they are now.
    pub fn limits(&self) -> policy::Limits {
        *self.limits.read()
    }

    /// Replaces them and looks at once.
    pub fn set_limits(&self, limits: policy::Limits) {
        *self.limits.write() = limits;
        self.wake.notify_one();
    }

    /// From now on the accounts of `apps` tell how long their batches take.
    pub fn charge_to(&self, apps: Arc<AppRegistry>) {
        let _ = self.apps.set(apps); // the first one stays
    }

    pub(super) fn app_of(&self, key: &ShuffleKey) -> Option<Arc<App>> {
        self.apps.get()?.find(&key.app)
    }

    /// Flushes `buffer` now if it has outgrown the single-buffer threshold, or when one of the batches of it that are in
    /// flight ends. Cheap when it has not.
    pub fn flush_if_oversized(&self, shuffle: &ShuffleBuffers, buffer: &Arc<Buffer>) {
        if policy::is_oversized(policy_candidate(0, buffer), &self.limits()) {
            self.flush_buffers(shuffle, std::slice::from_ref(buffer));
        }
    }

    /// Flushes `buffer` now if nothing of it is on its way: its partition has filled its share of the memory.
    pub fn flush_if_stuck(&self, shuffle: &ShuffleBuffers, buffer: &Arc<Buffer>) {
        if policy::is_stuck(policy_candidate(0, buffer)) {
            self.flush_buffers(shuffle, std::slice::from_ref(buffer));
        }
    }

    fn flush_buffers(&self, shuffle: &ShuffleBuffers, buffers: &[Arc<Buffer>]) {
        let Some(handles) = self.handles(shuffle.key()) else { return };
        let in_flight_max = self.limits().in_flight_batches_max;
        let sealed = |buffer: &Arc<Buffer>| Some((Arc::clone(buffer), buffer.seal_within(in_flight_max)?));
        let mut parts: Parts = buffers.iter().filter_map(sealed).collect();
        if parts.is_empty() {
            return;
        }
        parts.sort_unstable_by_key(|(_, sealed)| sealed.partition());
        self.enqueue_group(shuffle.key(), Group { handles, distribution: shuffle.distribution(), parts });
    }

    /// Flushes what a shuffle has in memory now, whatever the watermarks say. True once all of it is in the tiers below (or
    /// the shuffle is gone), false when it is not by `deadline`.
    pub async fn flush_shuffle(&self, shuffle: &ShuffleBuffers, deadline: Instant) -> bool {
        let buffers = shuffle.all().into_iter().filter(|buffer| buffer.block_count() > 0);
        let mut left: Vec<_> = buffers.map(|buffer| (buffer.mark(), buffer)).collect();
        loop {
            let mut waiting = Vec::new();
            left.retain(|(mark, buffer)| {
                let before = buffer.before(*mark);
                waiting.extend((before == Before::Waiting).then(|| Arc::clone(buffer)));
                before != Before::Nothing
            });
            if left.is_empty() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            self.flush_buffers(shuffle, &waiting);
            sleep(EMPTYING_LOOK).await;
        }
    }

    /// A batch has ended: flushes those of its buffers that had too many in flight for it before. The handles are those of
    /// the batch: a buffer that can still be sealed is of the same incarnation of its shuffle.
    pub(super) fn flush_overdue(&self, batch: &Batch) {
        let mut parts = Vec::new();
        for (buffer, _) in batch.parts.iter().filter(|(buffer, _)| buffer.is_overdue()) {
            let sealed = buffer.seal_within(self.limits().in_flight_batches_max);
            parts.extend(sealed.map(|sealed| (Arc::clone(buffer), sealed)));
        }
        if !parts.is_empty() {
            let (handles, distribution) = (Arc::clone(&batch.handles), batch.distribution);
            self.enqueue_group(&batch.key, Group { handles, distribution, parts });
        }
    }

    /// The tiers that are filled.
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Where a shuffle's blocks can go; none when it is not known to any tier, or has no place but memory.
    fn handles(&self, key: &ShuffleKey) -> Option<Handles> {
        let handles: Handles = self.tiers.iter().map(|tier| tier.shuffle(key)).collect();
        handles.iter().any(Option::is_some).then_some(handles)
    }

    /// Wakes the scheduler if the watermarks ask for it. Cheap when they do not.
    pub fn check_pressure(&self) {
        if !policy::flush_goal(self.usage(0), &self.limits()).is_nothing() {
            self.wake.notify_one();
        }
    }

    /// A ticket of `bytes` was refused: makes room for it even below the watermark.
    pub fn refused(&self, bytes: u64) {
        self.refused_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.wake.notify_one();
    }

    /// Batches that are sealed and not yet in the store, waiting retries included.
    pub fn unfinished(&self) -> usize {
        Arc::strong_count(&self.batch_token) - 1
    }

    /// Batches that wait for a worker.
    pub fn queued(&self) -> usize {
        self.queues.iter().map(Queue::len).sum()
    }

    /// Payload ever brought to the store.
    pub fn flushed_bytes(&self) -> u64 {
        self.metrics.all.spilled_bytes.get()
    }

    /// How often a batch could be written to no disk.
    pub fn failed_writes(&self) -> u64 {
        self.metrics.all.failed_writes.get()
    }

    /// Puts everything that is in memory in flight (an operator's wish, tests). What has too many batches in flight
    /// follows as soon as one of them ends.
    pub fn flush_all(&self) {
        let candidates = self.memory.candidates();
        self.flush_these(candidates.iter());
    }

    /// Flushes whatever the watermarks say until nothing is in memory, what arrives meanwhile included, or until
    /// `deadline`; true if nothing is left.
    pub async fn empty(self: &Arc<Self>, deadline: Instant) -> bool {
        self.hurry.send_replace(true);
        let emptied = loop {
            if self.memory.block_count() == 0 && self.unfinished() == 0 {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            if self.memory.block_count() > self.memory.in_flight_blocks() {
                self.walk(|flusher| flusher.flush_all()).await;
            }
            sleep(EMPTYING_LOOK).await;
        };
        self.hurry.send_replace(false);
        emptied
    }

    /// Begins no batch until [`Flusher::go_on`], and waits for those that are being written; false, and nothing is changed,
    /// if one is still not written at `deadline`.
    pub async fn rest(&self, deadline: Instant) -> bool {
        let closed = timeout_at(deadline, Arc::clone(&self.gate).write_owned()).await;
        closed.map(|guard| self.resting.lock().replace(guard)).is_ok()
    }

    /// Undoes [`Flusher::rest`].
    pub fn go_on(&self) {
        let guard = self.resting.lock().take();
        drop(guard);
    }

    /// Brings gauges of live values up to date.
    pub fn refresh_metrics(&self) {
        self.metrics.refresh(self.queues.iter().map(|queue| (queue.len(), queue.in_flight())));
    }

    async fn schedule(self: Arc<Self>) {
        let stopped = self.tasks.cancelled();
        tokio::pin!(stopped);
        let mut tick = interval(self.config.tick);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ticks = 0;
        loop {
            tokio::select! {
                biased;
                () = &mut stopped => {
                    self.queues.iter().for_each(Queue::clear);
                    return;
                }
                () = self.wake.notified() => {}
                () = self.memory.pressure().notified() => {}
                _ = tick.tick() => self.drop_dead_now_and_then(&mut ticks).await,
            }
            // What those below their shares wait for is theirs, however many requests it is.
            let refused = self.refused_bytes.swap(0, Ordering::Relaxed);
            let refused = refused.max(self.memory.tickets().claimed_bytes());
            let goal = policy::flush_goal(self.usage(refused), &self.limits());
            if !goal.is_nothing() {
                self.walk(move |flusher| flusher.flush_some(goal)).await;
                // All in one go; whatever arrives meanwhile is looked at once, not once per request.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Looking for candidates also gives back segments that only aborted sends had used.
    async fn drop_dead_now_and_then(self: &Arc<Self>, ticks: &mut u32) {
        *ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(TICKS_PER_SWEEP) {
            self.walk(|flusher| drop(flusher.memory.candidates())).await;
        }
    }

    /// Does what goes through all partitions: away from the runtime's threads when there are many.
    async fn walk(self: &Arc<Self>, work: impl FnOnce(&Self) + Send + 'static) {
        if self.memory.partitions() <= INLINE_PARTITIONS_MAX {
            return work(self);
        }
        let flusher = Arc::clone(self);
        let walked = tokio::task::spawn_blocking(move || work(&flusher)).await;
        // As if it had been done here.
        if let Some(panic) = walked.err().and_then(|error| error.try_into_panic().ok()) {
            std::panic::resume_unwind(panic);
        }
    }

    fn usage(&self, refused: u64) -> Usage {
        // What no flush frees is as if it were not there.
        let (whole, extents) = (self.memory.budget(), self.memory.extents().used());
        Usage {
            capacity: whole.capacity().saturating_sub(extents),
            used: whole.used().saturating_sub(extents),
            reserved: self.memory.tickets().pre_allocated_bytes(),
            in_flight: self.memory.in_flight_bytes(),
            blocks: self.memory.block_count(),
            blocks_in_flight: self.memory.in_flight_blocks(),
            refused,
        }
    }

    /// Seals buffers until `goal` is under way.
    fn flush_some(&self, goal: Goal) {
        let candidates = self.memory.candidates();
        let holders = self.memory.tickets().holders();
        let places: HashMap<&AppId, usize> = holders.keys().zip(0..).collect();
        let apps: Vec<_> = holders.values().copied().collect();
        let place = |candidate: &Candidate| places.get(&candidate.key.app).copied().unwrap_or(usize::MAX);
        let sizes: Vec<policy::Candidate> =
            candidates.iter().map(|it| policy_candidate(place(it), &it.buffer)).collect();
        let victims = policy::victims(&sizes, &apps, goal, &self.limits());
        self.flush_these(victims.into_iter().map(|index| &candidates[index]));
    }

    fn flush_these<'a>(&self, victims: impl Iterator<Item = &'a Candidate>) {
        let in_flight_max = self.limits().in_flight_batches_max;
        let mut groups: HashMap<ShuffleKey, Group> = HashMap::new();
        for Candidate { key, distribution, buffer, .. } in victims {
            if !groups.contains_key(key) {
                let Some(handles) = self.handles(key) else { continue };
                groups.insert(key.clone(), Group { handles, distribution: *distribution, parts: Vec::new() });
            }
            if let (Some(group), Some(sealed)) = (groups.get_mut(key), buffer.seal_within(in_flight_max)) {
                group.parts.push((Arc::clone(buffer), sealed));
            }
        }
        for (key, mut group) in groups {
            // Reducers read partitions in order: neighbours in a log are then read ahead, however small they are.
            group.parts.sort_unstable_by_key(|(_, sealed)| sealed.partition());
            self.enqueue_group(&key, group);
        }
    }

    /// Cuts a group into batches, those for a tier of files by partition partition by partition.
    fn enqueue_group(&self, key: &ShuffleKey, group: Group) {
        let Group { handles, distribution, parts } = group;
        let batch = |parts: Parts, is_cold: bool| Batch {
            key: key.clone(),
            handles: Arc::clone(&handles),
            is_cold,
            distribution,
            parts,
            sealed_at: Instant::now(),
            queued: Instant::now(),
            failures: 0,
            failed: None,
            in_flight: None,
            _token: Arc::clone(&self.batch_token),
        };
        let huge_partition_bytes = self.limits().huge_partition_bytes;
        let is_cold = |(buffer, sealed): &(Arc<Buffer>, Arc<SealedBatch>)| {
            let received = buffer.received_bytes();
            placement::is_cold(sealed.bytes(), received, self.config.cold_bytes, huge_partition_bytes)
        };
        let (cold, rest): (Parts, Parts) = parts.into_iter().partition(is_cold);
        for (parts, is_cold) in [(cold, true), (rest, false)] {
            let parts_max = if self.goes_by_partition(&handles, is_cold) { 1 } else { BATCH_PARTS_MAX };
            for parts in cut_batches(parts, (self.config.batch_bytes_max, BATCH_BLOCKS_MAX, parts_max)) {
                self.enqueue(batch(parts, is_cold));
            }
        }
    }

    /// Whether a batch belongs to a tier of files by partition, whatever takes batches at the moment.
    fn goes_by_partition(&self, handles: &Handles, is_cold: bool) -> bool {
        let selected = placement::select(&self.views(handles, |_, _| true), is_cold, None);
        selected.is_some_and(|index| self.tiers.at(index).capability().role == TierRole::Cold)
    }

    /// Queues a batch for the tier that is to take it.
    pub(super) fn enqueue(&self, batch: Batch) {
        // In the last flush a tier that takes nothing has to say so itself, whatever it said before.
        let is_last = *self.hurry.borrow();
        let takes = |index: usize, shuffle: &dyn TierShuffle| {
            let in_flight_max = self.tiers.at(index).capability().in_flight_max;
            is_last || (shuffle.is_accepting() && self.queues[index].in_flight() < in_flight_max)
        };
        match placement::select(&self.views(&batch.handles, takes), batch.is_cold, batch.failed) {
            Some(index) => {
                let weight = self.memory.tickets().weight_of(&batch.key.app);
                self.queues[index].push(batch, weight);
            }
            // A batch is made with a handle, so there is a tier; dropping it would lose it silently.
            None => tracing::error!(shuffle = %batch.key, "batch has no tier to be written to"),
        }
    }

    /// The tiers as placement sees them, for a shuffle with these handles.
    fn views(&self, handles: &Handles, takes: impl Fn(usize, &dyn TierShuffle) -> bool) -> Vec<TierView> {
        let view = |(index, handle): (usize, &Option<Arc<dyn TierShuffle>>)| TierView {
            readiness: match handle {
                None => Readiness::Absent,
                Some(shuffle) if takes(index, &**shuffle) => Readiness::Ready,
                Some(_) => Readiness::Unavailable,
            },
            is_for_cold: self.tiers.at(index).capability().role == TierRole::Cold,
        };
        handles.iter().enumerate().map(view).collect()
    }
}

/// Sealed chains and the buffers they came from.
type Parts = Vec<(Arc<Buffer>, Arc<SealedBatch>)>;

/// Victims of one shuffle. The stores' handles are taken *before* the seal: a buffer that can still be sealed was not
/// purged, so the handles are of its own incarnation and not of a later shuffle with the same key.
struct Group {
    handles: Handles,
    distribution: Distribution,
    parts: Parts,
}

fn policy_candidate(app: usize, buffer: &Buffer) -> policy::Candidate {
    policy::Candidate {
        app,
        charged_bytes: buffer.active_charged_bytes(),
        payload_bytes: buffer.active_bytes(),
        blocks: buffer.active_blocks() as u64,
        received_bytes: buffer.received_bytes(),
        in_flight_batches: buffer.in_flight_batches(),
    }
}

/// Cuts `parts` into batches of about `bytes_max` payload bytes and `blocks_max` blocks, and of at most `parts_max`
/// partitions.
fn cut_batches(parts: Parts, (bytes_max, blocks_max, parts_max): (u64, usize, usize)) -> Vec<Parts> {
    let mut batches = Vec::new();
    let mut open = Vec::new();
    let (mut open_bytes, mut open_blocks) = (0, 0);
    for part in parts {
        let (bytes, blocks) = (part.1.bytes(), part.1.blocks());
        let is_full =
            open_bytes + bytes > bytes_max || open_blocks + blocks > blocks_max || open.len() >= parts_max;
        if is_full && !open.is_empty() {
            batches.push(std::mem::take(&mut open));
            (open_bytes, open_blocks) = (0, 0);
        }
        open_bytes += bytes;
        open_blocks += blocks;
        open.push(part);
    }
    if !open.is_empty() {
        batches.push(open);
    }
    batches
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::budget::HeapKind;
    use crate::memory::MemoryConfig;
    use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, ShuffleId, TaskAttemptId};

    /// A partition with so many blocks of one byte.
    pub(in crate::flush) fn part(
        memory: &Memory,
        partition: i32,
        blocks: i64,
    ) -> (Arc<Buffer>, Arc<SealedBatch>) {
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(0));
        let shuffle = memory.register(&key, Distribution::Normal);
        let buffer = shuffle.buffer(PartitionId(partition), memory.heap().of(HeapKind::Partitions)).unwrap();
        let ticket = memory.tickets().require(&key.app, blocks.unsigned_abs(), 1).unwrap();
        let mut funds = memory.tickets().redeem(&key.app, ticket).unwrap();
        let filled = (0..blocks).map(|id| {
            let mut fill = buffer.reserve(1, &mut funds).unwrap();
            fill.write(&[7]);
            let (block_id, task_attempt_id) = (BlockId(id), TaskAttemptId(0));
            (BlockMeta { block_id, task_attempt_id, length: 1, uncompressed_length: 1, crc: 0 }, fill)
        });
        let filled = filled.collect();
        buffer.commit(filled, &mut funds).unwrap();
        let sealed = buffer.seal().unwrap();
        (buffer, sealed)
    }

    #[test]
    fn batch_is_closed_by_block_count() {
        let config = MemoryConfig { capacity_bytes: 32 << 20, ..MemoryConfig::default() };
        let memory = Memory::new(&config, &Registry::new()).unwrap();
        let cut = |limits| {
            let parts = [10, 20, 30, 40].into_iter().zip(0..);
            let batches = cut_batches(parts.map(|(blocks, at)| part(&memory, at, blocks)).collect(), limits);
            let sizes = batches.iter().map(|parts| parts.iter().map(|(_, it)| it.blocks()).collect());
            sizes.collect::<Vec<Vec<_>>>()
        };
        assert_eq!(cut((1000, 60, 4096)), [vec![10, 20, 30], vec![40]]);
    }
}
