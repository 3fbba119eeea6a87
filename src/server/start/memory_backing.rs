//! Protects blocks that an earlier process left in memory.
//!
//! With a metadata log, each data directory has a note with the tmpfs directory of the memory file
//! ([`note`]). A start reads the notes before it maps memory. If blocks remain in a file or an
//! inherited memfd that the configured backing does not use, the start fails with an error that
//! names the place ([`refuse_orphaned`]). The backing is changed by an upgrade, or by a clean stop
//! and a start.
//!
//! A memory file of another layout, owner or boot, or with blocks beyond the capacity, is refused
//! in `memory::persistent::file`.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures::future::join_all;
use prometheus::Registry;
use tokio::task::spawn_blocking;

use crate::clock::timeout;
use crate::config::Config;
use crate::log::METADATA;
use crate::memory::{Backing, InMemory, Memory, OrphanedMemory, Owner, describe_huge_pages};

/// Name of the note beside the metadata log. Names with a dot belong to the log.
const NOTE: &str = "memory";
/// Time limit per disk. The other disks have the same note, so a disk that does not answer is
/// skipped.
const NOTE_DEADLINE: Duration = Duration::from_secs(2);
/// Maximum number of shuffles listed in the log.
const NAMED_MAX: usize = 10;

/// Location of the memory contents after a process that ended without a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum MemoryRetention {
    /// In a named file, which the next process finds.
    Named,
    /// In the descriptor store of the service manager, which announced that it has one (systemd,
    /// since 254).
    Stored,
    /// In the service manager's descriptor store, if it has one. The manager does not announce it.
    PerhapsStored,
    /// Lost with the process.
    Nothing,
}

impl MemoryRetention {
    /// Determines the location for `memory` from the environment of this process.
    pub(in crate::server) fn of(memory: &Memory) -> Self {
        let store = std::env::var("FDSTORE").ok().and_then(|kept| kept.parse::<u64>().ok());
        let has_manager = std::env::var_os("NOTIFY_SOCKET").is_some();
        if memory.backing_vanished() {
            return Self::Nothing;
        }
        match (memory.is_transferable(), memory.outlives_process(), store) {
            (_, true, _) => Self::Named,
            (true, false, Some(1..)) => Self::Stored,
            (true, false, None) if has_manager => Self::PerhapsStored,
            (true, false, None | Some(_)) | (false, false, _) => Self::Nothing,
        }
    }

    /// Returns the description for the log of a start.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Named => "the next process recovers blocks in memory, however this one ends",
            Self::Stored => {
                "an upgrade hands over blocks in memory, and after a kill the service manager passes them \
                 to the next process; a stop of the unit flushes them and gives up the rest"
            }
            Self::PerhapsStored => {
                "an upgrade hands over blocks in memory; a kill loses them unless the service manager \
                 stores descriptors (FileDescriptorStoreMax)"
            }
            Self::Nothing => {
                "an upgrade hands over blocks in memory; a kill loses them, because no service manager \
                 stores descriptors"
            }
        }
    }

    /// Logs what happens to unflushed blocks. Returns whether they are lost.
    pub(in crate::server) fn log_losses(self, unflushed: &[InMemory]) -> bool {
        if unflushed.is_empty() {
            return false;
        }
        let sum = |of: fn(&InMemory) -> u64| unflushed.iter().map(of).sum::<u64>();
        let (shuffles, blocks, bytes) = (unflushed.len(), sum(|it| it.blocks), sum(|it| it.bytes));
        match self {
            Self::Named => {
                tracing::warn!(
                    shuffles,
                    blocks,
                    bytes,
                    "blocks not flushed; left in memory for the next process"
                )
            }
            Self::Stored | Self::PerhapsStored => tracing::warn!(
                shuffles,
                blocks,
                bytes,
                "blocks not flushed; left in the service manager's descriptor store: a restart of the unit \
                 recovers them, a stop gives them up"
            ),
            Self::Nothing => {
                let named =
                    unflushed.iter().take(NAMED_MAX).map(|it| format!("{} ({} bytes)", it.shuffle, it.bytes));
                let largest = named.collect::<Vec<_>>().join(", ");
                tracing::error!(
                    shuffles,
                    blocks,
                    bytes,
                    largest,
                    "blocks not flushed and lost at shutdown; the next start lists those that were reported; \
                     free space in the storage below memory, repair it, or raise shutdown.flush_timeout_sec"
                );
                return true;
            }
        }
        false
    }
}

