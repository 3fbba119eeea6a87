//! Restores the recovered state at the start: registrations and reports from the metadata log,
//! blocks in memory, and the resulting losses.
//!
//! A shuffle without a registration was never registered and is removed. Its files must stay for a
//! later start if its registration may be in missing data, or cannot be restored. A shuffle whose
//! reports may be missing becomes incomplete, so that its results are refused.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::app::{App, PartitionRanges, Registration, ReportError, ShuffleState};
use crate::clock::Instant;
use crate::log::{self, PresentIds, Record, RecordReader, Report};
use crate::store::{Admission, Purge, Recovered, RecoveredShuffle, RemoteStorage, StoreError, TierRole};
use uniffle_base::budget::Budget;
use uniffle_wire::types::ShuffleKey;

use super::Lifecycle;
use super::memory_restorer::{MemoryRestorer, RestoredIds};
use super::report_batch::{GATHERED_MAX, ReportBatch, enter_alone};
use crate::metrics::clamped;
use crate::service::ServiceError;
use crate::service::losses::verify::UnverifiedPartition;
use crate::telemetry::AUDIT;

/// Counts of the restored state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RestoreCounts {
    /// Applications.
    pub apps: usize,
    /// Shuffles.
    pub shuffles: usize,
    /// Shuffles found without a registration, or with one that cannot be restored.
    pub unregistered: usize,
    /// Reported block ids.
    pub reported_blocks: u64,
}

impl RestoreCounts {
    fn log_summary(&self, bytes: u64, blocks: u64, took: Duration) {
        let Self { apps, shuffles, unregistered, reported_blocks } = *self;
        if shuffles + unregistered > 0 {
            tracing::info!(
                apps,
                shuffles,
                bytes,
                blocks,
                reported_blocks,
                ?took,
                "recovered data of an earlier process"
            );
        }
    }
}

/// A shuffle whose records are being read.
#[derive(Default)]
struct Restoring {
    /// State of the shuffle, once it is registered.
    state: Option<Arc<ShuffleState>>,
    /// Reports read before the registration: diverging copies of the log are read one after
    /// another.
    early: Vec<(Report, Bytes)>,
    /// Later reports that are not added yet.
    batch: ReportBatch,
    /// Receives the shuffle's present ids once its blocks in memory are restored. `None` until that
    /// begins, and if there are none to restore.
    present: Option<RestoredIds>,
    remote: RemoteState,
    /// Why a record of the shuffle could not be processed. Later ones are skipped.
    failed: Option<ServiceError>,
    /// Why its reports are not completely known.
    missing_reports: Option<String>,
}

/// Approximate heap of a recovered partition besides its ids: its table entry and its ledger.
const FOUND_PARTITION_BYTES: u64 = 384;

