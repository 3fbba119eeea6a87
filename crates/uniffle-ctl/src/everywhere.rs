//! Asks several workers about one application and merges their answers, for a worker whose
//! coordinator knows the others. The command asks by itself, and shares path and merge.

use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::http::{CommandFailure, HttpClient, ListenerAddress, Trust, segment};
use crate::merged::{Merged, Unknown};

/// Maximum number of concurrent queries.
const AT_ONCE: usize = 8;

/// Maximum number of queried workers.
const WORKERS_MAX: usize = 1_000;

/// Largest accepted answer. A worker's answer has some KiB, or a few tens of KiB if much is lost.
const ANSWER_BYTES_MAX: usize = 128 << 10;

/// Timeout of one worker's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout of all answers together.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(8);

/// The HTTP listener of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerAddress {
    /// Id of the worker.
    pub id: String,
    /// Host name or IP address.
    pub host: String,
    /// Port number.
    pub port: u16,
}

/// Merges the explanations of `app` by the first 1,000 of `workers`, which are called over TLS if
/// `trust` is set.
///
/// Takes 8 s at most and holds up to eight answers of 128 KiB at a time. Workers that failed, did
/// not answer in time or were not queried are counted, and up to 1,000 of them are listed.
///
/// # Errors
/// [`Unknown`] if no answering worker knows the application.
pub async fn explain(
    app: &str,
    mut workers: Vec<WorkerAddress>,
    trust: Option<&Trust>,
) -> Result<Value, Unknown> {
    let client = HttpClient::of(trust, ANSWER_TIMEOUT).with_answers_of(ANSWER_BYTES_MAX);
    let is_tls = trust.is_some();
    let path = path(app);
    let end = Instant::now() + TOTAL_TIMEOUT;
    let mut merged = Merged::default();
    for worker in workers.split_off(WORKERS_MAX.min(workers.len())) {
        merged.add_unanswered(&worker.id, "not asked: the limit is 1,000 workers");
    }
    let requests: Vec<_> =
        workers.into_iter().map(|worker| ask(&client, is_tls, worker, &path, end)).collect();
    let mut answers = stream::iter(requests).buffer_unordered(AT_ONCE);
    while let Some((id, answer)) = answers.next().await {
        enter(&mut merged, &id, &answer);
    }
    merged.unknown().map_or_else(|| Ok(merged.explanation(app)), Err)
}

async fn ask(
    client: &HttpClient,
    is_tls: bool,
    worker: WorkerAddress,
    path: &str,
    end: Instant,
) -> (String, Result<Value, CommandFailure>) {
    let host = if worker.host.contains(':') { format!("[{}]", worker.host) } else { worker.host };
    let base = ListenerAddress { is_tls, host, port: worker.port };
    let answer = timeout_at(end, client.get(&base, path)).await;
    let late =
        |_| Err(CommandFailure::Unreachable("not asked: the time limit for all workers expired".to_owned()));
    (worker.id, answer.unwrap_or_else(late))
}

/// Returns the path of a worker's explanation of `app`.
pub(crate) fn path(app: &str) -> String {
    format!("/api/v1/apps/{}/explain", segment(app))
}

/// Adds a worker's answer. "Not found" is ignored.
pub(crate) fn enter(merged: &mut Merged, worker: &str, answer: &Result<Value, CommandFailure>) {
    match answer {
        Ok(it) => merged.add(worker, it),
        Err(failure) if failure.is_missing() => {}
        Err(failure) => merged.add_unanswered(worker, &failure.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bounded_number_of_workers_is_queried() {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = std::cell::Cell::new(0);
        let counting = async {
            loop {
                // Closed at once: it is no worker.
                let _accepted = listener.accept().await;
                requests.set(requests.get() + 1);
            }
        };
        let worker = |n: usize| WorkerAddress { id: format!("w{n}"), host: "127.0.0.1".to_owned(), port };
        let workers = (0..3 * WORKERS_MAX).map(worker).collect();
        let refusal = tokio::select! {
            refusal = explain("app", workers, None) => refusal.unwrap_err(),
            _ = counting => unreachable!(),
        };
        // All of them if they answer in time.
        assert!((1..=WORKERS_MAX).contains(&requests.get()), "{} workers were queried", requests.get());
        assert_eq!(refusal.unanswered, 3000);
    }
}