/// Records the directory of the memory file in every data directory. Removes the record if memory
/// is not in a named file.
pub(super) async fn note(config: &Config) {
    let directory = match &config.memory.backing {
        Backing::Directory(directory) => Some(directory.clone()),
        Backing::Auto | Backing::Private | Backing::Memfd => None,
    };
    let notes = paths_near_log(config, NOTE).map(|path| {
        let (directory, shown) = (directory.clone(), path.display().to_string());
        async move {
            let written = within(move || write_note(&path, directory.as_deref())).await;
            if let Err(error) = written {
                tracing::warn!(path = shown, %error, "cannot record the location of the memory file");
            }
        }
    });
    join_all(notes.collect::<Vec<_>>()).await;
}

fn write_note(path: &Path, directory: Option<&Path>) -> io::Result<()> {
    let there = read_note(path)?;
    match directory {
        Some(directory) if there.as_deref() == Some(directory) => Ok(()),
        Some(directory) => {
            let temporary = path.with_extension("new");
            std::fs::write(&temporary, format!("{}\n", directory.display()))?;
            std::fs::rename(temporary, path)
        }
        None if there.is_some() => std::fs::remove_file(path),
        None => Ok(()),
    }
}

fn read_note(path: &Path) -> io::Result<Option<PathBuf>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim_end_matches('\n').into()).filter(|path: &PathBuf| path.is_absolute())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the path of the file `name` in the log's directory of every data directory. Returns none
/// without a metadata log on disks.
pub(in crate::server) fn paths_near_log<'a>(
    config: &'a Config,
    name: &'a str,
) -> impl Iterator<Item = PathBuf> + 'a {
    let has_log = config.worker.store_type.has_local() && config.local.recovery;
    let paths = config.local.paths.iter().filter(move |_| has_log);
    paths.map(move |path| path.join(METADATA).join(name))
}

/// Runs `operation` on a blocking thread. A disk that does not answer within two seconds is an
/// error.
pub(in crate::server) async fn within<T: Send + 'static>(
    operation: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match timeout(NOTE_DEADLINE, spawn_blocking(operation)).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => Err(io::Error::other(error)),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Returns the recorded directories, except the one that `config` names.
async fn recorded_directories(config: &Config) -> BTreeSet<PathBuf> {
    let reads = paths_near_log(config, NOTE).map(|path| within(move || read_note(&path)));
    let read = join_all(reads.collect::<Vec<_>>()).await;
    let mut recorded: BTreeSet<PathBuf> = read.into_iter().filter_map(|read| read.ok().flatten()).collect();
    if let Backing::Directory(directory) = &config.memory.backing {
        recorded.remove(directory);
    }
    recorded
}

/// Refuses a start whose backing differs from where an earlier process left blocks. Checks
/// `inherited`, a memfd that is not used, and the directories recorded in the data
/// directories. Deletes files without blocks.
///
/// # Errors
/// If a file has blocks that a start would give up, or cannot be read.
pub(super) async fn refuse_orphaned(
    config: &Config,
    server_id: &str,
    inherited: Option<OwnedFd>,
) -> anyhow::Result<()> {
    let (recorded, backing) = (recorded_directories(config).await, &config.memory.backing);
    if recorded.is_empty() && inherited.is_none() {
        return Ok(());
    }
    let owner = Owner::current(server_id)?;
    let remedy = "start with that backing, then change it by an upgrade (SIGUSR2) or after a clean stop";
    if let Some(file) = inherited {
        let place = "a memfd in the service manager's descriptor store (memory_store.backing = \"memfd\")";
        let given_up = "`systemctl stop` gives up its blocks";
        match OrphanedMemory::inherited(file, &owner) {
            Ok(Some(OrphanedMemory { blocks: blocks @ 1.., .. })) => bail!(
                "memory_store.backing = \"{backing}\": an earlier process left {blocks} blocks in {place}; \
                 {remedy}; {given_up}"
            ),
            Ok(_) => {}
            Err(error) => bail!(
                "memory_store.backing = \"{backing}\": cannot read blocks of an earlier process in {place}: \
                 {error}; {remedy}; {given_up}"
            ),
        }
    }
    for directory in recorded {
        let orphan = match OrphanedMemory::in_directory(&directory, &owner) {
            Ok(Some(orphan)) => orphan,
            Ok(None) => continue,
            Err(error) => bail!(
                "memory_store.backing = \"{backing}\": cannot read blocks of an earlier process in {}: \
                 {error}",
                directory.display()
            ),
        };
        let (blocks, path) = (orphan.blocks, orphan.path().unwrap_or(directory));
        if blocks > 0 {
            bail!(
                "memory_store.backing = \"{backing}\": an earlier process left {blocks} blocks in {}; \
                 {remedy}; delete it to give up its blocks",
                path.display()
            );
        }
        match orphan.delete() {
            Ok(()) => {
                tracing::info!(path = %path.display(), "deleting an empty memory file of an earlier process")
            }
            Err(error) => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "cannot delete an empty memory file of an earlier process"
                )
            }
        }
    }
    Ok(())
}

