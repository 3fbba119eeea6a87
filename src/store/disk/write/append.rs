//! Steps of an append to the logs of a shuffle: trying disks until one succeeds, reserving a range,
//! and one sync.
//!
//! Invariant: after an error or a timeout the log is closed and the next append gets a new file, so
//! a late write reaches only its own range. No file is created once a purge removes the files of
//! its shuffle.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, select_ok};
use tokio::sync::{Mutex, MutexGuard};

use crate::clock::{Instant, timeout};
use crate::log::within;
use crate::runtime::Tasks;
use crate::store::disk::config::{NAME_TIMEOUT, SyncWrites};
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::{APPS, LocalDisk};
use crate::store::disk::directories::placement::{self, DiskCandidate};
use crate::store::disk::log_file::{LOG_BYTES_MAX, Log, LogKind, LogRange, LogUse};
use crate::store::disk::read::damage::DamageMarker;
use crate::store::disk::read::failures::wants_new_file;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::buffers::AlignedPool;
use uniffle_io::{File, Vanished};

/// Maximum time that a batch of the final flush waits for a failed disk to recover. The flush
/// repeats the batch if none does.
const RECOVERY_WAIT_MAX: Duration = Duration::from_secs(10);
/// With this many bytes to spare on a disk, batches of the final flush are written concurrently.
const AMPLE_BYTES: u64 = 256 << 20;

/// Shared state of writers.
#[derive(Debug)]
pub(in crate::store) struct DiskWriter {
    pub(in crate::store) core: Arc<DiskCore>,
    pub(in crate::store::disk) staging: Arc<AlignedPool>,
    pub(in crate::store) damage: Arc<DamageMarker>,
    pub(in crate::store) tasks: Tasks,
    /// Held while a batch of the final flush is written to disks that have little room. Otherwise
    /// concurrent batches would take the room that each of them measured.
    last_room: Mutex<()>,
}

/// When an error is counted against its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorCount {
    Now,
    Already,
}

/// Search for a disk that takes an append. If a file is at fault and not its disk, the disk is
/// tried once more, with a new file.
pub(super) struct DiskSearch<'a> {
    writer: &'a DiskWriter,
    shuffle: &'a Arc<DiskShuffle>,
    bytes: u64,
    is_last: bool,
    /// Index of the disk to try next, or `None` to choose one.
    next: Option<usize>,
    tried: Vec<usize>,
    renewed: Vec<usize>,
    last_error: Option<StoreError>,
    /// The lock `last_room` of the writer. Held from the time at which no disk has ample room until
    /// failed disks are probed.
    turn: Option<MutexGuard<'a, ()>>,
}

impl<'a> DiskSearch<'a> {
    /// Begins a search for an append of `bytes` bytes.
    pub(super) fn new(
        writer: &'a DiskWriter,
        shuffle: &'a Arc<DiskShuffle>,
        bytes: u64,
        is_last: bool,
    ) -> Self {
        let (tried, renewed) = (Vec::new(), Vec::new());
        Self { writer, shuffle, bytes, is_last, next: None, tried, renewed, last_error: None, turn: None }
    }

    /// Begins with disk `first`, if given.
    pub(super) fn starting_at(self, first: Option<usize>) -> Self {
        Self { next: first, ..self }
    }

    /// Returns the next disk to try.
    ///
    /// # Errors
    /// The error of the last disk, after all failed. `NoSpace` or `Unhealthy` if none can be tried.
    pub(super) async fn next_disk(&mut self) -> Result<&'a Arc<LocalDisk>, StoreError> {
        let chosen = match self.next.take() {
            Some(index) => Some(index),
            None if self.is_last => self.choose_last().await,
            None => self.writer.choose(self.bytes, &self.tried).await,
        };
        let Some(index) = chosen else {
            return Err(self.last_error.take().unwrap_or_else(|| self.writer.no_disk()));
        };
        if !self.tried.is_empty() {
            self.writer.core.metrics.write_local_retries.inc();
        }
        Ok(&self.writer.core.disks[index])
    }

    /// Chooses the disk for a batch of the final flush. It also tries disks above the watermark,
    /// and failed ones that pass a probe now.
    async fn choose_last(&mut self) -> Option<usize> {
        let writer = self.writer;
        if let Some(index) = self.best_of_all(AMPLE_BYTES) {
            return Some(index);
        }
        if self.turn.is_none() {
            self.turn = Some(writer.last_room.lock().await);
        }
        writer.measure(&self.tried).await;
        if let Some(index) = self.best_of_all(0) {
            return Some(index);
        }
        self.turn = None;
        writer.recover_any(&self.tried).await;
        self.best_of_all(0)
    }

    /// Returns a disk that has room for the batch, `spare` bytes and all bytes in flight, if
    /// possible one below the watermark.
    fn best_of_all(&self, spare: u64) -> Option<usize> {
        let mut candidates = self.writer.candidates();
        for candidate in &mut candidates {
            candidate.free_bytes = candidate.free_bytes.saturating_sub(candidate.in_flight_bytes);
        }
        let bytes = self.bytes.saturating_add(spare);
        let best = placement::choose(&candidates, bytes, &self.tried);
        best.or_else(|| placement::choose_any(&candidates, bytes, &self.tried))
    }

    /// Notes that the append failed on a disk. Its log is closed.
    ///
    /// # Errors
    /// `Purged`.
    pub(super) fn failed(&mut self, disk: usize, error: StoreError) -> Result<(), StoreError> {
        self.shuffle.require_present()?;
        self.writer.core.metrics.write_exceptions.inc();
        if wants_new_file(&error) && !self.renewed.contains(&disk) {
            self.writer.lose_vanished(self.shuffle);
            self.renewed.push(disk);
            self.next = Some(disk);
            return Ok(());
        }
        tracing::warn!(shuffle = %self.shuffle.key, %error, "write failed; trying the next disk");
        self.tried.push(disk);
        self.last_error = Some(error);
        Ok(())
    }
}

