//! What the tier needs of a remote file system: eight calls.
//!
//! Paths are absolute and belong to one file system, without scheme and host. Buffers are owned by the call. A call
//! has no deadline of its own beyond what the implementation has; who calls gives up waiting by dropping the future,
//! and a write that was given up may still happen.

use std::fmt;

use bytes::Bytes;

use crate::tiers::StoreError;
use uniffle_io::BoxFuture;

/// An answer under way.
pub type Call<T> = BoxFuture<'static, Result<T, StoreError>>;

/// Something in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteEntry {
    /// Its name in the directory.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Bytes of a file.
    pub length: u64,
}

/// A remote file system.
pub trait RemoteFs: fmt::Debug + Send + Sync {
    /// Makes a directory with its parents; an existing one is fine.
    fn make_dirs(&self, path: &str) -> Call<()>;
    /// Makes a file, and the directories it needs, out of `data`: readers see all of it when this returns. `Exists`
    /// when there is one. After any other error a part of the file may be there.
    fn create(&self, path: &str, data: Vec<Bytes>) -> Call<()>;
    /// Adds `data` to a closed file, all of it readable when this returns. After an error a part of it may be there.
    fn append(&self, path: &str, data: Vec<Bytes>) -> Call<()>;
    /// Closes a file whose append has failed, so that what it had before can be read again. False while that goes on:
    /// it is to be called again.
    fn recover(&self, path: &str) -> Call<bool>;
    /// What is in a directory; `NotFound` when there is none.
    fn list(&self, path: &str) -> Call<Vec<RemoteEntry>>;
    /// Removes a file or a directory, an empty one only unless `recursive`. False when there was nothing.
    fn delete(&self, path: &str, recursive: bool) -> Call<bool>;
    /// A whole file.
    fn read(&self, path: &str) -> Call<Bytes>;
    /// At most `length` bytes of a file from `offset` on; fewer when it ends before.
    fn read_range(&self, path: &str, offset: u64, length: usize) -> Call<Bytes>;
}
