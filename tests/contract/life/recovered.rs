//! Compares a started worker block by block with the responses to its clients and with the disks.

use std::collections::BTreeSet;
use std::path::Path;

use uniffle_testkit::in_process::InProcess;
use uniffle_testkit::on_disk::{CLAIM, DirectoryFiles, stored_blocks};
use uniffle_testkit::oracle::verify;
use uniffle_wire::types::{AppId, BlockId, ShuffleId, ShuffleKey};
use uniffle_worker::log::METADATA;

use super::fault_plan::hides;
use super::history::{History, Key, LAYOUT};
use super::unmounted::entries_in;

impl History {
    /// Checks that acknowledged reports are known or results are refused with the name of the
    /// shuffle, that stored blocks are served, and that only missing blocks are lost.
    pub(super) async fn check_recovered(&mut self, stored: &BTreeSet<(ShuffleKey, i32, BlockId)>) {
        let client = InProcess { service: self.service(), layout: LAYOUT };
        let mut keys: Vec<Key> = self.expected.keys().copied().collect();
        keys.sort_unstable();
        for name in keys {
            let key = ShuffleKey::new(AppId::parse(name.0).unwrap(), ShuffleId(name.1));
            let responses = self.expected[&name].responses();
            let is_there = |partition, id| stored.contains(&(key.clone(), partition, id));
            let findings = verify(&client, &key, &responses, LAYOUT, is_there).await;
            assert!(findings.violations.is_empty(), "{:?}", findings.violations);
            let refusal = findings.results_refused.as_ref();
            assert!(self.excused || refusal.is_none(), "results of {key} are refused: {refusal:?}");
            let is_known = self.knows(&key);
            let is_predecessor = !findings.missing.is_empty() && self.may_know_predecessor(&key);
            let is_forgotten = !is_known || self.forgotten.contains(&name) || is_predecessor;
            if findings.results_refused.is_some() && is_forgotten {
                // The job fails. The worker may know an earlier registration, or both.
                if is_known {
                    self.service().lifecycle.unregister_shuffle(name.0, name.1).expect("the app is known");
                }
                self.forgotten.insert(name);
                self.expected.remove(&name);
                self.tally.forgotten_shuffles += 1;
                continue;
            }
            // Directories that ran separately may have given one position to different blocks. The
            // job gets an error and runs again, or the reported blocks are listed as lost.
            let runs_again = self.diverged()
                || refusal.is_some_and(|refusal| {
                    self.divergence_is_hidden() || refusal.text().contains("run its application")
                });
            // An extent with wrong bytes may be abandoned.
            let missing = findings.missing.first().filter(|_| !self.is_torn() && !runs_again);
            let intact = findings.intact;
            assert!(
                missing.is_none(),
                "{key}: one of {intact} blocks on the disks is not served: {missing:?}; results refused: {refusal:?}"
            );
            let expected = self.expected.get_mut(&name).unwrap();
            if runs_again && !findings.missing.is_empty() {
                expected.lose_places();
                expected.has_overlaps = true;
                // Ends the readers of earlier processes.
                self.next_epoch += 1;
                expected.epoch = self.next_epoch;
            }
            expected.is_refused = findings.results_refused.is_some();
            self.tally.refused_results += u64::from(expected.is_refused);
            self.tally.compared_blocks += findings.served;
        }
    }

    /// Returns whether directories ran separately, if there is an object store. The store proves a
    /// moved shuffle complete, so its results are not refused.
    fn diverged(&self) -> bool {
        let tiers = self.process().flusher.tiers();
        let gap = tiers.metadata().filter(|_| self.objects.is_some()).and_then(|tier| tier.metadata_gap());
        gap.is_some_and(|gap| gap.contains("was used separately from the others"))
    }

    /// Returns whether a directory that was used separately cannot be recognised as such, because
    /// its metadata cannot be listed.
    ///
    /// Two directories may have given one place of a stream to different blocks, and only one of
    /// them can be served there. This hides no loss: results are refused, with the directory in the
    /// text, so no job computes without the others. No file is deleted. Once the metadata can be
    /// listed, the text says that the directory was used separately
    /// (`hidden_divergence_refuses_results_and_keeps_files`).
    fn divergence_is_hidden(&self) -> bool {
        let unlisted = self.unlisted.as_ref();
        unlisted.is_some_and(|(disk, path)| self.ran_without.contains(disk) && path.ends_with(METADATA))
    }

    /// Returns whether the worker may know only an earlier registration of the shuffle: the last
    /// one is in metadata that this process cannot read, and not in the metadata that it can read.
    /// Its blocks may be on any directory.
    ///
    /// This hides no loss: results are refused, with the directory in the text. The files of the
    /// unknown registration stay, and its blocks are served once the metadata can be read
    /// (`registration_unknown_to_the_present_disk_keeps_its_blocks`,
    /// `registration_in_hidden_metadata_keeps_its_blocks`).
    fn may_know_predecessor(&self, key: &ShuffleKey) -> bool {
        let newest = |is_hidden: bool| {
            let all = self.disks.iter().enumerate();
            let all = all.flat_map(|(disk, it)| it.snapshot().into_iter().map(move |file| (disk, file)));
            let logs = all.filter(|(disk, (path, _))| {
                path.starts_with(METADATA) && self.is_hidden(*disk, path) == is_hidden
            });
            let entries = logs.flat_map(|(_, (_, bytes))| entries_in(&bytes));
            entries.filter_map(|entry| entry.shuffle().filter(|it| it.key == *key).map(|it| it.number)).max()
        };
        newest(true) > newest(false)
    }

    fn knows(&self, key: &ShuffleKey) -> bool {
        let app = self.service().apps().find(&key.app);
        app.is_some_and(|app| app.shuffle(key.shuffle).is_some())
    }

    /// Returns the blocks on the disks that are present.
    pub(super) fn stored_blocks(&self) -> BTreeSet<(ShuffleKey, i32, BlockId)> {
        let stored = stored_blocks(&self.readable_files());
        stored.into_iter().map(|block| (block.key, block.partition, block.id)).collect()
    }

    /// Removes all indexes, so that the worker reports everything as lost.
    pub(super) fn remove_indexes(&self) {
        for disk in &self.disks {
            let mut files = disk.files();
            files.retain(|path| path.extension().is_some_and(|extension| extension == "index"));
            files.iter().for_each(|path| disk.put(path, None));
        }
    }

    /// Returns the files that the current process can find.
    fn readable_files(&self) -> Vec<DirectoryFiles> {
        let mut files: Vec<DirectoryFiles> = self.disks.iter().map(|disk| disk.snapshot()).collect();
        if let Some((disk, intact)) = &self.claim {
            files[*disk].insert(CLAIM.into(), intact.clone());
        }
        for (disk, files) in files.iter_mut().enumerate() {
            files.retain(|path, _| !self.is_hidden(disk, path));
        }
        files
    }

    fn is_hidden(&self, disk: usize, path: &Path) -> bool {
        self.missing == Some(disk) || hides(self.unlisted.as_ref(), disk, path)
    }
}
