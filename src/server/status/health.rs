//! Watches the worker's state and notifies the coordinators at once when it changes, or when the
//! last application ends.
//!
//! Unless it is decommissioned, drained or stops for good, the worker is UNHEALTHY while the
//! primary tier complains (too few writable disks, or the object store) or all tiers do. Every
//! other change of state happens in `service`, such as decommissioning by an operator. This module
//! only observes it.

use std::sync::Arc;
use std::time::Duration;

use futures::future::select_all;

use crate::clock::sleep;
use crate::service::{Service, WorkerState};
use crate::store::{DiskCondition, DiskInfo, TierRole, Tiers};

/// Poll interval for tiers that do not notify of changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

use crate::server::settings::RuntimeSettings;

/// The sources of state changes.
#[derive(Debug)]
pub(in crate::server) struct Watch {
    pub(in crate::server) service: Arc<Service>,
    pub(in crate::server) live: Arc<RuntimeSettings>,
}

impl Watch {
    /// Runs until `stop`. Calls `announce` after each change of the state or the tags, and when the
    /// last application has ended.
    pub(in crate::server) async fn run(self, announce: impl Fn(), stop: impl Future<Output = ()>) {
        let tiers = self.service.tiers().clone();
        let mut changes: Vec<_> = tiers.maintained().filter_map(|tier| tier.state_changes()).collect();
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
                () = sleep(POLL_INTERVAL), if some_are_silent => {}
            }
        }
    }

    fn look_at(&self, tiers: &Tiers, known: &mut Option<&'static str>) {
        let complaint = complaint(tiers);
        let none_takes_data = tiers.iter().any(|tier| without_disks(&tier.state().disks).is_some());
        self.service.status().set_without_room(complaint.is_some() || none_takes_data);
        if complaint == *known {
            return;
        }
        *known = complaint;
        match complaint {
            Some(complaint) => tracing::error!(complaint, "the worker is unhealthy"),
            None => tracing::info!("the tiers accept data again"),
        }
        self.service.status().set_unhealthy(complaint.is_some());
    }
}

/// Returns why the tiers make the worker unhealthy: the primary tier complains, or all tiers do.
fn complaint(tiers: &Tiers) -> Option<&'static str> {
    let complaints = || tiers.iter().map(|tier| (tier.capability().role, tier.state().complaint));
    let primary = complaints().find_map(|(role, complaint)| complaint.filter(|_| role == TierRole::Primary));
    let all = || complaints().map(|(_, complaint)| complaint).collect::<Option<Vec<_>>>();
    primary.or_else(|| all()?.first().copied())
}

/// Returns why clients should not be sent here, or `None` if the worker is ready.
pub(super) fn not_ready(service: &Service) -> Option<String> {
    if service.status().is_stopping() {
        return Some("stopping".to_owned());
    }
    let without_disks = || service.tiers().iter().find_map(|tier| without_disks(&tier.state().disks));
    match service.status().state() {
        WorkerState::Active => without_disks(),
        WorkerState::Unhealthy => {
            let why = without_disks().or_else(|| complaint(service.tiers()).map(str::to_owned));
            // No cause is left: the next poll makes the worker active again.
            Some(why.map_or_else(|| "unhealthy".to_owned(), |why| format!("unhealthy: {why}")))
        }
        WorkerState::Decommissioning | WorkerState::Decommissioned => Some("decommissioning".to_owned()),
    }
}

/// Returns the risks of data loss of a worker that is ready.
pub(super) fn risks(service: &Service) -> Vec<String> {
    let shuffles = service.memory().unprotected_shuffles();
    let unprotected = (shuffles > 0).then(|| {
        format!(
            "memory_store.backing is full; a kill would lose blocks in memory of {shuffles} shuffles; free \
             space there"
        )
    });
    let doubt = |doubt| format!("a start or upgrade would refuse results that are served now: {doubt}");
    let doubts = service.tiers().metadata().and_then(|tier| tier.successor_doubts()).map(doubt);
    unprotected.into_iter().chain(service.memory().backing_fault()).chain(doubts).collect()
}

/// Returns why no disk of `disks` takes writes. Returns `None` if there are no disks, or one takes
/// writes. Independent of `healthy_check_min_disks`: the disks take blocks only in the final flush.
/// Unless one is only full, registrations and reports are refused, too, because the metadata log
/// cannot be written.
fn without_disks(disks: &[DiskInfo]) -> Option<String> {
    if disks.is_empty() || disks.iter().any(|disk| disk.condition == DiskCondition::Healthy) {
        return None;
    }
    let each = disks.iter().map(|disk| {
        let path = disk.path.display();
        match (disk.condition, &disk.fault) {
            (DiskCondition::Full, Some(why)) => format!("{path} is full: {why}"),
            (DiskCondition::Full, None) => format!("{path} is full: free space there"),
            (condition, fault) => {
                let (is, remedy) = match condition {
                    DiskCondition::ReadOnly => ("read-only", "mount it writable"),
                    DiskCondition::Detached => ("another file system than at start", "mount it again"),
                    DiskCondition::Hung => ("hung", "check its device"),
                    _ => ("broken", "remove the cause, or replace the disk"),
                };
                let fault = fault.as_ref().map(|fault| format!(" ({fault})")).unwrap_or_default();
                format!("{path} is {is}{fault}: {remedy}")
            }
        }
    });
    Some(format!("no data directory is writable: {}", each.collect::<Vec<_>>().join("; ")))
}

#[cfg(test)]
mod tests {
    use uniffle_io::{Media, Mount};

    use super::*;

    fn disk(path: &str, condition: DiskCondition, fault: Option<&str>) -> DiskInfo {
        DiskInfo {
            path: path.into(),
            uuid: uuid::Uuid::nil(),
            condition,
            fault: fault.map(str::to_owned),
            failures: 0,
            faults: 0,
            mount: Mount { point: path.into(), media: Media::Ssd },
            total_bytes: 1,
            free_bytes: 1,
            file_system: 0,
            used_bytes: 0,
            in_flight_bytes: 0,
        }
    }

    #[test]
    fn worker_without_writable_directory_is_not_ready() {
        use DiskCondition::{Broken, Detached, Full, Healthy, Hung, ReadOnly};
        assert_eq!(without_disks(&[]), None, "a worker without local disks must have no disk status");
        let read_only = disk("/a", ReadOnly, Some("Read-only file system"));
        assert_eq!(without_disks(&[read_only.clone(), disk("/b", Healthy, None)]), None);
        let why = without_disks(&[read_only, disk("/b", Full, None)]).unwrap();
        assert_eq!(
            why,
            "no data directory is writable: /a is read-only (Read-only file system): mount it writable; \
             /b is full: free space there"
        );
        for condition in [Detached, Hung, Broken] {
            assert!(without_disks(&[disk("/a", condition, None)]).unwrap().contains("/a is "));
        }
    }
}
