//! Metrics of the embedded coordinator, with the names of the Java coordinator
//! (`CoordinatorMetrics`) except for one. [`super::EmbeddedCoordinator`] updates the gauges in its
//! sweeps.

use std::collections::BTreeMap;

use prometheus::{IntCounter, IntGauge, IntGaugeVec, Registry};

use super::nodes::NodeCounts;
use uniffle_base::metrics::{self, clamped};

metrics::table! {
    #[derive(Clone)]
    pub(super) struct CoordinatorCounts {
        active_servers: IntGauge = "active_server_num", "Workers available for assignment";
        lost_servers: IntGauge = "lost_server_num", "Workers lost after missing heartbeats";
        total_servers: IntGauge = "total_server_num", "Workers with current heartbeats";
        excluded_servers: IntGauge = "exclude_server_num", "Ids on the exclude list";
        unhealthy_servers: IntGauge = "unhealthy_server_num", "Workers that report themselves unhealthy";
        running_apps: IntGauge = "running_app_num", "Registered applications";
        apps_by_user: IntGaugeVec["user_name"] = "app_num", "Applications per user";
        // Java uses `total_app_num` in the shuffle server too. Here both share a registry.
        apps_total: IntCounter = "coordinator_total_app_num", "Applications registered since start";
        access_requests_total: IntCounter = "total_access_request", "Calls of accessCluster";
        candidates_denied_total: IntCounter = "total_candidates_denied_request",
            "Calls of accessCluster refused because too few active workers have the tags";
        load_denied_total: IntCounter = "total_load_denied_request",
            "Calls of accessCluster refused because too few workers have enough free memory";
        quota_denied_total: IntCounter = "total_quota_denied_request",
            "Calls of accessCluster refused because the user has too many applications";
    }
}

// `fill` replaces `{host}` in the name.
metrics::table! {
    struct StorageMetrics each fill {
        apps: IntGauge = "remote_storage_in_used_{host}", "Applications assigned to this remote storage";
    }
}

/// The registered metrics.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    pub(super) counts: CoordinatorCounts,
    /// One gauge per host, with the indexes of the storages on that host.
    storage_uses: Vec<(IntGauge, Vec<usize>)>,
}

impl Metrics {
    /// Registers the metrics. `storage_hosts[i]` is the host of remote storage `i`.
    pub(super) fn new(registry: &Registry, storage_hosts: &[String]) -> Result<Self, prometheus::Error> {
        let mut by_host: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (at, host) in storage_hosts.iter().enumerate() {
            by_host.entry(metric_suffix(host)).or_default().push(at);
        }
        let mut storage_uses = Vec::with_capacity(by_host.len());
        for (host, storages) in by_host {
            storage_uses.push((StorageMetrics::new(registry, &[("{host}", &host)])?.apps, storages));
        }
        Ok(Self { counts: CoordinatorCounts::new(registry)?, storage_uses })
    }

    pub(crate) fn described() -> Vec<metrics::Description> {
        [CoordinatorCounts::described(), StorageMetrics::described(&[])].concat()
    }

    pub(super) fn set_nodes(&self, counts: NodeCounts) {
        self.counts.active_servers.set(clamped(counts.active));
        self.counts.lost_servers.set(clamped(counts.lost));
        self.counts.total_servers.set(clamped(counts.total));
        self.counts.excluded_servers.set(clamped(counts.excluded));
        self.counts.unhealthy_servers.set(clamped(counts.unhealthy));
    }

    pub(super) fn set_apps(&self, running: usize, users: &BTreeMap<String, u64>, storage_uses: &[u64]) {
        self.counts.running_apps.set(clamped(running));
        self.counts.apps_by_user.reset();
        for (user, count) in users {
            self.counts.apps_by_user.with_label_values(&[user.as_str()]).set(clamped(*count));
        }
        for (gauge, storages) in &self.storage_uses {
            let uses: u64 = storages.iter().filter_map(|&at| storage_uses.get(at)).sum();
            gauge.set(clamped(uses));
        }
    }
}

/// Converts a host to the suffix of a metric name.
fn metric_suffix(host: &str) -> String {
    host.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_java_name_is_exported_once() {
        let registry = Registry::new();
        let hosts = ["nn-1.example".to_owned(), "nn-1.example".to_owned()];
        let metrics = Metrics::new(&registry, &hosts).unwrap();
        metrics.set_apps(2, &BTreeMap::from([("u".to_owned(), 2)]), &[1, 2]);
        let families = registry.gather();
        let mut names: Vec<&str> = families.iter().map(prometheus::proto::MetricFamily::name).collect();
        names.sort_unstable();
        let expected = [
            "active_server_num",
            "app_num",
            "coordinator_total_app_num",
            "exclude_server_num",
            "lost_server_num",
            "remote_storage_in_used_nn_1_example",
            "running_app_num",
            "total_access_request",
            "total_candidates_denied_request",
            "total_load_denied_request",
            "total_quota_denied_request",
            "total_server_num",
            "unhealthy_server_num",
        ];
        assert_eq!(names, expected);
        assert_eq!(metrics.storage_uses[0].0.get(), 3);
    }
}
