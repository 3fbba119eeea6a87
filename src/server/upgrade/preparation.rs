//! Prepares an upgrade in steps that can be undone, while the worker serves as before.
//!
//! The steps are the rehearsal of the successor, checks for hung threads and detached disks, and a
//! flush, or a pause of writes if the successor takes over the memory contents. Only then does the
//! worker hand its sockets to the successor. If a step fails, the worker continues to serve.
//!
//! `exec` first waits for every other thread of the process. A thread that hangs in the kernel, for
//! example on a disk that does not answer, does not end even on SIGKILL. An upgrade with such a
//! thread is refused.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::clock::sleep;
use crate::config::Config;
use crate::memory::InMemory;
use crate::server::Worker;
use crate::server::process::notify;
use crate::server::stop::MemoryTreatment;
use crate::store::disk::directories::claimable::{DETACHED_REMEDY, HUNG_REMEDY};
use crate::store::{DiskCondition, DiskInfo, LocalStore};

use super::successor::{RehearsalReport, Successor};
use super::{Facts, RefusedBy, UPGRADE_FROM, UpgradeRefusal};

/// A call of this duration is considered hung. Slow disks answer within seconds.
const HANGS_AFTER: Duration = Duration::from_secs(10);
/// Poll interval of the threads' states.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A command to a running worker.
#[derive(Debug, Clone)]
pub enum Command {
    /// Flush, drain and end.
    Stop,
    /// Stop and leave the sockets to a successor. If that is not possible, continue to serve.
    Upgrade(Successor),
    /// Reload the configuration.
    Reload,
}

/// Outcome of an upgrade request.
#[derive(Debug, Clone, Copy)]
pub(in crate::server) enum Preparation {
    HandOver {
        memory: MemoryTreatment,
        /// See [`RehearsalReport::takes_signals`].
        takes_signals: bool,
    },
    Resume,
    Stop,
}

/// Performs all steps of an upgrade that can be undone.
pub(in crate::server) async fn prepare(
    worker: &Worker,
    successor: &Successor,
    config: &Config,
    commands: &mut mpsc::Receiver<Command>,
) -> Preparation {
    let ready = async {
        notify::reloading();
        match run_steps(worker, successor, config).await {
            Ok((memory, takes_signals)) => Preparation::HandOver { memory, takes_signals },
            Err(UpgradeRefusal { by, why }) => {
                worker.note_refused_upgrade(by);
                tracing::error!(by = by.as_str(), "upgrade refused; continuing as before: {why}");
                Preparation::Resume
            }
        }
    };
    tokio::pin!(ready);
    loop {
        tokio::select! {
            biased;
            preparation = &mut ready => return preparation,
            command = commands.recv() => match command {
                Some(Command::Upgrade(_)) => tracing::info!("an upgrade is already in progress"),
                Some(Command::Reload) => tracing::info!(
                    "an upgrade is in progress; the successor reads the configuration"
                ),
                Some(Command::Stop) | None => return Preparation::Stop,
            }
        }
    }
}

/// Runs the rehearsal of the successor while this worker serves as before. Then empties memory, or
/// prepares its hand-over. A hung disk is not waited for: the upgrade is refused. Also returns
/// whether the successor handles pending signals.
async fn run_steps(
    worker: &Worker,
    successor: &Successor,
    config: &Config,
) -> Result<(MemoryTreatment, bool), UpgradeRefusal> {
    let facts = Facts::of(config, worker.addresses(), &worker.identity.server_id(), &disks_of(worker));
    if !facts.has_journal() {
        let why = format!(
            "store_type {} has neither local disks nor an object store to preserve registrations and \
             reports; decommission the worker, wait until its applications have ended, then stop and start \
             it",
            config.worker.store_type.as_str()
        );
        return Err(UpgradeRefusal { by: RefusedBy::Tiers, why });
    }
    tracing::info!("upgrade: rehearsal of the successor started");
    let rehearsed = async {
        let rehearsed = successor.rehearse(UPGRADE_FROM, facts.to_text()).await;
        rehearsed.map_err(|error| UpgradeRefusal { by: RefusedBy::Rehearsal, why: format!("{error:#}") })
    };
    let ((), RehearsalReport { takes_memory, takes_signals, program }) =
        tokio::try_join!(require_no_hung_thread(worker), rehearsed)?;
    if let Some(doubt) = worker.service().tiers().metadata().and_then(|tier| tier.successor_doubts()) {
        let why = format!("the successor would refuse results that this worker serves: {doubt}");
        return Err(UpgradeRefusal { by: RefusedBy::Tiers, why });
    }
    let (from, to) = (worker.identity.build, program.unwrap_or_else(|| "unknown".to_owned()));
    // Memory whose file the successor would not find is flushed.
    let hands_memory_over =
        takes_memory && worker.memory().is_transferable() && !worker.memory().backing_vanished();
    if hands_memory_over {
        if !worker.pause_for_successor().await {
            let why = "writes in progress did not finish in time".to_owned();
            return Err(UpgradeRefusal { by: RefusedBy::Flush, why });
        }
    } else {
        tracing::info!(%from, to, "upgrade: rehearsal succeeded; flushing");
        // Unfinished deletions are left to the successor.
        let (emptied, ()) = tokio::join!(worker.flush_for_successor(), worker.end_deletions());
        emptied
            .map_err(|remaining| UpgradeRefusal { by: RefusedBy::Flush, why: left_in_memory(&remaining) })?;
    }
    // A disk may have started to hang, or may have been unmounted, in the meantime.
    require_no_hung_thread(worker).await?;
    require_attached(worker).await?;
    if hands_memory_over {
        tracing::info!(%from, to, "upgrade: rehearsal succeeded; handing over memory");
        return Ok((MemoryTreatment::HandOver, takes_signals));
    }
    Ok((MemoryTreatment::Flush, takes_signals))
}

