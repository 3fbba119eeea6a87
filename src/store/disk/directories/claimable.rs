//! Checks whether a successor or a first start could claim the data directories, without claiming
//! them: a running worker holds their locks until it hands over.
//!
//! An unresponsive directory is an obstacle: a thread that hangs in it keeps the running process
//! from becoming its successor. The check leaves nothing behind except new, empty data directories.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::join_all;
use uuid::Uuid;

use super::claim::{self, Examination};
use super::content::Content;
use super::marker::MARKER;
use crate::log::within;
use crate::store::disk::config::{LocalConfig, NAME_TIMEOUT};
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::Disk;

/// Remedy for an unresponsive data directory.
pub const HUNG_REMEDY: &str =
    "decommission the worker, wait until its applications have ended, then restart it";

/// Remedy for a data directory whose path no longer leads to it.
pub const DETACHED_REMEDY: &str = "mount its disk or move it back, then repeat the upgrade; if it is gone permanently, put an empty directory in its place and restart the worker";

/// The data directories of the running worker.
#[derive(Debug, Clone, Copy)]
pub struct HeldBy<'a> {
    /// Configured directories that the worker does not write: read-only, hung, broken, or never
    /// claimed.
    pub unhealthy: &'a [PathBuf],
    /// Identities of the directories that it has claimed.
    pub identities: &'a BTreeMap<PathBuf, [u8; 16]>,
}

impl HeldBy<'_> {
    fn is_claimed(&self, root: &Path) -> bool {
        self.identities.contains_key(root)
    }

    fn is_unhealthy(&self, root: &Path) -> bool {
        self.unhealthy.iter().any(|path| path == root)
    }
}

/// Returns whether a successor could not start because of an error. Other errors only keep it from
/// using the directory.
fn is_fatal(error: &StoreError) -> bool {
    matches!(error.kind, StoreErrorKind::Unhealthy | StoreErrorKind::InUse | StoreErrorKind::NotMounted)
}

