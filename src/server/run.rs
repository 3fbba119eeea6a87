//! Runs a worker as a process: start, commands, stop and upgrade.
//!
//! An upgrade first prepares in steps that can be undone: the rehearsal, checks for hung threads
//! and detached disks, and the flush. Only then the worker leaves its sockets to the successor. If
//! a step fails, the worker continues to serve. `stop` ends the worker, and `successor` executes
//! the next program.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::mpsc;

use crate::clock;
use crate::config::{Config, startup_banner};
use crate::memory::InMemory;
use crate::metrics::clamped;
use crate::runtime::Tasks;

use super::sockets::{Inherited, now_ms};
use super::stop::{Ending, MemoryTreatment};
use super::successor::{Rehearsed, Successor};
use super::upgrade::{Facts, Refusal, RefusedBy, UPGRADE_FROM};
use super::{Addresses, Environment, Worker, hung_threads, notify, reap};
use crate::store::disk::directories::claimable::{DETACHED_REMEDY, HUNG_REMEDY};
use crate::store::{DiskCondition, DiskInfo, LocalStore};

/// A command to a running worker.
#[derive(Debug, Clone)]
pub enum Command {
    /// Flush, drain and end.
    Stop,
    /// Stop and leave the sockets to a successor. If an upgrade is not possible, nothing happens.
    Upgrade(Successor),
    /// Reload the configuration.
    Reload,
}

/// Outcome of running a worker.
#[derive(Debug)]
pub enum Ended {
    /// It was stopped, or was decommissioned.
    StopReport {
        /// Acknowledged blocks are lost, since no tier took them in time.
        has_lost: bool,
    },
    /// It waits for its successor: [`Successor::exec`].
    Upgrade {
        /// The next program.
        successor: Successor,
        /// Sockets of this process, for the successor.
        sockets: Box<Inherited>,
    },
}

/// Runs a worker until `commands` ends it. Prints the banner, notifies the service manager and
/// writes the ready file.
///
/// The ready file (`WORKER_READY_FILE`) is one line of JSON with the bound ports, for a parent that
/// starts the worker with port 0.
///
/// # Errors
/// See [`Worker::start`].
pub async fn run(
    config: &Config,
    environment: Environment,
    inherited: Inherited,
    commands: mpsc::Receiver<Command>,
) -> anyhow::Result<Ended> {
    // Outside the worker: its start and stop also need deadlines and child processes.
    let process = Tasks::new();
    process.spawn("clock", until(process.cancelled(), clock::run()));
    process.spawn("reaper", until(process.cancelled(), reap::run()));
    let ended = run_worker(config, environment, inherited, commands).await;
    // Later code has no task that ticks the clock.
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
    inherited: Inherited,
    mut commands: mpsc::Receiver<Command>,
) -> anyhow::Result<Ended> {
    let (gap_began_ms, is_returned) = (inherited.gap_began_ms, inherited.is_returned);
    let predecessor = inherited.predecessor.clone();
    let forced_stop = environment.forced_stop.clone();
    let worker = Worker::start_in(environment, inherited, config).await?;
    forced_stop.watch(worker.service(), worker.memory());
    if is_returned {
        worker.note_refused_upgrade(RefusedBy::Exec);
    }
    tell_ready(config, &worker, gap_began_ms, predecessor)?;
    loop {
        let told = match config.worker.decommission_shutdown {
            true => told_or_retired(&worker, &mut commands).await,
            false => commands.recv().await,
        };
        let successor = match told {
            Some(Command::Upgrade(successor)) => successor,
            Some(Command::Reload) => {
                // Errors have been logged.
                let _ = worker.reload("signal").await;
                continue;
            }
            Some(Command::Stop) | None => break,
        };
        match prepare(&worker, &successor, config, &mut commands).await {
            Prepared::HandOver(memory) => return Ok(hand_over(worker, successor, memory).await),
            Prepared::Resume => {
                worker.resume();
                notify::ready(&Inherited::default());
            }
            Prepared::Stop => break,
        }
    }
    notify::stopping(config.worker.flush_timeout + Duration::from_secs(65));
    let Ending { tasks_left, has_lost } = worker.stop_in_order().await;
    tracing::info!(tasks_left, has_lost, "stopped");
    Ok(Ended::StopReport { has_lost })
}

