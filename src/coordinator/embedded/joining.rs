//! Which workers may join the coordinator. Heartbeats are not authenticated, and who joins is sent the data of applications
//! and is asked over HTTP: so the address decides, as with `decommission`.
//!
//! Invariant: of a worker that is taken both the address that it calls from and the one that it tells are of this machine or
//! of a network that the key names. Names are not looked up: their answers could change later.

use std::net::IpAddr;
use std::time::Duration;

use super::nodes::InvalidHeartbeat;
use crate::schema::network::Network;
use crate::telemetry::LogLimiter;

/// Between two log lines about workers that were turned away; the others are counted.
const REFUSED_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Longest address that is shown, in bytes: IPv6 has 45, and what is sent may be anything.
const SHOWN_BYTES_MAX: usize = 64;

/// Who may join.
#[derive(Debug)]
pub(super) struct Joining {
    networks: Vec<Network>,
    refusals: LogLimiter,
}

impl Joining {
    /// Workers of this machine and of `networks`.
    pub(super) fn new(networks: Vec<Network>) -> Self {
        Self { networks, refusals: LogLimiter::new(1, REFUSED_LOG_INTERVAL) }
    }

    /// Refuses a worker that calls from `peer` and tells the address `told`, if one of them is not of this machine, where
    /// the own worker tells `own`, nor of a network of the key.
    pub(super) fn check(
        &self,
        peer: Option<IpAddr>,
        told: &str,
        own: Option<IpAddr>,
    ) -> Result<(), InvalidHeartbeat> {
        if [peer, told.parse().ok()].into_iter().all(|address| self.has(address, own)) {
            return Ok(());
        }
        let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_canonical().to_string());
        let told = told[..told.floor_char_boundary(SHOWN_BYTES_MAX)].to_owned();
        if let Some(heartbeats) = self.refusals.pass() {
            tracing::warn!(
                peer,
                told,
                heartbeats,
                "a worker may not join this coordinator: see embedded_coordinator.worker_networks"
            );
        }
        Err(InvalidHeartbeat::Stranger { peer, told })
    }

    fn has(&self, address: Option<IpAddr>, own: Option<IpAddr>) -> bool {
        let Some(address) = address.map(|address| address.to_canonical()) else { return false };
        let is_here = address.is_loopback() || own == Some(address);
        is_here || self.networks.iter().any(|network| network.holds(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joins(networks: &[&str], peer: &str, told: &str) -> bool {
        let networks = networks.iter().map(|text| Network::parse(text).unwrap()).collect();
        let own = Some("10.0.0.1".parse().unwrap());
        Joining::new(networks).check(peer.parse().ok(), told, own).is_ok()
    }

    #[test]
    fn by_default_workers_of_this_machine_join_and_no_others() {
        for (peer, told) in [
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "127.0.0.2"),
            ("127.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ] {
            assert!(joins(&[], peer, told), "{peer} {told}");
        }
        for (peer, told) in [
            ("10.0.0.2", "10.0.0.2"),
            ("127.0.0.1", "169.254.169.254"),
            ("10.0.0.2", "127.0.0.1"),
            ("127.0.0.1", "localhost"),
            ("127.0.0.1", ""),
            ("", "127.0.0.1"),
        ] {
            assert!(!joins(&[], peer, told), "{peer} {told}");
        }
    }

    #[test]
    fn a_worker_of_another_machine_joins_when_both_its_addresses_are_of_networks_that_are_named() {
        let pods_and_services = ["10.244.0.0/16", "10.96.0.0/12"];
        assert!(joins(&pods_and_services, "10.244.3.4", "10.96.1.1"));
        assert!(joins(&["10.0.0.2"], "10.0.0.2", "10.0.0.2") && joins(&["::/0"], "fd00::2", "fd00::2"));
        assert!(!joins(&["10.244.0.0/16"], "10.244.3.4", "10.96.1.1"));
        assert!(!joins(&["10.96.0.0/12"], "10.244.3.4", "10.96.1.1"));
    }

    #[test]
    fn who_is_refused_is_told_the_key() {
        let refused = Joining::new(Vec::new()).check(None, &"é".repeat(1000), None).unwrap_err().to_string();
        assert!(refused.contains("embedded_coordinator.worker_networks") && refused.len() < 250, "{refused}");
    }
}
