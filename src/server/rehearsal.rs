//! What a successor proves in a process of its own before the running worker lets go (`--check` with [`UPGRADE_FROM`] in the
//! environment): that it can read its files, bind what is new, map its memory, claim its data directories, log in to
//! HDFS and use it.
//!
//! Nothing is taken: sockets and mappings last for a moment, locks of the running worker are left alone. What a rehearsal
//! cannot see is what changes after it; the successor does not repeat what asks a remote system.
//!
//! The verdict is a line on stdout and not the exit code alone: a process of which a thread hangs in the kernel cannot end.
//!
//! [`UPGRADE_FROM`]: super::UPGRADE_FROM

use anyhow::Context as _;

use crate::config::Config;
use crate::coordinator::identity;
use crate::memory::{Memory, Owner};
use crate::runtime::Tasks;
use crate::tiers::local::claimable;

use super::tiers::{Precheck, ask_object_store, start_hdfs};
use super::upgrade::Facts;
use super::{advertised_ip, check_files, sockets};

/// The line that says that nothing stands against the upgrade.
pub const REHEARSED: &str = "rehearsed: the running worker may let go";
/// Before it, where the successor takes over what is in memory, so that nothing has to be flushed.
pub(super) const TAKES_MEMORY: &str = "takes over the memory";

/// What the worker that wrote `facts` is told by this program with `config`, which may follow it. Needs tokio's timers
/// and blocking threads, some of which may hang when it returns.
///
/// # Errors
/// What keeps it from following, one line each.
pub async fn rehearse(config: &Config, facts: &str) -> Result<String, Vec<String>> {
    let facts = Facts::parse(facts).map_err(|error| vec![error])?;
    let mut problems = facts.problems(config);
    if !problems.is_empty() {
        return Err(problems);
    }
    let said = |result: anyhow::Result<()>| result.err().map(|error| format!("{error:#}"));
    problems.extend(said(check_files(config)));
    problems.extend(sockets::unavailable(config, |name, port| facts.has_listener(name, port)));
    problems.extend(said(map_memory(config)));
    problems.extend(said(find_memory(config, &facts).await));
    let local = async {
        match config.worker.store_type.has_local() {
            true => claimable::obstacles(&config.local, facts.held()).await,
            false => Vec::new(),
        }
    };
    let (local, remote) = tokio::join!(local, log_in(config, &facts));
    problems.extend(local);
    problems.extend(said(remote));
    if !problems.is_empty() {
        return Err(problems);
    }
    let memory = if facts.leaves_memory_to(config) { format!("{TAKES_MEMORY}\n") } else { String::new() };
    Ok(format!("{memory}{REHEARSED}\n"))
}

fn map_memory(config: &Config) -> anyhow::Result<()> {
    let registry = crate::metrics::registry()?;
    let mapped = Memory::new(&config.memory, &registry);
    mapped
        .map(drop)
        .with_context(|| format!("cannot map memory_store.capacity = {} bytes", config.memory.capacity_bytes))
}

/// What the running worker has itself is handed over, or gone by then.
async fn find_memory(config: &Config, facts: &Facts) -> anyhow::Result<()> {
    let section = &config.memory;
    if section.backing.is_private() {
        return Ok(());
    }
    let (grpc, tcp) = facts.data_ports();
    let checked = match facts.has_memory_at(&section.backing) {
        true => Memory::check_room(section),
        false => {
            let owner = Owner::now(identity::server_id(advertised_ip(config).await?, grpc, tcp))?;
            Memory::check(section, &owner)
        }
    };
    checked.with_context(|| format!("memory_store.backing = \"{}\"", section.backing))
}

/// As the same worker that runs: by its server id remote files are told apart.
async fn log_in(config: &Config, facts: &Facts) -> anyhow::Result<()> {
    let ip = advertised_ip(config).await?;
    let (grpc, tcp) = facts.data_ports();
    let server_id = identity::server_id(ip, grpc, tcp);
    if config.worker.store_type.has_object() {
        facts.leaves_objects_to(config, &server_id).map_err(anyhow::Error::msg)?;
        ask_object_store(config, &server_id).await?;
    }
    if !config.worker.store_type.has_hdfs() {
        return Ok(());
    }
    let tasks = Tasks::new();
    let store = start_hdfs(config, server_id, Precheck::Asked, &tasks, &crate::metrics::registry()?).await;
    tasks.cancel();
    store.map(drop)
}