impl Lifecycle {
    /// Restores the recovered state, which may be empty: first the records of the log, one by one,
    /// then the blocks that exist. Every app counts as used now. All restored state is charged as
    /// it is added, and nothing else of it is held. Afterwards memory and tiers report damage to
    /// the verifier.
    pub async fn restore(&self, mut recovered: Recovered) -> RestoreCounts {
        let mut restored = RestoreCounts::default();
        let (bytes, blocks, took) = (recovered.bytes, recovered.blocks, recovered.took);
        self.set_recovery_metrics(&recovered);
        self.parts.losses.blame_missing_directories(&recovered.missing_disks);
        let mut unrestored = self.take_unrestored(&mut recovered.shuffles);
        let (mut known, unread) = self.read_log(&mut recovered.records, &mut unrestored).await;
        unrestored.memory_restorer.end();
        let (mut unverified, mut unregistered, mut failed) = (Vec::new(), Vec::new(), HashSet::new());
        let gap = self.parts.tiers.metadata().and_then(|tier| tier.metadata_gap());
        let is_uncertain = unread.is_some() || gap.is_some() || !recovered.missing_disks.is_empty();
        for mut shuffle in recovered.shuffles {
            let (key, reason) = (shuffle.key.clone(), shuffle.reason.clone());
            let there = known.get_mut(&key).and_then(|it| it.present.take()?.try_recv().ok());
            if let Some(present) = there.or_else(|| unrestored.present.remove(&key)) {
                shuffle.present = present;
            }
            warn_of_ids_on_disk(&key, shuffle.present.in_tier().count());
            if shuffle.incomplete.is_none() {
                shuffle.incomplete.clone_from(&unread);
            }
            // If records may be missing, a shuffle without one may still have been registered.
            // Damage to its data alone does not count.
            let may_be_registered = is_uncertain || (shuffle.incomplete.is_some() && !reason.is_empty());
            match self.restore_shuffle(known.remove(&key).unwrap_or_default(), shuffle).await {
                Ok(Some(more)) => {
                    restored.shuffles += 1;
                    unverified.extend(more);
                }
                Ok(None) if may_be_registered => {
                    tracing::error!(
                        shuffle = %key,
                        reason,
                        "shuffle has no registration; its files are left for a later start"
                    );
                    restored.unregistered += 1;
                    self.leave(&key);
                    unregistered.push(key);
                }
                Ok(None) => {
                    tracing::info!(shuffle = %key, "shuffle was never registered; removed");
                    restored.unregistered += 1;
                    self.discard(&key);
                }
                Err(error) => {
                    tracing::error!(
                        shuffle = %key,
                        %error,
                        "cannot recover the shuffle; its files are left for a later start"
                    );
                    restored.unregistered += 1;
                    let why = format!("shuffle cannot be recovered: {error}");
                    self.parts.apps.found_without_registration(&key, &Arc::from(why));
                    self.leave(&key);
                    failed.insert(key);
                }
            }
        }
        self.keep_memory(is_uncertain, unregistered.iter().chain(&failed).collect());
        self.mark_unverified_apps(&unregistered, unread);
        self.parts.apps.touch_all();
        for app in self.parts.apps.apps() {
            self.weights.weigh(&app);
            self.count_on_disk(&app);
        }
        self.parts.verifier.verify(unverified);
        self.parts.verifier.listen_for_damage(&self.parts.apps);
        restored.apps = self.parts.apps.app_count();
        restored.reported_blocks = self.parts.apps.block_id_count();
        restored.log_summary(bytes, blocks, took);
        restored
    }

    fn set_recovery_metrics(&self, recovered: &Recovered) {
        self.parts.metrics.recovered_bytes.set(clamped(recovered.bytes));
        self.parts.metrics.recovered_blocks.set(clamped(recovered.blocks));
        self.parts.metrics.recovery_ms.set(clamped(recovered.took.as_millis()));
    }

    /// Verifies recovered blocks in memory that no reader has requested yet, one partition after
    /// another. They are served as soon as the start is over; requested partitions are verified
    /// first.
    pub fn verify_memory(&self) {
        if !self.parts.memory.has_unverified() {
            return;
        }
        let (buffers, stopped) = (self.parts.memory.buffers(), self.parts.tasks.cancelled());
        self.parts.tasks.spawn("verify memory", async move {
            let (began, partitions) = (Instant::now(), buffers.len());
            let verification = async {
                for buffer in buffers {
                    // A panicking check has shown nothing; a reader will run it again.
                    let _verified = tokio::task::spawn_blocking(move || buffer.verify()).await;
                }
            };
            tokio::select! {
                biased;
                () = stopped => {}
                () = verification => tracing::info!(
                    partitions,
                    took = ?began.elapsed(),
                    "scanned the memory of an earlier process"
                ),
            }
        });
    }

