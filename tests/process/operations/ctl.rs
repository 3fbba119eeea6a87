//! `uniffle-worker ctl` against workers: commands in their output formats, exit codes, completions
//! and manual pages.

use std::collections::BTreeSet;
use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::process::Command;
use tokio::task::block_in_place;

use super::fixture::{AdminFixture, eventually, parse};
use crate::writes::{Written, client_of, key};
use uniffle_testkit::config::ConfigLines;
use uniffle_testkit::ports::free_port;
use uniffle_testkit::tools::available;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Exit code and output of a command.
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// Asserts exit code 0. Returns stdout.
    pub(crate) fn succeeded(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{}", self.stdout);
        self.stdout
    }

    /// Asserts exit code `code`. Returns stderr.
    pub(crate) fn failed(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        self.stderr
    }
}

pub(crate) async fn run(arguments: &[&str]) -> Outcome {
    run_with(&[], arguments).await
}

/// Returns the names of the commands in the help of `command`, which is empty for the program.
pub(crate) async fn commands_in_help_of(command: &[&str]) -> Vec<String> {
    let help = run(&[command, &["-h"]].concat()).await.succeeded();
    let (_, list) = help.split_once("\nCommands:\n").unwrap();
    let lines = list.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.strip_prefix("  "));
    // Further lines of a description are indented.
    let names = lines.filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next());
    names.map(str::to_owned).collect()
}

