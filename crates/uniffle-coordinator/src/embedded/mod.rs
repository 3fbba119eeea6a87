//! A `CoordinatorServer` inside the worker's process, so that a first user needs only one binary.
//!
//! [`EmbeddedCoordinator`] owns the tables of nodes and applications. `rpc` implements the tonic
//! trait; [`assign`] and `access` decide. There is no consensus: several workers may each have a
//! coordinator, all workers report to all of them, and each answers alone. Invariant: to
//! assignments, the own worker is a node like any other, though it needs no room in the table and
//! no heartbeat from the network. Its tags decide what it is assigned, so without a TCP listener it
//! is not assigned to GRPC_NETTY clients.

pub mod assign;

mod access;
mod apps;
mod config;
mod details;
mod joining;
pub(crate) mod metrics;
mod nodes;
mod plan;
mod rpc;

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::{Notify, watch};
use tokio::time::MissedTickBehavior;

use self::apps::AppTable;
use self::assign::NodeCandidate;
use self::joining::Joining;
use self::metrics::Metrics;
use self::nodes::{Joins, NodeTable, TAGS_MAX};
use self::plan::{AssignmentBounds, AssignmentPlan, AssignmentRequest};
use super::{NodeReport, ReportSource};
use crate::proto;
use uniffle_base::budget::{Budget, Charge, Heap, HeapFull, HeapKind};
use uniffle_base::clock::{Instant, sleep_until, timeout};
use uniffle_base::runtime::{BlockingPool, Tasks};
use uniffle_wire::types::AppId;

pub use self::access::{AccessDenied, AccessRules};
pub use self::apps::SavedApp;
pub use self::config::{AppStorage, EmbeddedConfig};
pub use self::details::{DISKS_USED, Details};
pub use self::nodes::{ClusterView, InvalidHeartbeat, KnownNode, NODES_MAX, RegisteredNode, SavedNode};
pub use self::plan::AssignmentError;

/// Assignments with more ranges are made on a blocking thread.
const INLINE_RANGES_MAX: u64 = 1000;

/// Time that an assignment or a list of servers waits for heap, which earlier answers release when
/// they are sent.
const HEAP_WAIT: Duration = Duration::from_secs(10);

/// The embedded coordinator, which implements tonic's `CoordinatorServer`. Clones share it.
#[derive(Debug, Clone)]
pub struct EmbeddedCoordinator(Arc<CoordinatorInner>);

#[derive(Debug)]
struct CoordinatorInner {
    config: EmbeddedConfig,
    storages: Vec<AppStorage>,
    nodes: Mutex<NodeTable>,
    joining: Joining,
    apps: Mutex<AppTable>,
    metrics: Metrics,
    /// Budget for assignments and lists of servers until they are sent.
    answers: Budget,
    /// Threads for assignments of many ranges.
    pool: BlockingPool,
    /// Notified when the state of the own worker has changed.
    report_wanted: Notify,
    /// Time before which assignments wait for the first heartbeats of other workers.
    serving_from: OnceLock<Instant>,
}

impl EmbeddedCoordinator {
    /// Creates a coordinator with metrics in `registry`. Assignments and lists of servers are
    /// charged to `heap`.
    ///
    /// # Errors
    /// If a metric of the same name is already registered.
    pub fn new(config: EmbeddedConfig, heap: &Heap, registry: &Registry) -> Result<Self, prometheus::Error> {
        let storages = config.remote_storages();
        let hosts: Vec<String> = storages.iter().map(|s| s.host().to_owned()).collect();
        let nodes = NodeTable::new(config.node_timeout, config.excluded_nodes.iter().cloned().collect());
        let apps = AppTable::new(config.app_timeout);
        let metrics = Metrics::new(registry, &hosts)?;
        Ok(Self(Arc::new(CoordinatorInner {
            storages,
            nodes: Mutex::new(nodes),
            joining: Joining::new(config.worker_networks.clone()),
            apps: Mutex::new(apps),
            metrics,
            answers: heap.of(HeapKind::Answers).clone(),
            pool: BlockingPool::sized_by_cores(),
            report_wanted: Notify::new(),
            serving_from: OnceLock::new(),
            config,
        })))
    }

