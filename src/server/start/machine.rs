//! Preflight check of this machine before a start (`--check --here`).
//!
//! It reads the files that the configuration names, binds the ports, resolves the advertised
//! address, tries the directories and maps the memory, as a start does. It releases everything
//! and leaves nothing behind, unless a disk hangs. Limits of the system are compared when the
//! configuration is loaded (`config::limits`). Coordinators and remote stores are not called.

use std::io;
use std::net::IpAddr;

use anyhow::Context as _;
use bytesize::ByteSize;
use rustix::process::getuid;

use super::listeners::admin_token;
#[cfg(feature = "hdfs")]
use super::tiers::hdfs_connector;
use crate::config::Config;
use crate::memory::{Memory, Owner};
use crate::server::tls::Tls;
use crate::server::{advertised_ip, sockets};
use crate::store::disk::directories::claimable;
use crate::telemetry;
use uniffle_coordinator::identity;

/// Returns a line about what a start would find, after a note if this process runs as root. Needs
/// tokio's timers and blocking threads, which may still be stuck on a hung disk when it returns.
///
/// # Errors
/// The reasons why a start would fail or use fewer data directories, one line each.
pub async fn examine_machine(config: &Config) -> Result<String, Vec<String>> {
    let mut problems = check_files(config);
    // No listener is open yet.
    problems.extend(sockets::unavailable(config, |_, _| false).iter().map(describe_port));
    let has_local = config.worker.store_type.has_local();
    if has_local {
        problems.extend(claimable::problems(&config.local, None).await);
    }
    let (worker, mut address) = (&config.worker, None);
    // A wrong address has been reported with the files.
    if identity::check(worker.advertised.as_ref(), worker.bind_address).is_ok() {
        match advertised_ip(config).await {
            Ok(ip) => address = Some(ip),
            Err(error) => problems.push(format!(
                "{error:#}; WORKER_IP must be an address or a host name by which clients reach this machine"
            )),
        }
    }
    if let Err(error) = map_memory(config) {
        problems.push(format!(
            "{error:#}; memory_store.capacity must be at most the memory that this machine can map"
        ));
    }
    // With port 0, the server id is not known yet.
    let has_id = worker.grpc_port != 0 && worker.urpc_port != Some(0);
    let server_id = |ip| identity::server_id(ip, worker.grpc_port, worker.urpc_port);
    let server_id = address.filter(|_| has_id).map(server_id);
    problems.extend(check_backing(config, server_id).err().map(|error| {
        format!(
            "{error:#}; memory_store.backing must be \"private\" or a tmpfs directory of this worker with free \
             space for the capacity"
        )
    }));
    #[cfg(feature = "hdfs")]
    if config.worker.store_type.has_hdfs() {
        problems.extend(hdfs_connector(config).err().map(|error| format!("{error:#}")));
    }
    problems.extend(telemetry::check_directory(&config.log).err().map(|error| format!("{error:#}")));
    match address {
        Some(address) if problems.is_empty() => Ok(describe_success(config, address)),
        _ => Err(problems),
    }
}

/// Reads the files that `config` names and checks the advertised address, as a start does.
///
/// Returns the problems, each with its configuration key or variable.
#[must_use]
pub fn check_files(config: &Config) -> Vec<String> {
    let address = identity::check(config.worker.advertised.as_ref(), config.worker.bind_address);
    let mut problems: Vec<anyhow::Error> = address.err().into_iter().map(Into::into).collect();
    problems.extend(Tls::problems(config));
    problems.extend(admin_token(config).err());
    #[cfg(feature = "object")]
    if config.object.url.is_some() {
        let found = crate::store::object::client::check_files(&config.object);
        problems.extend(found.into_iter().map(anyhow::Error::from));
    }
    problems.iter().map(|problem| format!("{problem:#}")).collect()
}

/// Maps the configured capacity for a moment.
pub(in crate::server) fn map_memory(config: &Config) -> anyhow::Result<()> {
    let registry = crate::metrics::registry()?;
    let mapped = Memory::new(&config.memory, &registry);
    mapped
        .map(drop)
        .with_context(|| format!("cannot map memory_store.capacity = {} bytes", config.memory.capacity_bytes))
}

fn describe_success(config: &Config, address: IpAddr) -> String {
    let directories = match config.local.paths.len() {
        _ if !config.worker.store_type.has_local() => String::new(),
        1 => "1 data directory is usable, ".to_owned(),
        many => format!("{many} data directories are usable, "),
    };
    let note = match getuid().is_root() {
        true => "note: checked as root; a service with another user may lack permissions\n",
        false => "",
    };
    format!(
        "{note}this machine: ports are free, {directories}{} of memory can be mapped, the advertised address is \
         {address}\n",
        ByteSize(config.memory.capacity_bytes)
    )
}

/// Describes a listener that cannot be opened, with the remedy.
fn describe_port(error: &anyhow::Error) -> String {
    let cause = error.root_cause().downcast_ref::<io::Error>().map(io::Error::kind);
    let remedy = match cause {
        Some(io::ErrorKind::AddrInUse) => {
            "must be a free port; stop the process that listens there (`ss -ltnp`)"
        }
        Some(io::ErrorKind::AddrNotAvailable) => "bind_address must be an address of this machine",
        Some(io::ErrorKind::PermissionDenied) => {
            "must be a port that this user may bind: at least 1024, or grant CAP_NET_BIND_SERVICE"
        }
        _ => "must be a port and an address that this machine can bind",
    };
    format!("{error:#}; {remedy}")
}

/// Checks the file of persistent memory of worker `server_id`. Without an id, the owner of the file
/// is unknown, so only the free space is checked.
pub(in crate::server) fn check_backing(config: &Config, server_id: Option<String>) -> anyhow::Result<()> {
    let section = &config.memory;
    if section.backing.is_private() {
        return Ok(());
    }
    let checked = match server_id {
        Some(server_id) => Memory::check_backing_file(section, &Owner::current(server_id)?),
        None => Memory::check_free_space(section),
    };
    checked.with_context(|| format!("memory_store.backing = \"{}\"", section.backing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Machine;

    /// Regression test: "0 data directories are usable".
    #[test]
    fn success_names_directories_only_if_configured() {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        let of = |text: &str| {
            let config = Config::parse(text, &std::collections::HashMap::new(), &machine).unwrap();
            describe_success(&config, IpAddr::from([127, 0, 0, 1]))
        };
        let one = of("[localfile_store]\ndata_paths = [\"/d\"]\n");
        assert!(one.contains("ports are free, 1 data directory is usable, "), "{one}");
        let none = of("store_type = \"MEMORY\"\n");
        assert!(!none.contains("director") && none.contains("of memory can be mapped"), "{none}");
    }
}