impl DiskWriter {
    pub(in crate::store) fn new(core: &Arc<DiskCore>) -> Arc<Self> {
        let staging = AlignedPool::new(core.config.staging_buffers(core.disks.len()));
        let damage = DamageMarker::new(Arc::clone(core));
        let (tasks, last_room) = (Tasks::new(), Mutex::new(()));
        Arc::new(Self { core: Arc::clone(core), staging, damage, tasks, last_room })
    }

    fn candidates(&self) -> Vec<DiskCandidate> {
        self.core.disks.iter().map(|disk| disk.candidate()).collect()
    }

    /// Measures the space of the healthy disks that are not in `tried`.
    async fn measure(&self, tried: &[usize]) {
        let disks = self.core.disks.iter();
        let healthy = disks.filter(|disk| disk.is_healthy() && !tried.contains(&disk.index));
        join_all(healthy.map(|disk| disk.measure()).collect::<Vec<_>>()).await;
    }

    /// Chooses the disk for a batch. Measures space again before it returns `None`: some may have
    /// been freed.
    async fn choose(&self, bytes: u64, tried: &[usize]) -> Option<usize> {
        if let Some(index) = placement::choose(&self.candidates(), bytes, tried) {
            return Some(index);
        }
        self.measure(tried).await;
        placement::choose(&self.candidates(), bytes, tried)
    }

    /// Probes the failed disks that are not in `tried`, until one recovers. Disks that hang delay
    /// no other.
    async fn recover_any(&self, tried: &[usize]) {
        let failed = self.core.disks.iter().filter(|disk| !disk.is_healthy() && !tried.contains(&disk.index));
        let direct = self.core.config.direct_io;
        let probes: Vec<_> = failed.map(|disk| Box::pin(disk.recover(direct))).collect();
        if !probes.is_empty()
            && let Ok(Err(error)) = timeout(RECOVERY_WAIT_MAX, select_ok(probes)).await
        {
            tracing::debug!(%error, "no failed disk has recovered");
        }
    }

    fn no_disk(&self) -> StoreError {
        let any_healthy = self.core.disks.iter().any(|disk| disk.is_healthy());
        let kind = if any_healthy { StoreErrorKind::NoSpace } else { StoreErrorKind::Unhealthy };
        StoreError::new(kind, "all local disks")
    }

    /// Reserves `bytes` bytes in a shuffle's open log of a disk. Creates a log if none is open.
    pub(in crate::store::disk) async fn reserve(
        &self,
        shuffle: &DiskShuffle,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
        bytes: u64,
    ) -> Result<LogRange, StoreError> {
        let here = shuffle.on(disk);
        let mut current = here.current(kind).lock().await;
        let limit = self.log_bytes(kind);
        let open = current.as_ref().and_then(|log| Some((LogUse::of(log), log.reserve(bytes, limit)?)));
        let (log, offset) = match open {
            Some(reserved) => reserved,
            None => {
                // The disk may have failed while this waited.
                if !disk.is_healthy() {
                    return Err(StoreError::new(StoreErrorKind::Unhealthy, disk.io.root()));
                }
                let log = self.create_log(shuffle, disk, kind).await?;
                *current = Some(Arc::clone(&log));
                let offset = log.reserve(bytes, limit);
                (LogUse::of(&log), offset.ok_or_else(|| shuffle.error(StoreErrorKind::InvalidBatch))?)
            }
        };
        here.occupied.add(bytes);
        Ok(LogRange { log, offset })
    }

