//! A cgroup (version 1 or 2) with a memory limit, if this process may create one.

use std::io;
use std::io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use uniffle_testkit::tools::weaker;

/// A cgroup, removed on drop.
pub(super) struct Group {
    dir: PathBuf,
    version: u8,
}

impl Group {
    /// Creates a group. Returns `None` without the permission; with `CI=true` other failures panic.
    pub(super) fn with_limit(bytes: u64) -> Option<Self> {
        let made = Self::make(bytes);
        if let Err(error) = &made {
            let is_allowed = !matches!(error.kind(), NotFound | PermissionDenied | ReadOnlyFilesystem);
            let why = format!("no cgroup ({error}), the resident size is held to the bound instead");
            weaker("adversary", &why, is_allowed);
        }
        made.ok()
    }

    fn make(bytes: u64) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let found = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let (root, version) = match controllers {
                "" => ("/sys/fs/cgroup", 2),
                _ if controllers.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", 1),
                _ => return None,
            };
            let own = Path::new(root).join(path.trim_start_matches('/'));
            // In version 2 a group with processes cannot have limited children, so use a sibling.
            let made_in = if version == 1 { own } else { own.parent()?.to_owned() };
            Some((made_in, version))
        });
        let (made_in, version) = found.ok_or(NotFound)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = made_in.join(format!("uniffle-worker-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir)?;
        let group = Self { dir, version };
        let limit = if version == 1 { "memory.limit_in_bytes" } else { "memory.max" };
        std::fs::write(group.dir.join(limit), bytes.to_string())?;
        Ok(group)
    }

    /// Returns a command that enters the group and executes its arguments.
    pub(super) fn wrapper(&self) -> Vec<String> {
        let line = format!("echo $$ > {} && exec \"$@\"", self.dir.join("cgroup.procs").display());
        ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec()
    }

    /// Returns the number of processes that the kernel killed in this group.
    pub(super) fn kills(&self) -> u64 {
        let file = if self.version == 1 { "memory.oom_control" } else { "memory.events" };
        let text = std::fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill "))
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel releases the group after its processes were reaped.
        drop(std::fs::remove_dir(&self.dir));
    }
}
