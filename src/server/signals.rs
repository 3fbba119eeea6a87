//! Signals handled by a worker process.

use nix::sys::signal::SigSet;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Blocks SIGUSR2, whose default action would end a process without a handler. The mask and a
/// pending signal survive `exec`, so a signal sent between two programs of an upgrade is not lost.
pub fn hold_upgrade_signal() {
    // Fails only for an invalid set.
    let _ = upgrade_signal().thread_block();
}

/// Unblocks SIGUSR2 on this thread alone. The runtime's threads have inherited the mask, so this
/// thread receives the signal.
pub fn take_upgrade_signal() {
    let _ = upgrade_signal().thread_unblock();
}

fn upgrade_signal() -> SigSet {
    SigSet::from_iter([nix::sys::signal::Signal::SIGUSR2])
}

/// Signals that stop or upgrade the worker, or reload its configuration.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    upgrade: Signal,
    reload: Signal,
    /// Never awaited. With a handler installed, a write beyond RLIMIT_FSIZE fails instead of ending
    /// the process.
    _file_size: Signal,
}

impl Signals {
    /// Installs the handlers. Needs a runtime.
    ///
    /// # Errors
    /// If the kernel refuses a handler.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            upgrade: signal(SignalKind::user_defined2())?,
            reload: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(nix::sys::signal::Signal::SIGXFSZ as i32))?,
        })
    }

    /// Waits for the next signal and returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.upgrade.recv() => "SIGUSR2",
            _ = self.reload.recv() => "SIGHUP",
        }
    }
}
