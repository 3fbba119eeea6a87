//! The node table: last heartbeats, and candidates for assignments.
//!
//! Pure state; the clock is a parameter. Messages to clients and locks are elsewhere.
//! Invariants: besides the own worker, which only its own report updates, there are at most
//! [`NODES_MAX`] nodes in at most [`BYTES_MAX`], and at most [`LOCAL_MAX`] of them outside the
//! configured networks. Details and the ids of lost nodes (`lost`) are bounded. A node that is
//! silent for longer than the timeout is in no answer, even between sweeps, because callers call
//! [`NodeTable::expire`] first.

mod lost;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use super::assign::NodeCandidate;
use super::details::{self, Details};
use crate::proto::{ServerStatus, ShuffleServerHeartBeatRequest, ShuffleServerId};
use uniffle_base::clock::Instant;

use self::lost::LostNodes;
pub use self::lost::SavedNode;

/// Maximum number of nodes, ten times the largest known clusters. Heartbeats are not authenticated,
/// so the table needs a bound.
pub const NODES_MAX: usize = 10_000;
/// Maximum size of all nodes: entries, ids, addresses and tags. A typical node has 600 bytes.
pub(super) const BYTES_MAX: usize = 8 << 20;
/// Maximum number of workers of this machine outside `worker_networks`, besides the own one. Any
/// local program can forge them. Several workers on one machine are for trials only.
pub(super) const LOCAL_MAX: usize = 16;
/// Maximum length of an id, address or tag, in bytes.
const TEXT_BYTES_MAX: usize = 255;
/// Maximum number of tags of a node or a request.
pub(super) const TAGS_MAX: usize = 64;

/// Reason why a heartbeat is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHeartbeat {
    /// A field is missing or out of bounds.
    #[error("heartbeat: {0}")]
    Field(&'static str),
    /// Another sender reports as the own worker. The text names the fields that match and differ.
    #[error("heartbeat: {0}")]
    Own(&'static str),
    /// An address of the worker is neither of this machine nor in a configured network.
    #[error(
        "heartbeat: embedded_coordinator.worker_networks does not allow the address {reported:?} with the caller {peer}"
    )]
    Stranger {
        /// Address of the caller.
        peer: String,
        /// Address that the worker reports.
        reported: String,
    },
    /// [`LOCAL_MAX`] workers of this machine have joined.
    #[error(
        "heartbeat: {LOCAL_MAX} workers of this machine have joined, which is the limit for workers outside \
         embedded_coordinator.worker_networks; add their network to that key"
    )]
    TooManyLocal,
    /// With this node, the table would exceed [`BYTES_MAX`].
    #[error("heartbeat: no room for ids, addresses and tags; {nodes} nodes use {used} of {BYTES_MAX} bytes")]
    NoRoom {
        /// Number of known nodes.
        nodes: usize,
        /// Size of their texts in bytes.
        used: usize,
    },
    /// The table holds [`NODES_MAX`] nodes.
    #[error("heartbeat: the limit of {NODES_MAX} nodes is reached")]
    Full,
}

const OWN_ID_ELSEWHERE: &str = "serverId is that of the coordinator's own worker, but ip or port differs";
const OWN_ADDRESS_BY_ANOTHER_ID: &str =
    "ip and a port are those of the coordinator's own worker, but serverId differs";
const OWN_BUT_OTHER_PORTS: &str =
    "serverId, ip and a port are those of the coordinator's own worker, but another port differs";

impl InvalidHeartbeat {
    /// Returns whether a change of `worker_networks` would prevent the refusal.
    pub(super) fn concerns_networks(&self) -> bool {
        matches!(self, Self::Stranger { .. } | Self::TooManyLocal)
    }
}

/// Reason why a worker may join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joins {
    /// Both addresses are in configured networks.
    Configured,
    /// At least one address is of this machine and in no configured network.
    Local,
}

