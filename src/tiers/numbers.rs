//! First number of new registrations. Of two registrations of one name, the later one has the
//! greater number.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a number of at least `least`, which exceeds all known numbers, and at least the clock.
/// Deleted registrations have left no number, so the clock must exceed theirs.
pub(super) fn numbers_from(least: u64) -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(least)
}
