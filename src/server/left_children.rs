//! Children that the program left which this process was before an upgrade: a rehearsal, or what names functions for a profile
//! (which is killed with the thread that started it). `exec` makes them this program's, and none that it knows: without this each
//! would stay a zombie for as long as the worker lives.

use std::thread::Builder;

use procfs::process::Process;
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, waitpid};

/// Waits on a thread for those that there are. To be called before this program starts any of its own.
pub(super) fn reap() {
    let children = children();
    if children.is_empty() {
        return;
    }
    let waiting = Builder::new().name("uniffle-reap".to_owned()).spawn(move || {
        for child in children {
            // It can only be gone already.
            let _ = retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()));
        }
    });
    if let Err(error) = waiting {
        tracing::warn!(%error, "children of the program before are not waited for");
    }
}

/// Of all threads; none when the kernel does not tell.
fn children() -> Vec<Pid> {
    let tasks = Process::myself().and_then(|process| process.tasks()).into_iter().flatten().flatten();
    let children = tasks.flat_map(|task| task.children().unwrap_or_default());
    children.filter_map(|child| Pid::from_raw(i32::try_from(child).ok()?)).collect()
}