    /// Marks the applications whose registrations may be missing because recovery has a gap. These
    /// are all applications found, including `unregistered` ones, which have only files.
    fn mark_unverified_apps(&self, unregistered: &[ShuffleKey], unread: Option<String>) {
        let gap = self.parts.tiers.metadata().and_then(|tier| tier.metadata_gap());
        let Some(reason) = gap.or_else(|| unread.map(Arc::from)) else { return };
        let known = self.parts.apps.apps().into_iter().flat_map(|app| app.shuffles());
        known.for_each(|shuffle| self.parts.apps.found_unverified(shuffle.key(), &reason));
        unregistered.iter().for_each(|key| self.parts.apps.found_without_registration(key, &reason));
    }

    /// Keeps the blocks in memory of shuffles that a later start may know. If records may be
    /// missing, these are all unknown shuffles, as for their files.
    fn keep_memory(&self, is_uncertain: bool, unregistered: HashSet<&ShuffleKey>) {
        let blocks = self.parts.memory.keep_for_later(|key| is_uncertain || unregistered.contains(key));
        if blocks > 0 {
            tracing::error!(
                blocks,
                "shuffles with blocks in memory cannot be recovered; the blocks are left for a later start"
            );
        }
    }

    /// Counts an application's recovered data on disk towards its quotas.
    fn count_on_disk(&self, app: &App) {
        for shuffle in app.shuffles() {
            shuffle.on_disk.set(|| self.parts.tiers.occupied_bytes(shuffle.key()));
        }
    }

    fn leave(&self, key: &ShuffleKey) {
        if let Some(tier) = self.parts.tiers.metadata() {
            tier.leave(key);
        }
    }

    fn discard(&self, key: &ShuffleKey) {
        drop(self.purge_state(&key.app, std::slice::from_ref(key), Purge::Shuffles));
    }

    /// Takes the present ids out of `shuffles` whose blocks in memory are to be restored.
    fn take_unrestored(&self, shuffles: &mut [RecoveredShuffle]) -> Unrestored {
        let shuffles = shuffles.iter_mut().filter(|_| self.parts.memory.has_leftover());
        let empty = Budget::new(0);
        let taken = |it: &mut RecoveredShuffle| std::mem::replace(&mut it.present, PresentIds::new(&empty));
        let present = shuffles.map(|it| (it.key.clone(), taken(it))).collect();
        Unrestored { present, memory_restorer: MemoryRestorer::new(&self.parts.memory, &self.parts.tiers) }
    }

    /// Registers shuffles from the log, begins to restore their blocks in memory, and adds reports.
    /// Also returns why the log could not be read completely, if so: then any shuffle may lack
    /// records.
    async fn read_log(
        &self,
        records: &mut RecordReader,
        unrestored: &mut Unrestored,
    ) -> (HashMap<ShuffleKey, Restoring>, Option<String>) {
        let mut known: HashMap<ShuffleKey, Restoring> = HashMap::new();
        let mut gathered = 0;
        let unread = loop {
            match records.next().await {
                Ok(Some((key, record))) => {
                    let restoring = known.entry(key.clone()).or_default();
                    if restoring.failed.is_none() {
                        match self.take_record(&key, restoring, &record) {
                            Ok(ids) => gathered += ids,
                            Err(error) => restoring.failed = Some(error),
                        }
                        self.restore_memory(&key, restoring, unrestored);
                    }
                }
                Ok(None) => break None,
                Err(error) => {
                    tracing::error!(%error, "cannot read all records of the metadata log");
                    break Some(format!("{error}; restart when it is readable"));
                }
            }
            if gathered >= GATHERED_MAX {
                known.iter_mut().for_each(|(key, restoring)| restoring.enter_gathered(key));
                self.settle_ids().await;
                gathered = 0;
            }
        };
        known.iter_mut().for_each(|(key, restoring)| restoring.enter_gathered(key));
        self.settle_ids().await;
        (known, unread)
    }

    /// Moves ids to disk for applications that exceed their part of the heap, so that a start can
    /// hold as many ids as the previous run.
    async fn settle_ids(&self) {
        for app in self.parts.apps.apps() {
            // Without a disk for the ids they stay in memory beyond the heap limit, because they
            // are acknowledged.
            let _room = self.parts.spill.charge(&app, 1).await;
        }
    }