    /// Updates the own worker's state, as if it had sent a heartbeat.
    ///
    /// # Errors
    /// If the report is not a valid heartbeat.
    pub fn report(&self, report: NodeReport) -> Result<(), InvalidHeartbeat> {
        self.0.nodes.lock().accept_own(report.into_request(), Instant::now())
    }

    /// Reports `source` at once and then every `interval`, and sweeps both tables as often.
    ///
    /// `interval` must be shorter than the node timeout. Call this when the listeners are bound. It
    /// ends when `tasks` are cancelled. Returns a sender that changes the interval.
    pub fn keep_reporting(
        &self,
        source: ReportSource,
        interval: Duration,
        tasks: &Tasks,
    ) -> watch::Sender<Duration> {
        let coordinator = self.clone();
        let cancelled = tasks.cancelled();
        let (pace, mut changes) = watch::channel(interval);
        coordinator.take_and_sweep(source.now());
        tasks.spawn("embedded coordinator", async move {
            let mut ticks = tokio::time::interval(interval);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            tokio::pin!(cancelled);
            loop {
                // Without the sender `changed` always fails, which only disables this branch.
                tokio::select! {
                    biased;
                    () = &mut cancelled => return,
                    _ = ticks.tick() => {}
                    () = coordinator.0.report_wanted.notified() => {}
                    Ok(()) = changes.changed() => {
                        ticks = tokio::time::interval(*changes.borrow_and_update());
                        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                        continue;
                    }
                }
                match source.now_on_thread().await {
                    Ok(report) => coordinator.take_and_sweep(report),
                    Err(error) => tracing::error!(%error, "cannot create the heartbeat of this worker for its embedded coordinator"),
                }
            }
        });
        pace
    }

    /// Delays assignments and access checks for `interval`, so that other workers can send
    /// heartbeats first. Otherwise a new coordinator would assign everything to its own worker.
    pub fn wait_for_workers(&self, interval: Duration) {
        // Only the first call counts.
        let _ = self.0.serving_from.set(Instant::now() + interval);
    }

    /// Waits until other workers have had time for a heartbeat.
    async fn workers_known(&self) {
        if let Some(from) = self.0.serving_from.get().filter(|from| **from > Instant::now()) {
            sleep_until(*from).await;
        }
    }

    /// Requests a report of the own worker's state now, because it has changed.
    pub fn report_now(&self) {
        self.0.report_wanted.notify_one();
    }

    fn take_and_sweep(&self, report: NodeReport) {
        if let Err(error) = self.report(report) {
            tracing::error!(%error, "the embedded coordinator refused the heartbeat of its own worker");
        }
        self.sweep();
    }

    /// Replaces the exclude list.
    pub fn set_excluded(&self, excluded: HashSet<String>) {
        self.0.nodes.lock().set_excluded(excluded);
        self.sweep();
    }

    /// Removes a node from the list of lost nodes. Returns whether it was listed.
    #[must_use]
    pub fn forget_lost(&self, id: &str) -> bool {
        let was_lost = self.0.nodes.lock().forget_lost(id, Instant::now());
        self.sweep();
        was_lost
    }

    /// Returns the live nodes.
    #[must_use]
    pub fn nodes(&self) -> Vec<RegisteredNode> {
        self.live_nodes(|node| node.clone())
    }

    /// Returns all nodes with details, for the cluster view.
    #[must_use]
    pub fn cluster(&self) -> ClusterView {
        let now = Instant::now();
        let is_new = self.0.serving_from.get().is_some_and(|from| *from > now);
        let mut nodes = self.0.nodes.lock();
        nodes.expire(now);
        nodes.view(is_new, now)
    }

    /// Removes silent nodes and applications, and updates the gauges.
    pub fn sweep(&self) {
        let now = Instant::now();
        let counts = {
            let mut nodes = self.0.nodes.lock();
            nodes.expire(now);
            nodes.counts()
        };
        self.0.metrics.set_nodes(counts);
        let mut apps = self.0.apps.lock();
        apps.expire(now);
        let storage_uses = apps.storage_uses(self.0.storages.len());
        self.0.metrics.set_apps(apps.len(), &apps.users(), &storage_uses);
    }

