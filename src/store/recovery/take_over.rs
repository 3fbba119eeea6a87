//! The disks below the metadata log. Recovers the state of an earlier process, and records changes
//! of shuffles.
//!
//! Invariant: a purge is in the log before any of its files is removed, so a purge never removes
//! files of a shuffle that a later start knows. A purge that cannot be logged is retried.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;

use super::scan::{DiskScan, scan_disk};
use crate::clock::timeout;
use crate::log::{
    Deadlines, Directory, DirectoryHealth, FoundLog, HandOff, LogError, LogInStore, MetadataLog,
    RecordReader, Survey,
};
use crate::runtime::Tasks;
use crate::store::disk::config::{METADATA_TIMEOUT, NAME_TIMEOUT};
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::LocalDisk;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::disk::store::{DiskShuffleHandle, LocalStore};
use crate::store::recovered::Stored;
use crate::store::{DiskCondition, StoreError, StoreErrorKind};
use uniffle_wire::types::{AppId, ShuffleKey};

/// Deadline for the hand-off, because clients wait while the log is closed.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);
/// Number of purges that are logged concurrently.
const NOTES_AT_ONCE: usize = 512;

impl DirectoryHealth for LocalDisk {
    fn rank(&self) -> Option<u8> {
        match self.condition() {
            DiskCondition::Healthy => Some(0),
            // A full disk still ranks, because a record is small and may be all that fits.
            DiskCondition::Full => Some(1),
            DiskCondition::ReadOnly
            | DiskCondition::Detached
            | DiskCondition::Hung
            | DiskCondition::Broken => None,
        }
    }

    fn failed(&self, error: &io::Error) {
        self.note(error);
    }
}

/// State left by an earlier process.
pub(in crate::store) struct PreviousState {
    scans: Vec<DiskScan>,
    found: FoundLog,
    records: RecordReader,
}

impl PreviousState {
    /// Scans the disks, and begins the metadata log.
    pub(in crate::store) async fn scan(
        core: &DiskCore,
        store: Option<LogInStore>,
        tasks: &Tasks,
    ) -> (Self, MetadataLog) {
        let scans = core.disks.iter().map(scan_disk).collect::<Vec<_>>();
        let scans = join_all(scans).await;
        let directories: Vec<Directory> = core.disks.iter().map(LocalDisk::directory).collect();
        let survey =
            Survey::take(&directories, NAME_TIMEOUT).await.with_hand_off(core.config.hand_off.clone());
        let has_data = scans.iter().any(|scan| scan.has_unread || !scan.directories.is_empty());
        let survey = survey.with_data(has_data);
        if survey.is_fresh() {
            for disk in core.disks.iter().filter(|disk| disk.was_used) {
                tracing::error!(
                    path = disk.label,
                    "metadata of a used data directory is missing; data acknowledged there is lost, and \
                     shuffles that are registered again start empty"
                );
            }
        }
        let deadlines = Deadlines { write: METADATA_TIMEOUT, name: NAME_TIMEOUT };
        let (log, found, records) = MetadataLog::open(directories, survey, deadlines, store, tasks).await;
        for (uuid, path) in &found.absent {
            tracing::error!(path, id = %uuid, "a data directory of earlier starts is missing; if its disk is not mounted, mount it and restart");
        }
        (Self { scans, found, records }, log)
    }
}

impl LocalStore {
    /// Recovers the state of an earlier process.
    pub(in crate::store) async fn take_over(&self, before: PreviousState, stored: Stored) {
        let PreviousState { scans, found, records } = before;
        let is_blind = found.has_new_gap;
        let recovered = self.recover(scans, found, records, stored).await;
        if is_blind || recovered.shuffles.iter().any(|shuffle| !shuffle.reason.is_empty()) {
            self.metadata.count_blind_start().await;
        }
        *self.recovered.lock() = recovered;
    }

    /// Closes the metadata log: nothing is acknowledged afterwards. Returns the hand-off record for
    /// the successor, or `None` if the successor has to begin a generation.
    pub async fn release_log(&self) -> Option<HandOff> {
        timeout(RELEASE_DEADLINE, self.metadata.release()).await.ok()?.ok()
    }

