//! Assignment of partition ranges to nodes (docs/protocol.md §9.3), as pure functions.
//!
//! The node table, the clock and messages are elsewhere. Invariants: every range gets `replicas`
//! distinct servers, on different hosts if there are enough. Nothing is allocated per range.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use uniffle_base::schema::words;

words! {
    /// Order in which nodes are preferred.
    pub enum NodeOrder {
        /// By free memory per partition assigned since the node's last heartbeat, including the
        /// request.
        PartitionBalance = "PARTITION_BALANCE",
        /// By free memory alone.
        Basic = "BASIC",
    }
}

words! {
    /// Distribution of ranges over the chosen servers.
    pub enum PartitionSelection {
        /// Groups of neighbouring ranges on one server, so that a task writes to few servers.
        Continuous = "CONTINUOUS",
        /// Ranges one by one, servers in rotation.
        Round = "ROUND",
    }
}

/// Facts about a node, for assignments and for the check of free memory in `access`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCandidate {
    /// Server id. It breaks ties, so that equal input gives equal output.
    pub id: String,
    /// Address, for spreading replicas over hosts.
    pub host: String,
    /// Free memory in its last heartbeat.
    pub available_bytes: u64,
    /// Used memory in its last heartbeat.
    pub used_bytes: u64,
    /// Partitions assigned to it since that heartbeat.
    pub assigned_since_heartbeat: u64,
}

/// Sorts `candidates`, best first.
///
/// `expected_partitions` is the number of partitions per node if the request were spread over the
/// maximum number of nodes: `max(partitionNum · replica / nodes.max, 1)`.
pub fn order(candidates: &mut [NodeCandidate], by: NodeOrder, expected_partitions: u64) {
    match by {
        NodeOrder::PartitionBalance => {
            let expected = u128::from(expected_partitions.max(1));
            let share = |node: &NodeCandidate| u128::from(node.assigned_since_heartbeat) + expected;
            candidates.sort_by(|a, b| {
                // a.available / share(a) descending, cross-multiplied to be exact.
                let left = u128::from(b.available_bytes) * share(a);
                let right = u128::from(a.available_bytes) * share(b);
                left.cmp(&right).then_with(|| tie(a, b))
            });
        }
        NodeOrder::Basic => {
            candidates.sort_by(|a, b| b.available_bytes.cmp(&a.available_bytes).then_with(|| tie(a, b)));
        }
    }
}

fn tie(a: &NodeCandidate, b: &NodeCandidate) -> Ordering {
    a.id.cmp(&b.id)
}

/// Returns the indexes of up to `wanted` candidates, so that neighbours are on different hosts
/// where possible: the best of each host first (Java's `PREFER_DIFF`), then the second best of each
/// host, and so on.
pub fn take_prefer_different_hosts(ordered: &[NodeCandidate], wanted: usize) -> Vec<usize> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut ranks = Vec::with_capacity(ordered.len());
    for node in ordered {
        let of_host = seen.entry(node.host.as_str()).or_insert(0);
        *of_host += 1;
        ranks.push(*of_host);
    }
    let mut indexes: Vec<usize> = (0..ordered.len()).collect();
    // The sort is stable, so equal ranks keep the order of preference.
    indexes.sort_by_key(|&at| ranks[at]);
    indexes.truncate(wanted);
    indexes
}

/// A plan that maps each range to servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangePlacement {
    selection: PartitionSelection,
    ranges: usize,
    servers: usize,
    replicas: usize,
    /// For each primary, the `replicas` servers of its ranges, the primary first.
    groups: Vec<usize>,
    /// Ranges per group in whole rounds (continuous selection only).
    per_group: usize,
}

impl RangePlacement {
    /// Plans the placement of ranges on the servers in `hosts`. Returns `None` unless
    /// `1 <= replicas <= servers` and there is a range.
    pub fn plan(selection: PartitionSelection, hosts: &[&str], shape: AssignmentShape) -> Option<Self> {
        let AssignmentShape { ranges, replicas, partitions_per_range, concurrency } = shape;
        let servers = hosts.len();
        if ranges == 0 || replicas == 0 || replicas > servers {
            return None;
        }
        let slots = servers.saturating_mul(partitions_per_range.max(1));
        let per_group = if concurrency > slots { concurrency / slots } else { 1 };
        let groups = (0..servers).flat_map(|primary| group(hosts, primary, replicas)).collect();
        Some(Self { selection, ranges, servers, replicas, groups, per_group })
    }

    /// Returns the number of ranges.
    pub fn ranges(&self) -> usize {
        self.ranges
    }

