//! Values handed to the successor of an upgrade, as JSON in unnamed files.
//!
//! A successor that does not know a file closes it. One that cannot read a file continues without
//! it.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::memory::{Memory, Outstanding};

/// Writes `value` to an unnamed file called `name` in listings of descriptors.
pub(in crate::server) fn write(name: &str, value: &impl Serialize) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(value)?)?;
    file.rewind()?;
    Ok(file.into())
}

/// Reads the result of [`write()`] in the successor.
pub(in crate::server) fn read<T: DeserializeOwned>(file: OwnedFd) -> io::Result<T> {
    let mut text = Vec::new();
    File::from(file).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Writes the outstanding tickets of `memory` to a file. Returns `None` if there are none.
pub(in crate::server) fn write_tickets(memory: &Memory) -> Option<OwnedFd> {
    let outstanding = memory.tickets().outstanding();
    if outstanding.is_empty() {
        return None;
    }
    let written = write("uniffle-worker-tickets", &outstanding);
    written.inspect_err(|error| tracing::warn!(%error, "cannot hand over tickets")).ok()
}

/// Grants the tickets in `file` again, since clients send with them as soon as the worker accepts.
/// A send with an unknown ticket fails, and its client asks for another one.
pub(in crate::server) fn read_tickets(memory: &Memory, file: OwnedFd) {
    match read::<Vec<Outstanding>>(file) {
        Ok(outstanding) => {
            let granted = memory.tickets().grant_again(&outstanding);
            tracing::info!(inherited = outstanding.len(), granted, "recovered tickets");
        }
        Err(error) => tracing::warn!(%error, "cannot read the tickets of the previous process"),
    }
}