    fn live_nodes<T>(&self, view: impl Fn(&RegisteredNode) -> T) -> Vec<T> {
        let mut nodes = self.0.nodes.lock();
        nodes.expire(Instant::now());
        nodes.live().map(view).collect()
    }

    /// Handles the heartbeat of a worker that calls from `peer`.
    fn accept(
        &self,
        peer: Option<IpAddr>,
        heartbeat: proto::ShuffleServerHeartBeatRequest,
    ) -> Result<(), InvalidHeartbeat> {
        let accepted = self.take(peer, heartbeat);
        if let Err(refused) = &accepted {
            self.0.joining.note(refused);
        }
        accepted
    }

    fn take(
        &self,
        peer: Option<IpAddr>,
        heartbeat: proto::ShuffleServerHeartBeatRequest,
    ) -> Result<(), InvalidHeartbeat> {
        let own = self.0.nodes.lock().own().cloned();
        // If the quorum includes this coordinator, the own worker sends heartbeats here too. They
        // need no check of the address, because the table ignores them and returns success.
        let joins = match &heartbeat.server_id {
            Some(server) if Some(server) != own.as_ref() => {
                self.0.joining.check(peer, &server.ip, own.and_then(|own| own.ip.parse().ok()))?
            }
            _ => Joins::Configured,
        };
        self.0.nodes.lock().accept(heartbeat, joins, Instant::now())
    }

    /// Checks whether a client may use the cluster (docs/protocol.md §9.4).
    fn access(&self, request: &proto::AccessClusterRequest) -> Result<(), AccessDenied> {
        let rules = &self.0.config.access;
        let candidates = if request.tags.len() <= TAGS_MAX {
            let mut nodes = self.0.nodes.lock();
            nodes.expire(Instant::now());
            nodes.candidates(&request.tags, &HashSet::new())
        } else {
            Vec::new()
        };
        rules.check_nodes(&candidates, &request.extra_properties, &request.tags)?;
        rules.check_user(&request.user, || self.0.apps.lock().count_of(&request.user, Instant::now()))
    }

    fn touch_app(&self, id: &AppId, user: Option<&str>) {
        if self.0.apps.lock().touch(id, user, Instant::now()) {
            self.0.metrics.counts.apps_total.inc();
        }
    }

    fn remote_storage(&self, id: &AppId) -> Option<proto::RemoteStorage> {
        let storages = &self.0.storages;
        let at = self.0.apps.lock().storage(id, storages.len(), Instant::now())?;
        storages.get(at).map(AppStorage::to_message)
    }

    /// Returns one assignment per range (docs/protocol.md §9.3), because clients register ranges as
    /// received. The charge must be kept until the answer is sent.
    async fn assign(
        &self,
        request: &proto::GetShuffleServerRequest,
    ) -> Result<(Vec<proto::PartitionRangeAssignment>, Charge), AssignmentError> {
        let plan = self.plan(request)?;
        let ranges = plan.wanted.ranges;
        let charge = self.charge_answer(plan.answer_bytes()).await;
        let charge = charge.map_err(|full| AssignmentError::NoHeap { ranges, full })?;
        // The work holds the charge, because it continues after the caller has gone.
        let making = move || (plan.assignments(), plan, charge);
        let ((assignments, given), plan, charge) = if ranges <= INLINE_RANGES_MAX {
            making()
        } else {
            let made = self.0.pool.run(making).await;
            made.map_err(|_ended| AssignmentError::Invalid("the worker is stopping"))?
        };
        let mut nodes = self.0.nodes.lock();
        for (candidate, partitions) in plan.candidates.iter().zip(given) {
            nodes.count_assigned(&candidate.id, partitions);
        }
        Ok((assignments, charge))
    }

    /// Returns the servers of the live nodes. The charge must be kept until the list is sent.
    async fn servers(&self) -> Result<(Vec<proto::ShuffleServerId>, Charge), HeapFull> {
        let bytes = self.0.nodes.lock().bytes();
        // Once for the list and once for its encoded form.
        let charge = self.charge_answer(2 * bytes as u64).await?;
        Ok((self.live_nodes(|node| node.server.clone()), charge))
    }

