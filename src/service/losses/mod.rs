//! Lost blocks: tracking, reporting, and refusal of exactly the reads that need them.
//!
//! A read is refused if a lost block was reported in its partition and passes its task filter. The
//! error text names the lost blocks and the reason. A read waits while it is not determined whether
//! its blocks are lost (`verify`). Tickets and sends are never refused for a loss: a resent block
//! heals it.
//!
//! A report of blocks that were lost with an earlier process is refused, so that only its task runs
//! again. If the app's registration says that it recomputes stages, the report is accepted and the
//! loss recorded: with one attempt per task, a refused report would end the job.

pub(super) mod log;
pub(super) mod verify;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;

use croaring::Treemap;
use parking_lot::RwLock;
use serde::Serialize;

use crate::app::{App, AppRegistry, ShuffleState};
use crate::log::{
    Availability, IdSet, Ledger, LedgerPhase, LostExtent, PartitionBlockIds, PresentIds, SLICE_IDS, ranges,
    slices,
};
use crate::metrics::clamped;
use crate::telemetry::AUDIT;
use uniffle_wire::types::{PartitionId, ShuffleKey};

use crate::service::ServiceError;
use crate::service::ingest::spill::StoredIds;
use crate::service::metrics::ServiceMetrics;
use verify::{UnverifiedPartition, Verifier, cause};

/// Properties that make Spark recompute a stage whose shuffle data cannot be fetched; the first one
/// set counts. They arrive with registrations of clients since 0.10, for which the last is an old
/// name.
const RESUBMIT_PROPERTIES: [&str; 3] =
    ["spark.rss.stageRetry.fetchFailureEnabled", "spark.rss.stageRetry.enabled", "spark.rss.resubmit.stage"];

/// Reason for blocks that were in memory only.
const IN_MEMORY: &str = "the blocks were in memory when the worker ended";

/// Reason for blocks that disappeared while their report was being stored.
const GONE_MEANWHILE: &str = "the blocks disappeared while their report was being stored";

/// Maximum number of losses listed in one report; further blocks are only counted.
const LISTED_MAX: usize = 10_000;

/// Maximum number of reasons in a summary of incompleteness.
const REASONS_MAX: usize = 10;

/// A loss with its shuffle and partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShuffleLoss {
    /// Application.
    pub app: String,
    /// Shuffle.
    pub shuffle: i32,
    /// Partition.
    pub partition: i32,
    /// Number of lost blocks.
    pub blocks: u64,
    /// The first closed ranges of their ids.
    pub ranges: Vec<(i64, i64)>,
    /// Bytes of the lost blocks, if known.
    pub bytes: Option<u64>,
    /// Failed disk, or the event that lost the blocks.
    pub reason: String,
    /// Time of detection, in milliseconds since 1970.
    pub at_ms: u64,
}

/// All current losses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LossReport {
    /// Losses in the ledgers.
    pub losses: Vec<ShuffleLoss>,
    /// Number of lost blocks not listed in `losses`.
    pub unlisted_blocks: u64,
    /// Shuffles whose results are refused because reports may be missing.
    pub incomplete: Vec<IncompleteShuffle>,
}

/// A shuffle for which it is not proven that all acknowledged reports are known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct IncompleteShuffle {
    /// Application.
    pub app: String,
    /// Shuffle.
    pub shuffle: i32,
    /// Possibly missing data, and the action to take.
    pub reason: String,
}

/// Summary of the shuffles that are not proven to be complete.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Incompleteness {
    /// Number of shuffles whose results are refused.
    pub shuffles: usize,
    /// The first distinct reasons.
    pub reasons: Vec<String>,
    /// Why results of unknown shuffles are refused too; null if they are not.
    pub unknown_shuffles: Option<String>,
}

/// Returns the shuffles of an app whose results are refused.
pub(super) fn incomplete_of(app: &App) -> Vec<IncompleteShuffle> {
    let of_shuffle = |shuffle: &Arc<ShuffleState>| {
        let (key, reason) = (shuffle.key(), shuffle.ledger.incomplete()?.to_owned());
        Some(IncompleteShuffle { app: key.app.to_string(), shuffle: key.shuffle.0, reason })
    };
    app.shuffles().iter().filter_map(of_shuffle).collect()
}

