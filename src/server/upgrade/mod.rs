//! Decides whether a successor may follow the running worker without clients noticing.
//!
//! The running worker passes its [`Facts`] to the successor's rehearsal in the environment. The
//! successor reports the differences, since only it knows how it reads its configuration. An
//! upgrade in place cannot change the bind address or a port that clients use. Nor can it move or
//! give up data of running jobs: directories, their recovery, and the location in an object store.
//! This module also hands the tickets over.

pub(super) mod preparation;
pub(super) mod rehearsal;
pub(super) mod successor;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use prometheus::{IntCounterVec, IntGauge, Registry};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::memory::{Backing, Memory, Outstanding};
use crate::metrics;
use crate::store::disk::directories::claimable::HeldBy;
use crate::store::{DiskCondition, DiskInfo};

use crate::server::sockets::{ADMIN, Addresses};

/// The variable that carries [`Facts`].
pub const UPGRADE_FROM: &str = "WORKER_UPGRADE_FROM";

metrics::table! {
    pub(super) struct UpgradeMetrics {
        refused: IntCounterVec["by"] =
            "upgrades_refused_total", "Upgrades refused, by reason: tiers, rehearsal, hang, flush or exec";
        gap_ms: IntGauge =
            "upgrade_gap_ms",
            "Milliseconds that new connections waited during the upgrade to this process; 0 after an \
             ordinary start";
    }
}

impl UpgradeMetrics {
    /// Registers the metrics, with 0 for each reason of a refusal.
    pub(super) fn with_labels(registry: &Registry) -> prometheus::Result<Self> {
        let upgrades = Self::new(registry)?;
        RefusedBy::ALL.iter().for_each(|by| drop(upgrades.refused.with_label_values(&[by.as_str()])));
        Ok(upgrades)
    }
}

/// Reason for refusing an upgrade. The running worker continues, and nothing is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UpgradeRefusal {
    /// Value of the metric's label.
    pub(super) by: RefusedBy,
    /// Text for the log.
    pub(super) why: String,
}

/// Category of an obstacle to an upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RefusedBy {
    /// No tier would preserve registrations and reports beyond the process, or the successor would
    /// refuse results that this worker serves.
    Tiers,
    /// The successor's rehearsal found that it could not take over, or a data directory is
    /// detached.
    Rehearsal,
    /// A thread hangs in the kernel, and `exec` would wait for it.
    Hang,
    /// Memory could not be flushed, or writes could not be paused in time.
    Flush,
    /// Executing the successor failed.
    Exec,
}

impl RefusedBy {
    pub(super) const ALL: [Self; 5] = [Self::Tiers, Self::Rehearsal, Self::Hang, Self::Flush, Self::Exec];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Tiers => "tiers",
            Self::Rehearsal => "rehearsal",
            Self::Hang => "hang",
            Self::Flush => "flush",
            Self::Exec => "exec",
        }
    }
}

/// Facts of the running worker that clients and files rely on. A successor of another version reads
/// them: fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Facts {
    grpc_port: u16,
    http_port: u16,
    urpc_port: Option<u16>,
    bind_address: IpAddr,
    /// Empty without a local tier.
    data_paths: Vec<PathBuf>,
    /// Directories in `data_paths` that do not work. Excludes detached ones, which a successor must
    /// not replace.
    #[serde(default)]
    unhealthy: Vec<PathBuf>,
    /// Identities of the claimed directories.
    #[serde(default)]
    identities: BTreeMap<PathBuf, [u8; 16]>,
    /// Ports of all listeners. Empty from a worker before 0.2.
    #[serde(default)]
    ports: Vec<u16>,
    /// Layout version, backing and size of memory that a successor can take over.
    #[serde(default)]
    memory: Option<String>,
    /// Location of the objects. `None` without an object store, and from a worker that does not
    /// report it.
    #[serde(default)]
    objects: Option<String>,
}

/// Returns the location of the objects of worker `server_id`, if an object store is configured.
fn objects(config: &Config, server_id: &str) -> Option<String> {
    let url = config.object.url.as_ref().filter(|_| config.worker.store_type.has_object())?;
    Some(format!("{url}, as {server_id}"))
}