/// A node as of its last heartbeat.
#[derive(Debug, Clone)]
pub struct RegisteredNode {
    /// Unchanged from the heartbeat, because clients compare servers by all fields.
    pub server: ShuffleServerId,
    /// Tags of the last heartbeat.
    pub tags: Vec<String>,
    /// Status as reported.
    pub status: ServerStatus,
    /// Free memory.
    pub available_bytes: u64,
    /// Memory in use.
    pub used_bytes: u64,
    /// Data that assignments do not need.
    pub details: Details,
    seen: Instant,
    assigned_since_heartbeat: u64,
    joins: Joins,
}

/// The cluster as known to this coordinator.
#[derive(Debug, Clone)]
pub struct ClusterView {
    /// Live nodes, sorted by id.
    pub nodes: Vec<KnownNode>,
    /// Ids of lost nodes, up to a size limit.
    pub lost: Vec<String>,
    /// Ids of nodes of an earlier process that have not reported yet, up to a size limit.
    pub awaited: Vec<String>,
    /// True until other workers have had time for a first heartbeat, unless an earlier process has
    /// saved its nodes.
    pub is_starting: bool,
}

/// A live node.
#[derive(Debug, Clone)]
pub struct KnownNode {
    /// State as of its last heartbeat.
    pub node: RegisteredNode,
    /// Time since that heartbeat.
    pub silent_for: Duration,
    /// True if the node is on the exclude list.
    pub is_excluded: bool,
}

/// Nodes by id.
#[derive(Debug)]
pub(super) struct NodeTable {
    timeout: Duration,
    nodes: HashMap<String, RegisteredNode>,
    /// The coordinator's own worker, after its first report.
    own: Option<ShuffleServerId>,
    lost: LostNodes,
    excluded: HashSet<String>,
    /// True if an earlier process has saved nodes.
    is_restored: bool,
    /// Size of all nodes: entries, ids, addresses and tags.
    bytes: usize,
    /// Size of the details of all nodes.
    detail_bytes: usize,
    /// Increases with each change that must be saved.
    version: u64,
}

/// Numbers for gauges: nodes, and ids on the exclude list, known or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct NodeCounts {
    pub(super) total: usize,
    pub(super) active: usize,
    pub(super) unhealthy: usize,
    pub(super) lost: usize,
    pub(super) excluded: usize,
}

impl NodeTable {
    pub(super) fn new(timeout: Duration, excluded: HashSet<String>) -> Self {
        Self {
            timeout,
            nodes: HashMap::new(),
            own: None,
            lost: LostNodes::default(),
            excluded,
            is_restored: false,
            bytes: 0,
            detail_bytes: 0,
            version: 0,
        }
    }

    /// Returns the coordinator's own worker, after its first report.
    pub(super) fn own(&self) -> Option<&ShuffleServerId> {
        self.own.as_ref()
    }

    pub(super) fn set_excluded(&mut self, excluded: HashSet<String>) {
        self.excluded = excluded;
    }

    /// Handles a heartbeat from the network. The last heartbeat of an id wins.
    ///
    /// Heartbeats are not authenticated, so none can change the own worker, under its id or
    /// address. If the quorum includes this coordinator, the own worker sends heartbeats over the
    /// network too. They are answered and ignored, because its direct report is newer.
    pub(super) fn accept(
        &mut self,
        heartbeat: ShuffleServerHeartBeatRequest,
        joins: Joins,
        now: Instant,
    ) -> Result<(), InvalidHeartbeat> {
        if let (Some(own), Some(server)) = (&self.own, &heartbeat.server_id) {
            if server == own {
                return Ok(());
            }
            let has_own_port =
                server.port == own.port || (own.netty_port > 0 && server.netty_port == own.netty_port);
            let has_own_address = has_own_port && is_same_address(&server.ip, &own.ip);
            match (server.id == own.id, has_own_address) {
                (true, true) => return Err(InvalidHeartbeat::Own(OWN_BUT_OTHER_PORTS)),
                (true, false) => return Err(InvalidHeartbeat::Own(OWN_ID_ELSEWHERE)),
                (false, true) => return Err(InvalidHeartbeat::Own(OWN_ADDRESS_BY_ANOTHER_ID)),
                (false, false) => {}
            }
        }
        self.expire(now);
        if let Some(server) = &heartbeat.server_id {
            self.require_room(server, &heartbeat.tags, joins)?;
        }
        self.put(heartbeat, joins, now)
    }