    /// Returns the maximum length of a log. Only a single append to a new log may exceed it.
    fn log_bytes(&self, kind: LogKind) -> u64 {
        let most = self.core.config.file_bytes_max.min(LOG_BYTES_MAX);
        match kind {
            LogKind::Data => self.core.config.data_log_bytes.min(most),
            LogKind::Index => most,
        }
    }

    async fn create_log(
        &self,
        shuffle: &DiskShuffle,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
    ) -> Result<Arc<Log>, StoreError> {
        let _gate = shuffle.gate.read().await;
        shuffle.require_present()?;
        let core = &self.core;
        let directory = disk.io.root().join(&shuffle.directory);
        let mut made = within(NAME_TIMEOUT, disk.io.create_dir_all(&shuffle.directory)).await;
        if made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            // A purge of the application's earlier registration may just have removed its empty
            // directory.
            made = within(NAME_TIMEOUT, disk.io.create_dir_all(&shuffle.directory)).await;
        }
        if let Err(error) = made {
            return Err(core.failed_measured(disk, &directory, error).await);
        }
        let number = shuffle.on(disk).next_number();
        let log = shuffle.add_log(core.files.next_id(), disk, kind, number)?;
        if let Err(error) = core.files.create(&log).await {
            return Err(core.failed_measured(disk, &log.full_path(), error).await);
        }
        if shuffle.is_purged() {
            // The purge may have listed the logs before this one was added.
            core.files.forget(&log);
        }
        let named = self.make_names_durable(disk, &shuffle.directory).await;
        named.map_err(|error| core.failed(disk, &directory, error))?;
        core.metrics.files_opened.inc();
        Ok(log)
    }

    /// Returns the log's file for writing. A failure closes the log.
    pub(in crate::store) async fn writer(&self, log: &Log) -> Result<Arc<dyn File>, StoreError> {
        let opened = self.core.files.writer(log).await;
        opened.map_err(|error| self.failed_log(log, error, ErrorCount::Now))
    }

    /// Closes a log after an error, and counts the error against the disk unless that was done
    /// already.
    pub(super) fn failed_log(&self, log: &Log, error: io::Error, counts: ErrorCount) -> StoreError {
        log.close();
        if Vanished::of(&error) == Some(Vanished::File) {
            log.set_vanished();
        }
        match counts {
            ErrorCount::Now => self.core.failed(&log.disk, log.full_path(), error),
            ErrorCount::Already => StoreError::io(log.full_path(), error),
        }
    }

    /// Marks the extents of vanished files as lost, in a task of its own.
    pub(in crate::store) fn lose_vanished(&self, shuffle: &Arc<DiskShuffle>) {
        for log in shuffle.logs().into_iter().filter(|log| log.begin_loss()) {
            let (damage, shuffle) = (Arc::clone(&self.damage), Arc::clone(shuffle));
            self.tasks.spawn("vanished file", async move { damage.lose_log(&shuffle, &log).await });
        }
    }

    /// Waits until everything that the caller has written to a log is on the device, if that is
    /// configured.
    ///
    /// # Errors
    /// A sync failed or took too long: the log is closed.
    pub(super) async fn make_durable(&self, log: &Log, file: &Arc<dyn File>) -> Result<(), StoreError> {
        if self.core.config.sync == SyncWrites::Off {
            return Ok(());
        }
        let sync = async {
            let started = Instant::now();
            let result = log.disk.call(self.core.config.write_timeout, file.sync()).await;
            let seconds = started.elapsed().as_secs_f64();
            self.core.metrics.sync_duration.with_label_values(&[log.disk.label.as_str()]).observe(seconds);
            result.inspect(|()| log.disk.note_progress())
        };
        log.syncs.cover(sync).await.map_err(|error| {
            log.close();
            StoreError::io(log.full_path(), error)
        })
    }

    /// Waits until the names of the files in a shuffle's directory are on the device, if that is
    /// configured.
    async fn make_names_durable(&self, disk: &LocalDisk, directory: &Path) -> io::Result<()> {
        if self.core.config.sync == SyncWrites::Off {
            return Ok(());
        }
        let below_apps = directory.ancestors().take_while(|path| path.starts_with(APPS));
        // Includes the root, which holds the name of `APPS`: another program may have removed it
        // since the claim.
        for path in below_apps.chain([Path::new("")]) {
            within(NAME_TIMEOUT, disk.io.sync_dir(path)).await?;
        }
        Ok(())
    }
}
