//! Removal of shuffles from the disks without delaying writers.
//!
//! A shuffle is first detached from readers and writers. Then its directories wait in the deletion
//! queue of each disk. Writes to a device wait while its file system frees a large log, which may
//! take seconds, above all with the mount option `discard`. Directories are therefore deleted in
//! parts, one at a time per disk.
//!
//! While batches are written to the disk, a pause of three times the part's duration follows each
//! part but the last, at most half a second, unless the disk is short of space. A process that
//! hands over to a successor starts no further part: the successor empties the trash.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::{Instant, sleep};
use crate::log::within;
use crate::metrics::clamped;
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::{LocalDisk, TRASH};
use crate::store::disk::shuffle::DiskShuffle;
#[cfg(feature = "object")]
use crate::store::extents::extent::Extent;
use crate::store::extents::streams::Streams;
use uniffle_wire::types::AppId;

/// Bytes of one part.
const PART_BYTES: u64 = 16 << 20;
/// Deadline of one part, and of listing the trash, which may be large.
const PART_TIMEOUT: Duration = Duration::from_secs(600);
/// Throttle: length of a pause relative to the part before it. Three quarters of the time are left
/// to writes, or less if the pause has its maximum.
const PAUSE_FACTOR: u32 = 3;
/// Minimum pause: the file system discards freed blocks only after the deletion has returned.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// Maximum pause.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Maximum number of workers of one queue. With two, a queue makes progress while one worker waits
/// for a file of a shuffle that is being created on another disk. A disk that hangs blocks no more
/// than these.
const WORKERS_MAX: usize = 2;

/// A purged shuffle that is no longer readable or writable. Dropping it removes its extents from
/// gauges and caches.
///
/// A shuffle is detached under a lock that registrations wait for, and may have hundreds of
/// thousands of extents. They are visited when this is dropped. Its files are not removed before.
#[derive(Debug)]
#[must_use = "dropped under a lock it delays registrations"]
pub struct DetachedShuffle {
    core: Arc<DiskCore>,
    shuffle: Arc<DiskShuffle>,
    streams: Streams,
}

impl DetachedShuffle {
    /// Marks `shuffle` as purged, and takes its extents.
    pub(in crate::store) fn new(core: &Arc<DiskCore>, shuffle: Arc<DiskShuffle>) -> Self {
        let streams = shuffle.mark_purged();
        Self { core: Arc::clone(core), shuffle, streams }
    }

    /// Returns its extents in objects, with its incarnation.
    #[cfg(feature = "object")]
    pub(in crate::store) fn in_objects(&self) -> (u64, impl Iterator<Item = &Extent>) {
        let extents = self.streams.extents().filter(|extent| extent.is_in_object());
        (self.shuffle.incarnation, extents)
    }
}

impl Drop for DetachedShuffle {
    fn drop(&mut self) {
        let Self { core, shuffle, streams } = self;
        let known = || streams.extents().filter(|extent| extent.is_on_disk());
        core.metrics.extents.sub(clamped(known().count()));
        core.records.remove(known().map(|extent| shuffle.records_key(extent)));
        let logs = shuffle.logs();
        let mut bytes = vec![0; core.disks.len()];
        for extent in known() {
            if let Some(log) = logs.get(usize::from(extent.data_log)) {
                bytes[log.disk.index] += extent.length;
            }
        }
        for log in logs {
            core.files.forget(&log);
        }
        shuffle.set_forgotten(bytes);
    }
}

/// Drops detached shuffles on a blocking thread, also if the caller is cancelled.
pub(in crate::store) async fn drop_blocking(detached: Vec<DetachedShuffle>) {
    // A panic has been logged, and nothing else can be done about it here.
    let _dropped = tokio::task::spawn_blocking(move || drop(detached)).await;
}

/// Directories to delete from one disk. Each disk has its own queue, so a slow one delays no other.
#[derive(Debug, Default)]
pub(in crate::store) struct DeletionQueue(Mutex<Queued>);

#[derive(Debug, Default)]
struct Queued {
    /// Shuffles whose directories are to be deleted.
    shuffles: VecDeque<Arc<DiskShuffle>>,
    /// Applications whose directories are to be deleted if empty.
    apps: HashSet<AppId>,
    workers: usize,
}

impl DeletionQueue {
    pub(in crate::store) fn add(&self, shuffle: Arc<DiskShuffle>) {
        self.0.lock().shuffles.push_back(shuffle);
    }