    async fn charge_answer(&self, bytes: u64) -> Result<Charge, HeapFull> {
        let charge = match timeout(HEAP_WAIT, self.0.answers.charge(bytes)).await {
            Ok(charged) => charged,
            Err(_elapsed) => self.0.answers.try_charge(bytes),
        };
        charge.map_err(|refusal| HeapFull::of(HeapKind::Answers, refusal))
    }

    fn plan(&self, request: &proto::GetShuffleServerRequest) -> Result<AssignmentPlan, AssignmentError> {
        let config = &self.0.config;
        let bounds = AssignmentBounds {
            ranges: config.ranges_max,
            servers: config.shuffle_nodes_max.max(1),
            order: config.node_order,
        };
        let wanted = AssignmentRequest::check(request, bounds)?;
        let (servers, candidates) = self.choose_servers(request, &wanted)?;
        AssignmentPlan::new(config.partition_selection, wanted, servers, candidates)
    }

    /// Chooses the servers of a shuffle, in order of preference.
    fn choose_servers(
        &self,
        request: &proto::GetShuffleServerRequest,
        wanted: &AssignmentRequest,
    ) -> Result<(Vec<proto::ShuffleServerId>, Vec<NodeCandidate>), AssignmentError> {
        let faulty: HashSet<&str> = request.faulty_server_ids.iter().map(String::as_str).collect();
        let mut nodes = self.0.nodes.lock();
        nodes.expire(Instant::now());
        let mut candidates = nodes.candidates(&request.require_tags, &faulty);
        if candidates.len() < wanted.replicas {
            return Err(AssignmentError::NotEnough {
                found: candidates.len(),
                wanted: wanted.replicas,
                tags: request.require_tags.clone(),
                alive: nodes.counts().total,
            });
        }
        let replicas = wanted.replicas as u64;
        let nodes_max = self.0.config.shuffle_nodes_max.max(1) as u64;
        assign::order(&mut candidates, self.0.config.node_order, wanted.partitions * replicas / nodes_max);
        let chosen: Vec<NodeCandidate> = assign::take_prefer_different_hosts(&candidates, wanted.servers)
            .into_iter()
            .map(|at| candidates[at].clone())
            .collect();
        // The lock is still held, so every candidate still has its node.
        let servers = chosen.iter().filter_map(|candidate| nodes.server(&candidate.id).cloned()).collect();
        Ok((servers, chosen))
    }

    /// Adds the applications that an earlier process saved, as if each had just sent a heartbeat.
    /// This preserves the number of applications per user and their remote storages.
    pub fn restore_apps(&self, saved: &[SavedApp]) {
        self.0.apps.lock().restore(saved, &self.storage_paths(), Instant::now());
    }

    /// Returns the applications to be saved for the next process and their version, or `None` if
    /// they have not changed since `version`.
    #[must_use]
    pub fn saved_apps(&self, version: Option<u64>) -> Option<(u64, Vec<SavedApp>)> {
        let apps = self.0.apps.lock();
        let now = apps.version();
        (version != Some(now)).then(|| (now, apps.saved(&self.storage_paths())))
    }

    /// Adds the nodes that an earlier process saved. Lost ones stay lost until they report or
    /// are forgotten. Live ones become lost unless they report within the node timeout.
    pub fn restore_nodes(&self, saved: &[SavedNode]) {
        self.0.nodes.lock().restore(saved, Instant::now(), unix_now());
        self.sweep();
    }

    /// Returns the nodes to be saved for the next process and their version, or `None` if they have
    /// not changed since `version`.
    #[must_use]
    pub fn saved_nodes(&self, version: Option<u64>) -> Option<(u64, Vec<SavedNode>)> {
        let nodes = self.0.nodes.lock();
        let now = nodes.version();
        (version != Some(now)).then(|| (now, nodes.saved(Instant::now(), unix_now())))
    }

    fn storage_paths(&self) -> Vec<&str> {
        self.0.storages.iter().map(|storage| storage.path.as_str()).collect()
    }
}

/// Returns the time since the Unix epoch.
fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests;