impl Facts {
    /// Returns the facts of a worker with `config`, `addresses`, `server_id` and `disks`.
    pub(super) fn of(config: &Config, addresses: Addresses, server_id: &str, disks: &[DiskInfo]) -> Self {
        let ports = [Some(addresses.grpc), Some(addresses.http), addresses.tcp, addresses.admin];
        let data_paths = match config.worker.store_type.has_local() {
            true => config.local.paths.clone(),
            false => Vec::new(),
        };
        let is_needed = |disk: &DiskInfo| disk.is_healthy() || disk.condition == DiskCondition::Detached;
        let must_be_kept = |path: &PathBuf| disks.iter().any(|disk| disk.path == *path && is_needed(disk));
        Self {
            grpc_port: addresses.grpc.port(),
            http_port: addresses.http.port(),
            urpc_port: addresses.tcp.map(|address| address.port()),
            bind_address: config.worker.bind_address,
            unhealthy: data_paths.iter().filter(|path| !must_be_kept(path)).cloned().collect(),
            identities: disks.iter().map(|disk| (disk.path.clone(), disk.uuid.into_bytes())).collect(),
            data_paths,
            ports: ports.into_iter().flatten().map(|address| address.port()).collect(),
            memory: config.memory.kept_as(),
            objects: objects(config, server_id),
        }
    }

    /// Returns whether the worker's memory has the backing `backing`, of any size.
    pub(super) fn has_memory_at(&self, backing: &Backing) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.contains(&format!(" {backing} ")))
    }

    /// Returns whether a successor with `config` can take over the memory: its own has the same
    /// kind and at least the same size. Otherwise the memory is flushed before the upgrade.
    pub(super) fn leaves_memory_to(&self, config: &Config) -> bool {
        self.memory.as_ref().is_some_and(|memory| config.memory.can_follow(memory))
    }

    /// Returns whether registrations and reports outlive the process: in the metadata log of its
    /// disks or of its object store.
    pub(super) fn has_journal(&self) -> bool {
        !self.data_paths.is_empty() || self.objects.is_some()
    }

    /// Checks that a worker `server_id` with `config` uses the object location of this worker.
    pub(super) fn leaves_objects_to(&self, config: &Config, server_id: &str) -> Result<(), String> {
        let looks = objects(config, server_id);
        match &self.objects {
            Some(has) if looks.as_ref() != Some(has) => {
                let looks = looks.as_deref().unwrap_or("nowhere");
                Err(format!("objects would be at {looks}, those of the running worker are at {has}"))
            }
            _ => Ok(()),
        }
    }

    /// Serializes the facts for another process.
    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses the result of [`Facts::to_text`].
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| format!("cannot read {UPGRADE_FROM}: {error}"))
    }

    /// Returns whether a listener on `port` is inherited. `name` counts only for a worker that does
    /// not report its ports.
    pub(super) fn has_listener(&self, name: &str, port: u16) -> bool {
        if self.ports.is_empty() {
            // Such a worker does not report whether it has an administration listener.
            return name == ADMIN
                || [Some(self.grpc_port), Some(self.http_port), self.urpc_port].contains(&Some(port));
        }
        self.ports.contains(&port)
    }

    /// Returns the data directories held by this worker.
    pub(super) fn held(&self) -> HeldBy<'_> {
        HeldBy { unhealthy: &self.unhealthy, identities: &self.identities }
    }

    /// Returns the ports in the server id.
    pub(super) fn data_ports(&self) -> (u16, Option<u16>) {
        (self.grpc_port, self.urpc_port)
    }

    /// Returns the settings of `config` that an upgrade in place cannot change, one line each.
    pub(super) fn problems(&self, config: &Config) -> Vec<String> {
        let mut problems = Vec::new();
        let mut port = |key: &str, wanted: Option<u16>, running: Option<u16>| {
            let same = wanted == running || (wanted == Some(0) && running.is_some());
            // A new listener can be opened. A listener that clients use can neither move nor close.
            if !same && let Some(running) = running {
                let wanted = wanted.map_or("off".to_owned(), |port| port.to_string());
                problems.push(format!(
                    "{key} = {wanted}: must be {running}, which clients of the running worker use"
                ));
            }
        };
        port("grpc_port", Some(config.worker.grpc_port), Some(self.grpc_port));
        port("urpc_port", config.worker.urpc_port, self.urpc_port);
        port("http_port", Some(config.worker.http_port), Some(self.http_port));
        if config.worker.bind_address != self.bind_address {
            let (wanted, running) = (config.worker.bind_address, self.bind_address);
            problems.push(format!("bind_address = {wanted}: must be {running}, as in the running worker"));
        }
        let is_gone =
            |path: &&PathBuf| !config.worker.store_type.has_local() || !config.local.paths.contains(path);
        for gone in self.data_paths.iter().filter(is_gone) {
            let path = gone.display();
            problems.push(format!(
                "localfile_store.data_paths: must contain {path}, which has data of running jobs"
            ));
        }
        let store_type = config.worker.store_type;
        if self.objects.is_some() && !store_type.has_object() {
            let store_type = store_type.as_str();
            problems.push(format!(
                "store_type = {store_type}: must have an object store, which has data of running jobs"
            ));
        }
        if self.objects.is_some() && self.data_paths.is_empty() && store_type.has_local() {
            let store_type = store_type.as_str();
            problems.push(format!("store_type = {store_type}: the running worker has no local disks"));
        }
        if !config.local.recovery && !self.data_paths.is_empty() {
            problems
                .push("localfile_store.recovery = false would delete the data of running jobs".to_owned());
        }
        if !problems.is_empty() {
            problems.push("these changes need a stop and a start (decommission the worker first)".to_owned());
        }
        problems
    }
}

