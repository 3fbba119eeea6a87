//! Signals handled by a worker process, and the children that end in it.
//!
//! Children without a waiter are reaped: orphans, where the worker is process 1 of a container or a
//! subreaper, and children of the program before an upgrade. The code that starts a child awaits it
//! as soon as it ends, so a zombie older than [`REAP_DELAY`] has no waiter. Without
//! [`reap_children`] it would remain for the worker's lifetime.

use std::collections::HashSet;

use nix::sys::signal::{SigSet, Signal as SignalNumber, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use procfs::process::{Process, all_processes};
use procfs::{ProcError, ProcResult};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Duration;

use crate::clock::{sleep, timeout};

/// Time for the parent code to take a child's exit status.
const REAP_DELAY: Duration = Duration::from_secs(1);

/// Maximum time between two scans.
const SCAN_INTERVAL: Duration = Duration::from_secs(60);

/// An ended child, identified by process id and start time since ids are reused.
type Zombie = (i32, u64);

/// Signals that stop or upgrade the worker, or reload its configuration.
const HANDLED: [SignalNumber; 4] =
    [SignalNumber::SIGTERM, SignalNumber::SIGINT, SignalNumber::SIGHUP, SignalNumber::SIGUSR2];

/// Blocks the signals of [`Signals`] in this thread and in threads and programs started by it. A
/// blocked signal stays pending across `exec`, so one sent between two programs of an upgrade is
/// not lost.
pub fn hold_signals() {
    // Fails only for an invalid set.
    let _ = SigSet::from_iter(HANDLED).thread_block();
}

/// Unblocks the signals of [`Signals`] in this thread.
pub fn release_signals() {
    let _ = SigSet::from_iter(HANDLED).thread_unblock();
}

/// Unblocks all signals of [`Signals`] except SIGUSR2, for a successor that unblocks only that one.
pub fn release_signals_for_old_successor() {
    let ends = HANDLED.into_iter().filter(|signal| *signal != SignalNumber::SIGUSR2);
    let _ = SigSet::from_iter(ends).thread_unblock();
}

/// Sends SIGTERM to this process. It stays pending for the successor.
///
/// # Errors
/// If the kernel refuses.
pub fn send_stop_to_successor() -> std::io::Result<()> {
    Ok(kill(nix::unistd::Pid::this(), SignalNumber::SIGTERM)?)
}

/// Reads signals that stop or upgrade the worker, or reload its configuration. They must be blocked
/// in all threads ([`hold_signals`]).
#[derive(Debug)]
pub struct Signals {
    pending: AsyncFd<SignalFd>,
    /// Never awaited. With a handler installed, a write beyond RLIMIT_FSIZE fails instead of ending
    /// the process.
    _file_size: Signal,
}

impl Signals {
    /// Opens the descriptor of pending signals. Needs a runtime.
    ///
    /// # Errors
    /// If the kernel refuses.
    #[expect(deprecated, reason = "the new function is unsafe; a SignalFd does not change its descriptor")]
    pub fn listen() -> std::io::Result<Self> {
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let pending = SignalFd::with_flags(&SigSet::from_iter(HANDLED), flags)?;
        Ok(Self {
            pending: AsyncFd::with_interest(pending, Interest::READABLE)?,
            _file_size: signal(SignalKind::from_raw(SignalNumber::SIGXFSZ as i32))?,
        })
    }

    /// Waits for the next signal and returns it. Cancel-safe: a signal is read only if it is
    /// returned.
    ///
    /// # Errors
    /// If the descriptor cannot be read.
    pub async fn next(&self) -> std::io::Result<SignalNumber> {
        let read = |pending: &SignalFd| pending.read_signal()?.ok_or(std::io::ErrorKind::WouldBlock.into());
        let signal = self.pending.async_io(Interest::READABLE, read).await?;
        Ok(SignalNumber::try_from(signal.ssi_signo.cast_signed())?)
    }
}

/// Reaps children without a waiter while polled. Scans when a child ends, and at intervals.
pub(super) async fn reap_children() {
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
            let _ = timeout(SCAN_INTERVAL, ended.recv()).await;
            continue;
        }
        sleep(REAP_DELAY).await;
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