    fn require_room(
        &self,
        server: &ShuffleServerId,
        tags: &[String],
        joins: Joins,
    ) -> Result<(), InvalidHeartbeat> {
        let known = self.nodes.get(&server.id);
        if self.nodes.len() >= NODES_MAX && known.is_none() {
            return Err(InvalidHeartbeat::Full);
        }
        let (nodes, used) = (self.nodes.len(), self.bytes);
        if used - known.map_or(0, RegisteredNode::bytes) + bytes(server, tags) > BYTES_MAX {
            return Err(InvalidHeartbeat::NoRoom { nodes, used });
        }
        let is_new_local = joins == Joins::Local && known.is_none_or(|node| node.joins == Joins::Configured);
        let local = || self.nodes.values().filter(|node| node.joins == Joins::Local).count();
        if is_new_local && local() >= LOCAL_MAX {
            return Err(InvalidHeartbeat::TooManyLocal);
        }
        Ok(())
    }

    /// Handles the own worker's report, which is exempt from the limits of the table.
    pub(super) fn accept_own(
        &mut self,
        report: ShuffleServerHeartBeatRequest,
        now: Instant,
    ) -> Result<(), InvalidHeartbeat> {
        self.own.clone_from(&report.server_id);
        self.expire(now);
        self.put(report, Joins::Configured, now)
    }

    fn put(
        &mut self,
        mut heartbeat: ShuffleServerHeartBeatRequest,
        joins: Joins,
        now: Instant,
    ) -> Result<(), InvalidHeartbeat> {
        let status = status_of(&heartbeat);
        let server = heartbeat.server_id.take().ok_or(InvalidHeartbeat::Field("serverId is missing"))?;
        check(&server, &heartbeat.tags)?;
        if self.lost.remove(&server.id) {
            tracing::info!(node = %server.id, "lost node is back");
        }
        let known = self.nodes.get(&server.id);
        let (before, details_before) = known.map_or((0, 0), |node| (node.bytes(), node.details.bytes()));
        let others = self.detail_bytes - details_before;
        let details = Details::take(&mut heartbeat, details::BYTES_MAX - others);
        self.detail_bytes = others + details.bytes();
        self.bytes = self.bytes - before + bytes(&server, &heartbeat.tags);
        let node = RegisteredNode {
            details,
            tags: heartbeat.tags,
            status,
            available_bytes: u64::try_from(heartbeat.available_memory).unwrap_or(0),
            used_bytes: u64::try_from(heartbeat.used_memory).unwrap_or(0),
            seen: now,
            assigned_since_heartbeat: 0,
            joins,
            server,
        };
        let is_leaving = node.is_leaving();
        let id = node.server.id.clone();
        let before = self.nodes.insert(id.clone(), node);
        if before.is_none() {
            tracing::info!(node = %id, nodes = self.nodes.len(), "node joined");
        }
        // The next process does not await a leaving node, so the change must be saved.
        self.version += u64::from(before.is_none_or(|before| before.is_leaving() != is_leaving));
        Ok(())
    }

    /// Removes nodes without a heartbeat for longer than the timeout. Leaving nodes do not count as
    /// lost.
    pub(super) fn expire(&mut self, now: Instant) {
        let Self { nodes, lost, timeout, bytes, detail_bytes, version, .. } = self;
        let (before, mut has_changed) = (nodes.len(), lost.expire(*timeout, now));
        nodes.retain(|id, node| {
            let alive = now.saturating_duration_since(node.seen) <= *timeout;
            if !alive {
                *bytes -= node.bytes();
                *detail_bytes -= node.details.bytes();
                if node.is_leaving() {
                    tracing::info!(node = %id, "node has left");
                    return false;
                }
                tracing::warn!(node = %id, "heartbeat timeout; node is lost");
                lost.add(id, now);
            }
            alive
        });
        has_changed |= nodes.len() != before;
        *version += u64::from(has_changed);
    }

