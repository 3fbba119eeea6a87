//! Data directories are claimed by a marker file and a lock.
//!
//! Those with our marker come first, because they know where the others were ([`mounts`]): an empty directory is claimed
//! unless it stands where a mount point should be. A directory on a read-only file system is claimed without a change to
//! it: what is there is served.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::watch;
use uuid::Uuid;

use super::config::{LocalConfig, SyncWrites};
use super::disk::{LocalDisk, within};
use super::mounts;
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_io::{Disk, Media, Mount};

/// The file that makes a directory ours and that the owner keeps locked.
pub const MARKER: &str = "uniffle-worker.claim";
/// First line of the marker: format and version.
const MARKER_HEAD: &str = "uniffle-worker local store 1";
/// Before the checksum of the lines above it.
const CHECKSUM: &str = "crc32 ";
/// What `mkfs` leaves in a root; it does no harm.
pub(super) const LOST_AND_FOUND: &str = "lost+found";

/// What is in a directory before it is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Our marker.
    Ours,
    /// Nothing, or it does not exist.
    Nothing,
}

/// Directories that are being claimed, by their places in the configuration.
struct Claims<'a> {
    config: &'a LocalConfig,
    changes: &'a Arc<watch::Sender<()>>,
    claimed: BTreeMap<usize, LocalDisk>,
    last_error: Option<StoreError>,
}

/// Claims the directories that can be used, in their order. Every change of a disk's condition is told through `changes`.
///
/// # Errors
/// `NotOurs` or `InUse` for any directory; any failure when no disk is left.
pub(super) async fn claim_all(
    disks: Vec<Arc<dyn Disk>>,
    config: &LocalConfig,
    changes: &Arc<watch::Sender<()>>,
) -> Result<Vec<LocalDisk>, StoreError> {
    let deadline = config.name_timeout;
    let paths: Vec<String> = disks.iter().map(|disk| disk.root().display().to_string()).collect();
    let mut claims = Claims { config, changes, claimed: BTreeMap::new(), last_error: None };
    let contents = join_all(disks.iter().map(|disk| look(&**disk, deadline)).collect::<Vec<_>>()).await;
    let (mut ours, mut empty) = (Vec::new(), Vec::new());
    for (place, (disk, content)) in disks.into_iter().zip(contents).enumerate() {
        match content {
            Ok(Content::Ours) => ours.push((place, disk)),
            Ok(Content::Nothing) => empty.push((place, disk)),
            Err(error) => claims.leave_out(error)?,
        }
    }
    claims.take(ours).await?;
    let mut known = mounts::recall(claims.claimed.values(), deadline).await;
    let mut mounted = Vec::new();
    for (place, disk) in empty {
        match known.require_mounted(&*disk, deadline).await {
            Ok(()) => mounted.push((place, disk)),
            Err(error) => claims.leave_out(error)?,
        }
    }
    claims.take(mounted).await?;
    known.update(&paths, claims.claimed.values());
    known.remember(claims.claimed.values(), deadline).await;
    let Claims { claimed, last_error, .. } = claims;
    if claimed.is_empty() {
        let none = || StoreError::new(StoreErrorKind::Unhealthy, "no data directory");
        return Err(last_error.unwrap_or_else(none));
    }
    Ok(claimed.into_values().collect())
}

impl Claims<'_> {
    async fn take(&mut self, disks: Vec<(usize, Arc<dyn Disk>)>) -> Result<(), StoreError> {
        let claims = disks.into_iter().map(async |(place, disk)| {
            let claimed = claim(disk, self.config, Arc::clone(self.changes)).await;
            (place, claimed)
        });
        for (place, claimed) in join_all(claims.collect::<Vec<_>>()).await {
            match claimed {
                Ok(disk) => drop(self.claimed.insert(place, disk)),
                Err(error) => self.leave_out(error)?,
            }
        }
        Ok(())
    }

    /// Goes on without a directory, unless the configuration must be wrong.
    fn leave_out(&mut self, error: StoreError) -> Result<(), StoreError> {
        if matches!(error.kind, StoreErrorKind::NotOurs | StoreErrorKind::InUse) {
            return Err(error);
        }
        tracing::error!(error = %error, "data directory cannot be used, continuing without it");
        self.last_error = Some(error);
        Ok(())
    }
}