    /// Returns the distinct servers of range `k` as indexes into the chosen list, the primary
    /// first.
    pub fn servers_of(&self, k: usize) -> impl Iterator<Item = usize> + '_ {
        let first = match self.selection {
            PartitionSelection::Continuous => self.group_of(k),
            PartitionSelection::Round => k.wrapping_mul(self.replicas),
        };
        let at = first % self.servers * self.replicas;
        self.groups[at..at + self.replicas].iter().copied()
    }

    /// Returns the primary of range `k` in the continuous selection. Whole rounds have `servers`
    /// groups of `per_group` ranges. The remaining ranges are spread evenly; the first servers get
    /// one more.
    fn group_of(&self, k: usize) -> usize {
        let round = self.per_group.saturating_mul(self.servers);
        let in_whole_rounds = self.ranges - self.ranges % round;
        if k < in_whole_rounds {
            return k / self.per_group;
        }
        let at = k - in_whole_rounds;
        let rest = self.ranges - in_whole_rounds;
        let (base, larger_groups) = (rest / self.servers, rest % self.servers);
        let in_larger_groups = larger_groups * (base + 1);
        if at < in_larger_groups {
            at / (base + 1)
        } else {
            // Only reached with base > 0: with base = 0 all remaining ranges are in groups of one.
            larger_groups + (at - in_larger_groups) / base.max(1)
        }
    }
}

/// Returns the servers of a range: `primary` and the next servers in rotation on different hosts.
/// With fewer hosts than replicas, hosts are used more than once.
fn group(hosts: &[&str], primary: usize, replicas: usize) -> Vec<usize> {
    let in_rotation = || (0..hosts.len()).map(|step| (primary + step) % hosts.len());
    let mut used = HashSet::new();
    let mut chosen: Vec<usize> = in_rotation().filter(|&at| used.insert(hosts[at])).take(replicas).collect();
    let others: Vec<usize> = in_rotation().filter(|at| !chosen.contains(at)).collect();
    chosen.extend(others.into_iter().take(replicas - chosen.len()));
    chosen
}

