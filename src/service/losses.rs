//! Lost blocks: found, told, and in the way of exactly those reads that want them.
//!
//! A read is refused when a lost block was reported in its partition and passes its task filter; the text says what is
//! lost and why. Tickets and sends are never refused for a loss: a block that is sent again heals.
//!
//! Where remote files are a tier nothing is entered: what lies there is not counted yet, and a loss that is none would fail
//! jobs. Clients still notice that blocks are missing.
//!
//! A report of blocks that an earlier process took with it is refused, so that only its task runs again: at that time
//! nobody was promised anything. An app that recomputes stages (`spark.rss.resubmit.stage`) has it taken, and the loss
//! entered, because with one attempt per task a refused report would end its job.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use croaring::Treemap;
use serde::Serialize;

use crate::app::{App, Loss, ShuffleState, ranges};
use crate::store::LostExtent;
use crate::types::{BlockId, PartitionId, ShuffleKey};

use super::metrics::clamped;
use super::{Service, ServiceError};

/// By this property Spark computes a stage again whose shuffle data can not be fetched.
const RESUBMIT_PROPERTY: &str = "spark.rss.resubmit.stage";

/// What happened to blocks that were in memory only.
const IN_MEMORY: &str = "the blocks were in memory when the worker ended";

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
        }
        report.losses.sort_by_key(|loss| (loss.app.clone(), loss.shuffle, loss.partition, loss.at_ms));
        report
    }

    pub(super) fn set_loss_gauges(&self) {
        let (mut blocks, mut apps) = (0, 0);
        for app in self.apps.apps() {
            let lost: u64 = app.shuffles().iter().map(|shuffle| shuffle.losses().count()).sum();
            blocks += lost;
            apps += u64::from(lost > 0);
        }
        self.metrics.lost_blocks_now.set(clamped(blocks));
        self.metrics.apps_with_loss.set(clamped(apps));
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

    /// Refuses a read of a partition that wants a lost block.
    pub(super) fn refuse_lost(
        &self,
        app: &App,
        shuffle: &ShuffleState,
        partition: PartitionId,
        filter: Option<&Treemap>,
    ) -> Result<(), ServiceError> {
        let Some(lost) = shuffle.losses().of(partition) else { return Ok(()) };
        let mut wanted = shuffle.block_ids().lock().among(partition, &lost);
        if let Some(filter) = filter {
            let passes = |id: &u64| app.task_of(*id).is_none_or(|task| filter.contains(task));
            wanted = wanted.iter().filter(passes).collect();
        }
        if wanted.is_empty() {
            return Ok(());
        }
        self.metrics.reads_refused_for_loss.inc();
        Err(lost_error(shuffle, partition, &wanted))
    }

    /// Whether a report may be taken although some of its blocks are gone; enters them if so.
    pub(super) fn judge_report(
        &self,
        app: &App,
        shuffle: &ShuffleState,
        partitions: &[(PartitionId, Vec<i64>)],
    ) -> Result<(), ServiceError> {
        if !shuffle.losses().is_watched() {
            return Ok(());
        }
        let resubmits = app.property(RESUBMIT_PROPERTY).is_some_and(|value| value.trim() == "true");
        let reason: Arc<str> = Arc::from(IN_MEMORY);
        for (partition, ids) in partitions {
            let ids: Treemap = ids.iter().map(|id| id.unsigned_abs()).collect();
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

    /// After a restart: what was reported and is not there.
    pub(super) fn find_losses(
        &self,
        shuffle: &ShuffleState,
        present: HashMap<PartitionId, Treemap>,
        (lost, reason): (&[LostExtent], &str),
    ) {
        if self.hdfs().is_some() {
            return;
        }
        shuffle.losses().watch(present);
        let mut missing: HashMap<PartitionId, Treemap> = HashMap::new();
        for (partition, ids) in shuffle.block_ids().lock().by_partition() {
            let gone = shuffle.losses().missing(partition, ids);
            if !gone.is_empty() {
                missing.insert(partition, gone);
            }
        }
        for extent in lost {
            let Some(gone) = missing.get_mut(&extent.partition) else { continue };
            let here = extent.blocks.iter().filter(|(id, _)| gone.contains(id.0.unsigned_abs()));
            let bytes = here.clone().map(|(_, length)| u64::from(*length)).sum();
            let ids: Treemap = here.map(|(id, _)| id.0.unsigned_abs()).collect();
            gone.andnot_inplace(&ids);
            self.enter_loss(shuffle, extent.partition, &ids, (Some(bytes), &extent.reason));
        }
        let reason: Arc<str> = Arc::from(if reason.is_empty() { IN_MEMORY } else { reason });
        for (partition, gone) in missing {
            self.enter_loss(shuffle, partition, &gone, (None, &reason));
        }
    }

    /// An extent of a partition can not be read any more: counts the blocks that can, and enters those reported that can
    /// not. Memory is looked at before the disks, as blocks only move downwards.
    pub(super) async fn count_again(&self, shuffle: &ShuffleState, partition: PartitionId, reason: &str) {
        if self.hdfs().is_some() {
            return;
        }
        shuffle.losses().begin_count(partition);
        let mut present = self.ids_in_memory(shuffle.key(), partition);
        let on_disk = match self.local() {
            Some(store) => store.present(shuffle.key(), partition).await,
            None => Ok(Treemap::new()),
        };
        match on_disk {
            Ok(on_disk) => present.or_inplace(&on_disk),
            // What is there is not known, so nothing of it can be called lost; reads say what the disk says.
            Err(error) => {
                tracing::error!(shuffle = %shuffle.key(), %partition, %error, "what is left can not be counted");
                shuffle.losses().abandon_count(partition);
                return;
            }
        }
        shuffle.losses().end_count(partition, present);
        let reported = shuffle.block_ids().lock().of(&[partition]);
        let missing = shuffle.losses().missing(partition, &reported);
        self.enter_loss(shuffle, partition, &missing, (None, &Arc::from(reason)));
    }

    fn ids_in_memory(&self, key: &ShuffleKey, partition: PartitionId) -> Treemap {
        let mut ids = Treemap::new();
        let Some(buffer) = self.memory.shuffle(key).and_then(|shuffle| shuffle.existing(partition)) else {
            return ids;
        };
        let mut after = None;
        loop {
            let blocks = buffer.read(after, u64::MAX, None).blocks;
            let Some(last) = blocks.last() else { return ids };
            after = Some(last.block_id);
            let before = ids.cardinality();
            blocks.iter().for_each(|block| ids.add(block.block_id.0.unsigned_abs()));
            // A cursor that was flushed away starts again at the head.
            if ids.cardinality() == before {
                return ids;
            }
        }
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
