//! The longest poll of each kind of task: while a task is polled, nothing else runs on its thread, be it a request, a
//! heartbeat or a health check, so no request may make one long (docs/architecture.md).
//!
//! What counts is the CPU time of the thread (`CLOCK_THREAD_CPUTIME_ID`), not the wall clock's: on a machine with more
//! to do than cores a thread waits in the middle of a poll for longer than the poll takes, and that says nothing about
//! the poll. So a bound on it can be asserted on any machine. What a poll waits for without using the CPU (a lock, a
//! page from a disk) is not in it: that is in the histogram of polls that tests have of their runtimes
//! (tests/contract/grpc/bounds.rs).
//!
//! Reading that clock is a system call of some 0.2 µs, the wall clock's a tenth of that. So the thread's CPU time is
//! noted once in a [`NOTE_INTERVAL`] at most, when a poll begins, and read again only after a poll that took longer than
//! [`RESOLUTION`]. What is told is thereby too much by one [`NOTE_INTERVAL`] at most, and never more than what the wall
//! clock says: a poll that is told to be short was.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// Shorter polls are not looked at.
const RESOLUTION: Duration = Duration::from_millis(1);

/// With one of a millisecond, 9 % of the system calls of a worker that serves from memory over gRPC were these.
const NOTE_INTERVAL: Duration = Duration::from_millis(16);

thread_local! {
    /// What the thread's clocks were when a poll began, not longer than [`NOTE_INTERVAL`] before the latest one did.
    static NOTED: Cell<Clocks> = const { Cell::new(Clocks { wall: Duration::ZERO, cpu: Duration::ZERO }) };
}

#[derive(Debug, Clone, Copy)]
struct Clocks {
    wall: Duration,
    cpu: Duration,
}

/// The longest poll by the task's name, since the start. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Polls(Arc<Mutex<HashMap<&'static str, Duration>>>);

impl Polls {
    /// Calls `poll`, in which no other task is polled.
    pub(super) fn timed<T>(&self, name: &'static str, poll: impl FnOnce() -> T) -> T {
        let began = now(ClockId::Monotonic);
        let noted = NOTED.get();
        if began.saturating_sub(noted.wall) > NOTE_INTERVAL {
            NOTED.set(Clocks { wall: began, cpu: now(ClockId::ThreadCPUTime) });
        }
        let polled = poll();
        let wall = now(ClockId::Monotonic).saturating_sub(began);
        if wall >= RESOLUTION {
            let cpu = now(ClockId::ThreadCPUTime).saturating_sub(NOTED.get().cpu);
            self.enter(name, cpu.min(wall));
        }
        polled
    }

    fn enter(&self, name: &'static str, took: Duration) {
        let mut longest = self.0.lock();
        let longest = longest.entry(name).or_default();
        *longest = took.max(*longest);
    }

    /// Those of a millisecond and more.
    pub(super) fn longest(&self) -> Vec<(&'static str, Duration)> {
        self.0.lock().iter().map(|(name, took)| (*name, *took)).collect()
    }
}

fn now(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::Tasks;
    use super::*;

    /// Uses the CPU for `time` of its own.
    fn burn(time: Duration) {
        let begin = now(ClockId::ThreadCPUTime);
        while now(ClockId::ThreadCPUTime) - begin < time {}
    }

    #[tokio::test]
    async fn longest_poll_is_measured_per_poll() {
        let tasks = Tasks::new();
        tasks.spawn("busy", async {
            for _ in 0..20 {
                burn(Duration::from_millis(5));
                tokio::task::yield_now().await;
            }
        });
        tasks.spawn("idle", async { tokio::task::yield_now().await });
        tasks.drained().await;
        let longest = tasks.longest_polls();
        let busy = longest.iter().find(|(name, _)| *name == "busy").unwrap().1;
        // By CPU time, so that it holds however little of the CPU the test gets.
        assert!((Duration::from_millis(5)..Duration::from_millis(50)).contains(&busy), "{longest:?}");
    }

    #[test]
    fn waiting_thread_is_not_busy() {
        let (polls, waited) = (Polls::default(), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                burn(Duration::from_millis(300));
                waited.wait();
            });
            polls.timed("waits", || waited.wait());
        });
        let longest = polls.longest();
        assert!(longest[0].1 < Duration::from_millis(100), "{longest:?}");
    }
}
