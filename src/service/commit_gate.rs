//! Whether sends may still become visible, for a worker that is about to leave its place to a successor.
//!
//! Invariant: once [`CommitGate::close`] has returned no commit is under way and none begins until [`CommitGate::open`], so
//! memory can only shrink: what was empty then stays empty.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard};

use super::ServiceError;

/// Open, or closed for good or for a while.
#[derive(Debug, Default)]
pub(super) struct CommitGate {
    closed: RwLock<bool>,
    /// The same for those who only look: without a write to a line that all sends share.
    seems_closed: AtomicBool,
}

/// Keeps the gate as it is for one commit.
pub(super) type Passing<'a> = RwLockReadGuard<'a, bool>;

impl CommitGate {
    /// Passes, for as long as the value lives.
    ///
    /// # Errors
    /// `Stopping`, for which clients wait and send again, while the gate is closed.
    pub(super) fn pass(&self) -> Result<Passing<'_>, ServiceError> {
        let passing = self.closed.read();
        if *passing { Err(ServiceError::Stopping) } else { Ok(passing) }
    }

    /// Refuses early what [`CommitGate::pass`] would refuse after all of its bytes.
    ///
    /// # Errors
    /// As there.
    pub(super) fn look(&self) -> Result<(), ServiceError> {
        if self.seems_closed.load(Ordering::Relaxed) { Err(ServiceError::Stopping) } else { Ok(()) }
    }

    /// Waits for those who are passing; a commit touches memory only.
    pub(super) fn close(&self) {
        self.set(true);
    }

    pub(super) fn open(&self) {
        self.set(false);
    }

    fn set(&self, closed: bool) {
        let mut guarded = self.closed.write();
        *guarded = closed;
        self.seems_closed.store(closed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uniffle_testkit::wait_until;

    use super::*;

    #[test]
    fn gate_closes_after_the_last_commit() {
        let gate = CommitGate::default();
        std::thread::scope(|scope| {
            // In here: the thread that closes ends also when this one fails.
            let passing = gate.pass().unwrap();
            let closing = scope.spawn(|| gate.close());
            wait_until("it waits for who is passing", Duration::from_secs(20), || {
                gate.closed.try_read().map_or(Ok(()), |_| Err("others may pass".to_owned()))
            });
            assert!(!closing.is_finished(), "one is still passing");
            drop(passing);
            closing.join().unwrap();
        });
        assert!(matches!(gate.pass(), Err(ServiceError::Stopping)) && gate.look().is_err());
        gate.open();
        assert!(gate.look().is_ok());
        drop(gate.pass().unwrap());
    }
}
