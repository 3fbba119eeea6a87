//! State shared by writes, reads and maintenance: the disks, their open files, cached index
//! records, and metrics.
//!
//! Invariant: the error of a read or write is counted once against its disk, by the call itself
//! (`LocalDisk::call`) or by [`DiskCore::failed`]. Without that, a broken disk would stay in use.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;

use super::config::LocalConfig;
use super::directories::directory::LocalDisk;
use super::files::FileCache;
use super::metrics::Metrics;
use crate::store::index::record_cache::RecordCache;
use crate::store::recovered::FoundIds;
use crate::store::{DiskCondition, StoreError};
use uniffle_base::budget::Budget;
use uniffle_base::damage::DamageNotifier;

/// State shared by writes, reads and maintenance.
#[derive(Debug)]
pub(in crate::store) struct DiskCore {
    pub(in crate::store) config: LocalConfig,
    pub(in crate::store) disks: Vec<Arc<LocalDisk>>,
    /// Notified when the condition of a disk changes.
    pub(super) changes: Arc<watch::Sender<()>>,
    /// Configured directories that could not be claimed.
    pub(in crate::store) disks_refused: u64,
    pub(in crate::store) files: FileCache,
    pub(in crate::store) records: RecordCache,
    /// Budget of the lists of extents of all shuffles.
    pub(in crate::store) extents: Budget,
    /// Budget of block ids that a start finds.
    pub(in crate::store) found_ids: FoundIds,
    /// Notifies the service of lost blocks.
    pub(super) damage: DamageNotifier,
    pub(in crate::store) metrics: Metrics,
}

impl DiskCore {
    pub(super) fn available_disks(&self) -> usize {
        self.disks.iter().filter(|disk| disk.condition() == DiskCondition::Healthy).count()
    }

    /// Counts a failure against its disk, and converts it to an error of the store.
    pub(in crate::store) fn failed(
        &self,
        disk: &LocalDisk,
        path: impl AsRef<Path>,
        error: io::Error,
    ) -> StoreError {
        disk.note(&error);
        StoreError::io(path, error)
    }

    /// Like [`DiskCore::failed`], for an operation that needs space.
    pub(super) async fn failed_measured(
        &self,
        disk: &LocalDisk,
        path: &Path,
        error: io::Error,
    ) -> StoreError {
        disk.note_measured(&error).await;
        StoreError::io(path, error)
    }
}
