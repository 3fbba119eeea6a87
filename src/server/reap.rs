//! Reaps children that nobody waits for: orphans, where the worker is process 1 of a container or a subreaper, and children of the
//! program that this process was before an upgrade.
//!
//! A child of this program is awaited by whoever started it, as soon as it ends. So one that has ended and is still there
//! after [`PATIENCE`] is nobody's. Without this each would stay a zombie for as long as the worker lives.

use std::collections::HashSet;

use procfs::process::{Process, all_processes};
use procfs::{ProcError, ProcResult};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Duration;

use crate::clock::{sleep, timeout};

/// Time for whoever started a child to take its exit status.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two looks at most.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

/// A child that has ended, by its id and the time of its start: ids come again.
type Zombie = (i32, u64);

/// Reaps for as long as it is polled. Looks when a child ends.
pub(super) async fn run() {
    let mut ended = match signal(SignalKind::child()) {
        Ok(ended) => ended,
        Err(error) => return tracing::warn!(%error, "cannot reap orphaned child processes"),
    };
    let mut seen = HashSet::new();
    loop {
        if seen.is_empty() {
            // The first look is at once: some may have ended before the signal was listened for.
            seen = look(HashSet::new()).await;
        }
        if seen.is_empty() {
            // The list of children may lack one while others end.
            let _ = timeout(LOOK_INTERVAL, ended.recv()).await;
            continue;
        }
        sleep(PATIENCE).await;
        seen = look(seen).await;
    }
}

/// Reaps children that have ended and were among `seen`. Returns the others that have ended.
async fn look(seen: HashSet<Zombie>) -> HashSet<Zombie> {
    let looked = tokio::task::spawn_blocking(move || {
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
    looked.await.unwrap_or_default()
}

fn reap(child: i32) {
    let Some(pid) = Pid::from_raw(child) else { return };
    match retry_on_intr(|| waitpid(Some(pid), WaitOptions::NOHANG)) {
        Ok(_) => tracing::debug!(child, "reaped an orphaned child process"),
        Err(error) => tracing::debug!(child, %error, "child process was reaped elsewhere"),
    }
}

/// Children of this process that have ended and were not waited for.
fn zombies() -> HashSet<Zombie> {
    let children = children().unwrap_or_else(|_| every_process());
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let ended = |child: i32| {
        let stat = Process::new(child).ok()?.stat().ok()?;
        (stat.state == 'Z' && stat.ppid == own).then_some((child, stat.starttime))
    };
    children.into_iter().filter_map(ended).collect()
}

/// Of all threads, where the kernel was built to tell.
fn children() -> ProcResult<Vec<i32>> {
    let mut all = Vec::new();
    for task in Process::myself()?.tasks()? {
        match task.and_then(|task| task.children()) {
            Ok(children) => all.extend(children.into_iter().filter_map(|child| i32::try_from(child).ok())),
            // The kernel does not tell, or the thread has just ended.
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
