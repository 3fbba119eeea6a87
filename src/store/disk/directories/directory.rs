//! One data directory: its space and its health.
//!
//! A full disk is healthy: its data is served. It takes batches again below the low watermark and,
//! if a write found no space, once a probe can write or files were removed. An unhealthy disk is
//! avoided until a probe has written and read back random bytes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rand::Rng;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::health::{DiskHealth, ErrorClass, classify};
use super::marker::{MARKER, marker_of, uuid_of};
use super::placement::{DiskCandidate, Paces, free_for_batches};
use crate::clock::Instant;
use crate::log::within;
use crate::log::{self, Directory, METADATA};
use crate::store::disk::config::{LocalConfig, NAME_TIMEOUT};
use crate::store::{DiskCondition, DiskInfo, StoreError};
use uniffle_io::buffers::AlignedBuffer;
use uniffle_io::{BLOCK_ALIGN, DeviceShare, Disk, DiskLock, Mount, Space, Vanished, WriteOpen};

/// Directory of application data.
pub(in crate::store) const APPS: &str = "apps";
/// Directory of files that wait for deletion.
pub(in crate::store) const TRASH: &str = "trash";
/// Directory of the probe's files.
const PROBE: &str = "probe";
/// Size of the probe of a disk that refused a write. A disk with less space counts as full.
const ROOM_PROBE_BYTES: usize = 1 << 20;

/// A claimed data directory.
#[derive(Debug)]
pub(in crate::store) struct LocalDisk {
    /// Index among the claimed disks, set by the store.
    pub(in crate::store) index: usize,
    pub(in crate::store) io: Arc<dyn Disk>,
    /// Memory that its reads may hold, set by the store.
    pub(in crate::store::disk) reads: Arc<DeviceShare>,
    /// Permits of read hints: one request at a time.
    pub(in crate::store::disk) hints: Arc<Semaphore>,
    /// Persistent identity, written into index groups.
    pub(in crate::store) uuid: Uuid,
    /// The root as text, for labels.
    pub(in crate::store) label: String,
    /// True if an earlier process had claimed the directory. Set by the claim.
    pub(in crate::store) was_used: bool,
    state: Mutex<State>,
    in_flight_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// Number of calls that the device completed.
    completed_calls: AtomicU64,
    /// Held by the probe in progress.
    probing: tokio::sync::Mutex<()>,
    /// Held by the deletion in progress.
    pub(in crate::store) removals: Semaphore,
    /// Cancelled when this process must stop deleting.
    pub(in crate::store) stop_removals: CancellationToken,
    /// True if files of an earlier process could not be read, so unknown files must not be swept.
    has_unread: AtomicBool,
    mount: Mount,
    changes: Arc<watch::Sender<()>>,
    /// High and low watermark.
    watermarks: Mutex<(f64, f64)>,
    /// Lock of the claim, which keeps other processes out.
    lock: Mutex<Box<dyn DiskLock>>,
}

#[derive(Debug, Default)]
struct State {
    health: DiskHealth,
    /// Last measurement, minus the bytes written since.
    space: Space,
    paces: Paces,
}

impl LocalDisk {
    /// Creates a disk from a directory with its identity and lock.
    pub(in crate::store) fn new(
        io: Arc<dyn Disk>,
        uuid: Uuid,
        lock: Box<dyn DiskLock>,
        mount: Mount,
        config: &LocalConfig,
        changes: Arc<watch::Sender<()>>,
    ) -> Self {
        Self {
            index: 0,
            reads: DeviceShare::new(0),
            hints: Arc::new(Semaphore::new(1)),
            removals: Semaphore::new(1),
            stop_removals: CancellationToken::new(),
            label: io.root().display().to_string(),
            io,
            uuid,
            state: Mutex::default(),
            in_flight_bytes: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            completed_calls: AtomicU64::new(0),
            probing: tokio::sync::Mutex::default(),
            was_used: false,
            has_unread: AtomicBool::new(false),
            mount,
            changes,
            watermarks: Mutex::new((config.high_watermark, config.low_watermark)),
            lock: Mutex::new(lock),
        }
    }

