//! The shape of `/api/v1/cluster`: every node as its heartbeats tell it, and the applications of all of them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

/// Applications listed, and nodes that went silent.
const LISTED_MAX: usize = 1_000;

/// What one coordinator knows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cluster {
    /// Nodes alive, by id.
    pub nodes: Vec<ClusterNode>,
    /// Ids of nodes that went silent, the first thousand.
    pub lost: Vec<String>,
    /// Applications that nodes tell of.
    pub app_count: usize,
    /// The thousand largest of them.
    pub apps: Vec<ClusterApp>,
}

/// A node alive.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterNode {
    /// Server id.
    pub id: String,
    /// Address.
    pub ip: String,
    /// gRPC.
    pub grpc_port: i32,
    /// Metrics and status; 0 = not told.
    pub http_port: i32,
    /// `active`, `unhealthy`, `decommissioning`, `decommissioned`, or `excluded` by configuration.
    pub state: &'static str,
    /// Its version, where it tells.
    pub version: String,
    /// All tags.
    pub tags: Vec<String>,
    /// Since its last heartbeat.
    pub silent_seconds: f64,
    /// Memory in use, tickets included.
    pub used_bytes: u64,
    /// Of that, promised to tickets.
    pub reserved_bytes: u64,
    /// Free memory.
    pub available_bytes: u64,
    /// Batches on their way to disks.
    pub unfinished_batches: u64,
    /// Its disks.
    pub disks: Vec<ClusterDisk>,
    /// Applications that it tells of.
    pub apps: usize,
    /// There are more disks or applications than the coordinator has room for.
    pub is_cut: bool,
}

/// A disk of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterDisk {
    /// Mount point.
    pub mount: String,
    /// `normal`, `unhealthy`, `overused` or `unknown`.
    pub condition: &'static str,
    /// Its size.
    pub capacity_bytes: u64,
    /// In use, by anyone.
    pub used_bytes: u64,
    /// Writes that failed.
    pub failures: u64,
}

/// An application, over all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterApp {
    /// Its id.
    pub app: String,
    /// Nodes that have data of it, or a registration.
    pub nodes: Vec<String>,
    /// Its partitions.
    pub partitions: u64,
    /// Payload in memory.
    pub in_memory_bytes: u64,
    /// Payload on the nodes' disks.
    pub local_bytes: u64,
    /// Payload in remote stores.
    pub remote_bytes: u64,
    /// Payload received.
    pub total_bytes: u64,
}

impl ClusterApp {
    fn add(&mut self, other: Self) {
        self.nodes.extend(other.nodes);
        for (sum, part) in [
            (&mut self.partitions, other.partitions),
            (&mut self.in_memory_bytes, other.in_memory_bytes),
            (&mut self.local_bytes, other.local_bytes),
            (&mut self.remote_bytes, other.remote_bytes),
            (&mut self.total_bytes, other.total_bytes),
        ] {
            *sum = sum.saturating_add(part);
        }
    }
}

impl Cluster {
    /// Puts together what single nodes tell.
    pub fn new(
        nodes: Vec<ClusterNode>,
        mut lost: Vec<String>,
        parts: impl Iterator<Item = ClusterApp>,
    ) -> Self {
        let mut sums = BTreeMap::<String, ClusterApp>::new();
        for part in parts {
            match sums.get_mut(&part.app) {
                Some(sum) => sum.add(part),
                None => drop(sums.insert(part.app.clone(), part)),
            }
        }
        let app_count = sums.len();
        let mut apps: Vec<_> = sums.into_values().collect();
        apps.sort_by_key(|app| Reverse(app.total_bytes));
        apps.truncate(LISTED_MAX);
        lost.truncate(LISTED_MAX);
        Self { nodes, lost, app_count, apps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_on_two_nodes_is_one_and_the_largest_is_first() {
        let part = |app: &str, node: &str, total_bytes| ClusterApp {
            app: app.to_owned(),
            nodes: vec![node.to_owned()],
            partitions: 2,
            in_memory_bytes: 0,
            local_bytes: u64::MAX,
            remote_bytes: 0,
            total_bytes,
        };
        let parts = [part("small", "a", 5), part("large", "a", 3), part("large", "b", 4)];
        let cluster = Cluster::new(Vec::new(), Vec::new(), parts.into_iter());
        let shown: Vec<_> = cluster.apps.iter().map(|app| (app.app.as_str(), app.total_bytes)).collect();
        assert_eq!((cluster.app_count, shown), (2, vec![("large", 7), ("small", 5)]));
        let large = &cluster.apps[0];
        assert_eq!(
            (large.nodes.as_slice(), large.partitions, large.local_bytes),
            (&["a".into(), "b".into()][..], 4, u64::MAX)
        );
    }
}
