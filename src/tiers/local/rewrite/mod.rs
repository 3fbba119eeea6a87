//! Small old extents are copied together while nobody needs the disk, so that a reader of one partition makes few reads.
//!
//! Each batch of a shuffle leaves one extent per partition, wherever the log was. What a shuffle has on a disk is copied extent by
//! extent, in the order of the partitions, to a new data log of the same shuffle on the same disk; a group of its own, the next in
//! the shuffle's publish lane, names the copies. Streams do not change: **a copy has the same base, length and records as its original**,
//! so it makes no difference to any reader which of the two it reads, and nobody ever sees both.
//!
//! The order is what makes it safe:
//!
//! 1. A window of extents is read, and every record and block is compared with its checksum. What does not fit is marked as damaged,
//!    as a reader would have found it, and the shuffle is left alone there.
//! 2. The copies are written to the new log, and are on the device before
//! 3. the group is appended, which is on the device before
//! 4. each copy takes the place of its original, if that is still there: it may have been moved to an object store, or have become
//!    a hole. From here on nobody begins to read the original.
//! 5. A log of which everything was copied is [retired](super::retire): it goes when nobody reads there who had begun before, and the
//!    names of the new files are on the device. Its groups stay, as always.
//!
//! Steps 2 and 3 wait for the device whatever `sync` says: the originals have been there for long. Who dies before step 3 leaves bytes
//! that no group names. Who dies later leaves two groups for the same place: the start takes what says the same once, the copy if its
//! log has it and the original otherwise (`recover`), and retires logs of which it took nothing. A group that may or may not
//! have been appended stays pending in the lane as any other.
//!
//! Memory: 16 MiB at most, whatever extents a shuffle has, charged like the lists of extents: the region cedes as much (`memory::ceded`).
//! A worker that is full of blocks has no time for this.

mod originals;
mod policy;
mod window;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;

use self::originals::Originals;
use self::policy::{Rules, View, is_worth_a_look, is_worth_it};
use self::window::Window;
pub(super) use self::window::{PASS_BYTES, WINDOW_BYTES};
use super::append::Target;
use super::disk::{InFlight, LocalDisk};
use super::files::Mode;
use super::log::{Log, LogKind, LogUse};
use super::retire::Retired;
use super::shuffle::Shuffle;
use super::store::{LocalStore, ShuffleHandle};
use crate::clock::{Instant, sleep};
use crate::tiers::{StoreError, StoreErrorKind};

/// Between two looks for something to do.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// A shuffle that could not be rewritten is left alone for so long.
const LEFT_ALONE: Duration = Duration::from_secs(600);

/// What was rewritten.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rewritten {
    /// Extents that have a copy in their place.
    pub extents: u64,
    /// Their bytes, as they occupy a log.
    pub bytes: u64,
}

/// What is known of shuffles and disks from one look to the next.
#[derive(Debug, Default)]
pub(super) struct Looks {
    shuffles: HashMap<u64, Seen>,
    /// Calls that the disks had answered.
    calls: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    published_bytes: u64,
    since: Instant,
    /// There is nothing to do before this, unless something is written.
    not_before: Option<Instant>,
}

impl LocalStore {
    fn rules(&self) -> Rules {
        let config = &self.core.config;
        let (below_bytes, after) = (config.rewrite_below_bytes, config.rewrite_after);
        Rules { below_bytes, after }
    }

    /// Rewrites what is worth it, until `stop`: then what has begun is finished, so that no write is under way when somebody else
    /// opens the disks.
    pub(super) async fn keep_rewriting(&self, stop: impl Future<Output = ()> + Clone + Sync) {
        if self.rules().below_bytes == 0 {
            return;
        }
        let mut looks = Looks::default();
        let goes_on = || stop.clone().now_or_never().is_none();
        while goes_on() {
            self.rewrite_idle(&mut looks, &goes_on).await;
            tokio::select! {
                biased;
                () = stop.clone() => return,
                () = sleep(LOOK_INTERVAL) => {}
            }
        }
    }

    /// Looks once at all shuffles.
    pub(super) async fn rewrite_idle(&self, looks: &mut Looks, goes_on: &(impl Fn() -> bool + Sync)) {
        let shuffles: Vec<_> = self.shuffles.iter().map(|shuffle| Arc::clone(&*shuffle)).collect();
        let quiet = looks.quiet_disks(&self.core.disks);
        looks.note(&shuffles);
        for shuffle in shuffles {
            let Some(idle) = looks.idle(&shuffle) else { continue };
            if !goes_on() || !is_worth_a_look(idle, &self.rules()) || shuffle.is_partly_unknown() {
                continue;
            }
            let mut all_seen = true;
            for disk in &self.core.disks {
                if shuffle.found(disk).is_none() {
                    continue;
                }
                if !quiet.contains(&disk.index) || !disk.is_unused() {
                    all_seen = false;
                    continue;
                }
                let view = View {
                    scattered: Originals::of(&shuffle, disk).await.scattered().await,
                    idle,
                    is_disk_idle: disk.is_healthy() && disk.is_unused(),
                    room_bytes: disk.room_below_low(),
                };
                if is_worth_it(&view, &self.rules()) {
                    all_seen &= self.try_rewrite(&shuffle, disk, goes_on).await;
                }
            }
            if all_seen {
                looks.leave(&shuffle);
            }
        }
    }

