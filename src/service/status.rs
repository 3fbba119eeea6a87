//! The worker's state as a node (PROTOCOL §2.14, §8.5): one source of truth for heartbeat, health and metrics.

use parking_lot::Mutex;

/// State that coordinators see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerState {
    /// Takes new shuffles.
    Active,
    /// Serves, gets no new shuffles: the health checker says so.
    Unhealthy,
    /// Serves, gets no new shuffles: an operator says so.
    Decommissioning,
    /// Decommissioning has ended: no app is left.
    Decommissioned,
}

/// What an operator asked for, and what the health checker found; kept apart so that one does not undo the other.
#[derive(Debug, Clone, Copy, Default)]
struct Inputs {
    decommission: bool,
    drained: bool,
    unhealthy: bool,
    stopping: bool,
}

/// See [`WorkerState`].
#[derive(Debug, Default)]
pub struct WorkerStatus(Mutex<Inputs>);

impl WorkerStatus {
    /// The state now.
    #[must_use]
    pub fn state(&self) -> WorkerState {
        let inputs = *self.0.lock();
        match (inputs.decommission, inputs.drained, inputs.unhealthy) {
            (true, true, _) => WorkerState::Decommissioned,
            (true, false, _) => WorkerState::Decommissioning,
            (false, _, true) => WorkerState::Unhealthy,
            (false, _, false) => WorkerState::Active,
        }
    }

    /// Begins decommissioning; false if the worker is unhealthy, which is refused as the Java server does.
    pub fn decommission(&self) -> bool {
        let mut inputs = self.0.lock();
        if inputs.unhealthy && !inputs.decommission {
            return false;
        }
        inputs.decommission = true;
        true
    }

    /// Back to what the health checker says.
    pub fn cancel_decommission(&self) {
        let mut inputs = self.0.lock();
        inputs.decommission = false;
        inputs.drained = false;
    }

    /// Told by the expiry loop how many apps are left.
    pub fn observe_apps(&self, apps: usize) {
        let mut inputs = self.0.lock();
        inputs.drained = inputs.decommission && apps == 0;
    }

    /// Told by the health checker.
    pub fn set_unhealthy(&self, unhealthy: bool) {
        self.0.lock().unhealthy = unhealthy;
    }

    /// From here on tickets are refused with NO_BUFFER.
    pub fn stop(&self) {
        self.0.lock().stopping = true;
    }

    /// Whether [`WorkerStatus::stop`] was called.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.0.lock().stopping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decommission_and_cancel() {
        let status = WorkerStatus::default();
        assert!(status.decommission() && status.decommission());
        assert_eq!(status.state(), WorkerState::Decommissioning);
        status.observe_apps(1);
        assert_eq!(status.state(), WorkerState::Decommissioning);
        status.observe_apps(0);
        assert_eq!(status.state(), WorkerState::Decommissioned);
        status.cancel_decommission();
        assert_eq!(status.state(), WorkerState::Active);
    }

    #[test]
    fn an_unhealthy_worker_is_not_decommissioned_and_recovers() {
        let status = WorkerStatus::default();
        status.set_unhealthy(true);
        assert!(!status.decommission());
        assert_eq!(status.state(), WorkerState::Unhealthy);
        status.set_unhealthy(false);
        assert_eq!(status.state(), WorkerState::Active);
    }
}
