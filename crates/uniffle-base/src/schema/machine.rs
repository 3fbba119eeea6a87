//! Facts about the machine that defaults depend on: memory, cores and a directory for state.
//!
//! They are read once at the start into a plain value. Tests construct their own.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Facts about the machine that defaults depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Memory available to this process: the minimum of the machine's and its control groups'.
    pub memory_bytes: u64,
    /// Cores available to this process.
    pub cores: usize,
    /// Default directory for state. The default data directory is `data` in it.
    pub state_dir: PathBuf,
}

/// Assumed if the amount of memory cannot be read.
const MEMORY_BYTES_FALLBACK: u64 = 1 << 30;

impl Default for Machine {
    /// Returns a small machine that is the same everywhere, for defaults in tests and documents.
    fn default() -> Self {
        Self {
            memory_bytes: MEMORY_BYTES_FALLBACK,
            cores: 1,
            state_dir: PathBuf::from("/var/lib/uniffle-worker"),
        }
    }
}

impl Machine {
    /// Reads the running system. Never fails: unreadable facts get small values.
    pub fn detect(env: &HashMap<String, String>) -> Self {
        let physical =
            std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_bytes(&text, "MemTotal:"));
        let memory_bytes = [physical, cgroup_limit_bytes(Path::new("/sys/fs/cgroup"))]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(MEMORY_BYTES_FALLBACK);
        Self {
            memory_bytes,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            state_dir: state_dir(env),
        }
    }
}

/// Returns a figure of `/proc/meminfo` in bytes. `name` includes the colon.
pub(super) fn meminfo_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the lowest memory limit of this process's control groups.
fn cgroup_limit_bytes(mount: &Path) -> Option<u64> {
    // "max" means no limit and does not parse.
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = of_groups(mount, "memory", |group| {
        number(group.join("memory.max")).or_else(|| number(group.join("memory.limit_in_bytes")))
    });
    limit.map(|(bytes, _)| bytes)
}

/// Returns the minimum of `ask` over this process's control groups for `controller`, and the group
/// that has it.
///
/// Covers cgroup versions 1 and 2, up to the root that is visible here.
pub(super) fn of_groups(
    mount: &Path,
    controller: &str,
    ask: impl Fn(&Path) -> Option<u64>,
) -> Option<(u64, PathBuf)> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, group) = (fields.next()?, fields.next()?);
            match controllers {
                "" => least(mount, group, &ask),
                _ if controllers.split(',').any(|name| name == controller) => {
                    least(&mount.join(controller), group, &ask)
                }
                _ => None,
            }
        })
        .min()
}

/// Returns the minimum of `ask` from `group` up to `root`. A container often sees its own group as
/// the root, so missing directories are skipped.
fn least(root: &Path, group: &str, ask: impl Fn(&Path) -> Option<u64>) -> Option<(u64, PathBuf)> {
    let own = root.join(group.trim_start_matches('/'));
    let groups = own.ancestors().take_while(|directory| directory.starts_with(root));
    groups.filter_map(|group| Some((ask(group)?, group.to_owned()))).min()
}

/// Returns `uniffle-worker` in `$XDG_STATE_HOME`, else in `~/.local/state`, else in the temp
/// directory. The name in the temp directory contains the user id, so that users do not collide.
fn state_dir(env: &HashMap<String, String>) -> PathBuf {
    let absolute =
        |name: &str| env.get(name).map(PathBuf::from).filter(|path| super::kind::is_plain_absolute(path));
    if let Some(state) = absolute("XDG_STATE_HOME") {
        return state.join("uniffle-worker");
    }
    if let Some(home) = absolute("HOME").filter(|home| home != Path::new("/")) {
        return home.join(".local/state/uniffle-worker");
    }
    let temp = absolute("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp"));
    temp.join(format!("uniffle-worker-{}", rustix::process::getuid().as_raw()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_follows_the_platform() {
        let dir = |pairs: &[(&str, &str)]| {
            state_dir(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        assert_eq!(dir(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]), Path::new("/s/uniffle-worker"));
        assert_eq!(
            dir(&[("XDG_STATE_HOME", "rel"), ("HOME", "/h")]),
            Path::new("/h/.local/state/uniffle-worker")
        );
        assert!(dir(&[("TMPDIR", "/t")]).starts_with("/t"));
        assert!(dir(&[]).starts_with("/tmp"));
    }

    #[test]
    fn limits_of_outer_groups_count() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(inner.join("memory.max"), "max\n").unwrap();
        std::fs::write(root.path().join("a/memory.max"), "1048576\n").unwrap();
        let limit =
            |group: &Path| std::fs::read_to_string(group.join("memory.max")).ok()?.trim().parse().ok();
        assert_eq!(least(root.path(), "/a/b", limit), Some((1_048_576, root.path().join("a"))));
        assert_eq!(least(root.path(), "/none", limit), None);
    }

    #[test]
    fn meminfo_is_read_in_kib() {
        assert_eq!(meminfo_bytes("MemTotal:       2048 kB\nMemFree: 1 kB\n", "MemTotal:"), Some(2 << 20));
        assert_eq!(meminfo_bytes("garbage", "MemTotal:"), None);
    }
}
