//! What the service manager is told (`sd_notify`). Without `NOTIFY_SOCKET` in the environment nothing is said.
//!
//! `Type=notify-reload` with `ReloadSignal=SIGUSR2` makes `systemctl reload` an upgrade in place. With
//! `FileDescriptorStoreMax=` the manager keeps the listeners over a crash, so that connects wait for the next process.

use std::os::fd::AsFd as _;
use std::time::Duration;

use sd_notify::{NotifyState, notify, notify_with_fds};

use super::sockets::{self, Inherited};

/// All listeners accept. Also leaves the listeners in the manager's store.
pub(super) fn ready(held: &Inherited) {
    for (name, listener) in sockets::listeners(held) {
        let stored = notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(name)], &[listener.as_fd()]);
        said(stored);
    }
    if let Some(memory) = &held.memory {
        let name = || NotifyState::FdName(sockets::MEMORY);
        // One of another size may be there from before.
        said(notify(&[NotifyState::FdStoreRemove, name()]));
        let stored = [NotifyState::FdStore, name()];
        said(notify_with_fds(&stored, &[memory.as_fd()]));
    }
    said(notify(&[NotifyState::Ready, NotifyState::Status("serving")]));
}

/// Another process is the service from now on.
pub(super) fn main_process(pid: Option<u32>) {
    if let Some(pid) = pid {
        said(notify(&[NotifyState::MainPid(pid), NotifyState::Ready, NotifyState::Status("serving")]));
    }
}

/// A successor takes over soon and says [`ready`].
pub(super) fn reloading() {
    let state = NotifyState::monotonic_usec_now()
        .and_then(|now| notify(&[NotifyState::Reloading, now, NotifyState::Status("upgrade in place")]));
    said(state);
}

/// The worker stops, and needs up to `time` for it.
pub(super) fn stopping(time: Duration) {
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    said(notify(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(micros)]));
}

fn said(result: std::io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the service manager cannot be notified");
    }
}
