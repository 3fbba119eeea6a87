//! Whether the data directories could be claimed, found out without claiming them: for the successor of a running worker,
//! which holds their locks until it lets go.
//!
//! Nothing is left behind but new directories themselves, empty.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use uuid::Uuid;

use super::claim::LOST_AND_FOUND;
use super::config::LocalConfig;
use super::disk::within;
use super::marker::{MARKER, uuid_of};
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
    join_all(looks.collect::<Vec<_>>()).await.into_iter().flatten().collect()
}

async fn look(disk: &dyn Disk, is_held: bool, deadline: Duration) -> Result<(), Obstacle> {
    let root = Path::new("");
    if !is_held {
        within(deadline, disk.create_dir_all(root)).await?;
    }
    let names = within(deadline, disk.list(root)).await?;
    let marker = Path::new(MARKER);
    if names.iter().any(|name| name == MARKER) {
        let content = within(deadline, disk.read_small(marker)).await?;
        let is_new = content.is_empty() && !is_held;
        if !is_new && uuid_of(&content).is_none() {
            return Err(because(format!("{MARKER} is not this worker's marker")));
        }
        if !is_held {
            let locked = within(deadline, disk.lock(marker)).await;
            let used = |error: std::io::Error| Obstacle {
                is_silent: [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut]
                    .contains(&error.kind()),
                why: format!("another process uses it: {error}"),
            };
            drop(locked.map_err(used)?);
        }
    } else if is_held {
        return Err(because(format!("{MARKER} is gone: is it still mounted?")));
    } else if names.iter().any(|name| name != LOST_AND_FOUND) {
        return Err(because("it is new, not empty, and not this worker's; it would not be claimed"));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn config(paths: &[&Path]) -> LocalConfig {
        LocalConfig { paths: paths.iter().map(|path| path.to_path_buf()).collect(), ..LocalConfig::default() }
    }

    #[tokio::test]
    async fn d5_a_new_directory_that_is_not_ours_and_one_that_was_unmounted_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (held, gone, full, fresh, hung) =
            (path("held"), path("gone"), path("full"), path("fresh"), path("hung"));
        for made in [&held, &gone, &full] {
            std::fs::create_dir(made).unwrap();
        }
        let marker = format!("{}\n{}\n", "uniffle-worker local store 1", Uuid::new_v4());
        std::fs::write(held.join(MARKER), marker).unwrap();
        std::fs::write(full.join("theirs"), "x").unwrap();
        let running = [held.clone(), gone.clone(), hung.clone()];
        let by = HeldBy { running: &running, given_up: std::slice::from_ref(&hung), unclaimed: &[] };
        let told = obstacles(&config(&[&held, &gone, &full, &fresh, &hung]), by).await;
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("gone") && told[0].contains("still mounted"), "{told:?}");
        assert!(told[1].contains("full") && told[1].contains("not empty"), "{told:?}");
        let left = |path: &Path| std::fs::read_dir(path).unwrap().count();
        assert_eq!((left(&fresh), left(&held), left(&full)), (0, 1, 1), "nothing is left behind");
        assert!(!hung.exists(), "what the running worker does without is not touched");

        // One that another worker uses, and a marker of something else.
        let disk = &config(&[&held]).real_disks()[0];
        let lock = disk.lock(Path::new(MARKER)).await.unwrap();
        let by = HeldBy { running: &[], given_up: &[], unclaimed: &[] };
        let told = obstacles(&config(&[&held]), by).await;
        assert!(told[0].contains("another process uses it"), "{told:?}");
        // One that the running worker let go of, and that the process before it holds.
        let paths = std::slice::from_ref(&held);
        let without = HeldBy { running: paths, given_up: paths, unclaimed: paths };
        assert_eq!(silent(&config(&[&held]), without).await, paths, "it is not touched");
        let own = HeldBy { unclaimed: &[], ..without };
        assert!(silent(&config(&[&held]), own).await.is_empty(), "it is its own, and answers again");
        drop(lock);
        assert!(obstacles(&config(&[&held]), by).await.is_empty());
        std::fs::write(held.join(MARKER), "something else").unwrap();
        let told = obstacles(&config(&[&held]), by).await;
        assert!(told[0].contains("not this worker's marker"), "{told:?}");
    }
}
