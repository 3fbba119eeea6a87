//! Disks that are unmounted at one start only, and a store that hangs while tasks report.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt;

use uniffle_testkit::fault::Faults;
use uniffle_testkit::object_fault::{Call, FaultyObjects, ObjectFault};
use uniffle_worker::log::METADATA;
use uniffle_worker::log::format::frame::{self, FrameContent};
use uniffle_worker::store::object::layout::{Name, parse_key};
use uniffle_worker::store::offload::OffloadTier;
use uniffle_worker::store::{LocalConfig, StoreErrorKind};

use super::Mutation;
use super::history::{APPS, History, Key, new_disks};
use super::process::ROOT;

/// Limit for a report of a shuffle that has nothing in the store.
const REPORT_DEADLINE: Duration = Duration::from_secs(5);
/// Limit for any report: waits for the end of an earlier registration and for the store.
const HUNG_DEADLINE: Duration = Duration::from_secs(150);
/// More than the worker takes after an answer of the store until it has written a mark to the
/// disks.
const ANSWERED_MAX: Duration = Duration::from_millis(100);
/// Interval of heartbeats while a report waits.
const HEARTBEAT: Duration = Duration::from_secs(15);

impl History {
    /// Starts a worker on empty directories between two processes on the disks, which must lose
    /// nothing. If the store has some of the shuffles on the disks, the start needs the operator's
    /// override.
    pub(super) async fn start_unmounted(&mut self) {
        let is_used = self.disks.iter().any(|disk| !disk.files().is_empty());
        if !is_used || self.damages_objects() {
            return;
        }
        if let Some(store) = self.store() {
            self.heal_the_store(&store);
        }
        let directories = new_disks(self.disks.len());
        let disks: Vec<_> = directories.into_iter().map(|disk| (disk, Faults::default())).collect();
        let is_unguarded = self.mutation == Mutation::NoMountGuard;
        let local = LocalConfig { require_mounted: is_unguarded.then_some(false), ..LocalConfig::default() };
        let started = self.process_on(&disks, local.clone()).await;
        let process = match started {
            Ok(process) => {
                let known = process.service.apps().apps().len();
                assert_eq!(known, 0, "a worker on empty directories must not know shuffles of missing disks");
                process
            }
            Err(error) => {
                assert_eq!(error.kind, StoreErrorKind::NotMounted, "{error}");
                self.tally.unmounted_refusals += 1;
                if self.rng.random() {
                    return;
                }
                let insisted = LocalConfig { require_mounted: Some(false), ..local };
                self.process_on(&disks, insisted)
                    .await
                    .expect("a start that overrides the check must succeed")
            }
        };
        self.tally.unmounted_starts += 1;
        self.process = Some(process);
        self.live_unmounted().await;
        let process = self.process.take().expect("the process is running");
        process.tasks.cancel();
        process.tasks.drained().await;
    }

