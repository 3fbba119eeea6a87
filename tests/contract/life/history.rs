//! A simulated run: successive worker processes, their disks and clients, and the invariants.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use uniffle_client::block::IdLayout;
use uniffle_testkit::fault::{EIO, EMFILE, ENOSPC, EROFS, Fault, Faults, Operation};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::object_fault::FaultyObjects;
use uniffle_wire::types::{AppId, BlockId, ShuffleId, ShuffleKey};
use uniffle_worker::app::AppConfig;
use uniffle_worker::clock;
use uniffle_worker::log::HandOff;
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::Service;
use uniffle_worker::store::offload::Watermarks;
use uniffle_worker::store::{LocalConfig, StoreError, SyncWrites};

use super::Mutation;
use super::clients::OpenSend;
use super::invariants::{Invariants, Now, PARTITIONS};
use super::objects::Objects;
use super::process::{EXPIRY_INTERVAL, Process};
use super::reader::Reader;
use super::tally::Tally;

const DISKS_MAX: usize = 3;
pub(super) const APPS: [&str; 2] = ["app-1", "app-10"];
/// Random steps of one run.
const STEPS: u32 = 60;

/// Ids are small because each block is the only one of its task.
pub(super) const LAYOUT: IdLayout = IdLayout::HISTORIC;

