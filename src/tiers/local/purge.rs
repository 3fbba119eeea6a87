//! Removing shuffles, and what the store does from time to time.
//!
//! A purge marks the shuffle, is written to the metadata log, waits until nobody is creating a file, renames its directories into the trash and
//! deletes them there. What cannot be removed now (a hung disk, a cancelled purge) stays on a list and is tried again
//! by [`LocalStore::maintain_once`].

use std::collections::HashSet;
use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::Arc;

use futures::future::join_all;
use prometheus::IntGaugeVec;
use tokio::time::{Instant, sleep};

use super::disk::{APPS, LocalDisk, used_ratio, within};
use super::shuffle::{NO_LOG, Shuffle};
use super::{Core, LocalStore};
use crate::tiers::{DiskCondition, DiskInfo};
use uniffle_io::Space;
use uniffle_wire::types::{AppId, ShuffleKey};

use crate::metrics::clamped;

/// A directory that is to be removed.
#[derive(Debug)]
pub(super) struct PendingDelete {
    shuffle: Arc<Shuffle>,
    disk: Arc<LocalDisk>,
    /// Payload that goes with it.
    bytes: u64,
}

impl Core {
    /// Removes what was to be deleted before the call; failures stay on the list. Returns the apps of which something is
    /// gone, by disk.
    async fn run_pending_deletes(&self) -> HashSet<(usize, AppId)> {
        self.note_purges().await;
        let batch = std::mem::take(&mut *self.pending_deletes.lock());
        let mut work = Retry { core: self, left: batch };
        // One disk that hangs must not keep the others from being cleaned: every disk works through its own list.
        let removals = self.disks.iter().map(|disk| {
            let here = work.left.iter().filter(|it| Arc::ptr_eq(&it.disk, disk));
            self.remove_all(disk, here.map(|it| (Arc::clone(&it.shuffle), it.bytes)).collect())
        });
        let failed: Vec<_> = join_all(removals.collect::<Vec<_>>()).await.into_iter().flatten().collect();
        let at = |it: &PendingDelete| (it.disk.index, it.shuffle.key.clone());
        let still_there: HashSet<_> = failed.iter().map(at).collect();
        let gone = work.left.iter().map(at).filter(|it| !still_there.contains(it));
        let apps = gone.map(|(disk, key)| (disk, key.app)).collect();
        work.left = failed;
        apps
    }

    /// Removes shuffles from one disk; returns those that are still there.
    async fn remove_all(
        &self,
        disk: &Arc<LocalDisk>,
        shuffles: Vec<(Arc<Shuffle>, u64)>,
    ) -> Vec<PendingDelete> {
        let mut left = Vec::new();
        for (shuffle, bytes) in shuffles {
            // Removals on a bad disk hang: they wait for a probe that succeeds.
            let may_be_removed = disk.is_healthy() && shuffle.purge_is_noted();
            let removed = may_be_removed && self.try_remove(&shuffle, disk).await;
            if removed {
                self.metrics.deleted_bytes.inc_by(bytes);
            } else {
                left.push(PendingDelete { shuffle, disk: Arc::clone(disk), bytes });
            }
        }
        left
    }

    async fn try_remove(&self, shuffle: &Shuffle, disk: &LocalDisk) -> bool {
        let result = self.remove(shuffle, disk).await;
        if let Err(error) = &result {
            tracing::warn!(disk = %disk.label, shuffle = %shuffle.key, error = %error, "removal failed, will be tried again");
            self.metrics.deletion_failed.inc();
            disk.note(error);
        }
        result.is_ok()
    }

    async fn remove(&self, shuffle: &Shuffle, disk: &LocalDisk) -> io::Result<()> {
        let started = Instant::now();
        let trash = {
            // Whoever is creating a file of it ends first (its steps have deadlines); nobody begins any more.
            let _gate = shuffle.gate.write().await;
            disk.discard(&shuffle.directory).await?
        };
        if let Some(trash) = trash {
            disk.delete(&trash, self.config.purge_timeout).await?;
            self.metrics.deleted_shuffle_directories.inc();
        }
        let seconds = started.elapsed().as_secs_f64();
        self.metrics.delete_duration.with_label_values(&[disk.label.as_str()]).observe(seconds);
        Ok(())
    }
}

