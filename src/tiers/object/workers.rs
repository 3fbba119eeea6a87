//! The workers that have objects below `object_store.url`, also those that are gone: what each has, and its removal.
//!
//! Only keys that the tier writes are counted and deleted, at last with the claim, so whatever else lies in the bucket stays. Whether a worker is gone
//! cannot be told from its objects; that is for the caller to know.

use std::collections::HashSet;

use futures::stream::{StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectStore as _, ObjectStoreExt as _};
use serde::Serialize;

use super::claim::claim_key;
use super::core::Core;
use super::layout::{Name, parse_key, path_of, text_of};
use crate::tiers::{StoreError, StoreErrorKind};

/// Objects that one call of [`remove`] deletes at most: a caller that waits hears of it within seconds.
const REMOVED_AT_ONCE: usize = 500;

/// What a worker has below the URL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorkerObjects {
    /// Its id, as coordinators know it.
    pub worker: String,
    /// Whether it is the one that was asked.
    pub is_own: bool,
    /// Objects of it.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Shuffles that they are of.
    pub shuffles: u64,
    /// When the newest was written: milliseconds since 1970, by the store's clock.
    pub newest_unix_ms: i64,
}

/// What was removed by one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Objects that were deleted.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Whether none is left.
    pub is_gone: bool,
}

/// All workers with objects, by id.
pub(super) async fn list(core: &Core) -> Result<Vec<WorkerObjects>, StoreError> {
    let top = core.noted("", core.store.list_with_delimiter(None).await)?;
    let mut workers = Vec::new();
    for prefix in top.common_prefixes {
        let root = prefix.as_ref();
        let Some(worker) = text_of(root) else { continue };
        let is_own = root == core.settings.root;
        let (objects, bytes, shuffles, newest_unix_ms) = (0, 0, 0, 0);
        let mut of_it = WorkerObjects { worker, is_own, objects, bytes, shuffles, newest_unix_ms };
        let mut seen = HashSet::new();
        let mut listed = core.store.list(Some(&prefix));
        while let Some(object) = core.noted(root, listed.try_next().await)? {
            let Some(name) = parse_key(root, object.location.as_ref()) else { continue };
            of_it.objects += 1;
            of_it.bytes += object.size;
            of_it.newest_unix_ms = of_it.newest_unix_ms.max(object.last_modified.timestamp_millis());
            if let Name::Segment(registered, _) = name
                && seen.insert(registered.incarnation)
            {
                of_it.shuffles += 1;
            }
        }
        if of_it.objects > 0 {
            workers.push(of_it);
        }
    }
    Ok(workers)
}

/// Deletes objects of another worker, its metadata log first, so that none of its shuffles looks whole meanwhile.
///
/// # Errors
/// `InUse` for the own objects; the store's.
pub(super) async fn remove(core: &Core, root: &str) -> Result<Removed, StoreError> {
    if root == core.settings.root {
        return Err(StoreError::new(StoreErrorKind::InUse, root));
    }
    let (mut log, mut segments, mut is_more) = (Vec::new(), Vec::new(), false);
    let mut listed = core.store.list(Some(&path_of(root)));
    while let Some(object) = core.noted(root, listed.try_next().await)? {
        let Some(name) = parse_key(root, object.location.as_ref()) else { continue };
        let those = if matches!(name, Name::Log(..)) { &mut log } else { &mut segments };
        match those.len() < REMOVED_AT_ONCE {
            true => those.push(object),
            false => is_more = true,
        }
    }
    let left = REMOVED_AT_ONCE - log.len();
    is_more |= segments.len() > left;
    segments.truncate(left);
    let mut removed = Removed { objects: 0, bytes: 0, is_gone: !is_more };
    for those in [log, segments] {
        removed.objects += those.len() as u64;
        removed.bytes += those.iter().map(|object| object.size).sum::<u64>();
        let paths = futures::stream::iter(those).map(|object| Ok(object.location)).boxed();
        let mut deleted = core.store.delete_stream(paths);
        while let Some(answer) = deleted.next().await {
            match answer {
                Err(Error::NotFound { .. }) => {}
                answer => drop(core.noted(root, answer)?),
            }
        }
    }
    if removed.is_gone {
        // A worker that is alive after all writes it again.
        match core.store.delete(&path_of(&claim_key(root))).await {
            Err(Error::NotFound { .. }) => {}
            answer => core.noted(root, answer)?,
        }
    }
    Ok(removed)
}
