//! One data directory: claimed by marker file and lock, its space and its health.
//!
//! Health and fullness are different things: a full disk is sound (its data is served, and it takes batches again
//! below the low watermark), an unhealthy one is avoided until a probe has written and read back random bytes.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::Rng;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::LocalConfig;
use super::health::{Health, Verdict, judge};
use super::pace::Paces;
use super::placement::Candidate;
use super::sync::SyncWrites;
use crate::durability::METADATA;
use crate::tiers::{DiskCondition, DiskInfo, StoreError, StoreErrorKind};
use uniffle_io::buffers::AlignedBuffer;
use uniffle_io::{BLOCK_ALIGN, Disk, DiskLock, Media, Mount, ReadTarget, Space, WriteOpen};

/// The file that makes a directory ours and that the owner keeps locked.
pub const MARKER: &str = "uniffle-worker.claim";
/// First line of the marker: format and version.
const MARKER_HEAD: &str = "uniffle-worker local store 1";
/// Directory of everything that apps wrote.
pub(super) const APPS: &str = "apps";
/// Directory of what waits to be deleted.
pub(super) const TRASH: &str = "trash";
/// Directory of the probe's files.
const PROBE: &str = "probe";
/// What `mkfs` leaves in a root and nobody minds.
const LOST_AND_FOUND: &str = "lost+found";

/// A claimed data directory.
#[derive(Debug)]
pub(super) struct LocalDisk {
    /// Place among the claimed disks, set by the store.
    pub(super) index: usize,
    pub(super) io: Arc<dyn Disk>,
    /// Persistent identity, written into index groups.
    pub(super) uuid: Uuid,
    /// The root as text, for labels.
    pub(super) label: String,
    state: Mutex<State>,
    in_flight_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// Data calls that ended well.
    completed_calls: AtomicU64,
    /// Something of an earlier process could not be read back, so nothing unknown may be swept away.
    unreadable: AtomicBool,
    mount: Mount,
    changes: Arc<watch::Sender<()>>,
    /// High and low.
    watermarks: Mutex<(f64, f64)>,
    deadline: Duration,
    _lock: Box<dyn DiskLock>,
}

#[derive(Debug, Default)]
struct State {
    health: Health,
    /// As last measured, minus what we have written since.
    space: Space,
    paces: Paces,
}

/// `operation`, or `TimedOut` when it takes too long. The operation itself may run on.
pub(super) async fn within<T>(
    deadline: Duration,
    operation: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match tokio::time::timeout(deadline, operation).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no answer from the disk in time")),
    }
}

