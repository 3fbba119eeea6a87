//! Corruptions of the files of a stopped worker and of the disks of the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::RngExt;
use rand::seq::{IndexedRandom, IteratorRandom};

use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::on_disk::{CLAIM, DirectoryFiles};

use super::fixture::Fixture;
use super::rewrite;

const SECTOR_BYTES: usize = 512;

/// A kind of corruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Corruption {
    /// The control: everything must be served.
    Nothing,
    /// Flips one bit of a file.
    Flip,
    /// Zeros a sector of a file.
    Zero,
    /// Truncates a file.
    Cut,
    /// Deletes a file.
    Delete,
    /// Resets a file to an earlier version.
    Older,
    /// Removes the last records of both copies of the metadata log, or damages the last one in
    /// both.
    BothCopies,
    /// Deletes a directory below the data directory.
    DeleteDirectory,
    /// Removes a data directory for one start.
    Absent,
    /// Removes one data directory for one start and another one for the next.
    Alternate,
    /// Replaces a data directory by an empty mount point.
    Unmounted,
    /// Loses power.
    Reset,
    /// Lets a file return EIO.
    FailingFile,
    /// Makes a directory unlistable.
    FailingList,
    /// Makes the disk read-only.
    ReadOnly,
}

/// Corruptions, with frequent ones listed more than once.
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

/// One corruption and its place.
#[derive(Debug)]
pub(crate) struct Damage {
    pub(crate) corruption: Corruption,
    /// The kind of file: the extension of a numbered file, otherwise the name. Empty unless one
    /// file is damaged.
    pub(crate) kind: String,
    /// Description for the report.
    pub(crate) what: String,
    /// Readable files of each disk after the corruption. An absent disk has none.
    pub(crate) after: Vec<DirectoryFiles>,
    /// The disk that was replaced by an empty one.
    replaced: Option<(usize, Arc<MemoryDisk>)>,
    /// With alternating absence, the disk that is absent next.
    next_absent: Option<usize>,
}

impl Damage {
    /// Ends a temporary corruption, or lets the next disk be absent. Returns false when everything
    /// is back.
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

    /// Returns whether a later start finds more than the first one.
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

    /// Returns whether it is the known gap (docs/durability.md): the only data directory is an
    /// empty mount point.
    pub(crate) fn is_known_gap(&self, fixture: &Fixture) -> bool {
        self.corruption == Corruption::Unmounted && fixture.disks.len() == 1
    }

    /// Returns whether all metadata with two copies keeps one, and single files are intact, except
    /// claims. A power loss qualifies: registrations and reports are on the device before they are
    /// acknowledged.
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
        // A claim is restored from the error of the refused start. An unreadable one omits the
        // directory.
        let is_kept = match self.kind == CLAIM {
            true => self.corruption != Corruption::FailingFile,
            false => disks > 1,
        };
        matches!(self.corruption, Corruption::Nothing | Corruption::ReadOnly | Corruption::Reset)
            || one_file && (bulk || is_kept)
    }
}

/// Applies a random corruption to the disks of a stopped worker.
pub(crate) fn damage(fixture: &mut Fixture) -> Damage {
    let corruption = *CORRUPTIONS.choose(&mut fixture.rng).unwrap();
    let all = fixture.disks.len();
    let corruption =
        if corruption == Corruption::Alternate && all == 1 { Corruption::Absent } else { corruption };
    // A start needs at least one disk.
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

/// Returns the files of the present disks.
pub(crate) fn readable(fixture: &Fixture) -> Vec<DirectoryFiles> {
    let files = fixture.files().into_iter().zip(&fixture.present);
    files.map(|(files, present)| if *present { files } else { DirectoryFiles::new() }).collect()
}

fn kind_of(path: &Path) -> String {
    let text = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let is_numbered = text(path.file_stem()).bytes().all(|byte| byte.is_ascii_digit());
    match path.extension() {
        Some(extension) if is_numbered => text(Some(extension)),
        _ => text(path.file_name()),
    }
}

/// Returns a random file. Every kind of file is equally likely.
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
    let mut content = fixture.disks[disk].content(&path).unwrap();
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
            let older =
                |files: &Vec<DirectoryFiles>| files[disk].get(&path).filter(|old| **old != content).cloned();
            // A file without another version stays as it is.
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
        let files = disk.snapshot().into_iter().filter(|(path, _)| rewrite::is_log(path));
        files.map(|(path, content)| (Arc::clone(disk), path, content)).collect::<Vec<_>>()
    };
    let copies: Vec<_> = fixture.disks.iter().flat_map(logs).collect();
    let Some((_, _, longest)) = copies.iter().max_by_key(|(_, _, content)| content.len()) else { return };
    let frames = rewrite::frames(longest).len() as u64;
    let kept = frames.saturating_sub(fixture.rng.random_range(1..=3)).max(1);
    let fits = rewrite::chained(longest, |frame| (frame.sequence < kept).then_some(frame.entry)).len();
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

/// Returns an offset anywhere or near the end.
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
    let times = *[1, 2, u32::MAX].choose(&mut fixture.rng).unwrap();
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
    let times = *[1, u32::MAX].choose(&mut fixture.rng).unwrap();
    let rule = Rule::always(Operation::Other, Fault::Errno(EIO)).on(path.to_string_lossy().into_owned());
    fixture.faults[disk].add(Rule { times, ..rule });
    damage.after = readable(fixture);
    damage.after[disk].retain(|file, _| !file.starts_with(&path));
}
