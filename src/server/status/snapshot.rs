//! Snapshot of the worker's figures. Heartbeats, the status page, the API and the gauges of
//! applications render a [`NodeSnapshot`]. Other gauges are read from their owners.
//!
//! A heartbeat and a scrape take a new snapshot. The status page and the API reuse it for up to
//! [`AGE_MAX`], since anyone may poll them and a snapshot walks all partitions. Identity and
//! readiness are always current.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::IntGauge;

use crate::build::Build;
use crate::clock::Instant;
use crate::compat::http::NodeInfo;
use crate::listeners::http;
use crate::listeners::http::api::model::{
    AppTotals, Connections, Coordinator, DiskModel, Flush, HeapUse, MemoryModel, NodeModel, Process, Status,
    TicketsModel, TierModel, Totals,
};
use crate::runtime::RuntimeMetrics;
use crate::service::{AppStatistics, Incompleteness, QuotaUse, Service};
use crate::store::{DiskCondition, DiskInfo, HdfsState, ObjectStoreState};
use crate::telemetry::panic_count;
use uniffle_base::allocator::AllocatorMetrics;
use uniffle_base::budget::{Budget, HeapKind};
use uniffle_coordinator::NodeReport;
use uniffle_coordinator::heartbeat::{CoordinatorAddress, Link};
use uniffle_io::Media;

use super::cluster::ClusterPage;
use super::health;
use crate::server::settings::RuntimeSettings;
use crate::server::settings::reload::Reloader;

/// Maximum age of the figures on the status page and in the API.
const AGE_MAX: Duration = Duration::from_secs(1);

/// The worker's figures at one moment.
#[derive(Debug)]
pub(in crate::server) struct NodeSnapshot {
    taken: Instant,
    pub(in crate::server) memory: MemoryModel,
    pub(in crate::server) flush: Flush,
    pub(in crate::server) disks: Vec<DiskInfo>,
    pub(in crate::server) apps: Vec<AppStatistics>,
    quotas: Vec<QuotaUse>,
    lost_blocks: u64,
    incomplete: Incompleteness,
    tiers: Vec<TierModel>,
    object_store: Option<ObjectStoreState>,
    hdfs: Option<HdfsState>,
    tickets: TicketsModel,
    connections: Connections,
    totals: Totals,
    process: Process,
}

/// The sources of the figures, and the latest snapshot.
#[derive(Debug)]
pub(in crate::server) struct Inspector {
    pub(in crate::server) build: Build,
    pub(in crate::server) fixed: NodeReport,
    pub(in crate::server) store_type: &'static str,
    /// Lines of `spark-defaults.conf` for clients.
    pub(in crate::server) spark_options: String,
    pub(in crate::server) service: Arc<Service>,
    pub(in crate::server) live: Arc<RuntimeSettings>,
    pub(in crate::server) reloader: Arc<Reloader>,
    pub(in crate::server) gauges: ProcessGauges,
    pub(in crate::server) connections: OpenConnections,
    pub(in crate::server) latest: Mutex<Option<Arc<NodeSnapshot>>>,
    /// Page of the embedded coordinator, if there is one.
    pub(in crate::server) cluster: Option<ClusterPage>,
}

/// Process metrics that are sampled when scraped.
#[derive(Debug)]
pub(in crate::server) struct ProcessGauges {
    pub(in crate::server) runtime: RuntimeMetrics,
    pub(in crate::server) allocator: AllocatorMetrics,
}

/// Open connections, by listener.
#[derive(Debug)]
pub(in crate::server) struct OpenConnections {
    pub(in crate::server) grpc: IntGauge,
    pub(in crate::server) tcp: Option<IntGauge>,
    pub(in crate::server) http: IntGauge,
}

impl NodeInfo for Inspector {
    fn refresh_metrics(&self) {
        self.gauges.runtime.refresh();
        self.gauges.allocator.refresh();
        self.service.diagnostics.refresh_metrics(&self.snapshot(Duration::ZERO).apps);
        self.service.memory().refresh_metrics();
        if let Some(flusher) = self.service.flusher() {
            flusher.refresh_metrics();
        }
        self.service.tiers().maintained().for_each(|tier| tier.refresh_metrics());
    }

    fn configuration(&self) -> BTreeMap<&'static str, String> {
        self.reloader.entries()
    }
}

impl http::NodeView for Inspector {
    fn not_ready(&self) -> Option<String> {
        health::not_ready(&self.service)
    }

    fn incomplete(&self) -> Incompleteness {
        self.snapshot(AGE_MAX).incomplete.clone()
    }

    fn is_stopping_for_good(&self) -> bool {
        self.service.status().is_stopping_for_good()
    }

    fn risks(&self) -> Vec<String> {
        health::risks(&self.service)
    }

    fn losses(&self) -> serde_json::Value {
        serde_json::to_value(self.service.diagnostics.losses()).unwrap_or_default()
    }

