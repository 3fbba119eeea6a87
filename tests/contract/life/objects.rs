//! Simulated runs on an object store instead of disks, and the store's faults in all runs.
//!
//! Requests fail, hang, or succeed without a response. Before a start, one object may be missing,
//! damaged or outdated. A damaged segment may lose blocks of its shuffle. A damaged object of the
//! metadata log loses nothing, because it has a copy.

use std::collections::BTreeMap;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use uniffle_testkit::object_fault::{Call, FaultyObjects, ObjectFault};
use uniffle_worker::log::OBJECT_COPIES;
use uniffle_worker::store::StoreError;
use uniffle_worker::store::object::layout::{Name, SegmentId, SegmentTail, TAIL_BYTES, log_key, parse_key};

use super::Mutation;
use super::history::{APPS, History};
use super::process::{Process, ROOT};

/// The store, which survives the worker.
#[derive(Default)]
pub(super) struct Objects {
    pub(super) store: FaultyObjects,
    /// Content of the store when the previous process started.
    pub(super) earlier: BTreeMap<String, Bytes>,
    /// In a run on disks: objects may be damaged, and log objects written late. In a run on objects
    /// alone it is false, although objects may be damaged.
    pub(super) is_damaged: bool,
}

impl History {
    /// Returns a run of a worker on an object store.
    pub(crate) fn above_objects(seed: u64, mutation: Mutation) -> Self {
        let mut history = Self::new(seed, mutation);
        history.disks.clear();
        history.objects = Some(Objects::default());
        history
    }

    /// Starts a worker on the store with its current faults.
    pub(super) async fn start_above(&mut self, store: &FaultyObjects, is_last: bool) {
        self.heal_the_store(store);
        let before = store.snapshot().await;
        if !is_last && self.life() > 1 && self.rng.random_bool(0.4) {
            self.damage_an_object(store, &before).await;
        }
        if let Some(objects) = &mut self.objects {
            objects.earlier = before;
        }
        if self.mutation == Mutation::NoIndexes {
            self.remove_segments(store).await;
        }
        if !is_last && self.rng.random_bool(0.1) {
            self.refuse_some_reads(store);
        }
        let process = match Process::above(store).await {
            Ok(process) => process,
            Err(error) => self.start_again(store, &error).await,
        };
        self.heal_the_store(store);
        self.process = Some(process);
    }

    /// Lets requests of a start fail: the start fails, or marks unreadable shuffles as possibly
    /// incomplete.
    fn refuse_some_reads(&mut self, store: &FaultyObjects) {
        let mut remaining = self.rng.random_range(0..12);
        store.set(move |call, _| {
            remaining -= i32::from(matches!(call, Call::Get | Call::List));
            if remaining < 0 { ObjectFault::Refuse } else { ObjectFault::None }
        });
        (self.is_faulty, self.excused) = (true, true);
    }

    async fn start_again(&mut self, store: &FaultyObjects, error: &StoreError) -> Process {
        assert!(self.is_faulty, "a start with a healthy store was refused: {error}");
        assert!(
            error.to_string().contains(ROOT),
            "a start was refused without the key of an object: {error}"
        );
        self.tally.refused_starts += 1;
        self.heal_the_store(store);
        Process::above(store).await.expect("the start failed although the store answers again")
    }

    pub(super) async fn damage_an_object(&mut self, store: &FaultyObjects, now: &BTreeMap<String, Bytes>) {
        let earlier = self.objects.as_ref().map(|objects| objects.earlier.clone()).unwrap_or_default();
        let changed: Vec<_> = earlier.iter().filter(|(key, bytes)| now.get(*key) != Some(bytes)).collect();
        if self.rng.random_bool(0.3)
            && let Some((key, bytes)) = changed.choose(&mut self.rng)
        {
            tracing::info!(target: "life", key, "object was reset to an earlier version");
            self.tally.earlier_objects += 1;
            self.excuse(key, now);
            return store.replace(key, Bytes::clone(bytes)).await;
        }
        let all: Vec<_> = now.iter().collect();
        let Some((key, bytes)) = all.choose(&mut self.rng).copied() else { return };
        let name = parse_key(ROOT, key).unwrap();
        let damaged = self.damaged(&name, bytes);
        tracing::info!(target: "life", key, is_missing = damaged.is_none(), "object was damaged");
        match damaged {
            None => {
                self.tally.missing_objects += 1;
                store.remove(key).await;
            }
            Some(bytes) => {
                self.tally.damaged_objects += 1;
                store.replace(key, bytes).await;
            }
        }
        self.excuse(key, now);
    }

    /// Records which blocks may be lost after an object changed: those of the shuffle of a
    /// segment. A log object whose other copy never arrived looks like an acknowledged one.
    fn excuse(&mut self, key: &str, now: &BTreeMap<String, Bytes>) {
        match parse_key(ROOT, key).unwrap() {
            Name::Segment(shuffle, _) => {
                let app = shuffle.key.app.as_str();
                let app = APPS
                    .iter()
                    .copied()
                    .find(|known| *known == app)
                    .expect("the application belongs to the model");
                self.lose_places_of((app, shuffle.key.shuffle.0));
            }
            Name::Settings(_) => {}
            Name::Log(object, copy) => {
                let other = log_key(ROOT, object, (copy + 1) % OBJECT_COPIES);
                self.excused |= now.contains_key(key) && !now.contains_key(&other);
            }
        }
    }

