//! Runs a worker as a process: start, commands, stop and upgrade.
//!
//! `upgrade::preparation` makes sure that a successor can take over before anything is given up,
//! and `upgrade::successor` executes it. `stop` ends the worker.

pub(super) mod notify;
pub(super) mod signals;

use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::mpsc;

use crate::clock;
use crate::config::{Config, startup_banner};
use crate::metrics::clamped;
use crate::runtime::Tasks;
use crate::store::LocalStore;

use self::signals::reap_children;
use super::sockets::{Inherited, now_ms};
use super::start::Environment;
use super::stop::{MemoryTreatment, StopOutcome};
use super::upgrade::RefusedBy;
use super::upgrade::preparation::{Command, Preparation, prepare};
use super::upgrade::successor::Successor;
use super::{Worker, until};

/// Outcome of running a worker.
#[derive(Debug)]
pub enum RunOutcome {
    /// It was stopped, or was decommissioned.
    Stop {
        /// Acknowledged blocks are lost, since no tier took them in time.
        has_lost: bool,
    },
    /// It waits for its successor: [`Successor::exec`].
    Upgrade {
        /// The next program.
        successor: Successor,
        /// Sockets of this process, for the successor.
        sockets: Box<Inherited>,
        /// True if the successor handles signals that are pending at `exec`.
        takes_signals: bool,
    },
}

/// Runs a worker until a command ends it, or decommissioning if so configured. Notifies the service
/// manager and writes the ready file. With an embedded coordinator, prints the banner.
///
/// The ready file (`WORKER_READY_FILE`) is one line of JSON with the bound ports, for a parent that
/// starts the worker with port 0.
///
/// # Errors
/// See [`Worker::start`]. The ready file cannot be written.
pub async fn run(
    config: &Config,
    environment: Environment,
    inherited: Inherited,
    commands: mpsc::Receiver<Command>,
) -> anyhow::Result<RunOutcome> {
    // Outside the worker: its start and stop also need deadlines and child processes.
    let process = Tasks::new();
    process.spawn("clock", until(process.cancelled(), clock::run()));
    process.spawn("reaper", until(process.cancelled(), reap_children()));
    let outcome = run_worker(config, environment, inherited, commands).await;
    // Later code has no task that ticks the clock.
    process.cancel();
    process.drained().await;
    outcome
}

async fn run_worker(
    config: &Config,
    environment: Environment,
    inherited: Inherited,
    mut commands: mpsc::Receiver<Command>,
) -> anyhow::Result<RunOutcome> {
    let (gap_began_ms, is_returned) = (inherited.gap_began_ms, inherited.is_returned);
    let predecessor = inherited.predecessor.clone();
    let forced_stop = environment.forced_stop.clone();
    let worker = Worker::start_in(environment, inherited, config).await?;
    forced_stop.watch(worker.service(), worker.memory());
    if is_returned {
        worker.note_refused_upgrade(RefusedBy::Exec);
    }
    report_ready(config, &worker, gap_began_ms, predecessor)?;
    loop {
        let command = match config.worker.decommission_shutdown {
            true => next_command_or_stop(&worker, &mut commands).await,
            false => commands.recv().await,
        };
        let successor = match command {
            Some(Command::Upgrade(successor)) => successor,
            Some(Command::Reload) => {
                // Errors have been logged.
                let _ = worker.reload("signal").await;
                continue;
            }
            Some(Command::Stop) | None => break,
        };
        match prepare(&worker, &successor, config, &mut commands).await {
            Preparation::HandOver { memory, takes_signals } => {
                let sockets = Box::new(hand_over(worker, memory).await);
                return Ok(RunOutcome::Upgrade { successor, sockets, takes_signals });
            }
            Preparation::Resume => {
                worker.resume();
                notify::ready(&Inherited::default());
            }
            Preparation::Stop => break,
        }
    }
    notify::stopping(config.worker.flush_timeout + Duration::from_secs(65));
    let StopOutcome { tasks_left, has_lost } = worker.stop_in_order().await;
    tracing::info!(tasks_left, has_lost, "stopped");
    Ok(RunOutcome::Stop { has_lost })
}

/// Ends the worker and returns its sockets for the successor.
async fn hand_over(worker: Worker, memory: MemoryTreatment) -> Inherited {
    let (build, store) = (worker.identity.build, worker.service().tiers().find::<LocalStore>());
    let stopped = worker.hand_over(memory).await;
    let (tasks_left, unflushed) = (stopped.tasks_left, stopped.unflushed.len());
    if tasks_left > 0 || unflushed > 0 {
        tracing::error!(
            tasks_left,
            unflushed,
            "connections or tasks did not end in time; the successor starts anyway"
        );
    }
    let predecessor = Some(build.to_string());
    let mut sockets = Inherited { until_exec: Some(stopped.memory), predecessor, ..stopped.sockets };
    if memory == MemoryTreatment::Flush {
        // The successor creates a new region, with another lifetime and its configured size.
        sockets.memory = None;
    }
    if let Some(store) = store {
        sockets.hand_off = store.release_log().await;
    }
    tracing::info!(flushed_bytes = stopped.flushed_bytes, "stopped; the successor takes over");
    sockets
}

async fn next_command_or_stop(worker: &Worker, commands: &mut mpsc::Receiver<Command>) -> Option<Command> {
    tokio::select! {
        biased;
        command = commands.recv() => command,
        () = worker.service().status().decommissioned() => {
            tracing::info!("decommissioned; stopping");
            None
        }
    }
}

/// Reports that the worker serves. `gap_began_ms` is set if it follows another worker in this
/// process, and `predecessor` if that was another program.
fn report_ready(
    config: &Config,
    worker: &Worker,
    gap_began_ms: Option<u64>,
    predecessor: Option<String>,
) -> anyhow::Result<()> {
    let addresses = worker.addresses();
    tracing::info!(
        grpc = %addresses.grpc,
        http = %addresses.http,
        tcp = addresses.tcp.map(tracing::field::display),
        admin = addresses.admin.map(tracing::field::display),
        "listening"
    );
    let gap_ms = gap_began_ms.map(|began| now_ms().saturating_sub(began));
    if let Some(gap_ms) = gap_ms {
        worker.upgrades.gap_ms.set(clamped(gap_ms));
        match predecessor {
            Some(from) => {
                tracing::info!(from, to = %worker.identity.build, gap_ms, "upgraded; no connection was accepted during the gap");
            }
            None => tracing::info!(gap_ms, "accepting connections again after the failed upgrade"),
        }
    }
    if let Some(path) = std::env::var_os("WORKER_READY_FILE") {
        notify::write_ready_file(path.as_ref(), addresses, gap_ms).context("WORKER_READY_FILE")?;
    }
    if config.is_embedded() && gap_ms.is_none() {
        let options = worker.spark_options(config);
        let banner = startup_banner(worker.ip(), addresses.grpc, addresses.http, &options);
        crate::telemetry::print(std::io::stdout(), &format!("{banner}\n"));
    }
    notify::ready(&worker.handover.held);
    Ok(())
}