/// Directories that go back on the list when dropped, so that a cancelled purge forgets nothing.
struct Retry<'a> {
    core: &'a Core,
    left: Vec<PendingDelete>,
}

impl Drop for Retry<'_> {
    fn drop(&mut self) {
        self.core.pending_deletes.lock().append(&mut self.left);
    }
}

impl LocalStore {
    /// Forgets a shuffle and removes its files. From the first poll on it is unknown: writes under way end with
    /// `Purged` and leave nothing behind. An unknown shuffle is fine.
    pub async fn purge(&self, key: &ShuffleKey) {
        if let Some((_, shuffle)) = self.shuffles.remove(key) {
            self.queue_deletes(shuffle);
            self.run_pending_deletes().await;
        }
    }

    /// Forgets all shuffles of an app and removes their files and the app's empty directories.
    pub async fn purge_app(&self, app: &AppId) {
        let keys: Vec<_> =
            self.shuffles.iter().filter(|it| it.key().app == *app).map(|it| it.key().clone()).collect();
        for key in keys {
            if let Some((_, shuffle)) = self.shuffles.remove(&key) {
                self.queue_deletes(shuffle);
            }
        }
        self.remove_files(app).await;
    }

    /// Removes what was to be deleted before the call, and the directories of apps that have no shuffle any more. Whoever
    /// removes the last shuffle's files does it, which may be another app's purge that found them on the list.
    async fn run_pending_deletes(&self) {
        let mut emptied = self.core.run_pending_deletes().await;
        emptied.retain(|(_, app)| !self.shuffles.iter().any(|it| it.key().app == *app));
        let removals = emptied.iter().map(|(disk, app)| self.remove_app_directory(*disk, app));
        join_all(removals.collect::<Vec<_>>()).await;
    }

    async fn remove_app_directory(&self, disk: usize, app: &AppId) {
        let directory = Path::new(APPS).join(app.as_str());
        let removal = self.core.disks[disk].io.remove_dir(&directory);
        // Absent, or not empty because the app registered again: both are fine.
        within(self.core.config.name_timeout, removal).await.ok();
    }

    /// Forgets a shuffle at once, as [`LocalStore::purge`] does; its files stay until [`LocalStore::remove_files`].
    /// Synchronous, so that a caller can do it together with forgetting the shuffle elsewhere.
    pub fn forget_shuffle(&self, key: &ShuffleKey) {
        if let Some((_, shuffle)) = self.shuffles.remove(key) {
            self.queue_deletes(shuffle);
        }
    }

    /// Forgets a shuffle whose files stay where they are, for a later process.
    pub fn leave(&self, key: &ShuffleKey) {
        if let Some((_, shuffle)) = self.shuffles.remove(key) {
            self.mark_forgotten(&shuffle);
        }
    }

    /// Removes the files of all forgotten shuffles, and the directory of `app` if nothing is left in it.
    pub async fn remove_files(&self, app: &AppId) {
        self.run_pending_deletes().await;
        let removals = (0..self.core.disks.len()).map(|disk| self.remove_app_directory(disk, app));
        join_all(removals.collect::<Vec<_>>()).await;
    }

    /// Marks a shuffle and puts its directories on the list. Synchronous: a cancelled purge has happened or has not.
    fn queue_deletes(&self, shuffle: Arc<Shuffle>) {
        let bytes = self.mark_forgotten(&shuffle);
        let pending = shuffle.touched_disks().into_iter().map(|index| {
            let disk = Arc::clone(&self.core.disks[index]);
            PendingDelete { shuffle: Arc::clone(&shuffle), disk, bytes: bytes[index] }
        });
        self.core.pending_deletes.lock().extend(pending);
        self.core.pending_purges.lock().push(shuffle);
    }