/// Returns at most `max` losses of one app.
pub(super) fn losses_of(app: &App, max: usize) -> Vec<ShuffleLoss> {
    let mut losses = Vec::new();
    for shuffle in app.shuffles() {
        let (key, room) = (shuffle.key(), max - losses.len());
        losses.extend(shuffle.ledger.losses().into_iter().take(room).map(|(partition, loss)| ShuffleLoss {
            app: key.app.to_string(),
            shuffle: key.shuffle.0,
            partition: partition.0,
            blocks: loss.ids.len(),
            ranges: ranges(&loss.ids),
            bytes: loss.bytes,
            reason: loss.reason.to_string(),
            at_ms: loss.at_ms,
        }));
    }
    losses
}

/// Returns the number of lost blocks of one app.
pub(super) fn lost_blocks_of(app: &App) -> u64 {
    app.shuffles().iter().map(|shuffle| shuffle.ledger.lost_blocks()).sum()
}

/// Records losses in the ledgers, and refuses the affected reads and reports.
#[derive(Debug)]
pub(super) struct Losses {
    pub(super) apps: Arc<AppRegistry>,
    pub(super) verifier: Arc<Verifier>,
    pub(super) metrics: Arc<ServiceMetrics>,
    /// Reason for blocks that no tier knows.
    unknown_loss_reason: RwLock<Arc<str>>,
}

impl Losses {
    pub(super) fn new(apps: Arc<AppRegistry>, verifier: Arc<Verifier>, metrics: Arc<ServiceMetrics>) -> Self {
        Self { apps, verifier, metrics, unknown_loss_reason: RwLock::new(Arc::from(IN_MEMORY)) }
    }

    /// Adds missing data directories to the reason: unknown blocks were there or in memory.
    pub(super) fn blame_missing_directories(&self, paths: &[String]) {
        let missing = match paths {
            [] => return,
            [path] => format!("data directory {path} is missing"),
            paths => format!("data directories {} are missing", paths.join(", ")),
        };
        *self.unknown_loss_reason.write() = Arc::from(format!("{missing}, or {IN_MEMORY}"));
    }

    fn unknown_loss_reason(&self) -> Arc<str> {
        Arc::clone(&self.unknown_loss_reason.read())
    }

    /// Returns the losses of all apps.
    pub(super) fn report(&self) -> LossReport {
        let mut report = LossReport::default();
        let mut lost = 0;
        for app in self.apps.apps() {
            lost += lost_blocks_of(&app);
            report.losses.extend(losses_of(&app, LISTED_MAX - report.losses.len()));
            report.incomplete.extend(incomplete_of(&app));
        }
        report.incomplete.extend(self.without_registration());
        let listed: u64 = report.losses.iter().map(|loss| loss.blocks).sum();
        report.unlisted_blocks = lost.saturating_sub(listed);
        report.incomplete.sort();
        report.losses.sort_by_key(|loss| (loss.app.clone(), loss.shuffle, loss.partition, loss.at_ms));
        report
    }

    /// Returns the shuffles with files but without a registration, of known or unknown apps.
    fn without_registration(&self) -> impl Iterator<Item = IncompleteShuffle> {
        self.apps.all_without_registration().into_iter().map(|(key, reason)| IncompleteShuffle {
            app: key.app.to_string(),
            shuffle: key.shuffle.0,
            reason: format!("registration not found; files are left for a later start: {reason}"),
        })
    }

    /// Returns a summary of incomplete shuffles.
    pub(super) fn incompleteness(&self, unknown_shuffles: Option<String>) -> Incompleteness {
        let (mut shuffles, mut reasons) = (0, BTreeSet::new());
        for incomplete in
            self.apps.apps().iter().flat_map(|app| incomplete_of(app)).chain(self.without_registration())
        {
            shuffles += 1;
            if reasons.len() < REASONS_MAX {
                reasons.insert(incomplete.reason);
            }
        }
        Incompleteness { shuffles, reasons: reasons.into_iter().collect(), unknown_shuffles }
    }

