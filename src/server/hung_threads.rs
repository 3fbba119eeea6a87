//! Detects threads that hang in the kernel, for example on a disk that does not answer.
//!
//! `exec` first waits for every other thread of the process. A thread in an uninterruptible call
//! does not end, even on SIGKILL, and nobody would serve meanwhile. A worker therefore refuses an
//! upgrade while it has such a thread.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::clock::sleep;

/// A call of this duration is considered hung. Slow disks answer within seconds.
const HANGS_AFTER: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(100);

/// Waits until every thread has left the uninterruptible call that it is in now.
///
/// # Errors
/// The number of threads still in their calls after [`HANGS_AFTER`].
pub(super) async fn awake() -> Result<(), usize> {
    let mut asleep = sleeping(Path::new("/proc/self/task"));
    for _ in 0..HANGS_AFTER.as_millis() / LOOK.as_millis() {
        if asleep.is_empty() {
            return Ok(());
        }
        sleep(LOOK).await;
        let now = sleeping(Path::new("/proc/self/task"));
        asleep.retain(|thread, call| now.get(thread) == Some(call));
    }
    if asleep.is_empty() { Ok(()) } else { Err(asleep.len()) }
}

/// Returns the threads in an uninterruptible call, each with its sleep counter. Empty if the kernel
/// does not report it.
fn sleeping(tasks: &Path) -> BTreeMap<String, u64> {
    let threads = std::fs::read_dir(tasks).into_iter().flatten().flatten();
    let asleep = threads.filter_map(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        Some((thread.file_name().to_string_lossy().into_owned(), uninterruptible(&status)?))
    });
    asleep.collect()
}

/// Returns the number of voluntary sleeps of a thread in an uninterruptible call. The number
/// changes when the thread wakes.
fn uninterruptible(status: &str) -> Option<u64> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let sleeps = field("State:")?.starts_with('D');
    field("voluntary_ctxt_switches:")?.parse().ok().filter(|_| sleeps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hung_call_differs_from_many_short_ones() {
        let status = |state: &str, switches: u64| {
            format!(
                "Name:\tx\nState:\t{state}\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t9\n"
            )
        };
        assert_eq!(uninterruptible(&status("D (disk sleep)", 7)), Some(7));
        assert_eq!(uninterruptible(&status("S (sleeping)", 7)), None);
        assert_eq!(uninterruptible("State:\tD (disk sleep)\n"), None);
    }

    #[test]
    fn hung_threads_are_found_by_kernel_state() {
        let dir = tempfile::tempdir().unwrap();
        for (thread, state) in [("11", "D (disk sleep)"), ("12", "S (sleeping)")] {
            std::fs::create_dir(dir.path().join(thread)).unwrap();
            let status = format!("State:\t{state}\nvoluntary_ctxt_switches:\t3\n");
            std::fs::write(dir.path().join(thread).join("status"), status).unwrap();
        }
        assert_eq!(sleeping(dir.path()), BTreeMap::from([("11".to_owned(), 3)]));
        assert!(sleeping(&dir.path().join("nothing")).is_empty());
    }

    #[tokio::test]
    async fn process_with_waiting_threads_is_responsive() {
        awake().await.unwrap();
    }
}
