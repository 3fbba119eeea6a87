//! Lists of workers and applications over a whole cluster.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bytesize::ByteSize;
use serde_json::Value;

use crate::answers::{WorkerAnswer, state};
use crate::table::{TextTable, Width, word};
use crate::workers::WorkerTarget;

/// Payload per second in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PayloadRates {
    pub(crate) received: f64,
    pub(crate) read: f64,
}

/// Returns the rates of a worker from its answer, or `None` if they are unknown.
pub(crate) type RatesOf<'a> = &'a dyn Fn(&Value) -> Option<PayloadRates>;

/// Formats a line per worker, including those without an answer. `status` returns the state in an
/// answer, `rates` its rates; the columns of rates are only shown by `top`. *lost* counts blocks
/// and is always shown. A narrow table loses columns first, then shortens names.
pub(crate) fn workers(
    answers: &[(&WorkerTarget, WorkerAnswer)],
    status: impl Fn(&Value) -> &Value,
    rates: Option<RatesOf<'_>>,
    width: Width,
) -> String {
    const HEADER: [&str; 12] = [
        "worker",
        "state",
        "lost",
        "memory",
        "of",
        "in flight",
        "disks",
        "free",
        "queue",
        "in/s",
        "out/s",
        "apps",
    ];
    const OPTIONAL: [&str; 6] = ["in flight", "queue", "of", "apps", "free", "disks"];
    let shown = HEADER.map(|name| rates.is_some() || !name.ends_with("/s"));
    let row = |(target, answer): &(&WorkerTarget, WorkerAnswer)| {
        let cells = match answer {
            Ok(answer) => worker(&target.name, status(answer), rates.and_then(|rates| rates(answer))),
            Err(failure) => {
                let state = state(target, failure);
                let mut cells = vec!["-".to_owned(); HEADER.len()];
                cells[..2].clone_from_slice(&[target.name.clone(), state.to_owned()]);
                cells
            }
        };
        cells.into_iter().zip(shown).filter_map(|(cell, shown)| shown.then_some(cell)).collect()
    };
    let header: Vec<_> =
        HEADER.into_iter().zip(shown).filter_map(|(name, shown)| shown.then_some(name)).collect();
    TextTable::new(&header, answers.iter().map(row).collect()).fitted(width, &OPTIONAL)
}

/// Returns the cells of a worker. `(n out)` counts disks that are not healthy.
fn worker(name: &str, status: &Value, rates: Option<PayloadRates>) -> Vec<String> {
    let disks = || status["disks"].as_array().into_iter().flatten();
    let unhealthy = disks().filter(|disk| disk["condition"] != "healthy").count();
    let sum = |field: &str| disks().filter_map(|disk| disk[field].as_u64()).sum::<u64>();
    let unhealthy = if unhealthy == 0 { String::new() } else { format!(" ({unhealthy} out)") };
    let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), per_second);
    vec![
        name.to_owned(),
        word(&status["node"]["state"]),
        word(&status["apps"]["lost_blocks"]),
        size(&status["memory"]["used_bytes"]),
        size(&status["memory"]["capacity_bytes"]),
        size(&status["memory"]["in_flight_bytes"]),
        format!("{}{unhealthy}", short(sum("used_bytes"))),
        short(sum("free_bytes")),
        word(&status["flush"]["queued_batches"]),
        rate(rates.map(|rates| rates.received)),
        rate(rates.map(|rates| rates.read)),
        word(&status["apps"]["count"]),
    ]
}

/// Formats the applications of all workers, each once, the largest first, at most `limit`.
pub(crate) fn apps<'v>(answers: impl Iterator<Item = &'v Value>, limit: usize, width: Width) -> String {
    struct Sum<'v> {
        user: &'v Value,
        workers: u64,
        sums: [u64; 5],
        age: f64,
    }
    const FIELDS: [&str; 5] =
        ["received_bytes", "in_memory_bytes", "local_bytes", "remote_bytes", "lost_blocks"];
    const HEADER: [&str; 9] =
        ["application", "user", "workers", "received", "memory", "disks", "remote", "lost", "age"];
    const OPTIONAL: [&str; 6] = ["remote", "workers", "user", "age", "disks", "lost"];
    let mut all = BTreeMap::<&str, Sum>::new();
    let every = answers.flat_map(|answer| answer["apps"].as_array().into_iter().flatten());
    for app in every {
        let Some(id) = app["app"].as_str() else { continue };
        let sum = all.entry(id).or_insert(Sum { user: &app["user"], workers: 0, sums: [0; 5], age: 0.0 });
        sum.workers += 1;
        sum.age = sum.age.max(app["age_seconds"].as_f64().unwrap_or(0.0));
        for (sum, field) in sum.sums.iter_mut().zip(FIELDS) {
            *sum = sum.saturating_add(app[field].as_u64().unwrap_or(0));
        }
    }
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by_key(|(id, sum)| (Reverse(sum.sums[0]), *id));
    let row = |(id, sum): &(&str, Sum)| {
        let [received, in_memory, local, remote, lost] = sum.sums;
        let sizes = [received, in_memory, local, remote].map(short);
        let first = [word(&Value::from(*id)), word(sum.user), sum.workers.to_string()];
        let last = [lost.to_string(), format!("{:.0} s", sum.age)];
        first.into_iter().chain(sizes).chain(last).collect()
    };
    TextTable::new(&HEADER, all.iter().take(limit).map(row).collect()).fitted(width, &OPTIONAL)
}

