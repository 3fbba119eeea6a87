//! Lost blocks: found, told, and in the way of exactly those reads that want them.
//!
//! A read is refused when a lost block was reported in its partition and passes its task filter; the text says what is
//! lost and why. Tickets and sends are never refused for a loss: a block that is sent again heals.
//!
//! What an earlier process left in remote files has to be looked up there first (`doubt`).
//!
//! A report of blocks that an earlier process took with it is refused, so that only its task runs again: at that time
//! nobody was promised anything. An app that says in its registration that it recomputes stages has it taken, and the
//! loss entered, because with one attempt per task a refused report would end its job.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use croaring::Treemap;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::app::{App, Loss, ShuffleState, ranges};
use crate::tiers::LostExtent;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey};

use super::doubt::Suspect;
use super::examine::refuse_uncounted;
use super::{Service, ServiceError};
use crate::metrics::clamped;

/// By these properties Spark computes a stage again whose shuffle data cannot be fetched; the first that is set counts.
/// They arrive with registrations of clients since 0.10, to which the last is an old name.
const RESUBMIT_PROPERTIES: [&str; 3] =
    ["spark.rss.stageRetry.fetchFailureEnabled", "spark.rss.stageRetry.enabled", "spark.rss.resubmit.stage"];

/// What happened to blocks that were in memory only.
pub(super) const IN_MEMORY: &str = "the blocks were in memory when the worker ended";

/// How long a report waits for the remote store to say what is there: clients give a call a minute.
const REPORT_PATIENCE: Duration = Duration::from_secs(20);

/// A loss with its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShuffleLoss {
    /// Application.
    pub app: String,
    /// Shuffle.
    pub shuffle: i32,
    /// Partition.
    pub partition: i32,
    /// Lost blocks.
    pub blocks: u64,
    /// Closed ranges of their ids, the first ones.
    pub ranges: Vec<(i64, i64)>,
    /// Their bytes, if known.
    pub bytes: Option<u64>,
    /// The disk or the event.
    pub reason: String,
    /// When it was found out, in milliseconds since 1970.
    pub at_ms: u64,
}

/// Everything that is lost now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LossReport {
    /// The ledger.
    pub losses: Vec<ShuffleLoss>,
    /// Lost blocks that found no room in it.
    pub unlisted_blocks: u64,
    /// Shuffles whose results are refused, as reports of them may be missing.
    pub incomplete: Vec<IncompleteShuffle>,
}

/// A shuffle of which not everything that was acknowledged is proven to be known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct IncompleteShuffle {
    /// Application.
    pub app: String,
    /// Shuffle.
    pub shuffle: i32,
    /// What may be missing, and what to do.
    pub reason: String,
}

/// The ledger of one app, and how many lost blocks found no room in it.
pub(super) fn losses_of(app: &App) -> (Vec<ShuffleLoss>, u64) {
    let (mut losses, mut unlisted_blocks) = (Vec::new(), 0);
    for shuffle in app.shuffles().iter().filter(|shuffle| shuffle.losses().count() > 0) {
        let (told, unlisted) = shuffle.losses().list();
        losses.extend(told.into_iter().map(|loss| ShuffleLoss::new(shuffle.key(), loss)));
        unlisted_blocks += unlisted;
    }
    (losses, unlisted_blocks)
}

impl Service {
    /// The ledger of all apps.
    #[must_use]
    pub fn losses(&self) -> LossReport {
        let mut report = LossReport::default();
        for app in self.apps.apps() {
            let (told, unlisted) = losses_of(&app);
            report.losses.extend(told);
            report.unlisted_blocks += unlisted;
            report.incomplete.extend(app.shuffles().iter().filter_map(|shuffle| {
                let (key, reason) = (shuffle.key(), shuffle.losses().incomplete()?.to_owned());
                Some(IncompleteShuffle { app: key.app.to_string(), shuffle: key.shuffle.0, reason })
            }));
        }
        report.incomplete.sort();
        report.losses.sort_by_key(|loss| (loss.app.clone(), loss.shuffle, loss.partition, loss.at_ms));
        report
    }