    /// Whether there is nothing more to do now.
    async fn try_rewrite(
        &self,
        shuffle: &Arc<Shuffle>,
        disk: &Arc<LocalDisk>,
        goes_on: &(impl Fn() -> bool + Sync),
    ) -> bool {
        let Ok(_charge) = self.core.extents.try_charge(PASS_BYTES) else { return false };
        let goes_on = || goes_on() && disk.is_unused() && disk.room_below_low() >= WINDOW_BYTES;
        match self.rewrite_on(shuffle, disk, &goes_on).await {
            Ok((Rewritten { extents, bytes }, is_all)) => {
                tracing::info!(shuffle = %shuffle.key, disk = %disk.label, extents, bytes, is_all, "small extents were put together");
                is_all
            }
            Err(error) if error.kind == StoreErrorKind::Purged => true,
            Err(error) => {
                tracing::warn!(shuffle = %shuffle.key, disk = %disk.label, %error, "small extents stay where they are for now");
                true
            }
        }
    }

    /// Rewrites all that a shuffle has on its disks, worth it or not, while the disks and memory are needed or not.
    ///
    /// # Errors
    /// What a disk says; what was rewritten before stays so.
    pub async fn rewrite(&self, handle: &ShuffleHandle) -> Result<Rewritten, StoreError> {
        let mut all = Rewritten::default();
        for disk in self.core.disks.iter().filter(|disk| handle.shuffle.found(disk).is_some()) {
            let (Rewritten { extents, bytes }, _) = self.rewrite_on(&handle.shuffle, disk, &|| true).await?;
            (all.extents, all.bytes) = (all.extents + extents, all.bytes + bytes);
        }
        Ok(all)
    }

    /// Rewrites what a shuffle has on a disk, window by window as long as it `goes_on`; what that was, and whether it was all.
    async fn rewrite_on(
        &self,
        shuffle: &Arc<Shuffle>,
        disk: &Arc<LocalDisk>,
        goes_on: &(impl Fn() -> bool + Sync),
    ) -> Result<(Rewritten, bool), StoreError> {
        self.end_logs(shuffle, |log| log.disk.index == disk.index).await;
        let mut rewritten = Rewritten::default();
        let mut source = Originals::of(shuffle, disk).await;
        let mut target = None;
        let ended = loop {
            // What the window names stays until it is copied.
            let _reading = shuffle.reading();
            let window = source.next_window().await;
            if window.extents.is_empty() {
                break Ok(true);
            }
            match self.copy((shuffle, disk), &window, &mut target, goes_on).await {
                Ok(true) => {
                    rewritten.extents += window.extents.len() as u64;
                    rewritten.bytes += window.bytes;
                }
                Ok(false) => break Ok(false),
                Err(error) => break shuffle.require_present().and(Err(error)),
            }
        };
        // Nothing more is written to it.
        target.iter().for_each(|log: &LogUse| log.close());
        drop(target);
        self.retire_emptied(shuffle, disk).await?;
        Ok((rewritten, ended?))
    }

    /// Copies a window to the end of `target`, or of a new log when that has no room, and puts the copies in the places of the
    /// originals; false when it does not go on before anything is written.
    async fn copy(
        &self,
        (shuffle, disk): (&Arc<Shuffle>, &Arc<LocalDisk>),
        window: &Window,
        target: &mut Option<LogUse>,
        goes_on: &(impl Fn() -> bool + Sync),
    ) -> Result<bool, StoreError> {
        let writer = &self.writer;
        let read = window.read((&self.core, &writer.damage), (shuffle, disk), goes_on).await?;
        let Some(copies) = read else { return Ok(false) };
        let _load = InFlight::begin(disk, window.bytes);
        let (log, offset) = self.reserve_copy(shuffle, disk, window.bytes, target).await?;
        shuffle.on(disk).occupied.add(window.bytes);
        let file = writer.writer(&log).await?;
        let to = Target { log: &log, file, mode: Mode::Write };
        let file = writer.write_extents(to, offset..offset + window.bytes, &copies).await?;
        writer.bring_to_device(&log, &file).await?;
        let originals = window.extents.iter().map(|(_, extent)| *extent).collect();
        writer.publish_copies(shuffle, (&log, offset), &copies, originals).await?;
        self.core.metrics.rewritten_extents.inc_by(copies.len() as u64);
        self.core.metrics.rewritten_bytes.inc_by(window.bytes);
        Ok(true)
    }

