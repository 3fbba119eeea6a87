//! Runs each command against one worker or many, and prints the answers.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::answers::{WorkerAnswer, all_of, ask_all, failures, pretty, worst};
use crate::arguments::{Arguments, CtlCommand, Output, ProfileKind};
use crate::everywhere;
use crate::http::{CommandFailure, HttpClient, TlsPaths, segment};
use crate::lost::Fleet;
use crate::merged::Merged;
use crate::progress::CommandProgress;
use crate::workers::{WorkerTarget, token};
use crate::{complain, lost, orphans, rows, say, text, top, upgrade, wait};

/// Time that a busy worker may need to produce a profile, in addition to the sampling.
const PROFILE_SLACK: Duration = Duration::from_secs(30);

/// Runs the command. Returns the exit code.
pub(crate) async fn run(arguments: &Arguments) -> Result<u8, CommandFailure> {
    let token = token(arguments.token_file.as_deref())?;
    let files = TlsPaths {
        ca: arguments.ca_file.as_deref(),
        cert: arguments.cert_file.as_deref(),
        key: arguments.key_file.as_deref(),
    };
    let client = HttpClient::new(&files, token, arguments.timeout)?;
    if arguments.output == Output::Csv && !rows::is_list(&arguments.call) {
        let text = "--output csv is for commands that print a list; use --output json";
        return Err(CommandFailure::Usage(text.to_owned()));
    }
    let Fleet { mut targets, awaited, .. } = lost::fleet(&client, arguments).await?;
    let output = arguments.output;
    let progress = CommandProgress::new();
    match &arguments.call {
        CtlCommand::Top { interval, once } => {
            let pace = (!*once && output == Output::Text).then_some(*interval);
            return top::run(&client, arguments, targets, pace).await;
        }
        CtlCommand::Profile { kind, seconds, flamegraph, file } => {
            targets.retain(|target| !target.is_lost);
            return profile(&client, &targets, *kind, *seconds, *flamegraph, file).await;
        }
        CtlCommand::Upgrade { command, within, dry_run, wait: _ } => {
            let options = upgrade::Options { command: command.as_deref(), within: *within };
            // Lost workers are last: the others are upgraded before the command stops at them.
            return upgrade::run(&client, arguments, &targets, &options, *dry_run).await;
        }
        CtlCommand::Orphans { live, remove, older_than } => {
            let wanted = orphans::OrphanOptions { live, remove: remove.as_deref(), older_than: *older_than };
            for target in targets.iter().filter(|target| target.is_lost) {
                complain(&format!("{}: not asked: {}", target.name, lost::NO_HEARTBEATS));
            }
            // An awaited worker may be alive, and owns its objects.
            targets.retain(|target| !target.is_lost || awaited.contains(&target.name));
            let answer = orphans::run(&client, arguments, &targets, &wanted, &progress).await?;
            say(&match output {
                Output::Json => pretty(&answer),
                Output::Csv => rows::csv_of(&arguments.call, &answer),
                Output::Text => text::answer(&arguments.call, &answer),
            });
            return Ok(0);
        }
        // Coordinators in live workers forget the lost one.
        CtlCommand::Forget { .. } => targets.retain(|target| !target.is_lost),
        _ => {}
    }
    let mut answers = ask_all(&targets, |target| ask(&client, target, &arguments.call, &progress)).await;
    drop(progress);
    drop_not_found(&arguments.call, &mut answers);
    print(arguments, answers)
}

/// Prints the answers. Returns the exit code.
fn print(
    arguments: &Arguments,
    mut answers: Vec<(&WorkerTarget, WorkerAnswer)>,
) -> Result<u8, CommandFailure> {
    let call = &arguments.call;
    let is_single = arguments.coordinator.is_empty();
    if is_single && let Some((_, Err(failure))) = answers.pop_if(|(_, answer)| answer.is_err()) {
        return Err(failure);
    }
    let code = worst(&answers);
    let explanation = match call {
        CtlCommand::App { id, .. } if !is_single => merged(id, &answers),
        _ => None,
    };
    let one = match &answers[..] {
        [(_, Ok(answer))] if is_single => Some(answer),
        _ => explanation.as_ref(),
    };
    say(&match (arguments.output, one) {
        (Output::Json, Some(one)) => pretty(one),
        (Output::Json, None) => pretty(&all_of(&answers)),
        (Output::Text, Some(one)) => text::answer(call, one),
        (Output::Text, None) => text::answers(call, &answers),
        (Output::Csv, _) => match explanation {
            Some(explanation) => rows::csv_of(call, &explanation),
            None => rows::csv(call, &answers),
        },
    });
    if arguments.output != Output::Json {
        for (target, failure) in failures(&answers) {
            complain(&format!("{}: {failure}", target.name));
        }
    }
    Ok(code)
}

