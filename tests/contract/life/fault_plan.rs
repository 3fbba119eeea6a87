//! Faults of the disks at the start of a process, the operator's remedies for a refused start, and
//! files that are removed under a running worker.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::RngExt;
use rand::seq::IndexedRandom;

use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_testkit::in_process::InProcess;
use uniffle_testkit::on_disk::{self, CLAIM, is_claim};
use uniffle_testkit::oracle::verify;
use uniffle_wire::types::{AppId, BlockId, ShuffleId, ShuffleKey};
use uniffle_worker::store::{StoreError, StoreErrorKind};

use super::Mutation;
use super::history::{History, Key, LAYOUT};
use super::invariants::Invariants;

const SECTOR_BYTES: usize = 512;

impl History {
    /// Sometimes injects a fault for the next process.
    pub(super) fn plan_fault(&mut self) {
        let disk = self.rng.random_range(0..self.disks.len());
        match self.rng.random_range(0..100) {
            // Only a disk with files: nothing is lost with an empty one, so nothing may be excused.
            0..30 if self.disks.len() > 1 && !self.disks[disk].files().is_empty() => {
                self.missing = Some(disk);
                self.excused = true;
            }
            30..40 => {
                (self.is_faulty, self.excused) = (true, true);
                self.faults[disk].set_read_only(true);
                self.tally.read_only_disks += 1;
            }
            40..50 => self.fail_a_list(disk),
            50..60 => self.damage_metadata(disk),
            60..68 => self.damage_claim(disk),
            _ => {}
        }
    }

    /// Makes a directory of the disk unlistable at the start, once or for the whole process.
    fn fail_a_list(&mut self, disk: usize) {
        let mut directories = self.disks[disk].directories();
        directories.retain(|path| !path.as_os_str().is_empty());
        let Some(path) = directories.choose(&mut self.rng) else { return };
        let rule = Rule::always(Operation::Other, Fault::Errno(EIO)).on(path.to_string_lossy().into_owned());
        let times = if self.rng.random() { 1 } else { u32::MAX };
        self.faults[disk].add(Rule { times, ..rule });
        self.unlisted = Some((disk, path.clone()));
        self.is_faulty = true;
        self.excused = true;
        self.tally.failing_lists += 1;
    }

    /// Damages a metadata file, except the claim.
    fn damage_metadata(&mut self, disk: usize) {
        let mut files = self.disks[disk].files();
        files.retain(|path| is_metadata(path));
        let Some(path) = files.choose(&mut self.rng).cloned() else { return };
        self.damage(disk, &path);
        self.excused = true;
        self.tally.damaged_metadata += 1;
    }

    /// Damages the claim of the disk's directory, which must lose no data.
    fn damage_claim(&mut self, disk: usize) {
        let Some(intact) = self.disks[disk].content(Path::new(CLAIM)) else { return };
        self.damage(disk, Path::new(CLAIM));
        if self.disks[disk].content(Path::new(CLAIM)).as_ref() == Some(&intact) {
            return;
        }
        self.claim = Some((disk, intact));
        self.tally.damaged_claims += 1;
        if self.mutation == Mutation::NoUnclaimed {
            self.disks[disk].put(Path::new(CLAIM), Some(on_disk::new_claim()));
        }
    }

    fn damage(&mut self, disk: usize, path: &Path) {
        let mut content = self.disks[disk].content(path).unwrap();
        let at = if content.is_empty() { 0 } else { self.rng.random_range(0..content.len()) };
        let damaged = match self.rng.random_range(0..4) {
            0 => None,
            1 => {
                content.truncate(at);
                Some(content)
            }
            2 => {
                let end = (at + SECTOR_BYTES).min(content.len());
                content[at..end].fill(0);
                Some(content)
            }
            _ => {
                content.get_mut(at).into_iter().for_each(|byte| *byte ^= 1 << self.rng.random_range(0..8));
                Some(content)
            }
        };
        tracing::info!(target: "life", disk, path = %path.display(), at, "is damaged");
        self.disks[disk].put(path, damaged);
    }

