//! The flush scheduler: wakes on memory pressure or a tick, asks the policy for victims, seals
//! them, and queues batches for the workers.
//!
//! It also flushes on request: a whole shuffle for a commit, a buffer that is too large, or all of
//! memory for an operator or a stop. A batch gets the tiers' handles of its shuffle before the
//! seal, so it cannot reach a later shuffle of the same id. Invariant: an unwritten batch is
//! dropped only when the worker stops, or after its shuffle was purged. It decides neither what to
//! flush (`policy`) nor where (`placement`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::sync::{OwnedRwLockWriteGuard, RwLock as Gate, Semaphore, watch};
use tokio::time::{Duration, MissedTickBehavior, interval};

use crate::app::{App, AppRegistry};
use crate::clock::{Instant, sleep, timeout_at};
use crate::memory::{Buffer, EarlierBlocks, FlushableBuffer, Memory, SealedBatch, ShuffleBuffers};
use crate::runtime::Tasks;
use crate::store::{TierRole, TierShuffle, Tiers};
use uniffle_wire::types::{AppId, Distribution, ShuffleKey};

use super::FlushConfig;
use super::metrics::{FlushMetrics, QueueLengths};
use super::placement::{self, Readiness, TierView};
use super::policy::{self, Goal, MemoryUsage};
use super::queue::{FlushBatch, FlushQueue, Handles};

/// Maximum number of partitions in a batch. It bounds the index group and the time for which
/// publishing holds the shuffle's publish lock.
const BATCH_PARTS_MAX: usize = 4096;

/// Maximum number of blocks in a batch of several partitions, for the same reasons: 64 MiB of
/// blocks of 4 KiB.
const BATCH_BLOCKS_MAX: usize = 16 << 10;

/// Minimum for the limit on blocks being written at a time. A batch with more blocks than the limit
/// is written alone.
const BLOCKS_AT_ONCE_MIN: u64 = 128 << 10;
/// Bytes of memory capacity per block being written, above the minimum.
const BLOCKS_AT_ONCE_DIVISOR: u64 = 64 << 10;

/// Number of ticks between two sweeps for memory of aborted sends. A sweep walks all partitions.
const TICKS_PER_SWEEP: u32 = 10;

/// Number of partitions ever written to above which they are walked on a blocking thread.
const INLINE_PARTITIONS_MAX: u64 = 4096;

/// Interval of checks whether memory is empty.
const EMPTY_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The flusher of one worker.
#[derive(Debug)]
pub struct Flusher {
    pub(super) config: FlushConfig,
    limits: RwLock<policy::Limits>,
    pub(super) memory: Arc<Memory>,
    pub(super) tiers: Tiers,
    /// A queue per tier.
    pub(super) queues: Vec<FlushQueue>,
    pub(super) tasks: Tasks,
    pub(super) metrics: FlushMetrics,
    /// A permit for each block being written, and the total number of permits. Served in the order
    /// of arrival: the fair order of batches is that of `queues`.
    pub(super) blocks: (Semaphore, u32),
    /// Cloned by every batch: the number of clones is the number of batches not yet in a tier.
    batch_token: Arc<()>,
    wake: tokio::sync::Notify,
    /// True while memory is flushed before the process ends. Every tier is tried then. The pause of
    /// a batch that failed before is cut short; later failures have the usual backoff.
    pub(super) draining: watch::Sender<bool>,
    /// Gate that every batch passes before it is written.
    pub(super) gate: Arc<Gate<()>>,
    /// Guard that keeps the gate closed while present.
    paused: Mutex<Option<OwnedRwLockWriteGuard<()>>>,
    /// Registry whose accounts get flush times; set by the service.
    apps: OnceLock<Arc<AppRegistry>>,
    /// Largest request refused since the scheduler's last check.
    refused_bytes: AtomicU64,
}

impl Flusher {
    /// Starts the scheduler and its workers in `tasks`.
    ///
    /// # Errors
    /// A metric name is already registered in `registry`.
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
            queues: tiers.iter().map(|_| FlushQueue::default()).collect(),
            tiers,
            tasks: tasks.clone(),
            blocks: (Semaphore::new(blocks as usize), blocks),
            batch_token: Arc::new(()),
            wake: tokio::sync::Notify::new(),
            draining: watch::Sender::new(false),
            gate: Arc::default(),
            paused: Mutex::default(),
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

    /// Returns the current watermarks and bounds.
    pub fn limits(&self) -> policy::Limits {
        *self.limits.read()
    }

    /// Replaces the limits and wakes the scheduler at once.
    pub fn set_limits(&self, limits: policy::Limits) {
        *self.limits.write() = limits;
        self.wake.notify_one();
    }

