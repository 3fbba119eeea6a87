//! How long one connection works before others get its thread.
//!
//! What a message costs depends on what is in it and not on its bytes alone: one of thousands of small partitions takes longer than
//! one of large blocks. So time is counted, of work alone.

use std::time::Duration;

/// What one poll may work, and whatever is begun when it is over.
const TURN: Duration = Duration::from_millis(1);

/// The work of one connection since others had the thread.
#[derive(Debug, Default)]
pub(crate) struct Turn(Duration);

impl Turn {
    /// Counts some.
    pub(crate) fn count(&mut self, work: Duration) {
        self.0 += work;
    }

    /// Whether others are to have the thread now; then another turn begins.
    pub(crate) fn is_over(&mut self) -> bool {
        let is_over = self.0 >= TURN;
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
        let mut turn = Turn::default();
        turn.count(Duration::from_micros(999));
        assert!(!turn.is_over());
        turn.count(Duration::from_micros(1));
        assert!(turn.is_over());
        assert!(!turn.is_over());
    }
}