    /// Removes a node from the list of lost nodes. Returns whether it was listed. It may join
    /// again.
    pub(super) fn forget_lost(&mut self, id: &str, now: Instant) -> bool {
        self.expire(now);
        let was_lost = self.lost.remove(id);
        if was_lost {
            self.version += 1;
            tracing::info!(node = %id, "removed a lost node from the list");
        }
        was_lost
    }

    /// Adds the nodes of an earlier process, as [`NodeTable::saved`] returned them.
    pub(super) fn restore(&mut self, saved: &[SavedNode], now: Instant, unix_now: Duration) {
        self.is_restored |= !saved.is_empty();
        for SavedNode { id, lost_at } in saved.iter().filter(|node| is_named(&node.id)) {
            match lost_at {
                Some(at) => {
                    let ago = unix_now.saturating_sub(Duration::from_secs(*at));
                    // The monotonic clock may have begun after the loss, for example at a reboot.
                    self.lost.add(id, now.checked_sub(ago).unwrap_or(now));
                }
                None => self.lost.wait_for(id, now),
            }
        }
        self.version += 1;
    }

    /// Returns lost nodes, and nodes that are lost if they do not report to the next process.
    pub(super) fn saved(&self, now: Instant, unix_now: Duration) -> Vec<SavedNode> {
        let at = |since| unix_now.saturating_sub(now.saturating_duration_since(since)).as_secs();
        let lost = self.lost.iter().map(|(id, since)| (id, Some(at(since))));
        let own = self.own.as_ref().map(|own| own.id.as_str());
        let live = self.live().filter(|node| !node.is_leaving() && Some(node.server.id.as_str()) != own);
        let expected = live.map(|node| node.server.id.as_str()).chain(self.lost.awaited());
        let saved = |(id, lost_at): (&str, _)| SavedNode { id: id.to_owned(), lost_at };
        lost.chain(expected.map(|id| (id, None))).map(saved).collect()
    }

    /// Returns a number that increases whenever [`NodeTable::saved`] changes.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the size of all nodes: entries, ids, addresses and tags.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns all live nodes. Call [`NodeTable::expire`] first.
    pub(super) fn live(&self) -> impl Iterator<Item = &RegisteredNode> {
        self.nodes.values()
    }

    /// Returns live, lost and awaited nodes. Call [`NodeTable::expire`] first. `is_new` is true
    /// until other workers have had time for a heartbeat.
    pub(super) fn view(&self, is_new: bool, now: Instant) -> ClusterView {
        let known = |node: &RegisteredNode| KnownNode {
            node: node.clone(),
            silent_for: now.saturating_duration_since(node.seen),
            is_excluded: self.excluded.contains(&node.server.id),
        };
        let mut view = ClusterView {
            nodes: self.live().map(known).collect(),
            lost: self.lost.iter().map(|(id, _)| id.to_owned()).collect(),
            awaited: self.lost.awaited().map(str::to_owned).collect(),
            is_starting: is_new && !self.is_restored,
        };
        view.nodes.sort_by(|left, right| left.node.server.id.cmp(&right.node.server.id));
        view.lost.sort();
        view.awaited.sort();
        view
    }

    /// Returns the nodes that are active, not excluded, not faulty, and have all of `tags`. Call
    /// [`NodeTable::expire`] first.
    pub(super) fn candidates(&self, tags: &[String], faulty: &HashSet<&str>) -> Vec<NodeCandidate> {
        self.live()
            .filter(|node| self.is_active(node) && !faulty.contains(node.server.id.as_str()))
            .filter(|node| tags.iter().all(|tag| node.tags.contains(tag)))
            .map(|node| NodeCandidate {
                id: node.server.id.clone(),
                host: node.server.ip.clone(),
                available_bytes: node.available_bytes,
                used_bytes: node.used_bytes,
                assigned_since_heartbeat: node.assigned_since_heartbeat,
            })
            .collect()
    }

    pub(super) fn server(&self, id: &str) -> Option<&ShuffleServerId> {
        self.nodes.get(id).map(|node| &node.server)
    }