/// Describes why a directory cannot be used, without its path.
fn describe(error: &StoreError) -> String {
    match &error.source {
        _ if error.kind == StoreErrorKind::Unhealthy => format!("does not answer: {HUNG_REMEDY}"),
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// Returns the reasons why the directories of `config` could not be used, one line each: by a
/// successor of the worker that has `held`, or else by a worker that starts now. A directory that
/// is unhealthy in the running worker is an obstacle only if the successor could not start with it,
/// or if it is no longer at its path. For a start, a missing directory is tried in its nearest
/// parent, and nothing is left behind.
pub async fn problems(config: &LocalConfig, held: Option<HeldBy<'_>>) -> Vec<String> {
    problems_on(&config.real_disks(), config, held).await
}

/// Checks whether an empty or missing directory could be claimed.
async fn try_new(disk: &Arc<dyn Disk>, config: &LocalConfig) -> Result<(), StoreError> {
    claim::require_own_disk(disk.as_ref(), config).await?;
    let mut root = disk.root().to_path_buf();
    loop {
        let at = LocalConfig { paths: vec![root.clone()], ..config.clone() }.real_disks();
        let Some(disk) = at.first() else { return Ok(()) };
        let failed = |error| StoreError::io(disk.root(), error);
        match within(NAME_TIMEOUT, disk.list(Path::new(""))).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound && root.pop() => {}
            Err(error) => return Err(failed(error)),
            Ok(_) => return try_writing(disk.as_ref()).await.map_err(failed),
        }
    }
}

/// Creates and removes a directory. It needs an inode and a block like a file, and cannot be left
/// half written.
async fn try_writing(disk: &dyn Disk) -> io::Result<()> {
    let trial = PathBuf::from(format!("trial-{}", Uuid::new_v4()));
    within(NAME_TIMEOUT, disk.create_dir_all(&trial)).await?;
    within(NAME_TIMEOUT, disk.remove_dir(&trial)).await
}

async fn problems_on(disks: &[Arc<dyn Disk>], config: &LocalConfig, held: Option<HeldBy<'_>>) -> Vec<String> {
    let none = BTreeMap::new();
    let what = if held.is_some() { "" } else { "must be a directory that this worker can claim and write: " };
    let (is_start, held) = (held.is_none(), held.unwrap_or(HeldBy { unhealthy: &[], identities: &none }));
    // Runs first, because it would see directories that `try_out` creates.
    let Examination { contents, refusals } = claim::examine(disks, held.identities).await;
    let replaced = disks.iter().zip(&contents).filter_map(|(disk, content)| {
        let now = content.as_ref().ok()?.identity()?;
        replaced(disk.root(), now, held)
    });
    let refused: Vec<String> = refusals.iter().map(ToString::to_string).chain(replaced).collect();
    let tries = disks.iter().zip(contents).map(async |(disk, content)| {
        let tried = match content {
            Ok(Content::Nothing) if is_start => try_new(disk, config).await,
            content => try_out(disk.as_ref(), content, held).await,
        };
        let error = tried.err()?;
        let counts = is_fatal(&error) || !held.is_unhealthy(disk.root());
        counts.then(|| format!("{}: {what}{}", disk.root().display(), describe(&error)))
    });
    let found = join_all(tries.collect::<Vec<_>>()).await;
    let all = found.into_iter().flatten().chain(refused);
    all.map(|why| format!("localfile_store.data_paths: {why}")).collect()
}

/// Returns an error if the directory at this path is not the one that the running worker uses.
fn replaced(root: &Path, now: Uuid, held: HeldBy<'_>) -> Option<String> {
    let uuid = Uuid::from_bytes(*held.identities.get(root)?);
    (now != uuid).then(|| {
        format!(
            "{}: not the directory of the running worker (identity {now}, in use is {uuid}); \
             {DETACHED_REMEDY}",
            root.display()
        )
    })
}

/// Checks whether a directory could be claimed, unless its content is refused.
async fn try_out(
    disk: &dyn Disk,
    content: Result<Content, StoreError>,
    held: HeldBy<'_>,
) -> Result<(), StoreError> {
    let failed = |error| StoreError::io(disk.root(), error);
    let (is_claimed, is_unhealthy) = (held.is_claimed(disk.root()), held.is_unhealthy(disk.root()));
    if is_claimed && is_gone(&content) {
        // The successor would claim another directory, or start without this one. Its metadata
        // would be missing, also after its return.
        let why = format!("not the directory of the running worker (no {MARKER}); {DETACHED_REMEDY}");
        return Err(StoreError::remote(StoreErrorKind::NotMounted, disk.root(), why));
    }
    match content? {
        // `claim::examine` has refused these.
        Content::Foreign | Content::Outdated | Content::OtherFormat | Content::Unclaimed(_) => return Ok(()),
        // The disk may not be mounted, or an empty one may have replaced it.
        Content::Nothing if is_unhealthy => return Ok(()),
        Content::Nothing => within(NAME_TIMEOUT, disk.create_dir_all(Path::new(""))).await.map_err(failed)?,
        Content::Ours(_) if !is_claimed => match within(NAME_TIMEOUT, disk.lock(Path::new(MARKER))).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let why = format!("in use by another process: {error}");
                return Err(StoreError::remote(StoreErrorKind::InUse, disk.root(), why));
            }
            locked => drop(locked.map_err(failed)?),
        },
        Content::Ours(_) => {}
    }
    match try_writing(disk).await {
        // A read-only directory is served without changing it.
        Err(error) if is_claimed && error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        tried => tried.map_err(failed),
    }
}

