//! Which data directories were used together, and until when: so that one that is gone is missed at the next start, and
//! so is what a reset of the machine took along.
//!
//! Every directory has the list in a small file beside the marker, with the *epoch*: how many starts before could not see
//! everything. What such a start numbers must not be numbered so by another that sees other directories. A list that cannot
//!  be written costs a log line.
//!
//! What is not synced outlives the process but not the machine's kernel, so the list says under which kernel's id it was
//! written, and whether it matters (*unsynced*). When the next start finds another id, the last reports may be missing of
//! every shuffle there was, and always will be: their incarnations are *doubted*. A store that ends in order syncs what
//! there is and says so.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use uuid::Uuid;

use super::disk::{LocalDisk, within};
use super::sync::SyncWrites;
use super::{Core, LocalConfig, LocalStore};

/// The file's name.
pub(super) const MANIFEST: &str = "uniffle-worker.peers";
/// How a list says that a reset of the machine takes something along.
const UNSYNCED: &str = "unsynced";
/// More lines are not believed.
const LINES_MAX: usize = 1024;

/// A data directory that was in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownDirectory {
    pub(super) uuid: Uuid,
    pub(super) path: String,
}

/// What a reset of the machine would take along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum AtReset {
    /// Nothing: all is synced, or it is not known.
    #[default]
    Nothing,
    /// What was written last.
    Unsynced,
}

/// What the directories say together.
#[derive(Debug, Clone, Default)]
pub(super) struct Manifest {
    /// Directories that were used together with these and are not among them.
    pub(super) absent: Vec<KnownDirectory>,
    /// Starts that could not see everything.
    pub(super) epoch: u32,
    /// The machine was reset while something was not synced.
    pub(super) was_reset: bool,
    /// Of shuffles of smaller incarnations reports may be missing.
    pub(super) doubted_below: u64,
}

/// One directory's file.
#[derive(Debug, Default)]
struct List {
    epoch: u32,
    boot: String,
    at_reset: AtReset,
    doubted_below: u64,
    directories: Vec<KnownDirectory>,
}

fn encode(disks: &[Arc<LocalDisk>], known: &Manifest, boot: &str, at_reset: AtReset) -> String {
    let Manifest { absent, epoch, doubted_below, .. } = known;
    let present = disks.iter().map(|disk| format!("{} {}\n", disk.uuid, disk.label));
    let absent = absent.iter().map(|peer| format!("{} {}\n", peer.uuid, peer.path));
    let mut lines: Vec<String> = present.chain(absent).collect();
    lines.sort();
    let state = match at_reset {
        AtReset::Unsynced => UNSYNCED,
        AtReset::Nothing => "synced",
    };
    format!("era {epoch}\nboot {state} {boot}\ndoubted {doubted_below}\n{}", lines.concat())
}

fn decode(text: &str) -> List {
    let word = |name: &str| text.lines().take(LINES_MAX).find_map(|line| line.strip_prefix(name));
    let (state, boot) = word("boot ").and_then(|rest| rest.split_once(' ')).unwrap_or_default();
    let peer = |line: &str| {
        let (uuid, path) = line.split_once(' ')?;
        Some(KnownDirectory { uuid: Uuid::parse_str(uuid).ok()?, path: path.to_owned() })
    };
    List {
        epoch: word("era ").and_then(|epoch| epoch.parse().ok()).unwrap_or(0),
        boot: boot.to_owned(),
        at_reset: if state == UNSYNCED { AtReset::Unsynced } else { AtReset::Nothing },
        doubted_below: word("doubted ").and_then(|number| number.parse().ok()).unwrap_or(0),
        directories: text.lines().take(LINES_MAX).filter_map(peer).collect(),
    }
}