    /// Counts partitions assigned to a node until its next heartbeat, which has new memory figures.
    pub(super) fn count_assigned(&mut self, id: &str, partitions: u64) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.assigned_since_heartbeat = node.assigned_since_heartbeat.saturating_add(partitions);
        }
    }

    /// Returns the numbers for gauges. Call [`NodeTable::expire`] first.
    pub(super) fn counts(&self) -> NodeCounts {
        NodeCounts {
            total: self.nodes.len(),
            active: self.live().filter(|node| self.is_active(node)).count(),
            unhealthy: self.live().filter(|node| node.status == ServerStatus::Unhealthy).count(),
            lost: self.lost.len(),
            excluded: self.excluded.len(),
        }
    }

    fn is_active(&self, node: &RegisteredNode) -> bool {
        node.status == ServerStatus::Active && !self.excluded.contains(&node.server.id)
    }
}

impl RegisteredNode {
    /// Returns the size that counts towards [`BYTES_MAX`].
    fn bytes(&self) -> usize {
        bytes(&self.server, &self.tags)
    }

    /// Returns whether the node reported that it stops or is decommissioned.
    fn is_leaving(&self) -> bool {
        matches!(self.status, ServerStatus::Decommissioning | ServerStatus::Decommissioned)
    }
}

fn bytes(server: &ShuffleServerId, tags: &[String]) -> usize {
    const ENTRY_BYTES: usize = size_of::<String>() + size_of::<RegisteredNode>();
    let tags = tags.iter().map(|tag| size_of::<String>() + tag.len());
    // The id is stored twice: in the node and as its key.
    ENTRY_BYTES + 2 * server.id.len() + server.ip.len() + tags.sum::<usize>()
}

/// Returns whether two texts are the same address. IPv4-mapped IPv6 equals IPv4.
fn is_same_address(left: &str, right: &str) -> bool {
    let address = |text: &str| text.parse().map(|address: IpAddr| address.to_canonical());
    left == right || matches!((address(left), address(right)), (Ok(left), Ok(right)) if left == right)
}

/// Returns the status by Java's rule: field 8 or ACTIVE, overridden by `isHealthy` if present
/// (docs/protocol.md §8.2). An unknown status counts as UNHEALTHY, so that such a node is not
/// assigned.
fn status_of(heartbeat: &ShuffleServerHeartBeatRequest) -> ServerStatus {
    match heartbeat.is_healthy {
        Some(true) => ServerStatus::Active,
        Some(false) => ServerStatus::Unhealthy,
        None => heartbeat.status.map_or(ServerStatus::Active, |number| {
            ServerStatus::try_from(number).unwrap_or(ServerStatus::Unhealthy)
        }),
    }
}

fn check(server: &ShuffleServerId, tags: &[String]) -> Result<(), InvalidHeartbeat> {
    // Java uses -1 for "off".
    let port_or_off = |port: i32| port == -1 || u16::try_from(port).is_ok();
    let problem = if !is_named(&server.id) {
        "id must have 1 to 255 bytes without control characters"
    } else if !is_named(&server.ip) {
        "ip must have 1 to 255 bytes without control characters"
    } else if !matches!(server.port, 1..=65_535) {
        "port must be 1 to 65535"
    } else if !port_or_off(server.netty_port) || !port_or_off(server.jetty_port) {
        "netty_port and jetty_port must be -1 to 65535"
    } else if tags.len() > TAGS_MAX || tags.iter().any(|tag| !is_plain(tag)) {
        "at most 64 tags of at most 255 bytes without control characters"
    } else {
        return Ok(());
    };
    Err(InvalidHeartbeat::Field(problem))
}

/// Returns whether a text is short enough, and can appear in the log and in answers.
fn is_plain(text: &str) -> bool {
    text.len() <= TEXT_BYTES_MAX && !text.chars().any(char::is_control)
}

fn is_named(text: &str) -> bool {
    !text.is_empty() && is_plain(text)
}

#[cfg(test)]
mod tests;
