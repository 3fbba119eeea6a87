//! The ways in which the files of a stopped worker, or the disks under the next one, are damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::RngExt;
use rand::seq::{IndexedRandom, IteratorRandom};

use uniffle_testkit::claims::CLAIM;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::on_disk::Files;

use super::corruptor;
use super::fixture::Fixture;

const SECTOR_BYTES: usize = 512;

/// What is damaged, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Corruption {
    /// The control: everything is to be there.
    Nothing,
    /// One bit of a file.
    Flip,
    /// A sector of a file reads as zeros.
    Zero,
    /// A file ends too early.
    Cut,
    /// A file is gone.
    Delete,
    /// A file is as it was at some time before.
    Older,
    /// Both copies of the metadata log have lost their last records, or the last one is damaged in both.
    BothCopies,
    /// A directory below the data directory is gone.
    DeleteDirectory,
    /// A data directory is absent for one start.
    Absent,
    /// One data directory is absent for a start, another one for the next.
    Alternate,
    /// The mount point is there, the file system is not.
    Unmounted,
    /// The machine goes down.
    Reset,
    /// A file answers EIO.
    FailingFile,
    /// A directory cannot be listed.
    FailingList,
    /// The disk is mounted read-only.
    ReadOnly,
}

/// Frequent ones more than once.
pub(crate) const CORRUPTIONS: [Corruption; 21] = [
    Corruption::Nothing,
    Corruption::Flip,
    Corruption::Flip,
    Corruption::Flip,
    Corruption::Zero,
    Corruption::Zero,
    Corruption::Cut,
    Corruption::Cut,
    Corruption::Delete,
    Corruption::Delete,
    Corruption::Older,
    Corruption::Older,
    Corruption::BothCopies,
    Corruption::DeleteDirectory,
    Corruption::Absent,
    Corruption::Alternate,
    Corruption::Unmounted,
    Corruption::Reset,
    Corruption::FailingFile,
    Corruption::FailingList,
    Corruption::ReadOnly,
];

/// One damage.
#[derive(Debug)]
pub(crate) struct Damage {
    pub(crate) corruption: Corruption,
    /// The kind of file: its extension when it is numbered, else its name. Empty for a whole disk.
    pub(crate) kind: String,
    /// In words.
    pub(crate) what: String,
    /// What can be read of the disks after it; that of an absent disk is nothing.
    pub(crate) after: Vec<Files>,
    /// The disk that was replaced by an empty one.
    replaced: Option<(usize, Arc<MemoryDisk>)>,
    /// Of alternating absence, the disk that is absent next.
    next_absent: Option<usize>,
}

impl Damage {
    /// A life is over: what is another disk's turn, or comes back. False when everything is back.
    pub(crate) fn heal_next(&mut self, fixture: &mut Fixture) -> bool {
        fixture.faults.iter().for_each(|faults| {
            faults.clear();
            faults.set_read_only(false);
        });
        fixture.present.fill(true);
        if let Some((index, disk)) = self.replaced.take() {
            fixture.disks[index] = disk;
        }
        let next = self.next_absent.take();
        next.inspect(|index| fixture.present[*index] = false).is_some()
    }

    /// Whether a later start finds more than the first one did.
    pub(crate) fn heals(&self) -> bool {
        matches!(
            self.corruption,
            Corruption::Absent
                | Corruption::Alternate
                | Corruption::Unmounted
                | Corruption::FailingFile
                | Corruption::FailingList
                | Corruption::ReadOnly
        )
    }

    /// The one known gap (docs/durability.md): the only data directory is an empty mount point.
    pub(crate) fn is_known_gap(&self, fixture: &Fixture) -> bool {
        self.corruption == Corruption::Unmounted && fixture.disks.len() == 1
    }

    /// Whether it leaves a whole copy of what two directories keep twice, and the one copy of everything else, claims replaced.
    /// A loss of power does: registrations and reports are on the device before they are acknowledged.
    pub(crate) fn spares_metadata(&self, disks: usize) -> bool {
        let one_file = matches!(
            self.corruption,
            Corruption::Flip
                | Corruption::Zero
                | Corruption::Cut
                | Corruption::Delete
                | Corruption::Older
                | Corruption::FailingFile
        );
        let bulk = self.kind == "data" || self.kind == "index";
        // A claim is written again as the refused start says. While it cannot be read, the directory is left out.
        let is_kept = match self.kind == CLAIM {
            true => self.corruption != Corruption::FailingFile,
            false => disks > 1,
        };
        matches!(self.corruption, Corruption::Nothing | Corruption::ReadOnly | Corruption::Reset)
            || one_file && (bulk || is_kept)
    }
}

