//! Limits the rate of a kind of log line, so that clients cannot fill the log.
//!
//! Invariant: suppressed lines are counted. The next line that passes includes their number, unless
//! [`LogLimiter::settle`] returned it or [`LogLimiter::reset`] dropped it before.

use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Instant;

/// Passes a limited number of log lines per interval, and counts the suppressed ones.
#[derive(Debug)]
pub struct LogLimiter {
    lines_max: u32,
    interval: Duration,
    window: Mutex<Window>,
}

/// The current interval.
#[derive(Debug, Default)]
struct Window {
    began: Option<Instant>,
    lines: u32,
    held_back: u64,
}

impl LogLimiter {
    /// Passes `lines_max` lines per `interval`. An interval begins with its first line.
    pub fn new(lines_max: u32, interval: Duration) -> Self {
        Self { lines_max, interval, window: Mutex::default() }
    }

    /// Returns the number of events that the line represents, including its own event and those
    /// suppressed before. Returns `None` if the line is to be suppressed.
    pub fn pass(&self) -> Option<u64> {
        let now = Instant::now();
        let mut window = self.window.lock();
        window.held_back += 1;
        if window.began.is_none_or(|began| now.duration_since(began) >= self.interval) {
            (window.began, window.lines) = (Some(now), 0);
        }
        if window.lines == self.lines_max {
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.held_back))
    }

    /// Returns the number of suppressed events if the interval is over or if this is the `end` of
    /// the log, otherwise 0. Resets the count, so that no later line includes these events.
    pub fn settle(&self, end: bool) -> u64 {
        let mut window = self.window.lock();
        let is_over = window.began.is_some_and(|began| began.elapsed() >= self.interval);
        if is_over || end { std::mem::take(&mut window.held_back) } else { 0 }
    }

    /// Resets the limit and drops the count, after the cause has ended. Returns whether a line
    /// passed since the last reset.
    pub fn reset(&self) -> bool {
        std::mem::take(&mut *self.window.lock()).began.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn first_lines_pass_and_others_are_counted() {
        let limiter = LogLimiter::new(2, INTERVAL);
        assert_eq!((limiter.pass(), limiter.pass()), (Some(1), Some(1)));
        for _ in 0..1000 {
            assert_eq!(limiter.pass(), None);
        }
        tokio::time::advance(INTERVAL - Duration::from_millis(1)).await;
        assert_eq!(limiter.pass(), None);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!((limiter.pass(), limiter.pass(), limiter.pass()), (Some(1002), Some(1), None));
    }

    #[tokio::test(start_paused = true)]
    async fn repaired_fault_is_logged_at_once_when_it_returns() {
        let limiter = LogLimiter::new(1, INTERVAL);
        assert!(!limiter.reset());
        assert_eq!((limiter.pass(), limiter.pass()), (Some(1), None));
        assert!(limiter.reset());
        assert_eq!(limiter.pass(), Some(1));
    }
}
