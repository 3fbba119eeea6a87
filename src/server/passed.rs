//! Values handed to the successor of an upgrade, as JSON in unnamed files.
//!
//! A successor that does not know a file closes it. One that cannot read it continues without.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Writes `value` to an unnamed file called `name` in listings of descriptors.
pub(super) fn write(name: &str, value: &impl Serialize) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(value)?)?;
    file.rewind()?;
    Ok(file.into())
}

/// Reads the result of [`write()`] in the successor.
pub(super) fn read<T: DeserializeOwned>(passed: OwnedFd) -> io::Result<T> {
    let mut text = Vec::new();
    File::from(passed).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}
