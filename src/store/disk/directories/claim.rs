//! Claims the data directories with a marker file and a lock.
//!
//! The content of a directory decides whether it is claimed ([`content`]). A directory of another
//! program is refused, and so is one of a worker without a readable marker. Directories with a
//! marker are claimed first, because they record the mount points of the others ([`mounts`]). An
//! empty directory is claimed unless a mount point is expected there. A directory on a read-only
//! file system is claimed without changing it, and its data is served.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::join_all;
use tokio::sync::watch;
use uuid::Uuid;

use super::content::{self, Content, Identity, content_of};
use super::directory::LocalDisk;
use super::marker::{MARKER, marker_of};
use super::mounts;
use crate::log::{newest_epoch, within};
use crate::store::disk::config::{LocalConfig, NAME_TIMEOUT, SyncWrites};
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::{Disk, Location, Media, Mount};

/// Directories that are being claimed, by their positions in the configuration.
struct Claims<'a> {
    config: &'a LocalConfig,
    changes: &'a Arc<watch::Sender<()>>,
    claimed: BTreeMap<usize, LocalDisk>,
    last_error: Option<StoreError>,
}

/// A data directory, with its position in the configuration.
struct PlacedDisk {
    place: usize,
    disk: Arc<dyn Disk>,
}

/// Claims the usable directories, in the order of the configuration. Every change of a disk's
/// condition is sent to `changes`. A refused start leaves no new claims behind.
///
/// # Errors
/// The error of a directory that must not be used (`is_refused`), `NotMounted` if the start may
/// miss the disks of earlier data or a required mount is missing, or the last failure if no disk is
/// left.
pub(in crate::store::disk) async fn claim_all(
    disks: Vec<Arc<dyn Disk>>,
    config: &LocalConfig,
    changes: &Arc<watch::Sender<()>>,
) -> Result<Vec<LocalDisk>, StoreError> {
    let mut claims = Claims { config, changes, claimed: BTreeMap::new(), last_error: None };
    if let Err(error) = claims.take_all(disks).await {
        let new = claims.claimed.values().filter(|disk| !disk.was_used);
        join_all(new.map(|disk| disk.abandon()).collect::<Vec<_>>()).await;
        return Err(error);
    }
    Ok(claims.claimed.into_values().collect())
}

/// Result of examining the data directories before they are claimed.
pub(super) struct Examination {
    /// Content per directory.
    pub(super) contents: Vec<Result<Content, StoreError>>,
    /// Errors that prevent a start.
    pub(super) refusals: Vec<StoreError>,
}

/// Examines the directories without changing them, for a claim or a rehearsal of one. `in_use` has
/// the identities of the directories that a running worker has claimed.
pub(super) async fn examine(disks: &[Arc<dyn Disk>], in_use: &BTreeMap<PathBuf, [u8; 16]>) -> Examination {
    let same = refuse_same_places(disks.iter().map(|disk| &**disk)).await;
    let reads = disks.iter().map(|disk| read_content(&**disk));
    let contents = join_all(reads.collect::<Vec<_>>()).await;
    let own_identity = |(disk, content): (&Arc<dyn Disk>, &Result<Content, StoreError>)| {
        Some((disk.root().to_path_buf(), content.as_ref().ok()?.identity()?))
    };
    let identities: Vec<(PathBuf, Uuid)> = disks.iter().zip(&contents).filter_map(own_identity).collect();
    let others: Vec<Uuid> = identities.iter().map(|(_, uuid)| *uuid).collect();
    let mut refusals = Vec::new();
    for (disk, content) in disks.iter().zip(&contents) {
        let Ok(content) = content else { continue };
        let known = in_use.get(disk.root()).map(|uuid| Uuid::from_bytes(*uuid));
        refusals.extend(refusal(&**disk, *content, &others, known).await);
    }
    refusals.extend(same.and(refuse_copies(&identities)).err());
    Examination { contents, refusals }
}

/// Returns the error for a directory with content that cannot be claimed. `others` are the
/// identities of other directories, and `in_use` is that of the running worker's directory at the
/// same path.
async fn refusal(
    io: &dyn Disk,
    content: Content,
    others: &[Uuid],
    in_use: Option<Uuid>,
) -> Option<StoreError> {
    let kind = match content {
        Content::Nothing | Content::Ours(_) => return None,
        Content::Foreign => StoreErrorKind::NotOurs,
        Content::Outdated => StoreErrorKind::Outdated,
        Content::OtherFormat => StoreErrorKind::OtherFormat,
        Content::Unclaimed(flaw) => {
            let epoch = newest_epoch(io, NAME_TIMEOUT).await;
            let identity = content::identity(&io.root().display().to_string(), epoch.as_ref(), others);
            let identity = in_use.into_iter().fold(identity, Identity::or_in_use);
            let text = content::describe_flaw(io.root(), flaw, &identity);
            return Some(StoreError::remote(StoreErrorKind::Unclaimed, io.root(), text));
        }
    };
    Some(StoreError::new(kind, io.root()))
}

