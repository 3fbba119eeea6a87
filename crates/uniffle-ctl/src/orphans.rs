//! Objects that departed workers left in the object store: listing and removal.
//!
//! One worker with an object store performs the calls with its credentials. Workers count as live
//! if a coordinator knows them or the command line names them. Without ids, only old objects of
//! workers that are not live are removed. With ids, all objects of these workers are removed, even
//! if they live; the worker that performs the calls refuses to remove its own.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::arguments::Arguments;
use crate::http::{CommandFailure, HttpClient};
use crate::progress::CommandProgress;
use crate::workers::WorkerTarget;

/// Options of the command.
#[derive(Debug)]
pub(crate) struct OrphanOptions<'a> {
    /// Ids of live workers besides those that the coordinators know.
    pub(crate) live: &'a [String],
    /// `None` removes nothing. An empty list removes the objects of all departed workers.
    pub(crate) remove: Option<&'a [String]>,
    /// Minimum age of the objects of a worker that is not explicitly named.
    pub(crate) older_than: Duration,
}

/// Returns the list of workers, or the removed ones.
pub(crate) async fn run(
    client: &HttpClient,
    arguments: &Arguments,
    targets: &[WorkerTarget],
    wanted: &OrphanOptions<'_>,
    progress: &CommandProgress,
) -> Result<Value, CommandFailure> {
    let has_cluster = !arguments.coordinator.is_empty();
    if wanted.remove.is_some_and(<[String]>::is_empty) && !has_cluster && wanted.live.is_empty() {
        let text = "--remove without ids removes the objects of departed workers: identify live workers with \
                    --coordinator or --live, or give ids";
        return Err(CommandFailure::Usage(text.to_owned()));
    }
    let bar = progress.bar("orphans");
    bar.show(0, "listing objects");
    let (store_worker, answer) = first_with_a_store(client, targets).await?;
    let mut live: BTreeSet<&str> = wanted.live.iter().map(String::as_str).collect();
    if has_cluster {
        live.extend(targets.iter().map(|target| target.name.as_str()));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let workers = answer["workers"].as_array().into_iter().flatten();
    let workers: Vec<Value> = workers.map(|worker| with_state(worker, &live, has_cluster, now)).collect();
    let Some(named) = wanted.remove else {
        return Ok(json!({ "workers": workers }));
    };
    let unknown = named.iter().find(|id| workers.iter().all(|worker| worker["worker"] != id.as_str()));
    if let Some(id) = unknown {
        let text = format!("{id} has no objects in the store");
        return Err(CommandFailure::Refused { status: 404, text });
    }
    let mut removed = Vec::new();
    let objects = |worker: &Value| worker["objects"].as_u64().unwrap_or_default();
    let chosen: Vec<_> =
        workers.iter().filter(|worker| is_removable(worker, named, wanted.older_than)).collect();
    let mut remaining: u64 = chosen.iter().map(|worker| objects(worker)).sum();
    for worker in chosen {
        let id = worker["worker"].as_str().unwrap_or_default();
        let show = |done: u64| bar.show(remaining.saturating_sub(done), format!("removing objects of {id}"));
        removed.push(remove(client, store_worker, id, show).await?);
        remaining = remaining.saturating_sub(objects(worker));
    }
    Ok(json!({ "removed": removed }))
}

/// Returns the first answering worker that has an object store, and its answer. Does not ask lost
/// workers.
async fn first_with_a_store<'t>(
    client: &HttpClient,
    targets: &'t [WorkerTarget],
) -> Result<(&'t WorkerTarget, Value), CommandFailure> {
    let mut failed = CommandFailure::Unreachable("no worker to ask".to_owned());
    for target in targets.iter().filter(|target| !target.is_lost) {
        match client.post(&target.admin, "/admin/orphans", None).await {
            Ok(answer) => return Ok((target, answer)),
            Err(failure) if failure.is_missing() => {
                let text = format!("{}: the worker has no object store", target.name);
                failed = CommandFailure::Refused { status: 404, text };
            }
            Err(failure) => failed = failure,
        }
    }
    Err(failed)
}

