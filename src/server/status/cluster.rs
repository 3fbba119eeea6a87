//! Cluster-wide answers of the embedded coordinator.
//!
//! `/api/v1/cluster` is rendered at most once per second, however many clients poll it.
//! An explanation of an application queries at most 1,000 workers. At most [`EXPLAINING_MAX`]
//! explanations run at a time.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::clock::Instant;
use crate::listeners::http::api::cluster::{ClusterApp, ClusterDisk, ClusterModel, ClusterNode};
use crate::listeners::http::{Everywhere, NotExplained};
use crate::proto::storage_info::StorageStatus;
use crate::proto::{ApplicationInfo, ServerStatus, StorageInfo};
use uniffle_coordinator::embedded::{ClusterView, EmbeddedCoordinator, KnownNode};

use crate::server::tls::WorkerTrust;

/// Maximum age of the rendered text.
const AGE_MAX: Duration = Duration::from_secs(1);

/// Maximum number of explanations built at a time, each from several answers of 128 KiB. Further
/// requests wait.
const EXPLAINING_MAX: usize = 2;

/// Maximum number of explanation requests, including waiting ones. Each takes at most 8 s, so the
/// last one is answered within the 30 s of a call. The bound leaves the listener connections for
/// the workers' own queries to one another.
const ASKING_MAX: usize = 6;

/// The latest rendered page, and limits of explanations.
#[derive(Debug)]
pub(in crate::server) struct ClusterPage {
    coordinator: EmbeddedCoordinator,
    latest: Mutex<Option<(Instant, Bytes)>>,
    explaining: Arc<Semaphore>,
    asking: Arc<Semaphore>,
    worker_trust: WorkerTrust,
}

impl ClusterPage {
    pub(in crate::server) fn new(coordinator: EmbeddedCoordinator, worker_trust: WorkerTrust) -> Self {
        let [explaining, asking] = [EXPLAINING_MAX, ASKING_MAX].map(|most| Arc::new(Semaphore::new(most)));
        Self { coordinator, latest: Mutex::default(), explaining, asking, worker_trust }
    }

    /// Asks the workers about an application, first those that report it in their heartbeats.
    pub(super) fn explain(&self, app: &str) -> Everywhere {
        let (coordinator, places) = (self.coordinator.clone(), Arc::clone(&self.explaining));
        let (app, worker_trust) = (app.to_owned(), self.worker_trust.clone());
        let asking = Arc::clone(&self.asking).try_acquire_owned();
        async move {
            let _asking = asking.map_err(|_| {
                NotExplained::Unavailable(format!(
                    "{ASKING_MAX} such requests are already in progress; retry later"
                ))
            })?;
            let _place =
                places.acquire_owned().await.map_err(|error| NotExplained::Unavailable(error.to_string()))?;
            let trust = worker_trust.trust();
            let explained = uniffle_ctl::explain(&app, workers(coordinator.cluster(), &app), trust.as_ref());
            explained.await.map_err(|unknown| match unknown.unanswered {
                0 => NotExplained::Unknown(unknown.to_string()),
                _ => NotExplained::Unavailable(unknown.to_string()),
            })
        }
        .boxed()
    }

    /// Returns the cluster as JSON, at most one second old.
    pub(in crate::server) fn text(&self) -> Bytes {
        // Locked during the rendering, so that concurrent callers render once.
        let mut latest = self.latest.lock();
        if let Some((_, text)) = latest.as_ref().filter(|(made, _)| made.elapsed() < AGE_MAX) {
            return text.clone();
        }
        let cluster = cluster(self.coordinator.cluster());
        // Fails only for maps whose keys are not strings.
        let text = Bytes::from(serde_json::to_vec(&cluster).unwrap_or_default());
        *latest = Some((Instant::now(), text.clone()));
        text
    }
}

