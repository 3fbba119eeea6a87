//! Settings of the embedded coordinator, and the remote storages that it assigns.

use std::collections::BTreeMap;
use std::time::Duration;

use super::access::AccessRules;
use super::assign::{NodeOrder, PartitionSelection};
use super::nodes::NODES_MAX;
use crate::proto;
use uniffle_base::schema::kind::{
    DAY, HOUR, Kind, SECOND, count, flag, list, optional, parsed, seconds, table, word,
};
use uniffle_base::schema::network::{Network, network};
use uniffle_base::schema::section;

/// Upper limit of the key for ranges per assignment, counted per replica: Spark 0.9+ allows 2^20
/// partitions (`rss.blockId.maxPartitions`). Such an answer takes about 300 MB of heap.
const RANGES_MAX: u64 = 1 << 20;

/// A remote storage for applications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppStorage {
    /// URL, such as `hdfs://nameservice/uniffle`.
    pub path: String,
    /// Hadoop settings that clients add for it.
    pub conf: Vec<(String, String)>,
}

impl AppStorage {
    /// Returns the host of the URL, without port.
    #[must_use]
    pub fn host(&self) -> &str {
        let rest = self.path.split_once("://").map_or(self.path.as_str(), |(_, rest)| rest);
        let authority = rest.split('/').next().unwrap_or_default();
        authority.split(':').next().unwrap_or_default()
    }

    /// Parses settings in Java's form, `k=v,k=v`. A part without `=` continues the value before it,
    /// because values may contain commas.
    #[must_use]
    pub fn parse_conf(text: &str) -> Vec<(String, String)> {
        let mut conf: Vec<(String, String)> = Vec::new();
        for part in text.split(',') {
            match (part.split_once('='), conf.last_mut()) {
                (Some((key, value)), _) => conf.push((key.trim().to_owned(), value.trim().to_owned())),
                (None, Some((_, value))) => {
                    value.push(',');
                    value.push_str(part.trim());
                }
                (None, None) => {}
            }
        }
        conf
    }

    pub(super) fn to_message(&self) -> proto::RemoteStorage {
        let item = |(key, value): &(String, String)| proto::RemoteStorageConfItem {
            key: key.clone(),
            value: value.clone(),
        };
        proto::RemoteStorage {
            path: self.path.clone(),
            remote_storage_conf: self.conf.iter().map(item).collect(),
        }
    }
}

