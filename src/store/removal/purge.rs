//! Purges and periodic maintenance.
//!
//! A purge marks the shuffle, is written to the metadata log, waits until none of its files is
//! being created, renames its directories into the trash and deletes them there. A removal that
//! fails or is cancelled stays queued, and the maintenance ([`LocalStore::maintain`]) retries it.

use std::collections::HashSet;
use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use prometheus::IntGaugeVec;

use super::deletion_queue::DetachedShuffle;
use crate::clock::{Instant, sleep};
use crate::log::within;
use crate::store::disk::config::NAME_TIMEOUT;
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::{APPS, LocalDisk, used_ratio};
use crate::store::disk::log_file::Log;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::disk::store::LocalStore;
use crate::store::{DiskCondition, DiskInfo};
use uniffle_io::Space;
use uniffle_wire::types::{AppId, ShuffleKey};

use crate::metrics::clamped;

impl LocalStore {
    /// Stops removals before a hand-over: starts no further part, and waits for those in progress.
    /// The purges are logged, so the successor removes the rest.
    pub async fn cease_removals(&self) {
        join_all(self.core.disks.iter().map(|disk| disk.cease_removals())).await;
    }

    /// Processes the deletion queue of a disk, and removes the directory of `app` if it is empty.
    /// Returns at once if enough workers already do that. A failed removal stays queued.
    async fn run_deletes(&self, disk: &LocalDisk, app: Option<&AppId>) {
        // A purge that is not ready yet processes the queue itself later.
        let is_ready =
            |shuffle: &DiskShuffle| shuffle.forgotten_bytes(disk).is_some() && shuffle.purge_is_logged();
        let Some(mut work) = self.deletions[disk.index].begin(app) else { return };
        while let Some(mut emptied) = work.take(is_ready) {
            while let Some(shuffle) = work.next() {
                if disk.stop_removals.is_cancelled() {
                    return;
                }
                // Removals on an unhealthy disk hang, so they wait for a successful probe.
                let is_removed = disk.is_healthy() && self.try_remove(&shuffle, disk).await;
                if is_removed {
                    self.core.metrics.deleted_bytes.inc_by(shuffle.forgotten_bytes(disk).unwrap_or(0));
                    emptied.insert(shuffle.key.app.clone());
                }
                work.done(is_removed);
            }
            emptied.retain(|app| !self.shuffles.iter().any(|it| it.key().app == *app));
            for app in emptied {
                self.remove_app_directory(disk, &app).await;
            }
        }
    }

    async fn try_remove(&self, shuffle: &DiskShuffle, disk: &LocalDisk) -> bool {
        let result = self.remove(shuffle, disk).await;
        if let Err(error) = &result
            && !disk.stop_removals.is_cancelled()
        {
            tracing::warn!(
                disk = %disk.label,
                shuffle = %shuffle.key,
                error = %error,
                "deletion incomplete; retrying"
            );
            self.core.metrics.deletion_failed.inc();
            disk.note(error);
        }
        result.is_ok()
    }

    async fn remove(&self, shuffle: &DiskShuffle, disk: &LocalDisk) -> io::Result<()> {
        let started = Instant::now();
        // Waits for files that are being created. Each step has a deadline, and no further step
        // begins. Removals on other disks do not wait for this one.
        drop(shuffle.gate.write().await);
        if let Some(trash) = disk.discard(&shuffle.directory).await? {
            disk.delete(&trash).await?;
            self.core.metrics.deleted_shuffle_directories.inc();
        }
        let seconds = started.elapsed().as_secs_f64();
        self.core.metrics.delete_duration.with_label_values(&[disk.label.as_str()]).observe(seconds);
        Ok(())
    }

    /// Removes the directory of an application. On an unhealthy disk a later sweep removes it.
    async fn remove_app_directory(&self, disk: &LocalDisk, app: &AppId) {
        if !disk.is_healthy() {
            return;
        }
        let directory = Path::new(APPS).join(app.as_str());
        let removal = disk.io.remove_dir(&directory);
        // The directory may be absent, or not empty because the application registered again.
        let removed = within(NAME_TIMEOUT, removal).await;
        if let Some(error) = removed.err().filter(|error| error.kind() == io::ErrorKind::TimedOut) {
            disk.note(&error);
        }
    }