fn workers(view: ClusterView, app: &str) -> Vec<uniffle_ctl::WorkerAddress> {
    let lists_app = |known: &KnownNode| known.node.details.apps.iter().any(|it| it.app_id == app);
    let mut nodes = view.nodes;
    nodes.sort_by_cached_key(|known| Reverse(lists_app(known)));
    let worker = |KnownNode { node, .. }: KnownNode| uniffle_ctl::WorkerAddress {
        id: node.server.id,
        host: node.server.ip,
        // A worker without an HTTP port is asked at port 0: the query fails, and the error names
        // the worker.
        port: u16::try_from(node.server.jetty_port).unwrap_or(0),
    };
    nodes.into_iter().map(worker).collect()
}

fn cluster(view: ClusterView) -> ClusterModel {
    let parts = view.nodes.iter().flat_map(|known| {
        let node = &known.node.server.id;
        known.node.details.apps.iter().map(move |app| part(app, node))
    });
    let (nodes, is_starting) = (view.nodes.iter().map(node).collect(), view.is_starting);
    ClusterModel { is_starting, ..ClusterModel::new(nodes, view.lost, view.awaited, parts) }
}

fn node(known: &KnownNode) -> ClusterNode {
    let node = &known.node;
    ClusterNode {
        id: node.server.id.clone(),
        ip: node.server.ip.clone(),
        grpc_port: node.server.port,
        http_port: node.server.jetty_port,
        state: match node.status {
            ServerStatus::Active if known.is_excluded => "excluded",
            ServerStatus::Active => "active",
            ServerStatus::Decommissioning => "decommissioning",
            ServerStatus::Decommissioned => "decommissioned",
            ServerStatus::Lost | ServerStatus::Unhealthy | ServerStatus::Excluded => "unhealthy",
        },
        version: node.details.version.clone(),
        tags: node.tags.clone(),
        silent_seconds: known.silent_for.as_secs_f64(),
        used_bytes: node.used_bytes,
        reserved_bytes: node.details.reserved_bytes,
        available_bytes: node.available_bytes,
        received_bytes: node.details.apps.iter().map(|app| unsigned(app.total_size)).sum(),
        unfinished_batches: node.details.unfinished_batches,
        disks_used_bytes: node.details.disks_used_bytes,
        disks: node.details.disks.iter().map(disk).collect(),
        apps: node.details.apps.len(),
        is_cut: node.details.is_cut,
    }
}

fn disk(info: &StorageInfo) -> ClusterDisk {
    ClusterDisk {
        mount: info.mount_point.clone(),
        condition: match info.status() {
            StorageStatus::Unknown => "unknown",
            StorageStatus::Normal => "normal",
            StorageStatus::Unhealthy => "unhealthy",
            StorageStatus::Overused => "overused",
        },
        capacity_bytes: unsigned(info.capacity),
        used_bytes: unsigned(info.used_bytes),
        failures: unsigned(info.num_of_writing_failures),
    }
}

fn part(app: &ApplicationInfo, node: &str) -> ClusterApp {
    ClusterApp {
        app: app.app_id.clone(),
        nodes: vec![node.to_owned()],
        partitions: unsigned(app.partition_num),
        in_memory_bytes: unsigned(app.memory_size),
        local_bytes: unsigned(app.local_total_size),
        remote_bytes: unsigned(app.hadoop_total_size),
        total_bytes: unsigned(app.total_size),
    }
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use uniffle_base::budget::Heap;
    use uniffle_coordinator::embedded::EmbeddedConfig;

    use super::*;

    /// Regression test: a hundred waiting requests held all connections of the listener, including
    /// those of the workers' own queries.
    #[tokio::test]
    async fn excess_explanations_are_refused() {
        let coordinator =
            EmbeddedCoordinator::new(EmbeddedConfig::default(), &Heap::new(64 << 20), &Registry::new());
        let page = ClusterPage::new(coordinator.unwrap(), WorkerTrust::default());
        let mut asking: Vec<_> = (0..ASKING_MAX).map(|_| page.explain("app")).collect();
        let refused = page.explain("app").await.unwrap_err();
        assert!(matches!(&refused, NotExplained::Unavailable(why) if why.contains("already")), "{refused:?}");
        for answer in futures::future::join_all(asking.drain(..)).await {
            assert!(matches!(answer, Err(NotExplained::Unknown(_))), "{answer:?}");
        }
        assert!(matches!(page.explain("app").await, Err(NotExplained::Unknown(_))));
    }
}
