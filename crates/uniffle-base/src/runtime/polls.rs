//! Records the longest poll of each kind of task. A poll blocks everything else on its thread, so
//! no request may cause a long one (docs/architecture.md).
//!
//! Polls are measured in CPU time of the thread: on an overloaded machine a thread may be preempted
//! within a poll. Tests can therefore assert a bound on any machine. Waits without CPU use are not
//! included.
//!
//! Reading the CPU time is costly, so a reading is reused for a [`NOTE_INTERVAL`]. A result is too
//! high by at most that time, and never exceeds the wall-clock time.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// Shorter polls are ignored.
const RESOLUTION: Duration = Duration::from_millis(1);

/// Long enough to keep the share of these system calls small.
const NOTE_INTERVAL: Duration = Duration::from_millis(16);

thread_local! {
    /// Clock readings at the begin of a poll, at most [`NOTE_INTERVAL`] before the latest poll
    /// began.
    static NOTED: Cell<Clocks> = const { Cell::new(Clocks { wall: Duration::ZERO, cpu: Duration::ZERO }) };
}

#[derive(Debug, Clone, Copy)]
struct Clocks {
    wall: Duration,
    cpu: Duration,
}

/// The longest poll since the start, by task name. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Polls(Arc<Mutex<HashMap<&'static str, Duration>>>);

impl Polls {
    /// Calls and times `poll`. No other task is polled within it.
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

    /// Returns the longest poll by task name, for names with a poll of at least a millisecond.
    pub(super) fn longest(&self) -> Vec<(&'static str, Duration)> {
        self.0.lock().iter().map(|(name, took)| (*name, *took)).collect()
    }
}

fn now(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

/// Work time of one poll. Work that starts before the limit runs to its end.
const BUDGET: Duration = Duration::from_millis(1);

/// Work of one connection since its task last yielded.
///
/// The budget is time and not bytes, because the cost of a message depends on its content: one with
/// thousands of small partitions takes longer than one with large blocks. Waits do not count.
#[derive(Debug, Default)]
pub struct PollBudget(Duration);

impl PollBudget {
    /// Adds `work` to the budget used.
    pub fn count(&mut self, work: Duration) {
        self.0 += work;
    }

    /// Returns whether the task must yield now. If so, a new budget begins.
    pub fn is_over(&mut self) -> bool {
        let is_over = self.0 >= BUDGET;
        if is_over {
            self.0 = Duration::ZERO;
        }
        is_over
    }
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

    #[test]
    fn poll_budget_ends_after_a_millisecond() {
        let mut budget = PollBudget::default();
        budget.count(Duration::from_micros(999));
        assert!(!budget.is_over());
        budget.count(Duration::from_micros(1));
        assert!(budget.is_over());
        assert!(!budget.is_over());
    }
}
