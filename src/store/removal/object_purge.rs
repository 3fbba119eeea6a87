//! Deletes the objects of removed shuffles and applications, by prefix. A start also deletes
//! abandoned objects here.
//!
//! A removal begins once the log in the store records the end of the shuffle, so that no start
//! looks for deleted objects. A failed deletion is retried for about two minutes. Remaining objects
//! are left to a later start or to the bucket's lifecycle rule. Nothing is deleted after a check
//! has found that another process has claimed the worker's prefix.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectStore as _};

use crate::clock::sleep;
use crate::store::object::circuit_breaker::failed;
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::{Name, Registered, app_prefix, parse_key, path_of};
use crate::store::object::shuffle::ObjectShuffle;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_wire::types::AppId;

/// Maximum number of attempts. The pause between them doubles.
const ATTEMPTS: u32 = 8;
const PAUSE: Duration = Duration::from_secs(1);

/// Predicate that selects the registrations to delete.
pub(in crate::store) type Filter = dyn Fn(&Registered) -> bool + Send + Sync;

/// Counts a deletion in progress until it is dropped.
pub(in crate::store) struct CountedDeletion(Arc<ObjectCore>);

impl CountedDeletion {
    pub(in crate::store) fn new(core: Arc<ObjectCore>) -> Self {
        core.deletions.send_modify(|running| *running += 1);
        Self(core)
    }
}

impl Drop for CountedDeletion {
    fn drop(&mut self) {
        self.0.deletions.send_modify(|running| *running -= 1);
    }
}

/// Segments that are deleted together.
pub(in crate::store) struct DeletionScope {
    /// Prefix of their keys.
    pub(in crate::store) prefix: String,
    pub(in crate::store) filter: Arc<Filter>,
}

impl DeletionScope {
    /// Selects all segments below a prefix.
    pub(in crate::store) fn all(prefix: String) -> Self {
        Self { prefix, filter: Arc::new(|_| true) }
    }
}

/// All segments of an application with an incarnation below `before`.
pub(in crate::store) struct DetachedApp {
    pub(in crate::store) app: AppId,
    pub(in crate::store) before: u64,
}

/// Deletes the segments of detached `shuffles`, or instead those of `app`.
pub(in crate::store) async fn purge(
    core: Arc<ObjectCore>,
    shuffles: Vec<Arc<ObjectShuffle>>,
    app: Option<DetachedApp>,
) {
    for shuffle in &shuffles {
        // Waits for an upload in progress, so that its object is deleted too. If the outcome of
        // the upload is unknown, the object may still appear. It is left to a later start.
        drop(shuffle.segment_numbers.lock().await);
    }
    let Some(DetachedApp { app, before }) = app else {
        for shuffle in shuffles {
            delete(&core, &DeletionScope::all(shuffle.prefix.clone())).await;
        }
        return;
    };
    let prefix = app_prefix(&core.settings.root, &app);
    let filter = Arc::new(move |name: &Registered| name.incarnation < before);
    delete(&core, &DeletionScope { prefix, filter }).await;
}

/// Deletes the segments of `scope`, with retries.
pub(in crate::store) async fn delete(core: &ObjectCore, scope: &DeletionScope) {
    let (prefix, mut pause) = (&scope.prefix, PAUSE);
    for attempt in 1..=ATTEMPTS {
        let deleted = tokio::select! {
            biased;
            () = core.tasks.cancelled() => return,
            deleted = delete_once(core, scope) => deleted,
        };
        let Err(error) = deleted else { return };
        if error.kind == StoreErrorKind::InUse {
            return; // Another process has claimed the prefix.
        }
        if attempt == ATTEMPTS {
            core.metrics.deletions_failed.inc();
            tracing::error!(
                prefix,
                %error,
                "cannot delete objects of a removed shuffle or application; giving up"
            );
            return;
        }
        tracing::warn!(
            prefix,
            %error,
            "cannot delete objects of a removed shuffle or application yet; retrying"
        );
        tokio::select! {
            biased;
            () = core.tasks.cancelled() => return,
            () = sleep(pause) => {}
        }
        pause *= 2;
    }
}

async fn delete_once(
    core: &ObjectCore,
    DeletionScope { prefix, filter }: &DeletionScope,
) -> Result<(), StoreError> {
    core.require_claim().await?;
    let (root, filter) = (core.settings.root.clone(), Arc::clone(filter));
    let is_selected = move |key: &str| match parse_key(&root, key) {
        Some(Name::Segment(name, _)) => filter(&name),
        Some(Name::Log(..) | Name::Settings(_)) | None => false,
    };
    let listed = core.store.list(Some(&path_of(prefix))).map_ok(|object| object.location);
    let scope = listed.try_filter(move |location| ready(is_selected(location.as_ref()))).boxed();
    let mut deleted = core.store.delete_stream(scope);
    while let Some(answer) = deleted.next().await {
        match answer {
            Ok(_) | Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(failed(prefix, &error)),
        }
    }
    Ok(())
}
