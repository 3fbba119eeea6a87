//! Which blocks are there at all: memory, local disks and remote files counted together.
//!
//! What an earlier process left in remote files is not known at the start. Until it has been looked up, reported blocks
//! that are nowhere else are in doubt: reads that want them are answered with NO_BUFFER, for which clients wait, and
//! reports wait a while. They are looked up in the background after the start, partition by partition, until that has
//! succeeded; partitions that miss nothing are not looked at.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use croaring::Treemap;
use futures::stream::{self, StreamExt as _};
use tokio::time::{Instant, sleep};

use crate::app::ShuffleState;
use crate::tiers::{LostExtent, StoreError, StoreErrorKind};
use uniffle_wire::types::{PartitionId, ShuffleKey};

use super::Service;
use super::losses::IN_MEMORY;

/// Partitions that are looked up at a time, and the pause after a round in which some could not be; it doubles.
const LOOK_UPS: usize = 8;
const LOOK_UP_PAUSE: Duration = Duration::from_secs(1);
const LOOK_UP_PAUSE_MAX: Duration = Duration::from_secs(30);

/// A partition with blocks in doubt, and why those that are not found are lost.
#[derive(Debug)]
pub(super) struct Suspect {
    pub(super) shuffle: Arc<ShuffleState>,
    pub(super) partition: PartitionId,
    /// Extents on local disks that cannot be read.
    pub(super) extents: Vec<LostExtent>,
    pub(super) reason: Arc<str>,
}

impl Service {
    /// It could not be found out in time whether these blocks of a report are there.
    pub(super) fn doubt(
        self: &Arc<Self>,
        shuffle: &Arc<ShuffleState>,
        partition: PartitionId,
        ids: &Treemap,
    ) {
        if shuffle.losses().mark_unverified(partition, ids) {
            let (shuffle, reason) = (Arc::clone(shuffle), Arc::from(IN_MEMORY));
            self.look_up(vec![Suspect { shuffle, partition, extents: Vec::new(), reason }]);
        }
    }

    /// Enters what is missing, by what is known of each block.
    pub(super) fn enter_missing(&self, suspect: &Suspect, mut gone: Treemap) {
        let (shuffle, partition) = (&suspect.shuffle, suspect.partition);
        for extent in &suspect.extents {
            let here = extent.blocks.iter().filter(|(id, _)| gone.contains(id.0.unsigned_abs()));
            let bytes = here.clone().map(|(_, length)| u64::from(*length)).sum();
            let ids: Treemap = here.map(|(id, _)| id.0.unsigned_abs()).collect();
            gone.andnot_inplace(&ids);
            self.enter_loss(shuffle, partition, &ids, (Some(bytes), &extent.reason));
        }
        self.enter_loss(shuffle, partition, &gone, (None, &suspect.reason));
    }

    /// Looks blocks in doubt up, in the background and until that succeeds.
    pub(super) fn look_up(self: &Arc<Self>, suspects: Vec<Suspect>) {
        if suspects.is_empty() {
            return;
        }
        let service = Arc::clone(self);
        self.tasks.spawn("look up remote blocks", async move { service.settle_all(suspects).await });
    }

    async fn settle_all(&self, mut suspects: Vec<Suspect>) {
        let (partitions, began, mut pause) = (suspects.len(), Instant::now(), LOOK_UP_PAUSE);
        loop {
            let looked = stream::iter(suspects).map(async |suspect| {
                let settled = self.settle(&suspect).await;
                settled.err().map(|error| (suspect, error))
            });
            let failed: Vec<_> = looked.buffer_unordered(LOOK_UPS).filter_map(ready).collect().await;
            let Some((suspect, error)) = failed.first() else { break };
            tracing::warn!(
                partitions = failed.len(), shuffle = %suspect.shuffle.key(), partition = %suspect.partition, %error,
                "it is not known yet whether blocks are in the remote store or lost; it is looked up again"
            );
            suspects = failed.into_iter().map(|(suspect, _)| suspect).collect();
            tokio::select! {
                biased;
                () = self.tasks.cancelled() => return,
                () = sleep(pause) => {}
            }
            pause = (pause * 2).min(LOOK_UP_PAUSE_MAX);
        }
        tracing::info!(partitions, took = ?began.elapsed(), "what an earlier process left in remote stores is known");
    }

    async fn settle(&self, suspect: &Suspect) -> Result<(), StoreError> {
        let (losses, partition) = (suspect.shuffle.losses(), suspect.partition);
        match self.count_once(&suspect.shuffle, partition).await {
            // Nobody is left to be told.
            Err(error) if error.kind == StoreErrorKind::Purged => return Ok(()),
            counted => counted?,
        }
        while let Some(doubtful) = losses.unverified(partition) {
            let mut reported = suspect.shuffle.block_ids().lock().of(&[partition]);
            reported.or_inplace(&doubtful);
            self.enter_missing(suspect, losses.missing(partition, &reported));
            if losses.mark_verified(partition, &doubtful) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Counts a partition, unless somebody has.
    pub(super) async fn count_once(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
    ) -> Result<(), StoreError> {
        let _turn = shuffle.losses().turn().await;
        if shuffle.losses().is_counted(partition) {
            return Ok(());
        }
        self.count(shuffle, partition).await
    }

    /// Counts the blocks of a partition that can be read. Memory is looked at first, as blocks only move downwards. It must
    /// be the caller's turn.
    pub(super) async fn count(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
    ) -> Result<(), StoreError> {
        let count = shuffle.losses().begin_count(partition);
        let mut present = self.ids_in_memory(shuffle.key(), partition);
        for tier in self.tiers.iter() {
            present.or_inplace(&tier.present(shuffle.key(), partition).await?);
        }
        count.end(present);
        Ok(())
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
}
