//! Which data directories were used together: so that one that is gone is missed at the next start.
//!
//! Every directory has the list in a small file beside the marker, with the *era*: how many starts before could not see
//! everything. What such a start numbers must not be numbered so by another that sees other directories. A list that can
//! not be written costs a log line.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use uuid::Uuid;

use super::disk::{LocalDisk, within};
use super::sync::SyncWrites;

/// The file's name.
pub(super) const PEERS: &str = "uniffle-worker.peers";
/// More lines are not believed.
const PEERS_MAX: usize = 1024;

/// A data directory that was in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) uuid: Uuid,
    pub(super) path: String,
}

/// What the directories say together.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// Directories that were used together with these and are not among them.
    pub(super) absent: Vec<Peer>,
    /// Starts that could not see everything.
    pub(super) era: u32,
}

fn encode(disks: &[Arc<LocalDisk>], Peers { absent, era }: &Peers) -> String {
    let present = disks.iter().map(|disk| format!("{} {}\n", disk.uuid, disk.label));
    let absent = absent.iter().map(|peer| format!("{} {}\n", peer.uuid, peer.path));
    let mut lines: Vec<String> = present.chain(absent).collect();
    lines.sort();
    format!("era {era}\n{}", lines.concat())
}

fn decode(text: &str) -> (u32, Vec<Peer>) {
    let era = text.lines().next().and_then(|line| line.strip_prefix("era ")?.parse().ok());
    let peer = |line: &str| {
        let (uuid, path) = line.split_once(' ')?;
        Some(Peer { uuid: Uuid::parse_str(uuid).ok()?, path: path.to_owned() })
    };
    (era.unwrap_or(0), text.lines().take(PEERS_MAX).filter_map(peer).collect())
}

/// Reads the lists of `disks`.
pub(super) async fn recall(disks: &[Arc<LocalDisk>], deadline: Duration) -> Peers {
    let lists = disks.iter().map(|disk| async {
        let content = within(deadline, disk.io.read_small(Path::new(PEERS))).await;
        decode(&String::from_utf8_lossy(&content.unwrap_or_default()))
    });
    let lists = join_all(lists.collect::<Vec<_>>()).await;
    let era = lists.iter().map(|(era, _)| *era).max().unwrap_or(0);
    let mut absent: Vec<Peer> = lists.into_iter().flat_map(|(_, peers)| peers).collect();
    absent.retain(|peer| disks.iter().all(|disk| disk.uuid != peer.uuid));
    absent.sort_by_key(|peer| peer.uuid);
    absent.dedup_by_key(|peer| peer.uuid);
    Peers { absent, era }
}

/// Writes the list down on every disk. Absent ones stay on it as long as something is left of their time.
pub(super) async fn remember(disks: &[Arc<LocalDisk>], peers: &Peers, deadline: Duration, sync: SyncWrites) {
    let text = encode(disks, peers);
    let writes = disks.iter().map(|disk| async {
        let path = Path::new(PEERS);
        let before = within(deadline, disk.io.read_small(path)).await.unwrap_or_default();
        if before == text.as_bytes() {
            return;
        }
        let mut written = within(deadline, disk.io.write_small(path, text.clone().into_bytes())).await;
        if sync == SyncWrites::Group && written.is_ok() {
            written = within(deadline, disk.io.sync_dir(Path::new(""))).await;
        }
        if let Err(error) = written {
            tracing::warn!(disk = %disk.label, %error, "the list of data directories can not be written");
        }
    });
    join_all(writes.collect::<Vec<_>>()).await;
}
