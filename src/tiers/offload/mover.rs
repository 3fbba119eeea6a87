//! Moves what the policy says, one shuffle at a time, and says how far a drain is.
//!
//! A store that fails is left alone for a while, longer each time; the disks go on as without it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::pass::Passed;
use super::policy::{self, DiskView, ShuffleView, Wanted};
use super::shuffle::Shuffle;
use super::tier::OffloadTier;
use crate::clock::sleep;
use crate::metrics::clamped;
use crate::tiers::object::Uploads;
use crate::tiers::{DiskInfo, Drained, StoreError, StoreErrorKind, Tier as _, TierUsage};

/// Between two looks while nothing is to be moved or the store is left alone.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

impl OffloadTier {
    /// Looks what is to be moved, and moves it.
    pub(super) async fn keep_moving(&self) {
        loop {
            let has_moved = match self.next() {
                Some((wanted, shuffle)) if self.object.is_worth_trying() => self.run(wanted, &shuffle).await,
                _ => false,
            };
            self.tell_drained().await;
            if !has_moved {
                tokio::select! {
                    () = sleep(LOOK_INTERVAL) => {}
                    () = self.wanted.notified() => {}
                }
            }
        }
    }

    /// What is to be moved now.
    pub(super) fn next(&self) -> Option<(Wanted, Arc<Shuffle>)> {
        let relieved = self.look_at_disks();
        let shuffles: Vec<Arc<Shuffle>> = self.shuffles.iter().map(|it| Arc::clone(&*it)).collect();
        let is_draining = self.is_draining.load(Ordering::Acquire);
        if !is_draining
            && !relieved.contains(&true)
            && shuffles.iter().all(|it| it.cold_bytes.load(Ordering::Relaxed) == 0)
        {
            return None;
        }
        let views: Vec<ShuffleView> = shuffles.iter().map(|shuffle| self.view(shuffle)).collect();
        let wanted = policy::next(&views, &relieved, self.object.segment_bytes(), is_draining)?;
        let (Wanted::Oldest(at) | Wanted::Cold(at)) = wanted;
        Some((wanted, Arc::clone(&shuffles[at])))
    }

    fn look_at_disks(&self) -> Vec<bool> {
        let mut relieved = self.relieved.lock();
        let disks = self.local.disks();
        relieved.resize(disks.len(), false);
        let views: Vec<DiskView> =
            disks.iter().zip(&*relieved).map(|(disk, was)| view_of(disk, *was)).collect();
        *relieved = policy::relieved(&views, self.settings.watermarks);
        self.metrics.disks_relieved.set(clamped(relieved.iter().filter(|it| **it).count()));
        relieved.clone()
    }

    fn view(&self, shuffle: &Shuffle) -> ShuffleView {
        shuffle.forget_old_exclusions();
        let bytes = shuffle.local.usage().bytes;
        let is_stuck = shuffle.is_stuck(bytes);
        ShuffleView {
            age: shuffle.local.incarnation(),
            on_disks: self.local.occupied(&shuffle.local),
            movable_bytes: if is_stuck { 0 } else { bytes },
            cold_bytes: shuffle.cold_bytes.load(Ordering::Relaxed),
            is_unknown: !shuffle.is_known(),
        }
    }

    /// Returns whether anything was moved or made known to the store.
    async fn run(&self, wanted: Wanted, shuffle: &Arc<Shuffle>) -> bool {
        match self.move_some(wanted, shuffle).await {
            Ok(has_moved) => has_moved,
            Err(error) if error.kind == StoreErrorKind::Purged => true,
            Err(error) => {
                self.metrics.failures.inc();
                tracing::warn!(shuffle = %shuffle.key, %error, "cannot move data to the object store; it stays on the disks, retrying later");
                false
            }
        }
    }

    /// Moves the selected data of a shuffle. Returns false if nothing can be moved.
    ///
    /// # Errors
    /// The error of a disk or of the store. Data that was moved before stays moved.
    pub(super) async fn move_some(&self, wanted: Wanted, shuffle: &Arc<Shuffle>) -> Result<bool, StoreError> {
        let _turn = self.turn.lock().await;
        let is_new = !shuffle.is_known();
        let before = shuffle.local.usage().bytes;
        let is_cold = matches!(wanted, Wanted::Cold(_));
        let cold = is_cold.then(|| shuffle.take_cold());
        let excluded = shuffle.excluded();
        let moving = match &cold {
            None => self.local.oldest(&shuffle.local, self.settings.pass_bytes, excluded).await,
            Some(cold) => {
                let partitions = cold.partitions.iter().copied().collect();
                self.local.all_of(&shuffle.local, partitions, excluded).await
            }
        };
        self.metrics.passes.inc();
        let mut passed = self.pass(shuffle, moving).await?;
        if !is_cold && passed == Passed::default() {
            // Data that cannot be moved may be as much as a pass takes.
            let moving = self.local.oldest(&shuffle.local, u64::MAX, shuffle.excluded()).await;
            passed = self.pass(shuffle, moving).await?;
        }
        if let Some(cold) = cold {
            cold.done();
        }
        if passed.bytes > 0 {
            let (bytes, objects) = (passed.bytes, passed.objects);
            tracing::info!(shuffle = %shuffle.key, bytes, objects, "moved from local disks to the object store");
        } else if !passed.has_stopped && !is_cold {
            shuffle.set_stuck(before);
        }
        Ok(passed.bytes > 0 || is_new)
    }