    /// Processes a record. Returns how many ids of it were gathered.
    fn take_record(
        &self,
        key: &ShuffleKey,
        restoring: &mut Restoring,
        record: &Bytes,
    ) -> Result<usize, ServiceError> {
        if let Some(gathered) = restoring.gather(record) {
            return Ok(gathered);
        }
        match Record::decode(record) {
            Ok(Record::Registration(registration)) => {
                let distribution = registration.distribution;
                let remote_note = registration.remote_storage.clone();
                let registration = registration_of(key, registration)?;
                self.parts.apps.take_over(registration, || self.parts.memory.register(key, distribution))?;
                restoring.remote = restoring.remote.max(self.restore_tiers(key, &remote_note));
                restoring.state = self.parts.apps.find(&key.app).and_then(|app| app.shuffle(key.shuffle));
                let early = std::mem::take(&mut restoring.early);
                Ok(early.into_iter().map(|(report, record)| restoring.enter(key, &report, &record)).sum())
            }
            Ok(Record::Report(report)) if restoring.state.is_none() => {
                restoring.early.push((report, record.clone()));
                Ok(0)
            }
            Ok(Record::Report(report)) => Ok(restoring.enter(key, &report, record)),
            Err(error) => Err(ServiceError::Malformed(format!("metadata log: {error}"))),
        }
    }

    /// Restores a shuffle. Returns the partitions whose blocks must be searched in a remote store,
    /// or `None` if it was never registered.
    async fn restore_shuffle(
        &self,
        restoring: Restoring,
        mut shuffle: RecoveredShuffle,
    ) -> Result<Option<Vec<UnverifiedPartition>>, ServiceError> {
        let Some(state) = restoring.state else { return restoring.failed.map_or(Ok(None), Err) };
        let unread =
            restoring.failed.map(|error| format!("some records of the shuffle cannot be recovered: {error}"));
        if let Some(reason) = shuffle.incomplete.take().or(restoring.missing_reports).or(unread) {
            tracing::error!(
                target: AUDIT,
                shuffle = %shuffle.key,
                reason,
                "reports may be missing; results of the shuffle are refused"
            );
            state.ledger.mark_incomplete(reason);
        }
        state.reports.block_ids.lock().hold(shuffle.present.len() as u64 * FOUND_PARTITION_BYTES);
        if restoring.remote == RemoteState::Unusable {
            return Ok(Some(Vec::new()));
        }
        let RecoveredShuffle { present, lost, reason, .. } = shuffle;
        let has_remote = restoring.remote == RemoteState::Known;
        Ok(Some(self.parts.losses.take_over(&state, present, lost, &reason, has_remote).await))
    }

    /// Begins to restore a registered shuffle's blocks in memory, if memory survived the earlier
    /// process.
    fn restore_memory(&self, key: &ShuffleKey, restoring: &mut Restoring, unrestored: &mut Unrestored) {
        if restoring.state.is_none() || restoring.present.is_some() || unrestored.present.is_empty() {
            return;
        }
        let (Some(app), Some(present)) = (self.parts.apps.find(&key.app), unrestored.present.remove(key))
        else {
            return;
        };
        let heap = app.budgets.partitions.clone();
        restoring.present = Some(unrestored.memory_restorer.begin(key.clone(), present, heap));
    }
}

/// Shuffles whose blocks in memory are not restored yet.
struct Unrestored {
    /// Present ids of the shuffles that are not registered yet.
    present: HashMap<ShuffleKey, PresentIds>,
    memory_restorer: MemoryRestorer,
}

impl Restoring {
    /// Gathers a plain report of a registered shuffle. Returns how many ids it counts for, or
    /// `None` if the record was not gathered.
    fn gather(&mut self, record: &Bytes) -> Option<usize> {
        self.state.as_ref()?;
        self.batch.take_plain(record)
    }

