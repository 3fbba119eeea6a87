//! Access to a file descriptor that was passed to this process.

use std::os::fd::{FromRawFd as _, OwnedFd};

use listenfd::ListenFd;

/// Takes ownership of the descriptor at `index` of the passed ones, whatever it is. Works once.
pub fn take(passed: &mut ListenFd, index: usize) -> Option<OwnedFd> {
    let descriptor = passed.take_raw_fd(index).ok().flatten()?;
    // SAFETY: the parent process opened it for this process (`LISTEN_FDS`), and `ListenFd` gives
    // each descriptor away once.
    Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