/// Reads the lists of `disks`, under the kernel `boot`; empty when that is not known.
pub(super) async fn recall(disks: &[Arc<LocalDisk>], deadline: Duration, boot: &str) -> Manifest {
    let lists = disks.iter().map(|disk| async {
        let content = within(deadline, disk.io.read_small(Path::new(MANIFEST))).await;
        decode(&String::from_utf8_lossy(&content.unwrap_or_default()))
    });
    let lists = join_all(lists.collect::<Vec<_>>()).await;
    let epoch = lists.iter().map(|list| list.epoch).max().unwrap_or(0);
    let doubted_below = lists.iter().map(|list| list.doubted_below).max().unwrap_or(0);
    let lost_some = |list: &List| {
        let is_other = !boot.is_empty() && !list.boot.is_empty() && list.boot != boot;
        is_other && list.at_reset == AtReset::Unsynced
    };
    let was_reset = lists.iter().any(lost_some);
    let mut absent: Vec<KnownDirectory> = lists.into_iter().flat_map(|list| list.directories).collect();
    absent.retain(|peer| disks.iter().all(|disk| disk.uuid != peer.uuid));
    absent.sort_by_key(|peer| peer.uuid);
    absent.dedup_by_key(|peer| peer.uuid);
    Manifest { absent, epoch, was_reset, doubted_below }
}

/// Writes the list down on every disk. Absent ones stay on it as long as something is left of their time.
pub(super) async fn remember(
    disks: &[Arc<LocalDisk>],
    peers: &Manifest,
    config: &LocalConfig,
    at_reset: AtReset,
) {
    let (deadline, sync) = (config.name_timeout, config.sync);
    let text = encode(disks, peers, &config.boot, at_reset);
    let writes = disks.iter().map(|disk| async {
        let path = Path::new(MANIFEST);
        let before = within(deadline, disk.io.read_small(path)).await.unwrap_or_default();
        if before == text.as_bytes() {
            return;
        }
        let mut written = within(deadline, disk.io.write_small(path, text.clone().into_bytes())).await;
        if sync == SyncWrites::Group && written.is_ok() {
            written = within(deadline, disk.io.sync_dir(Path::new(""))).await;
        }
        if let Err(error) = written {
            tracing::warn!(disk = %disk.label, %error, "the list of data directories cannot be written");
        }
    });
    join_all(writes.collect::<Vec<_>>()).await;
}

impl LocalStore {
    /// Takes over what an earlier process left, and writes down who is here now.
    pub(super) async fn take_over(&self) {
        let (disks, deadline) = (&self.core.disks, self.core.config.name_timeout);
        let mut known = recall(disks, deadline, &self.core.config.boot).await;
        if known.was_reset {
            tracing::error!(
                "the machine was reset while not everything was synced: the last reports may be missing"
            );
        }
        for peer in &known.absent {
            tracing::error!(path = %peer.path, id = %peer.uuid, "a data directory that was in use is missing");
        }
        let recovered = self.recover(&known).await;
        if recovered.shuffles.is_empty() {
            known.absent.clear();
        }
        known.epoch += u32::from(recovered.shuffles.iter().any(|shuffle| !shuffle.reason.is_empty()));
        if known.was_reset {
            known.doubted_below = self.next_incarnation.load(Ordering::Relaxed);
        }
        let at_reset = match self.core.config.sync {
            SyncWrites::Off => AtReset::Unsynced,
            SyncWrites::Group => AtReset::Nothing,
        };
        remember(disks, &known, &self.core.config, at_reset).await;
        *self.manifest.lock() = Some(known);
        *self.recovered.lock() = recovered;
    }

    /// Nothing will be written any more: brings what is written to the device, so that a reset of the machine takes nothing
    /// of it along, and writes that down. When it takes too long the next start only takes the worst for granted.
    pub async fn end(&self) {
        let config = &self.core.config;
        let known = self.manifest.lock().take();
        let Some(known) = known.filter(|_| config.sync == SyncWrites::Off && !config.boot.is_empty()) else {
            return;
        };
        if let Err(error) = within(config.end_sync_timeout, self.sync_and_say_so(&known)).await {
            tracing::warn!(%error, "not all is synced at the end: a reset of the machine puts reports in doubt");
        }
    }

    async fn sync_and_say_so(&self, known: &Manifest) -> io::Result<()> {
        let Core { disks, config, .. } = &*self.core;
        // Without a shuffle there is nothing to lose.
        let to_sync = disks.iter().filter(|_| !self.shuffles.is_empty());
        try_join_all(to_sync.map(|disk| disk.io.sync_all()).collect::<Vec<_>>()).await?;
        remember(disks, known, config, AtReset::Nothing).await;
        Ok(())
    }
}