    /// Lets tasks report to the worker on empty directories, for the shuffles that it knows.
    async fn live_unmounted(&mut self) {
        self.is_unmounted = true;
        let service = self.service();
        let knows = |key: &Key| {
            let app = service.apps().apps().into_iter().find(|app| app.id().as_str() == key.0);
            app.is_some_and(|app| app.shuffles().iter().any(|shuffle| shuffle.key().shuffle.0 == key.1))
        };
        let all = std::mem::take(&mut self.expected);
        let (here, away) = all.into_iter().partition(|(key, _)| knows(key));
        self.expected = here;
        tracing::info!(target: "life", known = self.expected.len(), "a worker begins on empty directories");
        for _ in 0..self.rng.random_range(0..4) {
            self.heartbeat();
            self.report_some(true).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.expected.extend(away);
        self.is_unmounted = false;
    }

    /// Returns the shuffles that the log on disks or in the store marks as moved.
    async fn moved_shuffles(&self, store: &FaultyObjects) -> BTreeSet<(String, i32)> {
        let objects = store.snapshot().await;
        let in_store = objects.iter().filter(|(key, _)| matches!(parse_key(ROOT, key), Some(Name::Log(..))));
        let on_disks = self.disks.iter().flat_map(|disk| disk.snapshot());
        let on_disks = on_disks.filter(|(path, _)| path.starts_with(METADATA)).map(|(_, bytes)| bytes);
        let in_store = in_store.map(|(_, bytes)| bytes.to_vec());
        in_store.chain(on_disks).flat_map(|bytes| moved_in(&bytes)).collect()
    }

    /// Lets the store hang while tasks of all shuffles report. Shuffles without moved data do not
    /// wait, and no report waits forever.
    pub(super) async fn hang_the_store(&mut self) {
        let Some(store) = self.store().filter(|_| self.has_disks()) else { return };
        self.heal_the_disks().await;
        if self.process().counter("offload_failures") > 0 {
            // The store has answered a move, but the log on the disks may not have taken its mark
            // yet. The reports wait already.
            self.await_recovery().await;
        }
        store.set(|call, _| if call == Call::Get { ObjectFault::None } else { ObjectFault::Hold });
        // A move whose first request was answered writes its mark, which the store may have.
        tokio::time::sleep(ANSWERED_MAX).await;
        let moved = self.moved_shuffles(&store).await;
        // Moves begin in the meantime.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut keys: Vec<Key> = self.expected.keys().copied().collect();
        keys.sort_unstable();
        for key in keys {
            let waited = self.report_to_hung_store(key).await;
            // The store may have objects of an earlier registration.
            let is_unmoved = !self.expected[&key].is_again && !moved.contains(&(key.0.to_owned(), key.1));
            assert!(
                !is_unmoved || waited <= REPORT_DEADLINE,
                "a report of {key:?}, which was never offloaded, waits for the store"
            );
            self.tally.hung_stores += u64::from(is_unmoved);
        }
        self.heal_the_store(&store);
    }

    /// Reports to a worker whose store hangs. Returns how long it took.
    async fn report_to_hung_store(&mut self, key: Key) -> Duration {
        let (began, service) = (tokio::time::Instant::now(), self.service());
        let heartbeats = async {
            loop {
                tokio::time::sleep(HEARTBEAT).await;
                for app in APPS {
                    let _ = service.lifecycle.heartbeat(app);
                }
            }
        };
        let is_mutated = self.mutation == Mutation::ReportsWait;
        let tier =
            self.process().flusher.tiers().find::<OffloadTier>().expect("the worker has an object store");
        let reporting = async {
            self.report_of(key, true).await;
            if is_mutated {
                let object = tier.objects();
                let _ = object.known(object.log().end_position() + 1).await;
            }
        };
        let is_ended = tokio::select! {
            () = reporting => true,
            () = heartbeats => false,
            () = tokio::time::sleep(HUNG_DEADLINE) => false,
        };
        assert!(is_ended, "a report of {key:?} waits for a store that hangs");
        began.elapsed()
    }
}

/// Returns the shuffles that frames of a log mark as moved.
fn moved_in(log: &[u8]) -> Vec<(String, i32)> {
    let entries = entries_in(log).into_iter();
    let moved = entries
        .filter_map(|entry| if let FrameContent::Moved(shuffle) = entry { Some(shuffle) } else { None });
    moved.map(|shuffle| (shuffle.key.app.as_str().to_owned(), shuffle.key.shuffle.0)).collect()
}

/// Returns the entries of a log up to the first damaged frame.
pub(super) fn entries_in(log: &[u8]) -> Vec<FrameContent> {
    let (mut rest, mut entries) = (log, Vec::new());
    while let Ok(bytes) = frame::total_bytes(rest) {
        let Ok(read) = frame::decode(rest) else { break };
        entries.push(read.entry);
        rest = &rest[bytes..];
    }
    entries
}