    /// Adds `app` and returns a new worker. Returns `None` if [`WORKERS_MAX`] workers run already:
    /// they continue until no entry is ready.
    pub(in crate::store) fn begin(&self, app: Option<&AppId>) -> Option<DeletionWorker<'_>> {
        let mut queued = self.0.lock();
        queued.apps.extend(app.cloned());
        if queued.workers == WORKERS_MAX {
            return None;
        }
        queued.workers += 1;
        let (remaining, failed) = (VecDeque::new(), VecDeque::new());
        Some(DeletionWorker { queue: self, remaining, failed, is_counted: true })
    }
}

/// A worker of a deletion queue. When dropped, it returns its remaining shuffles to the queue. The
/// maintenance removes them, and files that a cancelled purge leaves in the trash. A sweep removes
/// empty directories of applications.
#[derive(Debug)]
pub(in crate::store) struct DeletionWorker<'a> {
    queue: &'a DeletionQueue,
    /// Shuffles that this worker is to delete.
    remaining: VecDeque<Arc<DiskShuffle>>,
    /// Shuffles that this worker does not retry.
    failed: VecDeque<Arc<DiskShuffle>>,
    /// True while `Queued::workers` counts this worker.
    is_counted: bool,
}

impl DeletionWorker<'_> {
    /// Takes all queued shuffles that are ready, for [`DeletionWorker::next`]. Returns the queued
    /// applications, or `None` if there is nothing left to do and the worker has ended.
    pub(in crate::store) fn take(
        &mut self,
        is_ready: impl Fn(&DiskShuffle) -> bool,
    ) -> Option<HashSet<AppId>> {
        let mut queued = self.queue.0.lock();
        queued.shuffles.retain(|shuffle| {
            let takes = is_ready(shuffle);
            if takes {
                self.remaining.push_back(Arc::clone(shuffle));
            }
            !takes
        });
        if self.remaining.is_empty() && queued.apps.is_empty() {
            // Decremented under the lock: a caller that found enough workers relies on one that
            // checks again.
            queued.workers -= usize::from(std::mem::take(&mut self.is_counted));
            return None;
        }
        Some(std::mem::take(&mut queued.apps))
    }

    /// Returns the next shuffle.
    pub(in crate::store) fn next(&self) -> Option<Arc<DiskShuffle>> {
        self.remaining.front().map(Arc::clone)
    }

    /// Finishes the next shuffle.
    pub(in crate::store) fn done(&mut self, is_removed: bool) {
        let next = self.remaining.pop_front();
        self.failed.extend(next.filter(|_| !is_removed));
    }
}

impl Drop for DeletionWorker<'_> {
    fn drop(&mut self) {
        let mut queued = self.queue.0.lock();
        queued.shuffles.append(&mut self.failed);
        queued.shuffles.append(&mut self.remaining);
        queued.workers -= usize::from(self.is_counted);
    }
}

impl LocalDisk {
    /// Deletes a directory or file in the trash, if it exists. If dropped, the rest stays in the
    /// trash.
    ///
    /// # Errors
    /// An error of the disk. `Interrupted` once removals cease: the rest stays in the trash too.
    pub(in crate::store) async fn delete(&self, path: &Path) -> io::Result<()> {
        loop {
            let turn = self.stop_removals.run_until_cancelled(self.removals.acquire()).await;
            let turn = turn.ok_or(io::ErrorKind::Interrupted)?.map_err(io::Error::other)?;
            let began = Instant::now();
            match within(PART_TIMEOUT, self.io.remove_part(path, PART_BYTES)).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.is_busy_with_room() {
                let pause = sleep((began.elapsed() * PAUSE_FACTOR).clamp(PAUSE_MIN, PAUSE_MAX));
                self.stop_removals.run_until_cancelled(pause).await;
            }
            drop(turn);
        }
    }

    /// Stops removals from starting further parts, and waits for the part in progress.
    pub(in crate::store) async fn cease_removals(&self) {
        self.stop_removals.cancel();
        // No other removal waits for a permit now.
        drop(self.removals.acquire().await);
    }

    /// Deletes everything in the trash.
    pub(super) async fn empty_trash(&self) -> io::Result<()> {
        for name in within(PART_TIMEOUT, self.io.list(Path::new(TRASH))).await? {
            self.delete(&Path::new(TRASH).join(name)).await?;
        }
        Ok(())
    }
}
