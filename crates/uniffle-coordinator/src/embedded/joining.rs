//! Decides which workers may join the coordinator, by address.
//!
//! Heartbeats are not authenticated, and a worker that joins gets data of applications and HTTP
//! requests. Names are not resolved, because the result could change later. Any program on this
//! machine has a local address, so only few workers may join without a configured network
//! (`nodes`).
//! Invariant: both the caller's address and the reported address of an accepted worker belong to
//! this machine or to a configured network.

use std::net::IpAddr;
use std::time::Duration;

use super::nodes::{InvalidHeartbeat, Joins};
use uniffle_base::LogLimiter;
use uniffle_base::schema::network::Network;

/// Minimum time between two log lines about refused workers. Others are counted.
const REFUSED_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Length to which a reported address is cut in texts. IPv6 addresses have up to 45 bytes.
const SHOWN_BYTES_MAX: usize = 64;

/// The networks whose workers may join.
#[derive(Debug)]
pub(super) struct Joining {
    networks: Vec<Network>,
    refusals: LogLimiter,
}

impl Joining {
    /// Allows workers of this machine and of `networks`.
    pub(super) fn new(networks: Vec<Network>) -> Self {
        Self { networks, refusals: LogLimiter::new(1, REFUSED_LOG_INTERVAL) }
    }

    /// Returns the reason why a worker may join. The worker calls from `peer` and reports the
    /// address `reported`. The coordinator's own worker has the address `own`.
    ///
    /// # Errors
    /// `Stranger` if an address is neither loopback nor `own` nor in a configured network.
    pub(super) fn check(
        &self,
        peer: Option<IpAddr>,
        reported: &str,
        own: Option<IpAddr>,
    ) -> Result<Joins, InvalidHeartbeat> {
        let addresses =
            [peer, reported.parse().ok()].map(|address| address.map(|address| address.to_canonical()));
        let is_here = |address: IpAddr| address.is_loopback() || own == Some(address);
        if addresses.iter().all(|address| address.is_some_and(|address| self.names(address))) {
            return Ok(Joins::Configured);
        }
        if addresses.iter().all(|address| address.is_some_and(|it| is_here(it) || self.names(it))) {
            return Ok(Joins::Local);
        }
        let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_canonical().to_string());
        let reported = reported[..reported.floor_char_boundary(SHOWN_BYTES_MAX)].to_owned();
        Err(InvalidHeartbeat::Stranger { peer, reported })
    }

    fn names(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(address))
    }

    /// Logs a refusal that a change of `worker_networks` would prevent.
    pub(super) fn note(&self, refused: &InvalidHeartbeat) {
        if refused.concerns_networks()
            && let Some(heartbeats) = self.refusals.pass()
        {
            tracing::warn!(error = %refused, heartbeats, "heartbeat refused; the worker may not join this coordinator");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how(networks: &[&str], peer: &str, reported: &str) -> Option<Joins> {
        let networks = networks.iter().map(|text| Network::parse(text).unwrap()).collect();
        let own = Some("10.0.0.1".parse().unwrap());
        Joining::new(networks).check(peer.parse().ok(), reported, own).ok()
    }

    fn joins(networks: &[&str], peer: &str, reported: &str) -> bool {
        how(networks, peer, reported).is_some()
    }

    #[test]
    fn local_worker_is_matched_by_both_its_addresses() {
        for (networks, peer, reported, expected) in [
            (&[][..], "127.0.0.1", "10.0.0.1", Joins::Local),
            (&["10.0.0.0/8"], "127.0.0.1", "10.0.0.1", Joins::Local),
            (&["10.0.0.0/8"], "127.0.0.1", "10.0.0.2", Joins::Local),
            (&["10.0.0.0/8"], "10.0.0.1", "10.0.0.1", Joins::Configured),
            (&["127.0.0.1"], "::ffff:127.0.0.1", "127.0.0.1", Joins::Configured),
        ] {
            assert_eq!(how(networks, peer, reported), Some(expected), "{networks:?} {peer} {reported}");
        }
    }

    #[test]
    fn only_local_workers_join_by_default() {
        for (peer, reported) in [
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "127.0.0.2"),
            ("127.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ] {
            assert!(joins(&[], peer, reported), "{peer} {reported}");
        }
        for (peer, reported) in [
            ("10.0.0.2", "10.0.0.2"),
            ("127.0.0.1", "169.254.169.254"),
            ("10.0.0.2", "127.0.0.1"),
            ("127.0.0.1", "localhost"),
            ("127.0.0.1", ""),
            ("", "127.0.0.1"),
        ] {
            assert!(!joins(&[], peer, reported), "{peer} {reported}");
        }
    }

    #[test]
    fn remote_worker_joins_if_both_addresses_are_allowed() {
        let pods_and_services = ["10.244.0.0/16", "10.96.0.0/12"];
        assert!(joins(&pods_and_services, "10.244.3.4", "10.96.1.1"));
        assert!(joins(&["10.0.0.2"], "10.0.0.2", "10.0.0.2") && joins(&["::/0"], "fd00::2", "fd00::2"));
        assert!(!joins(&["10.244.0.0/16"], "10.244.3.4", "10.96.1.1"));
        assert!(!joins(&["10.96.0.0/12"], "10.244.3.4", "10.96.1.1"));
    }

    #[test]
    fn refusal_to_join_names_the_key() {
        let refused = Joining::new(Vec::new()).check(None, &"é".repeat(1000), None).unwrap_err().to_string();
        assert!(refused.contains("embedded_coordinator.worker_networks") && refused.len() < 250, "{refused}");
    }
}
