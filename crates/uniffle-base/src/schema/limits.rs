//! Limits that the system sets for this process: memory of the machine, control groups and rlimits.
//!
//! They are read once at the start. `config::limits` compares them with the configuration.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::machine::{meminfo_bytes, of_groups};

const CGROUPS: &str = "/sys/fs/cgroup";

/// A limit that the system sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemLimit {
    /// Origin of the limit, as text that an operator can search for.
    pub name: String,
    pub value: u64,
}

/// A limit for the addresses that this process reserves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressLimit {
    pub limit: SystemLimit,
    /// Bytes that are reserved now.
    pub used_bytes: u64,
    /// True if mapped files count too.
    pub has_files: bool,
}

/// The lowest limit of each kind. `None` means unlimited or unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SystemLimits {
    /// Bytes of memory.
    pub memory: Option<SystemLimit>,
    /// Bytes of swap in addition to `memory`. 0 if a control group limits the memory.
    pub swap_bytes: u64,
    /// Open file descriptors.
    pub descriptors: Option<SystemLimit>,
    /// Threads. Threads of other processes that share the limit are not subtracted.
    pub threads: Option<SystemLimit>,
    /// Size of a file in bytes.
    pub file_bytes: Option<SystemLimit>,
    /// Address space and private memory.
    pub addresses: Vec<AddressLimit>,
}

impl SystemLimits {
    /// Reads the limits of the running system. An unreadable limit counts as unlimited.
    #[must_use]
    pub fn read() -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let of_meminfo = |name| meminfo_bytes(&meminfo, name);
        let machine = limit("this machine's memory (MemTotal of /proc/meminfo)", of_meminfo("MemTotal:"));
        let groups = of_group("memory", &["memory.max", "memory.limit_in_bytes"]);
        let memory = least([machine.clone(), groups]);
        let swap_bytes = of_meminfo("SwapTotal:").filter(|_| memory == machine).unwrap_or(0);
        let threads_max = number(Path::new("/proc/sys/kernel/threads-max"));
        let threads = least([
            soft("RLIMIT_NPROC", Resource::Nproc).filter(|_| !may_exceed_nproc()),
            of_group("pids", &["pids.max"]),
            limit("/proc/sys/kernel/threads-max", threads_max),
        ]);
        Self {
            memory,
            swap_bytes,
            descriptors: soft("RLIMIT_NOFILE", Resource::Nofile),
            threads,
            file_bytes: soft("RLIMIT_FSIZE", Resource::Fsize),
            addresses: addresses(),
        }
    }
}

fn addresses() -> Vec<AddressLimit> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let of = |name, resource, used, has_files| {
        let used_bytes = meminfo_bytes(&status, used).unwrap_or(0);
        soft(name, resource).map(|limit| AddressLimit { limit, used_bytes, has_files })
    };
    let all = [
        of("RLIMIT_AS (ulimit -v, LimitAS=)", Resource::As, "VmSize:", true),
        of("RLIMIT_DATA (ulimit -d, LimitDATA=)", Resource::Data, "VmData:", false),
    ];
    all.into_iter().flatten().collect()
}

/// Raises the soft limits of descriptors, threads and file size to the hard limits, if permitted.
pub fn raise_soft_limits() {
    for resource in [Resource::Nofile, Resource::Nproc, Resource::Fsize] {
        let Rlimit { current, maximum } = getrlimit(resource);
        if current != maximum {
            // If raising fails, the check of the limits reports the low limit.
            let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
        }
    }
}

/// Returns whether the kernel exempts this process from `RLIMIT_NPROC`.
fn may_exceed_nproc() -> bool {
    let freeing = CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN;
    capabilities(None).is_ok_and(|sets| sets.effective.intersects(freeing))
}

fn soft(name: &str, resource: Resource) -> Option<SystemLimit> {
    limit(name, getrlimit(resource).current)
}

/// Returns the lowest value in `files` among this process's control groups for `controller`.
fn of_group(controller: &str, files: &[&str]) -> Option<SystemLimit> {
    let file_of = |group: &Path| files.iter().map(|file| group.join(file)).find(|path| path.exists());
    let (value, group) =
        of_groups(Path::new(CGROUPS), controller, |group| file_of(group).and_then(|path| number(&path)))?;
    let file: PathBuf = file_of(&group).unwrap_or(group);
    limit(&file.display().to_string(), Some(value))
}

/// Returns the number in a file. Returns `None` for "max" and for an unreadable file.
fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn limit(name: &str, value: Option<u64>) -> Option<SystemLimit> {
    value.map(|value| SystemLimit { name: name.to_owned(), value })
}

fn least<const N: usize>(limits: [Option<SystemLimit>; N]) -> Option<SystemLimit> {
    limits.into_iter().flatten().min_by_key(|limit| limit.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_this_machine_are_read() {
        let limits = SystemLimits::read();
        assert!(limits.memory.is_some_and(|memory| memory.value > 1 << 20));
        assert!(limits.threads.is_some_and(|threads| threads.value > 0));
    }

    #[test]
    fn least_limit_counts_and_none_is_unlimited() {
        assert_eq!(least([None, None]), None);
        let least = least([limit("a", Some(3)), None, limit("b", Some(2))]).unwrap();
        assert_eq!((least.name.as_str(), least.value), ("b", 2));
    }

    #[test]
    fn soft_limits_are_raised_to_the_hard_ones() {
        raise_soft_limits();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!(current, maximum);
    }
}
