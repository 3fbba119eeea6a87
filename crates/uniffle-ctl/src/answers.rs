//! Answers of workers: one, or those of many asked at once, and what they are together.

use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::workers::Target;

/// Workers asked at once.
const AT_ONCE: usize = 32;

/// A worker's answer, or why there is none.
pub(crate) type Answer = Result<Value, Failure>;

/// `ask` of all workers, in their order.
pub(crate) async fn ask_all<'t, F, T>(
    targets: &'t [Target],
    ask: impl Fn(&'t Target) -> F,
) -> Vec<(&'t Target, T)>
where
    F: Future<Output = T>,
{
    let asked = targets.iter().map(|target| {
        let answer = ask(target);
        async move { (target, answer.await) }
    });
    // Collected first: a stream of a borrowing closure's futures is not general enough for the compiler.
    stream::iter(asked.collect::<Vec<_>>()).buffered(AT_ONCE).collect().await
}

/// Those that have none, and why.
pub(crate) fn failures<'a>(
    answers: &'a [(&Target, Answer)],
) -> impl Iterator<Item = (&'a Target, &'a Failure)> {
    answers.iter().filter_map(|(target, answer)| Some((*target, answer.as_ref().err()?)))
}

/// The exit code of many answers.
pub(crate) fn worst(answers: &[(&Target, Answer)]) -> u8 {
    failures(answers).map(|(_, failure)| failure.code()).max().unwrap_or(0)
}

/// The answers of many as one.
pub(crate) fn all_of(answers: &[(&Target, Answer)]) -> Value {
    let one = |(target, answer): &(&Target, Answer)| {
        let (worker, url) = (&target.name, target.http.to_string());
        match answer {
            Ok(answer) => json!({ "worker": worker, "url": url, "answer": answer }),
            Err(failure) => {
                json!({ "worker": worker, "url": url, "error": failure.to_string(), "code": failure.code() })
            }
        }
    };
    answers.iter().map(one).collect()
}

/// As a reader has it, and a program.
pub(crate) fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}
