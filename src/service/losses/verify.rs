//! Determines which blocks of a partition exist: scans memory and all tiers together, and records
//! missing blocks as lost.
//!
//! A partition is verified after a start if its ids are not in memory or may be in remote files,
//! after damage in memory or a tier, and for a report of blocks that may be lost. One task scans
//! until it has succeeded. Meanwhile reads of unverified blocks get `NO_BUFFER`, on which clients
//! wait.
//!
//! A scan keeps the found ids if the application's share of the heap has room for them. Otherwise
//! it searches for a slice of the ids at a time, and reads the index records once per slice.

use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::stream::{self, StreamExt as _};
use tokio::sync::Semaphore;

use crate::app::{AppRegistry, ShuffleState};
use crate::clock::{Instant, sleep, timeout_at};
use crate::log::{
    Availability, HeldIds, IdSet, Ledger, Loss, LossCause, LostExtent, NewLosses, SLICE_IDS, ScanResult,
    ranges, slices,
};
use crate::memory::Memory;
use crate::runtime::Tasks;
use crate::store::{StoreError, StoreErrorKind, Tiers};
use uniffle_base::damage::DamageListener;
use uniffle_wire::types::{PartitionId, ShuffleKey};

use super::log::LossLog;
use crate::service::ingest::spill;
use crate::service::metrics::ServiceMetrics;

/// Maximum number of concurrent scans.
const SCANS_MAX: usize = 8;

/// Bounds of the backoff after a round in which some scans failed. The pause doubles.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Number of found ids that are added to a set together.
const FOUND_TOGETHER: usize = 1 << 14;

/// Maximum number of missing blocks that a scan lists; further ones are only counted.
const MISSING_MAX: usize = SLICE_IDS;

/// Time for which a call waits for a scan; clients allow a call one minute.
const SCAN_WAIT_MAX: Duration = Duration::from_secs(20);

/// A partition to be verified, and the cause for blocks found missing.
#[derive(Debug)]
pub(in crate::service) struct UnverifiedPartition {
    pub(in crate::service) shuffle: Arc<ShuffleState>,
    pub(in crate::service) partition: PartitionId,
    pub(super) cause: LossCause,
}

/// Scans memory and all tiers. Each scan covers one partition, and a partition has one scan at a
/// time.
#[derive(Debug)]
pub(in crate::service) struct Verifier {
    pub(in crate::service) memory: Arc<Memory>,
    pub(in crate::service) tiers: Tiers,
    pub(in crate::service) tasks: Tasks,
    pub(in crate::service) metrics: Arc<ServiceMetrics>,
    loss_log: Arc<LossLog>,
    scans: Semaphore,
}

/// An error, and whether a tier that is read through this worker caused it.
type TierError = (StoreError, bool);

impl Verifier {
    pub(in crate::service) fn new(
        memory: Arc<Memory>,
        tiers: Tiers,
        tasks: Tasks,
        metrics: Arc<ServiceMetrics>,
        loss_log: Arc<LossLog>,
    ) -> Self {
        Self { memory, tiers, tasks, metrics, loss_log, scans: Semaphore::new(SCANS_MAX) }
    }

    /// Verifies a partition after a read error showed a loss or a possible loss. Returns after the
    /// scan, successful or not, or after [`SCAN_WAIT_MAX`]. The verification continues then, and if
    /// the caller is dropped.
    pub(in crate::service) async fn verify_partition(
        self: &Arc<Self>,
        shuffle: Arc<ShuffleState>,
        partition: PartitionId,
        error: &StoreError,
    ) {
        self.mark_unverified(&shuffle, partition, &error.to_string());
        self.wait_for_scan(&shuffle, partition, Self::scan_deadline()).await;
    }

    /// Marks a partition as possibly damaged for `reason`, and verifies it in the background. Reads
    /// of it are refused until the losses are known.
    pub(in crate::service) fn mark_unverified(
        self: &Arc<Self>,
        shuffle: &Arc<ShuffleState>,
        partition: PartitionId,
        reason: &str,
    ) {
        if shuffle.ledger.mark_all_unverified(partition) {
            let cause = cause(Vec::new(), reason);
            self.verify(vec![UnverifiedPartition { shuffle: Arc::clone(shuffle), partition, cause }]);
        }
    }

    /// Registers for damage found in memory or a tier, by a reader or otherwise. Damaged blocks are
    /// lost unless they exist elsewhere. Must be called after the recovered state is recorded,
    /// which would overwrite marks of unverified partitions.
    pub(in crate::service) fn listen_for_damage(self: &Arc<Self>, apps: &Arc<AppRegistry>) {
        let on_damage = self.on_damage(apps);
        self.memory.on_damage(Arc::clone(&on_damage));
        if let Some(tier) = self.tiers.served() {
            tier.on_damage(on_damage);
        }
    }