    async fn reserve_copy(
        &self,
        shuffle: &Shuffle,
        disk: &Arc<LocalDisk>,
        bytes: u64,
        target: &mut Option<LogUse>,
    ) -> Result<(LogUse, u64), StoreError> {
        let limit = self.writer.log_bytes(LogKind::Data);
        let reserve = |log: &LogUse| Some((log.clone(), log.reserve(bytes, limit)?));
        if let Some(reserved) = target.as_ref().and_then(reserve) {
            return Ok(reserved);
        }
        if !disk.is_healthy() {
            return Err(StoreError::new(StoreErrorKind::Unhealthy, disk.io.root()));
        }
        let log = self.writer.create_log(shuffle, disk, LogKind::Data).await?;
        log.set_in_order();
        let log = target.insert(LogUse::of(&log));
        reserve(log).ok_or_else(|| shuffle.error(StoreErrorKind::InvalidBatch))
    }

    /// Retires logs of a disk of which everything was copied.
    async fn retire_emptied(&self, shuffle: &Shuffle, disk: &LocalDisk) -> Result<(), StoreError> {
        // Looked at in this order: what a settled log has is visible.
        let of_disk = |log: &Arc<Log>| log.disk.index == disk.index && log.kind == LogKind::Data;
        let settled: Vec<_> = shuffle
            .logs()
            .into_iter()
            .filter(|log| of_disk(log) && log.is_settled() && !log.is_released())
            .collect();
        let is_left = |log: &Arc<Log>| shuffle.with_streams(|it| it.is_left(log.slot));
        let empty: Vec<_> = settled.into_iter().filter(is_left).collect();
        // Of a shuffle that is forgotten nothing is in any log: its files are a purge's, or stay for a later process.
        let is_forgotten = shuffle.is_purged();
        if empty.is_empty() || is_forgotten || shuffle.is_partly_unknown() {
            return Ok(());
        }
        self.bring_names_to_devices(shuffle).await?;
        // FIFO: who held an earlier one of these may read in later ones too.
        let mut retired = shuffle.retired.lock().await;
        retired.push_back(Retired::new(&empty, Some(shuffle.end_reading())));
        drop(retired);
        self.release_retired(shuffle).await;
        Ok(())
    }

    async fn bring_names_to_devices(&self, shuffle: &Shuffle) -> Result<(), StoreError> {
        for disk in self.core.disks.iter().filter(|disk| shuffle.found(disk).is_some()) {
            match self.writer.bring_names_to_device(disk, &shuffle.directory).await {
                // Nothing of it came to be there.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                named => named.map_err(|error| self.core.failed(disk, &shuffle.directory, error))?,
            }
        }
        Ok(())
    }

    /// Lets go of a shuffle's retired logs that nobody reads any more; their files go with the next cleaning.
    pub(super) async fn release_retired(&self, shuffle: &Shuffle) {
        // Another one does it.
        let Ok(mut retired) = shuffle.retired.try_lock() else { return };
        while retired.front().is_some_and(Retired::is_left) {
            if retired.front().is_some_and(Retired::is_found)
                && let Err(error) = self.bring_found_to_devices(shuffle).await
            {
                tracing::debug!(shuffle = %shuffle.key, %error, "files of which everything was copied stay for now");
                return;
            }
            retired.pop_front().into_iter().for_each(Retired::release);
        }
    }

    /// The groups that an earlier process appended may be in the page cache only. The data that they name was on the device before.
    async fn bring_found_to_devices(&self, shuffle: &Shuffle) -> Result<(), StoreError> {
        for log in shuffle.logs().iter().filter(|log| log.kind == LogKind::Index) {
            let file = self.writer.cached_writer(log).await?;
            self.writer.bring_to_device(log, &file).await?;
        }
        self.bring_names_to_devices(shuffle).await
    }
}

impl Looks {
    /// Disks that have answered no call since the last look.
    fn quiet_disks(&mut self, disks: &[Arc<LocalDisk>]) -> Vec<usize> {
        let calls: Vec<u64> = disks.iter().map(|disk| disk.completed_calls()).collect();
        let before = std::mem::replace(&mut self.calls, calls);
        let quiet = self.calls.iter().zip(before).enumerate().filter(|(_, (now, before))| *now == before);
        quiet.map(|(index, _)| index).collect()
    }

    /// Takes note of what shuffles have.
    fn note(&mut self, shuffles: &[Arc<Shuffle>]) {
        let mut before = std::mem::take(&mut self.shuffles);
        for shuffle in shuffles {
            let published_bytes = shuffle.usage().bytes;
            let seen = before.remove(&shuffle.incarnation);
            let seen = seen.filter(|seen| seen.published_bytes == published_bytes);
            let new = || Seen { published_bytes, since: Instant::now(), not_before: None };
            self.shuffles.insert(shuffle.incarnation, seen.unwrap_or_else(new));
        }
    }

    /// Since when a shuffle has as much as now; none when there is nothing to do.
    fn idle(&self, shuffle: &Shuffle) -> Option<Duration> {
        let seen = self.shuffles.get(&shuffle.incarnation)?;
        let is_over = seen.not_before.is_none_or(|it| Instant::now() >= it);
        is_over.then(|| seen.since.elapsed())
    }

    /// There is nothing to do for a shuffle for a while.
    fn leave(&mut self, shuffle: &Shuffle) {
        if let Some(seen) = self.shuffles.get_mut(&shuffle.incarnation) {
            seen.not_before = Some(Instant::now() + LEFT_ALONE);
        }
    }
}