/// Looks into a directory, which is not changed.
async fn look(io: &dyn Disk, deadline: Duration) -> Result<Content, StoreError> {
    let names = match within(deadline, io.list(Path::new(""))).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Nothing),
        names => names.map_err(|error| StoreError::io(io.root(), error))?,
    };
    if names.iter().any(|name| name == MARKER) {
        return Ok(Content::Ours);
    }
    if names.iter().any(|name| name != LOST_AND_FOUND) {
        return Err(StoreError::new(StoreErrorKind::NotOurs, io.root()));
    }
    Ok(Content::Nothing)
}

/// Makes a directory ours, or says why it cannot be.
async fn claim(
    io: Arc<dyn Disk>,
    config: &LocalConfig,
    changes: Arc<watch::Sender<()>>,
) -> Result<LocalDisk, StoreError> {
    let root = io.root().to_path_buf();
    let deadline = config.name_timeout;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => StoreError::new(StoreErrorKind::InUse, &root),
        _ => StoreError::io(&root, error),
    };
    within(deadline, io.create_dir_all(Path::new(""))).await.map_err(failed)?;
    let marker = Path::new(MARKER);
    let (lock, read_only) = match within(deadline, io.lock(marker)).await {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            (within(deadline, io.lock_existing(marker)).await, Some(error))
        }
        lock => (lock, None),
    };
    let lock = lock.map_err(failed)?;
    let uuid = identify(io.as_ref(), &root, deadline).await?;
    let unknown = || Mount { point: root.clone(), media: Media::Unknown };
    let mount = within(deadline, io.mount()).await.unwrap_or_else(|_| unknown());
    let disk = LocalDisk::new((io, uuid, lock), mount, config, changes);
    match read_only {
        Some(error) => disk.note(&error),
        None => disk.make_directories().await.map_err(failed)?,
    }
    if !config.recovery {
        disk.discard_everything().await.map_err(failed)?;
    }
    if config.sync == SyncWrites::Group {
        // What an earlier process wrote is only in the page cache yet, and it is to be believed.
        within(config.write_timeout, disk.io.sync_all()).await.map_err(failed)?;
    }
    disk.measure().await.map_err(failed)?;
    Ok(disk)
}

/// Reads the disk's identity from the marker, or gives it one.
async fn identify(io: &dyn Disk, root: &Path, deadline: Duration) -> Result<Uuid, StoreError> {
    let marker = Path::new(MARKER);
    let failed = |error| StoreError::io(root, error);
    let content = within(deadline, io.read_small(marker)).await.map_err(failed)?;
    if content.is_empty() {
        let uuid = Uuid::new_v4();
        let text = marker_of(uuid);
        within(deadline, io.write_small(marker, text.into_bytes())).await.map_err(failed)?;
        // Without its marker a directory with data in it would be refused.
        within(deadline, io.sync_dir(Path::new(""))).await.map_err(failed)?;
        return Ok(uuid);
    }
    uuid_of(&content).ok_or_else(|| StoreError::new(StoreErrorKind::NotOurs, root.join(MARKER)))
}

/// Head, identity, and a checksum of both: a directory must not become another one by a flipped bit.
fn marker_of(uuid: Uuid) -> String {
    let text = format!("{MARKER_HEAD}\n{uuid}\n");
    let checksum = crc32fast::hash(text.as_bytes());
    format!("{text}{CHECKSUM}{checksum:08x}\n")
}

/// The identity in a marker of ours. Those of 0.1.0 have no checksum.
pub(super) fn uuid_of(marker: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(marker).ok()?;
    let line = text.lines().nth(1).filter(|_| text.lines().next() == Some(MARKER_HEAD))?;
    let uuid = Uuid::parse_str(line).ok()?;
    let is_of_0_1_0 = text == format!("{MARKER_HEAD}\n{uuid}\n");
    (is_of_0_1_0 || text == marker_of(uuid)).then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_marker_is_no_other_directory_s() {
        let uuid = Uuid::from_u128(0x1234);
        let marker = marker_of(uuid).into_bytes();
        assert_eq!(uuid_of(&marker), Some(uuid));
        assert_eq!(uuid_of(format!("{MARKER_HEAD}\n{uuid}\n").as_bytes()), Some(uuid), "0.1.0");
        for bit in 0..marker.len() * 8 {
            let mut damaged = marker.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(uuid_of(&damaged), None, "bit {bit}");
        }
    }
}
