//! Ends of a simulated worker process: crashes, stops, upgrades and power losses.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt as _;

use uniffle_testkit::fault::{Fault, Faults, Operation, Rule};
use uniffle_worker::store::SyncWrites;

use super::Mutation;
use super::history::History;
use super::invariants::Invariants;

/// Ways in which a worker process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Ends at any point.
    Crash,
    /// Ends during a write, which reaches the disk in part.
    Torn,
    /// Flushes memory first.
    Stop,
    /// Is killed while a disk hangs, which refuses an upgrade.
    Hung,
    /// Hands over to a successor at once, with the state of the metadata log.
    Upgrade,
    /// Offloads all data to the object store. The next process starts on empty disks.
    Elsewhere,
}

impl History {
    pub(super) async fn end(&mut self) {
        let moves = self.has_disks() && self.objects.is_some();
        let end = match self.rng.random_range(0..if moves { 13 } else { 11 }) {
            0..4 => End::Crash,
            4..6 => End::Torn,
            6 if self.disks.len() > 1 && self.missing.is_none() => End::Hung,
            10 if self.has_disks() => End::Upgrade,
            11.. => End::Elsewhere,
            _ => End::Stop,
        };
        tracing::info!(target: "life", life = self.life, ?end, "ends");
        let here: BTreeSet<usize> =
            (0..self.disks.len()).filter(|disk| self.missing != Some(*disk)).collect();
        self.unsynced.extend(&here);
        match end {
            End::Crash => {}
            End::Torn => {
                for faults in &self.faults {
                    let bytes = self.rng.random_range(0..3_000);
                    let after = self.rng.random_range(0..3);
                    faults.add(Rule::always(Operation::Write, Fault::Torn { bytes }).after(after));
                }
                if let Some(store) = self.store() {
                    self.lose_answers(&store);
                }
                self.process().flusher.flush_all();
                self.report_some(false).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            End::Hung => self.hang_a_disk().await,
            End::Upgrade => self.upgrade().await,
            End::Elsewhere => self.move_elsewhere().await,
            End::Stop => self.stop_in_order(&here).await,
        }
        self.sends.clear();
        self.add_figures();
        self.process = None;
        self.disks.iter().for_each(|disk| disk.fail_syncs(0));
        if self.hand_off.is_some() || !self.has_disks() {
            return;
        }
        let goes_down = match self.sync {
            SyncWrites::Group => 0.5,
            SyncWrites::Off => 0.15,
        };
        if self.rng.random_bool(goes_down) {
            tracing::info!(target: "life", "the machine goes down");
            self.tally.power_losses += 1;
            if self.sync == SyncWrites::Off && !self.unsynced.is_empty() {
                self.tally.unsynced_power_losses += 1;
                (self.torn, self.excused) = (true, true);
                self.expected.values_mut().for_each(Invariants::lose_places);
            }
            for disk in &self.disks {
                disk.lose_power(self.rng.random());
            }
            self.unsynced.clear();
        }
    }

    /// Flushes memory and syncs the disks `here`.
    async fn stop_in_order(&mut self, here: &BTreeSet<usize>) {
        self.faults.iter().for_each(Faults::clear);
        self.disks.iter().for_each(|disk| disk.fail_syncs(0));
        if let Some(store) = self.store() {
            self.heal_the_store(&store);
        }
        self.flush_all(here).await;
        if self.mutation != Mutation::NoLastSync {
            self.process().sync().await;
        }
        self.unsynced.retain(|disk| !here.contains(disk));
        if self.process().is_flushed() {
            self.tally.graceful_stops += 1;
            self.expected.values_mut().for_each(|expected| expected.settle(self.life));
        }
    }

    /// Runs the final flush. It ignores watermarks and earlier refusals, so one writable disk
    /// receives everything.
    async fn flush_all(&mut self, here: &BTreeSet<usize>) {
        if self.objects.is_some() {
            return self.process().flush().await;
        }
        if self.rng.random_bool(0.3) {
            self.process().store().set_watermarks(f64::MIN_POSITIVE, 0.0);
            self.tally.stops_above_watermark += 1;
        }
        match self.mutation {
            Mutation::NoLastFlush => self.process().flush().await,
            _ => self.process().empty().await,
        }
        let hangs = here.iter().any(|disk| self.faults[*disk].hung() > 0);
        if !hangs && here.iter().any(|disk| !self.faults[*disk].is_read_only()) {
            assert!(self.process().is_flushed(), "a stop left blocks in memory");
        }
    }

    /// Lets a disk hang and flushes memory to the others.
    async fn hang_a_disk(&mut self) {
        self.faults.iter().for_each(Faults::clear);
        self.disks.iter().for_each(|disk| disk.fail_syncs(0));
        let hung = self.rng.random_range(0..self.disks.len());
        for operation in [Operation::Write, Operation::Other] {
            self.faults[hung].add(Rule::always(operation, Fault::Hang));
        }
        self.process().flush().await;
        self.tally.hung_disks += 1;
    }

    /// Flushes memory despite failing disks and hands over the state of the log. If that fails, the
    /// process has crashed.
    async fn upgrade(&mut self) {
        self.process().flush().await;
        if self.process().is_flushed() {
            self.hand_off = self.process().store().release_log().await;
            self.tally.upgrades += u64::from(self.hand_off.is_some());
        }
    }

    pub(super) fn add_figures(&mut self) {
        let process = self.process.as_ref().expect("a process is running");
        let tally = &mut self.tally;
        tally.flushed_bytes += process.counter("memory_spill_total_bytes");
        tally.failed_writes += process.counter("total_failed_written_event_num");
        tally.purged_batches += process.counter("total_spill_events_dropped_with_app_not_found");
        tally.duplicates += process.counter("total_duplicate_blocks");
        tally.healed_blocks += process.counter("total_healed_blocks");
        if !self.disks.is_empty() {
            tally.extents_given_up += process.counter("total_local_extents_given_up");
        }
        if self.objects.is_some() && !self.disks.is_empty() {
            tally.moved_bytes += process.counter("offload_bytes");
            tally.failed_moves += process.counter("offload_failures");
        }
    }
}
