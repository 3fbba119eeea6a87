//! A worker as a process: started, told to stop or to be upgraded, and what follows.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::mpsc;

use crate::clock;
use crate::config::{Config, startup_banner};
use crate::memory::InMemory;
use crate::metrics::clamped;
use crate::runtime::Tasks;

use super::sockets::{Inherited, now_ms};
use super::stop::{Ending, LeftMemory};
use super::successor::{Rehearsed, Successor};
use super::upgrade::{Facts, Refusal, RefusedBy, UPGRADE_FROM};
use super::{Addresses, Environment, Worker, hung_threads, notify, reap};
use crate::tiers::LocalStore;
use uniffle_io::DiskLock;

/// What a successor gets at least to get ready beside this process, or else as long as a flush.
const READY_DEADLINE_MIN: Duration = Duration::from_secs(10);

/// What a running worker is told.
#[derive(Debug, Clone)]
pub enum Command {
    /// Flush, drain, end.
    Stop,
    /// The same, and leave the sockets to a successor, unless that cannot work: then nothing happens.
    Upgrade(Successor),
    /// Read the configuration again.
    Reload,
}

/// How a worker ended.
#[derive(Debug)]
pub enum Ended {
    /// It was stopped, or is decommissioned.
    Stopped {
        /// Whether acknowledged blocks are lost, since no tier took them in time.
        has_lost: bool,
    },
    /// It waits for its successor: [`Successor::exec`], or [`run_beside`](super::run_beside).
    Upgrade {
        /// Who.
        successor: Successor,
        /// Its sockets.
        sockets: Box<Inherited>,
        /// It has to run beside this process, and is to be ready within so long.
        beside: Option<Duration>,
    },
}

/// Runs a worker until `commands` ends it. Prints the banner, tells the service manager and writes the ready file
/// (`WORKER_READY_FILE`: one line of JSON with the bound ports, for the process that started the worker with port 0).
///
/// # Errors
/// See [`Worker::start`].
pub async fn run(
    config: &Config,
    environment: Environment,
    inherited: Inherited,
    commands: mpsc::Receiver<Command>,
) -> anyhow::Result<Ended> {
    // Around the worker: a start and a stop have deadlines and children, too.
    let process = Tasks::new();
    process.spawn("clock", until(process.cancelled(), clock::run()));
    process.spawn("reaper", until(process.cancelled(), reap::run()));
    let ended = run_worker(config, environment, inherited, commands).await;
    // What comes after has no task that ticks the clock.
    process.cancel();
    process.drained().await;
    ended
}

async fn until(stopped: impl Future<Output = ()>, work: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = stopped => {}
        () = work => {}
    }
}

async fn run_worker(
    config: &Config,
    environment: Environment,
    mut inherited: Inherited,
    mut commands: mpsc::Receiver<Command>,
) -> anyhow::Result<Ended> {
    let (gap_began_ms, is_returned) = (inherited.gap_began_ms, inherited.is_returned);
    // Held as long as this process lives, whatever worker runs in it.
    let (kept, keeper) = (std::mem::take(&mut inherited.kept), inherited.keeper.take());
    let forced_stop = environment.forced_stop.clone();
    let worker = Worker::start_in(environment, inherited, config).await?;
    forced_stop.watch(worker.service(), worker.memory());
    if is_returned {
        worker.note_refused_upgrade(RefusedBy::Exec);
    }
    tell_ready(config, &worker, gap_began_ms)?;
    if let Some(mut keeper) = keeper {
        // One that has ended is noticed as such.
        let _ = keeper.write_all(b"!");
    }
    loop {
        let told = match config.worker.decommission_shutdown {
            true => told_or_retired(&worker, &mut commands).await,
            false => commands.recv().await,
        };
        let successor = match told {
            Some(Command::Upgrade(successor)) => successor,
            Some(Command::Reload) => {
                // What is wrong has been logged.
                let _ = worker.reload("signal").await;
                continue;
            }
            Some(Command::Stop) | None => break,
        };
        match prepare(&worker, &successor, (config, !kept.is_empty()), &mut commands).await {
            Prepared::HandOver(plan) => return Ok(hand_over(worker, successor, plan, kept).await),
            Prepared::GoOn => {
                worker.go_on();
                notify::ready(&Inherited::default());
            }
            Prepared::Stop => break,
        }
    }
    notify::stopping(config.worker.flush_timeout + Duration::from_secs(65));
    let Ending { tasks_left, has_lost } = worker.stop_in_order().await;
    tracing::info!(tasks_left, has_lost, "stopped");
    Ok(Ended::Stopped { has_lost })
}

