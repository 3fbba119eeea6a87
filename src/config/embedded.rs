//! `[embedded_coordinator]`: reading, checking and printing of its keys in one place.

use std::time::Duration;

use toml::{Table, Value};

use super::print::{duration, number, put};
use super::reader::{Reader, Unit};
use super::{Config, EmbeddedCoordinator};
use crate::coordinator::embedded::assign::{NodeOrder, PartitionSelection};
use crate::coordinator::embedded::{NODES_MAX, RemoteStorage};

const CLIENT_CONF_MAX: usize = 256;
const REMOTE_STORAGES_MAX: usize = 64;
const NODE_ID_BYTES_MAX: usize = 255;
const APPS_PER_USER_MAX: usize = 100_000;

const HOUR: Duration = Duration::from_secs(3600);

pub(super) fn read(reader: &mut Reader) -> EmbeddedCoordinator {
    let default = EmbeddedCoordinator::default();
    let second = Duration::from_secs(1);
    EmbeddedCoordinator {
        node_timeout: reader.duration(
            "embedded_coordinator.node_timeout_sec",
            default.node_timeout,
            Duration::from_millis(100)..=HOUR,
            Unit::Seconds,
        ),
        app_timeout: reader.duration(
            "embedded_coordinator.app_timeout_sec",
            default.app_timeout,
            second..=24 * HOUR,
            Unit::Seconds,
        ),
        shuffle_nodes_max: reader.count(
            "embedded_coordinator.shuffle_nodes_max",
            default.shuffle_nodes_max,
            1..=NODES_MAX,
        ),
        assignment_strategy: reader
            .text("embedded_coordinator.assignment_strategy", assignment_strategy)
            .unwrap_or_default(),
        select_partition_strategy: reader
            .text("embedded_coordinator.select_partition_strategy", select_partition_strategy)
            .unwrap_or_default(),
        exclude_nodes: reader
            .texts("embedded_coordinator.exclude_nodes", NODES_MAX, node_id)
            .unwrap_or_default(),
        access_min_nodes: reader.count(
            "embedded_coordinator.access_min_nodes",
            default.access_min_nodes,
            1..=NODES_MAX,
        ),
        access_min_memory_ratio: reader
            .ratio("embedded_coordinator.access_min_memory_ratio", default.access_min_memory_ratio),
        quota_apps_per_user: reader.count(
            "embedded_coordinator.quota_apps_per_user",
            default.quota_apps_per_user,
            0..=APPS_PER_USER_MAX,
        ),
        remote_storage_paths: reader
            .texts("embedded_coordinator.remote_storage_path", REMOTE_STORAGES_MAX, remote_path)
            .unwrap_or_default(),
        remote_storage_conf: reader
            .text_table("embedded_coordinator.remote_storage_conf", REMOTE_STORAGES_MAX),
        client_conf: reader.text_table("embedded_coordinator.client_conf", CLIENT_CONF_MAX),
    }
}

fn assignment_strategy(text: &str) -> Result<NodeOrder, String> {
    match text.to_ascii_uppercase().as_str() {
        "PARTITION_BALANCE" => Ok(NodeOrder::PartitionBalance),
        "BASIC" => Ok(NodeOrder::Basic),
        _ => Err("PARTITION_BALANCE or BASIC".to_owned()),
    }
}

fn select_partition_strategy(text: &str) -> Result<PartitionSelection, String> {
    match text.to_ascii_uppercase().as_str() {
        "CONTINUOUS" => Ok(PartitionSelection::Continuous),
        "ROUND" => Ok(PartitionSelection::Round),
        _ => Err("CONTINUOUS or ROUND".to_owned()),
    }
}

fn node_id(text: &str) -> Result<String, String> {
    let is_sound = |c: char| !c.is_control() && !c.is_whitespace();
    if text.is_empty() || text.len() > NODE_ID_BYTES_MAX || !text.chars().all(is_sound) {
        return Err("server ids such as \"10.0.0.1-21100\"".to_owned());
    }
    Ok(text.to_owned())
}

fn remote_path(text: &str) -> Result<String, String> {
    let has_scheme =
        text.split_once("://").is_some_and(|(scheme, rest)| !scheme.is_empty() && !rest.is_empty());
    if has_scheme {
        Ok(text.to_owned())
    } else {
        Err("URIs such as \"hdfs://namenode:8020/uniffle\"".to_owned())
    }
}

pub(super) fn check(reader: &mut Reader, config: &Config) {
    let section = &config.embedded_coordinator;
    if config.is_embedded() && section.node_timeout <= config.heartbeat_interval {
        // The worker's own reports come at that interval: it would be lost to itself.
        reader.refuse(
            "embedded_coordinator.node_timeout_sec",
            humantime::format_duration(section.node_timeout),
            "more than heartbeat_interval_seconds",
        );
    }
    let hosts: Vec<RemoteStorage> = section
        .remote_storage_paths
        .iter()
        .map(|path| RemoteStorage { path: path.clone(), conf: Vec::new() })
        .collect();
    for (host, conf) in &section.remote_storage_conf {
        let key = "embedded_coordinator.remote_storage_conf";
        if !hosts.iter().any(|storage| storage.host() == host) {
            reader.refuse(key, host, "hosts of embedded_coordinator.remote_storage_path");
        }
        if RemoteStorage::parse_conf(conf).is_empty() {
            reader.refuse(key, conf, "settings of the form \"key=value,key=value\"");
        }
    }
}

pub(super) fn print(section: &EmbeddedCoordinator) -> Table {
    let mut table = Table::new();
    put(&mut table, "node_timeout_sec", duration(section.node_timeout, 1));
    put(&mut table, "app_timeout_sec", duration(section.app_timeout, 1));
    put(&mut table, "shuffle_nodes_max", number(section.shuffle_nodes_max));
    let strategy = match section.assignment_strategy {
        NodeOrder::PartitionBalance => "PARTITION_BALANCE",
        NodeOrder::Basic => "BASIC",
    };
    put(&mut table, "assignment_strategy", strategy);
    let strategy = match section.select_partition_strategy {
        PartitionSelection::Continuous => "CONTINUOUS",
        PartitionSelection::Round => "ROUND",
    };
    put(&mut table, "select_partition_strategy", strategy);
    put(&mut table, "exclude_nodes", section.exclude_nodes.clone());
    put(&mut table, "access_min_nodes", number(section.access_min_nodes));
    put(&mut table, "access_min_memory_ratio", section.access_min_memory_ratio);
    put(&mut table, "quota_apps_per_user", number(section.quota_apps_per_user));
    put(&mut table, "remote_storage_path", section.remote_storage_paths.clone());
    let texts = |map: &std::collections::BTreeMap<String, String>| -> Table {
        map.iter().map(|(name, value)| (name.clone(), Value::from(value.clone()))).collect()
    };
    put(&mut table, "remote_storage_conf", texts(&section.remote_storage_conf));
    put(&mut table, "client_conf", texts(&section.client_conf));
    table
}
