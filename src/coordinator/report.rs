//! A worker's state at one moment, and its translation into a heartbeat message.
//!
//! Invariant: `isHealthy` is never set (docs/protocol.md §8.2: it would override `status`, which is always set), and
//! `netty_port` is −1 when the TCP listener is off, as Java's (riffle's coordinator refuses it).

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::task::JoinError;

use crate::metrics::clamped;
use crate::proto;

/// One worker at one moment. Numbers are plain; those beyond `i64` are cut to it on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeReport {
    /// Server id, see [`super::identity::server_id`].
    pub id: String,
    /// Address that clients connect to.
    pub ip: IpAddr,
    /// Port of the gRPC listener, as bound.
    pub grpc_port: u16,
    /// Port of the TCP listener, as bound; `None` = off.
    pub netty_port: Option<u16>,
    /// Port of the HTTP listener, as bound; `None` = off.
    pub http_port: Option<u16>,
    /// See [`super::identity::tags`].
    pub tags: Vec<String>,
    /// The one source of truth of the worker's state.
    pub status: proto::ServerStatus,
    /// Bytes in use, pre-allocated ones included.
    pub used_memory_bytes: u64,
    /// Bytes that tickets hold.
    pub pre_allocated_memory_bytes: u64,
    /// Capacity minus used.
    pub available_memory_bytes: u64,
    /// Flush batches on their way.
    pub events_in_flush: u32,
    /// By mount point.
    pub storage: HashMap<String, proto::StorageInfo>,
    /// One entry per application, for dashboards.
    pub applications: Vec<proto::ApplicationInfo>,
    /// Version of the worker.
    pub version: String,
    /// Commit it was built from.
    pub git_commit: String,
    /// Start of the process, Unix milliseconds.
    pub start_time_ms: i64,
    /// Figures for dashboards, by the names of Java's metrics.
    pub display_metrics: HashMap<String, String>,
}

impl NodeReport {
    /// An active node without any figures; a start for the composition root and for tests.
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

    /// As a heartbeat message.
    pub fn into_request(self) -> proto::ShuffleServerHeartBeatRequest {
        let server_id = proto::ShuffleServerId {
            id: self.id,
            ip: self.ip.to_string(),
            port: i32::from(self.grpc_port),
            // Java's word for a listener that is off.
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

/// Where the current [`NodeReport`] comes from; called once per heartbeat. It sums over all partitions of the worker, which are
/// too many for a runtime thread.
#[derive(Clone)]
pub struct ReportSource(Arc<dyn Fn() -> NodeReport + Send + Sync>);

impl ReportSource {
    /// Wraps `report`.
    pub fn new(report: impl Fn() -> NodeReport + Send + Sync + 'static) -> Self {
        Self(Arc::new(report))
    }

    /// The state of this moment. For a start; beside requests it is [`ReportSource::now_aside`].
    pub fn now(&self) -> NodeReport {
        (self.0)()
    }

    /// [`ReportSource::now`] on a blocking thread.
    ///
    /// # Errors
    /// It panicked.
    pub async fn now_aside(&self) -> Result<NodeReport, JoinError> {
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
    fn n16_netty_port_is_javas_minus_one_when_off() {
        let mut report = NodeReport::new("x".into(), [10, 0, 0, 1].into(), 21100);
        assert_eq!(report.clone().into_request().server_id.unwrap().netty_port, -1);
        report.netty_port = Some(21200);
        assert_eq!(report.into_request().server_id.unwrap().netty_port, 21200);
    }
}
