//! `ctl upgrade`: upgrades workers in place, one after the other.
//!
//! Invariant: a worker is signalled only after all workers before it run the new program, are
//! ready, have lost no block, and a coordinator lists all workers that it listed before. The first
//! failure stops the command.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::answers::{ask_all, pretty};
use crate::arguments::{Arguments, Output};
use crate::http::{CommandFailure, HttpClient};
use crate::progress::CommandProgress;
use crate::workers::{WorkerTarget, known};
use crate::{complain, local_process, lost, rows, say};

/// Polling interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Counter of refused upgrades.
const REFUSED: &str = "upgrades_refused_total";

/// Options of the command.
pub(crate) struct Options<'a> {
    /// Template of the command that signals a worker.
    pub(crate) command: Option<&'a str>,
    /// Maximum time per worker.
    pub(crate) within: Duration,
}

/// A program as its worker reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Program {
    /// Version and commit.
    build: String,
    started_ms: i64,
    lost_blocks: u64,
}

/// State before a worker is signalled.
struct Before {
    program: Program,
    /// Ids of the workers that the coordinators list.
    registered: BTreeSet<String>,
}

/// Checks the program that runs after the signal against the one before.
fn compare(name: &str, before: &Program, after: &Program) -> Result<(), CommandFailure> {
    if after.started_ms == before.started_ms {
        return Err(CommandFailure::StateNotReached("has not restarted yet".to_owned()));
    }
    let lost = after.lost_blocks.saturating_sub(before.lost_blocks);
    if lost > 0 {
        let text = format!("{name}: {lost} more blocks are lost than before; see ctl losses");
        return Err(CommandFailure::Refused { status: 409, text });
    }
    Ok(())
}

/// Upgrades `targets` in their order, or lists them with their programs. Returns the exit code.
pub(crate) async fn run(
    client: &HttpClient,
    arguments: &Arguments,
    targets: &[WorkerTarget],
    options: &Options<'_>,
    is_dry: bool,
) -> Result<u8, CommandFailure> {
    if targets.is_empty() {
        return Err(CommandFailure::Usage("--coordinator: no worker is registered".to_owned()));
    }
    let (rows, failure) = match is_dry {
        true => plan(client, targets).await,
        false => upgrade_all(client, arguments, targets, options).await,
    };
    say(&match arguments.output {
        Output::Json => pretty(&Value::Array(rows)),
        Output::Csv => rows::csv_of(&arguments.call, &Value::Array(rows)),
        Output::Text => rows.iter().map(describe).collect(),
    });
    let Some(failure) = failure else { return Ok(0) };
    let stopped = if is_dry { "an upgrade would stop" } else { "stopped" };
    complain(&format!("{stopped} at the first failure: {failure}"));
    Ok(failure.code())
}

/// Returns the state of a worker that is not upgraded.
fn state_before(target: &WorkerTarget) -> &'static str {
    if target.is_lost { "lost" } else { "not upgraded" }
}

/// Returns the text of `failure` without the worker's name in front.
fn text_of(target: &WorkerTarget, failure: &CommandFailure) -> String {
    let text = failure.to_string();
    text.strip_prefix(&format!("{}: ", target.name)).unwrap_or(&text).to_owned()
}

/// Checks that coordinators get heartbeats from the worker.
///
/// # Errors
/// Fails with the worker's name if they get none.
fn require_known(target: &WorkerTarget) -> Result<(), CommandFailure> {
    // The row shows the state.
    let named = |_| CommandFailure::Unreachable(format!("{}: {}", target.name, lost::NO_HEARTBEATS));
    lost::require_known(target).map_err(named)
}

