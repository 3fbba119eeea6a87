//! One application: what its clients said of it, its shuffles, and what it holds.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::account::Account;
use super::shuffle::ShuffleState;
use super::usage::Usage;
use crate::budget::{Budget, Charge, Heap, HeapKind};
use crate::clock::Instant;
use uniffle_wire::types::{AppId, ShuffleId};

/// One application.
#[derive(Debug)]
pub struct App {
    id: AppId,
    pub(super) user: RwLock<String>,
    pub(super) properties: RwLock<HashMap<String, String>>,
    /// Whether a registration ever carried properties, which clients do since 0.10.
    pub(super) sends_properties: AtomicBool,
    has_huge_partition: AtomicBool,
    /// Lowest bits of its block ids that are the task attempt; 0 = not known yet.
    task_bits: AtomicU32,
    pub(super) heartbeat_timeout_ms: AtomicU64,
    /// Milliseconds since the registry was made.
    pub(super) last_use_ms: AtomicU64,
    pub(super) shuffles: RwLock<HashMap<ShuffleId, Arc<ShuffleState>>>,
    account: Account,
    since: Instant,
    /// What it may have of the heap, and what its latest registration takes of it.
    pub(super) registrations: Budget,
    pub(super) reported_ids: Budget,
    partitions: Budget,
    unfinished_blocks: Budget,
    pub(super) charge: Mutex<Charge>,
    answers: Budget,
    answer_lists: Budget,
    usage: Usage,
}

impl App {
    /// One that was used at `now_ms`; of the heap and of `answers` it has its part, of registrations the one that is given.
    pub(super) fn new(
        id: &AppId,
        (heap, registrations): (&Heap, Budget),
        answers: &Budget,
        (now_ms, timeout_ms): (u64, u64),
        usage: Usage,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: id.clone(),
            user: RwLock::default(),
            properties: RwLock::default(),
            sends_properties: AtomicBool::new(false),
            has_huge_partition: AtomicBool::new(false),
            task_bits: AtomicU32::new(0),
            heartbeat_timeout_ms: AtomicU64::new(timeout_ms),
            last_use_ms: AtomicU64::new(now_ms),
            shuffles: RwLock::default(),
            account: Account::default(),
            since: Instant::now(),
            charge: Mutex::new(registrations.nothing()),
            registrations,
            reported_ids: heap.of_one_app(HeapKind::ReportedIds),
            partitions: heap.of_one_app(HeapKind::Partitions),
            unfinished_blocks: heap.of_one_app(HeapKind::Blocks),
            answers: answers.child(answers.capacity() / 2),
            answer_lists: heap.of_one_app(HeapKind::Answers),
            usage,
        })
    }

    /// Bytes of blocks in answers that it has not taken.
    pub fn answers(&self) -> &Budget {
        &self.answers
    }

    /// Heap of the lists of those answers, and of copies of their small pieces.
    pub fn answer_lists(&self) -> &Budget {
        &self.answer_lists
    }

    /// What it has of what quotas count.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Heap of its partitions that were ever written to.
    pub fn partitions(&self) -> &Budget {
        &self.partitions
    }

    /// Heap of the blocks of its sends that are not committed.
    pub fn unfinished_blocks(&self) -> &Budget {
        &self.unfinished_blocks
    }

    /// Heap of its reported block ids.
    pub fn reported_ids(&self) -> &Budget {
        &self.reported_ids
    }

    /// Its id.
    pub fn id(&self) -> &AppId {
        &self.id
    }

    /// Where its time and bytes went.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Since its first registration.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// The user of its latest registration.
    pub fn user(&self) -> String {
        self.user.read().clone()
    }

    /// A property of its latest registration.
    pub fn property(&self, key: &str) -> Option<String> {
        self.properties.read().get(key).cloned()
    }

    /// Whether its client is known to be 0.10 or later: such clients register with properties (docs/protocol.md §7.5).
    pub fn is_since_0_10(&self) -> bool {
        self.sends_properties.load(Ordering::Relaxed)
    }

    /// Notes that one of its partitions is huge; true the first time.
    #[must_use]
    pub fn mark_huge(&self) -> bool {
        !self.has_huge_partition.swap(true, Ordering::Relaxed)
    }

    /// Learns its layout of block ids (docs/protocol.md §3.1): so many lowest bits are the task attempt.
    pub fn learn_task_bits(&self, bits: u32) {
        self.task_bits.store(bits, Ordering::Relaxed);
    }

    /// The task attempt in a block id; `None` while the layout is not known.
    pub fn task_of(&self, block_id: u64) -> Option<u64> {
        match self.task_bits.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(block_id & (u64::MAX >> (u64::BITS - bits.min(u64::BITS)))),
        }
    }

    /// After so long without use it is purged.
    pub fn heartbeat_timeout(&self) -> Duration {
        Duration::from_millis(self.heartbeat_timeout_ms.load(Ordering::Relaxed))
    }

    /// One of its shuffles.
    pub fn shuffle(&self, id: ShuffleId) -> Option<Arc<ShuffleState>> {
        self.shuffles.read().get(&id).cloned()
    }

    /// Whether any is registered.
    pub fn has_shuffles(&self) -> bool {
        !self.shuffles.read().is_empty()
    }

    /// All its shuffles.
    pub fn shuffles(&self) -> Vec<Arc<ShuffleState>> {
        self.shuffles.read().values().cloned().collect()
    }
}
