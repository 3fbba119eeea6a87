//! Whether the data directories could be claimed, found out without claiming them: for the successor of a running worker,
//! which holds their locks until it lets go.
//!
//! Nothing is left behind but new directories themselves, empty.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use uuid::Uuid;

use super::claim;
use super::config::LocalConfig;
use super::content::{Content, Identity};
use super::disk::within;
use super::marker::MARKER;
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_io::Disk;

/// What a worker that runs has to do with the directories.
#[derive(Debug, Clone, Copy)]
pub struct HeldBy<'a> {
    /// Those that it is configured with: their locks are its own.
    pub running: &'a [PathBuf],
    /// Those of them that it does without: hung, broken, or never claimed. They are not touched, since a call may hang.
    pub given_up: &'a [PathBuf],
    /// Those of these whose locks are not its own: it never had them, or let them go.
    pub unclaimed: &'a [PathBuf],
    /// Identities of those that it has; empty from a worker that does not say.
    pub identities: &'a BTreeMap<PathBuf, [u8; 16]>,
}

/// So long is looked at a directory that is given up already.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a directory cannot be used.
struct Obstacle {
    why: String,
    /// A call on it does not come back, or another process holds it for that reason: it must not be touched.
    is_silent: bool,
}

impl From<std::io::Error> for Obstacle {
    fn from(error: std::io::Error) -> Self {
        Self { why: error.to_string(), is_silent: error.kind() == std::io::ErrorKind::TimedOut }
    }
}

impl From<StoreError> for Obstacle {
    fn from(error: StoreError) -> Self {
        match error.source {
            Some(source) => source.into(),
            None => because(error.to_string()),
        }
    }
}

fn because(why: impl Into<String>) -> Obstacle {
    Obstacle { why: why.into(), is_silent: false }
}

/// Those of the directories that the running worker does without which a successor must not touch either.
pub async fn silent(config: &LocalConfig, held: HeldBy<'_>) -> Vec<PathBuf> {
    let disks = config.real_disks();
    let given_up = disks.iter().filter(|disk| held.given_up.iter().any(|path| path == disk.root()));
    let looks = given_up.map(|disk| async {
        let is_held = !held.unclaimed.iter().any(|path| path == disk.root());
        let found = look(disk.as_ref(), is_held, PATIENCE.min(config.name_timeout)).await;
        found.is_err_and(|obstacle| obstacle.is_silent).then(|| disk.root().to_path_buf())
    });
    join_all(looks.collect::<Vec<_>>()).await.into_iter().flatten().collect()
}

/// What keeps a successor from using the directories of `config`, one line each.
pub async fn obstacles(config: &LocalConfig, held: HeldBy<'_>) -> Vec<String> {
    let disks = config.real_disks();
    let wanted = disks.iter().filter(|disk| !held.given_up.iter().any(|path| path == disk.root()));
    let looks = wanted.map(|disk| async {
        let is_held = held.running.iter().any(|path| path == disk.root());
        let found = look(disk.as_ref(), is_held, config.name_timeout).await;
        let told = |obstacle: Obstacle| {
            format!("localfile_store.data_paths: {}: {}", disk.root().display(), obstacle.why)
        };
        found.err().map(told)
    });
    // First: what the looks try out would be seen.
    let confused = confusions(config, &disks, held).await;
    let found = join_all(looks.collect::<Vec<_>>()).await;
    let mut told: Vec<String> = found.into_iter().flatten().collect();
    told.extend(confused);
    told
}