/// Returns a row per worker with the program that it runs, and the failure at which an upgrade
/// would stop.
async fn plan(client: &HttpClient, targets: &[WorkerTarget]) -> (Vec<Value>, Option<CommandFailure>) {
    let answers = ask_all(targets, |target| async move {
        require_known(target)?;
        ready_program(client, target).await
    });
    let mut first_failure = None;
    let row = |(target, program): (&WorkerTarget, Result<Program, CommandFailure>)| {
        let (name, state) = (&target.name, state_before(target));
        match program {
            Ok(program) => json!({ "worker": name, "state": state, "from": program.build }),
            Err(failure) => {
                let row = json!({ "worker": name, "state": state, "error": text_of(target, &failure) });
                first_failure.get_or_insert(failure);
                row
            }
        }
    };
    let rows = answers.await.into_iter().map(row).collect();
    (rows, first_failure)
}

/// Upgrades `targets` in their order. Returns a row per worker, and the failure that ended it.
async fn upgrade_all(
    client: &HttpClient,
    arguments: &Arguments,
    targets: &[WorkerTarget],
    options: &Options<'_>,
) -> (Vec<Value>, Option<CommandFailure>) {
    let mut rows: Vec<Value> = targets
        .iter()
        .map(|target| json!({ "worker": target.name, "state": state_before(target) }))
        .collect();
    let progress = CommandProgress::new();
    let bar = progress.bar("upgrade");
    let mut first = None;
    for (at, (target, row)) in targets.iter().zip(&mut rows).enumerate() {
        let remaining = targets.len() - at;
        let text = format!("{} of {}: {}", at + 1, targets.len(), target.name);
        bar.show(u64::try_from(remaining).unwrap_or(u64::MAX), text);
        let start = Instant::now();
        match upgrade(client, arguments, target, options, first.as_deref()).await {
            Ok((before, after)) => {
                *row = json!({
                    "worker": target.name, "state": "upgraded", "from": before, "to": after,
                    "seconds": start.elapsed().as_secs_f64(),
                });
                first.get_or_insert(after);
            }
            Err(error) => {
                *row = json!({ "worker": target.name, "state": "failed", "error": text_of(target, &error) });
                return (rows, Some(error));
            }
        }
    }
    (rows, None)
}

fn describe(row: &Value) -> String {
    let field = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
    let (from, to) = (field("from"), field("to"));
    let seconds = row["seconds"].as_f64().unwrap_or_default();
    let detail = match row["state"].as_str() {
        Some("upgraded") if from == to => {
            let worker = field("worker");
            return format!("{worker}: restarted in {seconds:.1} s; the program is the same, {to}\n");
        }
        Some("upgraded") => format!(" from {from} to {to} in {seconds:.1} s"),
        _ if row["error"].is_string() => format!(": {}", field("error")),
        _ if row["from"].is_string() => format!(", runs {from}"),
        _ => String::new(),
    };
    format!("{}: {}{detail}\n", field("worker"), field("state"))
}

/// Upgrades one worker. Returns the builds before and after. `expected` is the build of the workers
/// that were upgraded before.
async fn upgrade(
    client: &HttpClient,
    arguments: &Arguments,
    target: &WorkerTarget,
    options: &Options<'_>,
    expected: Option<&str>,
) -> Result<(String, String), CommandFailure> {
    lost::require_known(target)?;
    let deadline = Instant::now() + options.within;
    let before =
        Before { program: ready_program(client, target).await?, registered: registered(arguments).await? };
    let refused = refusals(client, target).await?;
    signal(target, options).await?;
    loop {
        let problem = match settled(client, arguments, target, &before).await {
            Ok(after) if expected.is_some_and(|expected| *expected != after) => {
                let text = format!("{}: runs {after}, unlike the workers before it", target.name);
                return Err(CommandFailure::Refused { status: 409, text });
            }
            Ok(after) => return Ok((before.program.build, after)),
            Err(problem @ CommandFailure::Refused { status: 409, .. }) => return Err(problem),
            Err(problem) => problem,
        };
        if refusals(client, target).await.is_ok_and(|now| now > refused) {
            let text = format!("{}: refused the upgrade; its log has the reason", target.name);
            return Err(CommandFailure::Refused { status: 409, text });
        }
        if Instant::now() + LOOK_INTERVAL > deadline {
            let within = options.within;
            return Err(CommandFailure::StateNotReached(format!(
                "{}: timed out after {within:?}: {problem}",
                target.name
            )));
        }
        sleep(LOOK_INTERVAL).await;
    }
}

