//! The scheduler: wakes on pressure or tick, asks the policy, seals victims, queues batches.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use prometheus::Registry;
use tokio::sync::watch;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep};

use crate::app::{App, AppRegistry};
use crate::memory::{Buffer, Candidate, Memory, SealedBatch, ShuffleBuffers};
use crate::runtime::Tasks;
use uniffle_wire::types::{Distribution, ShuffleKey};

use super::metrics::FlushMetrics;
use super::policy::{self, Goal, Usage};
use super::queue::{Batch, Handles, Queue};
use super::tier::{self, Choice, Offer, Tier};
use super::{FlushConfig, Stores};

/// Partitions that one batch may hold: bounds its index group and the time that its publishing holds the shuffle's lane.
const BATCH_PARTS_MAX: usize = 4096;

/// Every so many ticks memory of aborted sends is looked for: it walks all partitions.
const TICKS_PER_SWEEP: u32 = 10;

/// Between two looks whether memory is empty.
const EMPTYING_LOOK: Duration = Duration::from_millis(10);

/// The flusher of one worker.
#[derive(Debug)]
pub struct Flusher {
    pub(super) config: FlushConfig,
    limits: RwLock<policy::Limits>,
    pub(super) memory: Arc<Memory>,
    pub(super) stores: Stores,
    pub(super) local_queue: Queue,
    pub(super) hdfs_queue: Queue,
    /// Held by every batch that is queued for HDFS or being written there.
    pub(super) hdfs_in_flight: Arc<()>,
    pub(super) tasks: Tasks,
    pub(super) metrics: FlushMetrics,
    /// Every batch holds a clone: their number is the number of batches that are not in the store yet.
    batch_token: Arc<()>,
    wake: tokio::sync::Notify,
    /// True while memory is to be emptied: batches that failed do not wait long for their next try.
    pub(super) hurry: watch::Sender<bool>,
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
        stores: impl Into<Stores>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let flusher = Arc::new(Self {
            metrics: FlushMetrics::new(registry)?,
            limits: RwLock::new(config.limits),
            config,
            memory,
            stores: stores.into(),
            local_queue: Queue::default(),
            hdfs_queue: Queue::default(),
            hdfs_in_flight: Arc::new(()),
            tasks: tasks.clone(),
            batch_token: Arc::new(()),
            wake: tokio::sync::Notify::new(),
            hurry: watch::Sender::new(false),
            apps: OnceLock::new(),
            refused_bytes: AtomicU64::new(0),
        });
        let scheduler = Arc::clone(&flusher);
        tasks.spawn_again("flush scheduler", move || Arc::clone(&scheduler).schedule());
        let workers = |present: bool, count: usize| if present { count } else { 0 };
        for _ in 0..workers(flusher.stores.local.is_some(), flusher.config.workers) {
            let worker = Arc::clone(&flusher);
            tasks.spawn_again("flush worker", move || Arc::clone(&worker).work(Tier::Local));
        }
        for _ in 0..workers(flusher.stores.hdfs.is_some(), flusher.config.hdfs_in_flight_max) {
            let worker = Arc::clone(&flusher);
            tasks.spawn_again("hdfs flush worker", move || Arc::clone(&worker).work(Tier::Hdfs));
        }
        Ok(flusher)
    }

    /// Watermarks and bounds as they are now.
    #[must_use]
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

    /// Flushes `buffer` now if it has outgrown the single-buffer threshold. Cheap when it has not.
    pub fn offer(&self, shuffle: &ShuffleBuffers, buffer: &Arc<Buffer>) {
        let candidate = policy_candidate(buffer);
        if policy::is_oversized(candidate, &self.limits()) {
            self.flush_one(shuffle, buffer);
        }
    }

    /// Flushes `buffer` now if nothing of it is on its way: its partition has filled its share of the memory.
    pub fn relieve(&self, shuffle: &ShuffleBuffers, buffer: &Arc<Buffer>) {
        if policy::is_stuck(policy_candidate(buffer)) {
            self.flush_one(shuffle, buffer);
        }
    }

    fn flush_one(&self, shuffle: &ShuffleBuffers, buffer: &Arc<Buffer>) {
        let Some(handles) = self.handles(shuffle.key()) else { return };
        if let Some(sealed) = buffer.seal() {
            let group = Group {
                handles,
                distribution: shuffle.distribution(),
                parts: vec![(Arc::clone(buffer), sealed)],
            };
            self.enqueue_group(shuffle.key(), group);
        }
    }

    /// Where a shuffle's blocks can go; none when it is not known to any store, or has no place but memory.
    fn handles(&self, key: &ShuffleKey) -> Option<Handles> {
        let Stores { local, hdfs } = &self.stores;
        let handles = Handles {
            local: local.as_ref().and_then(|store| store.handle(key)),
            hdfs: hdfs.as_ref().and_then(|store| store.handle(key)),
        };
        (handles.local.is_some() || handles.hdfs.is_some()).then_some(handles)
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
    #[must_use]
    pub fn unfinished(&self) -> usize {
        Arc::strong_count(&self.batch_token) - 1
    }

    /// Batches that wait for a worker.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.local_queue.len() + self.hdfs_queue.len()
    }

    /// Payload ever brought to the store.
    #[must_use]
    pub fn flushed_bytes(&self) -> u64 {
        self.metrics.all.spilled_bytes.get()
    }

    /// How often a batch could be written to no disk.
    #[must_use]
    pub fn failed_writes(&self) -> u64 {
        self.metrics.all.failed_writes.get()
    }

    /// Puts everything that is in memory in flight (an operator's wish, tests).
    pub fn flush_all(&self) {
        self.flush_some(Goal::ALL);
    }

    /// Flushes whatever the watermarks say until nothing is in memory, what arrives meanwhile included, or until
    /// `deadline`; true if nothing is left.
    pub async fn empty(&self, deadline: Instant) -> bool {
        self.hurry.send_replace(true);
        let emptied = loop {
            if self.memory.block_count() == 0 && self.unfinished() == 0 {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            if self.memory.block_count() > self.memory.in_flight_blocks() {
                self.flush_all();
            }
            sleep(EMPTYING_LOOK).await;
        };
        self.hurry.send_replace(false);
        emptied
    }

    /// Brings gauges of live values up to date.
    pub fn refresh_metrics(&self) {
        self.metrics.refresh(self.local_queue.len(), self.hdfs_queue.len(), self.hdfs_in_flight());
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
                    self.local_queue.clear();
                    self.hdfs_queue.clear();
                    return;
                }
                () = self.wake.notified() => {}
                () = self.memory.pressure().notified() => {}
                _ = tick.tick() => self.drop_dead_now_and_then(&mut ticks),
            }
            let goal =
                policy::flush_goal(self.usage(self.refused_bytes.swap(0, Ordering::Relaxed)), &self.limits());
            if !goal.is_nothing() {
                self.flush_some(goal);
                // All in one go; whatever arrives meanwhile is looked at once, not once per request.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Looking for candidates also gives back segments that only aborted sends had used.
    fn drop_dead_now_and_then(&self, ticks: &mut u32) {
        *ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(TICKS_PER_SWEEP) {
            drop(self.memory.candidates());
        }
    }

    fn usage(&self, refused: u64) -> Usage {
        Usage {
            capacity: self.memory.budget().capacity(),
            used: self.memory.budget().used(),
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
        let sizes: Vec<policy::Candidate> =
            candidates.iter().map(|candidate| policy_candidate(&candidate.buffer)).collect();
        let mut groups: HashMap<ShuffleKey, Group> = HashMap::new();
        for index in policy::victims(&sizes, goal, &self.limits()) {
            let Candidate { key, distribution, buffer, .. } = &candidates[index];
            if !groups.contains_key(key) {
                let Some(handles) = self.handles(key) else { continue };
                groups.insert(key.clone(), Group { handles, distribution: *distribution, parts: Vec::new() });
            }
            if let (Some(group), Some(sealed)) = (groups.get_mut(key), buffer.seal()) {
                group.parts.push((Arc::clone(buffer), sealed));
            }
        }
        for (key, mut group) in groups {
            // Reducers read partitions in order: neighbours in a log are then read ahead, however small they are.
            group.parts.sort_unstable_by_key(|(_, sealed)| sealed.partition());
            self.enqueue_group(&key, group);
        }
    }

    /// Cuts a group into batches. What is to go to HDFS goes partition by partition: each has files of its own there,
    /// and one that fails must not make the others be written twice.
    fn enqueue_group(&self, key: &ShuffleKey, group: Group) {
        let Group { handles, distribution, parts } = group;
        let batch = |parts: Parts, is_cold: bool| Batch {
            key: key.clone(),
            handles: handles.clone(),
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
        let limits = self.limits();
        let goes_alone = |(buffer, sealed): &(Arc<Buffer>, Arc<SealedBatch>)| {
            let received = buffer.received_bytes();
            let cold =
                tier::is_cold(sealed.bytes(), received, self.config.cold_bytes, limits.huge_partition_bytes);
            handles.hdfs.is_some() && (cold || handles.local.is_none())
        };
        let (alone, together): (Parts, Parts) = parts.into_iter().partition(goes_alone);
        for part in alone {
            self.enqueue(batch(vec![part], true));
        }
        for parts in cut_batches(together, self.config.batch_bytes_max) {
            self.enqueue(batch(parts, false));
        }
    }

    /// Queues a batch for the tier that is to take it.
    pub(super) fn enqueue(&self, mut batch: Batch) {
        match self.tier_of(&batch) {
            Some(Tier::Local) => {
                batch.in_flight = None;
                self.local_queue.push(batch);
            }
            Some(Tier::Hdfs) => {
                batch.in_flight = Some(Arc::clone(&self.hdfs_in_flight));
                self.hdfs_queue.push(batch);
            }
            // A batch is made with a handle, so there is a tier; dropping it would lose it silently.
            None => tracing::error!(shuffle = %batch.key, "a batch has no tier"),
        }
    }

    fn tier_of(&self, batch: &Batch) -> Option<Tier> {
        let offer = |is_ready: bool| if is_ready { Offer::Ready } else { Offer::Unavailable };
        let local = match (&batch.handles.local, &self.stores.local) {
            (Some(_), Some(store)) => offer(store.available_disks() > 0),
            _ => Offer::Absent,
        };
        let hdfs = match &batch.handles.hdfs {
            Some(handle) => {
                offer(handle.is_available() && self.hdfs_in_flight() < self.config.hdfs_in_flight_max)
            }
            None => Offer::Absent,
        };
        tier::choose(Choice { local, hdfs, is_cold: batch.is_cold, failed: batch.failed })
    }

    fn hdfs_in_flight(&self) -> usize {
        Arc::strong_count(&self.hdfs_in_flight) - 1
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

fn policy_candidate(buffer: &Buffer) -> policy::Candidate {
    policy::Candidate {
        charged_bytes: buffer.active_charged_bytes(),
        payload_bytes: buffer.active_bytes(),
        blocks: buffer.active_blocks() as u64,
        received_bytes: buffer.received_bytes(),
        in_flight_batches: buffer.in_flight_batches(),
    }
}

/// Cuts `parts` into batches of about `bytes_max` payload bytes and at most [`BATCH_PARTS_MAX`] partitions.
fn cut_batches(parts: Parts, bytes_max: u64) -> Vec<Parts> {
    let mut batches = Vec::new();
    let mut open = Vec::new();
    let mut open_bytes = 0;
    for part in parts {
        let bytes = part.1.bytes();
        let full = open_bytes + bytes > bytes_max || open.len() >= BATCH_PARTS_MAX;
        if full && !open.is_empty() {
            batches.push(std::mem::take(&mut open));
            open_bytes = 0;
        }
        open_bytes += bytes;
        open.push(part);
    }
    if !open.is_empty() {
        batches.push(open);
    }
    batches
}