    pub(super) fn set_gauges(&self) {
        let (mut blocks, mut apps, mut unverified, mut incomplete) =
            (0, 0, 0, self.without_registration().count() as u64);
        for app in self.apps.apps() {
            let lost = lost_blocks_of(&app);
            blocks += lost;
            apps += u64::from(lost > 0);
            for shuffle in app.shuffles() {
                unverified += shuffle.ledger.verifying();
                incomplete += u64::from(shuffle.ledger.incomplete().is_some());
            }
        }
        self.metrics.lost_blocks_now.set(clamped(blocks));
        self.metrics.apps_with_loss.set(clamped(apps));
        self.metrics.unverified_partitions.set(clamped(unverified));
        self.metrics.incomplete_shuffles.set(clamped(incomplete));
    }

    /// Refuses a read that needs a lost block, or a block whose loss is not yet determined.
    pub(super) fn refuse(
        &self,
        app: &App,
        shuffle: &ShuffleState,
        partition: PartitionId,
        filter: Option<&Treemap>,
    ) -> Result<(), ServiceError> {
        let wanted = |ids: &IdSet| {
            let stored = StoredIds::of(&shuffle.reports, &[partition]);
            // Only reported ids can be lost, so ids on disk are not looked up.
            let reported = match stored.runs.is_empty() {
                true => stored.sets.iter().fold(IdSet::default(), |mut all, set| {
                    all.add_all(&ids.and(set));
                    all
                }),
                false => ids.clone(),
            };
            let Some(filter) = filter else { return reported };
            let passes = |id: &u64| app.client.task_of(*id).is_none_or(|task| filter.contains(task));
            IdSet::from_ascending(reported.iter().filter(passes))
        };
        let refused = answer(shuffle, partition, shuffle.ledger.availability(partition, wanted));
        if let Err(ServiceError::Lost(_)) = &refused {
            self.metrics.reads_refused_for_loss.inc();
        }
        refused
    }

    /// Decides whether to accept a report of blocks of which some are in no tier, and if so,
    /// records these as lost. Returns the ledger's alarm count from before the check, for
    /// [`Losses::note_reported`]. Returns `None` if lost blocks are not listed: a scan that begins
    /// before the report is stored does not count them.
    pub(super) async fn check_report(
        &self,
        app: &App,
        shuffle: &Arc<ShuffleState>,
        partitions: &[PartitionBlockIds],
    ) -> Result<Option<u64>, ServiceError> {
        let ledger = &shuffle.ledger;
        let (alarms, mut are_listed) = (ledger.alarms(), true);
        if !ledger.is_watched() {
            return Ok(Some(alarms));
        }
        let resubmits = RESUBMIT_PROPERTIES.iter().find_map(|name| app.client.property(name));
        let resubmits = resubmits.is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
        let (gone, deadline) = (self.unknown_loss_reason(), Verifier::scan_deadline());
        let cause = cause(Vec::new(), &gone);
        let unknown = partitions.iter().filter(|PartitionBlockIds { partition, block_ids }| {
            ledger.with(*partition, |it| !it.is_in_tiers() && it.verify_if_unknown(&ids_of(block_ids)))
        });
        let item =
            |partition| UnverifiedPartition { shuffle: Arc::clone(shuffle), partition, cause: cause.clone() };
        self.verifier.verify(unknown.map(|it| item(it.partition)).collect());
        for PartitionBlockIds { partition, block_ids } in partitions {
            self.verifier.wait_for_scan(shuffle, *partition, deadline).await;
            let missing = match self.find_missing(shuffle, *partition, block_ids).await {
                Some(missing) => missing,
                None => {
                    ledger.with(*partition, |it| it.acknowledge(&ids_of(block_ids))).err().unwrap_or_default()
                }
            };
            if missing.is_empty() {
                continue;
            }
            if !resubmits {
                self.metrics.reports_refused_for_loss.inc();
                let ids = IdSet::from_ascending(missing.iter().copied());
                let text = describe(shuffle.key(), *partition, &ids, &gone);
                return Err(ServiceError::Lost(format!("{text}; the task must run again")));
            }
            are_listed &= self.verifier.enter(shuffle, *partition, &missing, &cause);
        }
        Ok(are_listed.then_some(alarms))
    }

