//! Calls to several workers at once, and their combined answers and exit codes.

use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};

use crate::http::CommandFailure;
use crate::workers::WorkerTarget;

/// Largest number of workers asked at once.
const AT_ONCE: usize = 32;

/// A worker's answer, or the failure of the command there.
pub(crate) type WorkerAnswer = Result<Value, CommandFailure>;

/// Calls `ask` for all workers. Returns the results in their order.
pub(crate) async fn ask_all<'t, F, T>(
    targets: &'t [WorkerTarget],
    ask: impl Fn(&'t WorkerTarget) -> F,
) -> Vec<(&'t WorkerTarget, T)>
where
    F: Future<Output = T>,
{
    let asked = targets.iter().map(|target| {
        let answer = ask(target);
        async move { (target, answer.await) }
    });
    // Collected first, because the compiler rejects a stream over futures of a borrowing closure.
    stream::iter(asked.collect::<Vec<_>>()).buffered(AT_ONCE).collect().await
}

/// Returns the workers where the command failed, and the failures.
pub(crate) fn failures<'a>(
    answers: &'a [(&WorkerTarget, WorkerAnswer)],
) -> impl Iterator<Item = (&'a WorkerTarget, &'a CommandFailure)> {
    answers.iter().filter_map(|(target, answer)| Some((*target, answer.as_ref().err()?)))
}

/// Returns the state to show for a worker where the command failed.
pub(crate) fn state(target: &WorkerTarget, failure: &CommandFailure) -> &'static str {
    match failure {
        _ if target.is_lost => "lost",
        CommandFailure::StateNotReached(_) => "not ready",
        CommandFailure::Refused { .. } => "refuses",
        CommandFailure::Unreachable(_) | CommandFailure::Usage(_) => "no answer",
    }
}

/// Returns the exit code of several answers: the highest.
pub(crate) fn worst(answers: &[(&WorkerTarget, WorkerAnswer)]) -> u8 {
    failures(answers).map(|(_, failure)| failure.code()).max().unwrap_or(0)
}

/// Combines several answers into one array. The URL of a lost worker is unknown.
pub(crate) fn all_of(answers: &[(&WorkerTarget, WorkerAnswer)]) -> Value {
    let one = |(target, answer): &(&WorkerTarget, WorkerAnswer)| {
        let mut row = match answer {
            Ok(answer) => json!({ "worker": target.name, "answer": answer }),
            Err(failure) => {
                json!({ "worker": target.name, "error": failure.to_string(), "code": failure.code() })
            }
        };
        if !target.is_lost {
            row["url"] = Value::from(target.http.to_string());
        }
        row
    };
    answers.iter().map(one).collect()
}

/// Formats `value` as indented JSON.
pub(crate) fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}
