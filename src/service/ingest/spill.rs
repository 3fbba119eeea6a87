//! Spilling of reported block ids to unnamed files when an application's heap is full, the largest
//! shuffle first. Blocks are not spilled here; the flusher writes them to the tiers.
//!
//! The metadata log has every report, so a start recovers all ids and spills them again. Invariant:
//! every acknowledged id is always in a table in memory or in a run, and [`StoredIds`] sees both at
//! one moment.

use std::cmp::Reverse;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::coop::consume_budget;

use crate::app::{App, QuotaResource, Reports, ShuffleState};
use crate::log::{IdRun, IdSet, PartitionBlockIds, RunWriter, Scratch, runs_to_merge};
use crate::store::{StoreError, StoreErrorKind, Tiers};
use crate::telemetry::LogLimiter;
use uniffle_base::budget::Charge;
use uniffle_wire::types::PartitionId;

use crate::service::ServiceError;

/// Spills ids that do not fit into the heap.
#[derive(Debug)]
pub(in crate::service) struct Spill {
    scratch: Option<Arc<Scratch>>,
    failures: LogLimiter,
}

/// Result of a request for heap.
pub(in crate::service) enum SpillRoom {
    /// The heap is charged.
    Charged(Charge),
    /// All movable ids are on disk, and there is still no room.
    OnlyOnDisk,
    /// No data directory accepts ids, or there is none.
    None,
}

impl Spill {
    pub(in crate::service) fn new(tiers: &Tiers) -> Self {
        let scratch = tiers.metadata().and_then(|tier| tier.scratch());
        Self { scratch, failures: LogLimiter::new(1, Duration::from_secs(60)) }
    }

    /// Charges `bytes` to the ids of an application, and moves ids to disk until there is room.
    pub(in crate::service) async fn charge(&self, app: &App, bytes: u64) -> SpillRoom {
        if let Ok(charge) = app.budgets.reported_ids.try_charge(bytes) {
            return SpillRoom::Charged(charge);
        }
        let Some(scratch) = &self.scratch else { return SpillRoom::None };
        let _turn = scratch.turn().await;
        let mut shuffles = app.shuffles();
        shuffles.sort_by_cached_key(|shuffle| Reverse(shuffle.reports.block_ids.lock().table_bytes()));
        for shuffle in shuffles {
            if let Ok(charge) = app.budgets.reported_ids.try_charge(bytes) {
                return SpillRoom::Charged(charge);
            }
            if let Err(error) = move_table(scratch, app, &shuffle).await {
                self.log_failure(app, &error);
                return SpillRoom::None;
            }
            // Without a merge, reads take longer but stay correct.
            merge_runs(scratch, app, &shuffle).await.unwrap_or_else(|error| self.log_failure(app, &error));
        }
        app.budgets.reported_ids.try_charge(bytes).map_or(SpillRoom::OnlyOnDisk, SpillRoom::Charged)
    }

    /// Writes the ids of a report as a run of its own, because the report exceeds the application's
    /// heap. Returns the run with its charge, or `None` if no disk accepts it.
    pub(in crate::service) async fn write(
        &self,
        app: &App,
        partitions: &[PartitionBlockIds],
    ) -> Option<(IdRun, Charge)> {
        let scratch = self.scratch.as_ref()?;
        let _turn = scratch.turn().await;
        match written(scratch, partitions).await {
            Ok(run) => {
                let counted = app.usage.count(QuotaResource::DiskBytes, run.bytes());
                Some((run, counted))
            }
            Err(error) => {
                self.log_failure(app, &error);
                None
            }
        }
    }

    fn log_failure(&self, app: &App, error: &io::Error) {
        if let Some(times) = self.failures.pass() {
            tracing::warn!(
                app = app.id().as_str(), %error, times,
                "the heap is full and reported block ids cannot be moved to disk; free space in a data \
                 directory"
            );
        }
    }
}

pub(in crate::service) async fn move_table(
    scratch: &Scratch,
    app: &App,
    shuffle: &ShuffleState,
) -> io::Result<()> {
    let Some(table) = shuffle.reports.block_ids.lock().begin_spill() else { return Ok(()) };
    let mut partitions: Vec<PartitionId> = table.keys().copied().collect();
    partitions.sort_unstable();
    let mut writer = RunWriter::new(scratch).await?;
    for partition in partitions {
        // A clone shares the chunks.
        let set = table.get(&partition).cloned().unwrap_or_default();
        writer.push_set(partition, set).await?;
    }
    let run = writer.finish().await?;
    let (bytes, counted) = (run.bytes(), app.usage.count(QuotaResource::DiskBytes, run.bytes()));
    let is_first = shuffle.reports.block_ids.lock().end_spill(run, counted);
    if is_first {
        tracing::info!(
            shuffle = %shuffle.key(),
            bytes,
            "reported block ids exceed the heap; they are read from disk from now on"
        );
    }
    Ok(())
}

