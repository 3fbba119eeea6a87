//! Logs of which everything has been copied, until nobody reads there any more.

use std::sync::Arc;

use super::log::{Log, LogUse};
use super::streams::Reading;

/// Logs that go together.
#[derive(Debug)]
pub(super) struct Retired {
    /// Held, so that nobody takes them for empty logs that can go at once.
    logs: Vec<LogUse>,
    /// What those hold who may read there; none after a start, which knows of none.
    reading: Option<Reading>,
}

impl Retired {
    pub(super) fn new(logs: &[Arc<Log>], reading: Option<Reading>) -> Self {
        Self { logs: logs.iter().map(LogUse::of).collect(), reading }
    }

    /// Whether nobody reads there. That stays so, once those before in the same shuffle are gone: who begins to read sees the copies.
    pub(super) fn is_left(&self) -> bool {
        self.reading.as_ref().is_none_or(|reading| Arc::strong_count(reading) == 1)
    }

    /// Whether a start found them: that the copies are on the device is not known.
    pub(super) fn is_found(&self) -> bool {
        self.reading.is_none()
    }

    /// Their files are to be removed.
    pub(super) fn release(self) {
        self.logs.iter().for_each(|log| log.release());
    }
}