/// Runs `uniffle-worker` with environment variables.
async fn run_with(env: &[(&str, &str)], arguments: &[&str]) -> Outcome {
    let output = output(env, arguments).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Outcome { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Returns the raw output, which need not be text.
async fn output(env: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uniffle-worker"));
    command.args(arguments).env_remove("WORKER_ADMIN_TOKEN").envs(env.iter().copied());
    command.stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap()
}

/// Runs `ctl` for the worker of `fixture`.
async fn ctl(fixture: &AdminFixture, arguments: &[&str]) -> Outcome {
    let addresses = fixture.worker.addresses();
    let (http, admin) = (addresses.http.to_string(), addresses.admin.unwrap().to_string());
    let whom = ["ctl", "--worker", &http, "--admin", &admin];
    run(&[&whom[..], arguments].concat()).await
}

async fn json(fixture: &AdminFixture, arguments: &[&str]) -> Value {
    let text = ctl(fixture, &[arguments, &["--output", "json"]].concat()).await.succeeded();
    serde_json::from_str(&text).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_commands_show_worker_state() {
    let fixture = AdminFixture::start().await;
    fixture.push("app-1", 3).await;
    fixture.push("app-10", 1).await;
    // Figures are up to a second old.
    eventually("the applications are counted", || {
        let apps = fixture.worker.service().apps().app_count();
        if apps == 2 { Ok(()) } else { Err(apps.to_string()) }
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;

    let status = json(&fixture, &["status"]).await;
    assert_eq!((&status["node"]["state"], &status["apps"]["count"]), (&"active".into(), &2.into()));
    let shown = ctl(&fixture, &["status", "--ready"]).await.succeeded();
    for part in ["active, ready", "applications 2, 4 partitions", "1, all healthy", "embedded"] {
        assert!(shown.contains(part), "{part} is missing: {shown}");
    }
    assert_eq!(json(&fixture, &["apps", "--limit", "1"]).await["apps"].as_array().unwrap().len(), 1);
    let shown = ctl(&fixture, &["apps"]).await.succeeded();
    assert!(shown.lines().nth(1).is_some_and(|line| line.starts_with("app-1 ")), "{shown}");
    assert_eq!(json(&fixture, &["app", "app-1"]).await["partitions"], 3);
    let shown = ctl(&fixture, &["app", "app-1"]).await.succeeded();
    assert!(shown.contains("receive") && shown.contains("in memory 58.6 KiB"), "{shown}");
    assert_eq!(json(&fixture, &["disks"]).await[0]["condition"], "healthy");
    assert!(ctl(&fixture, &["disks"]).await.succeeded().contains("healthy"));
    assert_eq!(ctl(&fixture, &["losses"]).await.succeeded(), "no block is lost\n");
    let shown = ctl(&fixture, &["top"]).await.succeeded();
    assert!(shown.starts_with("1 worker, 1 answering;") && shown.contains("app-10"), "{shown}");
    assert_eq!(json(&fixture, &["top"]).await[0]["answer"]["status"]["apps"]["count"], 2);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tags_reload_and_purge_change_the_worker() {
    let fixture = AdminFixture::with_file("tags = [\"old\"]", "").await;
    fixture.push("app 1 é", 1).await;
    assert_eq!(ctl(&fixture, &["tags"]).await.succeeded(), "old\n");
    assert_eq!(ctl(&fixture, &["tags", "night", "ssd"]).await.succeeded(), "night\nssd\n");
    assert_eq!(json(&fixture, &["tags"]).await["tags"], serde_json::json!(["night", "ssd"]));
    ctl(&fixture, &["tags", "a,b"]).await.failed(1);
    assert_eq!(ctl(&fixture, &["tags", "--none"]).await.succeeded(), "\n");
    fixture.rewrite("tags = [\"new\"]", "");
    assert!(ctl(&fixture, &["reload"]).await.succeeded().contains("waiting_for_restart:"));
    let response = json(&fixture, &["reload"]).await;
    assert!(response["changed"].is_array() && response["waiting_for_restart"].is_array(), "{response}");
    fixture.write("gprc_port = 1");
    assert!(ctl(&fixture, &["reload"]).await.failed(1).contains("did you mean grpc_port?"));
    ctl(&fixture, &["purge", "app"]).await.failed(1);
    assert!(ctl(&fixture, &["forget", "w-1"]).await.failed(1).contains("lists no lost node \"w-1\""));
    assert!(ctl(&fixture, &["app", "app 1 é"]).await.succeeded().contains("in memory 9.8 KiB"));
    assert_eq!(ctl(&fixture, &["purge", "app 1 é"]).await.succeeded(), "purged: app 1 é\n");
    let shown = ctl(&fixture, &["app", "app 1 é"]).await.succeeded();
    assert!(shown.contains("no data left here") && !shown.contains(", in memory 9.8"), "{shown}");
    fixture.push("app-2", 1).await;
    assert_eq!(json(&fixture, &["purge", "app-2"]).await, serde_json::json!({ "purged": "app-2" }));
    let file = tempfile::tempdir().unwrap();
    let file = file.path().join("tasks");
    ctl(&fixture, &["profile", "tasks", "--file", file.to_str().unwrap()]).await.succeeded();
    assert!(std::fs::read_to_string(file).unwrap().contains("expiry"));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_and_decommission_wait_until_done() {
    let fixture = AdminFixture::with_file("decommission_check_interval_sec = 1", "").await;
    // Creates a snapshot of the empty memory, which the drain must not trust.
    json(&fixture, &["status"]).await;
    fixture.push("app-1", 3).await;
    let drained = json(&fixture, &["drain", "--within", "60"]).await;
    assert_eq!((&drained["in_memory_bytes"], &drained["apps"]), (&0.into(), &1.into()));
    assert_eq!(fixture.worker.memory().block_count(), 0);
    let late = ctl(&fixture, &["decommission", "--wait", "--within", "0.5"]).await.failed(4);
    assert!(late.contains("applications left: 1"), "{late}");
    assert!(ctl(&fixture, &["decommission"]).await.succeeded().contains("state: decommissioning"));
    assert_eq!(json(&fixture, &["decommission"]).await["state"], "decommissioning");
    assert!(ctl(&fixture, &["status", "--ready"]).await.failed(4).contains("not ready"));
    ctl(&fixture, &["purge", "app-1"]).await.succeeded();
    let ended = json(&fixture, &["decommission", "--wait", "--within", "60"]).await;
    assert_eq!(ended["state"], "decommissioned");
    assert_eq!(json(&fixture, &["decommission", "--cancel"]).await["state"], "active");
    assert!(ctl(&fixture, &["decommission", "--cancel"]).await.succeeded().contains("state: active"));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exit_code_identifies_the_failure() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let right = token("right", "correct-horse-battery-staple\n");
    let wrong = token("wrong", "incorrect-horse-battery\n");
    let fixture = AdminFixture::with(&format!("token_file = {right:?}\n")).await;
    ctl(&fixture, &["tags", "x", "--token-file", &right]).await.succeeded();
    let refused = ctl(&fixture, &["tags", "x", "--token-file", &wrong]).await.failed(1);
    assert!(refused.contains("bearer token required"), "{refused}");
    assert!(ctl(&fixture, &["tags", "x"]).await.failed(1).contains("401"));
    let refused = ctl(&fixture, &["tags", "x", "--token-file", "/nowhere"]).await.failed(2);
    assert!(refused.contains("--token-file /nowhere"), "{refused}");
    // Public calls need no token.
    ctl(&fixture, &["status"]).await.succeeded();
    assert!(ctl(&fixture, &["app", "nobody"]).await.failed(1).contains("404"));

    let nobody = format!("127.0.0.1:{}", free_port());
    for arguments in [
        &["ctl", "status", "--worker", &nobody][..],
        &["ctl", "status", "--coordinator", &nobody],
        &["ctl", "decommission", "--wait", "--worker", &nobody, "--admin", &nobody],
    ] {
        let response = run(arguments).await.failed(3);
        assert!(response.contains(&nobody), "{response}");
    }
    for arguments in [
        &["ctl"][..],
        &["ctl", "stat"],
        &["ctl", "status", "--worker", "ftp://x"],
        &["ctl", "status", "--only", "x"],
        &["ctl", "status", "--coordinator", &nobody, "--worker", "x"],
        &["ctl", "app", "x", "--cluster", "--coordinator", &nobody],
        &["ctl", "drain", "--coordinator", &nobody],
        &["ctl", "status", "--timeout", "0"],
        &["ctl", "drain", "--output", "csv"],
        &["ctl", "status", "--coordinator", "https://localhost:1"],
        &["ctl", "status", "--ca-file", "/nowhere"],
        &["completions", "sh-1"],
    ] {
        run(arguments).await.failed(2);
    }
    // A listener that never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    run(&["ctl", "status", "--timeout", "0.2", "--worker", &silent]).await.failed(3);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_is_read_from_file_or_environment() {
    const RIGHT: &str = "correct-horse-battery-staple";
    const WRONG: &str = "incorrect-horse-battery";
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, token: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, token).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", RIGHT), file("wrong", WRONG));
    let fixture = AdminFixture::with(&format!("token_file = {right:?}\n")).await;
    let admin = fixture.worker.addresses().admin.unwrap().to_string();
    let tags = |env: Option<&'static str>, file: Option<String>| {
        let mut arguments: Vec<_> = ["ctl", "tags", "x", "--admin", &admin].map(str::to_owned).into();
        arguments.extend(file.into_iter().flat_map(|file| ["--token-file".to_owned(), file]));
        let env: Vec<_> = env.into_iter().map(|token| ("WORKER_ADMIN_TOKEN", token)).collect();
        async move { run_with(&env, &arguments.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    tags(Some(RIGHT), None).await.succeeded();
    tags(Some("correct-horse-battery-staple\n"), None).await.succeeded();
    for refused in [Some(WRONG), Some(""), None] {
        let response = tags(refused, None).await.failed(1);
        assert!(response.contains("bearer token required"), "{refused:?}: {response}");
    }
    // The file takes precedence.
    tags(Some(WRONG), Some(right)).await.succeeded();
    assert!(tags(Some(RIGHT), Some(wrong)).await.failed(1).contains("401"));
    fixture.finish().await;
}

/// Runs `ctl` for a worker process.
async fn ctl_of(worker: &WorkerProcess, arguments: &[&str]) -> Output {
    let at = |port: u16| format!("127.0.0.1:{port}");
    let (http, admin) = (at(worker.ready().http_port), at(worker.ready().admin_port.unwrap()));
    let whom = ["ctl", "--worker", &http, "--admin", &admin];
    output(&[], &[&whom[..], arguments].concat()).await
}

fn printed(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losses_lists_memory_blocks_of_killed_worker() {
    let tables = "[admin]\nport = 0".to_owned();
    let setup = Setup { name: "losing", made_tables: tables, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app-1", 3), 2).await;
    for task in 0..3 {
        written.task(&client, task, 1000).await.unwrap();
    }
    drop(client);
    block_in_place(|| {
        worker.kill();
        worker.start_again();
    });
    let start = tokio::time::Instant::now();
    let response: Value = loop {
        let response = printed(ctl_of(&worker, &["losses", "--output", "json"]).await);
        let response: Value = serde_json::from_str(&response).unwrap();
        if response["losses"][1].is_object() {
            break response;
        }
        assert!(start.elapsed() < super::api::WAIT_MAX, "{response}");
    };
    let losses = response["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 2, "expected one loss per partition: {response}");
    for (partition, loss) in losses.iter().enumerate() {
        assert_eq!(
            (&loss["app"], &loss["shuffle"], &loss["blocks"]),
            (&"app-1".into(), &3.into(), &3.into())
        );
        assert_eq!(loss["partition"], partition, "{response}");
    }
    let shown = printed(ctl_of(&worker, &["losses"]).await);
    let lines: Vec<_> = shown.lines().collect();
    assert!(lines.len() == 3 && lines[0].starts_with("application"), "{shown}");
    for (line, loss) in lines[1..].iter().zip(losses) {
        assert!(line.starts_with("app-1") && line.ends_with(loss["reason"].as_str().unwrap()), "{shown}");
    }
    client_of(&worker).await.unregister_app("app-1").await.unwrap();
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn profile_is_written_to_file_or_stdout() {
    let setup = Setup {
        made_tables: "[admin]\nport = 0".to_owned(),
        env: vec![("_RJEM_MALLOC_CONF", "prof:true,lg_prof_sample:12".to_owned())],
        ..Setup::default()
    };
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let directory = tempfile::tempdir().unwrap();
    // pprof's format, compressed with gzip.
    let is_profile = |profile: &[u8]| profile.starts_with(&[0x1f, 0x8b]);
    for kind in ["cpu", "heap"] {
        let file = directory.path().join(kind);
        let arguments = ["profile", kind, "--seconds", "1", "--file"];
        let response = printed(ctl_of(&worker, &[&arguments[..], &[file.to_str().unwrap()]].concat()).await);
        let profile = std::fs::read(&file).unwrap();
        assert_eq!(response, format!("wrote {} bytes to {}\n", profile.len(), file.display()));
        assert!(is_profile(&profile), "{kind}: {}", String::from_utf8_lossy(&profile));
        let streamed = ctl_of(&worker, &["profile", kind, "--seconds", "1", "-f", "-"]).await;
        let failure = String::from_utf8_lossy(&streamed.stderr);
        assert!(streamed.status.success() && failure.is_empty(), "{failure}");
        assert!(is_profile(&streamed.stdout), "{kind}: {}", String::from_utf8_lossy(&streamed.stdout));
        assert!(
            !streamed.stdout.windows(9).any(|part| part == b"bytes in "),
            "stdout has more than the profile"
        );
    }
    let svg = printed(ctl_of(&worker, &["profile", "heap", "--flamegraph", "-f", "-"]).await);
    assert!(svg.contains("<svg"), "{svg}");
    let refused = ctl_of(&worker, &["profile", "heap", "-f", "/nowhere/profile"]).await;
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--file /nowhere/profile"), "{refused:?}");
    block_in_place(|| worker.stop());
}

/// Returns the ids of both workers of a coordinator, once they list three applications together.
/// Statistics are up to a second old.
async fn workers_that_list_three_apps(coordinator: &str) -> Vec<String> {
    let start = tokio::time::Instant::now();
    loop {
        let status = run(&["ctl", "--coordinator", coordinator, "status", "--output", "json"]).await;
        let response: Value = serde_json::from_str(&status.succeeded()).unwrap();
        let workers = response.as_array().unwrap();
        let ids: Vec<_> = workers.iter().map(|it| it["worker"].as_str().unwrap().to_owned()).collect();
        let apps = workers.iter().map(|it| it["answer"]["apps"]["count"].as_u64().unwrap_or(0));
        assert!(start.elapsed() < super::api::WAIT_MAX, "{ids:?}");
        if ids.len() == 2 && apps.sum::<u64>() == 3 {
            return ids;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinator_option_queries_every_worker() {
    let fixture = AdminFixture::start().await;
    let second = AdminFixture::in_cluster_of(&fixture).await;
    for each in [&fixture, &second] {
        each.push("app-1", 2).await;
    }
    second.push("app-2", 1).await;
    let coordinator = fixture.worker.addresses().grpc.to_string();
    let all = |arguments: &[&str]| {
        let whom = ["ctl", "--coordinator", &coordinator];
        let arguments: Vec<String> = whom.iter().chain(arguments).map(|it| (*it).to_owned()).collect();
        async move { run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    let parsed = |done: Outcome| serde_json::from_str::<Value>(&done.succeeded()).unwrap();
    let ids = workers_that_list_three_apps(&coordinator).await;
    let shown = all(&["status"]).await.succeeded();
    assert!(shown.lines().count() == 3 && ids.iter().all(|id| shown.contains(id)), "{shown}");
    let shown = all(&["apps"]).await.succeeded();
    assert_eq!(shown.lines().filter(|line| line.starts_with("app-")).count(), 2, "{shown}");
    // Only one of the two knows the application; the other is not an error.
    let one = parsed(all(&["app", "app-2", "--output", "json"]).await);
    assert_eq!((&one["worker_count"], &one["unanswered_count"]), (&1.into(), &0.into()), "{one}");
    all(&["app", "nobody"]).await.failed(1);
    let both = parsed(all(&["app", "app-1", "--output", "json"]).await);
    assert_eq!((&both["worker_count"], &both["partitions"]), (&2.into(), &4.into()), "{both}");
    let received = |it: &Value| it["workers"][0]["received"].as_u64().unwrap();
    assert_eq!(both["bytes"]["received"].as_u64(), Some(2 * received(&both)), "{both}");
    let shown = all(&["app", "app-1"]).await.succeeded();
    assert!(ids.iter().all(|id| shown.contains(id)) && shown.contains("receive"), "{shown}");
    // The worker whose coordinator knows both gives the same answer.
    let response = json(&fixture, &["app", "app-1", "--cluster"]).await;
    assert_eq!(
        (&response["worker_count"], &response["bytes"]["received"]),
        (&2.into(), &both["bytes"]["received"])
    );
    assert!(ctl(&fixture, &["app", "nobody", "--cluster"]).await.failed(1).contains("no worker knows"));
    assert!(ctl(&second, &["app", "app-1", "--cluster"]).await.failed(1).contains("has no coordinator"));
    assert!(all(&["top"]).await.succeeded().starts_with("2 workers, 2 answering;"));

    // One of the two is a coordinator.
    let response = parsed(all(&["cluster", "--output", "json"]).await);
    let nodes = response[0]["answer"]["nodes"].as_array().unwrap();
    assert!(response.as_array().unwrap().len() == 1 && nodes.len() == 2, "{response}");
    assert!(nodes.iter().zip(&ids).all(|(node, id)| node["id"] == **id), "{response}");
    assert!(all(&["cluster"]).await.succeeded().contains("active"));

    // Commands that end a worker's service need `--all` or the id of a worker.
    assert!(all(&["decommission"]).await.failed(2).contains("--all"));
    assert!(all(&["decommission", "--only", "nobody"]).await.failed(1).contains(&ids[0]));
    let port = fixture.worker.addresses().admin.unwrap().port().to_string();
    let first = ids.iter().find(|id| id.contains(&fixture.worker.addresses().grpc.port().to_string()));
    let tagged = all(&["tags", "x", "--only", first.unwrap().as_str(), "--admin-port", port.as_str()])
        .await
        .succeeded();
    assert!(tagged.contains("== ") && tagged.contains('x'), "{tagged}");
    second.finish().await;
    // The coordinator still lists the stopped worker. The other answers, and the exit code reports
    // the failure.
    let left = all(&["disks", "--output", "json"]).await;
    let answers: Value = serde_json::from_str(&left.stdout).unwrap();
    let codes: Vec<_> = answers.as_array().unwrap().iter().map(|it| it["code"].as_u64()).collect();
    assert_eq!((left.code, codes.contains(&Some(3)), codes.contains(&None)), (3, true, true), "{answers}");
    let response = json(&fixture, &["app", "app-1", "--cluster"]).await;
    let silent =
        response["unanswered"][0]["worker"].as_str().expect("the worker that did not answer is not named");
    assert_eq!(
        (&response["worker_count"], &response["unanswered_count"]),
        (&1.into(), &1.into()),
        "{response}"
    );
    assert!(ids.iter().any(|id| id == silent) && first.unwrap() != silent, "{response}");
    assert!(
        response["findings"][0].as_str().unwrap().starts_with("1 of 2 workers did not answer"),
        "{response}"
    );
    let shown = all(&["app", "app-1"]).await;
    assert!(shown.code == 3 && shown.stdout.contains(&format!("no answer: {silent}: ")), "{}", shown.stdout);
    fixture.finish().await;
}

/// The column names are pinned in the crate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn csv_columns_are_filled_from_the_answers() {
    let fixture = AdminFixture::start().await;
    fixture.push("app-1", 2).await;
    let coordinator = fixture.worker.addresses().grpc.to_string();
    let start = tokio::time::Instant::now();
    // Statistics are up to a second old.
    while json(&fixture, &["apps"]).await["apps"][0]["received_bytes"].as_u64().unwrap_or(0) == 0 {
        assert!(start.elapsed() < super::api::WAIT_MAX, "the application is not listed");
    }
    let rates = ["received_bytes_per_second", "read_bytes_per_second"];
    // Columns that are empty for a healthy worker. Only `top` has rates.
    for (call, empty) in [
        (&["status"][..], &["not_ready", rates[0], rates[1], "error"][..]),
        (&["top"], &["not_ready", "error"]),
        (&["apps"], &[]),
        (&["app", "app-1"], &[]),
        (&["disks"], &["fault"]),
        (&["cluster"], &[]),
    ] {
        let alone = ctl(&fixture, &[call, &["--output", "csv"]].concat()).await.succeeded();
        let whole = [&["ctl", "--coordinator", &coordinator], call, &["--output", "csv"]].concat();
        for text in [alone, run(&whole).await.succeeded()] {
            assert!(text.ends_with("\r\n"), "{call:?}: {text:?}");
            let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
            let (header, row) = (lines.next().unwrap(), lines.next().unwrap());
            assert_eq!(header.len(), row.len(), "{call:?}: {text}");
            let without = header.iter().zip(row).filter(|(_, cell)| cell.is_empty());
            let without: Vec<_> = without.map(|(name, _)| *name).collect();
            // Rates need two samples.
            let without: Vec<_> =
                without.into_iter().filter(|name| call != ["top"] || !rates.contains(name)).collect();
            assert_eq!(without, empty, "{call:?}: {text}");
        }
    }
    let losses = ctl(&fixture, &["losses", "--output", "csv"]).await.succeeded();
    assert_eq!(losses, "worker,app,shuffle,partition,blocks,reason\r\n");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_commands_work_without_admin_listener() {
    let dir = tempfile::tempdir().unwrap();
    let text = ConfigLines::default().own_text(&[dir.path().join("data")]);
    let worker = uniffle_worker::server::Worker::start(&parse(&text)).await.unwrap();
    assert_eq!(worker.addresses().admin, None);
    let (http, coordinator) = (worker.addresses().http.to_string(), worker.addresses().grpc.to_string());
    let nobody = free_port().to_string();
    for whom in [["--worker", &http], ["--coordinator", &coordinator]] {
        let whom = [&["ctl", "--admin-port", &nobody][..], &whom].concat();
        for call in ["status", "apps", "disks", "losses", "cluster", "tags", "top"] {
            run(&[&whom[..], &[call]].concat()).await.succeeded();
        }
        let refused = run(&[&whom[..], &["purge", "x"]].concat()).await.failed(3);
        assert!(refused.contains("need [admin] port"), "{refused}");
    }
    assert_eq!(worker.stop().await, 0);
}

#[tokio::test]
async fn completions_and_manual_cover_every_command() {
    let (own, of_ctl) = (commands_in_help_of(&[]).await, commands_in_help_of(&["ctl"]).await);
    assert!(own.contains(&"ctl".to_owned()) && of_ctl.contains(&"drain".to_owned()), "{own:?} {of_ctl:?}");
    // The text around a command in the script of each shell.
    for (shell, before, after) in [
        ("bash", ",", ")\n"),
        ("zsh", "(", ")\n"),
        ("fish", " -a \"", "\""),
        ("elvish", " cand ", " '"),
        ("powershell", "::new('", "', "),
    ] {
        let text = run(&["completions", shell]).await.succeeded();
        for command in own.iter().chain(&of_ctl) {
            assert!(text.contains(&format!("{before}{command}{after}")), "{shell}: {command}");
        }
        assert!(text.contains("token-file"), "{shell}");
    }
    let page = run(&["man"]).await.succeeded();
    assert!(page.contains(".TH uniffle-worker 1"), "{page}");
    for command in &own {
        assert!(page.contains(&format!("uniffle\\-worker\\-{command}(1)")), "{command}: {page}");
    }
    let directory = tempfile::tempdir().unwrap();
    run(&["man", "--directory", directory.path().to_str().unwrap()]).await.succeeded();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let pages: BTreeSet<String> = std::fs::read_dir(directory.path()).unwrap().map(name).collect();
    let own = own.iter().map(|command| format!("uniffle-worker-{command}.1"));
    let of_ctl = of_ctl.iter().map(|command| format!("uniffle-worker-ctl-{command}.1"));
    assert_eq!(pages, own.chain(of_ctl).chain(["uniffle-worker.1".to_owned()]).collect());
}

/// Completes as bash does: with the function registered by `complete`.
#[tokio::test]
async fn bash_completes_commands_and_arguments() {
    if !available("bash", &["bash"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("uniffle-worker.bash");
    std::fs::write(&file, run(&["completions", "bash"]).await.succeeded()).unwrap();
    for (words, expected) in [
        (&["ctl", "dec"][..], &["decommission"][..]),
        (&["ctl", "d"], &["disks", "decommission", "drain"]),
        (&["ctl", "decommission", "--w"], &["--wait", "--within", "--worker"]),
        (&["ctl", "upgrade", "--w"], &["--wait", "--within", "--worker"]),
        (&["ctl", "status", "--output", ""], &["text", "json", "csv"]),
        (&["comp"], &["completions"]),
    ] {
        let script = "source \"$1\"; shift; COMP_WORDS=(uniffle-worker \"$@\"); COMP_CWORD=$#\n\
                      [[ $(complete -p uniffle-worker) =~ -F\\ ([^\\ ]+) ]] || exit 9\n\
                      \"${BASH_REMATCH[1]}\" uniffle-worker \"${!#}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"\n\
                      printf '%s\\n' \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", script, "bash"]).arg(&file).args(words).kill_on_drop(true);
        let response = printed(bash.output().await.unwrap());
        let (mut response, mut expected) = (response.lines().collect::<Vec<_>>(), expected.to_vec());
        response.sort_unstable();
        expected.sort_unstable();
        assert_eq!(response, expected, "{words:?}");
    }
}
