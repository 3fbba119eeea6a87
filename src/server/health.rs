//! Watches what changes the worker's state, and tells the coordinators at once.
//!
//! Disks: fewer that take batches than `healthy_check_min_disks` make the worker UNHEALTHY until there are enough
//! again. Everything else that changes the state (an operator's decommissioning, the last app that leaves) happens in
//! `service`; here it is only noticed.

use std::sync::Arc;

use crate::service::{Service, WorkerState};
use crate::store::LocalStore;

use super::admin::Live;

/// What the watch looks at.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) service: Arc<Service>,
    pub(super) store: Option<Arc<LocalStore>>,
    /// Disks that must take batches; 0 = the disks make no difference.
    pub(super) min_disks: usize,
    pub(super) live: Arc<Live>,
}

impl Watch {
    /// Runs until `stop`; calls `announce` after each change of the state.
    pub(super) async fn run(self, announce: impl Fn(), stop: impl Future<Output = ()>) {
        let mut changes = self.store.as_ref().map(|store| store.condition_changes());
        let mut too_few = false;
        let mut announced = self.service.status().state();
        tokio::pin!(stop);
        loop {
            self.look_at_disks(&mut too_few);
            let state = self.service.status().state();
            if state != announced {
                tracing::info!(from = ?announced, to = ?state, "state of the worker changed");
                announced = state;
                announce();
            }
            let disks_changed = async {
                match &mut changes {
                    Some(changes) => drop(changes.changed().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = &mut stop => return,
                () = disks_changed => {}
                _ = self.service.status().changed_from(announced) => {}
                () = self.live.changed() => announce(),
            }
        }
    }

    fn look_at_disks(&self, too_few: &mut bool) {
        let Some(store) = self.store.as_ref().filter(|_| self.min_disks > 0) else { return };
        let available = store.available_disks();
        let now_too_few = available < self.min_disks;
        if now_too_few == *too_few {
            return;
        }
        *too_few = now_too_few;
        let wanted = self.min_disks;
        if now_too_few {
            tracing::error!(available, wanted, "too few disks take data, the worker is unhealthy");
        } else {
            tracing::info!(available, wanted, "enough disks take data again");
        }
        self.service.status().set_unhealthy(now_too_few);
    }
}

/// Why clients should not be sent here; `None` when they may.
pub(super) fn not_ready(service: &Service) -> Option<&'static str> {
    if service.status().is_stopping() {
        return Some("stopping");
    }
    match service.status().state() {
        WorkerState::Active => None,
        WorkerState::Unhealthy => Some("unhealthy"),
        WorkerState::Decommissioning | WorkerState::Decommissioned => Some("decommissioning"),
    }
}