fn size(value: &Value) -> String {
    value.as_u64().map_or("-".to_owned(), short)
}

/// Formats a size as `df -h` does: powers of 1,024 without "iB".
fn short(bytes: u64) -> String {
    ByteSize(bytes).display().iec_short().to_string()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate for people, never negative"
)]
fn per_second(bytes: f64) -> String {
    short(bytes.max(0.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{CommandFailure, ListenerAddress};
    use serde_json::json;

    const WIDE: Width = Width { columns: 200, is_strict: true };
    const NARROW: Width = Width { columns: 80, is_strict: true };

    fn target(name: &str, is_lost: bool) -> WorkerTarget {
        let base = ListenerAddress { is_tls: false, host: name.to_owned(), port: 1 };
        WorkerTarget { name: name.to_owned(), http: base.clone(), admin: base, is_lost }
    }

    /// A worker whose figures are as wide as they get.
    fn busy(state: &str) -> Value {
        let disk = |condition: &str| json!({ "condition": condition, "used_bytes": 1023_u64 << 40, "free_bytes": 1023_u64 << 40 });
        json!({
            "node": { "state": state }, "flush": { "queued_batches": 123_456 },
            "apps": { "count": 12_345, "lost_blocks": 1_234_567 },
            "memory": { "used_bytes": 1023_u64 << 30, "capacity_bytes": 1023_u64 << 30, "in_flight_bytes": 1 },
            "disks": [disk("healthy"), disk("broken")],
        })
    }

    #[test]
    fn worker_rows_fit_80_columns_for_any_state_and_id() {
        let ids = [
            "10.123.124.125-19999-17000",
            "uniffle-worker-0.uniffle-worker.uniffle.svc.cluster.local-21100-21200",
        ];
        for state in ["active", "unhealthy", "decommissioning", "decommissioned"] {
            for id in ids {
                let (known, lost) = (target(id, false), target("gone-1", true));
                let answers: [(&WorkerTarget, WorkerAnswer); 2] =
                    [(&known, Ok(busy(state))), (&lost, Err(CommandFailure::Unreachable("lost".to_owned())))];
                let rates = |_: &Value| Some(PayloadRates { received: 1.5e9, read: 1023.0 * 1024.0 });
                for rates in [None, Some(&rates as RatesOf<'_>)] {
                    let text = workers(&answers, |it| it, rates, NARROW);
                    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
                    assert!(text.contains(state) && text.contains("1023.0G"), "{text}");
                    assert!(text.contains("lost") && text.contains("1234567"), "{text}");
                    assert!(
                        text.lines().any(|line| line.starts_with("gone-1") && line.contains(" lost ")),
                        "{text}"
                    );
                    assert_eq!(text.contains("in/s") && text.contains("1.4G"), rates.is_some(), "{text}");
                    let wide = workers(&answers, |it| it, rates, WIDE);
                    assert!(
                        wide.contains(id) && wide.contains("in flight") && wide.contains("(1 out)"),
                        "{wide}"
                    );
                }
            }
        }
    }

    #[test]
    fn silent_worker_is_a_row_without_figures() {
        let silent = target("w-1", false);
        let answers: [(&WorkerTarget, WorkerAnswer); 1] =
            [(&silent, Err(CommandFailure::Unreachable("refused".to_owned())))];
        let text = workers(&answers, |it| it, None, NARROW);
        let waiting: [(&WorkerTarget, WorkerAnswer); 1] =
            [(&silent, Err(CommandFailure::StateNotReached("memory".to_owned())))];
        assert!(workers(&waiting, |it| it, None, NARROW).contains("w-1     not ready"));
        assert!(
            text.lines().nth(1).is_some_and(|line| line.starts_with("w-1     no answer     -")),
            "{text}"
        );
        let empty: [(&WorkerTarget, WorkerAnswer); 1] = [(&silent, Ok(json!({})))];
        assert!(workers(&empty, |it| it, None, NARROW).contains("w-1"));
    }

    #[test]
    fn application_on_two_workers_is_one_line() {
        let app = |bytes: u64| {
            json!({ "apps": [{ "app": "application_1700000000000_0001_1700000000000", "user": "etl",
            "received_bytes": bytes, "age_seconds": 7.0 }] })
        };
        let both = [app(1 << 20), app(2 << 20)];
        let text = apps(both.iter(), 5, WIDE);
        assert_eq!(text.lines().count(), 2, "{text}");
        let line: Vec<_> = text.lines().last().unwrap_or_default().split_whitespace().collect();
        assert_eq!(line[1..4], ["etl", "2", "3.0M"], "{text}");
        let narrow = apps(both.iter(), 5, NARROW);
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
        assert!(narrow.contains("application_1700000000000_0001_1700000000000"), "{narrow}");
        assert_eq!(apps(both.iter(), 0, NARROW).lines().count(), 1);
    }
}