fn disks_of(worker: &Worker) -> Vec<DiskInfo> {
    worker.service().tiers().iter().flat_map(|tier| tier.state().disks).collect()
}

/// Refuses an upgrade while a thread hangs in the kernel: `exec` would wait for it, and the worker
/// would not serve meanwhile.
async fn require_no_hung_thread(worker: &Worker) -> Result<(), UpgradeRefusal> {
    let refused = |threads| UpgradeRefusal { by: RefusedBy::Hang, why: hung(threads, &disks_of(worker)) };
    threads_respond().await.map_err(refused)
}

/// Refuses an upgrade while a path leads to another directory than the one in use: the successor
/// would start without its metadata.
async fn require_attached(worker: &Worker) -> Result<(), UpgradeRefusal> {
    let Some(store) = worker.service().tiers().find::<LocalStore>() else { return Ok(()) };
    let detached = store.detached().await;
    if detached.is_empty() {
        return Ok(());
    }
    let why = format!(
        "localfile_store.data_paths: {}: not the directory of the running worker; {DETACHED_REMEDY}",
        detached.join(", ")
    );
    Err(UpgradeRefusal { by: RefusedBy::Rehearsal, why })
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

fn left_in_memory(remaining: &[InMemory]) -> String {
    let sum = |of: fn(&InMemory) -> u64| remaining.iter().map(of).sum::<u64>();
    let (blocks, bytes) = (sum(|shuffle| shuffle.blocks), sum(|shuffle| shuffle.bytes));
    let largest =
        remaining.first().map(|shuffle| format!(", most of {}", shuffle.shuffle)).unwrap_or_default();
    format!(
        "memory was not flushed completely: {blocks} blocks of {bytes} bytes in {} shuffles are \
         left{largest}",
        remaining.len()
    )
}

/// Waits until every thread has left the uninterruptible call that it is in now.
///
/// # Errors
/// The number of threads still in their calls after [`HANGS_AFTER`].
async fn threads_respond() -> Result<(), usize> {
    let mut asleep = sleeping(Path::new("/proc/self/task"));
    for _ in 0..HANGS_AFTER.as_millis() / POLL_INTERVAL.as_millis() {
        if asleep.is_empty() {
            return Ok(());
        }
        sleep(POLL_INTERVAL).await;
        let now = sleeping(Path::new("/proc/self/task"));
        asleep.retain(|thread, call| now.get(thread) == Some(call));
    }
    if asleep.is_empty() { Ok(()) } else { Err(asleep.len()) }
}

/// Returns the threads in an uninterruptible call, each with its sleep counter. Empty if the kernel
/// does not report it.
fn sleeping(tasks: &Path) -> BTreeMap<String, u64> {
    let threads = std::fs::read_dir(tasks).into_iter().flatten().flatten();
    let asleep = threads.filter_map(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        Some((thread.file_name().to_string_lossy().into_owned(), uninterruptible(&status)?))
    });
    asleep.collect()
}

/// Returns the number of voluntary sleeps of a thread in an uninterruptible call. The number
/// changes when the thread wakes.
fn uninterruptible(status: &str) -> Option<u64> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let sleeps = field("State:")?.starts_with('D');
    field("voluntary_ctxt_switches:")?.parse().ok().filter(|_| sleeps)
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
        let text = hung(2, &[idle(), disk("/data2", DiskCondition::Hung, 0)]);
        assert!(text.starts_with("data directory /data2 hangs; 2 threads hang"), "{text}");
        assert!(text.ends_with(HUNG_REMEDY), "{text}");
        let text = hung(1, &[idle(), disk("/data2", DiskCondition::Healthy, 9)]);
        assert!(text.starts_with("data directory /data2 may hang"), "{text}");
        let text = hung(1, &[idle()]);
        assert!(text.starts_with("no data directory is known to hang"), "{text}");
    }

    #[test]
    fn hung_call_differs_from_many_short_ones() {
        let status = |state: &str, switches: u64| {
            format!(
                "Name:\tx\nState:\t{state}\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t9\n"
            )
        };
        assert_eq!(uninterruptible(&status("D (disk sleep)", 7)), Some(7));
        assert_eq!(uninterruptible(&status("S (sleeping)", 7)), None);
        assert_eq!(uninterruptible("State:\tD (disk sleep)\n"), None);
    }

    #[test]
    fn hung_threads_are_found_by_kernel_state() {
        let dir = tempfile::tempdir().unwrap();
        for (thread, state) in [("11", "D (disk sleep)"), ("12", "S (sleeping)")] {
            std::fs::create_dir(dir.path().join(thread)).unwrap();
            let status = format!("State:\t{state}\nvoluntary_ctxt_switches:\t3\n");
            std::fs::write(dir.path().join(thread).join("status"), status).unwrap();
        }
        assert_eq!(sleeping(dir.path()), BTreeMap::from([("11".to_owned(), 3)]));
        assert!(sleeping(&dir.path().join("nothing")).is_empty());
    }

    #[tokio::test]
    async fn process_with_waiting_threads_is_responsive() {
        threads_respond().await.unwrap();
    }
}