    /// Purges a shuffle without removing its files: [`LocalStore::remove_files`] does that once the
    /// returned value is dropped. Synchronous, so that the caller can remove the shuffle elsewhere
    /// in the same step, and a cancelled purge is atomic. Returns `None` if it is unknown.
    pub fn forget_shuffle(&self, key: &ShuffleKey) -> Option<DetachedShuffle> {
        // Added while the shuffle is still known. A sweep lists known shuffles first, and must find
        // it in one of the two.
        let pending = |_: &ShuffleKey, shuffle: &Arc<DiskShuffle>| {
            self.pending_purges.add(Arc::clone(shuffle));
            true
        };
        let (_, shuffle) = self.shuffles.remove_if(key, pending)?;
        let detached = DetachedShuffle::new(&self.core, Arc::clone(&shuffle));
        for disk in shuffle.touched_disks() {
            self.deletions[disk].add(Arc::clone(&shuffle));
        }
        Some(detached)
    }

    /// Drops a shuffle from memory. Its files remain for a later process. Returns `None` if it is
    /// unknown.
    pub fn leave(&self, key: &ShuffleKey) -> Option<DetachedShuffle> {
        let shuffle = self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle))?;
        // Inserted while the shuffle is still known, because a sweep lists known shuffles first.
        self.kept_incarnations.lock().insert(shuffle.incarnation);
        self.shuffles.remove(key);
        Some(DetachedShuffle::new(&self.core, shuffle))
    }

    /// Removes the files of all purged shuffles, and the directory of `app` if it is empty.
    pub async fn remove_files(&self, app: &AppId) {
        self.note_purges().await;
        let deletes = self.core.disks.iter().map(|disk| self.run_deletes(disk, Some(app)));
        join_all(deletes.collect::<Vec<_>>()).await;
    }

    /// Measures space, retries removals, closes idle descriptors, and sets the gauges. In a step,
    /// disks do not wait for each other.
    pub async fn maintain_once(&self) {
        join_all(self.core.disks.iter().map(|disk| self.measure(disk)).collect::<Vec<_>>()).await;
        self.metadata.settle().await;
        join_all(self.core.disks.iter().map(|disk| self.clean(disk)).collect::<Vec<_>>()).await;
        self.tidy();
    }

    async fn measure(&self, disk: &LocalDisk) {
        // The probe checks whether a hung disk is attached.
        if disk.condition() != DiskCondition::Hung && disk.require_attached().await.is_err() {
            return;
        }
        if let Err(error) = disk.measure().await {
            tracing::warn!(disk = %disk.label, error = %error, "cannot measure free space");
            disk.note(&error);
        }
        if disk.refuses() {
            self.probe_disk(disk).await;
        }
    }

    /// Empties the trash, and removes queued shuffles and empty data logs. Takes as long as the
    /// file system needs.
    async fn clean(&self, disk: &LocalDisk) {
        if disk.stop_removals.is_cancelled() {
            return;
        }
        if disk.is_healthy()
            && let Err(error) = disk.empty_trash().await
        {
            tracing::warn!(disk = %disk.label, error = %error, "cannot empty the trash");
            self.core.metrics.deletion_failed.inc();
        }
        if self.has_purges_to_note() {
            self.note_purges().await;
        }
        if disk.is_healthy()
            && let Err(error) = self.remove_left_logs(disk).await
        {
            tracing::warn!(disk = %disk.label, error = %error, "data log without extents cannot be removed; retrying later");
        }
        self.run_deletes(disk, None).await;
    }

    fn tidy(&self) {
        self.core.files.close_idle();
        self.core.set_gauges();
    }

    /// Sets the gauges to their current values, between two maintenance rounds.
    pub fn refresh_metrics(&self) {
        self.core.set_gauges();
    }

    /// Writes and reads back random bytes on every disk. An unhealthy disk that succeeds takes
    /// batches again.
    pub async fn probe(&self) {
        join_all(self.core.disks.iter().map(|disk| self.probe_disk(disk)).collect::<Vec<_>>()).await;
        self.core.set_gauges();
    }

    async fn probe_disk(&self, disk: &LocalDisk) {
        if let Err(error) = disk.probe(self.core.config.direct_io).await {
            tracing::warn!(disk = %disk.label, error = %error, "disk check failed");
        }
    }

    /// Verifies on healthy disks that all files of shuffles exist, and removes directories that
    /// belong to no shuffle: a call that hung during a purge may have created them afterwards.
    pub async fn sweep(&self) {
        join_all(self.core.disks.iter().map(|disk| self.sweep_sound(disk)).collect::<Vec<_>>()).await;
    }

    async fn sweep_sound(&self, disk: &LocalDisk) {
        if disk.is_healthy()
            && let Err(error) = self.look_for_files(disk).await
        {
            tracing::warn!(disk = %disk.label, %error, "cannot verify that all data files exist");
        }
        if disk.is_healthy()
            && !disk.has_unread()
            && let Err(error) = self.sweep_disk(disk).await
        {
            tracing::warn!(
                disk = %disk.label,
                error = %error,
                "cannot delete leftover directories; retrying"
            );
        }
    }

    /// Finds files of shuffles that other programs have removed, and marks their extents as lost.
    async fn look_for_files(&self, disk: &LocalDisk) -> io::Result<()> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|shuffle| Arc::clone(&*shuffle)).collect();
        for shuffle in shuffles.iter().filter(|shuffle| shuffle.found(disk).is_some()) {
            let must_exist = |log: &Arc<Log>| log.disk.index == disk.index && log.must_exist();
            // Collected before the directory is listed, so that files created meanwhile are not
            // missed.
            let mut missing: Vec<_> = shuffle.logs().into_iter().filter(must_exist).collect();
            if missing.is_empty() {
                continue;
            }
            let listed = within(NAME_TIMEOUT, disk.io.list(&shuffle.directory)).await;
            let names = match listed {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
                listed => listed?,
            };
            let is_there = |log: &Log| {
                let name = log.path.file_name().unwrap_or_default();
                names.iter().any(|it| it.as_str() == name)
            };
            // Files that this worker removes are not missing.
            missing.retain(|log| !is_there(log) && log.must_exist() && !shuffle.is_purged());
            if missing.is_empty() {
                continue;
            }
            disk.require_attached().await?;
            missing.iter().for_each(|log| log.set_vanished());
            self.writer.lose_vanished(shuffle);
        }
        Ok(())
    }

    async fn sweep_disk(&self, disk: &LocalDisk) -> io::Result<()> {
        let mut found = Vec::new();
        let apps = within(NAME_TIMEOUT, disk.io.list(Path::new(APPS))).await?;
        for app in &apps {
            let app = Path::new(APPS).join(app);
            for name in within(NAME_TIMEOUT, disk.io.list(&app)).await.unwrap_or_default() {
                let incarnation = name.rsplit_once('.').and_then(|(_, text)| text.parse::<u64>().ok());
                found.extend(incarnation.map(|incarnation| (incarnation, app.join(name))));
            }
        }
        // Directories are listed before shuffles are looked up. A directory is created only for a
        // registered shuffle, so one without a shuffle now never has one again. Files left for a
        // later process stay. Files of a purged shuffle stay until the purge is logged. Otherwise a
        // start would miss the files of a shuffle that it knows.
        let mut alive: HashSet<u64> = self.shuffles.iter().map(|shuffle| shuffle.incarnation).collect();
        alive.extend(self.pending_purges.incarnations());
        alive.extend(self.kept_incarnations.lock().iter());
        for (_, path) in found.iter().filter(|(incarnation, _)| !alive.contains(incarnation)) {
            // A file with such a name is not ours.
            let listed = within(NAME_TIMEOUT, disk.io.list(path)).await;
            if !listed.is_err_and(|error| error.kind() == io::ErrorKind::NotADirectory) {
                disk.discard(path).await?;
            }
        }
        let idle = |app: &&String| !self.shuffles.iter().any(|it| it.key().app.as_str() == app.as_str());
        for app in apps.iter().filter(idle) {
            // A directory that is not empty stays.
            within(NAME_TIMEOUT, disk.io.remove_dir(&Path::new(APPS).join(app))).await.ok();
        }
        Ok(())
    }

    /// Watches and cleans every disk at its intervals, until `stop`. Disks do not wait for each
    /// other, and probes do not wait for deletions.
    pub async fn maintain(self: Arc<Self>, stop: impl Future<Output = ()> + Send) {
        let watching = self.core.disks.iter().map(|disk| self.keep_watching(disk));
        let cleaning = self.core.disks.iter().map(|disk| self.keep_cleaning(disk));
        let (watching, cleaning) =
            (join_all(watching.collect::<Vec<_>>()), join_all(cleaning.collect::<Vec<_>>()));
        tokio::select! {
            biased;
            () = stop => {}
            _ = watching => {}
            _ = cleaning => {}
            () = self.keep_tidying() => {}
        }
    }

    /// Returns the shorter of the two intervals, so that probes are in time even if they are more
    /// frequent than measurements.
    fn pause(&self) -> Duration {
        let config = &self.core.config;
        config.space_interval.min(config.probe_interval)
    }

    async fn keep_watching(&self, disk: &LocalDisk) {
        let mut last_probe = Instant::now();
        loop {
            self.measure(disk).await;
            // A disk that hangs or is detached serves no reads: it is probed as soon as possible.
            let is_silent = matches!(disk.condition(), DiskCondition::Hung | DiskCondition::Detached);
            if is_silent || last_probe.elapsed() >= self.core.config.probe_interval {
                self.probe_disk(disk).await;
                last_probe = Instant::now();
            }
            sleep(self.pause()).await;
        }
    }

    /// Checks all data directories. Returns those whose paths no longer lead to them.
    pub async fn detached(&self) -> Vec<String> {
        let looks = self.core.disks.iter().map(async |disk| {
            let is_detached = disk.require_attached().await.is_err();
            is_detached.then(|| disk.label.clone())
        });
        join_all(looks.collect::<Vec<_>>()).await.into_iter().flatten().collect()
    }

    async fn keep_cleaning(&self, disk: &LocalDisk) {
        let mut last_sweep = Instant::now();
        loop {
            self.clean(disk).await;
            if last_sweep.elapsed() >= self.core.config.probe_interval {
                self.sweep_sound(disk).await;
                last_sweep = Instant::now();
            }
            sleep(self.pause()).await;
        }
    }

    async fn keep_tidying(&self) {
        loop {
            self.metadata.settle().await;
            self.tidy();
            sleep(self.pause()).await;
        }
    }
}

