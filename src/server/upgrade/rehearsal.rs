//! Rehearsal of a successor in a process of its own, while the running worker still serves
//! (`--check` with [`UPGRADE_FROM`] in the environment).
//!
//! It proves that the successor can read its files, bind new ports, map its memory, claim its data
//! directories and use remote stores. It keeps nothing: sockets and mappings are closed at once,
//! and locks of the running worker are not touched. The successor does not repeat the checks of
//! remote stores.
//!
//! The verdict is a line on stdout, since a process with a thread hung in the kernel cannot exit.
//!
//! [`UPGRADE_FROM`]: crate::server::UPGRADE_FROM

use crate::build::Build;
use crate::config::Config;
use crate::runtime::Tasks;
use crate::store::disk::directories::claimable;
use uniffle_coordinator::identity;

use super::Facts;
use crate::server::start::machine::{check_backing, check_files, map_memory};
use crate::server::start::tiers::{Precheck, ask_object_store, start_hdfs};
use crate::server::{advertised_ip, sockets};

/// Output line that says that nothing prevents the upgrade.
pub const REHEARSED: &str = "rehearsed: the running worker may let go";
/// Line printed before [`REHEARSED`] if the successor takes over the memory contents, so that no
/// flush is needed.
pub(super) const TAKES_MEMORY: &str = "takes over the memory";

/// Line printed before [`REHEARSED`]: signals pending at `exec` are handled. An earlier version
/// would never unblock them.
pub(super) const TAKES_SIGNALS: &str = "takes over pending signals";

/// Start of the line that names the successor, printed before [`REHEARSED`].
pub(super) const PROGRAM: &str = "program: ";

/// Checks whether the program `build` with `config` may follow the worker that wrote `facts`.
/// Returns the lines for that worker. Needs tokio's timers and blocking threads, some of which may
/// hang when it returns.
///
/// # Errors
/// The problems that prevent an upgrade, one line each.
pub async fn rehearse(build: Build, config: &Config, facts: &str) -> Result<String, Vec<String>> {
    let facts = Facts::parse(facts).map_err(|error| vec![error])?;
    let mut problems = facts.problems(config);
    if !problems.is_empty() {
        return Err(problems);
    }
    let problem = |result: anyhow::Result<()>| result.err().map(|error| format!("{error:#}"));
    problems.extend(check_files(config));
    let unavailable = sockets::unavailable(config, |name, port| port == 0 || facts.has_listener(name, port));
    problems.extend(unavailable.iter().map(|error| format!("{error:#}")));
    problems.extend(problem(map_memory(config)));
    problems.extend(problem(find_memory(config, &facts).await));
    let local = async {
        match config.worker.store_type.has_local() {
            true => claimable::problems(&config.local, Some(facts.held())).await,
            false => Vec::new(),
        }
    };
    let (local, remote) = tokio::join!(local, log_in(config, &facts));
    problems.extend(local);
    problems.extend(problem(remote));
    if !problems.is_empty() {
        return Err(problems);
    }
    let memory = if facts.leaves_memory_to(config) { format!("{TAKES_MEMORY}\n") } else { String::new() };
    Ok(format!("{PROGRAM}{build}\n{memory}{TAKES_SIGNALS}\n{REHEARSED}\n"))
}

/// Checks that the successor can open `memory_store.backing`. If the running worker has the same
/// backing, only the room is checked, because that memory will be handed over or released first.
async fn find_memory(config: &Config, facts: &Facts) -> anyhow::Result<()> {
    if config.memory.backing.is_private() {
        return Ok(());
    }
    let server_id = match facts.has_memory_at(&config.memory.backing) {
        true => None,
        false => {
            let (grpc, tcp) = facts.data_ports();
            Some(identity::server_id(advertised_ip(config).await?, grpc, tcp))
        }
    };
    check_backing(config, server_id)
}

/// Logs in to the remote stores with the server id of the running worker, which is part of the
/// paths of its remote files.
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
    let store =
        start_hdfs(config, server_id, Precheck::AsConfigured, &tasks, &crate::metrics::registry()?).await;
    tasks.cancel();
    store.map(drop)
}