    fn apps(&self) -> Vec<AppStatistics> {
        self.snapshot(AGE_MAX).apps.clone()
    }

    fn cluster(&self) -> Option<Bytes> {
        Some(self.cluster.as_ref()?.text())
    }

    fn explain_everywhere(&self, app: &str) -> Option<http::Everywhere> {
        Some(self.cluster.as_ref()?.explain(app))
    }

    fn status(&self) -> Status {
        let snapshot = self.snapshot(AGE_MAX);
        let NodeSnapshot { memory, flush, disks, tickets, connections, totals, process, .. } = &*snapshot;
        let apps = || snapshot.apps.iter();
        Status {
            node: self.node(),
            age_seconds: snapshot.taken.elapsed().as_secs_f64(),
            memory: memory.clone(),
            tiers: snapshot.tiers.clone(),
            disks: disks.iter().map(disk).collect(),
            object_store: snapshot.object_store,
            hdfs: snapshot.hdfs,
            flush: *flush,
            tickets: *tickets,
            coordinators: self.coordinators(),
            connections: *connections,
            apps: AppTotals {
                count: apps().len(),
                partitions: apps().map(|app| app.partitions).sum(),
                huge_partitions: apps().map(|app| app.huge_partitions).sum(),
                lost_blocks: snapshot.lost_blocks,
            },
            incomplete: snapshot.incomplete.clone(),
            quotas: snapshot.quotas.clone(),
            totals: *totals,
            process: *process,
            spark_options: self.spark_options.clone(),
        }
    }
}

impl Inspector {
    /// Returns the latest snapshot, or a new one if it is older than `age_max`.
    pub(super) fn snapshot(&self, age_max: Duration) -> Arc<NodeSnapshot> {
        // Locked while a snapshot is taken, so that concurrent callers share one.
        let mut latest = self.latest.lock();
        if let Some(snapshot) = latest.as_ref().filter(|snapshot| snapshot.taken.elapsed() < age_max) {
            return Arc::clone(snapshot);
        }
        let snapshot = Arc::new(self.take());
        *latest = Some(Arc::clone(&snapshot));
        snapshot
    }

    fn take(&self) -> NodeSnapshot {
        let service = &self.service;
        let sample = service.diagnostics.sample();
        let (refused_memory, refused_partition) = service.diagnostics.refused_tickets();
        let memory = self.memory();
        let mut tiers = vec![TierModel {
            tier: "memory",
            capacity_bytes: memory.capacity_bytes,
            used_bytes: memory.used_bytes,
        }];
        let (mut disks, mut object_store, mut hdfs) = (Vec::new(), None, None);
        for tier in service.tiers().iter() {
            let (state, name) = (tier.state(), tier.capability().names.name);
            let tier_model =
                |capacity_bytes| TierModel { tier: name, capacity_bytes, used_bytes: state.used_bytes };
            tiers.extend(state.capacity_bytes.map(tier_model));
            disks.extend(state.disks);
            object_store = object_store.or(state.object_store);
            hdfs = hdfs.or(state.hdfs);
        }
        NodeSnapshot {
            taken: Instant::now(),
            flush: self.flush(memory.in_flight_bytes),
            tickets: TicketsModel {
                outstanding: service.memory().tickets().count(),
                reserved_bytes: memory.reserved_bytes,
                refused_memory,
                refused_partition,
            },
            memory,
            tiers,
            disks,
            object_store,
            hdfs,
            apps: service.diagnostics.app_statistics(),
            quotas: service.diagnostics.quotas(),
            lost_blocks: service.apps().apps().iter().map(|app| service.diagnostics.lost_blocks(app)).sum(),
            incomplete: service.diagnostics.incompleteness(),
            connections: Connections {
                grpc: open(&self.connections.grpc),
                tcp: self.connections.tcp.as_ref().map_or(0, open),
                http: open(&self.connections.http),
            },
            totals: Totals {
                received_bytes: sample.received_bytes,
                read_bytes: sample.read_bytes,
                flushed_bytes: sample.flushed_bytes,
            },
            process: process(),
        }
    }

    fn node(&self) -> NodeModel {
        let fixed = &self.fixed;
        let started = Duration::from_millis(u64::try_from(fixed.start_time_ms).unwrap_or(0));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        NodeModel {
            id: fixed.id.clone(),
            ip: fixed.ip.to_string(),
            state: self.service.status().state().as_str(),
            not_ready: health::not_ready(&self.service),
            tags: self.live.tags(),
            store_type: self.store_type,
            grpc_port: fixed.grpc_port,
            tcp_port: fixed.netty_port,
            http_port: fixed.http_port.unwrap_or(0),
            version: self.build.version,
            commit: self.build.commit,
            started_ms: fixed.start_time_ms,
            uptime_seconds: now.saturating_sub(started).as_secs_f64(),
        }
    }