/// Does something to the disks of a fixture in which nobody lives.
pub(crate) fn damage(fixture: &mut Fixture) -> Damage {
    let corruption = *CORRUPTIONS.choose(&mut fixture.rng).expect("not empty");
    let all = fixture.disks.len();
    let corruption =
        if corruption == Corruption::Alternate && all == 1 { Corruption::Absent } else { corruption };
    // Nothing starts without a disk.
    let corruption =
        if corruption == Corruption::Absent && all == 1 { Corruption::Unmounted } else { corruption };
    let disk = fixture.rng.random_range(0..all);
    let mut damage = Damage {
        corruption,
        kind: String::new(),
        what: format!("/disk{disk}"),
        after: Vec::new(),
        replaced: None,
        next_absent: None,
    };
    match corruption {
        Corruption::Nothing => {}
        Corruption::Flip | Corruption::Zero | Corruption::Cut | Corruption::Delete | Corruption::Older => {
            damage_file(fixture, disk, &mut damage)
        }
        Corruption::BothCopies => damage_both_copies(fixture, &mut damage),
        Corruption::DeleteDirectory => delete_directory(fixture, disk, &mut damage),
        Corruption::Absent | Corruption::Alternate => {
            fixture.present[disk] = false;
            if corruption == Corruption::Alternate {
                damage.next_absent = Some((disk + fixture.rng.random_range(1..all)) % all);
            }
        }
        Corruption::Unmounted => {
            let empty = Arc::new(MemoryDisk::new(&format!("/disk{disk}"), None));
            damage.replaced = Some((disk, std::mem::replace(&mut fixture.disks[disk], empty)));
        }
        Corruption::Reset => fixture.lose_power(),
        Corruption::FailingFile => fail_file(fixture, disk, &mut damage),
        Corruption::FailingList => fail_list(fixture, disk, &mut damage),
        Corruption::ReadOnly => fixture.faults[disk].set_read_only(true),
    }
    if damage.after.is_empty() {
        damage.after = readable(fixture);
    }
    damage
}

/// The files of the disks that are present.
pub(crate) fn readable(fixture: &Fixture) -> Vec<Files> {
    let files = fixture.files().into_iter().zip(&fixture.present);
    files.map(|(files, present)| if *present { files } else { Files::new() }).collect()
}

fn kind_of(path: &Path) -> String {
    let text = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let is_numbered = text(path.file_stem()).bytes().all(|byte| byte.is_ascii_digit());
    match path.extension() {
        Some(extension) if is_numbered => text(Some(extension)),
        _ => text(path.file_name()),
    }
}

/// A file of a kind, every kind being as likely as any other.
fn some_file(fixture: &mut Fixture, disk: usize) -> Option<(String, PathBuf)> {
    let mut kinds: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for path in fixture.disks[disk].files().into_iter().filter(|path| !path.starts_with("trash")) {
        kinds.entry(kind_of(&path)).or_default().push(path);
    }
    let (kind, paths) = kinds.into_iter().choose(&mut fixture.rng)?;
    Some((kind, paths.choose(&mut fixture.rng)?.clone()))
}

fn damage_file(fixture: &mut Fixture, disk: usize, damage: &mut Damage) {
    let Some((kind, path)) = some_file(fixture, disk) else { return };
    let mut content = fixture.disks[disk].content(&path).expect("it is there");
    damage.what = format!("/disk{disk}/{} of {} bytes", path.display(), content.len());
    damage.kind = kind;
    let at = if content.is_empty() { 0 } else { some_offset(fixture, content.len()) };
    let new = match damage.corruption {
        Corruption::Flip => {
            content.get_mut(at).into_iter().for_each(|byte| *byte ^= 1 << fixture.rng.random_range(0..8));
            Some(content)
        }
        Corruption::Zero => {
            let sector = at / SECTOR_BYTES * SECTOR_BYTES;
            let end = (sector + SECTOR_BYTES).min(content.len());
            content[sector..end].fill(0);
            Some(content)
        }
        Corruption::Cut => {
            content.truncate(at);
            Some(content)
        }
        Corruption::Older => {
            let older = |files: &Vec<Files>| files[disk].get(&path).filter(|old| **old != content).cloned();
            // One that was never another stays as it is.
            let versions: Vec<_> = fixture.versions.iter().filter_map(older).collect();
            Some(versions.choose(&mut fixture.rng).cloned().unwrap_or(content))
        }
        _ => None,
    };
    damage.what += &format!(" at {at}");
    fixture.disks[disk].put(&path, new);
}

