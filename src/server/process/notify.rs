//! Notifications to the service manager (`sd_notify`), and the ready file for a parent process.
//! Without `NOTIFY_SOCKET` in the environment the manager is not notified.
//!
//! `Type=notify-reload` with `ReloadSignal=SIGUSR2` makes `systemctl reload` an upgrade in place.
//! With `FileDescriptorStoreMax=` the manager keeps the listeners and an unnamed memory file after
//! a crash. Connects then wait for the next process.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use sd_notify::{NotifyState, notify, notify_with_fds};

use crate::server::sockets::{self, Addresses, Inherited};

/// Stores `memory` in the manager before the first block is acknowledged. `None` means that the
/// next process could not use it.
///
/// A file that came from the manager (`is_inherited`) is never removed from its store, so it
/// survives a crash at any moment.
pub(in crate::server) fn keep_memory(memory: Option<BorrowedFd<'_>>, is_inherited: bool) {
    let name = || NotifyState::FdName(sockets::MEMORY);
    if !is_inherited {
        // Another file may be left from an earlier process, and its pages would stay allocated.
        warn_if_failed(notify(&[NotifyState::FdStoreRemove, name()]));
    }
    if let Some(memory) = memory {
        // The manager recognizes a second copy of the same file.
        warn_if_failed(notify_with_fds(&[NotifyState::FdStore, name()], &[memory]));
    }
}

/// Reports that all listeners accept. Also stores the listeners in `held` in the manager.
pub(super) fn ready(held: &Inherited) {
    for (name, listener) in sockets::listeners(held) {
        let stored = notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(name)], &[listener.as_fd()]);
        warn_if_failed(stored);
    }
    warn_if_failed(notify(&[NotifyState::Ready, NotifyState::Status("serving")]));
}

/// Reports that an upgrade begins. The successor, or this worker after a refusal, calls [`ready`].
pub(in crate::server) fn reloading() {
    let state = NotifyState::monotonic_usec_now()
        .and_then(|now| notify(&[NotifyState::Reloading, now, NotifyState::Status("upgrade in place")]));
    warn_if_failed(state);
}

/// Reports that the worker stops and needs up to `time`.
pub(super) fn stopping(time: Duration) {
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    warn_if_failed(notify(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(micros)]));
}

/// Writes the ready file under a temporary name and renames it, so that a reader never sees a
/// partial line.
pub(super) fn write_ready_file(
    path: &Path,
    addresses: Addresses,
    upgrade_gap_ms: Option<u64>,
) -> std::io::Result<()> {
    let line = serde_json::json!({
        "grpc_port": addresses.grpc.port(),
        "http_port": addresses.http.port(),
        "urpc_port": addresses.tcp.map(|address| address.port()),
        "admin_port": addresses.admin.map(|address| address.port()),
        "pid": std::process::id(),
        "upgrade_gap_ms": upgrade_gap_ms,
    });
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, format!("{line}\n"))?;
    std::fs::rename(temporary, path)
}

fn warn_if_failed(result: std::io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}