/// Maps the memory. Recovers the contents that an earlier process left there, from `inherited` if a
/// memfd was inherited.
pub(in crate::server) async fn open(
    config: &Config,
    server_id: &str,
    inherited: Option<OwnedFd>,
    registry: &Registry,
) -> anyhow::Result<Arc<Memory>> {
    let (inherited, unused) = match config.memory.backing {
        Backing::Memfd => (inherited, None),
        Backing::Auto | Backing::Private | Backing::Directory(_) => (None, inherited),
    };
    refuse_orphaned(config, server_id, unused).await?;
    let section = &config.memory;
    let huge_pages = describe_huge_pages(section);
    if section.backing.is_private() {
        tracing::info!(backing = %section.backing, huge_pages, "{}", describe_private(config));
        return Memory::new(section, registry)
            .with_context(|| format!("cannot map memory_store.capacity = {} bytes", section.capacity_bytes));
    }
    let owner = Owner::current(server_id).context("memory_store.backing")?;
    let memory = Memory::open(section, &owner, inherited, registry)
        .with_context(|| format!("memory_store.backing = \"{}\"", section.backing))?;
    memory.survive_truncation().context("cannot install the handler of SIGBUS")?;
    tracing::info!(backing = %section.backing, huge_pages, "{}", MemoryRetention::of(&memory).describe());
    Ok(memory)
}

/// Returns the description of private memory for the log of a start, with advice if the worker has
/// a metadata log on disks, without which blocks cannot be preserved.
fn describe_private(config: &Config) -> &'static str {
    match config.worker.store_type.has_local() && config.local.recovery {
        true => {
            "an upgrade flushes memory first, and a kill loses blocks in memory; to preserve them, use a \
             service manager that stores descriptors, or a tmpfs directory as memory_store.backing"
        }
        false => "an upgrade flushes memory first, and a kill loses blocks in memory",
    }
}

/// Polls at the disks' probe interval whether the memory file still exists under its name. Returns
/// once it has vanished.
pub(in crate::server) async fn watch(memory: Arc<Memory>, interval: Duration) {
    loop {
        crate::clock::sleep(interval).await;
        let looked_at = Arc::clone(&memory);
        if tokio::task::spawn_blocking(move || looked_at.backing_vanished()).await.unwrap_or(false) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::config::Machine;
    use uniffle_testkit::captured_log::CapturedLog;
    use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

    fn config(text: &str) -> Config {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        Config::parse(text, &std::collections::HashMap::new(), &machine).unwrap()
    }

    /// Regression test: store types without disks refuse the advised value.
    #[test]
    fn backing_is_advised_only_where_it_is_accepted() {
        let advises = |text: &str| describe_private(&config(text)).contains("memory_store.backing");
        assert!(advises("[localfile_store]\ndata_paths = [\"/d\"]\n"));
        assert!(!advises("[localfile_store]\ndata_paths = [\"/d\"]\nrecovery = false\n"));
        assert!(!advises("store_type = \"MEMORY\"\n"));
    }

    /// Regression test: the advice named data directories where there are none.
    #[test]
    fn advice_after_a_loss_holds_for_every_store_type() {
        let log = CapturedLog::of_this_thread();
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        assert!(MemoryRetention::Nothing.log_losses(&[InMemory {
            shuffle: key,
            partitions: 1,
            blocks: 1,
            bytes: 10
        }]));
        let text = log.text();
        assert!(text.contains("storage below memory") && !text.contains("data directories"), "{text}");
    }

    #[tokio::test]
    async fn uninspectable_memfd_is_reported() {
        let config = config(
            "[memory_store]\nbacking = \"private\"\n[localfile_store]\ndata_paths = [\"/nonexistent\"]\n",
        );
        let refused = async |bytes: &[u8]| {
            let mut file = File::from(memfd_create("left", MemfdFlags::CLOEXEC).unwrap());
            file.write_all(bytes).unwrap();
            let refused = refuse_orphaned(&config, "worker-1", Some(file.into())).await;
            refused.map_err(|error| error.to_string())
        };
        let error = refused(&[1; 4096]).await.unwrap_err();
        assert!(error.contains("cannot read blocks") && error.contains("systemctl stop"), "{error}");
        refused(&[]).await.expect("a start without recorded directories was refused");
    }
}