async fn hand_over(
    worker: Worker,
    successor: Successor,
    plan: Plan,
    mut kept: Vec<Box<dyn DiskLock>>,
) -> Ended {
    let store = worker.service().tiers().find::<LocalStore>();
    let deadline = worker.flush_timeout.max(READY_DEADLINE_MIN);
    let stopped = worker.hand_over(plan.memory).await;
    let (tasks_left, unflushed) = (stopped.tasks_left, stopped.unflushed.len());
    if tasks_left > 0 || unflushed > 0 {
        tracing::error!(
            tasks_left,
            unflushed,
            "connections or tasks did not end in time; the successor starts anyway"
        );
    }
    let until_exec = Some(stopped.memory).filter(|_| !plan.is_beside);
    let mut sockets = Inherited { until_exec, ..stopped.sockets };
    if plan.memory == LeftMemory::Empty {
        // What it makes anew has another lifetime, and the size that it is configured with.
        sockets.memory = None;
    }
    if let Some(store) = store {
        sockets.let_go = match plan.silent.is_empty() {
            true => store.leave_log().await,
            false => {
                let (let_go, locks) = store.let_go(plan.silent).await;
                kept.extend(locks);
                let_go
            }
        };
    }
    sockets.kept = kept;
    tracing::info!(flushed_bytes = stopped.flushed_bytes, "stopped; the successor takes over");
    Ended::Upgrade { successor, sockets: Box::new(sockets), beside: plan.is_beside.then_some(deadline) }
}

async fn told_or_retired(worker: &Worker, commands: &mut mpsc::Receiver<Command>) -> Option<Command> {
    tokio::select! {
        biased;
        told = commands.recv() => told,
        () = worker.service().status().decommissioned() => {
            tracing::info!("decommissioned; stopping");
            None
        }
    }
}

/// What comes of a request to upgrade.
enum Prepared {
    HandOver(Plan),
    GoOn,
    Stop,
}

/// How it is handed over.
struct Plan {
    /// Data directories that do not answer, which the successor does without.
    silent: Vec<PathBuf>,
    /// This process cannot become the successor.
    is_beside: bool,
    memory: LeftMemory,
}

/// Everything that can still be taken back.
async fn prepare(
    worker: &Worker,
    successor: &Successor,
    config: (&Config, bool),
    commands: &mut mpsc::Receiver<Command>,
) -> Prepared {
    let ready = async {
        notify::reloading();
        match get_ready(worker, successor, config).await {
            Ok(plan) => Prepared::HandOver(plan),
            Err(Refusal { by, why }) => {
                worker.note_refused_upgrade(by);
                tracing::error!(by = by.as_str(), "upgrade refused; continuing as before: {why}");
                Prepared::GoOn
            }
        }
    };
    tokio::pin!(ready);
    loop {
        tokio::select! {
            biased;
            prepared = &mut ready => return prepared,
            told = commands.recv() => match told {
                Some(Command::Upgrade(_)) => tracing::info!("an upgrade is already in progress"),
                Some(Command::Reload) => tracing::info!(
                    "an upgrade is in progress; the successor reads the configuration"
                ),
                Some(Command::Stop) | None => return Prepared::Stop,
            }
        }
    }
}

