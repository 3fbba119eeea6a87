//! Whether a configuration may follow the running one without a restart that clients notice.
//!
//! The running worker tells the new binary's `--check` what it is ([`Facts`], in the environment), and the new binary
//! says what does not fit: only it knows how it reads its configuration. What an upgrade in place cannot change: the
//! ports, which are known to clients and part of the server's id, and data directories that hold data of running jobs.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::Config;

use super::sockets::Addresses;

/// The variable that carries [`Facts`].
pub const UPGRADE_FROM: &str = "WORKER_UPGRADE_FROM";

/// What clients and files know of the running worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Facts {
    grpc_port: u16,
    http_port: u16,
    urpc_port: Option<u16>,
    bind_address: IpAddr,
    /// Empty without a local tier.
    data_paths: Vec<PathBuf>,
}

impl Facts {
    pub(super) fn of(config: &Config, addresses: Addresses) -> Self {
        Self {
            grpc_port: addresses.grpc.port(),
            http_port: addresses.http.port(),
            urpc_port: addresses.tcp.map(|address| address.port()),
            bind_address: config.worker.bind_address,
            data_paths: if config.worker.store_type.has_local() {
                config.local.paths.clone()
            } else {
                Vec::new()
            },
        }
    }

    /// Whether what it is told outlives it.
    pub(super) fn has_journal(&self) -> bool {
        !self.data_paths.is_empty()
    }

    /// For [`problems`] of another process.
    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// What of `config` cannot be taken over in place from the worker that wrote `facts`, one line each.
#[must_use]
pub fn problems(config: &Config, facts: &str) -> Vec<String> {
    let facts: Facts = match serde_json::from_str(facts) {
        Ok(facts) => facts,
        Err(error) => return vec![format!("{UPGRADE_FROM} cannot be read: {error}")],
    };
    let mut problems = Vec::new();
    let mut port = |key: &str, wanted: Option<u16>, running: Option<u16>| {
        let same = wanted == running || (wanted == Some(0) && running.is_some());
        // A listener that is new can be opened; one that clients use can neither move nor close.
        if !same && let Some(running) = running {
            let wanted = wanted.map_or("off".to_owned(), |port| port.to_string());
            problems.push(format!("{key} = {wanted}: the running worker has {running}, and clients know it"));
        }
    };
    port("grpc_port", Some(config.worker.grpc_port), Some(facts.grpc_port));
    port("urpc_port", config.worker.urpc_port, facts.urpc_port);
    port("http_port", Some(config.worker.http_port), Some(facts.http_port));
    if config.worker.bind_address != facts.bind_address {
        let (wanted, running) = (config.worker.bind_address, facts.bind_address);
        problems.push(format!("bind_address = {wanted}: the running worker listens on {running}"));
    }
    let kept = |path: &&PathBuf| !config.worker.store_type.has_local() || !config.local.paths.contains(path);
    for gone in facts.data_paths.iter().filter(kept) {
        let path = gone.display();
        problems.push(format!("localfile_store.data_paths: {path} is missing, and has data of running jobs"));
    }
    if !problems.is_empty() {
        problems.push("this needs a stop and a start (decommission the worker first)".to_owned());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Machine;

    fn config(text: &str) -> Config {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        Config::parse(text, &std::collections::HashMap::new(), &machine).unwrap()
    }

    fn running(text: &str) -> String {
        let config = config(text);
        let address = |port| std::net::SocketAddr::new(config.worker.bind_address, port);
        let tcp = config.worker.urpc_port.map(address);
        let addresses = Addresses {
            grpc: address(config.worker.grpc_port),
            http: address(config.worker.http_port),
            tcp,
            admin: None,
        };
        Facts::of(&config, addresses).to_text()
    }

    #[test]
    fn what_clients_know_may_not_change() {
        let paths = "[localfile_store]\ndata_paths = [\"/a\", \"/b\"]\n";
        let facts = running(&format!("grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n{paths}"));
        let said = |text: &str| problems(&config(text), &facts).join("\n");
        let same = format!(
            "grpc_port = 1\nhttp_port = 0\nurpc_port = 3\n[memory_store]\ncapacity = \"64M\"\n{paths}"
        );
        assert_eq!(said(&same), "");
        let more = "grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n[localfile_store]\ndata_paths = [\"/b\", \"/c\", \"/a\"]";
        assert_eq!(said(more), "");
        let moved = said(&format!("grpc_port = 9\nhttp_port = 2\nurpc_port = 3\n{paths}"));
        assert!(moved.starts_with("grpc_port = 9: the running worker has 1"), "{moved}");
        let gone =
            said("grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n[localfile_store]\ndata_paths = [\"/b\"]");
        assert!(gone.contains("/a is missing") && gone.contains("needs a stop"), "{gone}");
        assert!(problems(&config(&same), "{").join("").contains(UPGRADE_FROM));
    }
}