pub(crate) type Key = (&'static str, i32);

pub(crate) struct History {
    pub(super) rng: StdRng,
    pub(super) process: Option<Process>,
    pub(super) life: u32,
    steps_left: u32,
    pub(super) disks: Vec<Arc<MemoryDisk>>,
    /// Object store that replaces the disks or receives data from them.
    pub(super) objects: Option<Objects>,
    /// Fill levels of the disks at which offload to the object store begins and ends.
    pub(super) watermarks: Watermarks,
    pub(super) mutation: Mutation,
    /// Injected faults of the current process, by disk.
    pub(super) faults: Vec<Faults>,
    /// Disk that the current process does not find.
    pub(super) missing: Option<usize>,
    /// Disks without which a process has run.
    pub(super) ran_without: BTreeSet<usize>,
    /// Hand-off of the metadata log by the previous process.
    pub(super) hand_off: Option<HandOff>,
    /// A disk or the object store has faults when the current process starts.
    pub(super) is_faulty: bool,
    /// Directory of a disk that the current process cannot list.
    pub(super) unlisted: Option<(usize, PathBuf)>,
    /// Disk whose claim was damaged before the current process started, and the intact claim.
    pub(super) claim: Option<(usize, Vec<u8>)>,
    /// Metadata was damaged, unreadable, missing or not synced at some time: results may be
    /// refused, but never short.
    pub(super) excused: bool,
    /// The machine lost power with unsynced data: indexed blocks may have wrong bytes.
    pub(super) torn: bool,
    pub(super) sync: SyncWrites,
    /// Disks with data that is not on the device, because their last process did not end with a
    /// sync.
    pub(super) unsynced: BTreeSet<usize>,
    /// The worker runs on empty directories because none of its disks is mounted.
    pub(super) is_unmounted: bool,
    /// Shuffles whose end was acknowledged and that were not registered again.
    pub(super) ended: BTreeSet<Key>,
    /// Reads fail in the current process.
    pub(super) reads_fail: bool,
    /// Files were removed under the current process.
    pub(super) files_removed: bool,
    pub(crate) expected: HashMap<Key, Invariants>,
    /// Shuffles that were ever registered.
    pub(super) registered: BTreeSet<Key>,
    /// Shuffles unknown to an earlier process. If they were registered again, either registration
    /// may be recovered.
    pub(super) forgotten: BTreeSet<Key>,
    pub(super) sends: Vec<OpenSend>,
    pub(super) readers: Vec<Reader>,
    pub(super) next_block: i64,
    pub(super) next_epoch: u64,
    pub(crate) tally: Tally,
}

pub(super) fn new_disks(count: usize) -> Vec<Arc<MemoryDisk>> {
    (0..count).map(|number| Arc::new(MemoryDisk::new(&format!("/disk{number}"), None))).collect()
}

impl History {
    pub(crate) fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let count = rng.random_range(1..=DISKS_MAX);
        let disks = new_disks(count);
        if mutation == Mutation::NoSync {
            disks.iter().for_each(|disk| disk.ignore_syncs());
        }
        if mutation == Mutation::NoLinkCount {
            disks.iter().for_each(|disk| disk.ignore_removals());
        }
        if mutation == Mutation::NoPlaces {
            disks.iter().for_each(|disk| disk.hide_shared_tree());
        }
        let sync = if rng.random() { SyncWrites::Group } else { SyncWrites::Off };
        Self {
            rng,
            sync,
            unsynced: BTreeSet::new(),
            process: None,
            life: 0,
            steps_left: STEPS,
            disks,
            objects: None,
            watermarks: Watermarks { high: 1.0, low: 1.0 },
            mutation,
            faults: Vec::new(),
            missing: None,
            ran_without: BTreeSet::new(),
            hand_off: None,
            is_faulty: false,
            unlisted: None,
            claim: None,
            excused: false,
            torn: false,
            is_unmounted: false,
            ended: BTreeSet::new(),
            reads_fail: false,
            files_removed: false,
            expected: HashMap::new(),
            registered: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            sends: Vec::new(),
            readers: Vec::new(),
            next_block: 0,
            next_epoch: 0,
            tally: Tally::default(),
        }
    }

    pub(super) fn process(&self) -> &Process {
        self.process.as_ref().expect("a process is running")
    }

    pub(crate) fn service(&self) -> Arc<Service> {
        Arc::clone(&self.process().service)
    }

    pub(crate) fn life(&self) -> u32 {
        self.life
    }

    pub(crate) fn now(&self) -> Now {
        let (life, reads_fail) = (self.life, self.reads_fail || self.torn);
        let disk_is_missing = self.missing.is_some() || self.unlisted.is_some() || self.is_unmounted;
        Now { life, disk_is_missing, reads_fail, files_removed: self.files_removed }
    }

    /// Returns whether indexed blocks may have wrong bytes.
    pub(super) fn is_torn(&self) -> bool {
        self.torn
    }

    /// Returns whether the worker reports the block as lost.
    pub(crate) fn is_reported_lost(&self, key: Key, partition: i32, id: i64) -> bool {
        let losses = self.service().diagnostics.losses().losses;
        let mut here = losses
            .iter()
            .filter(|loss| (loss.app.as_str(), loss.shuffle) == key && loss.partition == partition);
        here.any(|loss| loss.ranges.iter().any(|(first, last)| (*first..=*last).contains(&id)))
    }

    /// Runs one worker process from start to end. Returns false at the end of the run.
    pub(crate) async fn live(&mut self) -> bool {
        let _clock = clock::of_this_thread();
        if self.mutation != Mutation::PausesCount {
            // Ends with the runtime of this process.
            Tasks::new().spawn("clock", clock::run());
        }
        // Stores in memory respond at once, so a start may wait for nothing. Nevertheless the clock
        // ticks before it, and the worker's tasks begin before the first step.
        tokio::task::yield_now().await;
        let is_last = self.steps_left == 0;
        self.start(is_last).await;
        tokio::task::yield_now().await;
        if is_last {
            self.finish().await;
            return false;
        }
        while self.steps_left > 0 {
            self.steps_left -= 1;
            self.step().await;
            if self.rng.random_bool(0.06) {
                break;
            }
        }
        self.end().await;
        true
    }

    /// Starts a process. The last one has all disks and no new faults.
    async fn start(&mut self, is_last: bool) {
        self.life += 1;
        self.faults = self.disks.iter().map(|_| Faults::default()).collect();
        (self.missing, self.unlisted, self.claim, self.is_faulty) = (None, None, None, false);
        let hand_off = self.hand_off.take().filter(|_| !is_last);
        if hand_off.is_none() && !is_last && self.rng.random_bool(0.1) {
            self.start_unmounted().await;
        }
        if self.objects.is_none() && !is_last && self.rng.random_bool(0.05) {
            self.start_by_two_paths().await;
        }
        match &hand_off {
            Some(_) if self.rng.random_bool(0.7) => {}
            // Sometimes a fault happens between the two processes.
            Some(_) => self.plan_fault(),
            None if !is_last && self.life > 1 && self.has_disks() => self.plan_fault(),
            None => {}
        }
        self.reads_fail = !is_last && self.rng.random_bool(0.2);
        self.files_removed = false;
        let stored = match self.store() {
            Some(store) if self.has_disks() => self.start_on_both(&store, hand_off, is_last).await,
            Some(store) => {
                self.start_above(&store, is_last).await;
                self.durable_blocks()
            }
            None => self.start_on_disks(hand_off).await,
        };
        tracing::info!(target: "life", life = self.life, missing = ?self.missing, "begins");
        self.tally.lives += 1;
        self.tally.missing_disks += u64::from(self.missing.is_some());
        self.ran_without.extend(self.missing);
        self.tally.lost_blocks += self.process().counter("total_lost_blocks");
        self.unregister_unknown();
        self.heartbeat();
        self.check_recovered(&stored).await;
    }

    async fn start_on_disks(&mut self, hand_off: Option<HandOff>) -> BTreeSet<(ShuffleKey, i32, BlockId)> {
        let stored = self.stored_blocks();
        if self.mutation == Mutation::NoIndexes {
            self.remove_indexes();
        }
        while let Err(error) = self.start_process(hand_off.clone()).await {
            self.resolve_refused_start(&error);
        }
        stored
    }

    pub(super) fn has_disks(&self) -> bool {
        !self.disks.is_empty()
    }

    /// Returns the object store, if the run has one.
    pub(super) fn store(&self) -> Option<FaultyObjects> {
        self.objects.as_ref().map(|objects| objects.store.clone())
    }

    /// Returns the blocks that were seen in an index or flushed by a graceful stop, and are
    /// undamaged.
    pub(super) fn durable_blocks(&self) -> BTreeSet<(ShuffleKey, i32, BlockId)> {
        let mut all = BTreeSet::new();
        for ((app, shuffle), expected) in &self.expected {
            let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(*shuffle));
            for (partition, ids) in &expected.durable {
                all.extend(ids.iter().map(|id| (key.clone(), *partition, BlockId(*id))));
            }
        }
        all
    }

    /// Drops the expected places of a shuffle's blocks, and ends its readers, whose offsets may be
    /// invalid now.
    pub(super) fn lose_places_of(&mut self, key: Key) {
        let Some(expected) = self.expected.get_mut(&key) else { return };
        expected.lose_places();
        self.next_epoch += 1;
        expected.epoch = self.next_epoch;
    }

    pub(super) async fn start_process(&mut self, hand_off: Option<HandOff>) -> Result<(), StoreError> {
        let there = |(index, _): &(usize, _)| self.missing != Some(*index);
        let pairs = self.disks.iter().cloned().zip(self.faults.iter().cloned());
        let disks: Vec<_> = pairs.enumerate().filter(there).map(|(_, pair)| pair).collect();
        let local = LocalConfig { sync: self.sync, hand_off, ..LocalConfig::default() };
        self.process = Some(self.process_on(&disks, local).await?);
        Ok(())
    }

    pub(super) async fn process_on(
        &self,
        disks: &[(Arc<MemoryDisk>, Faults)],
        local: LocalConfig,
    ) -> Result<Process, StoreError> {
        match self.store() {
            None => Process::start(disks, local).await,
            Some(store) => Process::moving(disks, local, (&store, self.watermarks)).await,
        }
    }

    /// Unregisters shuffles that no client registered. The worker knows one if its removal was not
    /// written before the process ended, or not on a disk that was missing. Real clients let them
    /// expire.
    fn unregister_unknown(&mut self) {
        let service = self.service();
        for app in service.apps().apps() {
            for shuffle in app.shuffles() {
                let id = shuffle.key().shuffle.0;
                let known = self.expected.keys().any(|key| key.0 == app.id().as_str() && key.1 == id);
                if !known {
                    let has_ended = APPS
                        .iter()
                        .any(|app| self.ended.contains(&(*app, id)) && *app == shuffle.key().app.as_str());
                    let may_be_back = self.excused || self.damages_objects();
                    assert!(
                        !has_ended || may_be_back,
                        "{} is known, although its end was acknowledged",
                        shuffle.key()
                    );
                    service
                        .lifecycle
                        .unregister_shuffle(app.id().as_str(), id)
                        .expect("the application is registered");
                }
            }
        }
    }

    async fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..6 => self.register().await,
            6..32 => self.open_send().await,
            32..44 => self.feed_some().await,
            44..49 => self.abort_one(),
            49..55 => self.process().flusher.flush_all(),
            55..57 => self.purge_one().await,
            57..61 => self.break_a_disk().await,
            61..65 => self.recover_the_disks().await,
            65..72 => self.sleep_a_while().await,
            72..79 => self.report_some(true).await,
            79..86 => self.start_reader(),
            86 => self.hang_the_store().await,
            _ => self.step_readers().await,
        }
        if self.objects.is_none() {
            match self.rng.random_range(0..300) {
                0..3 => self.remove_files().await,
                3..6 => self.exceed_file_size().await,
                6..9 => self.end_on_full_disks().await,
                _ => {}
            }
        }
        if self.rng.random_bool(0.3) {
            tokio::task::yield_now().await;
        }
        self.heartbeat();
    }

    async fn break_a_disk(&mut self) {
        if let Some(store) = self.store()
            && (!self.has_disks() || self.rng.random())
        {
            return self.break_the_store(&store).await;
        }
        let disk = self.rng.random_range(0..self.faults.len());
        let seed = self.rng.random();
        let one_in = self.rng.random_range(1..4);
        let mut kinds = vec![
            (Operation::Write, Fault::Errno(ENOSPC)),
            (Operation::Write, Fault::Errno(EIO)),
            (Operation::Write, Fault::Short { bytes: 777, errno: EIO }),
            (Operation::Write, Fault::Errno(EROFS)),
            (Operation::Write, Fault::Hang),
            (Operation::OpenWrite, Fault::Errno(EIO)),
            (Operation::OpenWrite, Fault::Errno(EMFILE)),
            (Operation::CreateDir, Fault::Errno(ENOSPC)),
            (Operation::Sync, Fault::Errno(EIO)),
            (Operation::Sync, Fault::Hang),
            (Operation::SyncDir, Fault::Errno(EIO)),
        ];
        if self.reads_fail {
            kinds.extend([(Operation::Read, Fault::Errno(EIO)), (Operation::OpenRead, Fault::Errno(EIO))]);
        }
        self.faults[disk].seed(seed, one_in, kinds);
        if self.rng.random_bool(0.3) {
            self.disks[disk].fail_syncs(self.rng.random_range(1..4));
        }
        if self.reads_fail {
            self.read_as_a_task_does().await;
        }
    }

    /// Makes four successive attempts, like a Spark task.
    pub(super) async fn read_as_a_task_does(&mut self) {
        let Some(key) = self.known_key() else { return };
        let partition = self.rng.random_range(0..PARTITIONS);
        for _ in 0..4 {
            let mut reader = Reader::new(key, partition, 10_000, (&self.expected[&key], self.now()));
            while !reader.is_done() {
                reader.step(self).await;
            }
        }
    }

    pub(super) async fn heal_the_disks(&mut self) {
        if let Some(store) = self.store() {
            self.heal_the_store(&store);
        }
        self.disks.iter().for_each(|disk| disk.fail_syncs(0));
        for faults in &self.faults {
            faults.clear();
            faults.release().await;
        }
    }

    async fn recover_the_disks(&mut self) {
        self.heal_the_disks().await;
        if self.has_disks() && self.rng.random_bool(0.3) {
            self.await_recovery().await;
        }
    }

    async fn sleep_a_while(&mut self) {
        let millis = self.rng.random_range(1..3_000);
        if millis % 8 == 0 {
            return self.pause(Duration::from_secs(millis)).await;
        }
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    /// Pauses the process for `duration`, which often exceeds the timeouts of applications and
    /// tickets.
    async fn pause(&mut self, duration: Duration) {
        tracing::info!(target: "life", ?duration, "the process is paused");
        self.tally.pauses += 1;
        tokio::time::advance(duration).await;
        // Everything due runs before the first heartbeat is read.
        tokio::time::sleep(EXPIRY_INTERVAL).await;
    }

    fn start_reader(&mut self) {
        let Some(key) = self.known_key() else { return };
        let partition = self.rng.random_range(0..PARTITIONS);
        let read_buffer_size = *[1, 3_000, 100_000].choose(&mut self.rng).unwrap();
        let now = self.now();
        tracing::info!(target: "life", ?key, partition, "a reader begins");
        self.readers.push(Reader::new(key, partition, read_buffer_size, (&self.expected[&key], now)));
    }

    async fn step_readers(&mut self) {
        let mut readers = std::mem::take(&mut self.readers);
        let steps = self.rng.random_range(1..5);
        for reader in &mut readers {
            for _ in 0..steps {
                reader.step(self).await;
            }
        }
        readers.retain(|reader| !reader.is_done());
        self.readers = readers;
    }

    /// Checks that the gap ends soon after the timeout of applications, because all directories are
    /// present, if there are any, and no application is left.
    async fn assert_gap_ends(&mut self) {
        let gap = |history: &Self| history.process().flusher.tiers().metadata()?.metadata_gap();
        if gap(self).is_none() {
            return;
        }
        tokio::time::sleep(AppConfig::default().heartbeat_timeout + EXPIRY_INTERVAL).await;
        assert_eq!(gap(self), None, "results of unknown shuffles are refused forever");
        self.tally.ended_gaps += 1;
    }

    /// Reads everything that was acknowledged, unregisters all and checks that nothing remains.
    async fn finish(&mut self) {
        let now = self.now();
        let mut keys: Vec<Key> = self.expected.keys().copied().collect();
        keys.sort_unstable();
        for key in keys {
            for partition in 0..PARTITIONS {
                let mut reader = Reader::new(key, partition, 10_000, (&self.expected[&key], now));
                while !reader.is_done() {
                    reader.step(self).await;
                }
            }
        }
        let service = self.service();
        for app in service.apps().apps() {
            service.lifecycle.unregister_app(app.id().as_str()).expect("the application is registered");
        }
        drop(service);
        self.readers.clear();
        // Unused tickets expire, running flushes end and files are deleted.
        tokio::time::sleep(Duration::from_secs(200)).await;
        self.process().assert_nothing_left();
        let files = self.disks.iter().flat_map(|disk| disk.files());
        // Files that may belong to a shuffle without a registration are kept.
        let remaining: Vec<PathBuf> =
            files.filter(|path| path.starts_with("apps") && !self.excused).collect();
        assert!(remaining.is_empty(), "files remain: {remaining:?}");
        // Objects of such a shuffle are kept until the next start. Without disks, only a gap in the
        // log hides one.
        let has_gap =
            self.process().flusher.tiers().metadata().is_some_and(|tier| tier.metadata_gap().is_some());
        self.assert_gap_ends().await;
        let may_be_left = self.excused && (self.has_disks() || has_gap);
        if let Some(store) = self.store().filter(|_| !may_be_left) {
            self.assert_empty(&store).await;
        }
        let process = self.process();
        process.tasks.cancel();
        process.tasks.drained().await;
        assert_eq!(process.tasks.running(), 0, "tasks are still running");
        self.add_figures();
        self.process = None;
    }
}