    /// Sets the registry whose accounts record how long batches take.
    pub fn set_apps(&self, apps: Arc<AppRegistry>) {
        let _ = self.apps.set(apps); // later calls change nothing
    }

    pub(super) fn app_of(&self, key: &ShuffleKey) -> Option<Arc<App>> {
        self.apps.get()?.find(&key.app)
    }

    /// Flushes the `buffers` that exceed the single-buffer threshold. A buffer with too many
    /// batches in flight is flushed when one of them ends. The check is cheap.
    pub fn flush_oversized<'a>(
        &self,
        shuffle: &ShuffleBuffers,
        buffers: impl Iterator<Item = &'a Arc<Buffer>>,
    ) {
        let limits = self.limits();
        for buffer in buffers.filter(|buffer| policy::is_oversized(policy_candidate(0, buffer), &limits)) {
            self.flush_buffers(shuffle, std::slice::from_ref(buffer));
        }
    }

    /// Flushes `buffer`, whose partition has filled its share of memory, if none of it is being
    /// flushed.
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
        self.enqueue_group(
            shuffle.key(),
            VictimGroup { handles, distribution: shuffle.distribution(), parts },
        );
    }

    /// Flushes the data of a shuffle that is in memory now, regardless of the watermarks. Returns
    /// true once all of it is in the tiers below or the shuffle was purged, and false at
    /// `deadline`.
    pub async fn flush_shuffle(&self, shuffle: &ShuffleBuffers, deadline: Instant) -> bool {
        let buffers = shuffle.all().into_iter().filter(|buffer| buffer.block_count() > 0);
        let mut remaining: Vec<_> = buffers.map(|buffer| (buffer.mark(), buffer)).collect();
        loop {
            let mut waiting = Vec::new();
            remaining.retain(|(mark, buffer)| {
                let before = buffer.before(*mark);
                waiting.extend((before == EarlierBlocks::Waiting).then(|| Arc::clone(buffer)));
                before != EarlierBlocks::Nothing
            });
            if remaining.is_empty() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            self.flush_buffers(shuffle, &waiting);
            sleep(EMPTY_POLL_INTERVAL).await;
        }
    }

    /// Flushes the buffers of an ended batch that had too many batches in flight before. The
    /// batch's handles are valid for them: a buffer that can still be sealed belongs to the same
    /// incarnation of its shuffle.
    pub(super) fn flush_overdue(&self, batch: &FlushBatch) {
        let mut parts = Vec::new();
        for (buffer, _) in batch.parts.iter().filter(|(buffer, _)| buffer.is_overdue()) {
            let sealed = buffer.seal_within(self.limits().in_flight_batches_max);
            parts.extend(sealed.map(|sealed| (Arc::clone(buffer), sealed)));
        }
        if !parts.is_empty() {
            let (handles, distribution) = (Arc::clone(&batch.handles), batch.distribution);
            self.enqueue_group(&batch.key, VictimGroup { handles, distribution, parts });
        }
    }

    /// Returns the tiers that the flusher writes to.
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Returns the tiers' handles for a shuffle's blocks, or `None` if no tier knows the shuffle or
    /// it is stored in memory only.
    fn handles(&self, key: &ShuffleKey) -> Option<Handles> {
        let handles: Handles = self.tiers.iter().map(|tier| tier.shuffle(key)).collect();
        handles.iter().any(Option::is_some).then_some(handles)
    }

    /// Wakes the scheduler if the watermarks require a flush. The check is cheap.
    pub fn check_pressure(&self) {
        if !policy::flush_goal(self.usage(0), &self.limits()).is_nothing() {
            self.wake.notify_one();
        }
    }

    /// Records a refused ticket of `bytes` bytes and makes room for it even below the watermark.
    pub fn refused(&self, bytes: u64) {
        self.refused_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.wake.notify_one();
    }

    /// Returns the number of sealed batches that are not yet in a tier, including those that wait
    /// for a retry.
    pub fn unfinished(&self) -> usize {
        Arc::strong_count(&self.batch_token) - 1
    }

    /// Returns the number of batches that wait for a worker.
    pub fn queued(&self) -> usize {
        self.queues.iter().map(FlushQueue::len).sum()
    }

    /// Returns the total payload bytes written to the tiers.
    pub fn flushed_bytes(&self) -> u64 {
        self.metrics.all.spilled_bytes.get()
    }

    /// Returns the number of failed batch writes.
    pub fn failed_writes(&self) -> u64 {
        self.metrics.all.failed_writes.get()
    }

    /// Flushes everything in memory (operator request, stop, tests). Buffers with too many batches
    /// in flight follow as soon as one of them ends.
    pub fn flush_all(&self) {
        let candidates = self.memory.candidates();
        self.flush_these(candidates.iter());
    }

    /// Flushes regardless of the watermarks until memory has no flushable block, including blocks
    /// that arrive meanwhile, or until `deadline`. Returns whether it has none. Not the operator's
    /// drain: only a stop calls this.
    pub async fn drain(self: &Arc<Self>, deadline: Instant) -> bool {
        self.draining.send_replace(true);
        let emptied = loop {
            let blocks = self.memory.flushable_blocks();
            if blocks == 0 && self.unfinished() == 0 {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            if blocks > self.memory.in_flight_blocks() {
                self.walk(|flusher| flusher.flush_all()).await;
            }
            sleep(EMPTY_POLL_INTERVAL).await;
        };
        self.draining.send_replace(false);
        emptied
    }

    /// Pauses the flusher until [`Flusher::resume`]: begins no batch and waits for those being
    /// written. Returns false and changes nothing if a batch is still being written at `deadline`.
    pub async fn pause(&self, deadline: Instant) -> bool {
        let closed = timeout_at(deadline, Arc::clone(&self.gate).write_owned()).await;
        closed.map(|guard| self.paused.lock().replace(guard)).is_ok()
    }

    /// Ends the pause of [`Flusher::pause`].
    pub fn resume(&self) {
        let guard = self.paused.lock().take();
        drop(guard);
    }

    /// Updates the gauges of live values.
    pub fn refresh_metrics(&self) {
        let lengths = |queue: &FlushQueue| QueueLengths { queued: queue.len(), in_flight: queue.in_flight() };
        self.metrics.refresh(self.queues.iter().map(lengths));
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
                    self.queues.iter().for_each(FlushQueue::clear);
                    return;
                }
                () = self.wake.notified() => {}
                () = self.memory.pressure().notified() => {}
                _ = tick.tick() => self.sweep_periodically(&mut ticks).await,
            }
            // Applications below their share are entitled to the memory they wait for, regardless
            // of the number of requests.
            let refused = self.refused_bytes.swap(0, Ordering::Relaxed);
            let refused = refused.max(self.memory.tickets().claimed_bytes());
            let goal = policy::flush_goal(self.usage(refused), &self.limits());
            if !goal.is_nothing() {
                self.walk(move |flusher| flusher.flush_some(goal)).await;
                // Requests that arrive meanwhile are then handled in one pass, not one pass per
                // request.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Periodically looks for candidates, which also releases segments used only by aborted sends.
    async fn sweep_periodically(self: &Arc<Self>, ticks: &mut u32) {
        *ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(TICKS_PER_SWEEP) {
            self.walk(|flusher| drop(flusher.memory.candidates())).await;
        }
    }

    /// Runs `work`, which walks all partitions, on a blocking thread if there are many.
    async fn walk(self: &Arc<Self>, work: impl FnOnce(&Self) + Send + 'static) {
        if self.memory.partitions() <= INLINE_PARTITIONS_MAX {
            return work(self);
        }
        let flusher = Arc::clone(self);
        let walked = tokio::task::spawn_blocking(move || work(&flusher)).await;
        // A panic is propagated as if `work` had run inline.
        if let Some(panic) = walked.err().and_then(|error| error.try_into_panic().ok()) {
            std::panic::resume_unwind(panic);
        }
    }

    fn usage(&self, refused: u64) -> MemoryUsage {
        // Extent metadata cannot be flushed, so it is subtracted from both capacity and usage.
        let (whole, extents) = (self.memory.budget(), self.memory.extents().used());
        MemoryUsage {
            capacity: whole.capacity().saturating_sub(extents),
            used: whole.used().saturating_sub(extents),
            reserved: self.memory.tickets().pre_allocated_bytes(),
            in_flight: self.memory.in_flight_bytes(),
            blocks: self.memory.block_count(),
            blocks_in_flight: self.memory.in_flight_blocks(),
            refused,
        }
    }

    /// Seals buffers until `goal` is in flight.
    fn flush_some(&self, goal: Goal) {
        let candidates = self.memory.candidates();
        let holders = self.memory.tickets().holders();
        let indexes: HashMap<&AppId, usize> = holders.keys().zip(0..).collect();
        let apps: Vec<_> = holders.values().copied().collect();
        let index_of =
            |candidate: &FlushableBuffer| indexes.get(&candidate.key.app).copied().unwrap_or(usize::MAX);
        let sizes: Vec<policy::Candidate> =
            candidates.iter().map(|it| policy_candidate(index_of(it), &it.buffer)).collect();
        let victims = policy::victims(&sizes, &apps, goal, &self.limits());
        self.flush_these(victims.into_iter().map(|index| &candidates[index]));
    }

    fn flush_these<'a>(&self, victims: impl Iterator<Item = &'a FlushableBuffer>) {
        let in_flight_max = self.limits().in_flight_batches_max;
        let mut groups: HashMap<ShuffleKey, VictimGroup> = HashMap::new();
        for FlushableBuffer { key, distribution, buffer, .. } in victims {
            if !groups.contains_key(key) {
                let Some(handles) = self.handles(key) else { continue };
                groups.insert(
                    key.clone(),
                    VictimGroup { handles, distribution: *distribution, parts: Vec::new() },
                );
            }
            if let (Some(group), Some(sealed)) = (groups.get_mut(key), buffer.seal_within(in_flight_max)) {
                group.parts.push((Arc::clone(buffer), sealed));
            }
        }
        for (key, mut group) in groups {
            // Reducers read partitions in order. Sorting places neighbours next to each other in
            // the log, so that small ones are read ahead.
            group.parts.sort_unstable_by_key(|(_, sealed)| sealed.partition());
            self.enqueue_group(&key, group);
        }
    }

    /// Cuts a group into batches. Each partition is a batch of its own for a tier with files per
    /// partition.
    fn enqueue_group(&self, key: &ShuffleKey, group: VictimGroup) {
        let VictimGroup { handles, distribution, parts } = group;
        let batch = |parts: Parts, is_cold: bool| FlushBatch {
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
            let parts_max =
                if self.needs_batch_per_partition(&handles, is_cold) { 1 } else { BATCH_PARTS_MAX };
            let limits = BatchLimits {
                bytes: self.config.batch_bytes_max,
                blocks: BATCH_BLOCKS_MAX,
                parts: parts_max,
            };
            for parts in cut_batches(parts, limits) {
                self.enqueue(batch(parts, is_cold));
            }
        }
    }

    /// Returns whether a batch belongs to a tier with files per partition, regardless of the tiers'
    /// readiness.
    fn needs_batch_per_partition(&self, handles: &Handles, is_cold: bool) -> bool {
        let selected = placement::select(&self.views(handles, |_, _| true), is_cold, None);
        selected.is_some_and(|index| self.tiers.at(index).capability().role == TierRole::Cold)
    }

    /// Queues a batch for the selected tier.
    pub(super) fn enqueue(&self, batch: FlushBatch) {
        // In the last flush every tier is tried, even if it was not accepting before.
        let is_last = *self.draining.borrow();
        let takes = |index: usize, shuffle: &dyn TierShuffle| {
            let in_flight_max = self.tiers.at(index).capability().in_flight_max;
            is_last || (shuffle.is_accepting() && self.queues[index].in_flight() < in_flight_max)
        };
        match placement::select(&self.views(&batch.handles, takes), batch.is_cold, batch.failed) {
            Some(index) => {
                let weight = self.memory.tickets().weight_of(&batch.key.app);
                self.queues[index].push(batch, weight);
            }
            // A batch is created with a handle, so it has a tier; dropping it here would lose it
            // silently.
            None => tracing::error!(shuffle = %batch.key, "batch has no tier to flush to"),
        }
    }

    /// Returns the tiers as placement sees them, for a shuffle with these handles.
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

