//! `uniffle-worker ctl upgrade` against three workers and their coordinators, and other commands
//! after an upgrade or the loss of a worker.

use std::time::Duration;

use serde_json::Value;

use super::ctl::{Outcome, commands_in_help_of, run};
use uniffle_testkit::ports::free_port;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Three workers, in the order of their ids. One of them has the coordinator.
struct Fleet {
    workers: Vec<WorkerProcess>,
    coordinator: String,
}

impl Fleet {
    fn start() -> Self {
        let setup = Setup { name: "fleet", capacity: "64M", ..Setup::default() };
        let first = WorkerProcess::start(&setup);
        let coordinator = first.quorum();
        let joined = Setup { quorum: Some(coordinator.clone()), ..setup };
        let mut workers = vec![first, WorkerProcess::start(&joined), WorkerProcess::start(&joined)];
        workers.sort_by_key(|worker| node(worker)["id"].as_str().unwrap().to_owned());
        let fleet = Self { workers, coordinator };
        let url = format!("http://127.0.0.1:{}", fleet.of_coordinator().ready().http_port);
        wait_until("all workers are registered", Duration::from_secs(30), || {
            let page = fleet.of_coordinator().page("/api/v1/cluster").unwrap();
            let known = fleet.ids().iter().filter(|id| page.contains(id.as_str())).count();
            if known == 3 { Ok(()) } else { Err(format!("{url}: {page}")) }
        });
        fleet
    }

    fn of_coordinator(&self) -> &WorkerProcess {
        self.workers
            .iter()
            .find(|worker| worker.quorum() == self.coordinator)
            .expect("no worker runs the coordinator")
    }

    fn ids(&self) -> Vec<String> {
        self.workers.iter().map(|worker| node(worker)["id"].as_str().unwrap().to_owned()).collect()
    }

    fn starts(&self) -> Vec<i64> {
        self.workers.iter().map(|worker| node(worker)["started_ms"].as_i64().unwrap()).collect()
    }

    /// Returns the plan of an upgrade of all workers.
    fn plan(&self) -> String {
        let line = |worker: &WorkerProcess| {
            let node = node(worker);
            let [id, version, commit] =
                ["id", "version", "commit"].map(|field| node[field].as_str().unwrap().to_owned());
            format!("{id}: not upgraded, runs {version} ({commit})\n")
        };
        self.workers.iter().map(line).collect()
    }

    async fn upgrade(&self, arguments: &[&str]) -> Outcome {
        let whole = ["ctl", "upgrade", "--coordinator", &self.coordinator, "--wait", "--within", "60"];
        run(&[&whole[..], arguments].concat()).await
    }
}

