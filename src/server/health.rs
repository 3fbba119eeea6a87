//! Watches what changes the worker's state, and tells the coordinators at once.
//!
//! Disks: fewer that take batches than `healthy_check_min_disks` make the worker UNHEALTHY until there are enough
//! again. Remote stores: when all that are in use fail and there is nothing else below memory, likewise. Everything else that changes the state (an operator's decommissioning, the last app that leaves) happens in
//! `service`; here it is only noticed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::service::{Service, Tiers, WorkerState};
use crate::tiers::{HdfsStore, LocalStore};

/// Between two looks at remote stores: they tell nobody of their condition.
const REMOTE_LOOK_INTERVAL: Duration = Duration::from_secs(1);

use super::admin::Live;

/// What the watch looks at.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) service: Arc<Service>,
    pub(super) tiers: Option<Tiers>,
    pub(super) live: Arc<Live>,
}

impl Watch {
    /// Runs until `stop`; calls `announce` after each change of the state.
    pub(super) async fn run(self, announce: impl Fn(), stop: impl Future<Output = ()>) {
        let mut changes = self.local().map(|store| store.condition_changes());
        let looks_at_remotes = self.only_hdfs().is_some();
        let mut complaint = None;
        let mut announced = self.service.status().state();
        tokio::pin!(stop);
        loop {
            self.look_at_stores(&mut complaint);
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
                () = sleep(REMOTE_LOOK_INTERVAL), if looks_at_remotes => {}
            }
        }
    }

    fn local(&self) -> Option<&LocalStore> {
        self.tiers.as_ref()?.local.as_deref()
    }

    /// The remote stores, where there is nothing else below memory.
    fn only_hdfs(&self) -> Option<&HdfsStore> {
        self.tiers.as_ref().filter(|tiers| tiers.local.is_none())?.hdfs.as_deref()
    }

    fn look_at_stores(&self, known: &mut Option<&'static str>) {
        let min_disks = self.live.min_disks();
        let too_few_disks = self.local().is_some_and(|store| store.available_disks() < min_disks);
        let complaint = if too_few_disks {
            Some("fewer disks take data than localfile_store.healthy_check_min_disks")
        } else if self.only_hdfs().is_some_and(HdfsStore::all_failing) {
            Some("no remote store works, and there is nothing else below memory")
        } else {
            None
        };
        if complaint == *known {
            return;
        }
        *known = complaint;
        match complaint {
            Some(complaint) => tracing::error!(complaint, "the worker is unhealthy"),
            None => tracing::info!("the stores take data again"),
        }
        self.service.status().set_unhealthy(complaint.is_some());
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
