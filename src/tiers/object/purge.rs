//! Deletion of what is forgotten, by prefix.
//!
//! Pages go first: a shuffle without one is none to a later start, which deletes what is left. A store that does not
//! answer is asked again for a while; what is left then is left to the bucket's lifecycle rule, or to a later start.
//! Nothing is deleted once another process has the worker's prefix.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectStore as _};

use super::condition::failed;
use super::core::Core;
use super::layout::{Registered, app_prefix, parse_key, path_of};
use super::shuffle::Shuffle;
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_wire::types::AppId;

/// Attempts, between which there is a pause that doubles.
const ATTEMPTS: u32 = 8;
const PAUSE: Duration = Duration::from_secs(1);

/// What of a prefix goes.
pub(super) type Filter = dyn Fn(&Registered) -> bool + Send + Sync;

/// A deletion that has not ended.
pub(super) struct Counted(Arc<Core>);

impl Counted {
    pub(super) fn new(core: Arc<Core>) -> Self {
        core.deletions.send_modify(|under_way| *under_way += 1);
        Self(core)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.deletions.send_modify(|under_way| *under_way -= 1);
    }
}

/// Deletes everything of forgotten shuffles, and of their application all that was registered before an incarnation.
pub(super) async fn purge(core: Arc<Core>, shuffles: Vec<Arc<Shuffle>>, app: Option<(AppId, u64)>) {
    for shuffle in &shuffles {
        // What was under way when it was forgotten is in the store, or will never be.
        shuffle.notes.close().await;
        drop(shuffle.lane.lock().await);
    }
    let Some((app, before)) = app else {
        for shuffle in shuffles {
            delete_prefix(&core, &shuffle.prefix, Arc::new(|_| true)).await;
        }
        return;
    };
    let prefix = app_prefix(&core.settings.root, &app);
    delete_prefix(&core, &prefix, Arc::new(move |name| name.incarnation < before)).await;
}

/// Deletes what is below a prefix and `filter` takes.
pub(super) async fn delete_prefix(core: &Core, prefix: &str, filter: Arc<Filter>) {
    let mut pause = PAUSE;
    for attempt in 1..=ATTEMPTS {
        let deleted = tokio::select! {
            biased;
            () = core.tasks.cancelled() => return,
            deleted = delete_once(core, prefix, &filter) => deleted,
        };
        let Err(error) = deleted else { return };
        if error.kind == StoreErrorKind::InUse {
            return; // It is the other process's.
        }
        if attempt == ATTEMPTS {
            core.metrics.deletions_failed.inc();
            tracing::error!(prefix, %error, "objects of what is gone could not be deleted, they are left");
            return;
        }
        tracing::warn!(prefix, %error, "objects of what is gone are not deleted yet");
        tokio::select! {
            biased;
            () = core.tasks.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause *= 2;
    }
}

async fn delete_once(core: &Core, prefix: &str, filter: &Arc<Filter>) -> Result<(), StoreError> {
    core.require_claim().await?;
    for pages in [true, false] {
        let (root, filter) = (core.settings.root.clone(), Arc::clone(filter));
        let goes = move |key: &str| {
            let parsed = parse_key(&root, key);
            parsed.is_some_and(|(name, object)| object.is_metadata() == pages && filter(&name))
        };
        let listed = core.store.list(Some(&path_of(prefix))).map_ok(|object| object.location);
        let going = listed.try_filter(move |location| ready(goes(location.as_ref()))).boxed();
        let mut deleted = core.store.delete_stream(going);
        while let Some(answer) = deleted.next().await {
            match answer {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(failed(prefix, &error)),
            }
        }
    }
    Ok(())
}