/// Returns whether the path leads nowhere, to an empty directory or to a file.
fn is_gone(content: &Result<Content, StoreError>) -> bool {
    match content {
        Ok(content) => matches!(content, Content::Nothing),
        Err(error) => {
            error.source.as_ref().is_some_and(|source| source.kind() == io::ErrorKind::NotADirectory)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::marker::marker_of;
    use super::*;
    use uniffle_testkit::fault::{EIO, Fault, FaultDisk, Faults, Operation, Rule};
    use uniffle_testkit::memory_disk::MemoryDisk;

    fn config(paths: &[&Path]) -> LocalConfig {
        LocalConfig { paths: paths.iter().map(|path| path.to_path_buf()).collect(), ..LocalConfig::default() }
    }

    #[tokio::test]
    async fn foreign_and_unmounted_directories_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (held, gone, full, fresh, lost) =
            (path("held"), path("gone"), path("full"), path("fresh"), path("lost"));
        for made in [&held, &gone, &full] {
            std::fs::create_dir(made).unwrap();
        }
        std::fs::write(held.join(MARKER), marker_of(Uuid::from_u128(1))).unwrap();
        std::fs::write(full.join("theirs"), "x").unwrap();
        let identities = BTreeMap::from([
            (held.clone(), Uuid::from_u128(1).into_bytes()),
            (gone.clone(), Uuid::from_u128(2).into_bytes()),
        ]);
        let by = HeldBy { unhealthy: std::slice::from_ref(&lost), identities: &identities };
        let found = problems(&config(&[&held, &gone, &full, &fresh, &lost]), Some(by)).await;
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("gone: not the directory") && found[0].contains("mount its disk"),
            "{found:?}"
        );
        assert!(found[1].contains("full") && found[1].contains("content of another program"), "{found:?}");
        let remaining = |path: &Path| std::fs::read_dir(path).unwrap().count();
        assert_eq!(
            (remaining(&fresh), remaining(&held), remaining(&full)),
            (0, 1, 1),
            "the check left files behind"
        );
        assert!(!lost.exists(), "a missing mount point was created");

        // A directory that another worker uses, and an unrelated marker.
        let disk = &config(&[&held]).real_disks()[0];
        let lock = disk.lock(Path::new(MARKER)).await.unwrap();
        let none = BTreeMap::new();
        for unhealthy in [&[][..], std::slice::from_ref(&held)] {
            let found = problems(&config(&[&held]), Some(HeldBy { unhealthy, identities: &none })).await;
            assert!(found[0].contains("in use by another process"), "{found:?}");
        }
        drop(lock);
        let by = HeldBy { unhealthy: &[], identities: &none };
        assert!(problems(&config(&[&held]), Some(by)).await.is_empty());
        std::fs::write(held.join(MARKER), "something else").unwrap();
        let found = problems(&config(&[&held]), Some(by)).await;
        assert!(found[0].contains("is damaged, and the identity of the directory is unknown"), "{found:?}");
    }

    /// A failing directory that the running worker does not use is no obstacle. One that hangs
    /// always is.
    #[tokio::test(start_paused = true)]
    async fn directory_that_hangs_is_an_obstacle_with_its_remedy() {
        let uuid = Uuid::from_u128(1);
        let root = PathBuf::from("/data1");
        let identities = BTreeMap::from([(root.clone(), uuid.into_bytes())]);
        for (operation, fault, hangs) in [
            (Operation::CreateDir, Fault::Hang, true),
            (Operation::Other, Fault::Hang, true),
            (Operation::CreateDir, Fault::Errno(EIO), false),
            (Operation::Other, Fault::Errno(EIO), false),
        ] {
            for unhealthy in [&[][..], std::slice::from_ref(&root)] {
                let (memory, faults) = (MemoryDisk::new("/data1", None), Faults::default());
                memory.write_small(Path::new(MARKER), marker_of(uuid).into_bytes()).await.unwrap();
                faults.add(Rule::always(operation, fault));
                let disks: [Arc<dyn Disk>; 1] = [Arc::new(FaultDisk::new(Arc::new(memory), faults))];
                let by = HeldBy { unhealthy, identities: &identities };
                let found = problems_on(&disks, &config(&[]), Some(by)).await.join("\n");
                let named = format!("localfile_store.data_paths: /data1: does not answer: {HUNG_REMEDY}");
                assert_eq!(found.contains(&named), hangs, "{operation:?} {found}");
                assert_eq!(found.is_empty(), !hangs && !unhealthy.is_empty(), "{operation:?} {found}");
            }
        }
    }

    /// Directories with these identities. A worker runs on the first two.
    struct Copied {
        dir: tempfile::TempDir,
        identities: BTreeMap<PathBuf, [u8; 16]>,
    }

    impl Copied {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mut identities = BTreeMap::new();
            for (name, uuid) in [("d0", 1), ("d1", 2)] {
                let uuid = Uuid::from_u128(uuid);
                identities.insert(dir.path().join(name), uuid.into_bytes());
                std::fs::create_dir(dir.path().join(name)).unwrap();
                std::fs::write(dir.path().join(name).join(MARKER), marker_of(uuid)).unwrap();
            }
            Self { dir, identities }
        }

        fn mark(&self, name: &str, content: &[u8]) {
            std::fs::create_dir_all(self.dir.path().join(name)).unwrap();
            std::fs::write(self.dir.path().join(name).join(MARKER), content).unwrap();
        }

        /// Returns the obstacles for a successor on `names`. The running worker does not use
        /// `unhealthy`.
        async fn problems_of(&self, names: &[&str], unhealthy: &[&str]) -> String {
            let paths = |names: &[&str]| names.iter().map(|name| self.dir.path().join(name)).collect();
            let (paths, unhealthy): (Vec<PathBuf>, Vec<PathBuf>) = (paths(names), paths(unhealthy));
            let by = HeldBy { unhealthy: &unhealthy, identities: &self.identities };
            let config = LocalConfig { paths, ..LocalConfig::default() };
            problems(&config, Some(by)).await.join("\n")
        }
    }

    #[tokio::test]
    async fn copied_directory_is_refused_before_the_hand_off() {
        let copied = Copied::new();
        assert_eq!(copied.problems_of(&["d0", "d1", "new"], &[]).await, "");
        let first = marker_of(Uuid::from_u128(1));
        copied.mark("d2", first.as_bytes());
        let found = copied.problems_of(&["d0", "d1", "d2"], &[]).await;
        let path = |name: &str| copied.dir.path().join(name).display().to_string();
        let expected = format!(
            "localfile_store.data_paths: {}: directory has the identity of another directory (same directory as {}, or a \
             copy of it; remove one of them from localfile_store.data_paths)",
            path("d2"),
            path("d0")
        );
        assert_eq!(found, expected, "the check must refuse with the text of the start");
        copied.mark("d1", first.as_bytes());
        let found = copied.problems_of(&["d0", "d1"], &[]).await;
        assert!(found.contains(&format!("{}: directory has the identity of another", path("d1"))), "{found}");
        let found = copied.problems_of(&["d0", "d1"], &["d1"]).await;
        assert!(
            found.contains("has the identity of another directory"),
            "a known copy was not refused: {found}"
        );
    }

    #[tokio::test]
    async fn damaged_claim_is_reported_before_the_hand_off() {
        let copied = Copied::new();
        let second = marker_of(Uuid::from_u128(2));
        let path = copied.dir.path().join("d1");
        std::fs::create_dir(path.join("uniffle-worker.metadata")).unwrap();
        let claim = path.join(MARKER);
        let flaws =
            [(None, "missing"), (Some(&b""[..]), "empty"), (Some(&second.as_bytes()[..40]), "damaged")];
        for ((content, flaw), unhealthy) in
            flaws.into_iter().flat_map(|flaw| [(flaw, &[][..]), (flaw, &["d1"])])
        {
            match content {
                Some(content) => std::fs::write(&claim, content).unwrap(),
                None => drop(std::fs::remove_file(&claim)),
            }
            let found = copied.problems_of(&["d0", "d1"], unhealthy).await;
            let (path, claim) = (path.display(), claim.display());
            let uuid = Uuid::from_u128(2);
            let expected = format!(
                "localfile_store.data_paths: {path}: directory belongs to a uniffle-worker, but its claim cannot be read ({claim} is \
                 {flaw}; its identity is {uuid} for certain: the running worker uses it; to restore the claim: printf"
            );
            assert!(found.starts_with(&expected) && found.lines().count() == 1, "{found}");
        }
        // A directory that the running worker does not have.
        copied.mark("d2", b"");
        std::fs::create_dir(copied.dir.path().join("d2/apps")).unwrap();
        let found = copied.problems_of(&["d0", "d2"], &[]).await;
        assert!(found.contains("is empty, and the identity of the directory is unknown"), "{found}");
    }

    /// Without a proposal to restore the claim of this version.
    #[tokio::test]
    async fn newer_format_is_refused_to_an_older_successor() {
        let copied = Copied::new();
        let newer = "uniffle-worker local store 2\nanything\n";
        let newer = format!("{newer}crc32 {:08x}\n", crc32fast::hash(newer.as_bytes()));
        copied.mark("d0", newer.as_bytes());
        let found = copied.problems_of(&["d0", "d1"], &[]).await;
        assert!(found.contains("d0: directory has the format of another version"), "{found}");
        assert!(!found.contains("printf"), "{found}");
    }

    #[tokio::test]
    async fn outdated_directory_is_refused_to_the_successor() {
        let copied = Copied::new();
        copied.mark("d2", b"");
        std::fs::write(copied.dir.path().join("d2/uniffle-worker.peers"), "x").unwrap();
        let found = copied.problems_of(&["d0", "d1", "d2"], &[]).await;
        assert!(found.contains("d2: directory was written by version 0.1.0"), "{found}");
    }

    #[tokio::test]
    async fn replaced_directory_is_refused_to_the_successor() {
        let copied = Copied::new();
        copied.mark("d1", marker_of(Uuid::from_u128(9)).as_bytes());
        for unhealthy in [&[][..], &["d1"]] {
            let found = copied.problems_of(&["d0", "d1"], unhealthy).await;
            assert!(found.contains("d1: not the directory of the running worker"), "{found}");
        }
        std::fs::remove_file(copied.dir.path().join("d1").join(MARKER)).unwrap();
        std::fs::write(copied.dir.path().join("d1/theirs"), "x").unwrap();
        let found = copied.problems_of(&["d0", "d1"], &["d1"]).await;
        assert!(found.contains("content of another program"), "{found}");
    }

    #[tokio::test]
    async fn detached_directory_is_refused_to_the_successor() {
        let copied = Copied::new();
        let path = copied.dir.path().join("d1");
        let away = copied.dir.path().join("away");
        std::fs::rename(&path, &away).unwrap();
        let expected = format!(
            "localfile_store.data_paths: {}: not the directory of the running worker (no {MARKER}); \
             {DETACHED_REMEDY}",
            path.display()
        );
        for unhealthy in [&[][..], &["d1"]] {
            assert_eq!(
                copied.problems_of(&["d0", "d1"], unhealthy).await,
                expected,
                "the directory was moved away"
            );
            std::fs::create_dir(&path).unwrap();
            assert_eq!(
                copied.problems_of(&["d0", "d1"], unhealthy).await,
                expected,
                "an empty directory is in its place"
            );
            std::fs::remove_dir(&path).unwrap();
            std::fs::write(&path, "x").unwrap();
            assert_eq!(
                copied.problems_of(&["d0", "d1"], unhealthy).await,
                expected,
                "a file is in its place"
            );
            std::fs::remove_file(&path).unwrap();
        }
        std::fs::rename(&away, &path).unwrap();
        assert_eq!(copied.problems_of(&["d0", "d1"], &[]).await, "", "the directory is back in its place");
    }
}