    /// Nothing of it is readable or writable from now on. Returns the payload that it had, by disk.
    fn mark_forgotten(&self, shuffle: &Shuffle) -> Vec<u64> {
        let extents = shuffle.mark_purged();
        let known = extents.iter().filter(|extent| extent.index_log != NO_LOG).count();
        self.core.metrics.extents.sub(clamped(known));
        self.core.records.forget(extents.iter().map(|extent| shuffle.records_key(extent)));
        let logs = shuffle.logs();
        let mut bytes = vec![0; self.core.disks.len()];
        for extent in extents.iter().filter(|extent| extent.index_log != NO_LOG) {
            if let Some(log) = logs.get(usize::from(extent.data_log)) {
                bytes[log.disk.index] += extent.length;
            }
        }
        for log in logs {
            self.core.files.forget(&log);
        }
        bytes
    }

    /// Measures space, removes what is still to be removed, closes idle descriptors, and sets the gauges. Disks do not wait for each other.
    pub async fn maintain_once(&self) {
        let disks = self.core.disks.iter().map(|disk| async {
            if let Err(error) = disk.measure().await {
                tracing::warn!(disk = %disk.label, error = %error, "space cannot be measured");
                disk.note(&error);
            }
            disk.forgive_refusal();
            if !disk.is_healthy() {
                return;
            }
            if let Err(error) = disk.empty_trash(self.core.config.purge_timeout).await {
                tracing::warn!(disk = %disk.label, error = %error, "trash cannot be emptied");
                self.core.metrics.deletion_failed.inc();
            }
        });
        join_all(disks.collect::<Vec<_>>()).await;
        self.core.log().settle().await;
        self.run_pending_deletes().await;
        self.core.files.close_idle(self.core.config.descriptor_idle_timeout);
        self.core.set_gauges();
    }

    /// Sets the gauges to what holds now, for whoever reads them between two maintenance rounds.
    pub fn refresh_metrics(&self) {
        self.core.set_gauges();
    }

    /// Writes and reads back random bytes on every disk: a sick one that succeeds takes batches again.
    pub async fn probe(&self) {
        let direct = self.core.config.direct_io;
        let probes = self.core.disks.iter().map(|disk| async move {
            if let Err(error) = disk.probe(direct).await {
                tracing::warn!(disk = %disk.label, error = %error, "probe failed");
            }
        });
        join_all(probes.collect::<Vec<_>>()).await;
        self.core.set_gauges();
    }

    /// Removes directories of ours that belong to no shuffle: what a call that hung through a purge made afterwards.
    pub async fn sweep(&self) {
        let sweepable = |disk: &&Arc<LocalDisk>| disk.is_healthy() && !disk.is_unreadable();
        let sweeps = self.core.disks.iter().filter(sweepable).map(|disk| async move {
            if let Err(error) = self.sweep_disk(disk).await {
                tracing::warn!(disk = %disk.label, error = %error, "sweep failed");
            }
        });
        join_all(sweeps.collect::<Vec<_>>()).await;
    }

    async fn sweep_disk(&self, disk: &LocalDisk) -> io::Result<()> {
        let deadline = self.core.config.name_timeout;
        let mut found = Vec::new();
        let apps = within(deadline, disk.io.list(Path::new(APPS))).await?;
        for app in &apps {
            let app = Path::new(APPS).join(app);
            for name in within(deadline, disk.io.list(&app)).await.unwrap_or_default() {
                let incarnation = name.rsplit_once('.').and_then(|(_, text)| text.parse::<u64>().ok());
                found.extend(incarnation.map(|incarnation| (incarnation, app.join(name))));
            }
        }
        // Listed first, looked up second: a directory is only made for a shuffle that is registered, so one without
        // a shuffle now will never have one again.
        let alive: HashSet<u64> = self.shuffles.iter().map(|shuffle| shuffle.incarnation).collect();
        for (_, path) in found.iter().filter(|(incarnation, _)| !alive.contains(incarnation)) {
            disk.discard(path).await?;
        }
        let idle = |app: &&String| !self.shuffles.iter().any(|it| it.key().app.as_str() == app.as_str());
        for app in apps.iter().filter(idle) {
            // One that is not empty stays.
            within(deadline, disk.io.remove_dir(&Path::new(APPS).join(app))).await.ok();
        }
        Ok(())
    }