/// Writes `value` as JSON to an unnamed file called `name` in listings of descriptors. A successor
/// that does not know the file closes it. One that cannot read it continues without it.
pub(super) fn write_for_successor(name: &str, value: &impl Serialize) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(value)?)?;
    file.rewind()?;
    Ok(file.into())
}

/// Reads the result of [`write_for_successor`] in the successor.
pub(super) fn read_from_predecessor<T: DeserializeOwned>(file: OwnedFd) -> io::Result<T> {
    let mut text = Vec::new();
    File::from(file).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Writes the outstanding tickets of `memory` to a file. Returns `None` if there are none, or the
/// file cannot be written.
pub(super) fn write_tickets(memory: &Memory) -> Option<OwnedFd> {
    let outstanding = memory.tickets().outstanding();
    if outstanding.is_empty() {
        return None;
    }
    let written = write_for_successor("uniffle-worker-tickets", &outstanding);
    written.inspect_err(|error| tracing::warn!(%error, "cannot hand over tickets")).ok()
}

/// Grants the tickets in `file` again, since clients send with them as soon as the worker accepts.
/// A send with an unknown ticket fails, and its client asks for another one.
pub(super) fn read_tickets(memory: &Memory, file: OwnedFd) {
    match read_from_predecessor::<Vec<Outstanding>>(file) {
        Ok(outstanding) => {
            let granted = memory.tickets().grant_again(&outstanding);
            tracing::info!(inherited = outstanding.len(), granted, "recovered tickets");
        }
        Err(error) => tracing::warn!(%error, "cannot read the tickets of the previous process"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Machine;

    fn config(text: &str) -> Config {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        Config::parse(text, &std::collections::HashMap::new(), &machine).unwrap()
    }

    fn running(text: &str) -> Facts {
        let config = config(text);
        let worker = &config.worker;
        Facts {
            grpc_port: worker.grpc_port,
            http_port: worker.http_port,
            urpc_port: worker.urpc_port,
            bind_address: worker.bind_address,
            data_paths: config.local.paths.clone(),
            unhealthy: Vec::new(),
            identities: BTreeMap::from([(PathBuf::from("/a"), [7; 16])]),
            ports: vec![worker.grpc_port, worker.http_port, 7],
            memory: config.memory.kept_as(),
            objects: objects(&config, "10.0.0.1-1"),
        }
    }

    #[cfg(feature = "object")]
    #[test]
    fn upgrade_refuses_another_object_location() {
        let text = |store_type: &str, url: &str| {
            format!(
                "grpc_port = 1\nstore_type = \"{store_type}\"\n[localfile_store]\ndata_paths = [\"/a\"]\n\
                 [object_store]\nurl = \"s3://shuffle/{url}\"\nregion = \"x\"\ncredentials = \"none\"\n"
            )
        };
        let facts = Facts { data_paths: Vec::new(), ..running(&text("MEMORY_OBJECT", "x")) };
        assert!(facts.has_journal());
        let leaves = |url, id: &str| facts.leaves_objects_to(&config(&text("MEMORY_OBJECT", url)), id);
        assert_eq!(leaves("x", "10.0.0.1-1"), Ok(()));
        let refusal = "objects would be at s3://shuffle/y, as 10.0.0.1-1, \
                    those of the running worker are at s3://shuffle/x, as 10.0.0.1-1";
        assert_eq!(leaves("y", "10.0.0.1-1"), Err(refusal.to_owned()));
        assert!(leaves("x", "10.0.0.2-1").is_err());
        let problems_of = |store_type| facts.problems(&config(&text(store_type, "x"))).join("\n");
        assert_eq!(problems_of("MEMORY_OBJECT"), "");
        assert!(problems_of("MEMORY_LOCALFILE_OBJECT").contains("the running worker has no local disks"));
        assert!(problems_of("MEMORY_LOCALFILE").contains("must have an object store"));
        assert!(!Facts { data_paths: Vec::new(), ..running("store_type = \"MEMORY\"") }.has_journal());
    }

    #[test]
    fn upgrade_refuses_changes_that_clients_know() {
        let paths = "[localfile_store]\ndata_paths = [\"/a\", \"/b\"]\n";
        let facts = running(&format!("grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n{paths}"));
        let problems_of = |text: &str| facts.problems(&config(text)).join("\n");
        let same = format!(
            "grpc_port = 1\nhttp_port = 0\nurpc_port = 3\n[memory_store]\ncapacity = \"64M\"\n{paths}"
        );
        assert_eq!(problems_of(&same), "");
        let more = "grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n[localfile_store]\ndata_paths = [\"/b\", \"/c\", \"/a\"]";
        assert_eq!(problems_of(more), "");
        let moved = problems_of(&format!("grpc_port = 9\nhttp_port = 2\nurpc_port = 3\n{paths}"));
        assert!(moved.starts_with("grpc_port = 9: must be 1"), "{moved}");
        let gone = problems_of(
            "grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n[localfile_store]\ndata_paths = [\"/b\"]",
        );
        assert!(gone.contains("must contain /a") && gone.contains("need a stop"), "{gone}");
        let deleted = problems_of(&format!("{same}recovery = false\n"));
        assert!(deleted.starts_with("localfile_store.recovery = false would delete"), "{deleted}");
    }

    #[test]
    fn memory_is_handed_to_a_compatible_successor() {
        let text = |backing: &str, capacity: &str| {
            format!(
                "grpc_port = 1\n[memory_store]\ncapacity = \"{capacity}\"\nbacking = \"{backing}\"\n\
                 [localfile_store]\ndata_paths = [\"/a\"]\n"
            )
        };
        let facts = running(&text("/dev/shm/a place", "64M"));
        let is_left = |backing, capacity| facts.leaves_memory_to(&config(&text(backing, capacity)));
        assert!(is_left("/dev/shm/a place", "64M") && is_left("/dev/shm/a place", "65M"));
        assert!(
            !is_left("/dev/shm/a place", "62M"),
            "before a smaller successor starts, memory must be flushed"
        );
        assert!(!is_left("memfd", "64M") && !is_left("private", "64M") && !is_left("/dev/shm/a", "64M"));
        assert!(!running(&text("private", "64M")).leaves_memory_to(&config(&text("private", "64M"))));
    }

    #[test]
    fn facts_of_older_and_newer_workers_are_read() {
        let old = "{\"grpc_port\":1,\"http_port\":2,\"urpc_port\":null,\"bind_address\":\"::\",\"data_paths\":[\"/a\"]}";
        let facts = Facts::parse(old).unwrap();
        assert!(
            facts.has_listener("grpc", 1) && facts.has_listener(ADMIN, 9) && !facts.has_listener("urpc", 3)
        );
        let text = running("grpc_port = 1\nhttp_port = 2\nurpc_port = 3\n").to_text();
        let newer = Facts::parse(&text.replacen('{', "{\"unheard_of\":1,", 1)).unwrap();
        assert!(newer.has_listener(ADMIN, 7) && !newer.has_listener(ADMIN, 9));
        assert!(Facts::parse("{").unwrap_err().contains(UPGRADE_FROM));
    }
}
