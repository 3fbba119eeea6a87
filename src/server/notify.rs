//! What the service manager is told (`sd_notify`). Without `NOTIFY_SOCKET` in the environment nothing is said.
//!
//! `Type=notify-reload` with `ReloadSignal=SIGUSR2` makes `systemctl reload` an upgrade in place. With
//! `FileDescriptorStoreMax=` the manager keeps the listeners over a crash, so that connects wait for the next process, and a
//! memory without a name.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use sd_notify::{NotifyState, notify, notify_with_fds};

use super::sockets::{self, Inherited};

/// What the manager has of the memory, before the first block is acknowledged: `memory`, or none if there is none that a next
/// process could use. One that the manager gave (`is_inherited`) is never taken out of its store, whatever instruction this
/// process dies at.
pub(super) fn keep_memory(memory: Option<BorrowedFd<'_>>, is_inherited: bool) {
    let name = || NotifyState::FdName(sockets::MEMORY);
    if !is_inherited {
        // Another one may be there from before, whose pages would stay.
        said(notify(&[NotifyState::FdStoreRemove, name()]));
    }
    if let Some(memory) = memory {
        // The same file once more is one file to the manager.
        said(notify_with_fds(&[NotifyState::FdStore, name()], &[memory]));
    }
}

/// All listeners accept. Also leaves the listeners in the manager's store.
pub(super) fn ready(held: &Inherited) {
    for (name, listener) in sockets::listeners(held) {
        let stored = notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(name)], &[listener.as_fd()]);
        said(stored);
    }
    said(notify(&[NotifyState::Ready, NotifyState::Status("serving")]));
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
        tracing::warn!(%error, "cannot notify the service manager");
    }
}