/// Returns the summary of a worker's objects, with their age and the worker's state.
fn with_state(worker: &Value, live: &BTreeSet<&str>, has_cluster: bool, now: Duration) -> Value {
    let id = worker["worker"].as_str().unwrap_or_default();
    let state = match (worker["is_own"] == true, live.contains(id)) {
        (true, _) => "own",
        (false, true) => "alive",
        (false, false) if has_cluster || !live.is_empty() => "gone",
        (false, false) => "unknown",
    };
    let newest = worker["newest_unix_ms"].as_u64().unwrap_or_default();
    let age = now.saturating_sub(Duration::from_millis(newest)).as_secs();
    let fields =
        ["worker", "objects", "bytes", "shuffles"].map(|field| (field.to_owned(), worker[field].clone()));
    let more = [("state".to_owned(), json!(state)), ("newest_age_seconds".to_owned(), json!(age))];
    Value::Object(fields.into_iter().chain(more).collect())
}

/// Returns true if the objects of `worker` are to be removed.
fn is_removable(worker: &Value, named: &[String], older_than: Duration) -> bool {
    if named.is_empty() {
        let age = worker["newest_age_seconds"].as_u64().unwrap_or_default();
        return worker["state"] == "gone" && age >= older_than.as_secs();
    }
    named.iter().any(|id| worker["worker"] == id.as_str())
}

/// Removes all objects of a worker, batch by batch. `show` gets the number of removed objects.
async fn remove(
    client: &HttpClient,
    store_worker: &WorkerTarget,
    worker: &str,
    show: impl Fn(u64),
) -> Result<Value, CommandFailure> {
    let (mut objects, mut bytes) = (0, 0);
    loop {
        show(objects);
        let body = json!({ "worker": worker });
        let answer = client.post(&store_worker.admin, "/admin/orphans/remove", Some(&body)).await?;
        let some = answer["removed"]["objects"].as_u64().unwrap_or_default();
        objects += some;
        bytes += answer["removed"]["bytes"].as_u64().unwrap_or_default();
        if answer["removed"]["is_gone"] == true {
            return Ok(json!({ "worker": worker, "objects": objects, "bytes": bytes }));
        }
        if some == 0 {
            let text = format!("{worker}: cannot remove its objects, although they are listed");
            return Err(CommandFailure::StateNotReached(text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lost::tests::{answer_one, listening_worker};

    fn worker(id: &str, is_own: bool, newest_unix_ms: u64) -> Value {
        json!({
            "worker": id, "is_own": is_own, "objects": 2, "bytes": 10, "shuffles": 1,
            "newest_unix_ms": newest_unix_ms,
        })
    }

    #[test]
    fn old_objects_of_departed_workers_are_selected() {
        let (now, day) = (Duration::from_secs(100_000), Duration::from_secs(86_400));
        let live = BTreeSet::from(["b"]);
        let with_state = |id, is_own, newest| with_state(&worker(id, is_own, newest), &live, true, now);
        let all = [
            with_state("a", true, 0),
            with_state("b", false, 0),
            with_state("c", false, 0),
            with_state("d", false, 99_000_000),
        ];
        let states: Vec<_> = all.iter().map(|worker| worker["state"].as_str().unwrap()).collect();
        assert_eq!(states, ["own", "alive", "gone", "gone"]);
        let is_removable = |named: &[String]| -> Vec<_> {
            all.iter().map(|worker| is_removable(worker, named, day)).collect()
        };
        assert_eq!(
            is_removable(&[]),
            [false, false, true, false],
            "a worker whose objects are new must not be chosen"
        );
        assert_eq!(is_removable(&["d".to_owned()]), [false, false, false, true]);
    }

    #[tokio::test]
    async fn lost_worker_is_not_asked() {
        let (listener, worker) = listening_worker("w-1").await;
        let lost = WorkerTarget { name: "w-2".to_owned(), is_lost: true, ..worker.clone() };
        let targets = [worker, lost];
        let client = HttpClient::of(None, Duration::from_secs(10));
        let serving = async move { answer_one(&listener, 404, "").await };
        let (asked, ()) = tokio::join!(first_with_a_store(&client, &targets), serving);
        let failure = asked.unwrap_err().to_string();
        assert_eq!(failure, "w-1: the worker has no object store");
    }

    #[test]
    fn state_is_unknown_without_live_workers() {
        let with_state = with_state(&worker("a", false, 0), &BTreeSet::new(), false, Duration::ZERO);
        assert_eq!(with_state["state"], "unknown");
    }
}