    /// Marks a shuffle as offloaded: its later records are acknowledged once the object store has
    /// them. Returns the position of the record.
    ///
    /// # Errors
    /// See [`append`].
    pub async fn mark_moved(&self, handle: &DiskShuffleHandle) -> Result<u64, StoreError> {
        handle.shuffle.require_present()?;
        let marked = self.metadata.mark_moved(handle.shuffle.incarnation()).await;
        marked.map_err(|error| failed_log(&error))
    }

    /// Returns the metadata log.
    #[must_use]
    pub fn log(&self) -> MetadataLog {
        self.metadata.clone()
    }

    /// Logs the purges of all shuffles that were forgotten before the call. If logging fails, the
    /// files of the shuffle stay.
    pub(in crate::store) async fn note_purges(&self) {
        self.pending_purges.cover(|purged| self.note_round(purged)).await;
    }

    /// Waits until the purges of an application, or of one of its shuffles, are in the metadata
    /// log.
    ///
    /// # Errors
    /// A purge cannot be logged now. It is retried periodically.
    pub(in crate::store) async fn purges_logged(
        &self,
        app: &AppId,
        key: Option<&ShuffleKey>,
    ) -> Result<(), StoreError> {
        if !self.pending_purges.has(app, key) {
            return Ok(());
        }
        self.note_purges().await;
        if !self.pending_purges.has(app, key) {
            return Ok(());
        }
        let what = "cannot record the deletion in the metadata log; a restart may recover the shuffle";
        let of = key.map_or_else(|| app.to_string(), ToString::to_string);
        Err(StoreError::remote(StoreErrorKind::Unhealthy, of, what))
    }

    /// Logs purges. After a cancelled round the next one logs some purges again, which is harmless.
    async fn note_round(&self, purged: Vec<Arc<DiskShuffle>>) {
        for some in purged.chunks(NOTES_AT_ONCE) {
            join_all(some.iter().map(|shuffle| self.note_purge(shuffle)).collect::<Vec<_>>()).await;
        }
    }

    async fn note_purge(&self, shuffle: &DiskShuffle) {
        match self.metadata.purge(shuffle.incarnation()).await {
            Ok(_) => shuffle.set_purge_logged(),
            Err(error) => {
                tracing::warn!(
                    shuffle = %shuffle.key,
                    %error,
                    "cannot record the deletion of a shuffle; its files remain, retrying"
                );
            }
        }
    }

    /// Returns true while a purge is not in the metadata log. Logged ones may count for a while.
    pub(in crate::store) fn has_purges_to_note(&self) -> bool {
        !self.pending_purges.is_empty()
    }
}

/// Writes a record of a shuffle to the metadata log. After `Ok` it survives the process and a power
/// loss. Returns its position on the way to the object store, if there is one.
///
/// # Errors
/// `Purged`, or an error of [`MetadataLog::append`].
pub(in crate::store) async fn append(
    log: &MetadataLog,
    shuffle: &DiskShuffle,
    content: Bytes,
) -> Result<u64, StoreError> {
    shuffle.require_present()?;
    let appended = log.append(shuffle.incarnation(), content).await;
    shuffle.require_present()?;
    appended.map_err(|error| failed_log(&error))
}

/// Marks a shuffle as incomplete for this start and later ones. Returns the position of the record.
///
/// # Errors
/// See [`append`].
pub(in crate::store) async fn mark_incomplete(
    log: &MetadataLog,
    shuffle: &DiskShuffle,
    reason: &str,
) -> Result<u64, StoreError> {
    shuffle.require_present()?;
    let marked = log.mark_incomplete(shuffle.incarnation(), reason).await;
    marked.map_err(|error| failed_log(&error))
}

pub(in crate::store) fn failed_log(error: &LogError) -> StoreError {
    match error.kind {
        _ if error.is_remote => StoreError::of_log(error, &error.path),
        io::ErrorKind::Other => StoreError::remote(StoreErrorKind::Unhealthy, &error.path, error.to_string()),
        kind => StoreError::io(&error.path, io::Error::new(kind, error.to_string())),
    }
}
