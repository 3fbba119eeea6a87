//! HDFS as a [`Tier`] whose files clients read themselves, and its check at start.
//!
//! A batch made for HDFS has one extent. A batch that another tier failed to write may have many:
//! they are written one after the other, and after an error the earlier ones stay readable. The
//! retried batch repeats their blocks, which readers drop by id.

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::{HdfsCore, HdfsShuffle, HdfsStore, RemoteLocation};
use crate::store::{
    Admission, Capability, MaintainedTier, Purge, RemoteStorage, ServedTier, StoreError, StoreErrorKind,
    Tier, TierBatch, TierNames, TierRole, TierShuffle, TierState, TierUsage,
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

/// Content of the file that a check at start writes. Every server uses its own file name.
const PRECHECK_CONTENT: &[u8] = b"uniffle-worker was here; this file can be deleted";

#[derive(Debug)]
struct RemoteShuffle {
    core: Arc<HdfsCore>,
    shuffle: Arc<HdfsShuffle>,
}

impl TierShuffle for RemoteShuffle {
    fn is_accepting(&self) -> bool {
        self.shuffle.remote.is_available()
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let write = async move {
            let metrics = &self.shuffle.remote.metrics;
            metrics.retries.inc_by(u64::from(batch.is_retry));
            for extent in batch.extents {
                self.core.write_extent(&self.shuffle, extent, batch.is_last).await?;
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
        let complaint = self.all_failing().then_some("all remote stores fail");
        TierState { complaint, hdfs: Some(HdfsStore::state(self)), ..TierState::default() }
    }

    /// Clients that name no remote path read memory and local disks only.
    fn prepare(self: Arc<Self>, storage: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError> {
        let Some(storage) = storage else { return Ok(None) };
        let prepared = HdfsStore::prepare(&self, storage)?;
        Ok(Some(Box::new(move |key, ranges| self.register(key, &prepared, ranges))))
    }

    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>> {
        let (core, shuffle) = (Arc::clone(&self.core), self.find(key)?);
        Some(Arc::new(RemoteShuffle { core, shuffle }))
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

impl HdfsStore {
    /// Checks a remote directory at start: creates it, and writes, reads and deletes a file in it,
    /// like a batch.
    ///
    /// # Errors
    /// The operation that fails, with the path.
    pub async fn precheck(&self, location: &RemoteLocation) -> Result<(), StoreError> {
        let storage = RemoteStorage { path: location.to_string(), ..RemoteStorage::default() };
        let prepared = self.prepare(&storage)?;
        let (core, fs) = (&self.core, &*prepared.remote.fs);
        let root = &*prepared.root;
        let file = format!("{}/.precheck-{}", root.trim_end_matches('/'), core.server_id);
        core.timed(root, fs.make_dirs(root)).await?;
        // Removes the file of a worker that ended during its check.
        core.timed(&file, fs.delete(&file, false)).await?;
        let half = PRECHECK_CONTENT.len() / 2;
        core.timed(&file, fs.create(&file, vec![Bytes::from_static(&PRECHECK_CONTENT[..half])])).await?;
        core.timed(&file, fs.append(&file, vec![Bytes::from_static(&PRECHECK_CONTENT[half..])])).await?;
        let read = core.timed(&file, fs.read(&file)).await?;
        if read != PRECHECK_CONTENT {
            return Err(StoreError::new(StoreErrorKind::Corrupt, &file));
        }
        core.timed(&file, fs.delete(&file, false)).await?;
        tracing::info!(path = %location, "checked the remote path");
        Ok(())
    }
}