fn damage_both_copies(fixture: &mut Fixture, damage: &mut Damage) {
    let logs = |disk: &Arc<MemoryDisk>| {
        let files = disk.snapshot().into_iter().filter(|(path, _)| corruptor::is_log(path));
        files.map(|(path, content)| (Arc::clone(disk), path, content)).collect::<Vec<_>>()
    };
    let copies: Vec<_> = fixture.disks.iter().flat_map(logs).collect();
    let Some((_, _, longest)) = copies.iter().max_by_key(|(_, _, content)| content.len()) else { return };
    let frames = corruptor::frames(longest).len() as u64;
    let kept = frames.saturating_sub(fixture.rng.random_range(1..=3)).max(1);
    let fits = corruptor::chained(longest, |frame| (frame.sequence < kept).then_some(frame.entry)).len();
    let (torn, flips) = (fixture.rng.random(), fixture.rng.random());
    for (disk, path, content) in copies.iter().filter(|(_, _, content)| content.len() == longest.len()) {
        let mut content = content.clone();
        match (torn, flips) {
            (true, true) => content.last_mut().into_iter().for_each(|byte| *byte ^= 1),
            (true, false) => content.truncate(content.len() - 1),
            (false, _) => content.truncate(fits),
        }
        disk.put(path, Some(content));
    }
    damage.what = format!("both copies of {frames} records, {kept} of which are left");
}

/// Anywhere, or near the end.
fn some_offset(fixture: &mut Fixture, length: usize) -> usize {
    match fixture.rng.random_bool(0.3) {
        true => length - 1 - fixture.rng.random_range(0..length.min(100)),
        false => fixture.rng.random_range(0..length),
    }
}

fn some_directory(fixture: &mut Fixture, disk: usize) -> Option<PathBuf> {
    let used: BTreeSet<PathBuf> = fixture.disks[disk]
        .files()
        .iter()
        .flat_map(|file| file.ancestors().skip(1).map(Path::to_path_buf).collect::<Vec<_>>())
        .filter(|path| !path.as_os_str().is_empty() && !path.starts_with("trash"))
        .collect();
    used.into_iter().choose(&mut fixture.rng)
}

fn delete_directory(fixture: &mut Fixture, disk: usize, damage: &mut Damage) {
    let Some(path) = some_directory(fixture, disk) else { return };
    damage.what = format!("/disk{disk}/{}", path.display());
    fixture.disks[disk].put(&path, None);
}

fn fail_file(fixture: &mut Fixture, disk: usize, damage: &mut Damage) {
    let Some((kind, path)) = some_file(fixture, disk) else { return };
    damage.what = format!("/disk{disk}/{}", path.display());
    damage.kind = kind;
    let times = *[1, 2, u32::MAX].choose(&mut fixture.rng).expect("not empty");
    for operation in [Operation::Other, Operation::OpenRead, Operation::Read] {
        let rule = Rule::always(operation, Fault::Errno(EIO)).on(path.to_string_lossy().into_owned());
        fixture.faults[disk].add(Rule { times, ..rule });
    }
    damage.after = readable(fixture);
    damage.after[disk].remove(&path);
}

fn fail_list(fixture: &mut Fixture, disk: usize, damage: &mut Damage) {
    let Some(path) = some_directory(fixture, disk) else { return };
    damage.what = format!("/disk{disk}/{}", path.display());
    let times = *[1, u32::MAX].choose(&mut fixture.rng).expect("not empty");
    let rule = Rule::always(Operation::Other, Fault::Errno(EIO)).on(path.to_string_lossy().into_owned());
    fixture.faults[disk].add(Rule { times, ..rule });
    damage.after = readable(fixture);
    damage.after[disk].retain(|file, _| !file.starts_with(&path));
}