    /// Returns the `ids` that exist nowhere, for a partition whose ids are not in memory. Returns
    /// `None` if they are in memory, or if the lookup is impossible now.
    async fn find_missing(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        ids: &[i64],
    ) -> Option<Vec<u64>> {
        let is_in_tiers = |it: &mut Ledger| it.is_in_tiers() && it.phase() != LedgerPhase::Verifying;
        if !shuffle.ledger.with(partition, is_in_tiers) {
            return None;
        }
        let missing = self.verifier.missing(shuffle.key(), partition, &ids_of(ids)).await;
        let log_error = |error| tracing::warn!(shuffle = %shuffle.key(), %partition, %error, "cannot look up reported blocks");
        missing.map_err(log_error).ok()
    }

    /// Updates the ledger after a report was accepted. Blocks found missing meanwhile were not
    /// matched with this report: they are lost or unverified. `alarms` is the result of
    /// [`Losses::check_report`].
    pub(super) fn note_reported(
        &self,
        shuffle: &Arc<ShuffleState>,
        partitions: &[PartitionBlockIds],
        alarms: Option<u64>,
    ) {
        let ledger = &shuffle.ledger;
        if !ledger.is_watched() {
            return;
        }
        let is_calm = alarms == Some(ledger.alarms());
        let cause = cause(Vec::new(), GONE_MEANWHILE);
        for PartitionBlockIds { partition, block_ids } in partitions {
            // The tiers were queried when the report was checked.
            if is_calm && ledger.with(*partition, |it| it.is_in_tiers()) {
                continue;
            }
            match ledger.with(*partition, |it| it.acknowledge(&ids_of(block_ids))) {
                Ok(false) => {}
                Ok(true) => {
                    let shuffle = Arc::clone(shuffle);
                    let item = UnverifiedPartition { shuffle, partition: *partition, cause: cause.clone() };
                    self.verifier.verify(vec![item]);
                }
                Err(missing) => {
                    self.verifier.enter(shuffle, *partition, &missing, &cause);
                }
            }
        }
    }

    /// Compares reports with recovered blocks after a restart. A reported block that is missing is
    /// lost, or must be verified if there are remote files. Returns the partitions to verify.
    pub(super) async fn take_over(
        &self,
        shuffle: &Arc<ShuffleState>,
        present: PresentIds,
        lost: Vec<LostExtent>,
        reason: &str,
        has_remote: bool,
    ) -> Vec<UnverifiedPartition> {
        let ledger = &shuffle.ledger;
        ledger.take_over(present, !has_remote);
        let mut extents: HashMap<PartitionId, Vec<LostExtent>> = HashMap::new();
        for extent in lost {
            extents.entry(extent.partition).or_default().push(extent);
        }
        let gone = self.unknown_loss_reason();
        let reason = if reason.is_empty() || *gone != *IN_MEMORY { &gone } else { reason };
        let mut unverified = Vec::new();
        let mut acknowledge = |partition: PartitionId, ids: &IdSet| {
            let item = || {
                let cause = cause(extents.get(&partition).cloned().unwrap_or_default(), reason);
                UnverifiedPartition { shuffle: Arc::clone(shuffle), partition, cause }
            };
            if ledger.with(partition, |it| it.is_in_tiers()) {
                if ledger.mark_all_unverified(partition) {
                    unverified.push(item());
                }
                return;
            }
            for ids in slices(ids, SLICE_IDS) {
                match ledger.with(partition, |it| it.acknowledge(&ids)) {
                    Ok(false) => {}
                    Ok(true) => unverified.push(item()),
                    Err(missing) => {
                        self.verifier.enter(shuffle, partition, &missing, &item().cause);
                    }
                }
            }
        };
        shuffle
            .reports
            .block_ids
            .lock()
            .by_partition()
            .for_each(|(partition, ids)| acknowledge(partition, ids));
        let runs = shuffle.reports.block_ids.lock().runs();
        for run in runs {
            let mut partitions = run.partitions();
            loop {
                match partitions.next().await {
                    Ok(Some((partition, ids))) => acknowledge(partition, &ids),
                    Ok(None) => break,
                    Err(error) => {
                        ledger.mark_incomplete(format!("cannot read reported block ids: {error}"));
                        break;
                    }
                }
            }
        }
        unverified
    }