/// Directories that are not what the worker that runs has, or that the start would refuse: also those that it does without,
/// if they answer, since the start looks at them.
async fn confusions(config: &LocalConfig, disks: &[Arc<dyn Disk>], held: HeldBy<'_>) -> Vec<String> {
    let is_given_up = |disk: &Arc<dyn Disk>| held.given_up.iter().any(|path| path == disk.root());
    let peeks = disks.iter().map(|disk| {
        let deadline =
            if is_given_up(disk) { PATIENCE.min(config.name_timeout) } else { config.name_timeout };
        claim::look(disk.as_ref(), deadline)
    });
    let peeked = join_all(peeks.collect::<Vec<_>>()).await;
    let of = |(disk, content): (&Arc<dyn Disk>, &Result<Content, StoreError>)| match content {
        Ok(Content::Ours(uuid)) => Some((disk.root().to_path_buf(), *uuid)),
        Ok(Content::Nothing | Content::Foreign | Content::Outdated | Content::Unclaimed(_)) | Err(_) => None,
    };
    let identities: Vec<(PathBuf, Uuid)> = disks.iter().zip(&peeked).filter_map(of).collect();
    let others: Vec<Uuid> = identities.iter().map(|(_, uuid)| *uuid).collect();
    let deadline = config.name_timeout;
    let same =
        claim::refuse_same_places(disks.iter().filter(|it| !is_given_up(it)).map(|it| &**it), deadline);
    let confused = same.await.and(claim::refuse_copies(&identities));
    let mut told: Vec<String> = confused.err().iter().map(ToString::to_string).collect();
    for (disk, content) in disks.iter().zip(peeked) {
        told.extend(match content {
            Ok(Content::Ours(now)) => replaced(disk.root(), now, held),
            Ok(Content::Unclaimed(flaw)) => {
                let own = claim::identity_of(disk.as_ref(), &others, config.name_timeout).await;
                let identity = in_use(disk.root(), held, own);
                Some(claim::unclaimed_error(disk.root(), flaw, &identity).to_string())
            }
            Ok(Content::Outdated) => Some(StoreError::new(StoreErrorKind::Outdated, disk.root()).to_string()),
            // Of the others it is told already.
            Ok(Content::Foreign) if is_given_up(disk) => {
                Some(StoreError::new(StoreErrorKind::NotOurs, disk.root()).to_string())
            }
            Ok(Content::Foreign | Content::Nothing) | Err(_) => None,
        });
    }
    told.into_iter().map(|why| format!("localfile_store.data_paths: {why}")).collect()
}

/// The identity of a directory without a claim: that in use, unless what is in it says otherwise.
fn in_use(root: &Path, held: HeldBy<'_>, own: Identity) -> Identity {
    let Some(uuid) = held.identities.get(root).copied().map(Uuid::from_bytes) else { return own };
    match own {
        Identity::Certain(another, _) if another != uuid => own,
        Identity::Certain(..) | Identity::ByPath(_) | Identity::OneOf(_) | Identity::Unknown => {
            Identity::Certain(uuid, "the running worker uses it")
        }
    }
}

/// That a directory is another one than the running worker has by this path.
fn replaced(root: &Path, now: Uuid, held: HeldBy<'_>) -> Option<String> {
    let uuid = Uuid::from_bytes(*held.identities.get(root)?);
    (now != uuid).then(|| {
        format!(
            "{}: not the directory of the running worker (identity {now}, in use is {uuid}); restore that \
             directory, or replace it by an empty one",
            root.display()
        )
    })
}

async fn look(disk: &dyn Disk, is_held: bool, deadline: Duration) -> Result<(), Obstacle> {
    let root = Path::new("");
    if !is_held {
        within(deadline, disk.create_dir_all(root)).await?;
    }
    match claim::look(disk, deadline).await? {
        // Told by `confusions`.
        Content::Unclaimed(_) | Content::Outdated => return Ok(()),
        Content::Nothing if is_held => {
            return Err(because(format!("{MARKER} is missing; check whether the disk is mounted")));
        }
        Content::Foreign => {
            return Err(because(
                "new directory is not empty and does not belong to this worker; use an empty one",
            ));
        }
        Content::Ours(_) if !is_held => require_unlocked(disk, deadline).await?,
        Content::Nothing | Content::Ours(_) => {}
    }
    // A directory needs an inode and a block as a file does, and cannot be left half written.
    let trial = PathBuf::from(format!("trial-{}", Uuid::new_v4()));
    match within(deadline, disk.create_dir_all(&trial)).await {
        // It goes on being served without a change to it.
        Err(error) if is_held && error.kind() == std::io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        made => {
            made?;
            Ok(within(deadline, disk.remove_dir(&trial)).await?)
        }
    }
}