/// Returns the build of the worker once it runs another process than `before`, is ready, and all
/// workers are registered. An embedded coordinator learns of the others by their next heartbeats.
async fn settled(
    client: &HttpClient,
    arguments: &Arguments,
    target: &WorkerTarget,
    before: &Before,
) -> Result<String, CommandFailure> {
    let after = ready_program(client, target).await?;
    compare(&target.name, &before.program, &after)?;
    // A new process counts from zero, and counts a program that could not be executed.
    if refusals(client, target).await? > 0.0 {
        let text = format!("{}: the new program cannot be executed; the old one runs again", target.name);
        return Err(CommandFailure::Refused { status: 409, text });
    }
    let registered = registered(arguments).await?;
    match before.registered.difference(&registered).next() {
        None => Ok(after.build),
        Some(id) => {
            Err(CommandFailure::StateNotReached(format!("{id} is not registered with the coordinator")))
        }
    }
}

/// Returns the ids of the workers that the coordinators list, or none without a coordinator.
async fn registered(arguments: &Arguments) -> Result<BTreeSet<String>, CommandFailure> {
    match arguments.coordinator.is_empty() {
        true => Ok(BTreeSet::new()),
        false => Ok(known(arguments).await?.into_iter().map(|listed| listed.name).collect()),
    }
}

/// Returns the program of a ready worker.
async fn ready_program(client: &HttpClient, target: &WorkerTarget) -> Result<Program, CommandFailure> {
    let status = client.get(&target.http, "/api/v1/status").await?;
    let node = &status["node"];
    if let Some(why) = node["not_ready"].as_str() {
        return Err(CommandFailure::StateNotReached(format!("{}: not ready: {why}", target.name)));
    }
    let text = |name: &str| node[name].as_str().unwrap_or("unknown").to_owned();
    let build = format!("{} ({})", text("version"), text("commit"));
    let started_ms = node["started_ms"].as_i64().unwrap_or(0);
    let lost_blocks = status["apps"]["lost_blocks"].as_u64().unwrap_or(0);
    Ok(Program { build, started_ms, lost_blocks })
}

/// Returns the number of upgrades that the running process refused.
async fn refusals(client: &HttpClient, target: &WorkerTarget) -> Result<f64, CommandFailure> {
    let metrics = client.text(&target.http, "/metrics").await?;
    let values = metrics.lines().filter(|line| line.starts_with(REFUSED));
    Ok(values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

/// Sends SIGUSR2 to the worker, by the given command or directly.
async fn signal(target: &WorkerTarget, options: &Options<'_>) -> Result<(), CommandFailure> {
    let failed =
        |text: String| CommandFailure::Refused { status: 500, text: format!("{}: {text}", target.name) };
    let Some(template) = options.command else {
        let pid = local_process::find(&target.http);
        let pid =
            pid.map_err(|why| CommandFailure::Usage(format!("{}: {why}; use --command", target.name)))?;
        let pid = Pid::from_raw(pid).ok_or_else(|| failed("invalid process id".to_owned()))?;
        return kill_process(pid, Signal::USR2).map_err(|error| failed(format!("SIGUSR2: {error}")));
    };
    let command = fill(template, target)?;
    let run = Command::new("sh").args(["-c", &command]).stdin(Stdio::null()).kill_on_drop(true).output();
    let ended = timeout(options.within, run).await;
    let output = ended
        .map_err(|_| {
            CommandFailure::StateNotReached(format!("{}: --command timed out: {command}", target.name))
        })?
        .map_err(|error| failed(format!("--command: {error}")))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let output_text = String::from_utf8_lossy(&output.stderr);
            Err(failed(format!("--command failed with {}: {command}: {}", output.status, output_text.trim())))
        }
    }
}