    fn memory(&self) -> MemoryModel {
        let memory = self.service.memory();
        // Without a tier below memory nothing is ever spilled.
        let limits = self.service.flusher().map(|flusher| flusher.limits());
        let (high_watermark, low_watermark) =
            limits.map_or((1.0, 1.0), |limits| (limits.high_watermark, limits.low_watermark));
        MemoryModel {
            capacity_bytes: memory.capacity_bytes(),
            used_bytes: memory.used_bytes(),
            reserved_bytes: memory.pre_allocated_bytes(),
            in_flight_bytes: memory.in_flight_bytes(),
            read_buffer_bytes: memory.read_pool().used_bytes(),
            heap_capacity_bytes: memory.heap().whole().capacity(),
            heap_used_bytes: memory.heap().whole().used(),
            heap: HeapKind::ALL.map(|kind| heap_use(kind, memory.heap().of(kind))).to_vec(),
            blocks: memory.block_count(),
            blocks_max: memory.blocks_max(),
            high_watermark,
            low_watermark,
        }
    }

    fn flush(&self, in_flight_bytes: u64) -> Flush {
        let Some(flusher) = self.service.flusher() else { return Flush::default() };
        Flush {
            queued_batches: flusher.queued(),
            unfinished_batches: flusher.unfinished(),
            in_flight_bytes,
            flushed_bytes: flusher.flushed_bytes(),
            failed_writes: flusher.failed_writes(),
        }
    }

    fn coordinators(&self) -> Vec<Coordinator> {
        let describe = |link: Link| match link {
            Link::Untried => ("untried", None),
            Link::Up { .. } => ("up", None),
            Link::Down { reason } => ("down", Some(reason)),
        };
        let coordinator = |(address, link): (&CoordinatorAddress, Link)| {
            let (link, reason) = describe(link);
            Coordinator { address: address.to_string(), link, reason }
        };
        let quorum =
            self.live.heartbeats().into_iter().flat_map(|heartbeats| heartbeats.links().map(coordinator));
        let own = self.cluster.is_some().then(|| format!("{}:{}", self.fixed.ip, self.fixed.grpc_port));
        with_embedded(own, quorum.collect())
    }
}

/// Returns the embedded coordinator and those of the quorum, which may name the embedded one.
fn with_embedded(own: Option<String>, mut coordinators: Vec<Coordinator>) -> Vec<Coordinator> {
    if let Some(address) = own {
        coordinators.retain(|other| other.address != address);
        coordinators.insert(0, Coordinator { address, link: "embedded", reason: None });
    }
    coordinators
}

fn heap_use(kind: HeapKind, budget: &Budget) -> HeapUse {
    HeapUse { kind: kind.name(), capacity_bytes: budget.capacity(), used_bytes: budget.used() }
}

fn disk(info: &DiskInfo) -> DiskModel {
    DiskModel {
        path: info.path.display().to_string(),
        mount: info.mount.point.display().to_string(),
        media: match info.mount.media {
            Media::Ssd => "ssd",
            Media::Hdd => "hdd",
            Media::Unknown => "unknown",
        },
        condition: match info.condition {
            DiskCondition::Healthy => "healthy",
            DiskCondition::Full => "full",
            DiskCondition::ReadOnly => "read_only",
            DiskCondition::Detached => "detached",
            DiskCondition::Hung => "hung",
            DiskCondition::Broken => "broken",
        },
        fault: info.fault.clone(),
        failures: info.failures,
        total_bytes: info.total_bytes,
        free_bytes: info.free_bytes,
        used_bytes: info.used_bytes,
        in_flight_bytes: info.in_flight_bytes,
    }
}

/// Reads the figures of this process from procfs. An unavailable figure is 0.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn process() -> Process {
    let own = procfs::process::Process::myself();
    let stat = own.as_ref().ok().and_then(|own| own.stat().ok());
    let (rss_pages, ticks, threads) =
        stat.map_or((0, 0, 0), |stat| (stat.rss, stat.utime + stat.stime, stat.num_threads));
    Process {
        resident_bytes: rss_pages.saturating_mul(procfs::page_size()),
        cpu_seconds: ticks as f64 / procfs::ticks_per_second() as f64,
        threads: u64::try_from(threads).unwrap_or(0),
        open_files: own.and_then(|own| own.fd_count()).map_or(0, |count| count as u64),
        panics: panic_count(),
    }
}

fn open(gauge: &IntGauge) -> u64 {
    u64::try_from(gauge.get()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_coordinator_in_quorum_is_listed_once() {
        let up = |address: &str| Coordinator { address: address.to_owned(), link: "up", reason: None };
        let embedded = Coordinator { link: "embedded", ..up("10.0.0.1:19999") };
        let quorum = vec![up("10.0.0.1:19999"), up("10.0.0.2:19999")];
        let listed = with_embedded(Some("10.0.0.1:19999".to_owned()), quorum.clone());
        assert_eq!(listed, [embedded, up("10.0.0.2:19999")]);
        assert_eq!(with_embedded(None, quorum.clone()), quorum);
    }
}