    /// Returns the directory for the metadata log and scratch files.
    pub(in crate::store) fn directory(self: &Arc<Self>) -> Directory {
        let health: Weak<dyn log::DirectoryHealth> = Arc::downgrade(self) as Weak<dyn log::DirectoryHealth>;
        Directory { uuid: self.uuid, label: self.label.clone(), io: Arc::clone(&self.io), health }
    }

    /// Creates the top-level directories.
    pub(super) async fn make_directories(&self) -> io::Result<()> {
        for directory in [TRASH, APPS] {
            within(NAME_TIMEOUT, self.io.create_dir_all(Path::new(directory))).await?;
        }
        Ok(())
    }

    /// Moves content of an earlier process into the trash, which is emptied later, so that a start
    /// is quick.
    pub(super) async fn discard_everything(&self) -> io::Result<()> {
        self.discard(Path::new(METADATA)).await?;
        if within(NAME_TIMEOUT, self.io.list(Path::new(APPS))).await?.is_empty() {
            return Ok(());
        }
        self.discard(Path::new(APPS)).await?;
        self.make_directories().await
    }

    /// Removes the claim of an empty directory, because the start that made it is refused.
    pub(super) async fn abandon(&self) {
        for directory in [TRASH, APPS] {
            let _ = within(NAME_TIMEOUT, self.io.remove_dir(Path::new(directory))).await;
        }
        let removed = within(NAME_TIMEOUT, self.io.remove_part(Path::new(MARKER), u64::MAX)).await;
        if let Err(error) = removed {
            tracing::warn!(disk = %self.label, %error, "cannot undo the claim of a new data directory");
        }
    }

    /// Returns the mount point of the directory.
    pub(super) fn mount_point(&self) -> &Path {
        &self.mount.point
    }