/// Size of an assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AssignmentShape {
    /// Ranges to place.
    pub ranges: usize,
    /// Distinct servers per range.
    pub replicas: usize,
    pub partitions_per_range: usize,
    /// Expected number of concurrent tasks, `min(partitionNum, estimateTaskConcurrency)`; 0 if
    /// unknown.
    pub concurrency: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(id: &str, host: &str, available_bytes: u64, assigned: u64) -> NodeCandidate {
        NodeCandidate {
            id: id.into(),
            host: host.into(),
            available_bytes,
            used_bytes: 0,
            assigned_since_heartbeat: assigned,
        }
    }

    fn ids(nodes: &[NodeCandidate]) -> Vec<&str> {
        nodes.iter().map(|n| n.id.as_str()).collect()
    }

    fn shape(ranges: usize, replicas: usize, concurrency: usize) -> AssignmentShape {
        AssignmentShape { ranges, replicas, partitions_per_range: 1, concurrency }
    }

    fn on_own_hosts(servers: usize) -> Vec<String> {
        (0..servers).map(|n| format!("h{n}")).collect()
    }

    fn plan(
        selection: PartitionSelection,
        hosts: &[String],
        shape: AssignmentShape,
    ) -> Option<RangePlacement> {
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        RangePlacement::plan(selection, &hosts, shape)
    }

    fn primaries(placement: &RangePlacement) -> Vec<usize> {
        (0..placement.ranges()).map(|k| placement.servers_of(k).next().unwrap()).collect()
    }

    #[test]
    fn partition_balance_prefers_nodes_with_fewer_assignments() {
        let mut nodes = [node("busy", "h1", 100, 30), node("idle", "h2", 90, 0), node("full", "h3", 0, 0)];
        order(&mut nodes, NodeOrder::PartitionBalance, 10);
        assert_eq!(ids(&nodes), ["idle", "busy", "full"]);
        order(&mut nodes, NodeOrder::Basic, 10);
        assert_eq!(ids(&nodes), ["busy", "idle", "full"]);
    }

    #[test]
    fn equal_nodes_are_ordered_by_id() {
        let mut nodes = [node("b", "h", 5, 0), node("a", "h", 5, 0)];
        order(&mut nodes, NodeOrder::PartitionBalance, 1);
        assert_eq!(ids(&nodes), ["a", "b"]);
    }

    #[test]
    fn different_hosts_come_first() {
        let nodes = [node("a1", "a", 9, 0), node("a2", "a", 8, 0), node("b1", "b", 1, 0)];
        assert_eq!(take_prefer_different_hosts(&nodes, 2), [0, 2]);
        assert_eq!(take_prefer_different_hosts(&nodes, 9), [0, 2, 1]);
        let cluster: Vec<NodeCandidate> =
            (0..9).map(|n| node(&format!("n{n}"), &format!("h{}", n / 3), 9, 0)).collect();
        assert_eq!(take_prefer_different_hosts(&cluster, 9), [0, 3, 6, 1, 4, 7, 2, 5, 8]);
    }

    #[test]
    fn replicas_share_a_host_only_with_too_few_hosts() {
        let hosts = ["a", "b", "a", "a", "a"].map(str::to_owned);
        let placement = plan(PartitionSelection::Round, &hosts, shape(5, 2, 0)).unwrap();
        let all: Vec<Vec<usize>> = (0..5).map(|k| placement.servers_of(k).collect()).collect();
        assert_eq!(all, [[0, 1], [2, 1], [4, 1], [1, 2], [3, 1]]);
        let placement = plan(PartitionSelection::Continuous, &hosts, shape(1, 3, 0)).unwrap();
        assert_eq!(placement.servers_of(0).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn continuous_assignment_spreads_the_remainder() {
        // c = 8 > S = 2 → groups of 4; 11 = one round of 8 and 3 more, of which the first server
        // gets two.
        let placement = plan(PartitionSelection::Continuous, &on_own_hosts(2), shape(11, 1, 8)).unwrap();
        assert_eq!(primaries(&placement), [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1]);
        // Without an estimate, ranges are placed one by one.
        let placement = plan(PartitionSelection::Continuous, &on_own_hosts(3), shape(5, 2, 0)).unwrap();
        assert_eq!(primaries(&placement), [0, 1, 2, 0, 1]);
        assert_eq!(placement.servers_of(2).collect::<Vec<_>>(), [2, 0]);
    }

    #[test]
    fn round_robin_continues_after_the_last_replica() {
        let placement = plan(PartitionSelection::Round, &on_own_hosts(3), shape(3, 2, 0)).unwrap();
        let all: Vec<Vec<usize>> = (0..3).map(|k| placement.servers_of(k).collect()).collect();
        assert_eq!(all, [[0, 1], [2, 0], [1, 2]]);
    }

    #[test]
    fn more_replicas_than_servers_have_no_plan() {
        assert_eq!(plan(PartitionSelection::Continuous, &on_own_hosts(1), shape(1, 2, 0)), None);
        assert_eq!(plan(PartitionSelection::Continuous, &on_own_hosts(1), shape(1, 0, 0)), None);
        assert_eq!(plan(PartitionSelection::Continuous, &on_own_hosts(1), shape(0, 1, 0)), None);
    }

    proptest! {
        #[test]
        fn every_range_has_distinct_servers_that_exist(
            ranges in 1usize..400,
            servers in 1usize..12,
            replicas in 1usize..5,
            concurrency in 0usize..500,
            partitions_per_range in 1usize..4,
            round in any::<bool>(),
        ) {
            prop_assume!(replicas <= servers);
            let selection = if round { PartitionSelection::Round } else { PartitionSelection::Continuous };
            let shape = AssignmentShape { ranges, replicas, partitions_per_range, concurrency };
            let placement = plan(selection, &on_own_hosts(servers), shape).unwrap();
            let mut load = vec![0usize; servers];
            for k in 0..ranges {
                let chosen: Vec<usize> = placement.servers_of(k).collect();
                prop_assert_eq!(chosen.len(), replicas);
                prop_assert_eq!(chosen.iter().collect::<HashSet<_>>().len(), replicas);
                prop_assert!(chosen.iter().all(|&s| s < servers));
                load[chosen[0]] += 1;
            }
            if !round {
                // The numbers of ranges per primary differ by at most one.
                let (least, most) = (load.iter().min().unwrap(), load.iter().max().unwrap());
                prop_assert!(most - least <= 1, "{:?}", load);
            }
        }

        #[test]
        fn replicas_are_on_different_hosts_if_possible(
            hosts in prop::collection::vec(0usize..5, 1..12),
            replicas in 1usize..4,
            ranges in 1usize..60,
            round in any::<bool>(),
        ) {
            prop_assume!(replicas <= hosts.len());
            let nodes: Vec<NodeCandidate> =
                hosts.iter().enumerate().map(|(n, host)| node(&format!("n{n}"), &format!("h{host}"), 1, 0)).collect();
            let chosen = take_prefer_different_hosts(&nodes, nodes.len());
            let hosts: Vec<String> = chosen.into_iter().map(|at| nodes[at].host.clone()).collect();
            let distinct = hosts.iter().collect::<HashSet<_>>().len();
            let selection = if round { PartitionSelection::Round } else { PartitionSelection::Continuous };
            let placement = plan(selection, &hosts, shape(ranges, replicas, 0)).unwrap();
            for k in 0..ranges {
                let of_range: HashSet<&String> = placement.servers_of(k).map(|at| &hosts[at]).collect();
                prop_assert_eq!(of_range.len(), replicas.min(distinct));
            }
        }

        #[test]
        fn continuous_groups_are_contiguous(ranges in 1usize..300, servers in 1usize..9, concurrency in 0usize..300) {
            let concurrency = concurrency.min(ranges);
            let hosts = on_own_hosts(servers);
            let placement = plan(PartitionSelection::Continuous, &hosts, shape(ranges, 1, concurrency)).unwrap();
            let primaries = primaries(&placement);
            // The server changes only to its successor in rotation.
            for pair in primaries.windows(2) {
                prop_assert!(pair[0] == pair[1] || (pair[0] + 1) % servers == pair[1], "{:?}", primaries);
            }
        }
    }
}