async fn require_unlocked(disk: &dyn Disk, deadline: Duration) -> Result<(), Obstacle> {
    let locked = within(deadline, disk.lock(Path::new(MARKER))).await;
    let used = |error: std::io::Error| Obstacle {
        is_silent: [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut].contains(&error.kind()),
        why: format!("in use by another process: {error}"),
    };
    locked.map(drop).map_err(used)
}

#[cfg(test)]
mod tests {
    use super::super::marker::marker_of;
    use super::*;

    fn config(paths: &[&Path]) -> LocalConfig {
        LocalConfig { paths: paths.iter().map(|path| path.to_path_buf()).collect(), ..LocalConfig::default() }
    }

    #[tokio::test]
    async fn foreign_and_unmounted_directories_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (held, gone, full, fresh, hung) =
            (path("held"), path("gone"), path("full"), path("fresh"), path("hung"));
        for made in [&held, &gone, &full] {
            std::fs::create_dir(made).unwrap();
        }
        std::fs::write(held.join(MARKER), marker_of(Uuid::from_u128(1))).unwrap();
        std::fs::write(full.join("theirs"), "x").unwrap();
        let none = BTreeMap::new();
        let running = [held.clone(), gone.clone(), hung.clone()];
        let by = HeldBy {
            running: &running,
            given_up: std::slice::from_ref(&hung),
            unclaimed: &[],
            identities: &none,
        };
        let told = obstacles(&config(&[&held, &gone, &full, &fresh, &hung]), by).await;
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("gone") && told[0].contains("disk is mounted"), "{told:?}");
        assert!(told[1].contains("full") && told[1].contains("not empty"), "{told:?}");
        let left = |path: &Path| std::fs::read_dir(path).unwrap().count();
        assert_eq!((left(&fresh), left(&held), left(&full)), (0, 1, 1), "nothing is left behind");
        assert!(!hung.exists(), "what the running worker does without is not touched");

        // One that another worker uses, and a marker of something else.
        let disk = &config(&[&held]).real_disks()[0];
        let lock = disk.lock(Path::new(MARKER)).await.unwrap();
        let by = HeldBy { running: &[], given_up: &[], unclaimed: &[], identities: &none };
        let told = obstacles(&config(&[&held]), by).await;
        assert!(told[0].contains("in use by another process"), "{told:?}");
        // One that the running worker let go of, and that the process before it holds.
        let paths = std::slice::from_ref(&held);
        let without = HeldBy { running: paths, given_up: paths, unclaimed: paths, identities: &none };
        assert_eq!(silent(&config(&[&held]), without).await, paths, "it is not touched");
        let own = HeldBy { unclaimed: &[], ..without };
        assert!(silent(&config(&[&held]), own).await.is_empty(), "it is its own, and answers again");
        drop(lock);
        assert!(obstacles(&config(&[&held]), by).await.is_empty());
        std::fs::write(held.join(MARKER), "something else").unwrap();
        let told = obstacles(&config(&[&held]), by).await;
        assert!(told[0].contains("is damaged, and the identity of the directory is unknown"), "{told:?}");
    }

    /// Directories with these identities, what they are configured with, and what a worker that runs on the first two has.
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

        /// What stands against a successor on these, of which the running one does without some.
        async fn told(&self, names: &[&str], given_up: &[&str]) -> String {
            let paths = |names: &[&str]| names.iter().map(|name| self.dir.path().join(name)).collect();
            let (paths, given_up): (Vec<PathBuf>, Vec<PathBuf>) = (paths(names), paths(given_up));
            let running: Vec<PathBuf> = self.identities.keys().cloned().collect();
            let by = HeldBy {
                running: &running,
                given_up: &given_up,
                unclaimed: &[],
                identities: &self.identities,
            };
            let config = LocalConfig { paths, ..LocalConfig::default() };
            obstacles(&config, by).await.join("\n")
        }
    }

    #[tokio::test]
    async fn copied_directory_is_refused_before_the_hand_off() {
        let copied = Copied::new();
        assert_eq!(copied.told(&["d0", "d1", "new"], &[]).await, "");
        let first = marker_of(Uuid::from_u128(1));
        copied.mark("d2", first.as_bytes());
        let told = copied.told(&["d0", "d1", "d2"], &[]).await;
        let path = |name: &str| copied.dir.path().join(name).display().to_string();
        let expected = format!(
            "localfile_store.data_paths: {}: directory has the identity of another directory (same directory as {}, or a \
             copy of it; remove one of them from localfile_store.data_paths)",
            path("d2"),
            path("d0")
        );
        assert_eq!(told, expected, "as the start says it");
        copied.mark("d1", first.as_bytes());
        let told = copied.told(&["d0", "d1"], &[]).await;
        assert!(told.contains(&format!("{}: directory has the identity of another", path("d1"))), "{told}");
        let told = copied.told(&["d0", "d1"], &["d1"]).await;
        assert!(told.contains("has the identity of another directory"), "it was noticed already: {told}");
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
        for ((content, flaw), given_up) in
            flaws.into_iter().flat_map(|flaw| [(flaw, &[][..]), (flaw, &["d1"])])
        {
            match content {
                Some(content) => std::fs::write(&claim, content).unwrap(),
                None => drop(std::fs::remove_file(&claim)),
            }
            let told = copied.told(&["d0", "d1"], given_up).await;
            let (path, claim) = (path.display(), claim.display());
            let uuid = Uuid::from_u128(2);
            let expected = format!(
                "localfile_store.data_paths: {path}: directory belongs to a uniffle-worker, but its claim cannot be read ({claim} is \
                 {flaw}; its identity is {uuid} for certain: the running worker uses it; to restore the claim: printf"
            );
            assert!(told.starts_with(&expected) && told.lines().count() == 1, "{told}");
        }
        // One that the running worker does not have.
        copied.mark("d2", b"");
        std::fs::create_dir(copied.dir.path().join("d2/apps")).unwrap();
        let told = copied.told(&["d0", "d2"], &[]).await;
        assert!(told.contains("is empty, and the identity of the directory is unknown"), "{told}");
    }

    #[tokio::test]
    async fn outdated_directory_is_refused_to_the_successor() {
        let copied = Copied::new();
        copied.mark("d2", b"");
        std::fs::write(copied.dir.path().join("d2/uniffle-worker.peers"), "x").unwrap();
        let told = copied.told(&["d0", "d1", "d2"], &[]).await;
        assert!(told.contains("d2: directory was written by version 0.1.0"), "{told}");
    }

    #[tokio::test]
    async fn replaced_directory_is_refused_to_the_successor() {
        let copied = Copied::new();
        copied.mark("d1", marker_of(Uuid::from_u128(9)).as_bytes());
        for given_up in [&[][..], &["d1"]] {
            let told = copied.told(&["d0", "d1"], given_up).await;
            assert!(told.contains("d1: not the directory of the running worker"), "{told}");
        }
        // Noticed and given up: its claim is gone, of which the start would die.
        std::fs::remove_file(copied.dir.path().join("d1").join(MARKER)).unwrap();
        assert_eq!(copied.told(&["d0", "d1"], &["d1"]).await, "", "an empty one in its place");
        std::fs::write(copied.dir.path().join("d1/theirs"), "x").unwrap();
        let told = copied.told(&["d0", "d1"], &["d1"]).await;
        assert!(told.contains("content of another program"), "{told}");
    }
}
