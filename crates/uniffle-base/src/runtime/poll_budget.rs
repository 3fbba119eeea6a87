//! Work time after which a task yields by itself, so that its polls stay short.
//!
//! It is unrelated to `crate::budget`, and to Tokio's budget of operations per task.

use std::time::Duration;

/// Work time between two yields. Work that starts before the limit runs to its end.
const WORK_MAX: Duration = Duration::from_millis(1);

/// Work of one connection or call since the budget began. A wait does not begin a new one.
///
/// The limit is time and not bytes, because the cost of a message depends on its content: one with
/// thousands of small partitions takes longer than one with large blocks. Waits do not count.
#[derive(Debug, Default)]
pub struct PollBudget {
    used: Duration,
}

impl PollBudget {
    /// Adds `work` to the used time.
    pub fn add(&mut self, work: Duration) {
        self.used += work;
    }

    /// Returns whether the budget is used up, so that the task must yield now. If so, a new budget
    /// begins.
    pub fn take_exhausted(&mut self) -> bool {
        let is_exhausted = self.used >= WORK_MAX;
        if is_exhausted {
            self.used = Duration::ZERO;
        }
        is_exhausted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_budget_ends_after_a_millisecond() {
        let mut budget = PollBudget::default();
        budget.add(Duration::from_micros(999));
        assert!(!budget.take_exhausted());
        budget.add(Duration::from_micros(1));
        assert!(budget.take_exhausted());
        assert!(!budget.take_exhausted());
    }
}