/// Fills in the placeholders. Values come from the coordinator, so only characters without a
/// meaning to a shell or to an option parser are allowed.
fn fill(template: &str, target: &WorkerTarget) -> Result<String, CommandFailure> {
    let host = target.http.host.trim_start_matches('[').trim_end_matches(']');
    for value in [host, target.name.as_str()] {
        let is_plain = value.chars().all(|c| c.is_ascii_alphanumeric() || ".:-_".contains(c));
        if !is_plain || value.starts_with('-') {
            return Err(CommandFailure::Usage(format!(
                "--command: {value:?} has characters that a shell interprets"
            )));
        }
    }
    let port = target.http.port.to_string();
    Ok(template.replace("{host}", host).replace("{id}", &target.name).replace("{http_port}", &port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::ListenerAddress;

    fn target(name: &str, host: &str) -> WorkerTarget {
        let http = ListenerAddress { is_tls: false, host: host.to_owned(), port: 19_998 };
        WorkerTarget { name: name.to_owned(), admin: http.clone(), http, is_lost: false }
    }

    #[test]
    fn upgrade_that_loses_blocks_fails() {
        let program = |started_ms, lost_blocks| Program { build: "1".to_owned(), started_ms, lost_blocks };
        let code = |after| compare("w-1", &program(5, 2), &after).map_err(|failure| failure.code());
        assert_eq!(code(program(5, 2)), Err(4));
        assert_eq!(code(program(6, 2)), Ok(()));
        assert_eq!(code(program(6, 0)), Ok(()), "lost blocks of an ended application must not count");
        assert_eq!(code(program(6, 3)), Err(1));
    }

    #[test]
    fn plan_names_versions_and_obstacles() {
        let row = |fields: Value| describe(&fields);
        let (name, state) = ("w-1", "not upgraded");
        assert_eq!(
            row(json!({ "worker": name, "state": state, "from": "0.2.0 (a1b2)" })),
            "w-1: not upgraded, runs 0.2.0 (a1b2)\n"
        );
        let failure = CommandFailure::StateNotReached("w-1: not ready: memory is full".to_owned());
        let error = text_of(&target(name, "h"), &failure);
        assert_eq!(
            row(json!({ "worker": name, "state": state, "error": error })),
            "w-1: not upgraded: not ready: memory is full\n"
        );
        assert_eq!(row(json!({ "worker": name, "state": state })), "w-1: not upgraded\n");
        let lost = WorkerTarget { is_lost: true, ..target(name, "h") };
        let failure = require_known(&lost).unwrap_err();
        assert!(failure.to_string().starts_with("w-1: its coordinator"), "{failure}");
        assert_eq!(
            row(json!({ "worker": name, "state": state_before(&lost), "error": text_of(&lost, &failure) })),
            "w-1: lost: its coordinator receives no heartbeats\n"
        );
    }

    #[test]
    fn upgrade_to_the_same_program_is_told_as_a_restart() {
        let row = |to: &str| {
            let (worker, state) = ("w-1", "upgraded");
            describe(&json!({ "worker": worker, "state": state, "from": "1 (a)", "to": to, "seconds": 0.9 }))
        };
        assert_eq!(row("2 (b)"), "w-1: upgraded from 1 (a) to 2 (b) in 0.9 s\n");
        assert_eq!(row("1 (a)"), "w-1: restarted in 0.9 s; the program is the same, 1 (a)\n");
    }

    #[test]
    fn command_is_filled_with_plain_values_only() {
        let worker = target("10.0.0.1-19999-17000", "10.0.0.1");
        assert_eq!(
            fill("ssh {host} up {id} {http_port}", &worker),
            Ok("ssh 10.0.0.1 up 10.0.0.1-19999-17000 19998".to_owned())
        );
        assert_eq!(fill("{host}", &target("w", "[::1]")), Ok("::1".to_owned()));
        for (name, host) in [("w", "a;reboot"), ("w", "$(reboot)"), ("w", "-oProxyCommand"), ("a b", "h")] {
            assert_eq!(
                fill("ssh {host} {id}", &target(name, host)).map_err(|failure| failure.code()),
                Err(2)
            );
        }
    }
}