    fn on_damage(self: &Arc<Self>, apps: &Arc<AppRegistry>) -> DamageListener {
        // A weak reference, because memory and tiers store this closure and the verifier holds
        // them.
        let (apps, verifier) = (Arc::clone(apps), Arc::downgrade(self));
        Arc::new(move |key: &ShuffleKey, partition: PartitionId, reason: &str| {
            let shuffle = apps.find(&key.app).and_then(|app| app.shuffle(key.shuffle));
            if let (Some(verifier), Some(shuffle)) = (verifier.upgrade(), shuffle) {
                verifier.mark_unverified(&shuffle, partition, reason);
            }
        })
    }

    /// Verifies partitions in the background.
    pub(in crate::service) fn verify(self: &Arc<Self>, unverified: Vec<UnverifiedPartition>) {
        if unverified.is_empty() {
            return;
        }
        let (verifier, stopped) = (Arc::clone(self), self.tasks.cancelled());
        self.tasks.spawn("verify partitions", async move {
            tokio::select! {
                biased;
                () = stopped => {}
                () = verifier.resolve_all(unverified) => {}
            }
        });
    }

    /// Returns the deadline for a call that waits for scans.
    pub(in crate::service) fn scan_deadline() -> Instant {
        Instant::now() + SCAN_WAIT_MAX
    }

    /// Waits until a partition is verified, a scan of it has failed, or `deadline` has passed.
    pub(super) async fn wait_for_scan(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        deadline: Instant,
    ) {
        let _: Result<(), _> = timeout_at(deadline, shuffle.ledger.scanned(partition)).await;
    }

    /// Records blocks as lost, and reports the loss. Returns whether all of them are listed.
    pub(in crate::service) fn enter(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        ids: &[u64],
        cause: &LossCause,
    ) -> bool {
        let entered = shuffle.ledger.with(partition, |it| it.enter(ids, cause));
        let are_listed = entered.unlisted == 0;
        self.log_loss(shuffle, partition, entered, &cause.reason);
        are_listed
    }

    fn log_loss(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        NewLosses { losses, unlisted }: NewLosses,
        unlisted_reason: &Arc<str>,
    ) {
        if unlisted > 0 {
            self.metrics.lost_blocks.inc_by(unlisted);
            self.loss_log.add_blocks(shuffle.key(), partition, unlisted, None, unlisted_reason);
        }
        for loss in losses {
            let Loss { ids, bytes, reason, .. } = &loss;
            let blocks = ids.len();
            if blocks == 0 {
                continue;
            }
            self.metrics.lost_blocks.inc_by(blocks);
            self.metrics.lost_bytes.inc_by(bytes.unwrap_or(0));
            let (shuffle, ranges) = (shuffle.key(), ranges(ids));
            tracing::debug!(%shuffle, %partition, blocks, ?bytes, ?ranges, %reason, "blocks of a partition are lost");
            self.loss_log.add(shuffle, partition, &loss);
        }
    }

