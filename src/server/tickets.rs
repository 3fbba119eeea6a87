//! Tickets that were granted before an upgrade, for the successor: clients hold them, and send with them as soon as it accepts.
//!
//! They lie as JSON in a file without a name. A successor that does not know it closes it, and one that cannot read it goes on
//! without: a send with a ticket that is unknown fails, and its client asks for another.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::memory::{Memory, Outstanding};

/// The tickets of `memory`; none if there are none.
pub(super) fn passed_on(memory: &Memory) -> Option<OwnedFd> {
    let outstanding = memory.tickets().outstanding();
    if outstanding.is_empty() {
        return None;
    }
    let written = || {
        let mut file = File::from(memfd_create("uniffle-worker-tickets", MemfdFlags::CLOEXEC)?);
        file.write_all(&serde_json::to_vec(&outstanding)?)?;
        file.rewind()?;
        std::io::Result::Ok(file.into())
    };
    written().inspect_err(|error| tracing::warn!(%error, "cannot hand over tickets")).ok()
}

/// Grants them again.
pub(super) fn take_over(memory: &Memory, passed: OwnedFd) {
    let mut text = Vec::new();
    let read = File::from(passed).read_to_end(&mut text);
    let outstanding = read.and_then(|_| Ok(serde_json::from_slice::<Vec<Outstanding>>(&text)?));
    match outstanding {
        Ok(outstanding) => {
            let granted = memory.tickets().grant_again(&outstanding);
            tracing::info!(passed = outstanding.len(), granted, "recovered tickets");
        }
        Err(error) => tracing::warn!(%error, "cannot read the tickets of the previous process"),
    }
}