/// Victims of one shuffle. The tiers' handles are taken *before* the seal. A buffer that can still
/// be sealed was not purged, so the handles belong to its own incarnation and not to a later
/// shuffle with the same key.
struct VictimGroup {
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

/// Sizes at which a batch is closed.
#[derive(Clone, Copy)]
struct BatchLimits {
    /// Approximate maximum of payload bytes.
    bytes: u64,
    /// Approximate maximum of blocks.
    blocks: usize,
    /// Maximum of partitions.
    parts: usize,
}

/// Cuts `parts` into batches.
fn cut_batches(parts: Parts, limits: BatchLimits) -> Vec<Parts> {
    let mut batches = Vec::new();
    let mut open = Vec::new();
    let (mut open_bytes, mut open_blocks) = (0, 0);
    for part in parts {
        let (bytes, blocks) = (part.1.bytes(), part.1.blocks());
        let is_full = open_bytes + bytes > limits.bytes
            || open_blocks + blocks > limits.blocks
            || open.len() >= limits.parts;
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
    use crate::memory::MemoryConfig;
    use uniffle_base::budget::HeapKind;
    use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, ShuffleId, TaskAttemptId};

    /// Returns a sealed partition with `blocks` blocks of one byte.
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
        let filled: Vec<_> = filled.collect();
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
        assert_eq!(cut(BatchLimits { bytes: 1000, blocks: 60, parts: 4096 }), [vec![10, 20, 30], vec![40]]);
    }
}
