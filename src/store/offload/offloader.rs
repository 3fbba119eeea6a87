//! Runs offloads that the policy selects, one shuffle at a time, and reports the progress of a
//! drain.
//!
//! While the object store fails, nothing is offloaded. The disks continue to take and serve data.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::pass::PassResult;
use super::policy::{self, DiskView, OffloadCandidate, ShuffleView};
use super::shuffle::TieredShuffle;
use super::tier::OffloadTier;
use crate::clock::sleep;
use crate::metrics::clamped;
use crate::store::object::Uploads;
use crate::store::{DiskInfo, DrainBacklog, StoreError, StoreErrorKind, TierUsage};

/// Interval of checks while there is nothing to offload or the store fails.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl OffloadTier {
    /// Offloads selected data, forever.
    pub(super) async fn run_offload(&self) {
        loop {
            let has_offloaded = match self.next() {
                Some((wanted, shuffle)) if self.object.is_worth_trying() => self.run(wanted, &shuffle).await,
                _ => false,
            };
            self.record_drained().await;
            if !has_offloaded {
                tokio::select! {
                    () = sleep(CHECK_INTERVAL) => {}
                    () = self.wake.notified() => {}
                }
            }
        }
    }

    /// Returns the data to be offloaded now, or `None` if there is none.
    pub(super) fn next(&self) -> Option<(OffloadCandidate, Arc<TieredShuffle>)> {
        let under_pressure = self.update_pressure();
        let shuffles: Vec<Arc<TieredShuffle>> = self.shuffles.iter().map(|it| Arc::clone(&*it)).collect();
        let is_draining = self.is_draining.load(Ordering::Acquire);
        if !is_draining
            && !under_pressure.contains(&true)
            && shuffles.iter().all(|it| it.cold_bytes.load(Ordering::Relaxed) == 0)
        {
            return None;
        }
        let views: Vec<ShuffleView> = shuffles.iter().map(|shuffle| self.view(shuffle)).collect();
        let wanted = policy::next(&views, &under_pressure, self.object.segment_bytes(), is_draining)?;
        let (OffloadCandidate::Oldest(at) | OffloadCandidate::Cold(at)) = wanted;
        Some((wanted, Arc::clone(&shuffles[at])))
    }

    fn update_pressure(&self) -> Vec<bool> {
        let mut under_pressure = self.under_pressure.lock();
        let disks = self.local.disks();
        under_pressure.resize(disks.len(), false);
        let views: Vec<DiskView> =
            disks.iter().zip(&*under_pressure).map(|(disk, was)| view_of(disk, *was)).collect();
        *under_pressure = policy::under_pressure(&views, self.settings.watermarks);
        self.metrics.disks_under_pressure.set(clamped(under_pressure.iter().filter(|it| **it).count()));
        under_pressure.clone()
    }

    fn view(&self, shuffle: &TieredShuffle) -> ShuffleView {
        shuffle.forget_old_exclusions();
        let bytes = shuffle.local.usage().bytes;
        let is_stuck = shuffle.is_stuck(bytes);
        ShuffleView {
            incarnation: shuffle.local.incarnation(),
            on_disks: self.local.occupied(&shuffle.local),
            movable_bytes: if is_stuck { 0 } else { bytes },
            cold_bytes: shuffle.cold_bytes.load(Ordering::Relaxed),
            is_unknown: !shuffle.is_known(),
            last_failure: shuffle.last_failure(),
        }
    }

    /// Offloads, and logs the first of consecutive errors of a shuffle. Returns whether the next
    /// check should follow at once: something was offloaded or made known to the store, or the
    /// shuffle was purged.
    pub(super) async fn run(&self, wanted: OffloadCandidate, shuffle: &Arc<TieredShuffle>) -> bool {
        match self.offload_candidate(wanted, shuffle).await {
            Ok(has_offloaded) => {
                shuffle.note_offload(false);
                has_offloaded
            }
            Err(error) if error.kind == StoreErrorKind::Purged => true,
            Err(error) => {
                self.metrics.failures.inc();
                if shuffle.note_offload(true) {
                    tracing::warn!(shuffle = %shuffle.key, %error, "cannot offload data to the object store; it stays on the disks, retrying later");
                }
                false
            }
        }
    }

    /// Offloads the selected data of a shuffle. Returns false if nothing was offloaded or made
    /// known to the store.
    ///
    /// # Errors
    /// An error of a disk or of the store. Data offloaded before the error stays offloaded.
    pub(super) async fn offload_candidate(
        &self,
        wanted: OffloadCandidate,
        shuffle: &Arc<TieredShuffle>,
    ) -> Result<bool, StoreError> {
        let _pass = self.pass_lock.lock().await;
        let is_new = !shuffle.is_known();
        let before = shuffle.local.usage().bytes;
        let is_cold = matches!(wanted, OffloadCandidate::Cold(_));
        let cold = is_cold.then(|| shuffle.take_cold());
        let excluded = shuffle.excluded();
        let chosen = match &cold {
            None => self.local.oldest(&shuffle.local, self.settings.pass_bytes, excluded).await,
            Some(cold) => {
                let partitions = cold.partitions.iter().copied().collect();
                self.local.all_of(&shuffle.local, partitions, excluded).await
            }
        };
        self.metrics.passes.inc();
        let mut result = self.run_pass(shuffle, chosen).await?;
        if !is_cold && result == PassResult::default() {
            // Immovable data may be as much as a pass takes, so all data is tried once.
            let chosen = self.local.oldest(&shuffle.local, u64::MAX, shuffle.excluded()).await;
            result = self.run_pass(shuffle, chosen).await?;
        }
        if let Some(cold) = cold {
            cold.done();
        }
        if result.bytes > 0 {
            let (bytes, objects) = (result.bytes, result.objects);
            tracing::info!(shuffle = %shuffle.key, bytes, objects, "offloaded from local disks to the object store");
        } else if !result.has_unreadable && !is_cold {
            shuffle.set_stuck(before);
        }
        Ok(result.bytes > 0 || is_new)
    }

    /// Begins a drain, which moves everything. Returns its progress.
    pub(super) fn begin_drain(&self) -> DrainBacklog {
        self.is_draining.store(true, Ordering::Release);
        self.wake.notify_one();
        self.drain_progress()
    }

    /// Returns how much data another machine would not find. During a drain at least one shuffle is
    /// counted until the store has a record that it has everything.
    pub(super) fn drain_progress(&self) -> DrainBacklog {
        if !self.local.has_disks() {
            return DrainBacklog::default();
        }
        let mut remaining = self.count_remaining();
        let is_draining = self.is_draining.load(Ordering::Acquire);
        // The store may not know yet that a shuffle has ended.
        let log = self.object.log();
        let is_behind = !log.is_begun() || !log.knows(log.end_position());
        let is_unrecorded = remaining == DrainBacklog::default() && (is_behind || !self.object.is_drained());
        remaining.shuffles_left += usize::from(is_draining && is_unrecorded);
        remaining
    }

    /// Records in the store whether a drain has offloaded all data there. Otherwise a start on
    /// empty disks elsewhere may be refused.
    pub(super) async fn record_drained(&self) {
        if !self.object.is_worth_trying() {
            return;
        }
        let log = self.object.log();
        let is_drained = || {
            let is_draining = self.is_draining.load(Ordering::Acquire);
            is_draining && self.count_remaining() == DrainBacklog::default() && log.knows(log.end_position())
        };
        if let Err(error) = self.object.set_drained(is_drained).await {
            tracing::warn!(%error, "cannot record in the object store whether the local disks are drained; retrying");
        }
    }

    fn count_remaining(&self) -> DrainBacklog {
        let shuffles: Vec<Arc<TieredShuffle>> = self.shuffles.iter().map(|it| Arc::clone(&*it)).collect();
        let mut drained = DrainBacklog::default();
        for shuffle in &shuffles {
            let TierUsage { bytes, .. } = shuffle.local.usage();
            let is_stuck = shuffle.is_stuck(bytes);
            let is_unknown = !shuffle.is_known();
            // A directory that is out of reach now may have data for a later start on this machine,
            // but not elsewhere.
            let may_have_more = shuffle.local.is_partly_out_of_reach();
            drained.shuffles_left += usize::from(is_unknown || may_have_more || (bytes > 0 && !is_stuck));
            *if is_stuck { &mut drained.stuck_bytes } else { &mut drained.bytes_left } += bytes;
        }
        self.metrics.left_bytes.set(clamped(drained.bytes_left));
        drained
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for watermarks")]
fn view_of(disk: &DiskInfo, is_under_pressure: bool) -> DiskView {
    let used = disk.total_bytes.saturating_sub(disk.free_bytes);
    let used_ratio = if disk.total_bytes == 0 { 0.0 } else { used as f64 / disk.total_bytes as f64 };
    DiskView { used_ratio, is_full: disk.is_full(), is_under_pressure }
}

impl OffloadTier {
    /// Ensures that the store has all records of a shuffle, and that later ones are acknowledged
    /// once it has them. Not for concurrent callers.
    ///
    /// # Errors
    /// `Purged`. The store does not take the records, or the log cannot be written.
    pub(super) async fn make_known(&self, shuffle: &Arc<TieredShuffle>) -> Result<Uploads, StoreError> {
        if !self.is_present(shuffle) {
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        if !shuffle.is_known() {
            // The store may hang, so it must answer once before records wait for it.
            self.object.known(self.object.log().add_mark()).await?;
            self.set_offloaded(shuffle)?;
            let position = self.local.mark_moved(&shuffle.local).await?;
            self.object.known(position).await?;
            shuffle.set_known();
        }
        let uploads = self.object.begin(&shuffle.key, shuffle.local.incarnation())?;
        // `forget` and `leave` remove the shuffle here before they tell the object tier. They may
        // have missed the registration that has just begun there.
        if !self.is_present(shuffle) {
            self.object.leave(&shuffle.key);
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        Ok(uploads)
    }

    /// Makes later records of a shuffle wait for the store. Records appended earlier reach the
    /// store no later than the next one.
    ///
    /// # Errors
    /// `Purged` if the registration has ended.
    fn set_offloaded(&self, shuffle: &Arc<TieredShuffle>) -> Result<(), StoreError> {
        // `forget` removes the shuffle under the same lock. It therefore sees that the shuffle is
        // offloaded, or this check sees that the shuffle was removed.
        let _ends = self.ends.lock();
        if !self.is_present(shuffle) {
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        shuffle.set_offloaded();
        Ok(())
    }
}
