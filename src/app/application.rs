//! One application: what its client registered, its last use, its shuffles, and its budgets.
//!
//! It has a share of each common budget, so that one application cannot use what others need. Only
//! [`AppRegistry`](super::AppRegistry) creates an application and adds or removes its shuffles.
//! Shuffle data is in `memory` and `store`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::account::Account;
use super::registration::Registration;
use super::shuffle::ShuffleState;
use super::usage::AppUsage;
use crate::clock::Instant;
use uniffle_base::budget::{Budget, Charge, Heap, HeapKind};
use uniffle_wire::types::{AppId, ShuffleId};

/// A registered application.
#[derive(Debug)]
pub struct App {
    id: AppId,
    /// Data of the registrations.
    pub client: AppClient,
    /// Age, last use and timeout.
    pub activity: Activity,
    /// Its parts of the common budgets.
    pub budgets: AppBudgets,
    /// Usage, as quotas count it.
    pub usage: AppUsage,
    /// Statistics.
    pub account: Account,
    pub(super) shuffles: RwLock<HashMap<ShuffleId, Arc<ShuffleState>>>,
}

/// Data of an application's registrations.
#[derive(Debug)]
pub struct AppClient {
    user: RwLock<String>,
    properties: RwLock<HashMap<String, String>>,
    /// True once a registration has carried properties, as those of clients since 0.10 do.
    sends_properties: AtomicBool,
    /// Number of lowest bits of its block ids that hold the task attempt; 0 if not yet known.
    task_bits: AtomicU32,
    /// Heap charge of the latest registration.
    charge: Mutex<Charge>,
}

/// Age, last use and timeout of an application. The last use is in milliseconds since the registry
/// was created.
#[derive(Debug)]
pub struct Activity {
    since: Instant,
    last_use_ms: AtomicU64,
    timeout_ms: AtomicU64,
}

/// Budgets of one application, so that it cannot use what others need.
#[derive(Debug)]
pub struct AppBudgets {
    /// Heap for registrations.
    pub registrations: Budget,
    /// Heap for reported block ids and record counts.
    pub reported_ids: Budget,
    /// Heap for the partitions that were ever written to.
    pub partitions: Budget,
    /// Heap for the blocks of uncommitted sends.
    pub unfinished_blocks: Budget,
    /// Block bytes in responses that the client has not yet consumed.
    pub answers: Budget,
    /// Heap for the lists of those responses and for copies of small blocks.
    pub answer_lists: Budget,
}

impl App {
    /// Creates an application without shuffles.
    pub(super) fn new(id: &AppId, activity: Activity, budgets: AppBudgets, usage: AppUsage) -> Arc<Self> {
        Arc::new(Self {
            id: id.clone(),
            client: AppClient {
                user: RwLock::default(),
                properties: RwLock::default(),
                sends_properties: AtomicBool::new(false),
                task_bits: AtomicU32::new(0),
                charge: Mutex::new(budgets.registrations.empty_charge()),
            },
            activity,
            budgets,
            usage,
            account: Account::default(),
            shuffles: RwLock::default(),
        })
    }

    /// Returns the application's id.
    pub fn id(&self) -> &AppId {
        &self.id
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

impl AppClient {
    /// Returns the charged bytes of the latest registration.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.charge.lock().bytes()
    }

    /// Replaces the data of the latest registration, which takes `bytes` bytes. `more` is what
    /// they exceed [`AppClient::charged_bytes`] by, computed under the same lock of the registry.
    pub(super) fn replace(&self, registration: Registration, bytes: u64, more: Charge) {
        let Registration { user, properties, sent_properties, .. } = registration;
        *self.user.write() = user;
        *self.properties.write() = properties;
        let less = {
            let mut charge = self.charge.lock();
            charge.merge(more);
            let surplus = charge.bytes() - bytes;
            charge.split_up_to(surplus)
        };
        drop(less);
        self.sends_properties.fetch_or(sent_properties, Ordering::Relaxed);
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
}

impl Activity {
    /// Creates the activity of an application that was last used at `now_ms`.
    pub(super) fn new(now_ms: u64, timeout_ms: u64) -> Self {
        let (last_use_ms, timeout_ms) = (AtomicU64::new(now_ms), AtomicU64::new(timeout_ms));
        Self { since: Instant::now(), last_use_ms, timeout_ms }
    }

    /// Returns the time since this process first registered or restored the application.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the time without use after which the application is purged.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    pub(super) fn set_timeout(&self, timeout_ms: u64) {
        self.timeout_ms.store(timeout_ms, Ordering::Relaxed);
    }

    /// Marks the application as used at `now_ms`.
    pub(super) fn touch(&self, now_ms: u64) {
        self.last_use_ms.fetch_max(now_ms, Ordering::Relaxed);
    }

    /// Returns the time without use at `now_ms`.
    pub(super) fn idle(&self, now_ms: u64) -> Duration {
        Duration::from_millis(now_ms.saturating_sub(self.last_use_ms.load(Ordering::Relaxed)))
    }
}

impl AppBudgets {
    /// Creates an application's parts of `heap` and of `answers`, with `registrations` as the part
    /// for registrations.
    pub(super) fn new(heap: &Heap, registrations: Budget, answers: &Budget) -> Self {
        Self {
            registrations,
            reported_ids: heap.of_one_app(HeapKind::ReportedIds),
            partitions: heap.of_one_app(HeapKind::Partitions),
            unfinished_blocks: heap.of_one_app(HeapKind::Blocks),
            answers: answers.share(),
            answer_lists: heap.of_one_app(HeapKind::Answers),
        }
    }
}