/// Refuses two paths that lead to one directory.
async fn refuse_same_places(disks: impl Iterator<Item = &dyn Disk>) -> Result<(), StoreError> {
    let places = disks.map(async |disk| (disk.root(), within(NAME_TIMEOUT, disk.location()).await));
    let mut known: HashMap<Location, &Path> = HashMap::new();
    for (root, place) in join_all(places.collect::<Vec<_>>()).await {
        // A directory that does not answer is left out later.
        let Ok(place) = place else { continue };
        if let Some(other) = known.insert(place, root) {
            let text = format!(
                "same directory as {} by another path; remove one of them from localfile_store.data_paths",
                other.display()
            );
            return Err(StoreError::remote(StoreErrorKind::Copied, root, text));
        }
    }
    Ok(())
}

impl Claims<'_> {
    async fn take_all(&mut self, disks: Vec<Arc<dyn Disk>>) -> Result<(), StoreError> {
        let paths: Vec<String> = disks.iter().map(|disk| disk.root().display().to_string()).collect();
        let Examination { contents, refusals } = examine(&disks, &BTreeMap::new()).await;
        if let Some(refused) = refusals.into_iter().next() {
            return Err(refused);
        }
        let (mut own_identity, mut empty) = (Vec::new(), Vec::new());
        for ((place, disk), content) in disks.into_iter().enumerate().zip(contents) {
            match content {
                Ok(content) if content.identity().is_some() => own_identity.push(PlacedDisk { place, disk }),
                // All other contents were refused by `examine`.
                Ok(_) => empty.push(PlacedDisk { place, disk }),
                Err(error) => self.leave_out(error)?,
            }
        }
        if own_identity.is_empty()
            && let Some(PlacedDisk { disk, .. }) = empty.first()
        {
            require_known_data(&**disk, self.config)?;
        }
        let taken = self.take(own_identity).await;
        self.claimed.values_mut().for_each(|disk| disk.was_used = true);
        taken?;
        self.take_empty(empty, &paths).await
    }

    /// Claims the empty directories whose disks are mounted, and records the mount points of all
    /// claimed directories.
    async fn take_empty(&mut self, empty: Vec<PlacedDisk>, paths: &[String]) -> Result<(), StoreError> {
        let mut known = mounts::load(self.claimed.values()).await;
        let mut mounted = Vec::new();
        for PlacedDisk { place, disk } in empty {
            let is_mounted = match self.config.require_mounted {
                Some(false) => Ok(()),
                _ => known.require_mounted(&*disk).await,
            };
            match is_mounted {
                Ok(()) => {
                    require_own_disk(&*disk, self.config).await?;
                    mounted.push(PlacedDisk { place, disk });
                }
                Err(error) => self.leave_out(error)?,
            }
        }
        self.take(mounted).await?;
        known.update(paths, self.claimed.values());
        known.save(self.claimed.values()).await;
        if self.claimed.is_empty() && !paths.is_empty() {
            let none = || StoreError::new(StoreErrorKind::Unhealthy, "no data directory");
            return Err(self.last_error.take().unwrap_or_else(none));
        }
        Ok(())
    }

    async fn take(&mut self, disks: Vec<PlacedDisk>) -> Result<(), StoreError> {
        let claims = disks.into_iter().map(async |PlacedDisk { place, disk }| {
            let claimed = claim(disk, self.config, Arc::clone(self.changes)).await;
            (place, claimed)
        });
        let mut refused = Ok(());
        for (place, claimed) in join_all(claims.collect::<Vec<_>>()).await {
            match claimed {
                Ok(disk) => drop(self.claimed.insert(place, disk)),
                Err(error) => refused = refused.and(self.leave_out(error)),
            }
        }
        refused
    }

    /// Continues without a directory, unless its error means that the configuration is wrong.
    fn leave_out(&mut self, error: StoreError) -> Result<(), StoreError> {
        if is_refused(&error) {
            return Err(error);
        }
        tracing::error!(error = %error, "cannot use the data directory; continuing without it");
        self.last_error = Some(error);
        Ok(())
    }
}

/// Returns whether an error prevents the start. Other errors that [`Claims::leave_out`] gets only
/// exclude the directory.
fn is_refused(error: &StoreError) -> bool {
    matches!(
        error.kind,
        StoreErrorKind::NotOurs
            | StoreErrorKind::Unclaimed
            | StoreErrorKind::Outdated
            | StoreErrorKind::OtherFormat
            | StoreErrorKind::InUse
            | StoreErrorKind::Copied
    )
}

/// Refuses two directories with one identity: one is a copy of the other, or both are the same.
/// Metadata of one would be taken for that of the other.
fn refuse_copies(identities: &[(PathBuf, Uuid)]) -> Result<(), StoreError> {
    let mut known: BTreeMap<Uuid, &Path> = BTreeMap::new();
    for (root, uuid) in identities {
        if let Some(other) = known.insert(*uuid, root) {
            let text = format!(
                "same directory as {}, or a copy of it; remove one of them from localfile_store.data_paths",
                other.display()
            );
            return Err(StoreError::remote(StoreErrorKind::Copied, root, text));
        }
    }
    Ok(())
}