    /// Removes application files or a metadata copy from a disk in use, as another program might.
    /// Blocks that are sent later must go to other files.
    pub(super) async fn remove_files(&mut self) {
        self.heal_the_disks().await;
        // The files of this shuffle are open.
        let written = self.known_key();
        if let Some(key) = written {
            self.send_and_flush(key).await;
        }
        let disk = self.rng.random_range(0..self.disks.len());
        let all = self.disks[disk].files().into_iter().chain(self.disks[disk].directories());
        let mut paths: Vec<PathBuf> =
            all.filter(|path| path.starts_with("apps") || path.ends_with("log")).collect();
        paths.sort();
        let Some(path) = paths.choose(&mut self.rng).cloned() else { return };
        tracing::info!(target: "life", disk, path = %path.display(), "is removed under the worker");
        self.disks[disk].remove(&path);
        self.tally.removed_files += 1;
        if !path.starts_with("apps") {
            self.excused = true;
            return;
        }
        self.files_removed = true;
        self.expected.values_mut().for_each(Invariants::lose_files);
        // The readers' offsets are invalid.
        self.readers.clear();
        if let Some(key) = written {
            self.send_after_removal(key).await;
        }
    }

    /// Sends blocks to a shuffle whose files may have been removed. They must be served.
    async fn send_after_removal(&mut self, name: Key) {
        let sent = self.send_and_flush(name).await;
        let client = InProcess { service: self.service(), layout: LAYOUT };
        let key = ShuffleKey::new(AppId::parse(name.0).unwrap(), ShuffleId(name.1));
        let responses = self.expected[&name].responses();
        let is_there = |partition, id: BlockId| sent.contains(&(partition, id.0));
        let findings = verify(&client, &key, &responses, LAYOUT, is_there).await;
        assert!(findings.violations.is_empty(), "{:?}", findings.violations);
        let missing = findings.missing.first();
        assert!(missing.is_none(), "{key}: {missing:?} was sent after files were removed, but is not served");
    }

    async fn send_and_flush(&mut self, key: Key) -> BTreeSet<(i32, i64)> {
        let sent = self.send_to(key);
        self.process().flusher.flush_all();
        tokio::time::sleep(Duration::from_secs(1)).await;
        sent
    }

    /// Resolves a refused start as an operator does: restores the claim, mounts the missing disk or
    /// repairs the disks.
    pub(super) fn resolve_refused_start(&mut self, error: &StoreError) {
        let text = error.to_string();
        let is_named = (0..self.disks.len()).any(|disk| text.contains(&format!("/disk{disk}")));
        // A directory must be writable to take over data that only the store has.
        let is_any = self.objects.is_some() && text.contains("no data directory is writable");
        assert!(is_named || is_any, "a start was refused without the name of a directory: {text}");
        if error.kind == StoreErrorKind::Unclaimed {
            return self.write_claim(&text);
        }
        if error.kind == StoreErrorKind::NotMounted {
            // The present directories were never used.
            assert!(self.missing.take().is_some(), "a start on all disks was refused: {text}");
            return;
        }
        assert!(self.is_faulty, "a start on healthy disks was refused: {text}");
        self.faults.iter().for_each(|faults| {
            faults.clear();
            faults.set_read_only(false);
        });
        (self.is_faulty, self.unlisted) = (false, None);
    }

    /// Restores the claim from a copy. A directory without metadata does not know its identity.
    fn write_claim(&mut self, refusal: &str) {
        let (disk, intact) = self.claim.take().expect("a directory with an intact claim was refused");
        if let Some((path, suggested)) = on_disk::suggested_claim(refusal) {
            assert_eq!(path, PathBuf::from(format!("/disk{disk}/{CLAIM}")), "{refusal}");
            // A claim cut before its checksum is a complete one of earlier versions.
            assert!(suggested.starts_with(&intact), "{refusal}");
            self.tally.claims_written += 1;
        }
        self.disks[disk].put(Path::new(CLAIM), Some(intact));
    }
}

/// Returns whether the file is metadata. The claim is not, because its damage is a separate fault.
fn is_metadata(path: &Path) -> bool {
    let of_data = path.extension().is_some_and(|extension| extension == "data" || extension == "index");
    !of_data && !is_claim(path) && !path.starts_with("trash")
}

/// Returns whether a directory that cannot be listed hides a file.
pub(super) fn hides(unlisted: Option<&(usize, PathBuf)>, disk: usize, file: &Path) -> bool {
    unlisted.is_some_and(|(hidden, path)| *hidden == disk && file.starts_with(path))
}
