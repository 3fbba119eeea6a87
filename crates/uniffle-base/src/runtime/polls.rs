//! Records the longest poll of each kind of task. A poll blocks everything else on its thread, so
//! no request may cause a long one.
//!
//! Polls are measured in CPU time of the thread: on an overloaded machine a thread may be preempted
//! within a poll. Tests can therefore assert a bound on any machine. Waits without CPU use are not
//! included.
//!
//! Reading the CPU time is costly, so a reading is reused for [`CPU_CLOCK_INTERVAL`]. Invariant: a
//! result is too high by at most that time, never too low, and at most the wall-clock time.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// Polls that take less wall-clock time are ignored.
const RECORDED_MIN: Duration = Duration::from_millis(1);

/// Interval between two readings of the thread's CPU clock. Each is a system call, so this is long
/// enough to keep their share of the CPU time small.
const CPU_CLOCK_INTERVAL: Duration = Duration::from_millis(16);

thread_local! {
    /// Clock readings at the beginning of a poll, at most [`CPU_CLOCK_INTERVAL`] before the latest
    /// poll began.
    static CACHED_CLOCKS: Cell<Clocks> = const { Cell::new(Clocks { wall: Duration::ZERO, cpu: Duration::ZERO }) };
}

#[derive(Debug, Clone, Copy)]
struct Clocks {
    wall: Duration,
    cpu: Duration,
}

/// The longest poll since the start, by task name. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct LongestPolls(Arc<Mutex<HashMap<&'static str, Duration>>>);

impl LongestPolls {
    /// Calls and times `poll`, which must not poll another task.
    pub(super) fn timed<T>(&self, name: &'static str, poll: impl FnOnce() -> T) -> T {
        let began = now(ClockId::Monotonic);
        if began.saturating_sub(CACHED_CLOCKS.get().wall) > CPU_CLOCK_INTERVAL {
            CACHED_CLOCKS.set(Clocks { wall: began, cpu: now(ClockId::ThreadCPUTime) });
        }
        let polled = poll();
        let wall = now(ClockId::Monotonic).saturating_sub(began);
        if wall >= RECORDED_MIN {
            let cpu = now(ClockId::ThreadCPUTime).saturating_sub(CACHED_CLOCKS.get().cpu);
            self.record(name, cpu.min(wall));
        }
        polled
    }

    fn record(&self, name: &'static str, took: Duration) {
        let mut longest = self.0.lock();
        let longest = longest.entry(name).or_default();
        *longest = took.max(*longest);
    }

    /// Returns the longest poll by task name, for names with a poll of at least a millisecond of
    /// wall-clock time.
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

    /// Uses `time` of CPU time on this thread.
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
        // CPU time, so that the bound holds however little CPU the test gets.
        assert!((Duration::from_millis(5)..Duration::from_millis(50)).contains(&busy), "{longest:?}");
    }

    #[test]
    fn waiting_thread_is_not_busy() {
        let (polls, waited) = (LongestPolls::default(), std::sync::Barrier::new(2));
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