    /// Renames `path` into the trash, if it exists. Returns the new path.
    pub(in crate::store) async fn discard(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let to = Path::new(TRASH).join(Uuid::new_v4().to_string());
        match within(NAME_TIMEOUT, self.io.rename(path, &to)).await {
            Ok(()) => Ok(Some(to)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Measures the free space and applies the watermarks.
    pub(in crate::store) async fn measure(&self) -> io::Result<()> {
        let space = within(NAME_TIMEOUT, self.io.space()).await?;
        self.update(|state| {
            state.space = space;
            self.apply_watermarks(state);
        });
        Ok(())
    }

    /// Replaces the watermarks, and applies them at once.
    pub(in crate::store::disk) fn set_watermarks(&self, high: f64, low: f64) {
        *self.watermarks.lock() = (high, low);
        self.update(|state| self.apply_watermarks(state));
    }

    fn apply_watermarks(&self, state: &mut State) {
        let ratio = used_ratio(state.space);
        let (high, low) = *self.watermarks.lock();
        if state.health.measured(ratio, high, low) {
            let full = state.health.is_full();
            tracing::info!(disk = %self.label, full, used_ratio = ratio, "disk crossed a watermark");
        }
    }

    /// Changes the state, and notifies the watchers of the disks if the condition changed.
    fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let before = state.health.condition();
        let result = change(&mut state);
        let changed = state.health.condition() != before;
        drop(state);
        if changed {
            self.changes.send_replace(());
        }
        result
    }

    /// Returns whether a write found no space, and since then no probe has succeeded and no file
    /// was removed.
    pub(in crate::store) fn refuses(&self) -> bool {
        self.state.lock().health.refuses()
    }

    /// Measures the space after files were removed. A disk that refused a write is tried again.
    pub(in crate::store) async fn note_space_freed(&self) -> io::Result<()> {
        self.measure().await?;
        self.update(|state| state.health.note_space_freed());
        Ok(())
    }

    /// Applies a failed operation. Errors that do not concern the disk (no descriptors or memory
    /// left, a missing name) do not count against it.
    pub(in crate::store) fn note(&self, error: &io::Error) {
        let (before, verdict, why_full) = self.update(|state| {
            let (before, verdict) = (state.health.condition(), state.health.note(error));
            (before, verdict, state.health.why_full(&state.space))
        });
        match verdict {
            ErrorClass::NotTheDisk | ErrorClass::TheFile => {}
            ErrorClass::Full if before == DiskCondition::Healthy => {
                let reason = why_full.unwrap_or_default();
                tracing::warn!(
                    disk = %self.label,
                    error = %error,
                    reason,
                    "disk is full; avoiding it until a check can write"
                );
            }
            ErrorClass::Detached if before != DiskCondition::Detached => {
                tracing::error!(
                    disk = %self.label,
                    %error,
                    "data directory was unmounted, moved or replaced; disabled until the path leads back to \
                     it"
                );
            }
            ErrorClass::ReadOnly if before <= DiskCondition::Full => {
                tracing::error!(
                    disk = %self.label,
                    "file system is read-only; the disk serves reads and accepts no data"
                );
            }
            ErrorClass::Hung | ErrorClass::Broken if before <= DiskCondition::ReadOnly => {
                tracing::error!(
                    disk = %self.label,
                    error = %error,
                    "disk failed; avoiding it until a check succeeds"
                );
            }
            ErrorClass::Full
            | ErrorClass::ReadOnly
            | ErrorClass::Detached
            | ErrorClass::Hung
            | ErrorClass::Broken => {}
        }
    }

    /// Like [`LocalDisk::note`], after a measurement of the space, so that the message about a full
    /// disk is accurate.
    pub(in crate::store::disk) async fn note_measured(&self, error: &io::Error) {
        if classify(error) == ErrorClass::Full {
            // If the measurement fails, the message has the earlier figures.
            let _ = self.measure().await;
        }
        self.note(error);
    }

    /// Returns whether files of an earlier process could not be read back.
    pub(in crate::store) fn has_unread(&self) -> bool {
        self.has_unread.load(Ordering::Relaxed)
    }

    /// Records the result of a scan for [`LocalDisk::has_unread`].
    pub(in crate::store) fn note_unread(&self, has_unread: bool) {
        self.has_unread.fetch_or(has_unread, Ordering::Relaxed);
    }

    /// Notes a successful call that the device answered, not the page cache.
    pub(in crate::store::disk) fn note_progress(&self) {
        self.completed_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs a call that transfers bytes, with its deadline. A failure counts against the disk. A
    /// missed deadline does not if other calls completed meanwhile: then the call only waited in
    /// the queue of a busy device.
    pub(in crate::store::disk) async fn call<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        let before = self.completed_calls.load(Ordering::Relaxed);
        let result = within(deadline, call).await;
        if let Err(error) = &result {
            self.note_call(error, before).await;
        }
        result
    }

    /// Applies a failed call that began after `completed_before` successful ones.
    async fn note_call(&self, error: &io::Error, completed_before: u64) {
        let is_busy = self.completed_calls.load(Ordering::Relaxed) != completed_before;
        if classify(error) != ErrorClass::Hung || !is_busy {
            self.note_measured(error).await;
        }
    }

    /// Records the speed of a batch that was written since `began`, while `in_flight_bytes` shared
    /// the disk.
    pub(in crate::store::disk) fn record_write_speed(&self, in_flight_bytes: u64, began: Instant) {
        let now = Instant::now();
        self.state.lock().paces.record(in_flight_bytes, now.duration_since(began), now);
    }

    /// Verifies that the path still leads to this directory: it may have been unmounted, moved or
    /// replaced. Writes the claim again if another program removed it.
    ///
    /// # Errors
    /// The path leads elsewhere, or a file system that was mounted again cannot be anchored. A
    /// failed read of the claim is no error.
    pub(in crate::store) async fn require_attached(&self) -> io::Result<()> {
        let is_anchored = within(NAME_TIMEOUT, self.io.is_anchored()).await.unwrap_or(false);
        let found = match within(NAME_TIMEOUT, self.io.read_small(Path::new(MARKER))).await {
            Ok(marker) => uuid_of(&marker).map(|uuid| uuid == self.uuid),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Some(is_anchored && self.claim_again().await.is_ok())
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Some(false),
            Err(_) => None,
        };
        if found == Some(false) {
            let error = io::Error::from(Vanished::Root);
            if self.condition() != DiskCondition::Detached {
                self.note(&error);
            }
            return Err(error);
        }
        if found == Some(true) && !is_anchored {
            // The file system was mounted again.
            within(NAME_TIMEOUT, self.io.anchor()).await?;
        }
        Ok(())
    }

    /// Writes the claim of the directory again, and locks it.
    async fn claim_again(&self) -> io::Result<()> {
        let marker = Path::new(MARKER);
        let content = marker_of(self.uuid).into_bytes();
        within(NAME_TIMEOUT, self.io.write_small(marker, content)).await?;
        within(NAME_TIMEOUT, self.io.sync_dir(Path::new(""))).await?;
        let lock = within(NAME_TIMEOUT, self.io.lock(marker)).await?;
        let before = std::mem::replace(&mut *self.lock.lock(), lock);
        drop(before);
        tracing::error!(
            disk = %self.label,
            "the claim of the data directory was removed; writing it again; exclude the directory from file \
             cleaners"
        );
        self.make_directories().await
    }

    /// Writes random bytes, reads them back and compares. Success makes the disk healthy. A failed
    /// write or read is applied like any other failure, so "no space" means full, not unhealthy.
    ///
    /// The write bypasses the page cache if possible, so that the device serves the read.
    pub(in crate::store) async fn probe(&self, direct: bool) -> io::Result<()> {
        let _only = self.probing.lock().await;
        self.probe_alone(direct).await
    }

    /// Probes the disk unless it has become healthy meanwhile.
    pub(in crate::store) async fn recover(&self, direct: bool) -> io::Result<()> {
        let _only = self.probing.lock().await;
        if self.is_healthy() { Ok(()) } else { self.probe_alone(direct).await }
    }

    async fn probe_alone(&self, direct: bool) -> io::Result<()> {
        self.require_attached().await?;
        let bytes = if self.refuses() { ROOM_PROBE_BYTES } else { BLOCK_ALIGN };
        self.call(NAME_TIMEOUT, self.write_and_read_back(bytes, direct)).await?;
        // A disk that was claimed while read-only may lack its directories.
        self.make_directories().await?;
        if let Some(fault) = self.update(|state| state.health.note_probe_passed()) {
            tracing::info!(disk = %self.label, fault, "disk responds again");
        }
        Ok(())
    }

    async fn write_and_read_back(&self, bytes: usize, direct: bool) -> io::Result<()> {
        let directory = Path::new(PROBE);
        self.io.create_dir_all(directory).await?;
        let path = directory.join(Uuid::new_v4().to_string());
        let compared = self.write_and_compare(&path, bytes, direct).await;
        // Also removes the part that a full disk accepted.
        let removed = self.io.remove_dir_all(directory).await;
        compared.and(removed)
    }

    async fn write_and_compare(&self, path: &Path, bytes: usize, direct: bool) -> io::Result<()> {
        let mut block = [0; BLOCK_ALIGN];
        rand::rng().fill_bytes(&mut block);
        let expected = block.repeat(bytes / BLOCK_ALIGN);
        let mut buffer = AlignedBuffer::unpooled();
        buffer.put(&expected);
        let how = WriteOpen { create: true, direct, ..WriteOpen::default() };
        let file = self.io.open_write(path, how).await?;
        file.write_at(vec![buffer.freeze()], 0).await?;
        file.sync().await?;
        let read = self.io.open_read(path).await?.read_range(0..bytes as u64).await?;
        if read != expected {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "disk returned wrong bytes"));
        }
        Ok(())
    }

