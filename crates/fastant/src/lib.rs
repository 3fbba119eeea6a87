//! The clock of fastrace's spans, in place of the published crate of this name
//! (`[patch.crates-io]`).
//!
//! The published crate calibrates the processor's time stamp counter before `main`, which also
//! lengthens the gap of an upgrade: by 20 ms on an idle machine, by about 100 ms on a busy one.
//! This crate reads the system's monotonic clock, which needs no calibration and takes about 20 ns
//! more per span. It has only the functions that fastrace uses.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time at which the clock was first read.
#[expect(clippy::disallowed_types, reason = "spans are not tested with a paused clock")]
static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);

/// A time of the monotonic clock: nanoseconds since the clock was first read, plus 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// A time before every time that [`Instant::now`] returns.
    pub const ZERO: Self = Self(0);

    /// Returns the current time.
    pub fn now() -> Self {
        Self(nanos(START.elapsed()).saturating_add(1))
    }

    /// Returns the time that has passed since this instant.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(Self::now().0.saturating_sub(self.0))
    }

    /// Converts this instant to nanoseconds since 1970. `anchor` relates the two clocks.
    pub fn as_unix_nanos(&self, anchor: &Anchor) -> u64 {
        anchor.unix_nanos.saturating_add(self.0).saturating_sub(anchor.at.0)
    }
}

/// A time read from both clocks at once.
#[derive(Debug, Clone, Copy)]
pub struct Anchor {
    at: Instant,
    unix_nanos: u64,
}

impl Anchor {
    /// Reads both clocks.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        let unix_nanos = nanos(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        Self { at: Instant::now(), unix_nanos }
    }
}

/// Converts a duration to nanoseconds. Saturates at 584 years.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_times_are_monotonic() {
        let (first, second) = (Instant::now(), Instant::now());
        assert!(Instant::ZERO < first && first <= second);
        assert!(first.elapsed() >= Duration::from_nanos(second.0 - first.0));
    }

    #[test]
    fn unix_times_keep_the_distance_of_instants() {
        let anchor = Anchor::new();
        let before = Instant(anchor.at.0 - 1);
        let after = Instant(anchor.at.0 + 7);
        assert_eq!(after.as_unix_nanos(&anchor), anchor.unix_nanos + 7);
        assert_eq!(before.as_unix_nanos(&anchor), anchor.unix_nanos - 1);
    }
}
