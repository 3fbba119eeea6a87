//! The worker's state at a point in time, and its conversion to a heartbeat message.
//!
//! Invariants: `isHealthy` is never set, because it would override `status`, which is always set
//! (docs/protocol.md §8.2). `netty_port` is -1 when the TCP listener is off, as in Java; riffle's
//! coordinator refuses that.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::task::JoinError;

use crate::proto;
use uniffle_base::metrics::clamped;

/// State of a worker at a point in time. Numbers beyond `i64` are saturated in the message.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeReport {
    /// Server id; see [`super::identity::server_id`].
    pub id: String,
    /// Address that clients connect to.
    pub ip: IpAddr,
    /// Port of the gRPC listener, as bound.
    pub grpc_port: u16,
    /// Bound port of the TCP listener, or `None` if it is off.
    pub netty_port: Option<u16>,
    /// Bound port of the HTTP listener, or `None` if it is off.
    pub http_port: Option<u16>,
    /// Tags; see [`super::identity::tags`].
    pub tags: Vec<String>,
    /// Status of the worker.
    pub status: proto::ServerStatus,
    /// Bytes in use, including pre-allocated ones.
    pub used_memory_bytes: u64,
    /// Bytes reserved by tickets.
    pub pre_allocated_memory_bytes: u64,
    /// Capacity minus used bytes.
    pub available_memory_bytes: u64,
    /// Batches being flushed.
    pub events_in_flush: u32,
    /// Disks by mount point.
    pub storage: HashMap<String, proto::StorageInfo>,
    /// One entry for each of the largest applications, for dashboards.
    pub applications: Vec<proto::ApplicationInfo>,
    /// Version of the worker.
    pub version: String,
    /// Commit it was built from.
    pub git_commit: String,
    /// Start of the process, Unix milliseconds.
    pub start_time_ms: i64,
    /// Figures for dashboards, by the name of their metric.
    pub display_metrics: HashMap<String, String>,
}

impl NodeReport {
    /// Creates the report of an active node without figures.
    pub fn new(id: String, ip: IpAddr, grpc_port: u16) -> Self {
        Self {
            id,
            ip,
            grpc_port,
            netty_port: None,
            http_port: None,
            tags: Vec::new(),
            status: proto::ServerStatus::Active,
            used_memory_bytes: 0,
            pre_allocated_memory_bytes: 0,
            available_memory_bytes: 0,
            events_in_flush: 0,
            storage: HashMap::new(),
            applications: Vec::new(),
            version: String::new(),
            git_commit: String::new(),
            start_time_ms: 0,
            display_metrics: HashMap::new(),
        }
    }

    /// Converts the report to a heartbeat message.
    pub fn into_request(self) -> proto::ShuffleServerHeartBeatRequest {
        let server_id = proto::ShuffleServerId {
            id: self.id,
            ip: self.ip.to_string(),
            port: i32::from(self.grpc_port),
            // Java uses -1 for a listener that is off.
            netty_port: self.netty_port.map_or(-1, i32::from),
            jetty_port: self.http_port.map_or(0, i32::from),
        };
        proto::ShuffleServerHeartBeatRequest {
            server_id: Some(server_id),
            used_memory: clamped(self.used_memory_bytes),
            pre_allocated_memory: clamped(self.pre_allocated_memory_bytes),
            available_memory: clamped(self.available_memory_bytes),
            event_num_in_flush: i32::try_from(self.events_in_flush).unwrap_or(i32::MAX),
            tags: self.tags,
            is_healthy: None,
            status: Some(i32::from(self.status)),
            storage_info: self.storage,
            version: Some(self.version),
            git_commit_id: Some(self.git_commit),
            start_time_ms: Some(self.start_time_ms),
            application_info: self.applications,
            display_metrics: self.display_metrics,
        }
    }
}

/// Source of the current [`NodeReport`], called once per heartbeat. It sums over all partitions,
/// which takes too long for a runtime thread.
#[derive(Clone)]
pub struct ReportSource(Arc<dyn Fn() -> NodeReport + Send + Sync>);

impl ReportSource {
    /// Wraps `report`.
    pub fn new(report: impl Fn() -> NodeReport + Send + Sync + 'static) -> Self {
        Self(Arc::new(report))
    }

    /// Returns the current state. Only for the start; later use [`ReportSource::now_on_thread`].
    pub fn now(&self) -> NodeReport {
        (self.0)()
    }

    /// Returns the current state, computed on a blocking thread.
    ///
    /// # Errors
    /// If the source panicked.
    pub async fn now_on_thread(&self) -> Result<NodeReport, JoinError> {
        let report = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || report()).await
    }
}

impl fmt::Debug for ReportSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReportSource")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_set_and_is_healthy_is_not() {
        let mut report = NodeReport::new("10.0.0.1-21100".into(), [10, 0, 0, 1].into(), 21100);
        report.status = proto::ServerStatus::Decommissioning;
        report.available_memory_bytes = u64::MAX;
        let request = report.into_request();
        assert_eq!(request.status, Some(1));
        assert_eq!(request.is_healthy, None);
        assert_eq!(request.available_memory, i64::MAX);
    }

    #[test]
    fn netty_port_is_minus_one_without_tcp() {
        let mut report = NodeReport::new("x".into(), [10, 0, 0, 1].into(), 21100);
        assert_eq!(report.clone().into_request().server_id.unwrap().netty_port, -1);
        report.netty_port = Some(21200);
        assert_eq!(report.into_request().server_id.unwrap().netty_port, 21200);
    }
}
