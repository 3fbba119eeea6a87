//! Types of `/api/v1/cluster`: all nodes with their last heartbeats, and applications of all nodes.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

/// Maximum number of listed applications, of listed lost nodes and of listed awaited nodes.
const LISTED_MAX: usize = 1_000;

/// The cluster as known to one coordinator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterModel {
    /// Live nodes, sorted by id.
    pub nodes: Vec<ClusterNode>,
    /// Ids of lost nodes, at most a thousand.
    pub lost: Vec<String>,
    /// Number of applications that nodes report.
    pub app_count: usize,
    /// The thousand largest applications.
    pub apps: Vec<ClusterApp>,
    /// Ids of nodes that have sent no heartbeat since the coordinator restarted, at most a
    /// thousand. They become lost after the node timeout.
    pub awaited: Vec<String>,
    /// True for one heartbeat interval after a start without saved nodes: other nodes may have had
    /// no time to report.
    pub is_starting: bool,
}

/// A live node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterNode {
    /// Server id.
    pub id: String,
    /// Address.
    pub ip: String,
    /// Port of gRPC.
    pub grpc_port: i32,
    /// Port of metrics and status; 0 if not reported.
    pub http_port: i32,
    /// `active`, `unhealthy`, `decommissioning`, `decommissioned`, or `excluded` by configuration.
    pub state: &'static str,
    /// Version; empty if not reported.
    pub version: String,
    /// All tags.
    pub tags: Vec<String>,
    /// Seconds since the last heartbeat.
    pub silent_seconds: f64,
    /// Memory in use, including tickets.
    pub used_bytes: u64,
    /// Part of the used memory that tickets reserve.
    pub reserved_bytes: u64,
    /// Free memory.
    pub available_bytes: u64,
    /// Payload received from the applications that the node reports.
    pub received_bytes: u64,
    /// Batches being flushed.
    pub unfinished_batches: u64,
    /// Bytes of the node's data on its disks, as in `ctl status`; null if not reported.
    pub disks_used_bytes: Option<u64>,
    /// Disks of the node.
    pub disks: Vec<ClusterDisk>,
    /// Number of applications that the node reports.
    pub apps: usize,
    /// True if the coordinator left out some disks or applications of the node, to bound its own
    /// memory. Sums and counts do not include them.
    pub is_cut: bool,
}

/// A disk of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterDisk {
    /// Mount point.
    pub mount: String,
    /// `normal`, `unhealthy`, `overused` or `unknown`.
    pub condition: &'static str,
    /// Size of the disk.
    pub capacity_bytes: u64,
    /// Used bytes, including other programs' data.
    pub used_bytes: u64,
    /// Number of failures that the node reports. A worker counts all errors, also of reads.
    pub failures: u64,
}

/// An application, summed over all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterApp {
    /// Application id.
    pub app: String,
    /// Nodes that report the application.
    pub nodes: Vec<String>,
    /// Number of partitions.
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

impl ClusterModel {
    /// Combines the reports of single nodes.
    pub fn new(
        nodes: Vec<ClusterNode>,
        mut lost: Vec<String>,
        mut awaited: Vec<String>,
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
        awaited.truncate(LISTED_MAX);
        Self { nodes, lost, app_count, apps, awaited, is_starting: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn application_on_two_nodes_is_merged_and_sorted_by_size() {
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
        let cluster = ClusterModel::new(Vec::new(), Vec::new(), Vec::new(), parts.into_iter());
        let shown: Vec<_> = cluster.apps.iter().map(|app| (app.app.as_str(), app.total_bytes)).collect();
        assert_eq!((cluster.app_count, shown), (2, vec![("large", 7), ("small", 5)]));
        let large = &cluster.apps[0];
        assert_eq!(
            (large.nodes.as_slice(), large.partitions, large.local_bytes),
            (&["a".into(), "b".into()][..], 4, u64::MAX)
        );
    }
}
