//! What every call on the disks needs: the disks themselves, their open files, cached index records, and metrics.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;

use super::config::LocalConfig;
use super::disk::LocalDisk;
use super::files::Files;
use super::metrics::Metrics;
use crate::budget::Budget;
use crate::durability::Hearer;
use crate::tiers::record_cache::RecordCache;
use crate::tiers::recovered::FoundIds;
use crate::tiers::{DiskCondition, StoreError};

/// What writing, reading and maintenance share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) config: LocalConfig,
    pub(super) disks: Vec<Arc<LocalDisk>>,
    /// Written when a disk's condition changes.
    pub(super) changes: Arc<watch::Sender<()>>,
    /// Configured directories that could not be claimed.
    pub(super) disks_refused: u64,
    pub(super) files: Files,
    pub(super) records: RecordCache,
    /// What the lists of extents of all shuffles are charged to.
    pub(super) extents: Budget,
    /// What block ids that a start finds are charged to.
    pub(super) found_ids: FoundIds,
    /// Who hears that blocks are gone.
    pub(super) hearer: Hearer,
    pub(super) metrics: Metrics,
}

impl Core {
    pub(super) fn available_disks(&self) -> usize {
        self.disks.iter().filter(|disk| disk.condition() == DiskCondition::Healthy).count()
    }

    /// Notes a failure against its disk and makes it an error of the store.
    pub(super) fn failed(&self, disk: &LocalDisk, path: impl AsRef<Path>, error: io::Error) -> StoreError {
        disk.note(&error);
        StoreError::io(path, error)
    }

    /// The same of an operation that takes space.
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
