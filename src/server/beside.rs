//! A successor beside this process, which a thread that hangs in the kernel keeps from becoming it: `exec` would wait for that
//! thread, as the end of the process does.
//!
//! Everything is handed over as ever, but to a process of its own. This one stays, since supervisors know its id: it
//! passes signals on, ends when the successor does and with its exit code, and holds the locks of the data directories
//! that do not answer (`tiers::local`), so that the late write of the thread meets nobody. Should it be killed, the
//! successor stops in order. A successor that does not get ready in time is killed, and this program goes on.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use super::notify;
use super::signals::{Signals, take_upgrade_signal};
use super::sockets::{Inherited, KEEPER};
use super::successor::Successor;
use crate::clock::timeout;

/// Tells a successor who keeps it.
const KEPT_BY: &str = "WORKER_KEPT_BY";
/// A process that was killed ends in it, unless it hangs, too.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// Exit code of a successor that a signal has ended.
const FAILED: u8 = 1;

/// Runs the successor until it ends; its exit code. To be called on the thread that began this process, as the successor is
/// told to stop when that ends.
///
/// # Errors
/// It did not get ready, and is gone: the sockets, for this program to go on with.
pub fn run_beside(
    successor: &Successor,
    sockets: Inherited,
    deadline: Duration,
) -> Result<u8, Box<(io::Error, Inherited)>> {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(keep(successor, sockets, deadline)),
        Err(error) => Err(Box::new((error, Inherited { is_returned: true, ..sockets }))),
    }
}

/// Whether this process is kept by the one that began it; then that one's end stops it.
///
/// # Errors
/// It has ended already.
pub fn follow_keeper() -> anyhow::Result<bool> {
    let keeper = std::env::var(KEPT_BY).ok().and_then(|pid| pid.parse::<i32>().ok()).and_then(Pid::from_raw);
    let Some(keeper) = keeper else { return Ok(false) };
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot watch the predecessor process")?;
    if getppid() != Some(keeper) {
        bail!("the predecessor process has ended");
    }
    Ok(true)
}

async fn keep(
    successor: &Successor,
    mut sockets: Inherited,
    deadline: Duration,
) -> Result<u8, Box<(io::Error, Inherited)>> {
    let (gap_began_ms, let_go) = (sockets.gap_began_ms, sockets.let_go.clone());
    let kept = std::mem::take(&mut sockets.kept);
    let mut named = sockets.into_named();
    let started = start(&mut named, |named| successor.passing(named, gap_began_ms, &let_go), deadline);
    let error = match started.await {
        Ok(Started::Ready(ready)) => {
            let (child, signals) = *ready;
            // So that nobody connects once the successor is gone.
            drop(named);
            let code = follow(child, signals).await;
            drop(kept);
            return Ok(code);
        }
        Ok(Started::Stopped) => return Ok(0),
        Err(error) => error,
    };
    named.retain(|(name, _)| name != KEEPER);
    let back = Inherited::from_named(named);
    Err(Box::new((error, Inherited { gap_began_ms, is_returned: true, let_go, kept, ..back })))
}

/// How a start came out.
enum Started {
    Ready(Box<(Child, Signals)>),
    /// A signal to stop came first. Everything is on the disks.
    Stopped,
}

type Passed = io::Result<(std::process::Command, Vec<OwnedFd>)>;

async fn start(
    named: &mut Vec<(String, OwnedFd)>,
    passing: impl FnOnce(&[(String, OwnedFd)]) -> Passed,
    deadline: Duration,
) -> io::Result<Started> {
    let mut signals = Signals::listen()?;
    let (ours, theirs) = StdStream::pair()?;
    ours.set_nonblocking(true)?;
    let mut ours = UnixStream::from_std(ours)?;
    named.push((KEEPER.to_owned(), theirs.into()));
    let (mut command, copies) = passing(named)?;
    command.env(KEPT_BY, std::process::id().to_string());
    let mut child = Command::from(command).spawn()?;
    // What is left of these is the successor's: its end is heard.
    drop(copies);
    named.retain(|(name, _)| name != KEEPER);
    take_upgrade_signal();
    tracing::warn!(pid = child.id(), "a thread of this process hangs; the successor runs beside it");
    let is_ready = async {
        tokio::select! {
            biased;
            ready = timeout(deadline, ours.read_u8()) => Some(ready.is_ok_and(|read| read.is_ok())),
            () = told_to_stop(&mut signals) => None,
        }
    }
    .await;
    if is_ready == Some(true) {
        return Ok(Started::Ready(Box::new((child, signals))));
    }
    let _ = child.start_kill();
    let ended = timeout(KILL_DEADLINE, child.wait()).await;
    match is_ready {
        None => Ok(Started::Stopped),
        Some(_) => Err(io::Error::other(format!("successor was not ready within {deadline:?} ({ended:?})"))),
    }
}

async fn told_to_stop(signals: &mut Signals) {
    while !matches!(signals.next().await, "SIGTERM" | "SIGINT") {}
}

/// Passes on what this process is told, until the successor ends; its exit code.
async fn follow(mut child: Child, mut signals: Signals) -> u8 {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    // The main process stays this one: a manager hears of the death of another's child, and not how it died, so that
    // `Restart=on-failure` would not start it again.
    notify::ready(&Inherited::default());
    loop {
        let name = tokio::select! {
            biased;
            ended = child.wait() => {
                let code = ended.ok().and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
                tracing::info!(code, "the successor has ended; this process ends too");
                return code.unwrap_or(FAILED);
            }
            name = signals.next() => name,
        };
        let signal = match name {
            "SIGTERM" => Signal::TERM,
            "SIGINT" => Signal::INT,
            "SIGHUP" => Signal::HUP,
            _ => Signal::USR2,
        };
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, signal)) {
            tracing::warn!(%error, signal = name, "cannot forward the signal to the successor");
        }
    }
}