async fn ask(
    client: &HttpClient,
    target: &WorkerTarget,
    call: &CtlCommand,
    progress: &CommandProgress,
) -> WorkerAnswer {
    lost::require_known(target)?;
    let get = |path: String| async move { client.get(&target.http, &path).await };
    let post = |path: String, body: Option<Value>| async move {
        client.post(&target.admin, &path, body.as_ref()).await
    };
    match call {
        CtlCommand::Status { ready } => {
            let status = get("/api/v1/status".to_owned()).await?;
            match status["node"]["not_ready"].as_str() {
                Some(why) if *ready => Err(CommandFailure::StateNotReached(format!("not ready: {why}"))),
                _ => Ok(status),
            }
        }
        CtlCommand::Apps { limit } => get(format!("/api/v1/apps?limit={limit}")).await,
        CtlCommand::App { id, cluster: false } => get(everywhere::path(id)).await,
        CtlCommand::App { id, .. } => get(format!("/api/v1/cluster/apps/{}/explain", segment(id))).await,
        CtlCommand::Disks => get("/api/v1/disks".to_owned()).await,
        CtlCommand::Losses => get("/losses".to_owned()).await,
        CtlCommand::Cluster => get("/api/v1/cluster".to_owned()).await,
        CtlCommand::Decommission { cancel: true, .. } => {
            post("/admin/cancel-decommission".to_owned(), None).await
        }
        CtlCommand::Decommission { wait: false, .. } => post("/admin/decommission".to_owned(), None).await,
        CtlCommand::Decommission { within, .. } => {
            wait::decommission(client, target, *within, &progress.bar(&target.name)).await
        }
        CtlCommand::Drain { within } => {
            wait::drain(client, target, *within, &progress.bar(&target.name)).await
        }
        CtlCommand::Tags { tags, none: false } if tags.is_empty() => {
            let node = get("/api/v1/node".to_owned()).await?;
            Ok(json!({ "tags": node["tags"] }))
        }
        CtlCommand::Tags { tags, .. } => post("/admin/tags".to_owned(), Some(json!({ "tags": tags }))).await,
        CtlCommand::Purge { id } => post(format!("/admin/apps/{}/purge", segment(id)), None).await,
        CtlCommand::Forget { id } => {
            post("/admin/coordinator/forget".to_owned(), Some(json!({ "id": id }))).await
        }
        CtlCommand::Reload => post("/admin/reload".to_owned(), None).await,
        CtlCommand::Upgrade { .. }
        | CtlCommand::Profile { .. }
        | CtlCommand::Top { .. }
        | CtlCommand::Orphans { .. } => Ok(Value::Null),
    }
}

/// Drops "not found" answers of a cluster-wide command if a worker has another answer or failure.
/// An application is only at some workers, and only some have coordinators.
fn drop_not_found(call: &CtlCommand, answers: &mut Vec<(&WorkerTarget, WorkerAnswer)>) {
    let is_missing = |answer: &WorkerAnswer| answer.as_ref().is_err_and(CommandFailure::is_missing);
    let concerns_one = matches!(
        call,
        CtlCommand::App { .. } | CtlCommand::Purge { .. } | CtlCommand::Forget { .. } | CtlCommand::Cluster
    );
    if concerns_one && !answers.iter().all(|(_, answer)| is_missing(answer)) {
        answers.retain(|(_, answer)| !is_missing(answer));
    }
}

/// Merges the answers about an application. Returns `None` if no answering worker knows it.
fn merged(app: &str, answers: &[(&WorkerTarget, WorkerAnswer)]) -> Option<Value> {
    let mut merged = Merged::default();
    for (target, answer) in answers {
        everywhere::enter(&mut merged, &target.name, answer);
    }
    merged.unknown().is_none().then(|| merged.explanation(app))
}

async fn profile(
    client: &HttpClient,
    targets: &[WorkerTarget],
    kind: ProfileKind,
    seconds: u64,
    flamegraph: bool,
    file: &Path,
) -> Result<u8, CommandFailure> {
    let [target] = targets else {
        return Err(CommandFailure::Usage(
            "a profile covers one worker: select it with --worker or --only".to_owned(),
        ));
    };
    let format = if flamegraph { "svg" } else { "pprof" };
    let (path, longer) = match kind {
        ProfileKind::Cpu => (format!("/debug/pprof/profile?seconds={seconds}&format={format}"), seconds),
        ProfileKind::Heap => (format!("/debug/pprof/heap?format={format}"), 60),
        ProfileKind::Tasks => ("/debug/tasks".to_owned(), 60),
    };
    let longer = Duration::from_secs(longer) + PROFILE_SLACK;
    let profile = client.fetch(&target.admin, &path, longer).await?;
    if file == Path::new("-") {
        return std::io::Write::write_all(&mut std::io::stdout().lock(), &profile)
            .map(|()| 0)
            .map_err(|error| CommandFailure::Usage(format!("stdout: {error}")));
    }
    let written = std::fs::write(file, &profile);
    written.map_err(|error| CommandFailure::Usage(format!("--file {}: {error}", file.display())))?;
    say(&format!("wrote {} bytes to {}", profile.len(), file.display()));
    Ok(0)
}