impl DiskCore {
    #[expect(clippy::cast_precision_loss, reason = "a ratio for a gauge")]
    pub(in crate::store) fn set_gauges(&self) {
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
        self.metrics.extent_list_bytes.set(clamped(self.extents.used()));
        self.metrics.index_cache_bytes.set(clamped(self.records.used_bytes()));
    }

    #[expect(clippy::cast_precision_loss, reason = "a ratio for a gauge")]
    fn set_disk_gauges(&self, label: &str, info: &DiskInfo) {
        let (metrics, label) = (&self.metrics, [label]);
        let set = |gauge: &IntGaugeVec, value: u64| {
            gauge.with_label_values(&label).set(clamped(value));
        };
        let (total_bytes, free_bytes) = (info.total_bytes, info.free_bytes);
        // Java's convention: 0 = writable.
        set(&metrics.is_writable, u64::from(info.condition != DiskCondition::Healthy));
        set(&metrics.is_timeout, u64::from(info.condition == DiskCondition::Hung));
        set(&metrics.disk_is_healthy, u64::from(!info.is_healthy()));
        set(&metrics.disk_faults, info.faults);
        set(&metrics.disk_is_corrupted, u64::from(info.condition == DiskCondition::Broken));
        set(&metrics.disk_is_read_only, u64::from(info.condition == DiskCondition::ReadOnly));
        set(&metrics.disk_is_detached, u64::from(info.condition == DiskCondition::Detached));
        set(&metrics.disk_capacity, total_bytes);
        set(&metrics.disk_used, total_bytes.saturating_sub(free_bytes));
        set(&metrics.disk_service_used, info.used_bytes);
        let service_ratio = if total_bytes == 0 { 0.0 } else { info.used_bytes as f64 / total_bytes as f64 };
        metrics.disk_service_used_ratio.with_label_values(&label).set(service_ratio);
        let ratio = used_ratio(Space { total_bytes, free_bytes, ..Space::default() });
        metrics.disk_used_ratio.with_label_values(&label).set(ratio);
    }
}
