//! From which number registrations are counted: of two registrations of one name the later one has the greater number.

use std::time::{SystemTime, UNIX_EPOCH};

/// At least `least`, which is above all numbers that are known, and at least the clock: what was registered and is deleted
/// already has left no number.
pub(super) fn numbers_from(least: u64) -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(least)
}
