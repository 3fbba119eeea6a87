//! The worker's state as a node (PROTOCOL §2.14, §8.5): one source of truth for heartbeat, health and metrics.

use parking_lot::Mutex;
use tokio::sync::Notify;

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
pub struct WorkerStatus {
    inputs: Mutex<Inputs>,
    began: Notify,
    ended: Notify,
}

impl WorkerStatus {
    /// The state now.
    #[must_use]
    pub fn state(&self) -> WorkerState {
        let inputs = *self.inputs.lock();
        match (inputs.decommission, inputs.drained, inputs.unhealthy) {
            (true, true, _) => WorkerState::Decommissioned,
            (true, false, _) => WorkerState::Decommissioning,
            (false, _, true) => WorkerState::Unhealthy,
            (false, _, false) => WorkerState::Active,
        }
    }

    /// Begins decommissioning; false if the worker is unhealthy, which is refused as the Java server does.
    pub fn decommission(&self) -> bool {
        let mut inputs = self.inputs.lock();
        if inputs.unhealthy && !inputs.decommission {
            return false;
        }
        if !inputs.decommission {
            inputs.decommission = true;
            self.began.notify_one();
        }
        true
    }

    /// Back to what the health checker says.
    pub fn cancel_decommission(&self) {
        let mut inputs = self.inputs.lock();
        inputs.decommission = false;
        inputs.drained = false;
    }

    /// Told at intervals how many apps are left; true when that is what ends a decommissioning. An app that registers
    /// afterwards (a driver with an old assignment) is served, and decommissioning goes on.
    pub fn observe_apps(&self, apps: usize) -> bool {
        let mut inputs = self.inputs.lock();
        let was_drained = inputs.drained;
        inputs.drained = inputs.decommission && apps == 0;
        let ends = inputs.drained && !was_drained;
        if ends {
            self.ended.notify_waiters();
        }
        ends
    }

    /// Resolves when a decommissioning begins, also one that began before the call; for one waiter.
    pub(super) async fn decommission_began(&self) {
        self.began.notified().await;
    }

    /// Resolves once the worker is decommissioned.
    pub async fn decommissioned(&self) {
        loop {
            // Made before the state is looked at, so that nothing between the two is missed.
            let ended = self.ended.notified();
            if self.state() == WorkerState::Decommissioned {
                return;
            }
            ended.await;
        }
    }

    /// Told by the health checker.
    pub fn set_unhealthy(&self, unhealthy: bool) {
        self.inputs.lock().unhealthy = unhealthy;
    }

    /// From here on tickets are refused with NO_BUFFER.
    pub fn stop(&self) {
        self.inputs.lock().stopping = true;
    }

    /// Whether [`WorkerStatus::stop`] was called.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.inputs.lock().stopping
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
        assert!(!status.observe_apps(1));
        assert_eq!(status.state(), WorkerState::Decommissioning);
        assert!(status.observe_apps(0) && !status.observe_apps(0));
        assert_eq!(status.state(), WorkerState::Decommissioned);
        assert!(!status.observe_apps(1), "a late app is served");
        assert_eq!(status.state(), WorkerState::Decommissioning);
        assert!(status.observe_apps(0));
        assert!(status.decommission(), "again is no change");
        assert_eq!(status.state(), WorkerState::Decommissioned);
        status.cancel_decommission();
        assert_eq!(status.state(), WorkerState::Active);
        assert!(!status.observe_apps(0));
    }

    #[tokio::test]
    async fn the_end_of_a_decommissioning_can_be_waited_for() {
        let status = WorkerStatus::default();
        let mut waiting = std::pin::pin!(status.decommissioned());
        assert!(futures::poll!(&mut waiting).is_pending());
        status.decommission();
        status.observe_apps(1);
        assert!(futures::poll!(&mut waiting).is_pending());
        status.observe_apps(0);
        waiting.await;
        status.decommissioned().await;
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
