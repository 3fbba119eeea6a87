//! Deletion of what is forgotten, by prefix.
//!
//! Pages go first: a shuffle without one is none to a later start, which deletes what is left. A store that does not
//! answer is asked again for a while; what is left then is left to the bucket's lifecycle rule, or to a later start.
//! Nothing is deleted once another process has the worker's prefix.
//!
//! Who has a later registration of a shuffle elsewhere does not wait for that, but for the pages alone ([`end_earlier`]).

use std::collections::HashSet;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::{StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectStore as _};

use super::condition::failed;
use super::core::Core;
use super::earlier::{Earlier, Over};
use super::layout::{Registered, app_prefix, parse_key, path_of};
use super::shuffle::Shuffle;
use crate::clock::{Instant, sleep, timeout_at};
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_wire::types::{AppId, ShuffleKey};

/// Attempts, between which there is a pause that doubles.
const ATTEMPTS: u32 = 8;
const PAUSE: Duration = Duration::from_secs(1);

/// So long is waited for the end of an earlier registration: a client gives up after a minute.
const EARLIER_WAIT: Duration = Duration::from_secs(20);

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

/// What goes together.
pub(super) struct Going {
    /// Of the objects' keys.
    pub(super) prefix: String,
    pub(super) filter: Arc<Filter>,
    /// Closed registrations of which the pages are among it.
    pub(super) over: Vec<Arc<Over>>,
}

impl Going {
    /// All below a prefix.
    pub(super) fn all(prefix: String, over: Vec<Arc<Over>>) -> Self {
        Self { prefix, filter: Arc::new(|_| true), over }
    }
}

/// Deletes everything of forgotten shuffles, and of their application all that was registered before an incarnation.
pub(super) async fn purge(
    (core, earlier): (Arc<Core>, Arc<Earlier>),
    shuffles: Vec<Arc<Shuffle>>,
    app: Option<(AppId, u64)>,
) {
    for shuffle in &shuffles {
        // What was under way when it was forgotten is in the store, or will never be.
        shuffle.notes.close().await;
        drop(shuffle.lane.lock().await);
    }
    let Some((app, before)) = app else {
        for shuffle in shuffles {
            let mut over = earlier.of(&shuffle.name.key);
            over.retain(|it| it.name == shuffle.name);
            delete(&core, &earlier, &Going::all(shuffle.prefix.clone(), over)).await;
        }
        return;
    };
    let over = earlier.of_app(&app).into_iter().filter(|it| it.name.incarnation < before).collect::<Vec<_>>();
    for over in &over {
        over.close().await;
    }
    let prefix = app_prefix(&core.settings.root, &app);
    let filter = Arc::new(move |name: &Registered| name.incarnation < before);
    delete(&core, &earlier, &Going { prefix, filter, over }).await;
}

/// When this returns `Ok` no page of a registration of the shuffle that is over is in the store, so that what is said of a later one cannot
/// be taken for that of an earlier one. Mostly there is none, and nothing is asked.
///
/// # Errors
/// The store does not delete them in time, or another process has the prefix.
pub(super) async fn end_earlier(core: &Core, earlier: &Earlier, key: &ShuffleKey) -> Result<(), StoreError> {
    let deadline = Instant::now() + EARLIER_WAIT;
    for over in earlier.of(key) {
        until(deadline, &over.prefix, || end_one(core, earlier, &over).boxed()).await?;
    }
    Ok(())
}

/// The same for all shuffles of an application.
///
/// # Errors
/// As [`end_earlier`].
pub(super) async fn end_earlier_of(core: &Core, earlier: &Earlier, app: &AppId) -> Result<(), StoreError> {
    let over = earlier.of_app(app);
    if over.is_empty() {
        return Ok(());
    }
    let prefix = app_prefix(&core.settings.root, app);
    let names: HashSet<Registered> = over.iter().map(|over| over.name.clone()).collect();
    let filter = Arc::new(move |name: &Registered| names.contains(name));
    let going = Going { prefix: prefix.clone(), filter, over };
    until(Instant::now() + EARLIER_WAIT, &prefix, || end_all(core, earlier, &going).boxed()).await
}

async fn end_all(core: &Core, earlier: &Earlier, going: &Going) -> Result<(), StoreError> {
    for over in &going.over {
        over.close().await;
    }
    if !going.over.iter().any(|over| earlier.has(over)) {
        return Ok(());
    }
    core.require_claim().await?;
    delete_pages(core, earlier, going).await
}

/// Tries to `end` what is over below `prefix` until a deadline.
async fn until<'a>(
    deadline: Instant,
    prefix: &str,
    end: impl Fn() -> BoxFuture<'a, Result<(), StoreError>>,
) -> Result<(), StoreError> {
    loop {
        let silent = || StoreError::remote(StoreErrorKind::Unreachable, prefix, "object store timeout");
        let ended = timeout_at(deadline, end()).await;
        let Err(error) = ended.unwrap_or_else(|_| Err(silent())) else { return Ok(()) };
        let is_late = Instant::now() + PAUSE >= deadline;
        if is_late || error.kind != StoreErrorKind::Unreachable {
            let what = "cannot delete objects of an earlier registration of the shuffle";
            return Err(StoreError::remote(error.kind, prefix, format!("{what}: {error}")));
        }
        sleep(PAUSE).await;
    }
}

async fn end_one(core: &Core, earlier: &Earlier, over: &Arc<Over>) -> Result<(), StoreError> {
    let _turn = over.turn().await;
    if !earlier.has(over) {
        return Ok(());
    }
    over.close().await;
    core.require_claim().await?;
    let going = Going::all(over.prefix.clone(), vec![Arc::clone(over)]);
    delete_pages(core, earlier, &going).await
}

/// Deletes what is `going`.
pub(super) async fn delete(core: &Core, earlier: &Earlier, going: &Going) {
    let (prefix, mut pause) = (&going.prefix, PAUSE);
    for attempt in 1..=ATTEMPTS {
        let deleted = tokio::select! {
            biased;
            () = core.tasks.cancelled() => return,
            deleted = delete_once(core, earlier, going) => deleted,
        };
        let Err(error) = deleted else { return };
        if error.kind == StoreErrorKind::InUse {
            return; // It is the other process's.
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

async fn delete_once(core: &Core, earlier: &Earlier, going: &Going) -> Result<(), StoreError> {
    core.require_claim().await?;
    delete_pages(core, earlier, going).await?;
    delete_those(core, going, |is_page| !is_page).await
}

async fn delete_pages(core: &Core, earlier: &Earlier, going: &Going) -> Result<(), StoreError> {
    delete_those(core, going, |is_page| is_page).await?;
    going.over.iter().for_each(|over| earlier.gone(over));
    Ok(())
}

/// Deletes those of which `wanted` says so, by whether one is a page of metadata.
async fn delete_those(
    core: &Core,
    Going { prefix, filter, .. }: &Going,
    wanted: fn(bool) -> bool,
) -> Result<(), StoreError> {
    let (root, filter) = (core.settings.root.clone(), Arc::clone(filter));
    let goes = move |key: &str| {
        let parsed = parse_key(&root, key);
        parsed.is_some_and(|(name, object)| wanted(object.is_metadata()) && filter(&name))
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
    Ok(())
}