    /// Returns no bytes or other bytes. Of a segment only the index changes, because block bytes
    /// are verified when they are read.
    fn damaged(&mut self, name: &Name, bytes: &Bytes) -> Option<Bytes> {
        let mut bytes = bytes.to_vec();
        let first = match (name, bytes.last_chunk::<TAIL_BYTES>()) {
            (Name::Segment(shuffle, number), Some(tail)) => {
                let id = SegmentId { incarnation: shuffle.incarnation, number: *number };
                let tail = SegmentTail::decode(tail, id, bytes.len() as u64);
                tail.map_or(0, |tail| usize::try_from(tail.payload_bytes).unwrap())
            }
            _ => 0,
        };
        let at = self.rng.random_range(first..bytes.len());
        match self.rng.random_range(0..3) {
            0 => None,
            1 => {
                bytes.truncate(at);
                Some(bytes.into())
            }
            _ => {
                bytes[at] ^= 1 << self.rng.random_range(0..8);
                Some(bytes.into())
            }
        }
    }

    /// Lets requests fail occasionally, also those that take effect. Reads fail only if reads fail
    /// in this process. Requests behind registrations and reports do not hang.
    pub(super) async fn break_the_store(&mut self, store: &FaultyObjects) {
        let (one_in, reads_fail) = (self.rng.random_range(1..4), self.reads_fail);
        let mut rng = StdRng::seed_from_u64(self.rng.random());
        let (mutation, is_late) = (self.mutation, self.damages_objects());
        store.set(move |call, path| {
            let name = parse_key(ROOT, path.as_ref());
            if let Some(fault) = of_mutation(mutation, call, name.as_ref()) {
                return fault;
            }
            if rng.random_range(0..one_in) > 0 {
                return ObjectFault::None;
            }
            let faults: &[ObjectFault] = match (call, &name) {
                (Call::Get, _) if reads_fail => &[ObjectFault::Refuse, ObjectFault::Flip, ObjectFault::Cut],
                (Call::Get, _) => &[ObjectFault::None],
                (Call::Put, Some(Name::Log(..))) if is_late => {
                    &[ObjectFault::Refuse, ObjectFault::LoseAnswer, ObjectFault::Late, ObjectFault::Repeat]
                }
                (Call::Put, Some(Name::Log(..))) => &[ObjectFault::Refuse, ObjectFault::LoseAnswer],
                (Call::Head | Call::List | Call::Delete | Call::Abort, _) => {
                    &[ObjectFault::Refuse, ObjectFault::LoseAnswer]
                }
                _ => &[ObjectFault::Refuse, ObjectFault::LoseAnswer, ObjectFault::Hold],
            };
            *faults.choose(&mut rng).unwrap()
        });
        if reads_fail {
            self.read_as_a_task_does().await;
        }
    }

    pub(super) fn heal_the_store(&self, store: &FaultyObjects) {
        let mutation = self.mutation;
        store.heal();
        store.set(move |call, path| {
            let name = parse_key(ROOT, path.as_ref());
            of_mutation(mutation, call, name.as_ref()).unwrap_or(ObjectFault::None)
        });
    }

    /// Loses responses of uploads when the worker ends, whether they were stored or not.
    pub(super) fn lose_answers(&mut self, store: &FaultyObjects) {
        let mut rng = StdRng::seed_from_u64(self.rng.random());
        let mutation = self.mutation;
        store.set(move |call, path| {
            let name = parse_key(ROOT, path.as_ref());
            if let Some(fault) = of_mutation(mutation, call, name.as_ref()) {
                return fault;
            }
            let ends = matches!(call, Call::Put | Call::Complete | Call::Part | Call::Begin);
            let faults = [ObjectFault::None, ObjectFault::LoseAnswer, ObjectFault::Hold];
            if ends { *faults.choose(&mut rng).unwrap() } else { ObjectFault::None }
        });
    }

    /// Asserts that the store has only the log after everything was unregistered.
    pub(super) async fn assert_empty(&self, store: &FaultyObjects) {
        let mut remaining = store.objects().await;
        remaining.retain(|(key, _)| !matches!(parse_key(ROOT, key), Some(Name::Log(..))));
        assert!(remaining.is_empty(), "objects remain: {remaining:?}");
    }
}

/// Returns the fault that a mutation causes.
fn of_mutation(mutation: Mutation, call: Call, name: Option<&Name>) -> Option<ObjectFault> {
    let Some(Name::Log(_, copy)) = name.filter(|_| call == Call::Put) else { return None };
    let is_pretended = match mutation {
        Mutation::NoCopies => *copy > 0,
        Mutation::NoPosition => true,
        _ => false,
    };
    is_pretended.then_some(ObjectFault::Pretend)
}
