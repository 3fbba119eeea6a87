//! Group commit: one `fdatasync` of a log serves everybody who waits for it.
//!
//! A writer takes a number and waits in a tokio lock for the sync under way; the next sync covers all whose
//! number was taken before it began. After a failed sync it is unknown what of the log is on the device (Linux calls the
//! pages clean all the same, and the next sync says that all is well), so every later one is refused. A sync that was
//! cancelled counts as failed.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The syncs of a log.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// Writes that have come to their end.
    written: AtomicU64,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// So many of the writes are on the device.
    durable: u64,
    /// A sync failed, or is under way.
    unverified: bool,
}

impl Syncs {
    /// Waits until everything that the caller has written is on the device, by way of `sync` unless another caller's
    /// sync covers it.
    ///
    /// # Errors
    /// This or an earlier sync failed: the log must not be written any more.
    pub(super) async fn cover(&self, sync: impl Future<Output = io::Result<()>>) -> io::Result<()> {
        let number = self.written.fetch_add(1, Ordering::AcqRel) + 1;
        let mut state = self.state.lock().await;
        if state.durable >= number {
            return Ok(());
        }
        if state.unverified {
            return Err(io::Error::other("an earlier sync of this file failed"));
        }
        let covered = self.written.load(Ordering::Acquire);
        // Until the answer is there: the caller may go away.
        state.unverified = true;
        sync.await?;
        (state.durable, state.unverified) = (covered, false);
        Ok(())
    }
}
