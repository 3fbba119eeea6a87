//! Access checks for clients: Java's load and quota checkers (docs/protocol.md §9.4).
//!
//! The defaults suit a single node: one node with the client's tags is enough, without regard to
//! its free memory, and there are no quotas. All functions are pure.

use std::collections::HashMap;

use super::apps::APPS_LISTED_MIN;
use super::assign::NodeCandidate;
use super::nodes::NODES_MAX;
use uniffle_base::schema::kind::{count, ratio};
use uniffle_base::schema::section;

/// Property with the number of nodes that a client needs (`AccessClusterLoadChecker`).
const REQUIRED_NODES_PROPERTY: &str = "access_info_required_shuffle_nodes_num";

section! {
    /// Rules for `accessCluster`.
    #[derive(Copy)]
    pub struct AccessRules {
        /// accessCluster (DelegationRssShuffleManager) needs this many workers with the client's
        /// tags. A client may demand more.
        #[key("embedded_coordinator.access_min_nodes", count(1..=NODES_MAX), Restart)]
        pub nodes_min: usize = 1,
        /// Share of free memory that accessCluster needs on each of these workers.
        #[key("embedded_coordinator.access_min_memory_ratio", ratio(), Restart)]
        pub memory_ratio_min: f64 = 0.0,
        /// Maximum number of applications per user, checked by accessCluster; 0 = unlimited.
        #[key("embedded_coordinator.quota_apps_per_user", count(0..=APPS_LISTED_MIN), Restart)]
        pub apps_per_user_max: usize = 0,
    }
}

/// Reason why a client is refused. The text is sent to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccessDenied {
    /// Too few nodes have the tags.
    #[error("too few active shuffle servers have the tags {tags:?} ({found} of {wanted} needed)")]
    Nodes {
        /// Tags of the request.
        tags: Vec<String>,
        /// Number of nodes with the tags.
        found: usize,
        /// Number of nodes needed.
        wanted: usize,
    },
    /// Too few nodes with the tags have free memory.
    #[error("cluster is loaded: {found} of {wanted} shuffle servers needed have enough free memory")]
    Load {
        /// Number of nodes with free memory.
        found: usize,
        /// Number of nodes needed.
        wanted: usize,
    },
    /// The user has too many applications.
    #[error("user {user} has {apps} applications, the limit is {max}")]
    Quota {
        /// Name of the user.
        user: String,
        /// Number of applications of the user.
        apps: usize,
        /// The limit.
        max: usize,
    },
}

impl AccessRules {
    /// Checks number and free memory of `candidates`, the nodes with all of the client's tags.
    ///
    /// # Errors
    /// See [`AccessDenied`].
    pub fn check_nodes(
        &self,
        candidates: &[NodeCandidate],
        properties: &HashMap<String, String>,
        tags: &[String],
    ) -> Result<(), AccessDenied> {
        let wish = properties.get(REQUIRED_NODES_PROPERTY).and_then(|text| text.trim().parse().ok());
        let wanted = self.nodes_min.max(wish.unwrap_or(0)).max(1);
        if candidates.len() < wanted {
            return Err(AccessDenied::Nodes { tags: tags.to_vec(), found: candidates.len(), wanted });
        }
        let found = candidates.iter().filter(|node| self.has_memory(node)).count();
        if found < wanted { Err(AccessDenied::Load { found, wanted }) } else { Ok(()) }
    }

    #[expect(clippy::cast_precision_loss, reason = "a ratio against a threshold")]
    fn has_memory(&self, node: &NodeCandidate) -> bool {
        let all = node.available_bytes.saturating_add(node.used_bytes);
        node.available_bytes as f64 >= all as f64 * self.memory_ratio_min
    }

    /// Checks the user's quota. Calls `apps` for the number of applications only if there is a
    /// quota.
    ///
    /// # Errors
    /// [`AccessDenied::Quota`].
    pub fn check_user(&self, user: &str, apps: impl FnOnce() -> usize) -> Result<(), AccessDenied> {
        let max = self.apps_per_user_max;
        if max == 0 {
            return Ok(());
        }
        let apps = apps();
        if apps >= max { Err(AccessDenied::Quota { user: user.to_owned(), apps, max }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(available_bytes: u64, used_bytes: u64) -> NodeCandidate {
        NodeCandidate {
            id: "n".into(),
            host: "h".into(),
            available_bytes,
            used_bytes,
            assigned_since_heartbeat: 0,
        }
    }

    #[test]
    fn only_nodes_with_enough_memory_count() {
        let rules = AccessRules { nodes_min: 2, memory_ratio_min: 0.15, ..AccessRules::default() };
        let wish = |count: &str| HashMap::from([(REQUIRED_NODES_PROPERTY.to_owned(), count.to_owned())]);
        let nodes = [node(15, 85), node(100, 0), node(14, 86)];
        assert_eq!(rules.check_nodes(&nodes, &wish("-1"), &[]), Ok(()));
        assert_eq!(
            rules.check_nodes(&nodes, &wish("3"), &[]),
            Err(AccessDenied::Load { found: 2, wanted: 3 })
        );
        let none = rules.check_nodes(&nodes[..1], &HashMap::new(), &["t".to_owned()]);
        assert!(matches!(none, Err(AccessDenied::Nodes { found: 1, wanted: 2, .. })));
        assert_eq!(AccessRules::default().check_nodes(&[node(0, 9)], &HashMap::new(), &[]), Ok(()));
    }

    #[test]
    fn quota_is_per_user_and_off_by_default() {
        let rules = AccessRules { apps_per_user_max: 2, ..AccessRules::default() };
        assert_eq!(rules.check_user("u", || 1), Ok(()));
        assert!(matches!(rules.check_user("u", || 2), Err(AccessDenied::Quota { apps: 2, .. })));
        assert_eq!(AccessRules::default().check_user("u", || unreachable!()), Ok(()));
    }
}
