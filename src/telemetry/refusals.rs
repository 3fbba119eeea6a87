//! Client-caused errors in the log: a few lines of each kind a minute, however often they happen.
//!
//! Not here: what counts as the client's fault, and metrics. Nothing is formatted for a line that is held back.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use parking_lot::Mutex;

use super::LogLimiter;

/// Of these lines, which are limited here.
pub(super) const TARGET: &str = module_path!();

/// Lines of one kind in an interval.
const LINES_MAX: u32 = 3;
const INTERVAL: Duration = Duration::from_secs(60);
/// Of an error's text, which may hold what the client sent.
const TEXT_CHARS_MAX: usize = 300;

/// Limits the log lines of each kind.
#[derive(Debug, Default)]
pub struct Refusals {
    kinds: Mutex<BTreeMap<&'static str, LogLimiter>>,
}

impl Refusals {
    /// A request that came through `listener` was refused for a `kind` of fault.
    pub fn note(&self, listener: &'static str, kind: &'static str, error: &dyn Display) {
        if let Some(held_back) = self.due(kind) {
            let error: String =
                error.to_string().chars().take(TEXT_CHARS_MAX).flat_map(char::escape_debug).collect();
            tracing::warn!(listener, kind, %error, held_back, "a client's request was refused");
        }
    }

    /// How many lines were held back since the last one; `None` if this one is, too.
    fn due(&self, kind: &'static str) -> Option<u64> {
        let mut kinds = self.kinds.lock();
        let limiter = kinds.entry(kind).or_insert_with(|| LogLimiter::new(LINES_MAX, INTERVAL));
        limiter.pass().map(|events| events - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::captured::CapturedLog;

    #[test]
    fn kinds_do_not_hold_each_other_back() {
        let refusals = Refusals::default();
        for _ in 0..LINES_MAX {
            assert_eq!(refusals.due("a"), Some(0));
        }
        assert_eq!((refusals.due("a"), refusals.due("b")), (None, Some(0)));
    }

    #[test]
    fn a_line_stays_a_line() {
        let text = format!("bad\nWARN everything burns {}", "x".repeat(10_000));
        let log = CapturedLog::of_this_thread();
        Refusals::default().note("grpc", "a", &text);
        let lines = log.text();
        assert_eq!(lines.lines().count(), 1, "{lines}");
        assert!(
            lines.contains("WARN") && lines.contains("listener=\"grpc\"") && lines.len() < 600,
            "{lines}"
        );
    }
}
