//! Opens the store: claims the directories and takes over the data of an earlier process.
//!
//! Order: claims come first, so no file of another process is read as ours. Writers get the store
//! only after the earlier data is known, because new extents must follow it in their streams.

use std::io;
use std::sync::Arc;

use prometheus::Registry;
use tokio::sync::watch;

use super::config::LocalConfig;
use super::core::DiskCore;
use super::directories::claim;
use super::files::FileCache;
use super::metrics::Metrics;
use super::store::LocalStore;
use crate::runtime::Tasks;
use crate::store::index::record_cache::RecordCache;
use crate::store::recovered::Stored;
use crate::store::recovery::take_over::PreviousState;
use crate::store::{StoreError, StoreErrorKind, TierHeap};
use uniffle_base::damage::DamageNotifier;
use uniffle_io::{DeviceShare, Disk};

impl LocalStore {
    /// Claims the disks and recovers the data of an earlier process
    /// ([`LocalStore::take_recovered`]), or discards it (deleted later, by
    /// [`LocalStore::maintain`]). A directory that fails, does not answer or may lack its disk is
    /// left out as long as another one can be used. Lists of published extents are charged to
    /// `heap` even without room for them. Block ids are charged only if there is room.
    ///
    /// # Errors
    /// The error of a directory that must not be used: `NotOurs`, `Unclaimed`, `Outdated`,
    /// `OtherFormat`, `InUse` or `Copied`. `NotMounted` if the start may miss the disks of earlier
    /// data. Any failure if no disk is left, and `Io` if `registry` has the metrics already.
    pub async fn open(
        config: LocalConfig,
        disks: Vec<Arc<dyn Disk>>,
        heap: impl Into<TierHeap>,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        Self::open_beside(config, disks, Stored::default(), heap, registry).await
    }

    /// Like [`LocalStore::open`], for shuffles with data in an object store (`stored`). Without
    /// disks, all data and the metadata log are in the object store.
    ///
    /// # Errors
    /// See [`LocalStore::open`]. `Unhealthy` if there are neither disks nor an object store.
    pub async fn open_beside(
        config: LocalConfig,
        disks: Vec<Arc<dyn Disk>>,
        mut stored: Stored,
        heap: impl Into<TierHeap>,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let metrics =
            Metrics::new(registry).map_err(|error| StoreError::io("metrics", io::Error::other(error)))?;
        if disks.is_empty() && stored.log.is_none() {
            return Err(StoreError::new(StoreErrorKind::Unhealthy, "no data directory"));
        }
        let (roots, heap) = (disks.len() as u64, heap.into());
        let changes = Arc::new(watch::Sender::new(()));
        let read_share_bytes = config.read_share_bytes(disks.len());
        let mut claimed = claim::claim_all(disks, &config, &changes).await?;
        for (index, disk) in claimed.iter_mut().enumerate() {
            disk.index = index;
            disk.reads = DeviceShare::new(read_share_bytes);
        }
        let core = DiskCore {
            disks_refused: roots - claimed.len() as u64,
            records: RecordCache::new(config.index_cache_bytes),
            files: FileCache::new(config.descriptors_max, config.direct_io),
            disks: claimed.into_iter().map(Arc::new).collect(),
            changes,
            found_ids: heap.found_ids(),
            extents: heap.extents,
            damage: DamageNotifier::default(),
            metrics,
            config,
        };
        let tasks = Tasks::new();
        let (before, metadata) = PreviousState::scan(&core, stored.log.take(), &tasks).await;
        let store = Self::new(core, metadata, tasks);
        store.take_over(before, stored).await;
        store.core.set_gauges();
        Ok(store)
    }
}
