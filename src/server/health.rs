//! Watches what changes the worker's state, and tells the coordinators at once; also when the last application goes.
//!
//! An essential tier that complains (too few disks that take batches), or all tiers at once, make the worker UNHEALTHY
//! until that is over. Everything else that changes the state (an operator's decommissioning, the last app that leaves)
//! happens in `service`; here it is only noticed.

use std::sync::Arc;
use std::time::Duration;

use futures::future::select_all;
use tokio::time::sleep;

use crate::service::{Service, WorkerState};
use crate::tiers::Tiers;

/// Between two looks at tiers that do not tell when their state changes.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

use super::settings::RuntimeSettings;

/// What the watch looks at.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) service: Arc<Service>,
    pub(super) live: Arc<RuntimeSettings>,
}

impl Watch {
    /// Runs until `stop`; calls `announce` after each change of the state, and when the last application has gone.
    pub(super) async fn run(self, announce: impl Fn(), stop: impl Future<Output = ()>) {
        let tiers = self.service.tiers().clone();
        let mut changes: Vec<_> = tiers.iter().filter_map(|tier| tier.state_changes()).collect();
        let some_are_silent = changes.len() < tiers.len();
        let mut complaint = None;
        let mut announced = self.service.status().state();
        tokio::pin!(stop);
        loop {
            self.look_at(&tiers, &mut complaint);
            let state = self.service.status().state();
            if state != announced {
                tracing::info!(from = ?announced, to = ?state, "state of the worker changed");
                announced = state;
                announce();
            }
            let changed = changes.iter_mut().map(|changes| Box::pin(changes.changed()));
            let any_changed = async {
                match changed.len() {
                    0 => std::future::pending().await,
                    _ => drop(select_all(changed).await),
                }
            };
            tokio::select! {
                biased;
                () = &mut stop => return,
                () = any_changed => {}
                _ = self.service.status().changed_from(announced) => {}
                () = self.live.changed() => announce(),
                () = self.service.status().emptied() => announce(),
                () = sleep(LOOK_INTERVAL), if some_are_silent => {}
            }
        }
    }

    fn look_at(&self, tiers: &Tiers, known: &mut Option<&'static str>) {
        let complaint = complaint(tiers);
        if complaint == *known {
            return;
        }
        *known = complaint;
        match complaint {
            Some(complaint) => tracing::error!(complaint, "the worker is unhealthy"),
            None => tracing::info!("the tiers take data again"),
        }
        self.service.status().set_unhealthy(complaint.is_some());
    }
}

/// Why the tiers make the worker unhealthy: an essential one complains, or all of them do.
fn complaint(tiers: &Tiers) -> Option<&'static str> {
    let complaints = || tiers.iter().map(|tier| (tier.capability().is_essential, tier.state().complaint));
    let essential = complaints().find_map(|(is_essential, complaint)| complaint.filter(|_| is_essential));
    let all = || complaints().map(|(_, complaint)| complaint).collect::<Option<Vec<_>>>();
    essential.or_else(|| all()?.first().copied())
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