    /// Recounts a partition whose blocks became visible while the ledger began to track it, because
    /// they may not have been counted.
    pub(super) fn count_again(&self, shuffle: &Arc<ShuffleState>, partition: PartitionId) {
        let has_begun = |it: &mut Ledger| it.phase() != LedgerPhase::Known && it.mark_unverified(None);
        if shuffle.ledger.with(partition, has_begun) {
            let cause = cause(Vec::new(), &self.unknown_loss_reason());
            self.verifier.verify(vec![UnverifiedPartition {
                shuffle: Arc::clone(shuffle),
                partition,
                cause,
            }]);
        }
    }

    /// Records in the ledger that blocks have become visible.
    pub(super) fn note_committed(&self, shuffle: &ShuffleState, partition: PartitionId, ids: &[u64]) {
        let healed = shuffle.ledger.with(partition, |it| it.commit(ids));
        if healed > 0 {
            self.metrics.healed_blocks.inc_by(healed);
            tracing::info!(
                target: AUDIT,
                shuffle = %shuffle.key(),
                %partition,
                blocks = healed,
                "lost blocks were resent"
            );
        }
    }
}

/// Converts sorted reported ids.
fn ids_of(ids: &[i64]) -> Vec<u64> {
    ids.iter().map(|id| id.unsigned_abs()).collect()
}

/// Refuses a read of a partition whose losses on a disk are not determined yet, or are not listed.
pub(super) fn refuse_unknown(shuffle: &ShuffleState, partition: PartitionId) -> Result<(), ServiceError> {
    answer(shuffle, partition, shuffle.ledger.availability(partition, |_| IdSet::default()))
}

fn answer(
    shuffle: &ShuffleState,
    partition: PartitionId,
    availability: Availability,
) -> Result<(), ServiceError> {
    let key = shuffle.key();
    match availability {
        Availability::Serve => Ok(()),
        Availability::LostUnlisted(count, reason) => Err(ServiceError::Lost(format!(
            "{count} blocks of shuffle {key} partition {partition} are lost, not listed because the heap is \
             full (see memory_store.heap_capacity): {reason}"
        ))),
        Availability::Lost(ids, reason) => Err(ServiceError::Lost(describe(key, partition, &ids, &reason))),
        Availability::Wait(None) => Err(ServiceError::Unverified(format!(
            "a disk has failed; lost blocks of shuffle {key} partition {partition} are being determined"
        ))),
        Availability::Wait(Some(blocks)) => Err(ServiceError::Unverified(format!(
            "{blocks} blocks of shuffle {key} partition {partition} are being searched in the remote store, \
             where an earlier process may have stored them"
        ))),
    }
}

/// Describes the loss for the stack trace of a failed job. Names the first four ranges of ids.
fn describe(key: &ShuffleKey, partition: PartitionId, ids: &IdSet, reason: &str) -> String {
    let count = ids.len();
    let noun = if count == 1 { "block" } else { "blocks" };
    let mut text = format!("{count} {noun} of shuffle {key} partition {partition} are lost (ids");
    let ranges = ranges(ids);
    for (first, last) in ranges.iter().take(4) {
        let written = match first == last {
            true => write!(text, " {first}"),
            false => write!(text, " {first}-{last}"),
        };
        debug_assert!(written.is_ok(), "writing to a string cannot fail");
    }
    let more = if ranges.len() > 4 { " …" } else { "" };
    format!("{text}{more}): {reason}")
}

#[cfg(test)]
mod tests {
    use uniffle_wire::types::{AppId, ShuffleId};

    use super::*;

    #[test]
    fn description_of_a_loss_says_that_it_omits_ranges() {
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        let text = |ids: &[u64]| {
            describe(&key, PartitionId(2), &IdSet::from_ascending(ids.iter().copied()), "disk failed")
        };
        let four = "5 blocks of shuffle app/1 partition 2 are lost (ids 1-2 4 6 8): disk failed";
        assert_eq!(text(&[1, 2, 4, 6, 8]), four);
        assert!(text(&[1, 2, 4, 6, 8, 10]).contains("(ids 1-2 4 6 8 …)"));
    }
}
