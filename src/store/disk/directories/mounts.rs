//! Records the mount point of every data directory. An empty directory whose disk is not mounted
//! must not be taken for a new one, because writes would fill the disk below it.
//!
//! Every directory has the list in a small file, with one line per configured directory. It is only
//! used to exclude empty directories, so a list that cannot be read is ignored, and one that cannot
//! be written only causes a log line. A replacement disk has the same mount point, so it is
//! accepted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use futures::future::join_all;

use super::directory::LocalDisk;
use crate::log::within;
use crate::store::disk::config::NAME_TIMEOUT;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::Disk;

/// Name of the file.
pub(in crate::store::disk) const MOUNTS: &str = "uniffle-worker.mounts";
/// Maximum number of lines. Further lines are ignored.
const LINES_MAX: usize = 1024;

/// Mount points by data directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Mounts(BTreeMap<String, PathBuf>);

/// Merges the lists of the directories. Later lists take precedence.
pub(super) async fn load(disks: impl Iterator<Item = &LocalDisk>) -> Mounts {
    let lists =
        disks.map(|disk| within(NAME_TIMEOUT, disk.io.read_small(Path::new(MOUNTS)))).collect::<Vec<_>>();
    let mut known = Mounts::default();
    for content in join_all(lists).await.into_iter().flatten() {
        known.0.extend(Mounts::decode(&String::from_utf8_lossy(&content)).0);
    }
    known
}

impl Mounts {
    /// Encodes one line per directory: the mount point, a tab and the directory.
    fn encode(&self) -> String {
        let plain = |text: &str| !text.contains(['\t', '\n']);
        let lines = self.0.iter().map(|(path, point)| (path, point.to_string_lossy()));
        let lines = lines.filter(|(path, point)| plain(path) && plain(point));
        lines.map(|(path, point)| format!("{point}\t{path}\n")).collect()
    }

    fn decode(text: &str) -> Self {
        let lines = text.lines().take(LINES_MAX).filter_map(|line| line.split_once('\t'));
        Self(lines.map(|(point, path)| (path.to_owned(), point.into())).collect())
    }

    /// Refuses an empty directory whose recorded mount point is not mounted: the directory is now
    /// on a file system above it.
    pub(in crate::store::disk) async fn require_mounted(&self, disk: &dyn Disk) -> Result<(), StoreError> {
        let Some(before) = self.0.get(&disk.root().display().to_string()) else { return Ok(()) };
        let Ok(now) = within(NAME_TIMEOUT, disk.mount()).await else { return Ok(()) };
        if *before == now.point || !before.starts_with(&now.point) {
            return Ok(());
        }
        let text = format!(
            "was on the mount point {} and is now on {}; mount the disk, or if it is gone permanently, start with \
             localfile_store.require_mounted = false to use the empty directory",
            before.display(),
            now.point.display()
        );
        Err(StoreError::remote(StoreErrorKind::NotMounted, disk.root(), text))
    }

    /// Updates the mount points of the present directories. Those of other configured directories
    /// are unchanged.
    pub(in crate::store::disk) fn update<'a>(
        &mut self,
        configured: &[String],
        disks: impl Iterator<Item = &'a LocalDisk>,
    ) {
        self.0.retain(|path, _| configured.contains(path));
        self.0.extend(disks.map(|disk| (disk.label.clone(), disk.mount_point().to_owned())));
    }

    /// Writes the list to every healthy directory whose list differs.
    pub(super) async fn save(&self, disks: impl Iterator<Item = &LocalDisk>) {
        let (path, text) = (Path::new(MOUNTS), self.encode());
        let writes = disks.filter(|disk| disk.is_healthy()).map(async |disk: &LocalDisk| {
            let before = within(NAME_TIMEOUT, disk.io.read_small(path)).await.unwrap_or_default();
            if before == text.as_bytes() {
                return;
            }
            let written = within(NAME_TIMEOUT, disk.io.write_small(path, text.clone().into_bytes())).await;
            if let Err(error) = written {
                tracing::warn!(disk = %disk.label, %error, "cannot write the list of mount points");
            }
        });
        join_all(writes.collect::<Vec<_>>()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_round_trips_without_damaged_lines() {
        let pairs = [("/d/a b", "/d"), ("/e", "/"), ("/new\nline", "/")];
        let mounts = Mounts(pairs.map(|(path, point)| (path.to_owned(), point.into())).into());
        let mut expected = mounts.clone();
        expected.0.remove("/new\nline");
        assert_eq!(Mounts::decode(&mounts.encode()), expected);
        assert_eq!(Mounts::decode("\u{fffd}\n/d\n"), Mounts::default());
    }
}
