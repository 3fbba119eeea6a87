//! Gate that stops sends from becoming visible while a worker prepares to hand over to a successor.
//!
//! Invariant: after [`CommitGate::close`] returns, no commit runs and none begins until
//! [`CommitGate::open`]. Memory can then only shrink: if it was empty, it stays empty.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard};

use crate::service::ServiceError;

/// A gate that is open, or closed temporarily or permanently.
#[derive(Debug, Default)]
pub(in crate::service) struct CommitGate {
    closed: RwLock<bool>,
    /// Copy of `closed` for early checks that do not write to a cache line shared by all sends.
    seems_closed: AtomicBool,
}

/// Keeps the gate in its state for the duration of one commit.
pub(super) type CommitPermit<'a> = RwLockReadGuard<'a, bool>;

impl CommitGate {
    /// Passes the gate for as long as the returned value lives.
    ///
    /// # Errors
    /// `Stopping` while the gate is closed. Clients wait and send again.
    pub(in crate::service) fn pass(&self) -> Result<CommitPermit<'_>, ServiceError> {
        let passing = self.closed.read();
        if *passing { Err(ServiceError::Stopping) } else { Ok(passing) }
    }

    /// Refuses a send early that [`CommitGate::pass`] would refuse after all of its bytes.
    ///
    /// # Errors
    /// The errors of [`CommitGate::pass`].
    pub(in crate::service) fn check(&self) -> Result<(), ServiceError> {
        if self.seems_closed.load(Ordering::Relaxed) { Err(ServiceError::Stopping) } else { Ok(()) }
    }

    /// Closes the gate and waits for running commits, which only touch memory.
    pub(super) fn close(&self) {
        self.set(true);
    }

    pub(in crate::service) fn open(&self) {
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
            // Runs inside the scope, so that the closing thread ends even if this assertion fails.
            let passing = gate.pass().unwrap();
            let closing = scope.spawn(|| gate.close());
            wait_until("it waits for running commits", Duration::from_secs(20), || {
                gate.closed.try_read().map_or(Ok(()), |_| Err("others may pass".to_owned()))
            });
            assert!(!closing.is_finished(), "one is still passing");
            drop(passing);
            closing.join().unwrap();
        });
        assert!(matches!(gate.pass(), Err(ServiceError::Stopping)) && gate.check().is_err());
        gate.open();
        assert!(gate.check().is_ok());
        drop(gate.pass().unwrap());
    }
}
