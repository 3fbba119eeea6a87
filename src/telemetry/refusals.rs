//! Logs client-caused errors, with a limit per kind and minute.
//!
//! Callers decide which errors are the client's fault. A suppressed line is not formatted.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use parking_lot::Mutex;
use uniffle_base::LogLimiter;

/// Target of these lines, which have a limit of their own.
pub(super) const TARGET: &str = module_path!();

/// Lines per kind and interval.
const LINES_MAX: u32 = 3;
const INTERVAL: Duration = Duration::from_secs(60);
/// Maximum length of an error text, which may contain data of the client.
const TEXT_CHARS_MAX: usize = 300;

/// Limits the log lines of each kind.
#[derive(Debug, Default)]
pub struct Refusals {
    kinds: Mutex<BTreeMap<&'static str, LogLimiter>>,
}

impl Refusals {
    /// Logs the refusal of a request on `listener` due to an error of this `kind`.
    pub fn note(&self, listener: &'static str, kind: &'static str, error: &dyn Display) {
        if let Some(held_back) = self.due(kind) {
            let error: String =
                error.to_string().chars().take(TEXT_CHARS_MAX).flat_map(char::escape_debug).collect();
            tracing::warn!(listener, kind, %error, held_back, "request refused");
        }
    }

    /// Returns the number of lines suppressed since the last one, or `None` to suppress this one.
    fn due(&self, kind: &'static str) -> Option<u64> {
        let mut kinds = self.kinds.lock();
        let limiter = kinds.entry(kind).or_insert_with(|| LogLimiter::new(LINES_MAX, INTERVAL));
        limiter.pass().map(|events| events - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_testkit::captured_log::CapturedLog;

    #[test]
    fn kinds_are_limited_independently() {
        let refusals = Refusals::default();
        for _ in 0..LINES_MAX {
            assert_eq!(refusals.due("a"), Some(0));
        }
        assert_eq!((refusals.due("a"), refusals.due("b")), (None, Some(0)));
    }

    #[test]
    fn refusal_stays_on_one_line() {
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
