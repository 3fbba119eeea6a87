//! Hands tickets granted before an upgrade over to the successor, since clients send with them as
//! soon as it accepts.
//!
//! A send with an unknown ticket fails, and its client asks for another one.

use std::os::fd::OwnedFd;

use super::passed;
use crate::memory::{Memory, Outstanding};

/// Writes the outstanding tickets of `memory` to a file. Returns `None` if there are none.
pub(super) fn passed_on(memory: &Memory) -> Option<OwnedFd> {
    let outstanding = memory.tickets().outstanding();
    if outstanding.is_empty() {
        return None;
    }
    let written = passed::write("uniffle-worker-tickets", &outstanding);
    written.inspect_err(|error| tracing::warn!(%error, "cannot hand over tickets")).ok()
}

/// Grants the inherited tickets again.
pub(super) fn take_over(memory: &Memory, passed: OwnedFd) {
    match passed::read::<Vec<Outstanding>>(passed) {
        Ok(outstanding) => {
            let granted = memory.tickets().grant_again(&outstanding);
            tracing::info!(inherited = outstanding.len(), granted, "recovered tickets");
        }
        Err(error) => tracing::warn!(%error, "cannot read the tickets of the previous process"),
    }
}