/// The successor proves that it can take over, while this worker serves as ever; then memory is emptied.
async fn get_ready(
    worker: &Worker,
    successor: &Successor,
    (config, holds_locks): (&Config, bool),
) -> Result<Plan, Refusal> {
    let disks: Vec<_> = worker.service().tiers().iter().flat_map(|tier| tier.state().disks).collect();
    let facts = Facts::of(config, (worker.addresses(), &worker.server_id()), &disks);
    if !facts.has_journal() {
        let why = format!(
            "store_type {} has neither local disks nor an object store to preserve registrations and \
             reports; decommission the worker, wait until its applications have ended, then stop and start \
             it",
            config.worker.store_type.as_str()
        );
        return Err(Refusal { by: RefusedBy::Tiers, why });
    }
    tracing::info!("upgrade: rehearsal of the successor started");
    let rehearsed = successor.rehearse((UPGRADE_FROM, facts.to_text())).await;
    let Rehearsed { silent, takes_memory } =
        rehearsed.map_err(|error| Refusal { by: RefusedBy::Rehearsal, why: format!("{error:#}") })?;
    let store = worker.service().tiers().find::<LocalStore>();
    let is_beside = holds_locks || store.as_ref().is_some_and(|store| store.holds_any(&silent));
    if !is_beside {
        threads_awake().await?;
    }
    // A file that the successor would not find is flushed.
    let is_passed_on = takes_memory && worker.memory().is_kept() && !worker.memory().backing_vanished();
    if is_passed_on && !is_beside {
        if !worker.prepare_to_pass_on().await {
            let why = "writes in progress did not finish in time".to_owned();
            return Err(Refusal { by: RefusedBy::Flush, why });
        }
        // A disk may have begun to hang under it.
        threads_awake().await?;
        tracing::info!("upgrade: rehearsal succeeded; handing over memory");
        return Ok(Plan { silent, is_beside, memory: LeftMemory::PassedOn });
    }
    tracing::info!(?silent, is_beside, "upgrade: rehearsal succeeded; flushing");
    if let Some(store) = store.filter(|_| is_beside) {
        store.avoid(&silent).await.map_err(|error| {
            let why = format!("cannot move the metadata log to a responsive data directory: {error}");
            Refusal { by: RefusedBy::Hang, why }
        })?;
    }
    // Deletions that are left are the successor's.
    let (emptied, ()) = tokio::join!(worker.prepare_to_hand_over(), worker.end_deletions());
    emptied.map_err(|left| Refusal { by: RefusedBy::Flush, why: left_in_memory(&left) })?;
    if !is_beside {
        // A disk may have begun to hang under the flush, which went to another then.
        threads_awake().await?;
    }
    Ok(Plan { silent, is_beside, memory: LeftMemory::Empty })
}

async fn threads_awake() -> Result<(), Refusal> {
    let refused = |threads| {
        let why = format!(
            "{threads} threads hang in the kernel, as with an unresponsive disk, and the successor would \
             wait for them"
        );
        Refusal { by: RefusedBy::Hang, why }
    };
    hung_threads::awake().await.map_err(refused)
}

fn left_in_memory(left: &[InMemory]) -> String {
    let sum = |of: fn(&InMemory) -> u64| left.iter().map(of).sum::<u64>();
    let (blocks, bytes) = (sum(|shuffle| shuffle.blocks), sum(|shuffle| shuffle.bytes));
    let largest = left.first().map(|shuffle| format!(", most of {}", shuffle.shuffle)).unwrap_or_default();
    format!(
        "memory was not flushed completely: {blocks} blocks of {bytes} bytes in {} shuffles are \
         left{largest}",
        left.len()
    )
}

fn tell_ready(config: &Config, worker: &Worker, gap_began_ms: Option<u64>) -> anyhow::Result<()> {
    let addresses = worker.addresses();
    tracing::info!(grpc = %addresses.grpc, http = %addresses.http, tcp = ?addresses.tcp, admin = ?addresses.admin, "listening");
    let gap_ms = gap_began_ms.map(|began| now_ms().saturating_sub(began));
    if let Some(gap_ms) = gap_ms {
        worker.upgrades.gap_ms.set(clamped(gap_ms));
        tracing::info!(gap_ms, "upgraded; no connection was accepted during the gap");
    }
    if let Some(path) = std::env::var_os("WORKER_READY_FILE") {
        write_ready_file(path.as_ref(), addresses, gap_ms).context("WORKER_READY_FILE")?;
    }
    if config.is_embedded() && gap_ms.is_none() {
        let quorum: Vec<_> = config.heartbeat.coordinators.iter().map(ToString::to_string).collect();
        let banner = startup_banner(
            worker.ip(),
            addresses.grpc,
            addresses.http,
            addresses.tcp.is_some(),
            config.worker.store_type,
            &quorum.join(","),
        );
        crate::telemetry::print(std::io::stdout(), &format!("{banner}\n"));
    }
    notify::ready(&worker.held);
    Ok(())
}

/// Whole or not at all: written beside and renamed, so that a reader never sees half a line.
fn write_ready_file(path: &Path, addresses: Addresses, upgrade_gap_ms: Option<u64>) -> std::io::Result<()> {
    let line = serde_json::json!({
        "grpc_port": addresses.grpc.port(),
        "http_port": addresses.http.port(),
        "urpc_port": addresses.tcp.map(|address| address.port()),
        "admin_port": addresses.admin.map(|address| address.port()),
        "pid": std::process::id(),
        "upgrade_gap_ms": upgrade_gap_ms,
    });
    let beside = path.with_extension("tmp");
    std::fs::write(&beside, format!("{line}\n"))?;
    std::fs::rename(beside, path)
}
