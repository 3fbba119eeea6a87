//! Which blocks of a partition are there at all: memory and all tiers looked at together, what is nowhere entered as lost.
//!
//! A partition is verified after a start, if blocks may be in remote files, and when a device does not give back what it
//! had. One task looks until it has succeeded; reads that want what is in question are answered with NO_BUFFER
//! meanwhile, for which clients wait.

use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::stream::{self, StreamExt as _};

use crate::app::{AppRegistry, ShuffleState};
use crate::clock::{Instant, sleep, timeout_at};
use crate::durability::{Blame, IdSet, Ledger, Loss, LostExtent, OnDamage, Verdict, ranges};
use crate::memory::Memory;
use crate::runtime::Tasks;
use crate::tiers::{StoreError, StoreErrorKind, Tiers};
use uniffle_wire::types::{PartitionId, ShuffleKey};

use super::loss_log::LossLog;
use super::metrics::ServiceMetrics;
use super::spill;

/// Partitions that are looked at at a time, and the pause after a round in which some could not be; it doubles.
const LOOKS: usize = 8;
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// How long a call waits for a look: clients give one a minute.
const PATIENCE: Duration = Duration::from_secs(20);

/// A partition that is to be verified, and why what is nowhere is lost.
#[derive(Debug)]
pub(super) struct Suspect {
    pub(super) shuffle: Arc<ShuffleState>,
    pub(super) partition: PartitionId,
    pub(super) blame: Blame,
}

/// Looks into memory and all tiers, for one partition at a time and for each partition once at a time.
#[derive(Debug)]
pub(super) struct Verifier {
    pub(super) memory: Arc<Memory>,
    pub(super) tiers: Tiers,
    pub(super) tasks: Tasks,
    pub(super) metrics: Arc<ServiceMetrics>,
    pub(super) loss_log: Arc<LossLog>,
}

impl Verifier {
    /// A read shows that something of a partition is gone, or may be. Returns when it is known, or has to be looked again;
    /// that goes on when the caller is dropped.
    pub(super) async fn verify_partition(
        self: &Arc<Self>,
        shuffle: Arc<ShuffleState>,
        partition: PartitionId,
        error: &StoreError,
    ) {
        self.suspect(&shuffle, partition, &error.to_string());
        self.looked(&shuffle, partition, Self::patience()).await;
    }

    /// Something of a partition may be gone, for this reason: until it is known, nobody is served of it.
    pub(super) fn suspect(
        self: &Arc<Self>,
        shuffle: &Arc<ShuffleState>,
        partition: PartitionId,
        reason: &str,
    ) {
        if shuffle.ledger().with(partition, |it| it.question(None)) {
            let blame = blame(Vec::new(), reason);
            self.verify(vec![Suspect { shuffle: Arc::clone(shuffle), partition, blame }]);
        }
    }

    /// Blocks that turn out to be damaged in memory or a tier, found by a reader or not, are lost unless they are elsewhere. Once it is
    /// entered what an earlier process left: what is in question then would be overwritten.
    pub(super) fn hear_of_damage(self: &Arc<Self>, apps: &Arc<AppRegistry>) {
        let on_damage = self.on_damage(apps);
        self.memory.on_damage(Arc::clone(&on_damage));
        self.tiers.iter().for_each(|tier| tier.on_damage(Arc::clone(&on_damage)));
    }

    fn on_damage(self: &Arc<Self>, apps: &Arc<AppRegistry>) -> OnDamage {
        // Memory and tiers keep it, and are kept by the verifier.
        let (apps, verifier) = (Arc::clone(apps), Arc::downgrade(self));
        Arc::new(move |key: &ShuffleKey, partition: PartitionId, reason: &str| {
            let shuffle = apps.find(&key.app).and_then(|app| app.shuffle(key.shuffle));
            if let (Some(verifier), Some(shuffle)) = (verifier.upgrade(), shuffle) {
                verifier.suspect(&shuffle, partition, reason);
            }
        })
    }

    /// Verifies partitions in the background.
    pub(super) fn verify(self: &Arc<Self>, suspects: Vec<Suspect>) {
        if suspects.is_empty() {
            return;
        }
        let (verifier, stopped) = (Arc::clone(self), self.tasks.cancelled());
        self.tasks.spawn("verify partitions", async move {
            tokio::select! {
                biased;
                () = stopped => {}
                () = verifier.settle_all(suspects) => {}
            }
        });
    }

    /// Until when a call waits for looks.
    pub(super) fn patience() -> Instant {
        Instant::now() + PATIENCE
    }