fn node(worker: &WorkerProcess) -> Value {
    let status: Value = serde_json::from_str(&worker.page("/api/v1/status").unwrap()).unwrap();
    status["node"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleet_upgrade_replaces_every_worker_in_order() {
    let fleet = Fleet::start();
    let (ids, before) = (fleet.ids(), fleet.starts());
    assert_eq!(fleet.upgrade(&["--dry-run"]).await.succeeded(), fleet.plan());
    assert_eq!(fleet.starts(), before);

    let rows: Value = serde_json::from_str(&fleet.upgrade(&["--output", "json"]).await.succeeded()).unwrap();
    let state = |row: &Value| (row["worker"].as_str().map(str::to_owned), row["state"].clone());
    let states: Vec<_> = rows.as_array().unwrap().iter().map(state).collect();
    assert_eq!(states, ids.iter().map(|id| (Some(id.clone()), "upgraded".into())).collect::<Vec<_>>());
    let after = fleet.starts();
    assert!(
        after.windows(2).all(|pair| pair[0] < pair[1]),
        "workers were upgraded at the same time: {after:?}"
    );
    assert!(before.iter().all(|start| *start < after[0]), "{before:?} {after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleet_upgrade_stops_at_the_first_refusal() {
    let fleet = Fleet::start();
    let (ids, before) = (fleet.ids(), fleet.starts());
    let config = fleet.workers[1].config();
    fleet.workers[1].write_config("grcp_port = 1\n");
    let outcome = fleet.upgrade(&[]).await;
    let stdout = outcome.stdout.clone();
    let stderr = outcome.failed(1);
    assert!(stderr.contains(&format!("{}: refused the upgrade", ids[1])), "{stderr}");
    for part in [
        format!("{}: restarted in", ids[0]),
        format!("{}: failed: refused the upgrade", ids[1]),
        format!("{}: not upgraded", ids[2]),
    ] {
        assert!(stdout.contains(&part), "{part} is missing: {stdout}");
    }
    let after = fleet.starts();
    assert!(after[0] > before[0] && after[1..] == before[1..], "{before:?} {after:?}");

    // The same by a command that does not reach the worker.
    fleet.workers[1].write_config(&config);
    let failing = fleet.upgrade(&["--command", "echo {id} away >&2; exit 7"]).await;
    let stderr = failing.failed(1);
    assert!(stderr.contains("exit status: 7") && stderr.contains(&format!("{} away", ids[0])), "{stderr}");
    assert_eq!(fleet.starts(), after);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleet_upgrade_of_the_coordinator_waits_for_all_workers() {
    let mut fleet = Fleet::start();
    let coordinator = node(fleet.of_coordinator())["id"].as_str().unwrap().to_owned();
    fleet.upgrade(&["--only", &coordinator]).await.succeeded();
    let plan = fleet.plan();
    assert_eq!(fleet.upgrade(&["--dry-run"]).await.succeeded(), plan);

    // A worker that does not answer is in the plan too, which then fails.
    let other = if fleet.workers[0].quorum() == fleet.coordinator { 1 } else { 0 };
    fleet.workers[other].kill();
    let outcome = fleet.upgrade(&["--dry-run"]).await;
    let listed = outcome.stdout.clone();
    let stderr = outcome.failed(3);
    assert!(stderr.contains("an upgrade would stop"), "{stderr}");
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (listed, plan) = (lines(&listed), lines(&plan));
    assert_eq!(listed.iter().filter(|line| plan.contains(line)).count(), 2, "{listed:?}");
}

/// Three workers that report to two coordinators among them.
fn two_coordinators() -> (Vec<WorkerProcess>, [String; 2]) {
    let ports = [free_port(), free_port()];
    let coordinators = ports.map(|port| format!("127.0.0.1:{port}"));
    let setup = Setup {
        name: "fleet",
        capacity: "64M",
        quorum: Some(coordinators.join(",")),
        made_tables: "[embedded_coordinator]\nenable = true\n".to_owned(),
        ..Setup::default()
    };
    let start = |grpc_port| WorkerProcess::start(&Setup { grpc_port, ..setup.clone() });
    let workers = vec![start(Some(ports[0])), start(Some(ports[1])), start(None)];
    for coordinator in &workers[..2] {
        wait_until("all workers are registered", Duration::from_secs(30), || {
            let page: Value = serde_json::from_str(&coordinator.page("/api/v1/cluster").unwrap()).unwrap();
            let nodes = page["nodes"].as_array().map_or(0, Vec::len);
            if nodes == 3 { Ok(()) } else { Err(page.to_string()) }
        });
    }
    (workers, coordinators)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_after_a_coordinator_upgrade_cover_all_workers() {
    let (mut workers, coordinators) = two_coordinators();
    let both = coordinators.join(",");
    let ids: Vec<_> = workers.iter().map(|worker| node(worker)["id"].as_str().unwrap().to_owned()).collect();
    let commands = [&["status", "--ready"][..], &["upgrade", "--dry-run"], &["disks"], &["top"], &["losses"]];
    for whom in [&both, &coordinators[0]] {
        for command in commands {
            workers[0].begin_upgrade();
            workers[0].finish_upgrade();
            let outcome = run(&[&["ctl", "--coordinator", whom], command].concat()).await;
            let text = format!("{command:?}: {}{}", outcome.stdout, outcome.stderr);
            assert_eq!(outcome.code, 0, "{text}");
            assert!(ids.iter().all(|id| outcome.stdout.contains(id.as_str())), "{text}");
        }
    }
    // The other coordinator lists all workers in any case.
    let rows = |outcome: Outcome| outcome.stdout.matches(": restarted in").count();
    workers[0].begin_upgrade();
    workers[0].finish_upgrade();
    assert_eq!(rows(run(&["ctl", "upgrade", "--coordinator", &both, "--within", "60"]).await), 3);
}

/// Commands of `ctl` that change something, or read from a single worker.
const NOT_READING: [&str; 8] =
    ["decommission", "drain", "forget", "orphans", "profile", "purge", "reload", "upgrade"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_worker_fails_reading_commands() {
    let table = "[embedded_coordinator]\nenable = true\nnode_timeout_sec = 2\n";
    let setup = Setup { name: "fleet", capacity: "64M", made_tables: table.to_owned(), ..Setup::default() };
    let first = WorkerProcess::start(&setup);
    let coordinator = first.quorum();
    let mut second = WorkerProcess::start(&Setup { quorum: Some(coordinator.clone()), ..setup });
    let id = node(&second)["id"].as_str().unwrap().to_owned();
    let cluster = || first.page("/api/v1/cluster").unwrap();
    let until = |what: &str, holds: &dyn Fn(&str) -> bool| {
        wait_until(what, Duration::from_secs(30), || {
            Some(()).filter(|()| holds(&cluster())).ok_or_else(cluster)
        });
    };
    until("the worker is registered", &|page| page.contains(&id));
    second.kill();
    until("the worker is lost", &|page| page.contains(&format!("\"lost\":[{id:?}]")));
    let mut reading = commands_in_help_of(&["ctl"]).await;
    reading.retain(|command| !NOT_READING.contains(&command.as_str()));
    assert!(reading.len() > 5, "{reading:?}");
    for command in &reading {
        let argument = if command == "app" { &["app-1"][..] } else { &[] };
        let outcome = run(&[&["ctl", "--coordinator", &coordinator, command], argument].concat()).await;
        // `top` shows the state in the worker's row, without a reason.
        let is_reported = match command.as_str() {
            "top" => outcome.stdout.lines().any(|line| line.starts_with(&id) && line.contains(" lost ")),
            _ => outcome.stderr.contains(&format!("{id}: lost: ")),
        };
        assert!(is_reported, "{command}: {}{}", outcome.stdout, outcome.stderr);
        outcome.failed(3);
    }
    let outcome = run(&["ctl", "status", "--coordinator", &coordinator, "--output", "json"]).await;
    let rows: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(rows.as_array().unwrap().iter().filter(|row| row["url"].is_string()).count(), 1, "{rows}");
    let plan = run(&["ctl", "upgrade", "--coordinator", &coordinator, "--dry-run"]).await;
    assert!(plan.stdout.contains(&format!("{id}: lost: its coordinator")), "{}", plan.stdout);
    let outcome = run(&["ctl", "losses", "--coordinator", &coordinator, "--only", &id]).await;
    assert!(outcome.failed(3).contains(&format!("{id}: lost: ")));
}