    /// [`LocalStore::maintain_once`], [`LocalStore::probe`] and [`LocalStore::sweep`] at their intervals, until `stop`.
    pub async fn maintain(self: Arc<Self>, stop: impl Future<Output = ()>) {
        let looping = async {
            let mut last_probe = Instant::now();
            loop {
                self.maintain_once().await;
                if last_probe.elapsed() >= self.core.config.probe_interval {
                    self.probe().await;
                    self.sweep().await;
                    last_probe = Instant::now();
                }
                // A probe is never later than it was asked for, also when it is wanted more often than space is measured.
                let config = &self.core.config;
                sleep(config.space_interval.min(config.probe_interval)).await;
            }
        };
        tokio::select! {
            biased;
            () = stop => {}
            () = looping => {}
        }
    }
}

impl Core {
    #[expect(clippy::cast_precision_loss, reason = "a ratio for a gauge")]
    pub(super) fn set_gauges(&self) {
        let (mut total, mut free, mut service, mut sick) = (0u64, 0u64, 0u64, 0);
        let mut file_systems = Vec::new();
        for disk in &self.disks {
            let info = disk.info();
            self.set_disk_gauges(&disk.label, &info);
            let (total_bytes, free_bytes, file_system) =
                (info.total_bytes, info.free_bytes, info.file_system);
            sick += i64::from(!info.is_healthy());
            service += info.used_bytes;
            // Two directories on one file system share its space.
            if !file_systems.contains(&file_system) {
                file_systems.push(file_system);
                total += total_bytes;
                free += free_bytes;
            }
        }
        self.metrics.dirs_total.set(clamped(self.disks.len() as u64 + self.disks_refused));
        self.metrics.dirs_corrupted.set(sick + clamped(self.disks_refused));
        self.metrics.total_space.set(clamped(total));
        self.metrics.whole_disk_used.set(clamped(total.saturating_sub(free)));
        self.metrics.service_used.set(clamped(service));
        self.metrics.used_bytes.set(clamped(service));
        self.metrics.used_ratio.set(if total == 0 { 0.0 } else { 1.0 - free as f64 / total as f64 });
        self.metrics.open_files.set(clamped(self.files.len() as u64));
        self.metrics.index_cache_bytes.set(clamped(self.records.used_bytes()));
    }

    #[expect(clippy::cast_precision_loss, reason = "a ratio for a gauge")]
    fn set_disk_gauges(&self, label: &str, info: &DiskInfo) {
        let (metrics, label) = (&self.metrics, [label]);
        let set = |gauge: &IntGaugeVec, value: u64| {
            gauge.with_label_values(&label).set(clamped(value));
        };
        let (total_bytes, free_bytes, file_system) = (info.total_bytes, info.free_bytes, info.file_system);
        // Java's convention: 0 = writable.
        set(&metrics.is_writable, u64::from(info.condition != DiskCondition::Healthy));
        set(&metrics.is_timeout, u64::from(info.condition == DiskCondition::Hung));
        set(&metrics.disk_is_healthy, u64::from(!info.is_healthy()));
        set(&metrics.disk_is_corrupted, u64::from(info.condition == DiskCondition::Broken));
        set(&metrics.disk_capacity, total_bytes);
        set(&metrics.disk_used, total_bytes.saturating_sub(free_bytes));
        set(&metrics.disk_service_used, info.used_bytes);
        let service_ratio = if total_bytes == 0 { 0.0 } else { info.used_bytes as f64 / total_bytes as f64 };
        metrics.disk_service_used_ratio.with_label_values(&label).set(service_ratio);
        let ratio = used_ratio(Space { total_bytes, free_bytes, file_system });
        metrics.disk_used_ratio.with_label_values(&label).set(ratio);
    }
}