    /// Waits until a partition is known, a look at it has failed, or it is too late.
    pub(super) async fn looked(&self, shuffle: &ShuffleState, partition: PartitionId, deadline: Instant) {
        let _: Result<(), _> = timeout_at(deadline, shuffle.ledger().looked(partition)).await;
    }

    /// Enters blocks as lost, and tells it.
    pub(super) fn enter(&self, shuffle: &ShuffleState, partition: PartitionId, ids: IdSet, blame: &Blame) {
        self.tell(shuffle, partition, shuffle.ledger().with(partition, |it| it.enter(ids, blame)));
    }

    fn tell(&self, shuffle: &ShuffleState, partition: PartitionId, losses: Vec<Loss>) {
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

    async fn settle_all(&self, mut suspects: Vec<Suspect>) {
        let (partitions, began, mut pause) = (suspects.len(), Instant::now(), PAUSE_MIN);
        loop {
            let looked = stream::iter(suspects).map(async |mut suspect| {
                let settled = self.settle(&mut suspect).await;
                settled.err().map(|error| (suspect, error))
            });
            let failed: Vec<_> = looked.buffer_unordered(LOOKS).filter_map(ready).collect().await;
            let Some((suspect, error)) = failed.first() else { break };
            tracing::warn!(
                partitions = failed.len(), shuffle = %suspect.shuffle.key(), partition = %suspect.partition, %error,
                "it is not known yet which blocks are there or lost; it is looked up again"
            );
            suspects = failed.into_iter().map(|(suspect, _)| suspect).collect();
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        tracing::info!(partitions, took = ?began.elapsed(), "it is known which blocks are there");
    }

    async fn settle(&self, suspect: &mut Suspect) -> Result<(), StoreError> {
        let Suspect { shuffle, partition, blame } = suspect;
        let (ledger, key, partition) = (shuffle.ledger(), shuffle.key(), *partition);
        loop {
            // Reads are refused from before there is a hole: they would take its zeros for data.
            let is_damaged = ledger.verdict(partition, |_| IdSet::default()) == Verdict::Wait(None);
            if let Some(tier) = self.tiers.served().filter(|_| is_damaged)
                && let Some(error) = tier.mark_damaged_lost(key, partition).await
            {
                blame.reason = Arc::from(error.to_string());
            }
            ledger.with(partition, Ledger::begin_look);
            let found = match self.count(key, partition).await {
                Ok(found) => found,
                Err((error, is_served)) => {
                    let is_unread = is_served && error.kind != StoreErrorKind::Unhealthy;
                    if is_unread {
                        ledger.with(partition, |it| it.question(None));
                    }
                    ledger.with(partition, Ledger::fail_look);
                    // Of a shuffle that is gone no reader is left.
                    let is_gone = error.kind == StoreErrorKind::Purged || self.is_gone(key);
                    return if is_gone { Ok(()) } else { Err(error) };
                }
            };
            let reported = match spill::reported(shuffle, partition).await {
                Ok(reported) => reported,
                Err(error) => {
                    ledger.with(partition, Ledger::fail_look);
                    return Err(error);
                }
            };
            if let Some(new) = ledger.with(partition, |it| it.settle(found, &reported, blame)) {
                self.tell(shuffle, partition, new);
                return Ok(());
            }
        }
    }

    fn is_gone(&self, key: &ShuffleKey) -> bool {
        self.tiers.iter().all(|tier| tier.shuffle(key).is_none())
    }

    /// The blocks of a partition that can be read. Memory is looked at first, as blocks only move downwards. With an error,
    /// whether it is of the tier that is read through this worker.
    async fn count(&self, key: &ShuffleKey, partition: PartitionId) -> Result<IdSet, (StoreError, bool)> {
        let mut found = self.ids_in_memory(key, partition);
        for tier in self.tiers.iter() {
            let present = tier.present(key, partition).await;
            found.add_all(&present.map_err(|error| (error, tier.served().is_some()))?);
        }
        Ok(found)
    }

    fn ids_in_memory(&self, key: &ShuffleKey, partition: PartitionId) -> IdSet {
        let buffer = self.memory.shuffle(key).and_then(|shuffle| shuffle.existing(partition));
        buffer.map(|buffer| buffer.ids()).unwrap_or_default()
    }
}

/// Why blocks are lost that are found to be so now.
pub(super) fn blame(extents: Vec<LostExtent>, reason: &str) -> Blame {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    Blame { extents, reason: Arc::from(reason), at_ms }
}
