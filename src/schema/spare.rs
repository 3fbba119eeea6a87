//! Memory of the machine that is currently unused.
//!
//! Dirty pages of the page cache count as unused here. The caller must account for those that it
//! writes itself.

use std::path::Path;

use super::machine::{meminfo_bytes, of_groups};

/// Source of the amount of spare memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpareMemory {
    /// The machine and the control groups of this process.
    OfMachine,
    /// A fixed number of bytes, for tests.
    Always(u64),
}

impl SpareMemory {
    /// Returns the available bytes minus a quarter of the total, for the machine or for the control
    /// group with the least left. Reads a few small files in `/proc` and `/sys`.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::OfMachine => of_machine().unwrap_or(0),
            Self::Always(bytes) => bytes,
        }
    }
}

fn of_machine() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let (total, available) = (meminfo_bytes(&text, "MemTotal:")?, meminfo_bytes(&text, "MemAvailable:")?);
    let machine = available.saturating_sub(total / 4);
    let groups = of_groups(Path::new("/sys/fs/cgroup"), "memory", spare_of_group);
    Some(groups.map_or(machine, |(groups, _)| groups.min(machine)))
}

/// Returns the spare memory of a control group, or `None` if it has no limit.
fn spare_of_group(directory: &Path) -> Option<u64> {
    let number = |name: &str| std::fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    // In cgroup version 1 only the `total_` figure includes child groups.
    let stat = std::fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let cached =
        |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let cached = cached("total_inactive_file ").or_else(|| cached("inactive_file ")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)).saturating_sub(limit / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_memory_of_a_cgroup_includes_its_cache() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        assert_eq!(spare_of_group(group.path()), None);
        write("memory.current", "700\n");
        write("memory.max", "max\n");
        assert_eq!(spare_of_group(group.path()), None, "no limit");
        write("memory.max", "1000\n");
        assert_eq!(spare_of_group(group.path()), Some(50));
        write("memory.stat", "anon 500\ninactive_file 200\nactive_file 7\n");
        assert_eq!(spare_of_group(group.path()), Some(250));
        write("memory.current", "990\n");
        assert_eq!(spare_of_group(group.path()), Some(0));
    }

    #[test]
    fn spare_memory_is_read_from_the_machine() {
        assert!(of_machine().is_some());
        assert_eq!(SpareMemory::Always(7).bytes(), 7);
    }
}
