//! Describes for the log whether block memory gets huge pages.

use std::path::Path;

use super::file::Backing;
use crate::config::{BlockPages, MemoryConfig};

const SHMEM: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const PRIVATE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Describes the pages that block memory gets by the configuration and the settings of the machine.
#[must_use]
pub fn describe(config: &MemoryConfig) -> String {
    let given = match config.block_pages() {
        BlockPages::Huge => "yes",
        BlockPages::HugeAfterUse => "after their first use",
        BlockPages::Small => return "no (memory_store.huge_pages)".to_owned(),
    };
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let verdict = match &config.backing {
        Backing::Auto | Backing::Private => of_setting(PRIVATE, &read(PRIVATE)),
        Backing::Memfd => of_setting(SHMEM, &read(SHMEM)),
        Backing::Directory(path) => of_mount(path, &read(SHMEM), &read("/proc/self/mountinfo")),
    };
    match verdict {
        Ok(why) => format!("{given} ({why})"),
        Err(why) => format!("no, small pages ({why})"),
    }
}

/// Returns whether a setting gives huge pages. The region advises them, so anything but a refusal
/// does.
fn is_given(setting: &str) -> bool {
    !matches!(setting, "never" | "deny" | "")
}

/// Returns the word in brackets, for example `madvise` of `always [madvise] never`.
fn chosen(settings: &str) -> &str {
    settings.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(chosen, _)| chosen)
}

fn of_setting(path: &str, settings: &str) -> Result<String, String> {
    match chosen(settings) {
        "" => Err(format!("the kernel lacks {path}")),
        chosen if is_given(chosen) => Ok(format!("{path} is {chosen}")),
        chosen => Err(format!("{path} is {chosen}")),
    }
}

/// Evaluates the option of a mount. The machine's setting can only forbid or force it.
fn of_mount(directory: &Path, settings: &str, mounts: &str) -> Result<String, String> {
    match chosen(settings) {
        "" => return Err(format!("the kernel lacks {SHMEM}")),
        forced @ "force" => return Ok(format!("{SHMEM} is {forced}")),
        denied @ "deny" => return Err(format!("{SHMEM} is {denied}")),
        _ => {}
    }
    match option_of(directory, mounts) {
        Some(option) if is_given(option) => Ok(format!("the tmpfs has huge={option}")),
        _ => Err("mount the tmpfs with huge=advise to use them".to_owned()),
    }
}

/// Returns the option `huge` of the mount of `directory` from `/proc/self/mountinfo` (proc(5)). The
/// innermost mount counts, and of several at one path the last.
fn option_of<'a>(directory: &Path, mounts: &'a str) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, of_file_system) = line.split_once(" - ")?;
        let at = mount.split(' ').nth(4)?;
        directory.starts_with(at).then_some((at.len(), of_file_system.split(' ').nth(2)?))
    });
    let (_, options) = mounts.max_by_key(|(len, _)| *len)?;
    options.split(',').find_map(|option| option.strip_prefix("huge="))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        22 1 252:0 / / rw,relatime - ext4 /dev/vda rw\n\
        26 22 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=4k\n\
        30 22 0:30 / /memory rw shared:3 - tmpfs tmpfs rw,size=8k,huge=never\n\
        31 22 0:31 / /memory rw shared:4 - tmpfs tmpfs rw,huge=advise,size=8k\n";
    const SETTINGS: &str = "always within_size advise [never] deny force\n";

    #[test]
    fn mount_option_enables_huge_pages() {
        let is_given = |at: &str, settings: &str| of_mount(Path::new(at), settings, MOUNTS).is_ok();
        assert!(
            is_given("/memory/worker", SETTINGS) && is_given("/memory", SETTINGS),
            "the last mount of a path must decide"
        );
        assert!(!is_given("/dev/shm/worker", SETTINGS) && !is_given("/memories", SETTINGS));
        assert!(!is_given("/memory", "always [deny] force") && is_given("/dev/shm", "always deny [force]"));
        assert!(!is_given("/memory", ""));
    }

    #[test]
    fn bracketed_value_is_the_machine_setting() {
        let is_given = |settings: &str| of_setting(SHMEM, settings).is_ok();
        assert!(is_given("always [madvise] never") && is_given("[always] madvise never"));
        assert!(!is_given(SETTINGS) && !is_given("always [deny]") && !is_given(""));
        assert!(of_setting(SHMEM, SETTINGS).unwrap_err().contains("shmem_enabled is never"));
    }
}