    /// From now on everything is moved.
    pub(super) fn begin_drain(&self) -> Drained {
        self.is_draining.store(true, Ordering::Release);
        self.wanted.notify_one();
        self.how_far()
    }

    /// What another machine would not find; also that this is nothing, as long as the store does not say so.
    pub(super) fn how_far(&self) -> Drained {
        let mut left = self.left();
        let is_draining = self.is_draining.load(Ordering::Acquire);
        // It may not know yet that a shuffle is over.
        let log = self.object.log();
        let is_behind = !log.is_begun() || !log.knows(log.end_position());
        let is_untold = left == Drained::default() && (is_behind || !self.object.is_drained());
        left.shuffles_left += usize::from(is_draining && is_untold);
        left
    }

    /// Tells the store whether these disks have anything that it has not: another machine begins with empty ones only if not.
    pub(super) async fn tell_drained(&self) {
        let log = self.object.log();
        let is_draining = self.is_draining.load(Ordering::Acquire);
        let is_drained = is_draining && self.left() == Drained::default() && log.knows(log.end_position());
        if !self.object.is_worth_trying() {
            return;
        }
        if let Err(error) = self.object.set_drained(is_drained).await {
            tracing::warn!(%error, is_drained, "cannot record in the object store whether the local disks are drained; retrying");
        }
    }

    fn left(&self) -> Drained {
        let shuffles: Vec<Arc<Shuffle>> = self.shuffles.iter().map(|it| Arc::clone(&*it)).collect();
        let mut drained = Drained::default();
        for shuffle in &shuffles {
            let TierUsage { bytes, .. } = shuffle.local.usage();
            let is_stuck = shuffle.is_stuck(bytes);
            let is_unknown = !shuffle.is_known();
            // No other machine finds what a later start on this one may.
            let may_have_more = shuffle.local.is_partly_out_of_reach();
            drained.shuffles_left += usize::from(is_unknown || may_have_more || (bytes > 0 && !is_stuck));
            *if is_stuck { &mut drained.stuck_bytes } else { &mut drained.bytes_left } += bytes;
        }
        self.metrics.left_bytes.set(clamped(drained.bytes_left));
        drained
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for watermarks")]
fn view_of(disk: &DiskInfo, is_relieved: bool) -> DiskView {
    let used = disk.total_bytes.saturating_sub(disk.free_bytes);
    let used_ratio = if disk.total_bytes == 0 { 0.0 } else { used as f64 / disk.total_bytes as f64 };
    DiskView { used_ratio, is_full: disk.is_full(), is_relieved }
}

impl OffloadTier {
    /// Makes sure that the store has all records of a shuffle, and will have later ones before they are acknowledged. One caller at a time.
    ///
    /// # Errors
    /// `Purged`; the store does not take them, or the log cannot be written.
    pub(super) async fn make_known(&self, shuffle: &Arc<Shuffle>) -> Result<Uploads, StoreError> {
        if !self.is_present(shuffle) {
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        if !shuffle.is_known() {
            // First without the records waiting: the store may hang.
            self.object.known(self.object.log().add_mark()).await?;
            self.set_moved(shuffle)?;
            let position = self.local.mark_moved(&shuffle.local).await?;
            self.object.known(position).await?;
            shuffle.set_known();
        }
        let uploads = self.object.begin(&shuffle.key, shuffle.local.incarnation())?;
        // What is forgotten is forgotten here first.
        if !self.is_present(shuffle) {
            self.object.leave(&shuffle.key);
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        Ok(uploads)
    }

    /// From now on records of a shuffle wait for the store: one whose position is given before is in the store with the next one.
    fn set_moved(&self, shuffle: &Arc<Shuffle>) -> Result<(), StoreError> {
        // Whoever forgets the shuffle finds this, or this finds that it is forgotten.
        let _ends = self.ends.lock();
        if !self.is_present(shuffle) {
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        shuffle.set_moved();
        Ok(())
    }
}