impl LocalDisk {
    /// Makes the directory ours, or says why it cannot be. Without recovery, content of ours from an earlier process is
    /// moved into the trash, which [`LocalDisk::empty_trash`] deletes later, so that a start is quick.
    ///
    /// Every change of its condition is told through `changes`.
    pub(super) async fn claim(
        io: Arc<dyn Disk>,
        config: &LocalConfig,
        changes: Arc<watch::Sender<()>>,
    ) -> Result<Self, StoreError> {
        let root = io.root().to_path_buf();
        let deadline = config.name_timeout;
        let failed = |error| StoreError::io(&root, error);
        within(deadline, io.create_dir_all(Path::new(""))).await.map_err(failed)?;
        let names = within(deadline, io.list(Path::new(""))).await.map_err(failed)?;
        let ours = names.iter().any(|name| name == MARKER);
        if !ours && names.iter().any(|name| name != LOST_AND_FOUND) {
            return Err(StoreError::new(StoreErrorKind::NotOurs, &root));
        }
        let lock = match within(deadline, io.lock(Path::new(MARKER))).await {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(StoreError::new(StoreErrorKind::InUse, &root));
            }
            Err(error) => return Err(failed(error)),
        };
        let uuid = identify(io.as_ref(), &root, deadline).await?;
        for directory in [TRASH, APPS] {
            within(deadline, io.create_dir_all(Path::new(directory))).await.map_err(failed)?;
        }
        let unknown = || Mount { point: root.clone(), media: Media::Unknown };
        let mount = within(deadline, io.mount()).await.unwrap_or_else(|_| unknown());
        let disk = Self {
            index: 0,
            label: root.display().to_string(),
            io,
            uuid,
            state: Mutex::default(),
            in_flight_bytes: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            completed_calls: AtomicU64::new(0),
            unreadable: AtomicBool::new(false),
            mount,
            changes,
            watermarks: Mutex::new((config.high_watermark, config.low_watermark)),
            deadline,
            _lock: lock,
        };
        if !config.recovery
            && !within(deadline, disk.io.list(Path::new(APPS))).await.map_err(failed)?.is_empty()
        {
            disk.discard(Path::new(APPS)).await.map_err(failed)?;
            within(deadline, disk.io.create_dir_all(Path::new(APPS))).await.map_err(failed)?;
        }
        if !config.recovery {
            disk.discard(Path::new(METADATA)).await.map_err(failed)?;
        }
        if config.sync == SyncWrites::Group {
            // What an earlier process wrote is only in the page cache yet, and it is to be believed.
            within(config.write_timeout, disk.io.sync_all()).await.map_err(failed)?;
        }
        disk.measure().await.map_err(failed)?;
        Ok(disk)
    }

    /// Renames `path` into the trash; one that does not exist is fine. Returns where it is now.
    pub(super) async fn discard(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let to = Path::new(TRASH).join(Uuid::new_v4().to_string());
        match within(self.deadline, self.io.rename(path, &to)).await {
            Ok(()) => Ok(Some(to)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes one directory of the trash; one that is gone already is fine.
    pub(super) async fn delete(&self, path: &Path, deadline: Duration) -> io::Result<()> {
        match within(deadline, self.io.remove_dir_all(path)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Deletes everything in the trash.
    pub(super) async fn empty_trash(&self, deadline: Duration) -> io::Result<()> {
        for name in within(self.deadline, self.io.list(Path::new(TRASH))).await? {
            self.delete(&Path::new(TRASH).join(name), deadline).await?;
        }
        Ok(())
    }

    /// Measures the free space and applies the watermarks.
    pub(super) async fn measure(&self) -> io::Result<()> {
        let space = within(self.deadline, self.io.space()).await?;
        self.update(|state| {
            state.space = space;
            self.apply_watermarks(state);
        });
        Ok(())
    }

    /// Replaces the watermarks; the space is looked at with them at once.
    pub(super) fn set_watermarks(&self, high: f64, low: f64) {
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

    /// Changes the state and tells whoever watches the disks when that changed the condition.
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

    /// Lets a disk that answered "no space" be tried again when its time is over.
    pub(super) fn forgive_refusal(&self) {
        self.update(|state| state.health.forgive(Instant::now()));
    }

    /// Draws the consequences of a failed operation. What says nothing about the disk (no descriptors or memory left,
    /// a name that is gone) does not count against it.
    pub(super) fn note(&self, error: &io::Error) {
        let (before, verdict) =
            self.update(|state| (state.health.condition(), state.health.note(error, Instant::now())));
        match verdict {
            Verdict::NotTheDisk => {}
            Verdict::Full if before == DiskCondition::Healthy => {
                tracing::warn!(disk = %self.label, error = %error, "disk is full, avoiding it");
            }
            Verdict::Hung | Verdict::Broken if before <= DiskCondition::Full => {
                tracing::error!(disk = %self.label, error = %error, "disk failed, avoiding it until a probe succeeds");
            }
            Verdict::Full | Verdict::Hung | Verdict::Broken => {}
        }
    }

    /// Whether something of an earlier process could not be read back.
    pub(super) fn is_unreadable(&self) -> bool {
        self.unreadable.load(Ordering::Relaxed)
    }

    /// See [`LocalDisk::is_unreadable`].
    pub(super) fn set_unreadable(&self, unreadable: bool) {
        self.unreadable.fetch_or(unreadable, Ordering::Relaxed);
    }

    /// A data call has ended well: the disk makes progress.
    pub(super) fn progressed(&self) {
        self.completed_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// A batch was written since `began`, when with it `in_flight_bytes` were to be: "no space" is no longer its habit,
    /// and it is known how fast it is.
    pub(super) fn wrote(&self, in_flight_bytes: u64, began: Instant) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.health.wrote();
        state.paces.record(in_flight_bytes, now.duration_since(began), now);
    }

    /// Writes random bytes, reads them back and compares. Success makes the disk healthy; a failure is noted like any
    /// other (so "no space" means full, not sick). A deadline that passes while other calls come through means busy:
    /// the probe only stood in the queue, and nothing is held against the disk.
    ///
    /// The write goes around the page cache where it can, so that the read asks the device and not our own memory.
    pub(super) async fn probe(&self, direct: bool) -> io::Result<()> {
        let calls_before = self.completed_calls.load(Ordering::Relaxed);
        let result = within(self.deadline, self.write_and_read_back(direct)).await;
        match &result {
            Ok(()) => {
                if let Some(fault) = self.update(|state| state.health.proved()) {
                    tracing::info!(disk = %self.label, fault, "disk answers again");
                }
            }
            Err(error) => {
                let busy = self.completed_calls.load(Ordering::Relaxed) != calls_before;
                if judge(error) != Verdict::Hung || !busy {
                    self.note(error);
                }
            }
        }
        result
    }

    async fn write_and_read_back(&self, direct: bool) -> io::Result<()> {
        let directory = Path::new(PROBE);
        self.io.create_dir_all(directory).await?;
        let path = directory.join(Uuid::new_v4().to_string());
        let mut expected = vec![0; BLOCK_ALIGN];
        rand::rng().fill_bytes(&mut expected);
        let mut buffer = AlignedBuffer::unpooled();
        buffer.put(&expected);
        let file = self.io.open_write(&path, WriteOpen { create: true, direct }).await?;
        file.write_at(vec![buffer.freeze()], 0).await?;
        file.sync().await?;
        let target = ReadTarget::one(Box::new(vec![0; BLOCK_ALIGN]), 0..BLOCK_ALIGN, 0);
        let (mut target, result) = self.io.open_read(&path).await?.read(target).await;
        result?;
        if target.part_mut(0).map(|bytes| &*bytes) != Some(&expected[..]) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "disk returned other bytes than were written",
            ));
        }
        self.io.remove_dir_all(directory).await
    }

    /// What placement needs to know.
    pub(super) fn candidate(&self) -> Candidate {
        let state = self.state.lock();
        Candidate {
            healthy: state.health.fault().is_none(),
            full: state.health.is_full(),
            free_bytes: state.space.free_bytes,
            in_flight_bytes: self.in_flight_bytes.load(Ordering::Relaxed),
            pace: state.paces.at(Instant::now()),
        }
    }

    /// Whether it takes batches, and why not.
    pub(super) fn condition(&self) -> DiskCondition {
        self.state.lock().health.condition()
    }

    /// True unless it is hung or broken.
    pub(super) fn is_healthy(&self) -> bool {
        self.state.lock().health.fault().is_none()
    }

    /// What it tells about itself.
    pub(super) fn info(&self) -> DiskInfo {
        let state = self.state.lock();
        DiskInfo {
            path: self.io.root().to_path_buf(),
            uuid: self.uuid,
            condition: state.health.condition(),
            fault: state.health.fault().map(str::to_owned),
            failures: state.health.failures(),
            mount: self.mount.clone(),
            total_bytes: state.space.total_bytes,
            free_bytes: state.space.free_bytes,
            file_system: state.space.file_system,
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            in_flight_bytes: self.in_flight_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Used share of a file system, 0..=1; one that says nothing about itself is empty.
#[expect(clippy::cast_precision_loss, reason = "a ratio for watermarks")]
pub(super) fn used_ratio(space: Space) -> f64 {
    if space.total_bytes == 0 {
        return 0.0;
    }
    1.0 - space.free_bytes.min(space.total_bytes) as f64 / space.total_bytes as f64
}

/// Reads the disk's identity from the marker, or gives it one.
async fn identify(io: &dyn Disk, root: &Path, deadline: Duration) -> Result<Uuid, StoreError> {
    let marker = Path::new(MARKER);
    let failed = |error| StoreError::io(root, error);
    let content = within(deadline, io.read_small(marker)).await.map_err(failed)?;
    if content.is_empty() {
        let uuid = Uuid::new_v4();
        let text = format!("{MARKER_HEAD}\n{uuid}\n");
        within(deadline, io.write_small(marker, text.into_bytes())).await.map_err(failed)?;
        // Without its marker a directory with data in it is nobody's.
        within(deadline, io.sync_dir(Path::new(""))).await.map_err(failed)?;
        return Ok(uuid);
    }
    let text = String::from_utf8_lossy(&content);
    let mut lines = text.lines();
    let head_fits = lines.next() == Some(MARKER_HEAD);
    let uuid = lines.next().and_then(|line| Uuid::parse_str(line).ok()).filter(|_| head_fits);
    uuid.ok_or_else(|| StoreError::new(StoreErrorKind::NotOurs, root.join(MARKER)))
}

/// Bytes of our files on a disk; given back when dropped.
#[derive(Debug)]
pub(super) struct Occupied {
    disk: Arc<LocalDisk>,
    bytes: AtomicU64,
}

impl Occupied {
    pub(super) fn none(disk: Arc<LocalDisk>) -> Self {
        Self { disk, bytes: AtomicU64::new(0) }
    }

    /// Counts bytes that are about to be written, which also makes the measured free space smaller.
    pub(super) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.disk.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        // Seconds may pass until the next measurement; at full speed a disk would be far beyond its watermark by then.
        self.disk.update(|state| {
            state.space.free_bytes = state.space.free_bytes.saturating_sub(bytes);
            self.disk.apply_watermarks(state);
        });
    }

    /// Counts bytes that are on the disk already, and so in its measured space.
    pub(super) fn found(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.disk.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        self.disk.used_bytes.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

/// Bytes that are being written to a disk, for placement; ends when dropped.
#[derive(Debug)]
pub(super) struct InFlight {
    disk: Arc<LocalDisk>,
    bytes: u64,
    /// All that was to be written when this began.
    pub(super) with_others: u64,
}

impl InFlight {
    pub(super) fn begin(disk: &Arc<LocalDisk>, bytes: u64) -> Self {
        let others = disk.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
        Self { disk: Arc::clone(disk), bytes, with_others: others.saturating_add(bytes) }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.disk.in_flight_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