    /// Returns the state for placement.
    pub(in crate::store::disk) fn candidate(&self) -> DiskCandidate {
        let state = self.state.lock();
        DiskCandidate {
            condition: state.health.condition(),
            free_bytes: free_for_batches(state.space),
            in_flight_bytes: self.in_flight_bytes.load(Ordering::Relaxed),
            pace: state.paces.at(Instant::now()),
        }
    }

    /// Returns whether the disk takes batches, and why not.
    pub(in crate::store) fn condition(&self) -> DiskCondition {
        self.state.lock().health.condition()
    }

    /// Fails if the disk does not answer or is detached.
    pub(in crate::store::disk) fn require_answering(&self) -> Result<(), StoreError> {
        let text = match self.condition() {
            DiskCondition::Hung => "disk timed out; reads are refused until a check succeeds",
            DiskCondition::Detached => {
                "data directory was unmounted, moved or replaced; reads are refused until the path leads \
                 back to it"
            }
            _ => return Ok(()),
        };
        Err(StoreError::io(self.io.root(), io::Error::new(io::ErrorKind::TimedOut, text)))
    }

    /// Returns whether batches are being written to the disk while it is below the low watermark.
    pub(in crate::store) fn is_busy_with_room(&self) -> bool {
        let is_busy = self.in_flight_bytes.load(Ordering::Relaxed) > 0;
        let (_, low) = *self.watermarks.lock();
        let state = self.state.lock();
        is_busy && !state.health.is_full() && used_ratio(state.space) < low
    }

