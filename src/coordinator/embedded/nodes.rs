//! The node table: who reported, when, and who is a candidate for an assignment.
//!
//! Pure state with the clock passed in; not here: messages to clients and locks. Invariants: at most [`NODES_MAX`]
//! nodes beside the own worker, which only the own report describes, in at most [`BYTES_MAX`] and with a bounded sum of details; of
//! those that no network names at most [`UNNAMED_MAX`]; of those that fell silent ids in at most [`LOST_BYTES_MAX`]; a node that is
//! silent for longer than the timeout is in no answer, whether or not the table was swept since.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use super::assign::Candidate;
use super::details::{self, Details};
use crate::clock::Instant;
use crate::proto::{ServerStatus, ShuffleServerHeartBeatRequest, ShuffleServerId};

/// Most nodes kept. Ten times the largest clusters known; heartbeats are not authenticated, so the table needs a bound.
pub const NODES_MAX: usize = 10_000;
/// Ids, addresses and tags of all nodes: of an honest one they take 600 bytes.
pub(super) const BYTES_MAX: usize = 8 << 20;
/// Ids of nodes that fell silent: 10,000 honest ones take 1.1 MB.
const LOST_BYTES_MAX: usize = 3 << 19;
/// A node that is not back after this time is not listed as lost any more: it was replaced, or made up.
const LOST_KEPT: Duration = Duration::from_secs(24 * 3600);
/// Workers of this machine that no network of `worker_networks` names, beside the own one: any program that runs here can make
/// them up. Several workers on one machine are for trying out.
pub(super) const UNNAMED_MAX: usize = 16;
/// Longest id, address or tag accepted, in bytes.
const TEXT_BYTES_MAX: usize = 255;
/// Most tags of one node or of one request.
pub(super) const TAGS_MAX: usize = 64;

/// Why a heartbeat is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHeartbeat {
    /// A field is missing or out of its bounds.
    #[error("heartbeat: {0}")]
    Field(&'static str),
    /// Another sender reports as the coordinator's own worker; which of its fields say so, and which do not.
    #[error("heartbeat: {0}")]
    Own(&'static str),
    /// It comes from a machine whose workers may not join.
    #[error(
        "heartbeat: see embedded_coordinator.worker_networks: no worker at {told:?} that calls from {peer} may join"
    )]
    Stranger {
        /// Where it comes from.
        peer: String,
        /// The address that it tells.
        told: String,
    },
    /// [`UNNAMED_MAX`] workers of this machine have joined.
    #[error(
        "heartbeat: see embedded_coordinator.worker_networks: {UNNAMED_MAX} workers have joined because they are of this \
         machine, and more only join if both their addresses are of networks that it names"
    )]
    Crowd,
    /// The nodes known have [`BYTES_MAX`], or would have with this one.
    #[error(
        "heartbeat: no room for ids, addresses and tags: those of {nodes} nodes have {used} of {BYTES_MAX} bytes"
    )]
    NoRoom {
        /// Known.
        nodes: usize,
        /// Their bytes.
        used: usize,
    },
    /// The table holds [`NODES_MAX`] nodes.
    #[error("heartbeat: {NODES_MAX} nodes are known, no room for another")]
    Full,
}

const OWN_ID_ELSEWHERE: &str = "serverId is that of the coordinator's own worker, its ip or port is not";
const OWN_ADDRESS_BY_ANOTHER_ID: &str =
    "ip and a port are those of the coordinator's own worker, serverId is not";
const OWN_BUT_OTHER_PORTS: &str =
    "serverId, ip and a port are those of the coordinator's own worker, another port is not";

impl InvalidHeartbeat {
    /// Whether it depends on where the worker is.
    pub(super) fn is_for_networks(&self) -> bool {
        matches!(self, Self::Stranger { .. } | Self::Crowd)
    }
}

/// Why a worker may join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joins {
    /// Both its addresses are of networks that the operator named.
    Named,
    /// One is only of this machine.
    Unnamed,
}

/// One node, as of its last heartbeat.
#[derive(Debug, Clone)]
pub struct Node {
    /// As reported: clients compare servers by all fields, so nothing is normalised.
    pub server: ShuffleServerId,
    /// Tags of the last heartbeat.
    pub tags: Vec<String>,
    /// As the node reports it.
    pub status: ServerStatus,
    /// Free memory.
    pub available_bytes: u64,
    /// Memory in use.
    pub used_bytes: u64,
    /// What assignments do not need.
    pub details: Details,
    seen: Instant,
    assigned_since_heartbeat: u64,
    joins: Joins,
}

/// The cluster, as its nodes tell it to this coordinator.
#[derive(Debug, Clone)]
pub struct ClusterView {
    /// Nodes alive, by id.
    pub nodes: Vec<KnownNode>,
    /// Ids of nodes that went silent, as far as there is room for them.
    pub lost: Vec<String>,
}

