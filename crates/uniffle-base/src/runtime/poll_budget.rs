//! Cooperative poll budget of a connection.
//!
//! The cost of a message depends on its content and not only on its size. A message with thousands
//! of small partitions takes longer than one with large blocks. The budget is therefore work time,
//! without waits.

use std::time::Duration;

/// Work time of one poll. Work that starts before the limit runs to its end.
const LIMIT: Duration = Duration::from_millis(1);

/// Work of one connection since its task last yielded.
#[derive(Debug, Default)]
pub struct PollBudget(Duration);

impl PollBudget {
    /// Adds `work` to the budget used.
    pub fn count(&mut self, work: Duration) {
        self.0 += work;
    }

    /// Returns whether the task must yield now. If so, a new budget begins.
    pub fn is_over(&mut self) -> bool {
        let is_over = self.0 >= LIMIT;
        if is_over {
            self.0 = Duration::ZERO;
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