    /// Returns false if the disk is read-only, detached, hung or broken.
    pub(in crate::store) fn is_healthy(&self) -> bool {
        self.state.lock().health.fault().is_none()
    }

    /// Returns the disk's state for the API.
    pub(in crate::store) fn info(&self) -> DiskInfo {
        let state = self.state.lock();
        DiskInfo {
            path: self.io.root().to_path_buf(),
            uuid: self.uuid,
            condition: state.health.condition(),
            fault: state.health.fault().map(str::to_owned).or_else(|| state.health.why_full(&state.space)),
            failures: state.health.failures(),
            faults: state.health.faults(),
            mount: self.mount.clone(),
            total_bytes: state.space.total_bytes,
            free_bytes: state.space.free_bytes,
            file_system: state.space.file_system,
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            in_flight_bytes: self.in_flight_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Returns the used share of a file system, 0..=1. A file system without figures counts as empty.
#[expect(clippy::cast_precision_loss, reason = "a ratio for watermarks")]
pub(in crate::store) fn used_ratio(space: Space) -> f64 {
    if space.total_bytes == 0 {
        return 0.0;
    }
    1.0 - space.free_bytes.min(space.total_bytes) as f64 / space.total_bytes as f64
}

/// Bytes of a shuffle's files on a disk. Subtracted when dropped.
#[derive(Debug)]
pub(in crate::store) struct Occupied {
    disk: Arc<LocalDisk>,
    bytes: AtomicU64,
}

impl Occupied {
    pub(in crate::store::disk) fn none(disk: Arc<LocalDisk>) -> Self {
        Self { disk, bytes: AtomicU64::new(0) }
    }

    /// Adds bytes that are about to be written, and subtracts them from the measured free space.
    pub(in crate::store) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.disk.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        // At full speed, a disk may be far beyond its watermark before the next measurement.
        self.disk.update(|state| {
            state.space.free_bytes = state.space.free_bytes.saturating_sub(bytes);
            self.disk.apply_watermarks(state);
        });
    }

    pub(in crate::store) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Subtracts the bytes of a removed file.
    pub(in crate::store) fn take(&self, bytes: u64) {
        let taken = |remaining: u64| Some(remaining.saturating_sub(bytes));
        let before = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).unwrap_or(0);
        self.disk.used_bytes.fetch_sub(bytes.min(before), Ordering::Relaxed);
    }

    /// Adds bytes that are on the disk already, and included in its measured space.
    pub(in crate::store) fn found(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.disk.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        self.disk.used_bytes.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

/// Bytes that are being written to a disk, for placement. Subtracted when dropped.
#[derive(Debug)]
pub(in crate::store::disk) struct InFlightWrite {
    disk: Arc<LocalDisk>,
    bytes: u64,
    /// Bytes in flight at the beginning, including these.
    pub(in crate::store::disk) with_others: u64,
}

impl InFlightWrite {
    pub(in crate::store) fn begin(disk: &Arc<LocalDisk>, bytes: u64) -> Self {
        let others = disk.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
        Self { disk: Arc::clone(disk), bytes, with_others: others.saturating_add(bytes) }
    }
}

impl Drop for InFlightWrite {
    fn drop(&mut self) {
        self.disk.in_flight_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
