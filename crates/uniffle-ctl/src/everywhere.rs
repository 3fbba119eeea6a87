//! Asks several workers of one application and puts their answers together, for the command and for a worker whose coordinator
//! knows the others.

use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::failure::Failure;
use crate::http::{Base, Client, Trust, segment};
use crate::merged::{Merged, Unknown};

/// Workers asked at once.
const AT_ONCE: usize = 8;

/// Workers asked at most: as many as are named in what is put together.
const ASKED_MAX: usize = 1_000;

/// Largest answer taken: a worker's has some KiB, and at most some tens of them when much is lost.
const ANSWER_BYTES_MAX: usize = 128 << 10;

/// For one worker's answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// For all of them.
const PATIENCE_FOR_ALL: Duration = Duration::from_secs(8);

/// The HTTP listener of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// What it is called.
    pub id: String,
    /// Its address.
    pub host: String,
    /// Its port.
    pub port: u16,
}

/// What the first 1,000 of `workers` say of `app`, as one; they are asked over TLS where `trust` says with what. It takes 8 s at most,
/// and eight answers of 128 KiB are held at a time; who has not answered by then, or was not asked, is counted and named.
///
/// # Errors
/// [`Unknown`]: none of those that answer knows it.
pub async fn explain(app: &str, mut workers: Vec<Worker>, trust: Option<&Trust>) -> Result<Value, Unknown> {
    let client = Client::of(trust, PATIENCE).with_answers_of(ANSWER_BYTES_MAX);
    let is_tls = trust.is_some();
    let path = path(app);
    let end = Instant::now() + PATIENCE_FOR_ALL;
    let mut merged = Merged::default();
    for worker in workers.split_off(ASKED_MAX.min(workers.len())) {
        merged.unanswered(&worker.id, "it was not asked: 1,000 are at most");
    }
    let asked: Vec<_> =
        workers.into_iter().map(|worker| ask((&client, is_tls), worker, &path, end)).collect();
    let mut answers = stream::iter(asked).buffer_unordered(AT_ONCE);
    while let Some((id, answer)) = answers.next().await {
        enter(&mut merged, &id, &answer);
    }
    merged.nothing().map_or_else(|| Ok(merged.explanation(app)), Err)
}

async fn ask(
    (client, is_tls): (&Client, bool),
    worker: Worker,
    path: &str,
    end: Instant,
) -> (String, Result<Value, Failure>) {
    let host = if worker.host.contains(':') { format!("[{}]", worker.host) } else { worker.host };
    let base = Base { is_tls, host, port: worker.port };
    let answer = timeout_at(end, client.get(&base, path)).await;
    let late = |_| Err(Failure::Unreachable("there was no time to ask it".to_owned()));
    (worker.id, answer.unwrap_or_else(late))
}

/// Where a worker tells of `app`.
pub(crate) fn path(app: &str) -> String {
    format!("/api/v1/apps/{}/explain", segment(app))
}

/// A worker's answer. One that does not know the application has nothing to say.
pub(crate) fn enter(merged: &mut Merged, worker: &str, answer: &Result<Value, Failure>) {
    match answer {
        Ok(it) => merged.add(worker, it),
        Err(failure) if failure.is_missing() => {}
        Err(failure) => merged.unanswered(worker, &failure.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn f11_of_thousands_of_workers_a_bounded_number_is_asked() {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = std::cell::Cell::new(0);
        let counting = async {
            loop {
                // Closed at once: it is no worker.
                let _accepted = listener.accept().await;
                asked.set(asked.get() + 1);
            }
        };
        let worker = |n: usize| Worker { id: format!("w{n}"), host: "127.0.0.1".to_owned(), port };
        let workers = (0..3 * ASKED_MAX).map(worker).collect();
        let refusal = tokio::select! {
            refusal = explain("app", workers, None) => refusal.unwrap_err(),
            _ = counting => unreachable!(),
        };
        // All of them if they answer in time.
        assert!((1..=ASKED_MAX).contains(&asked.get()), "{} were asked", asked.get());
        assert_eq!(refusal.silent, 3000);
    }
}