    pub(super) fn set_loss_gauges(&self) {
        let (mut blocks, mut apps, mut unverified, mut incomplete) = (0, 0, 0, 0);
        for app in self.apps.apps() {
            let shuffles = app.shuffles();
            let lost: u64 = shuffles.iter().map(|shuffle| shuffle.losses().count()).sum();
            unverified +=
                shuffles.iter().map(|shuffle| shuffle.losses().unverified_partitions()).sum::<u64>();
            let may_miss = |shuffle: &&Arc<ShuffleState>| shuffle.losses().incomplete().is_some();
            incomplete += shuffles.iter().filter(may_miss).count() as u64;
            blocks += lost;
            apps += u64::from(lost > 0);
        }
        self.metrics.lost_blocks_now.set(clamped(blocks));
        self.metrics.apps_with_loss.set(clamped(apps));
        self.metrics.unverified_partitions.set(clamped(unverified));
        self.metrics.incomplete_shuffles.set(clamped(incomplete));
    }

    /// Enters blocks as lost, and tells it.
    pub(super) fn enter_loss(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        ids: &Treemap,
        (bytes, reason): (Option<u64>, &Arc<str>),
    ) {
        let new = shuffle.losses().lose(partition, ids, bytes, reason);
        if new == 0 {
            return;
        }
        self.metrics.lost_blocks.inc_by(new);
        self.metrics.lost_bytes.inc_by(bytes.unwrap_or(0));
        let ranges = ranges(ids);
        tracing::error!(target: "audit", shuffle = %shuffle.key(), %partition, blocks = new, ?bytes, ?ranges, %reason, "blocks are lost");
    }

    /// Refuses a read of a partition that wants a lost block, or one of which it is not known yet.
    pub(super) fn refuse_lost(
        &self,
        app: &App,
        shuffle: &ShuffleState,
        partition: PartitionId,
        filter: Option<&Treemap>,
    ) -> Result<(), ServiceError> {
        refuse_uncounted(shuffle, partition)?;
        let wanted = |ids: &Treemap| {
            let reported = shuffle.block_ids().lock().among(partition, ids);
            let Some(filter) = filter else { return reported };
            let passes = |id: &u64| app.task_of(*id).is_none_or(|task| filter.contains(task));
            reported.iter().filter(passes).collect()
        };
        if let Some(lost) =
            shuffle.losses().of(partition).map(|ids| wanted(&ids)).filter(|ids| !ids.is_empty())
        {
            self.metrics.reads_refused_for_loss.inc();
            return Err(lost_error(shuffle, partition, &lost));
        }
        let doubtful = shuffle.losses().unverified(partition).map(|ids| wanted(&ids));
        match doubtful.filter(|ids| !ids.is_empty()) {
            Some(ids) => Err(ServiceError::InDoubt(format!(
                "{} blocks of shuffle {} partition {partition} are sought in the remote store, where an earlier process \
                 may have left them",
                ids.cardinality(),
                shuffle.key()
            ))),
            None => Ok(()),
        }
    }

    /// Whether a report may be taken although some of its blocks are gone; enters them if so.
    pub(super) async fn judge_report(
        self: &Arc<Self>,
        app: &App,
        shuffle: &Arc<ShuffleState>,
        partitions: &[(PartitionId, Vec<i64>)],
    ) -> Result<(), ServiceError> {
        if !shuffle.losses().is_watched() {
            return Ok(());
        }
        let resubmits = RESUBMIT_PROPERTIES.iter().find_map(|name| app.property(name));
        let resubmits = resubmits.is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
        let reason: Arc<str> = Arc::from(IN_MEMORY);
        let give_up = Instant::now() + REPORT_PATIENCE;
        for (partition, ids) in partitions {
            let ids: Treemap = ids.iter().map(|id| id.unsigned_abs()).collect();
            let uncounted = shuffle.losses().uncounted(*partition, &ids);
            if !uncounted.is_empty() {
                let counted = timeout_at(give_up, self.count_once(shuffle, *partition)).await;
                if !matches!(counted, Ok(Ok(()))) {
                    self.doubt(shuffle, *partition, &uncounted);
                    continue;
                }
            }
            let missing = shuffle.losses().missing(*partition, &ids);
            if missing.is_empty() {
                continue;
            }
            if !resubmits {
                self.metrics.reports_refused_for_loss.inc();
                let text = describe(shuffle.key(), *partition, &missing, IN_MEMORY);
                return Err(ServiceError::Lost(format!("{text}; the task must run again")));
            }
            self.enter_loss(shuffle, *partition, &missing, (None, &reason));
        }
        Ok(())
    }

