//! First number of new registrations. Of two registrations of one shuffle, the later one has the
//! greater number.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the larger of `least` and the clock. `least` exceeds all known numbers. Removed
/// registrations have left no number, but the clock exceeds theirs.
pub(in crate::store) fn numbers_from(least: u64) -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(least)
}
