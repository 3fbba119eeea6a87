//! Workers that a coordinator knows but does not list: those that it has lost, and those from which
//! it has had no heartbeat since it restarted (awaited). A command for a whole cluster covers them.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::answers::{WorkerAnswer, ask_all};
use crate::arguments::Arguments;
use crate::complain;
use crate::http::{CommandFailure, HttpClient, ListenerAddress};
use crate::workers::{WorkerTarget, selected, targets};

/// Reason why a lost worker is not called.
pub(crate) const NO_HEARTBEATS: &str = "its coordinator receives no heartbeats";

/// Maximum time to wait for awaited workers. Workers send a heartbeat every 10 s by default.
const HEARTBEATS_WITHIN: Duration = Duration::from_secs(15);

/// Polling interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// The workers of a command.
#[derive(Debug)]
pub(crate) struct Fleet {
    /// Listed workers by id, then lost and awaited ones.
    pub(crate) targets: Vec<WorkerTarget>,
    /// Ids of the awaited workers.
    pub(crate) awaited: BTreeSet<String>,
    /// True if a coordinator without saved workers has just started.
    pub(crate) is_starting: bool,
}

/// Returns the workers that `arguments` select. Waits for the heartbeats of awaited ones.
///
/// # Errors
/// Fails if no coordinator answers, or if a worker may be missing without its id being known.
pub(crate) async fn fleet(client: &HttpClient, arguments: &Arguments) -> Result<Fleet, CommandFailure> {
    let mut listed = targets(arguments).await?;
    let are_listed = !arguments.only.is_empty() && selected(arguments, listed.clone()).is_ok();
    if arguments.coordinator.is_empty() || are_listed {
        let (targets, awaited) = (selected(arguments, listed)?, BTreeSet::new());
        return Ok(Fleet { targets, awaited, is_starting: false });
    }
    let deadline = Instant::now() + HEARTBEATS_WITHIN;
    let mut has_told = false;
    loop {
        let mut fleet = with_lost(client, arguments, listed).await;
        fleet.awaited.retain(|id| arguments.only.is_empty() || arguments.only.contains(id));
        let is_complete = fleet.awaited.is_empty() && !fleet.is_starting;
        let is_over = Instant::now() > deadline;
        if is_over && fleet.is_starting {
            let text =
                "a coordinator has just started and may not know all workers; run the command again later";
            return Err(CommandFailure::StateNotReached(text.to_owned()));
        }
        if is_complete || is_over {
            return Ok(Fleet { targets: selected(arguments, fleet.targets)?, ..fleet });
        }
        if !has_told {
            let ids: Vec<_> = fleet.awaited.iter().map(String::as_str).collect();
            let of = if ids.is_empty() { "all workers".to_owned() } else { ids.join(", ") };
            complain(&format!("a coordinator has just started; waiting for heartbeats of {of}"));
            has_told = true;
        }
        sleep(LOOK_INTERVAL).await;
        listed = fleet.targets;
    }
}

/// Returns the workers that the coordinators list now, and those that coordinators among `before`
/// have lost or await. Returns the listed ones of `before` if no coordinator answers.
pub(crate) async fn with_lost(
    client: &HttpClient,
    arguments: &Arguments,
    mut before: Vec<WorkerTarget>,
) -> Fleet {
    before.retain(|target| !target.is_lost);
    let answers = ask_all(&before, |target| cluster(client, target)).await;
    let answered: Vec<_> = answers.into_iter().filter_map(|(_, answer)| answer.ok()).collect();
    // Afterwards, so that a worker that has reported in between is in the list.
    let mut all = targets(arguments).await.unwrap_or(before);
    let known: BTreeSet<String> = all.iter().map(|target| target.name.clone()).collect();
    let absent = |field: &str| -> BTreeSet<String> {
        let ids = answered.iter().filter_map(|it| it[field].as_array()).flatten().filter_map(Value::as_str);
        ids.filter(|id| !known.contains(*id)).map(str::to_owned).collect()
    };
    let (lost, awaited) = (absent("lost"), absent("awaited"));
    all.extend(lost.union(&awaited).cloned().map(target));
    let is_starting = answered.iter().any(|it| it["is_starting"] == true);
    Fleet { targets: all, awaited, is_starting }
}

/// Checks that coordinators get heartbeats from the worker.
///
/// # Errors
/// Fails if they get none.
pub(crate) fn require_known(target: &WorkerTarget) -> Result<(), CommandFailure> {
    match target.is_lost {
        true => Err(CommandFailure::Unreachable(format!("lost: {NO_HEARTBEATS}"))),
        false => Ok(()),
    }
}

async fn cluster(client: &HttpClient, target: &WorkerTarget) -> WorkerAnswer {
    client.get(&target.http, "/api/v1/cluster").await
}

fn target(id: String) -> WorkerTarget {
    // Never called: the coordinator only keeps the id.
    let base = ListenerAddress { is_tls: false, host: id.clone(), port: 0 };
    WorkerTarget { name: id, http: base.clone(), admin: base, is_lost: true }
}

#[cfg(test)]
pub(crate) mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    /// Returns a listener and a worker at its address.
    pub(crate) async fn listening_worker(name: &str) -> (TcpListener, WorkerTarget) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http = ListenerAddress::parse(&listener.local_addr().unwrap().to_string(), 0).unwrap();
        let worker = WorkerTarget { name: name.to_owned(), http: http.clone(), admin: http, is_lost: false };
        (listener, worker)
    }

    /// Answers one request with `status` and `body`.
    pub(crate) async fn answer_one(listener: &TcpListener, status: u16, body: &str) {
        let length = body.len();
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 4096];
        let _head = stream.read(&mut request).await.unwrap();
        let text =
            format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
        stream.write_all(text.as_bytes()).await.unwrap();
    }

    #[tokio::test]
    async fn absent_workers_are_listed_once_and_not_queried() {
        let (listener, known) = listening_worker("w-1").await;
        let answering = async {
            loop {
                answer_one(&listener, 200, r#"{"lost":["w-1","w-2"],"awaited":["w-1","w-3"]}"#).await;
            }
        };
        let line = ["ctl", "--coordinator", "127.0.0.1:1", "top"];
        let arguments =
            <Line as clap::Parser>::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).arguments;
        let client = HttpClient::of(None, Duration::from_secs(10));
        let listing = async {
            let once = with_lost(&client, &arguments, vec![known]).await;
            with_lost(&client, &arguments, once.targets).await
        };
        let listed = tokio::select! {
            listed = listing => listed,
            () = answering => unreachable!(),
        };
        let names: Vec<_> = listed.targets.iter().map(|target| target.name.as_str()).collect();
        assert_eq!(names, ["w-1", "w-2", "w-3"]);
        assert_eq!(listed.awaited, BTreeSet::from(["w-3".to_owned()]));
        let is_lost = |target| require_known(target).is_err_and(|it| it.to_string().starts_with("lost"));
        assert_eq!([0, 1, 2].map(|at| is_lost(&listed.targets[at])), [false, true, true]);
    }
}