/// A node alive.
#[derive(Debug, Clone)]
pub struct KnownNode {
    /// As of its last heartbeat.
    pub node: Node,
    /// Since then.
    pub silent_for: Duration,
    /// It is on the exclude list.
    pub is_excluded: bool,
}

/// Nodes by id.
#[derive(Debug)]
pub(super) struct NodeTable {
    timeout: Duration,
    nodes: HashMap<String, Node>,
    /// The coordinator's own worker, once it has reported.
    own: Option<ShuffleServerId>,
    lost: HashMap<String, Instant>,
    lost_bytes: usize,
    excluded: HashSet<String>,
    /// Of all nodes.
    bytes: usize,
    /// Likewise, and beside it.
    detail_bytes: usize,
}

/// Numbers for gauges.
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
        let (nodes, lost) = (HashMap::new(), HashMap::new());
        Self { timeout, nodes, own: None, lost, lost_bytes: 0, excluded, bytes: 0, detail_bytes: 0 }
    }

    /// The coordinator's own worker, once it has reported.
    pub(super) fn own(&self) -> Option<&ShuffleServerId> {
        self.own.as_ref()
    }

    pub(super) fn set_excluded(&mut self, excluded: HashSet<String>) {
        self.excluded = excluded;
    }

    /// Takes a heartbeat that came over the network; the last one of an id wins. Heartbeats are not authenticated: none
    /// can speak for the own worker, under its id or at its address. Its own, which come where the quorum of all workers
    /// names this one too, are answered and not taken, since the report is newer.
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
            let is_its_port =
                server.port == own.port || (own.netty_port > 0 && server.netty_port == own.netty_port);
            let is_its_address = is_its_port && is_one_address(&server.ip, &own.ip);
            match (server.id == own.id, is_its_address) {
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
        if used - known.map_or(0, Node::bytes) + bytes(server, tags) > BYTES_MAX {
            return Err(InvalidHeartbeat::NoRoom { nodes, used });
        }
        let is_one_more = joins == Joins::Unnamed && known.is_none_or(|node| node.joins == Joins::Named);
        let unnamed = || self.nodes.values().filter(|node| node.joins == Joins::Unnamed).count();
        if is_one_more && unnamed() >= UNNAMED_MAX {
            return Err(InvalidHeartbeat::Crowd);
        }
        Ok(())
    }

    /// Takes the own worker's report, for which there is always room.
    pub(super) fn accept_own(
        &mut self,
        report: ShuffleServerHeartBeatRequest,
        now: Instant,
    ) -> Result<(), InvalidHeartbeat> {
        self.own.clone_from(&report.server_id);
        self.expire(now);
        self.put(report, Joins::Named, now)
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
        if self.remove_lost(&server.id) {
            tracing::info!(node = %server.id, "node is back");
        }
        let known = self.nodes.get(&server.id);
        let (before, details_before) = known.map_or((0, 0), |node| (node.bytes(), node.details.bytes()));
        let others = self.detail_bytes - details_before;
        let details = Details::take(&mut heartbeat, details::BYTES_MAX - others);
        self.detail_bytes = others + details.bytes();
        self.bytes = self.bytes - before + bytes(&server, &heartbeat.tags);
        let node = Node {
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
        if self.nodes.insert(node.server.id.clone(), node).is_none() {
            tracing::info!(nodes = self.nodes.len(), "node joined");
        }
        Ok(())
    }

    /// Drops nodes that were silent for longer than the timeout. One that was leaving is not lost.
    pub(super) fn expire(&mut self, now: Instant) {
        let Self { nodes, lost, lost_bytes: lost_all, timeout, bytes, detail_bytes, .. } = self;
        lost.retain(|id, since| {
            let is_kept = now.saturating_duration_since(*since) < LOST_KEPT;
            *lost_all -= if is_kept { 0 } else { lost_bytes(id) };
            is_kept
        });
        nodes.retain(|id, node| {
            let alive = now.saturating_duration_since(node.seen) <= *timeout;
            if !alive {
                *bytes -= node.bytes();
                *detail_bytes -= node.details.bytes();
                if node.is_leaving() {
                    tracing::info!(node = %id, "node has left");
                    return false;
                }
                tracing::warn!(node = %id, "no heartbeat, node is lost");
                let with_it = *lost_all + lost_bytes(id);
                if with_it <= LOST_BYTES_MAX && lost.insert(id.clone(), now).is_none() {
                    *lost_all = with_it;
                }
            }
            alive
        });
    }

    /// Removes a node from the list of lost nodes; whether it was there. One that reports again is a node as any other.
    pub(super) fn forget_lost(&mut self, id: &str, now: Instant) -> bool {
        self.expire(now);
        let was_lost = self.remove_lost(id);
        if was_lost {
            tracing::info!(node = %id, "lost node is removed from the list");
        }
        was_lost
    }

    fn remove_lost(&mut self, id: &str) -> bool {
        let was_lost = self.lost.remove(id).is_some();
        self.lost_bytes -= if was_lost { lost_bytes(id) } else { 0 };
        was_lost
    }

    /// What ids, addresses and tags of all nodes take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// All live nodes; call [`NodeTable::expire`] first.
    pub(super) fn live(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// Everything that is known; call [`NodeTable::expire`] first.
    pub(super) fn view(&self, now: Instant) -> ClusterView {
        let known = |node: &Node| KnownNode {
            node: node.clone(),
            silent_for: now.saturating_duration_since(node.seen),
            is_excluded: self.excluded.contains(&node.server.id),
        };
        let mut view = ClusterView {
            nodes: self.live().map(known).collect(),
            lost: self.lost.keys().cloned().collect(),
        };
        view.nodes.sort_by(|left, right| left.node.server.id.cmp(&right.node.server.id));
        view.lost.sort();
        view
    }

    /// Nodes that may be assigned: active, not excluded, not faulty, with all of `tags`.
    pub(super) fn candidates(&self, tags: &[String], faulty: &HashSet<&str>) -> Vec<Candidate> {
        self.live()
            .filter(|node| self.is_active(node) && !faulty.contains(node.server.id.as_str()))
            .filter(|node| tags.iter().all(|tag| node.tags.contains(tag)))
            .map(|node| Candidate {
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

    /// Remembers what was given to a node, until its next heartbeat shows it in its memory figures.
    pub(super) fn count_assigned(&mut self, id: &str, partitions: u64) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.assigned_since_heartbeat = node.assigned_since_heartbeat.saturating_add(partitions);
        }
    }

    pub(super) fn counts(&self) -> NodeCounts {
        NodeCounts {
            total: self.nodes.len(),
            active: self.live().filter(|node| self.is_active(node)).count(),
            unhealthy: self.live().filter(|node| node.status == ServerStatus::Unhealthy).count(),
            lost: self.lost.len(),
            excluded: self.excluded.len(),
        }
    }

    fn is_active(&self, node: &Node) -> bool {
        node.status == ServerStatus::Active && !self.excluded.contains(&node.server.id)
    }
}

impl Node {
    /// What it takes of [`BYTES_MAX`].
    fn bytes(&self) -> usize {
        bytes(&self.server, &self.tags)
    }

    /// Whether it said that it stops or is decommissioned.
    fn is_leaving(&self) -> bool {
        matches!(self.status, ServerStatus::Decommissioning | ServerStatus::Decommissioned)
    }
}

fn bytes(server: &ShuffleServerId, tags: &[String]) -> usize {
    const ENTRY_BYTES: usize = size_of::<String>() + size_of::<Node>();
    let tags = tags.iter().map(|tag| size_of::<String>() + tag.len());
    // The id is its key, too.
    ENTRY_BYTES + 2 * server.id.len() + server.ip.len() + tags.sum::<usize>()
}

/// Whether two texts are one address, however it is spelled: an address of IPv4 has a spelling in IPv6.
fn is_one_address(left: &str, right: &str) -> bool {
    let address = |text: &str| text.parse().map(|address: IpAddr| address.to_canonical());
    left == right || matches!((address(left), address(right)), (Ok(left), Ok(right)) if left == right)
}

/// What an id takes of [`LOST_BYTES_MAX`]: a table that has just grown is half empty.
fn lost_bytes(id: &str) -> usize {
    2 * size_of::<(String, Instant)>() + id.len()
}

/// Java's rule: field 8 or ACTIVE, but `isHealthy` overrides where it is present (docs/protocol.md §8.2).
/// A status that only a later protocol version knows is taken as UNHEALTHY, so that such a node gets no assignment.
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
    // They stand in the log and in answers.
    let is_plain = |text: &str| text.len() <= TEXT_BYTES_MAX && !text.chars().any(char::is_control);
    let named = |text: &str| !text.is_empty() && is_plain(text);
    // −1 is Java's "off".
    let port_or_off = |port: i32| port == -1 || u16::try_from(port).is_ok();
    let problem = if !named(&server.id) {
        "id must have 1 to 255 bytes, none of them of a control character"
    } else if !named(&server.ip) {
        "ip must have 1 to 255 bytes, none of them of a control character"
    } else if !matches!(server.port, 1..=65_535) {
        "port must be 1 to 65535"
    } else if !port_or_off(server.netty_port) || !port_or_off(server.jetty_port) {
        "netty_port and jetty_port must be -1 to 65535"
    } else if tags.len() > TAGS_MAX || tags.iter().any(|tag| !is_plain(tag)) {
        "at most 64 tags of at most 255 bytes, none of them of a control character, are taken"
    } else {
        return Ok(());
    };
    Err(InvalidHeartbeat::Field(problem))
}

#[cfg(test)]
mod tests;