    /// After a restart: what was reported and is not there is lost, or, where there are remote files, to be looked up.
    pub(super) fn find_losses(
        &self,
        shuffle: &Arc<ShuffleState>,
        present: HashMap<PartitionId, Treemap>,
        (lost, reason): (Vec<LostExtent>, &str),
        has_remote: bool,
    ) -> Vec<Suspect> {
        shuffle.losses().watch(present);
        let mut missing: Vec<(PartitionId, Treemap)> = Vec::new();
        for (partition, ids) in shuffle.block_ids().lock().by_partition() {
            let gone = shuffle.losses().missing(partition, &ids.to_bitmap());
            if !gone.is_empty() {
                missing.push((partition, gone));
            }
        }
        let mut extents: HashMap<PartitionId, Vec<LostExtent>> = HashMap::new();
        for extent in lost {
            extents.entry(extent.partition).or_default().push(extent);
        }
        let reason: Arc<str> = Arc::from(if reason.is_empty() { IN_MEMORY } else { reason });
        if has_remote {
            shuffle.losses().expect_remote();
        }
        let mut suspects = Vec::new();
        for (partition, gone) in missing {
            let (extents, reason) = (extents.remove(&partition).unwrap_or_default(), Arc::clone(&reason));
            let suspect = Suspect { shuffle: Arc::clone(shuffle), partition, extents, reason };
            if has_remote {
                shuffle.losses().mark_unverified(partition, &gone);
                suspects.push(suspect);
            } else {
                self.enter_missing(&suspect, gone);
            }
        }
        suspects
    }

    /// Tells the ledger of blocks that have become visible.
    pub(super) fn note_committed(&self, shuffle: &ShuffleState, partition: PartitionId, ids: &[u64]) {
        let healed = shuffle.losses().committed(partition, ids);
        if healed > 0 {
            self.metrics.healed_blocks.inc_by(healed);
            tracing::info!(target: "audit", shuffle = %shuffle.key(), %partition, blocks = healed, "lost blocks were sent again");
        }
    }
}

impl ShuffleLoss {
    fn new(key: &ShuffleKey, loss: Loss) -> Self {
        let since = loss.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            app: key.app.to_string(),
            shuffle: key.shuffle.0,
            partition: loss.partition.0,
            blocks: loss.blocks,
            ranges: loss.ranges.into_iter().map(|(first, last)| (first.0, last.0)).collect(),
            bytes: loss.bytes,
            reason: loss.reason.to_string(),
            at_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn lost_error(shuffle: &ShuffleState, partition: PartitionId, ids: &Treemap) -> ServiceError {
    let first = ids.minimum().unwrap_or_default();
    let reason = shuffle.losses().reason_of(partition, first);
    ServiceError::Lost(describe(shuffle.key(), partition, ids, reason.as_deref().unwrap_or("see /losses")))
}

/// What a user reads in the stack trace of a failed job.
fn describe(key: &ShuffleKey, partition: PartitionId, ids: &Treemap, reason: &str) -> String {
    let count = ids.cardinality();
    let noun = if count == 1 { "block" } else { "blocks" };
    let mut text = format!("{count} {noun} of shuffle {key} partition {partition} are lost (ids");
    for (BlockId(first), BlockId(last)) in ranges(ids).into_iter().take(4) {
        let written = match first == last {
            true => write!(text, " {first}"),
            false => write!(text, " {first}-{last}"),
        };
        debug_assert!(written.is_ok(), "a string takes everything");
    }
    format!("{text}): {reason}")
}
