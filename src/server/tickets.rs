//! Hands tickets granted before an upgrade over to the successor, since clients send with them as
//! soon as it accepts.
//!
//! They are JSON in an unnamed file. A successor that does not know the file closes it, and one
//! that cannot read it continues without. A send with an unknown ticket fails, and its client asks
//! for another one.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::memory::{Memory, Outstanding};

/// Writes the outstanding tickets of `memory` to a file. Returns `None` if there are none.
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

/// Grants the inherited tickets again.
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