section! {
    /// Settings of the embedded coordinator.
    #[table(
        "embedded_coordinator",
        "The coordinator inside the worker.\n\
         With enable = true and a coordinator_quorum that lists all workers with a coordinator, \
         every worker reports to all of them. Clients fail over, without a separate coordinator \
         process.\n\
         Heartbeats are not authenticated, and a worker that joins receives data of applications: \
         list the workers' networks in worker_networks and no others. At most 16 workers of this \
         machine join from outside these networks.\n\
         A refused worker gets an error with this key, which is also logged.\n\
         An assignment is also refused if its response would exceed half of \
         memory_store.heap_capacity, at about 300 bytes per range: 115,000 ranges with a capacity \
         of 256 MB (71 MiB of heap). Until then it waits up to 10 s for other responses."
    )]
    pub struct EmbeddedConfig {
        /// Run the embedded coordinator. Default: true without a coordinator_quorum.
        #[key("embedded_coordinator.enable", optional(flag()), Restart, example "true")]
        pub enable: Option<bool> = None,
        /// Networks whose workers may join, besides this machine's. A heartbeat's source and its
        /// announced address must both match.
        #[key("embedded_coordinator.worker_networks", list(64, network()), Restart)]
        pub worker_networks: Vec<Network> = Vec::new(),
        /// A worker without a heartbeat for this long is lost; must exceed
        /// heartbeat_interval_seconds.
        #[key("embedded_coordinator.node_timeout_sec", seconds(SECOND / 10..=HOUR), Restart)]
        pub node_timeout: Duration = 30 * SECOND,
        /// An application without a heartbeat for this long expires.
        #[key("embedded_coordinator.app_timeout_sec", seconds(SECOND..=DAY), Restart)]
        pub app_timeout: Duration = 60 * SECOND,
        /// Maximum number of workers assigned to one shuffle.
        #[key("embedded_coordinator.shuffle_nodes_max", count(1..=NODES_MAX), Restart)]
        pub shuffle_nodes_max: usize = 9,
        /// Preferred workers: PARTITION_BALANCE = most free memory per assigned partition, BASIC =
        /// most free memory.
        #[key("embedded_coordinator.assignment_strategy", word(), Restart)]
        pub node_order: NodeOrder = NodeOrder::PartitionBalance,
        /// Distribution of partitions: CONTINUOUS = neighbours on one worker, ROUND = round robin.
        #[key("embedded_coordinator.select_partition_strategy", word(), Restart)]
        pub partition_selection: PartitionSelection = PartitionSelection::Continuous,
        /// Maximum partition ranges of an assignment, times replicas. Larger assignments are
        /// refused.
        #[key("embedded_coordinator.assignment_ranges_max", count(1..=RANGES_MAX), Restart)]
        pub ranges_max: u64 = 1 << 17,
        /// Ids of workers that get no new shuffles, such as "10.0.0.1-21100".
        #[key("embedded_coordinator.exclude_nodes", list(NODES_MAX, node_id()), Restart)]
        pub excluded_nodes: Vec<String> = Vec::new(),
        /// Access rules.
        #[section(AccessRules)]
        pub access: AccessRules,
        /// Remote storages for clients; the one with the fewest applications is assigned. Default:
        /// none.
        #[key(
            "embedded_coordinator.remote_storage_path", list(64, remote_path()), Restart,
            example "[\"hdfs://namenode:8020/uniffle\"]"
        )]
        pub remote_storage_paths: Vec<String> = Vec::new(),
        /// Hadoop settings of a remote storage, by the host of its path, as "key=value,key=value".
        #[key(
            "embedded_coordinator.remote_storage_conf", table(64), Restart,
            example "{ namenode = \"dfs.client.use.datanode.hostname=true\" }"
        )]
        pub remote_storage_conf: BTreeMap<String, String> = BTreeMap::new(),
        /// Settings sent to every client; keys with dots need quotes.
        #[key(
            "embedded_coordinator.client_conf", table(256), Restart,
            example "{ \"rss.client.read.buffer.size\" = \"14m\" }"
        )]
        pub client_conf: BTreeMap<String, String> = BTreeMap::new(),
        /// Storage type sent to clients unless `client_conf` contains one.
        pub storage_type: String = "MEMORY_LOCALFILE".to_owned(),
    }
}

impl EmbeddedConfig {
    /// Returns the configured remote storages with their settings.
    #[must_use]
    pub fn remote_storages(&self) -> Vec<AppStorage> {
        let storage = |path: &String| {
            let mut storage = AppStorage { path: path.clone(), conf: Vec::new() };
            let conf = self.remote_storage_conf.get(storage.host());
            storage.conf = conf.map(|text| AppStorage::parse_conf(text)).unwrap_or_default();
            storage
        };
        self.remote_storage_paths.iter().map(storage).collect()
    }
}

fn node_id() -> Kind<String> {
    const BYTES_MAX: usize = 255;
    let is_plain = |c: char| !c.is_control() && !c.is_whitespace();
    let convert = move |text: &str| match (1..=BYTES_MAX).contains(&text.len()) && text.chars().all(is_plain)
    {
        true => Ok(text.to_owned()),
        false => Err("server ids such as \"10.0.0.1-21100\"".to_owned()),
    };
    parsed("server ids", convert)
}

fn remote_path() -> Kind<String> {
    let convert = |text: &str| match text.split_once("://") {
        Some((scheme, rest)) if !scheme.is_empty() && !rest.is_empty() => Ok(text.to_owned()),
        _ => Err("URIs such as \"hdfs://namenode:8020/uniffle\"".to_owned()),
    };
    parsed("URIs", convert)
}
