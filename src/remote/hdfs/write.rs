//! Writes an extent: waits for deletions and a writer of its directory, then for a permit. Recovers
//! files whose append failed.
//!
//! A write runs in a task of its own. A caller may stop waiting (a hung NameNode), but the write
//! continues with its memory. Neither its files nor the memory are reused until it has ended.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::deletion_gate::Writing;
use super::writer::{HdfsWriter, Writers};
use super::{HdfsCore, HdfsShuffle, layout};
use crate::clock::{Instant, sleep, timeout};
use crate::runtime::Tasks;
use crate::store::{ExtentWrite, StoreError, StoreErrorKind};
use uniffle_base::sched::{Holder, Permit};
use uniffle_wire::types::PartitionId;

/// Interval at which a write that waits for a permit checks whether the file system is available.
const PERMIT_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between two attempts to close a torn file. It doubles up to the maximum, and attempts end
/// at the deadline.
const RECOVERY_PAUSE: Duration = Duration::from_millis(500);
const RECOVERY_PAUSE_MAX: Duration = Duration::from_secs(15);
const RECOVERY_DEADLINE: Duration = Duration::from_secs(3600);

impl HdfsCore {
    /// Writes one partition's blocks, and counts the result. `is_last` means that the process ends:
    /// a suspended file system is tried too.
    pub(super) async fn write_extent(
        &self,
        shuffle: &Arc<HdfsShuffle>,
        extent: ExtentWrite,
        is_last: bool,
    ) -> Result<(), StoreError> {
        shuffle.require_present()?;
        let bytes = extent.length;
        let metrics = &shuffle.remote.metrics;
        metrics.writes.inc();
        let result = self.write(shuffle, extent, is_last).await;
        match &result {
            Ok(()) => {
                metrics.successes.inc();
                metrics.written_bytes.inc_by(bytes);
                shuffle.written_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.metrics.used_bytes.inc_by(bytes);
            }
            Err(error) if error.kind == StoreErrorKind::Purged => {}
            Err(_) => metrics.failures.inc(),
        }
        result
    }

    /// Acquires the application's own resources first, and the shared permit last. A batch that
    /// waits for its own deletion or writer must not block other applications.
    async fn write(
        &self,
        shuffle: &Arc<HdfsShuffle>,
        extent: ExtentWrite,
        is_last: bool,
    ) -> Result<(), StoreError> {
        let lease = timeout(self.config.write_timeout, self.lease(shuffle, extent.partition)).await;
        let mut lease = lease.map_err(|late| StoreError::io(&shuffle.remote.authority, late.into()))??;
        let place = place(shuffle, is_last).await?;
        let bytes = extent.length;
        let (sender, result) = oneshot::channel();
        let (owned, tasks) = (Arc::clone(shuffle), self.tasks.clone());
        self.tasks.spawn("remote write", async move {
            let job = write_batch(&owned, &mut lease, &extent, &tasks);
            let result = tokio::select! {
                biased;
                () = tasks.cancelled() => Err(StoreError::new(StoreErrorKind::Unhealthy, owned.key.to_string())),
                result = job => result,
            };
            owned.remote.note(&result);
            drop((extent, lease, place));
            drop(sender.send(result));
        });
        let deadline = self.config.write_timeout + Duration::from_secs(bytes >> 20);
        match timeout(deadline, result).await {
            Ok(result) => result.unwrap_or_else(|gone| {
                Err(StoreError::io(&shuffle.remote.authority, io::Error::other(gone)))
            }),
            Err(late) => {
                let error = StoreError::io(&shuffle.remote.authority, io::Error::from(late));
                shuffle.remote.note(&Err::<(), _>(StoreError::io(
                    &shuffle.remote.authority,
                    io::ErrorKind::TimedOut.into(),
                )));
                Err(error)
            }
        }
    }

    /// Waits until the application may write and a writer of the partition's directory is free.
    async fn lease(&self, shuffle: &HdfsShuffle, partition: PartitionId) -> Result<WriterLease, StoreError> {
        let writing = shuffle.gate.write().await;
        shuffle.require_present()?;
        let writer = self.writers(shuffle, partition).take().await;
        Ok(WriterLease { writer, _writing: writing })
    }

    pub(super) fn writers(&self, shuffle: &HdfsShuffle, partition: PartitionId) -> Arc<Writers> {
        let (start, end) = shuffle.ranges.read().of(partition);
        let mut writers = shuffle.writers.lock();
        let create = || {
            let directory = layout::shuffle_directory(&shuffle.root, &shuffle.key);
            Writers::new(
                format!("{directory}/{start}-{end}"),
                Arc::clone(&self.server_id),
                shuffle.writers_max,
            )
        };
        Arc::clone(writers.entry((start, end)).or_insert_with(create))
    }
}

/// Acquires a permit to write. Unless `is_last`, fails if the file system is suspended meanwhile.
async fn place(shuffle: &HdfsShuffle, is_last: bool) -> Result<Permit, StoreError> {
    let remote = &shuffle.remote;
    let holder = Holder { app: Some(shuffle.key.app.clone()), weight: 1 };
    let mut waiting = pin!(remote.permits.acquire(&holder, 1));
    loop {
        if !is_last && !remote.is_available() {
            return Err(remote.suspended());
        }
        if let Ok(place) = timeout(PERMIT_POLL_INTERVAL, &mut waiting).await {
            if !is_last {
                remote.begin_attempt()?;
            }
            return Ok(place);
        }
    }
}

/// A writer on loan to one write, which may begin once it has a permit. The writer is returned
/// before the gate of its application opens.
#[derive(Debug)]
struct WriterLease {
    writer: HdfsWriter,
    _writing: Writing,
}

async fn write_batch(
    shuffle: &Arc<HdfsShuffle>,
    lease: &mut WriterLease,
    extent: &ExtentWrite,
    tasks: &Tasks,
) -> Result<(), StoreError> {
    shuffle.require_present()?;
    let result = lease.writer.write(&*shuffle.remote.fs, &extent.blocks, extent.payload()).await;
    for path in lease.writer.take_torn() {
        tasks.spawn("file recovery", recover(Arc::clone(shuffle), path, tasks.clone()));
    }
    result
}

/// Makes a file with published blocks readable again after a failed append. Until it is closed, its
/// last block may be unreadable, and the NameNode closes it only after an hour.
async fn recover(shuffle: Arc<HdfsShuffle>, path: String, tasks: Tasks) {
    let mut pause = RECOVERY_PAUSE;
    let deadline = Instant::now() + RECOVERY_DEADLINE;
    while shuffle.require_present().is_ok() && Instant::now() < deadline {
        match shuffle.remote.fs.recover(&path).await {
            Ok(true) => return,
            Err(error) if error.kind == StoreErrorKind::NotFound => return,
            Ok(false) => {}
            Err(error) => tracing::debug!(%path, %error, "cannot close a partially written file yet"),
        }
        tokio::select! {
            biased;
            () = tasks.cancelled() => return,
            () = sleep(pause) => {}
        }
        pause = (pause * 2).min(RECOVERY_PAUSE_MAX);
    }
    if shuffle.require_present().is_ok() {
        tracing::error!(
            %path,
            remote = %shuffle.remote.authority,
            "cannot close a partially written file; it may be unreadable"
        );
    }
}
