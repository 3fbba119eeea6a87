//! One application: its registration data, its shuffles, and its budgets.
//!
//! The application's part of the heap is split into one budget per kind of state, so that one
//! application cannot use what others need. Only [`AppRegistry`](super::AppRegistry) creates an
//! application and adds or removes its shuffles. Shuffle data is in `memory` and `store`.

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

/// A registered application.
#[derive(Debug)]
pub struct App {
    id: AppId,
    pub(super) user: RwLock<String>,
    pub(super) properties: RwLock<HashMap<String, String>>,
    /// True once a registration has carried properties, as those of clients since 0.10 do.
    pub(super) sends_properties: AtomicBool,
    has_huge_partition: AtomicBool,
    /// Number of lowest bits of its block ids that hold the task attempt; 0 if not yet known.
    task_bits: AtomicU32,
    pub(super) heartbeat_timeout_ms: AtomicU64,
    /// Milliseconds since the registry was created.
    pub(super) last_use_ms: AtomicU64,
    pub(super) shuffles: RwLock<HashMap<ShuffleId, Arc<ShuffleState>>>,
    account: Account,
    since: Instant,
    /// Heap budget for registrations. `charge` is the share of the latest registration.
    pub(super) registrations: Budget,
    pub(super) reported_ids: Budget,
    partitions: Budget,
    unfinished_blocks: Budget,
    pub(super) charge: Mutex<Charge>,
    answers: Budget,
    answer_lists: Budget,
    usage: Usage,
}

/// First heartbeat of an application, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heartbeat {
    pub(super) at_ms: u64,
    pub(super) timeout_ms: u64,
}

impl App {
    /// Creates an application that was last used at `now_ms`. It gets its part of `heap` and of
    /// `answers`, and `registrations` as its registration budget.
    pub(super) fn new(
        id: &AppId,
        heap: &Heap,
        registrations: Budget,
        answers: &Budget,
        heartbeat: Heartbeat,
        usage: Usage,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: id.clone(),
            user: RwLock::default(),
            properties: RwLock::default(),
            sends_properties: AtomicBool::new(false),
            has_huge_partition: AtomicBool::new(false),
            task_bits: AtomicU32::new(0),
            heartbeat_timeout_ms: AtomicU64::new(heartbeat.timeout_ms),
            last_use_ms: AtomicU64::new(heartbeat.at_ms),
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

    /// Returns the budget for block bytes in responses that the client has not yet consumed.
    pub fn answers(&self) -> &Budget {
        &self.answers
    }

    /// Returns the heap budget for the lists of those responses and for copies of small blocks.
    pub fn answer_lists(&self) -> &Budget {
        &self.answer_lists
    }

    /// Returns the application's usage, as quotas count it.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Returns the heap budget of the partitions that were ever written to.
    pub fn partitions(&self) -> &Budget {
        &self.partitions
    }

    /// Returns the heap budget for the blocks of uncommitted sends.
    pub fn unfinished_blocks(&self) -> &Budget {
        &self.unfinished_blocks
    }

    /// Returns the heap budget of the reported block ids.
    pub fn reported_ids(&self) -> &Budget {
        &self.reported_ids
    }

    /// Returns the application's id.
    pub fn id(&self) -> &AppId {
        &self.id
    }

    /// Returns the application's statistics.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Returns the time since the first registration.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the user of the latest registration.
    pub fn user(&self) -> String {
        self.user.read().clone()
    }

    /// Returns the value of a property of the latest registration.
    pub fn property(&self, key: &str) -> Option<String> {
        self.properties.read().get(key).cloned()
    }

    /// Returns whether the client is known to be 0.10 or later: such clients register with
    /// properties (docs/protocol.md §7.5).
    pub fn is_since_0_10(&self) -> bool {
        self.sends_properties.load(Ordering::Relaxed)
    }

    /// Records that one of the application's partitions is huge. Returns true the first time.
    #[must_use]
    pub fn mark_huge(&self) -> bool {
        !self.has_huge_partition.swap(true, Ordering::Relaxed)
    }

    /// Stores the application's block-id layout (docs/protocol.md §3.1): the `bits` lowest bits are
    /// the task attempt.
    pub fn learn_task_bits(&self, bits: u32) {
        self.task_bits.store(bits, Ordering::Relaxed);
    }

    /// Returns the task attempt in a block id, or `None` while the layout is not known.
    pub fn task_of(&self, block_id: u64) -> Option<u64> {
        match self.task_bits.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(block_id & (u64::MAX >> (u64::BITS - bits.min(u64::BITS)))),
        }
    }

    /// Returns the time without use after which the application is purged.
    pub fn heartbeat_timeout(&self) -> Duration {
        Duration::from_millis(self.heartbeat_timeout_ms.load(Ordering::Relaxed))
    }

    /// Returns the shuffle with this id.
    pub fn shuffle(&self, id: ShuffleId) -> Option<Arc<ShuffleState>> {
        self.shuffles.read().get(&id).cloned()
    }

    /// Returns whether any shuffle is registered.
    pub fn has_shuffles(&self) -> bool {
        !self.shuffles.read().is_empty()
    }

    /// Returns all shuffles of the application.
    pub fn shuffles(&self) -> Vec<Arc<ShuffleState>> {
        self.shuffles.read().values().cloned().collect()
    }
}
