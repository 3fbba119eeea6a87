//! The scheduler: wakes on pressure or tick, asks the policy, seals victims, queues batches.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::Registry;
use tokio::sync::watch;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep};

use crate::memory::{Buffer, Candidate, Memory, SealedBatch, ShuffleBuffers};
use crate::runtime::Tasks;
use crate::store::{LocalStore, ShuffleHandle};
use crate::types::{Distribution, ShuffleKey};

use super::FlushConfig;
use super::metrics::FlushMetrics;
use super::policy::{self, Goal, Usage};
use super::queue::{Batch, Queue};

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
    pub(super) memory: Arc<Memory>,
    pub(super) store: Arc<LocalStore>,
    pub(super) queue: Queue,
    pub(super) tasks: Tasks,
    pub(super) metrics: FlushMetrics,
    /// Every batch holds a clone: their number is the number of batches that are not in the store yet.
    batch_token: Arc<()>,
    wake: tokio::sync::Notify,
    /// True while memory is to be emptied: batches that failed do not wait long for their next try.
    pub(super) hurry: watch::Sender<bool>,
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
        store: Arc<LocalStore>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let flusher = Arc::new(Self {
            metrics: FlushMetrics::new(registry)?,
            config,
            memory,
            store,
            queue: Queue::default(),
            tasks: tasks.clone(),
            batch_token: Arc::new(()),
            wake: tokio::sync::Notify::new(),
            hurry: watch::Sender::new(false),
            refused_bytes: AtomicU64::new(0),
        });
        let scheduler = Arc::clone(&flusher);
        tasks.spawn_again("flush scheduler", move || Arc::clone(&scheduler).schedule());
        for _ in 0..flusher.config.workers {
            let worker = Arc::clone(&flusher);
            tasks.spawn_again("flush worker", move || Arc::clone(&worker).work());
        }
        Ok(flusher)
    }

    /// Flushes `buffer` now if it has outgrown the single-buffer threshold. Cheap when it has not.
    pub fn offer(&self, shuffle: &ShuffleBuffers, buffer: &Arc<Buffer>) {
        let candidate = policy_candidate(buffer);
        if policy::is_oversized(candidate, &self.config.limits) {
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
        let Some(handle) = self.store.handle(shuffle.key()) else { return };
        if let Some(sealed) = buffer.seal() {
            self.enqueue(shuffle.key(), &handle, shuffle.distribution(), vec![(Arc::clone(buffer), sealed)]);
        }
    }

    /// Wakes the scheduler if the watermarks ask for it. Cheap when they do not.
    pub fn check_pressure(&self) {
        if !policy::flush_goal(self.usage(0), &self.config.limits).is_nothing() {
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
        self.metrics.queued.set(i64::try_from(self.queue.len()).unwrap_or(i64::MAX));
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
                    self.queue.clear();
                    return;
                }
                () = self.wake.notified() => {}
                () = self.memory.pressure().notified() => {}
                _ = tick.tick() => self.drop_dead_now_and_then(&mut ticks),
            }
            let goal = policy::flush_goal(
                self.usage(self.refused_bytes.swap(0, Ordering::Relaxed)),
                &self.config.limits,
            );
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
        for index in policy::victims(&sizes, goal, &self.config.limits) {
            let Candidate { key, distribution, buffer, .. } = &candidates[index];
            if !groups.contains_key(key) {
                let Some(handle) = self.store.handle(key) else { continue };
                groups.insert(key.clone(), Group { handle, distribution: *distribution, parts: Vec::new() });
            }
            if let (Some(group), Some(sealed)) = (groups.get_mut(key), buffer.seal()) {
                group.parts.push((Arc::clone(buffer), sealed));
            }
        }
        for (key, mut group) in groups {
            // Reducers read partitions in order: neighbours in a log are then read ahead, however small they are.
            group.parts.sort_unstable_by_key(|(_, sealed)| sealed.partition());
            for parts in cut_batches(group.parts, self.config.batch_bytes_max) {
                self.enqueue(&key, &group.handle, group.distribution, parts);
            }
        }
    }

    fn enqueue(&self, key: &ShuffleKey, handle: &ShuffleHandle, distribution: Distribution, parts: Parts) {
        let token = Arc::clone(&self.batch_token);
        let (key, handle) = (key.clone(), handle.clone());
        self.queue.push(Batch { key, handle, distribution, parts, failures: 0, _token: token });
    }
}

/// Sealed chains and the buffers they came from.
type Parts = Vec<(Arc<Buffer>, Arc<SealedBatch>)>;

/// Victims of one shuffle. The store's handle is taken *before* the seal: a buffer that can still be sealed was not
/// purged, so the handle is of its own incarnation and not of a later shuffle with the same key.
struct Group {
    handle: ShuffleHandle,
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
