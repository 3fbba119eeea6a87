//! Objects of all workers below `object_store.url`, including departed workers: list and removal.
//!
//! Only keys that the tier writes are counted and deleted. The claim is deleted last and not
//! counted. Other objects in the bucket stay. Objects do not tell whether their worker is alive, so
//! the caller must know that.

use std::collections::HashSet;

use futures::stream::{StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectStore as _, ObjectStoreExt as _};
use serde::Serialize;

use super::circuit_breaker::failed;
use super::claim::claim_key;
use super::core::ObjectCore;
use super::layout::{Name, parse_key, path_of, text_of};
use crate::store::{StoreError, StoreErrorKind};

/// Maximum number of objects deleted by one call of [`remove`], so that it returns within seconds.
const REMOVED_AT_ONCE: usize = 500;

/// Objects of one worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorkerObjects {
    /// Id of the worker, as known to coordinators.
    pub worker: String,
    /// True for the worker that answers.
    pub is_own: bool,
    /// Number of objects.
    pub objects: u64,
    /// Size of all objects in bytes.
    pub bytes: u64,
    /// Number of shuffles with segments.
    pub shuffles: u64,
    /// Time of the newest write, in milliseconds since 1970, by the store's clock.
    pub newest_unix_ms: i64,
}

/// Result of one call of [`remove`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RemovalReport {
    /// Number of deleted objects.
    pub objects: u64,
    /// Size of the deleted objects in bytes.
    pub bytes: u64,
    /// True if no object is left, so that the claim was deleted too.
    pub is_gone: bool,
}

/// Returns the workers that have objects besides a claim.
pub(in crate::store) async fn list(core: &ObjectCore) -> Result<Vec<WorkerObjects>, StoreError> {
    let top = core.observe("", core.store.list_with_delimiter(None).await)?;
    let mut workers = Vec::new();
    for prefix in top.common_prefixes {
        let root = prefix.as_ref();
        let Some(worker) = text_of(root) else { continue };
        let is_own = root == core.settings.root;
        let (objects, bytes, shuffles, newest_unix_ms) = (0, 0, 0, 0);
        let mut of_it = WorkerObjects { worker, is_own, objects, bytes, shuffles, newest_unix_ms };
        let mut seen = HashSet::new();
        let mut listed = core.store.list(Some(&prefix));
        while let Some(object) = core.observe(root, listed.try_next().await)? {
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

/// Deletes objects of another worker. Its metadata log is deleted first, so that a worker started
/// meanwhile finds no complete shuffle.
///
/// # Errors
/// `InUse` if `root` is this worker's prefix. The store does not answer or refuses.
pub(in crate::store) async fn remove(core: &ObjectCore, root: &str) -> Result<RemovalReport, StoreError> {
    if root == core.settings.root {
        return Err(StoreError::new(StoreErrorKind::InUse, root));
    }
    let (mut log, mut segments, mut is_more) = (Vec::new(), Vec::new(), false);
    let mut listed = core.store.list(Some(&path_of(root)));
    while let Some(object) = core.observe(root, listed.try_next().await)? {
        let Some(name) = parse_key(root, object.location.as_ref()) else { continue };
        let found = if matches!(name, Name::Log(..)) { &mut log } else { &mut segments };
        match found.len() < REMOVED_AT_ONCE {
            true => found.push(object),
            false => is_more = true,
        }
    }
    let remaining = REMOVED_AT_ONCE - log.len();
    is_more |= segments.len() > remaining;
    segments.truncate(remaining);
    let mut removed = RemovalReport { objects: 0, bytes: 0, is_gone: !is_more };
    for found in [log, segments] {
        removed.objects += found.len() as u64;
        removed.bytes += found.iter().map(|object| object.size).sum::<u64>();
        let paths = futures::stream::iter(found).map(|object| Ok(object.location)).boxed();
        let mut deleted = core.store.delete_stream(paths);
        while let Some(answer) = deleted.next().await {
            match answer {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(failed(root, &error)),
            }
        }
    }
    if removed.is_gone {
        // If the worker is alive after all, it writes its claim again.
        match core.store.delete(&path_of(&claim_key(root))).await {
            Ok(()) | Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(failed(root, &error)),
        }
    }
    Ok(removed)
}