async fn hand_over(worker: Worker, successor: Successor, memory: MemoryTreatment) -> Ended {
    let (build, store) = (worker.build, worker.service().tiers().find::<LocalStore>());
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
    if memory == MemoryTreatment::Empty {
        // The successor creates a new region, with another lifetime and its configured size.
        sockets.memory = None;
    }
    if let Some(store) = store {
        sockets.hand_off = store.release_log().await;
    }
    tracing::info!(flushed_bytes = stopped.flushed_bytes, "stopped; the successor takes over");
    Ended::Upgrade { successor, sockets: Box::new(sockets) }
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

/// Outcome of an upgrade request.
enum Prepared {
    HandOver(MemoryTreatment),
    Resume,
    Stop,
}

/// Performs all steps of an upgrade that can be undone.
async fn prepare(
    worker: &Worker,
    successor: &Successor,
    config: &Config,
    commands: &mut mpsc::Receiver<Command>,
) -> Prepared {
    let ready = async {
        notify::reloading();
        match get_ready(worker, successor, config).await {
            Ok(memory) => Prepared::HandOver(memory),
            Err(Refusal { by, why }) => {
                worker.note_refused_upgrade(by);
                tracing::error!(by = by.as_str(), "upgrade refused; continuing as before: {why}");
                Prepared::Resume
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

/// Has the successor prove that it can take over, while this worker serves as before. Then empties
/// memory, or prepares to hand it over. Nothing waits for a disk that hangs: it refuses the
/// upgrade.
async fn get_ready(
    worker: &Worker,
    successor: &Successor,
    config: &Config,
) -> Result<MemoryTreatment, Refusal> {
    let facts = Facts::of(config, worker.addresses(), &worker.server_id(), &disks_of(worker));
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
    let rehearsed = async {
        let rehearsed = successor.rehearse((UPGRADE_FROM, facts.to_text())).await;
        rehearsed.map_err(|error| Refusal { by: RefusedBy::Rehearsal, why: format!("{error:#}") })
    };
    let ((), Rehearsed { takes_memory, program }) =
        tokio::try_join!(require_no_hung_thread(worker), rehearsed)?;
    if let Some(doubt) = worker.service().tiers().iter().find_map(|tier| tier.successor_doubts()) {
        let why = format!("the successor would refuse results that this worker serves: {doubt}");
        return Err(Refusal { by: RefusedBy::Tiers, why });
    }
    let (from, to) = (worker.build, program.unwrap_or_else(|| "unknown".to_owned()));
    // Memory whose file the successor would not find is flushed.
    let is_passed_on = takes_memory && worker.memory().is_kept() && !worker.memory().backing_vanished();
    if is_passed_on {
        if !worker.prepare_to_pass_on().await {
            let why = "writes in progress did not finish in time".to_owned();
            return Err(Refusal { by: RefusedBy::Flush, why });
        }
    } else {
        tracing::info!(%from, to, "upgrade: rehearsal succeeded; flushing");
        // Unfinished deletions are left to the successor.
        let (emptied, ()) = tokio::join!(worker.prepare_to_hand_over(), worker.end_deletions());
        emptied.map_err(|left| Refusal { by: RefusedBy::Flush, why: left_in_memory(&left) })?;
    }
    // A disk may have started to hang, or may have been unmounted, in the meantime.
    require_no_hung_thread(worker).await?;
    require_attached(worker).await?;
    if is_passed_on {
        tracing::info!(%from, to, "upgrade: rehearsal succeeded; handing over memory");
        return Ok(MemoryTreatment::PassedOn);
    }
    Ok(MemoryTreatment::Empty)
}

fn disks_of(worker: &Worker) -> Vec<DiskInfo> {
    worker.service().tiers().iter().flat_map(|tier| tier.state().disks).collect()
}

/// Refuses an upgrade while a thread hangs in the kernel: `exec` would wait for it, and the worker
/// would not serve meanwhile.
async fn require_no_hung_thread(worker: &Worker) -> Result<(), Refusal> {
    let refused = |threads| Refusal { by: RefusedBy::Hang, why: hung(threads, &disks_of(worker)) };
    hung_threads::awake().await.map_err(refused)
}

/// Refuses an upgrade while a path leads to another directory than the one in use: the successor
/// would start without its metadata.
async fn require_attached(worker: &Worker) -> Result<(), Refusal> {
    let Some(store) = worker.service().tiers().find::<LocalStore>() else { return Ok(()) };
    let detached = store.detached().await;
    if detached.is_empty() {
        return Ok(());
    }
    let why = format!(
        "localfile_store.data_paths: {}: not the directory of the running worker; {DETACHED_REMEDY}",
        detached.join(", ")
    );
    Err(Refusal { by: RefusedBy::Rehearsal, why })
}

/// Describes the hang and its remedy.
fn hung(threads: usize, disks: &[DiskInfo]) -> String {
    let paths = |of: fn(&DiskInfo) -> bool| {
        let paths = disks.iter().filter(|disk| of(disk)).map(|disk| disk.path.display().to_string());
        paths.collect::<Vec<_>>().join(", ")
    };
    let (hung, busy) =
        (paths(|disk| disk.condition == DiskCondition::Hung), paths(|disk| disk.in_flight_bytes > 0));
    let what = match (hung.as_str(), busy.as_str()) {
        ("", "") => "no data directory is known to hang".to_owned(),
        ("", busy) => format!("data directory {busy} may hang"),
        (hung, _) => format!("data directory {hung} hangs"),
    };
    format!(
        "{what}; {threads} threads hang in the kernel and prevent the execution of another program: {HUNG_REMEDY}"
    )
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

/// Reports that the worker serves. `gap_began_ms` is set if it follows another worker in this
/// process, and `predecessor` if that was another program.
fn tell_ready(
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
                tracing::info!(from, to = %worker.build, gap_ms, "upgraded; no connection was accepted during the gap");
            }
            None => tracing::info!(gap_ms, "accepting connections again after the failed upgrade"),
        }
    }
    if let Some(path) = std::env::var_os("WORKER_READY_FILE") {
        write_ready_file(path.as_ref(), addresses, gap_ms).context("WORKER_READY_FILE")?;
    }
    if config.is_embedded() && gap_ms.is_none() {
        let options = worker.spark_options(config);
        let banner = startup_banner(worker.ip(), addresses.grpc, addresses.http, &options);
        crate::telemetry::print(std::io::stdout(), &format!("{banner}\n"));
    }
    notify::ready(&worker.held);
    Ok(())
}

/// Writes the ready file under a temporary name and renames it, so that a reader never sees a
/// partial line.
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use uniffle_io::{Media, Mount};
    use uuid::Uuid;

    use super::*;

    fn disk(path: &str, condition: DiskCondition, in_flight_bytes: u64) -> DiskInfo {
        DiskInfo {
            path: path.into(),
            uuid: Uuid::nil(),
            condition,
            fault: None,
            failures: 0,
            faults: 0,
            mount: Mount { point: PathBuf::from(path), media: Media::Unknown },
            total_bytes: 0,
            free_bytes: 0,
            file_system: 0,
            used_bytes: 0,
            in_flight_bytes,
        }
    }

    #[test]
    fn refusal_names_the_disk_that_hangs_and_the_remedy() {
        let idle = || disk("/data1", DiskCondition::Healthy, 0);
        let told = hung(2, &[idle(), disk("/data2", DiskCondition::Hung, 0)]);
        assert!(told.starts_with("data directory /data2 hangs; 2 threads hang"), "{told}");
        assert!(told.ends_with(HUNG_REMEDY), "{told}");
        let told = hung(1, &[idle(), disk("/data2", DiskCondition::Healthy, 9)]);
        assert!(told.starts_with("data directory /data2 may hang"), "{told}");
        let told = hung(1, &[idle()]);
        assert!(told.starts_with("no data directory is known to hang"), "{told}");
    }
}