/// Refuses a start if all readable directories are empty although earlier data is known. `disk` is
/// the first of them. The directories are not claimed, because a claim would make them look used at
/// the next start.
fn require_known_data(disk: &dyn Disk, config: &LocalConfig) -> Result<(), StoreError> {
    let Some(who) =
        config.had_data.as_ref().filter(|_| config.recovery && config.require_mounted != Some(false))
    else {
        return Ok(());
    };
    let text = format!(
        "all data directories are empty, but {who}; mount the disks, or if they are gone permanently, start \
         with localfile_store.require_mounted = false"
    );
    Err(StoreError::remote(StoreErrorKind::NotMounted, disk.root(), text))
}

/// Refuses an empty directory on the root file system if `require_mounted` is true. Otherwise logs
/// that its disk may not be mounted.
pub(super) async fn require_own_disk(disk: &dyn Disk, config: &LocalConfig) -> Result<(), StoreError> {
    let is_on_root = |mount: Mount| mount.point == Path::new("/");
    if !within(NAME_TIMEOUT, disk.mount()).await.is_ok_and(is_on_root) {
        return Ok(());
    }
    if config.require_mounted == Some(true) {
        let text = "on the root file system, but localfile_store.require_mounted = true requires a mount \
             point; mount its disk";
        return Err(StoreError::remote(StoreErrorKind::NotMounted, disk.root(), text));
    }
    tracing::info!(
        path = %disk.root().display(),
        "treating an empty data directory on the root file system as new; if a disk belongs there, mount it \
         and set localfile_store.require_mounted = true"
    );
    Ok(())
}

/// Returns the content of a directory without changing it.
pub(in crate::store) async fn read_content(io: &dyn Disk) -> Result<Content, StoreError> {
    let failed = |error| StoreError::io(io.root(), error);
    let names = match within(NAME_TIMEOUT, io.list(Path::new(""))).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Nothing),
        names => names.map_err(failed)?,
    };
    let claim = match within(NAME_TIMEOUT, io.read_small(Path::new(MARKER))).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        claim => Some(claim.map_err(failed)?),
    };
    Ok(content_of(&names, claim.as_deref()))
}

/// Claims a directory.
async fn claim(
    io: Arc<dyn Disk>,
    config: &LocalConfig,
    changes: Arc<watch::Sender<()>>,
) -> Result<LocalDisk, StoreError> {
    let root = io.root().to_path_buf();
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => StoreError::new(StoreErrorKind::InUse, &root),
        _ => StoreError::io(&root, error),
    };
    within(NAME_TIMEOUT, io.create_dir_all(Path::new(""))).await.map_err(failed)?;
    let marker = Path::new(MARKER);
    let (lock, read_only) = match within(NAME_TIMEOUT, io.lock(marker)).await {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            (within(NAME_TIMEOUT, io.lock_existing(marker)).await, Some(error))
        }
        lock => (lock, None),
    };
    let lock = lock.map_err(failed)?;
    let uuid = identify(io.as_ref(), &root).await?;
    within(NAME_TIMEOUT, io.anchor()).await.map_err(failed)?;
    let unknown = || Mount { point: root.clone(), media: Media::Unknown };
    let mount = within(NAME_TIMEOUT, io.mount()).await.unwrap_or_else(|_| unknown());
    let disk = LocalDisk::new(io, uuid, lock, mount, config, changes);
    match read_only {
        Some(error) => disk.note(&error),
        None => disk.make_directories().await.map_err(failed)?,
    }
    if !config.recovery {
        disk.discard_everything().await.map_err(failed)?;
    }
    if config.sync == SyncWrites::Group {
        // Data of an earlier process may only be in the page cache, and recovery relies on it.
        within(config.write_timeout, disk.io.sync_all()).await.map_err(failed)?;
    }
    disk.measure().await.map_err(failed)?;
    Ok(disk)
}

/// Returns the identity in the marker of a directory. The marker is read under the lock, because
/// another process may have changed it. An empty directory gets a marker.
async fn identify(io: &dyn Disk, root: &Path) -> Result<Uuid, StoreError> {
    let failed = |error| StoreError::io(root, error);
    let content = read_content(io).await?;
    if let Some(refused) = refusal(io, content, &[], None).await {
        return Err(refused);
    }
    if let Some(uuid) = content.identity() {
        return Ok(uuid);
    }
    let uuid = Uuid::new_v4();
    let text = marker_of(uuid);
    within(NAME_TIMEOUT, io.write_small(Path::new(MARKER), text.into_bytes())).await.map_err(failed)?;
    // Without its marker, a directory with data would be refused.
    within(NAME_TIMEOUT, io.sync_dir(Path::new(""))).await.map_err(failed)?;
    Ok(uuid)
}
