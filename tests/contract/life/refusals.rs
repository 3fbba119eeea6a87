//! Disks that refuse writes for a while, files that are too large, and directories under two paths.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use rand::seq::IndexedRandom;

use uniffle_testkit::fault::{EFBIG, EIO, ENOSPC, Fault, Faults, Operation, Rule};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uniffle_worker::store::{DiskCondition, DiskInfo, LocalConfig, StoreErrorKind};

use super::Mutation;
use super::history::History;

/// More than the interval at which a full disk is probed.
const FULL_MAX: Duration = Duration::from_secs(15);
/// More than the interval at which any disk is probed.
const SICK_MAX: Duration = Duration::from_secs(75);
/// Interval of heartbeats while waiting.
const HEARTBEAT: Duration = Duration::from_secs(15);

impl History {
    /// Waits until disks without faults take data again, which they must after a probe.
    pub(super) async fn await_recovery(&mut self) {
        if self.mutation == Mutation::NoEndOfRefusal {
            for index in self.indexes_of(|info| info.condition == DiskCondition::Full) {
                // The probe creates this directory first.
                let rule = Rule::always(Operation::CreateDir, Fault::Errno(ENOSPC));
                self.faults[index].add(rule.on("probe"));
            }
        }
        self.tally.recovered_disks +=
            self.indexes_of(|info| info.condition != DiskCondition::Healthy).len() as u64;
        self.wait(FULL_MAX).await;
        let full = self.indexes_of(|info| info.condition == DiskCondition::Full);
        assert!(full.is_empty(), "disks {full:?} stay full although probes succeed");
        self.wait(SICK_MAX).await;
        let sick = self.indexes_of(|info| info.condition != DiskCondition::Healthy);
        assert!(sick.is_empty(), "disks {sick:?} stay unhealthy although probes succeed");
    }

    /// Lets a write of one file fail because the file is too large. Its disk must not be blamed.
    pub(super) async fn exceed_file_size(&mut self) {
        self.heal_the_disks().await;
        // Calls that failed before the disks were healed are counted first.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let index = self.rng.random_range(0..self.disks.len());
        let Some(before) = self.info_of(index) else { return };
        let name = *[".data", ".index", "log"].choose(&mut self.rng).unwrap();
        let errno = if self.mutation == Mutation::FileSizeBreaksDisk { EIO } else { EFBIG };
        self.faults[index].add(Rule::once(Operation::Write, Fault::Errno(errno)).on(name));
        let injected = self.faults[index].injected();
        self.process().flusher.flush_all();
        self.report_some(true).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.faults[index].clear();
        self.tally.full_files += self.faults[index].injected() - injected;
        let after = self.info_of(index).expect("the index existed before");
        assert_eq!(
            (after.failures, after.condition.max(before.condition)),
            (before.failures, before.condition),
            "disk {index} is blamed for a file that is too large: {:?}",
            after.fault
        );
    }

    /// Ends a shuffle while no disk has room for the metadata log. Its files must stay, since a
    /// start would find it again.
    pub(super) async fn end_on_full_disks(&mut self) {
        let Some((app, shuffle)) = self.known_key() else { return };
        self.heal_the_disks().await;
        // Earlier registrations of the shuffle have ended, so their files may go.
        let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle));
        let incarnation = self.process().store().handle(&key).map(|handle| format!("{handle:?}"));
        let name = incarnation.as_deref().and_then(|text| text.rsplit_once('/')).map(|(_, name)| name);
        let directory = format!("apps/{app}/{}", name.unwrap_or_default().trim_end_matches(')'));
        let files = |history: &Self| -> BTreeSet<(usize, PathBuf)> {
            let all = history.disks.iter().enumerate();
            all.flat_map(|(index, disk)| disk.files().into_iter().map(move |path| (index, path)))
                .filter(|(_, path)| name.is_some() && path.starts_with(&directory))
                .collect()
        };
        for operation in [Operation::Write, Operation::OpenWrite] {
            self.faults.iter().for_each(|faults| faults.add(Rule::always(operation, Fault::Errno(ENOSPC))));
        }
        let before = files(self);
        let is_refused = self.purge((app, shuffle), false).await.is_err();
        if is_refused {
            if self.mutation == Mutation::EarlySweep {
                before.iter().for_each(|(index, path)| self.disks[*index].remove(path));
            }
            self.process().store().sweep().await;
            self.process().store().maintain_once().await;
            self.tally.refused_ends += 1;
            let after = files(self);
            let removed: Vec<_> = before.difference(&after).collect();
            assert!(
                removed.is_empty(),
                "{removed:?} were removed before the end of {app}/{shuffle} was logged"
            );
        }
        self.heal_the_disks().await;
    }

    /// Starts a worker on one directory by two paths, which must be refused and change nothing.
    pub(super) async fn start_by_two_paths(&mut self) {
        let of = self.rng.random_range(0..self.disks.len());
        let link = Arc::new(self.disks[of].by_another_path("/link"));
        let snapshot = |history: &Self| history.disks.iter().map(|disk| disk.snapshot()).collect::<Vec<_>>();
        let before = snapshot(self);
        let disks: Vec<_> =
            self.disks.iter().cloned().chain([link]).map(|disk| (disk, Faults::default())).collect();
        let started = self.process_on(&disks, LocalConfig::default()).await.map(drop);
        let error = started.expect_err("a directory that is used twice was accepted");
        let text = error.to_string();
        assert_eq!(error.kind, StoreErrorKind::Copied, "{text}");
        assert!(text.contains("/link") && text.contains(&format!("/disk{of}")), "{text}");
        assert!(snapshot(self) == before, "a refused start changed a directory");
        self.tally.doubled_paths += 1;
    }

    async fn wait(&self, duration: Duration) {
        let end = tokio::time::Instant::now() + duration;
        while tokio::time::Instant::now() < end {
            tokio::time::sleep(HEARTBEAT).await;
            self.heartbeat();
        }
    }

    /// Returns the indexes of matching disks that are in use and writable.
    fn indexes_of(&self, wanted: impl Fn(&DiskInfo) -> bool) -> Vec<usize> {
        let here = (0..self.disks.len()).filter(|index| !self.faults[*index].is_read_only());
        here.filter(|index| self.info_of(*index).is_some_and(|info| wanted(&info))).collect()
    }

    fn info_of(&self, index: usize) -> Option<DiskInfo> {
        let path = PathBuf::from(format!("/disk{index}"));
        self.process().store().disks().into_iter().find(|info| info.path == path)
    }
}