    async fn resolve_all(&self, mut unverified: Vec<UnverifiedPartition>) {
        let (partitions, began, mut pause) = (unverified.len(), Instant::now(), PAUSE_MIN);
        loop {
            let scanned = stream::iter(unverified).map(async |mut item| {
                let resolved = self.resolve(&mut item).await;
                resolved.err().map(|error| (item, error))
            });
            let failed: Vec<_> = scanned.buffer_unordered(SCANS_MAX).filter_map(ready).collect().await;
            if failed.is_empty() {
                break;
            }
            // The first attempt often meets the damage itself, and decides about it.
            for (item, error) in failed.iter().filter(|_| pause > PAUSE_MIN) {
                let key = item.shuffle.key();
                self.loss_log.add_unverified(key, item.partition, &error.to_string());
            }
            unverified = failed.into_iter().map(|(item, _)| item).collect();
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        tracing::info!(
            partitions,
            took = ?began.elapsed(),
            "determined which blocks of the partitions are lost"
        );
    }

    async fn resolve(&self, item: &mut UnverifiedPartition) -> Result<(), StoreError> {
        let UnverifiedPartition { shuffle, partition, cause } = item;
        let (ledger, key, partition) = (&shuffle.ledger, shuffle.key(), *partition);
        loop {
            // Reads are refused before the hole is created, or they would take its zeros for data.
            let is_damaged = ledger.availability(partition, |_| IdSet::default()) == Availability::Wait(None);
            if let Some(tier) = self.tiers.served().filter(|_| is_damaged)
                && let Some(error) = tier.mark_damaged_lost(key, partition).await
            {
                cause.reason = Arc::from(error.to_string());
            }
            let unverified = ledger.with(partition, Ledger::begin_scan);
            let scan = match self.scan(shuffle, partition, unverified).await {
                Ok(scan) => scan,
                Err((error, is_served)) => {
                    let is_unread = is_served && error.kind != StoreErrorKind::Unhealthy;
                    if is_unread {
                        ledger.mark_all_unverified(partition);
                    }
                    ledger.with(partition, Ledger::fail_scan);
                    // A removed shuffle has no readers left.
                    let is_gone = error.kind == StoreErrorKind::Purged || self.is_gone(key);
                    return if is_gone { Ok(()) } else { Err(error) };
                }
            };
            if let Some(new) = ledger.with(partition, |it| it.resolve(scan, cause)) {
                self.log_loss(shuffle, partition, new, &cause.reason);
                return Ok(());
            }
        }
    }

    fn is_gone(&self, key: &ShuffleKey) -> bool {
        self.tiers.iter().all(|tier| tier.shuffle(key).is_none())
    }

    /// Determines which of the reported and `unverified` blocks of a partition can be read.
    async fn scan(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        unverified: Vec<u64>,
    ) -> Result<ScanResult, TierError> {
        // The semaphore is never closed.
        let _scanning = self.scans.acquire().await;
        let (key, ledger) = (shuffle.key(), &shuffle.ledger);
        let reported = spill::reported(&shuffle.reports, partition).await.map_err(|error| (error, false))?;
        let found = match ledger.with(partition, |it| it.is_in_tiers()) {
            true => None,
            false => self.find_all(key, partition, HeldIds::new(ledger.heap())).await?,
        };
        let (mut missing, mut more_missing) = (Vec::new(), 0);
        let mut add = |ids: Vec<u64>| {
            let listed = ids.len().min(MISSING_MAX - missing.len());
            missing.extend_from_slice(&ids[..listed]);
            more_missing += (ids.len() - listed) as u64;
        };
        let unverified_slices = unverified.chunks(SLICE_IDS).map(<[u64]>::to_vec);
        for ids in slices(&reported, SLICE_IDS).chain(unverified_slices) {
            match &found {
                Some(found) => {
                    let mut found = found.ids().lookup();
                    add(ids.into_iter().filter(|id| !found.contains(*id)).collect());
                }
                None => add(self.seek(key, partition, ids).await?),
            }
        }
        Ok(ScanResult { found, missing, more_missing })
    }

    /// Returns the sorted `ids` that cannot be read.
    pub(in crate::service) async fn missing(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        ids: &[u64],
    ) -> Result<Vec<u64>, StoreError> {
        let _scanning = self.scans.acquire().await;
        let mut missing = Vec::new();
        for ids in ids.chunks(SLICE_IDS) {
            let sought = self.seek(key, partition, ids.to_vec()).await;
            missing.append(&mut sought.map_err(|(error, _)| error)?);
        }
        Ok(missing)
    }

    async fn seek(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        ids: Vec<u64>,
    ) -> Result<Vec<u64>, TierError> {
        let mut is_found = vec![false; ids.len()];
        let mut note = |id: u64| {
            if let Ok(at) = ids.binary_search(&id) {
                is_found[at] = true;
            }
        };
        self.visit(key, partition, &mut note).await?;
        let all = ids.into_iter().zip(is_found);
        Ok(all.filter(|(_, is_found)| !is_found).map(|(id, _)| id).collect())
    }

    /// Adds the ids of all readable blocks of a partition to `held`. Returns `None` if there is no
    /// heap for them.
    async fn find_all(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        held: HeldIds,
    ) -> Result<Option<HeldIds>, TierError> {
        let (mut held, mut found) = (Some(held), Vec::new());
        let mut note = |id: u64| {
            found.push(id);
            if found.len() == FOUND_TOGETHER {
                held.take_if(|held| !held.add(&found));
                found.clear();
            }
        };
        self.visit(key, partition, &mut note).await?;
        held.take_if(|held| !held.add(&found));
        Ok(held)
    }

    /// Visits the readable blocks of a partition. Memory comes first, because blocks only move
    /// downwards.
    async fn visit(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        visit: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), TierError> {
        let buffer = self.memory.shuffle(key).and_then(|shuffle| shuffle.existing(partition));
        buffer.iter().flat_map(|buffer| buffer.ids()).for_each(&mut *visit);
        for tier in self.tiers.iter() {
            let visited = tier.visit_present(key, partition, visit).await;
            visited.map_err(|error| (error, tier.served().is_some()))?;
        }
        Ok(())
    }
}

/// Returns the cause for blocks that are found lost now.
pub(super) fn cause(extents: Vec<LostExtent>, reason: &str) -> LossCause {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    LossCause { extents, reason: Arc::from(reason), at_ms }
}