async fn written(scratch: &Scratch, report: &[PartitionBlockIds]) -> io::Result<IdRun> {
    let mut writer = RunWriter::new(scratch).await?;
    for PartitionBlockIds { partition, block_ids } in report {
        let set = IdSet::from_ascending(block_ids.iter().map(|id| id.unsigned_abs()));
        writer.push_set(*partition, set).await?;
    }
    writer.finish().await
}

pub(in crate::service) async fn merge_runs(
    scratch: &Scratch,
    app: &App,
    shuffle: &ShuffleState,
) -> io::Result<()> {
    loop {
        let runs = shuffle.reports.block_ids.lock().runs();
        let sizes: Vec<u64> = runs.iter().map(|run| run.bytes()).collect();
        let newest = &runs[runs.len() - runs_to_merge(&sizes)..];
        if newest.is_empty() {
            return Ok(());
        }
        let run = IdRun::merged(scratch, newest).await?;
        let counted = app.usage.count(QuotaResource::DiskBytes, run.bytes());
        shuffle.reports.block_ids.lock().replace_runs(newest, run, counted);
    }
}

/// The ids of some partitions at one moment: sets in memory, and runs that may have further ids.
pub(in crate::service) struct StoredIds {
    /// Sets of any of the partitions.
    pub(in crate::service) sets: Vec<IdSet>,
    pub(in crate::service) runs: Vec<Arc<IdRun>>,
}

impl StoredIds {
    pub(in crate::service) fn of(reports: &Reports, partitions: &[PartitionId]) -> Self {
        let ids = reports.block_ids.lock();
        let sets = partitions.iter().flat_map(|partition| ids.sets(*partition)).cloned().collect();
        Self { sets, runs: ids.runs() }
    }
}

/// Returns all reported ids of a partition.
///
/// # Errors
/// A run cannot be read.
pub(in crate::service) async fn reported(
    reports: &Reports,
    partition: PartitionId,
) -> Result<IdSet, StoreError> {
    let StoredIds { sets, runs } = StoredIds::of(reports, &[partition]);
    let mut all = IdSet::default();
    sets.iter().for_each(|set| all.add_all(set));
    for run in runs {
        all.add_all(&run.ids(partition).await.map_err(unreadable)?);
    }
    Ok(all)
}

/// Returns whether runs contain all ids of a report that memory lacks. Stops at the first new id.
pub(super) async fn runs_have_rest(reports: &Reports, partitions: &[PartitionBlockIds]) -> bool {
    for PartitionBlockIds { partition, block_ids } in partitions {
        let StoredIds { sets, runs } = StoredIds::of(reports, &[*partition]);
        if runs.is_empty() {
            return false;
        }
        let mut missing: Vec<u64> = block_ids.iter().map(|id| id.unsigned_abs()).collect();
        for set in sets {
            let mut known = set.lookup();
            missing.retain(|id| !known.contains(*id));
        }
        for run in runs {
            if missing.is_empty() {
                break;
            }
            // Ids that cannot be read count as new and are written once more.
            let Ok(set) = run.ids(*partition).await else { return false };
            let mut known = set.lookup();
            missing.retain(|id| !known.contains(*id));
        }
        if !missing.is_empty() {
            return false;
        }
    }
    true
}

/// Returns the ids of a report that are neither in memory nor in a run. Ids that cannot be read
/// count as new.
pub(in crate::service) async fn unknown(
    reports: &Reports,
    partitions: &[PartitionBlockIds],
) -> Vec<PartitionBlockIds> {
    let mut unknown = Vec::new();
    for PartitionBlockIds { partition, block_ids } in partitions {
        consume_budget().await;
        let StoredIds { sets, runs } = StoredIds::of(reports, &[*partition]);
        let mut new = block_ids.clone();
        for set in sets {
            let mut known = set.lookup();
            new.retain(|id| !known.contains(id.unsigned_abs()));
        }
        for run in runs {
            if new.is_empty() {
                break;
            }
            let Ok(set) = run.ids(*partition).await else { continue };
            let mut known = set.lookup();
            new.retain(|id| !known.contains(id.unsigned_abs()));
        }
        if !new.is_empty() {
            unknown.push(PartitionBlockIds { partition: *partition, block_ids: new });
        }
    }
    unknown
}

pub(in crate::service) fn unreadable(error: io::Error) -> StoreError {
    StoreError::io("reported block ids", error)
}

/// Returns the error for results that need an unreadable run. Clients wait for an unresponsive
/// disk, and see other errors.
pub(in crate::service) fn refused(error: io::Error) -> ServiceError {
    match unreadable(error) {
        error if error.kind == StoreErrorKind::Unhealthy => ServiceError::DiskHangs(error),
        error => ServiceError::Store(error),
    }
}
