//! Reaps children without a waiter: orphans, where the worker is process 1 of a container or a
//! subreaper, and children of the program before an upgrade.
//!
//! The code that starts a child awaits it as soon as it ends. A zombie older than [`PATIENCE`]
//! therefore has no waiter. Without this module it would remain for the worker's lifetime.

use std::collections::HashSet;

use procfs::process::{Process, all_processes};
use procfs::{ProcError, ProcResult};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Duration;

use crate::clock::{sleep, timeout};

/// Time for the parent code to take a child's exit status.
const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum time between two scans.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

/// An ended child, identified by process id and start time since ids are reused.
type Zombie = (i32, u64);

/// Reaps while polled. Scans when a child ends.
pub(super) async fn run() {
    let mut ended = match signal(SignalKind::child()) {
        Ok(ended) => ended,
        Err(error) => return tracing::warn!(%error, "cannot reap orphaned child processes"),
    };
    let mut seen = HashSet::new();
    loop {
        if seen.is_empty() {
            // The first scan is immediate: some may have ended before the handler was installed.
            seen = scan(HashSet::new()).await;
        }
        if seen.is_empty() {
            // The list of children may miss one while others end.
            let _ = timeout(LOOK_INTERVAL, ended.recv()).await;
            continue;
        }
        sleep(PATIENCE).await;
        seen = scan(seen).await;
    }
}

/// Reaps zombies that were already in `seen`. Returns the other zombies.
async fn scan(seen: HashSet<Zombie>) -> HashSet<Zombie> {
    let scanned = tokio::task::spawn_blocking(move || {
        let (nobodys, young): (Vec<_>, HashSet<_>) =
            zombies().into_iter().fold((Vec::new(), HashSet::new()), |(mut old, mut young), zombie| {
                if seen.contains(&zombie) {
                    old.push(zombie);
                } else {
                    young.insert(zombie);
                }
                (old, young)
            });
        nobodys.iter().for_each(|(child, _)| reap(*child));
        young
    });
    scanned.await.unwrap_or_default()
}

fn reap(child: i32) {
    let Some(pid) = Pid::from_raw(child) else { return };
    match retry_on_intr(|| waitpid(Some(pid), WaitOptions::NOHANG)) {
        Ok(_) => tracing::debug!(child, "reaped an orphaned child process"),
        Err(error) => tracing::debug!(child, %error, "child process was reaped elsewhere"),
    }
}

/// Returns ended children of this process that were not waited for.
fn zombies() -> HashSet<Zombie> {
    let children = children().unwrap_or_else(|_| every_process());
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let ended = |child: i32| {
        let stat = Process::new(child).ok()?.stat().ok()?;
        (stat.state == 'Z' && stat.ppid == own).then_some((child, stat.starttime))
    };
    children.into_iter().filter_map(ended).collect()
}

/// Returns the children of all threads, if the kernel was built with that list.
fn children() -> ProcResult<Vec<i32>> {
    let mut all = Vec::new();
    for task in Process::myself()?.tasks()? {
        match task.and_then(|task| task.children()) {
            Ok(children) => all.extend(children.into_iter().filter_map(|child| i32::try_from(child).ok())),
            // The kernel lacks the list, or the thread has just ended.
            Err(error @ ProcError::NotFound(_)) if all.is_empty() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(all)
}

fn every_process() -> Vec<i32> {
    let all = all_processes().into_iter().flatten().flatten();
    all.map(|process| process.pid).collect()
}
