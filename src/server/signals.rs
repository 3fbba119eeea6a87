//! The signals that a worker's process listens to.

use nix::sys::signal::SigSet;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Blocks SIGUSR2, whose default action would end a process that has not installed its handler yet. The mask and a
/// pending signal survive `exec`, so that a signal between two programs of an upgrade is not lost either.
pub fn hold_upgrade_signal() {
    // Fails for an invalid set only.
    let _ = upgrade_signal().thread_block();
}

/// The opposite, on this thread alone: the runtime's threads inherited the mask, so it is this one that takes it.
pub fn take_upgrade_signal() {
    let _ = upgrade_signal().thread_unblock();
}

fn upgrade_signal() -> SigSet {
    SigSet::from_iter([nix::sys::signal::Signal::SIGUSR2])
}

/// The signals that end the worker, or this program of it, or have it read its configuration.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    upgrade: Signal,
    reload: Signal,
    /// Not waited for. With a handler a write beyond RLIMIT_FSIZE fails instead of ending the process.
    _file_size: Signal,
}

impl Signals {
    /// Listens from here on; needs a runtime.
    ///
    /// # Errors
    /// The kernel's.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            upgrade: signal(SignalKind::user_defined2())?,
            reload: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(nix::sys::signal::Signal::SIGXFSZ as i32))?,
        })
    }

    /// The name of the next one.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.upgrade.recv() => "SIGUSR2",
            _ = self.reload.recv() => "SIGHUP",
        }
    }
}
