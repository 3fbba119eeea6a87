//! HDFS as a [`Tier`] whose files clients read themselves.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::{HdfsCore, HdfsStore, RemoteHandle};
use crate::store::{
    Admission, Capability, MaintainedTier, Purge, RemoteStorage, ServedTier, StoreError, Tier, TierBatch,
    TierNames, TierRole, TierShuffle, TierState, TierUsage,
};
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

pub(crate) const NAMES: TierNames = TierNames {
    name: "hdfs",
    title: "HDFS",
    label: "HDFS",
    spill: "hdfs",
    events: "hadoop",
    queue: "hadoop",
};

#[derive(Debug)]
struct RemoteShuffle {
    core: Arc<HdfsCore>,
    handle: RemoteHandle,
}

impl TierShuffle for RemoteShuffle {
    fn is_accepting(&self) -> bool {
        self.handle.is_available()
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let write = async move {
            let metrics = &self.handle.shuffle.remote.metrics;
            metrics.retries.inc_by(u64::from(batch.is_retry));
            for extent in batch.extents {
                self.core.write_extent(&self.handle.shuffle, extent, batch.is_last).await?;
            }
            metrics.huge_bytes.inc_by(batch.huge_bytes);
            Ok(())
        };
        write.boxed()
    }
}

impl Tier for HdfsStore {
    fn capability(&self) -> Capability {
        let in_flight_max = self.core.config.in_flight_max;
        Capability { names: NAMES, writers: in_flight_max, in_flight_max, role: TierRole::Cold }
    }

    fn state(&self) -> TierState {
        let complaint =
            self.all_failing().then_some("all remote stores fail, and memory has no other tier below it");
        TierState { complaint, hdfs: Some(HdfsStore::state(self)), ..TierState::default() }
    }

    /// Clients that name no remote path read memory and local disks only.
    fn prepare(self: Arc<Self>, storage: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError> {
        let Some(storage) = storage else { return Ok(None) };
        let prepared = HdfsStore::prepare(&self, storage)?;
        Ok(Some(Box::new(move |key, ranges| self.register(key, &prepared, ranges))))
    }

    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>> {
        let (core, handle) = (Arc::clone(&self.core), self.handle(key)?);
        Some(Arc::new(RemoteShuffle { core, handle }))
    }

    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let read = async move {
            HdfsStore::present(self, key, partition).await?.iter().for_each(visit);
            Ok(())
        };
        read.boxed()
    }

    fn usage(&self, key: &ShuffleKey) -> TierUsage {
        HdfsStore::usage(self, key)
    }

    fn served(&self) -> Option<&dyn ServedTier> {
        None
    }

    fn forget(
        self: Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        purge: Purge,
    ) -> Option<BoxFuture<'static, ()>> {
        let removal = match purge {
            Purge::Shuffles => self.forget_shuffles(app, keys),
            Purge::App(cause) => self.forget_app(app, keys, cause),
        };
        removal.map(|removal| removal.run().boxed())
    }

    fn maintenance(self: Arc<Self>) -> Option<Arc<dyn MaintainedTier>> {
        Some(self)
    }
}

impl MaintainedTier for HdfsStore {
    fn refresh_metrics(&self) {
        HdfsStore::refresh_metrics(self);
    }

    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        self.keep_probing(stop).boxed()
    }
}
