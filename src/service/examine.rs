//! Something of a partition cannot be read any more: what is gone is found out and entered, without a restart.
//!
//! Until what is left has been counted, reads of the partition are answered with NO_BUFFER, for which clients wait: a
//! hole that is in no ledger would be filled with zeros without a word.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::sleep;

use crate::app::ShuffleState;
use crate::tiers::{DamagedExtents, StoreError, StoreErrorKind, Suspicion};
use uniffle_wire::types::PartitionId;

use super::{Service, ServiceError};

/// Between two attempts to count what is left of a partition.
const COUNT_PAUSE_MIN: Duration = Duration::from_secs(1);
const COUNT_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Refuses a read of a partition of which it is not known yet what a disk has lost.
pub(super) fn refuse_uncounted(shuffle: &ShuffleState, partition: PartitionId) -> Result<(), ServiceError> {
    if !shuffle.losses().is_damaged(partition) {
        return Ok(());
    }
    let key = shuffle.key();
    let text =
        format!("a disk has failed, what is left of shuffle {key} partition {partition} is being counted");
    Err(ServiceError::InDoubt(text))
}

impl Service {
    /// Something of a partition cannot be read any more, for a reason, or too many reads of a disk have failed, which is
    /// tried once more. What is gone then is entered as lost. Goes on when the caller is dropped, and until what is left
    /// was counted.
    pub(super) async fn examine(
        self: &Arc<Self>,
        shuffle: Arc<ShuffleState>,
        partition: PartitionId,
        (suspicion, error): (Suspicion, &StoreError),
    ) {
        let reason = suspicion.marked_lost.then(|| error.to_string());
        let (service, stopped) = (Arc::clone(self), self.tasks.cancelled());
        let (done, first_is_done) = oneshot::channel();
        self.tasks.spawn("find what cannot be read", async move {
            tokio::select! {
                () = service.find_damage(&shuffle, partition, (reason, suspicion.device), done) => {}
                () = stopped => {}
            }
        });
        // An error, too, means that it is done.
        let _: Result<(), _> = first_is_done.await;
    }

    /// Drops `done` after the first count.
    async fn find_damage(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        (mut reason, device): (Option<String>, Option<usize>),
        done: oneshot::Sender<()>,
    ) {
        let (Some(tier), key) = (self.tiers.served(), shuffle.key()) else { return };
        let (mut devices, mut done, mut pause) = (Vec::from_iter(device), Some(done), COUNT_PAUSE_MIN);
        loop {
            let mut damaged = Vec::new();
            for device in devices {
                damaged.extend(tier.probe(key, partition, device).await);
            }
            reason = reason.or_else(|| damaged.first().map(|it| it.error.to_string()));
            let Some(reason) = &reason else { return };
            let counted = self.mark_lost_and_count(shuffle, partition, (damaged, reason)).await;
            let Err(error) = counted.or_else(unless_purged) else { return };
            drop(done.take());
            tracing::warn!(shuffle = %key, %partition, %error, "what is left cannot be counted yet");
            sleep(pause).await;
            pause = COUNT_PAUSE_MAX.min(pause * 2);
            if self.tiers.iter().all(|tier| tier.shuffle(key).is_none()) {
                return;
            }
            devices = (0..tier.devices()).collect();
        }
    }

    async fn mark_lost_and_count(
        &self,
        shuffle: &ShuffleState,
        partition: PartitionId,
        (damaged, reason): (Vec<DamagedExtents>, &str),
    ) -> Result<(), StoreError> {
        let _turn = shuffle.losses().turn().await;
        shuffle.losses().mark_damaged(partition);
        damaged.into_iter().for_each(DamagedExtents::mark_lost);
        self.count(shuffle, partition).await?;
        let reported = shuffle.block_ids().lock().of(&[partition]);
        let missing = shuffle.losses().missing(partition, &reported);
        self.enter_loss(shuffle, partition, &missing, (None, &Arc::from(reason)));
        shuffle.losses().clear_damaged(partition);
        Ok(())
    }
}

/// Nobody is left to be told.
fn unless_purged(error: StoreError) -> Result<(), StoreError> {
    if error.kind == StoreErrorKind::Purged { Ok(()) } else { Err(error) }
}