    /// Adds a report of a registered shuffle, now or together with others. Returns how many ids
    /// were gathered.
    fn enter(&mut self, key: &ShuffleKey, report: &Report, record: &Bytes) -> usize {
        let Some(state) = &self.state else { return 0 };
        state.reports.records.lock().insert_recovered(&report.records);
        if let Some(gathered) = self.batch.take(report, record) {
            return gathered;
        }
        let state = Arc::clone(state);
        self.enter_gathered(key);
        let entered = enter_alone(key, &state, report);
        self.note_missing_report(entered.err());
        0
    }

    fn enter_gathered(&mut self, key: &ShuffleKey) {
        let Some(state) = &self.state else { return };
        let missing_reports = self.batch.enter(key, state);
        self.note_missing_report(missing_reports);
    }

    fn note_missing_report(&mut self, error: Option<ReportError>) {
        let Some(error) = error else { return };
        self.missing_reports.get_or_insert_with(|| {
            format!("a report cannot be recovered: {error}; unregister the shuffle or rerun its application")
        });
    }
}

/// Remote store of a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum RemoteState {
    /// The shuffle has no remote path.
    #[default]
    None,
    /// The remote path can be used.
    Known,
    /// The remote path cannot be used in the current configuration, so its blocks cannot be looked
    /// up.
    Unusable,
}

impl Lifecycle {
    /// Registers a shuffle again in the tiers that do not keep registrations. Without a remote
    /// storage its cold data goes to local disks.
    fn restore_tiers(&self, key: &ShuffleKey, note: &[u8]) -> RemoteState {
        let noted = match note {
            [] => Ok((None, Vec::new())),
            note => serde_json::from_slice::<(Option<RemoteStorage>, Vec<(i32, i32)>)>(note),
        };
        let admitted = noted.map_err(|error| error.to_string()).and_then(|(storage, ranges)| {
            let admissions =
                self.forgetful_admissions(storage.as_ref()).map_err(|error| error.to_string())?;
            admissions.iter().for_each(|(admit, _)| admit(key, &ranges));
            Ok(admissions.iter().any(|(_, is_remote)| *is_remote))
        });
        match admitted {
            Ok(true) => RemoteState::Known,
            Ok(false) if note.is_empty() => RemoteState::None,
            admitted => {
                let error = admitted.err().unwrap_or_else(|| "this worker has no HDFS tier now".to_owned());
                tracing::error!(
                    shuffle = %key, error,
                    "cannot recover the shuffle's remote storage; none of its blocks are reported lost"
                );
                RemoteState::Unusable
            }
        }
    }

    /// Returns closures that register a shuffle in the tiers that do not keep registrations, and
    /// whether clients read each tier directly.
    fn forgetful_admissions(
        &self,
        storage: Option<&RemoteStorage>,
    ) -> Result<Vec<(Admission, bool)>, StoreError> {
        let mut admissions = Vec::new();
        for tier in self.parts.tiers.iter().filter(|tier| tier.capability().role != TierRole::Primary) {
            let admission = Arc::clone(tier).prepare(storage)?;
            admissions.extend(admission.map(|admit| (admit, tier.served().is_none())));
        }
        Ok(admissions)
    }
}

fn warn_of_ids_on_disk(key: &ShuffleKey, partitions: usize) {
    if partitions > 0 {
        tracing::warn!(
            shuffle = %key, partitions,
            "the application's share of memory_store.heap_capacity is full; the block ids stay on disk"
        );
    }
}

fn registration_of(key: &ShuffleKey, note: log::RegistrationRecord) -> Result<Registration, ServiceError> {
    Ok(Registration {
        key: key.clone(),
        ranges: PartitionRanges::parse(&note.ranges)?,
        distribution: note.distribution,
        user: note.user,
        properties: note.properties.into_iter().collect::<HashMap<_, _>>(),
        sent_properties: note.sent_properties,
        heartbeat_timeout: note.heartbeat_timeout_ms.map(Duration::from_millis),
        other_modules_bytes: note.remote_storage.len() as u64,
        from: None,
    })
}
