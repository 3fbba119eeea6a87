//! The interface of a remote file system: eight calls.
//!
//! Paths are absolute and belong to one file system, without scheme and host. A call owns its
//! buffers. It has no deadline except that of the implementation. A caller cancels a call by
//! dropping the future, but a cancelled write may still happen.

use std::fmt;

use bytes::Bytes;

use crate::store::StoreError;
use uniffle_io::BoxFuture;

/// A call in progress.
pub type FsFuture<T> = BoxFuture<'static, Result<T, StoreError>>;

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteEntry {
    /// Name in the directory.
    pub name: String,
    /// True if the entry is a directory.
    pub is_dir: bool,
    /// Length of a file in bytes.
    pub length: u64,
}

/// A remote file system.
pub trait RemoteFs: fmt::Debug + Send + Sync {
    /// Creates a directory with its parents, unless it exists.
    fn make_dirs(&self, path: &str) -> FsFuture<()>;
    /// Creates a file with the content `data`, and its directories. Readers see the complete file
    /// when this returns. Fails with `Exists` if the file exists. After any other error a part of
    /// the file may exist.
    fn create(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()>;
    /// Appends `data` to a closed file. All of it is readable when this returns. After an error a
    /// part may have been appended.
    fn append(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()>;
    /// Closes a file after a failed append, so that its earlier content is readable again. Returns
    /// false while this is in progress, and is to be called again.
    fn recover(&self, path: &str) -> FsFuture<bool>;
    /// Lists a directory. Fails with `NotFound` if it does not exist.
    fn list(&self, path: &str) -> FsFuture<Vec<RemoteEntry>>;
    /// Removes a file or a directory. Without `recursive` the directory must be empty. Returns
    /// false if nothing existed.
    fn delete(&self, path: &str, recursive: bool) -> FsFuture<bool>;
    /// Reads a whole file.
    fn read(&self, path: &str) -> FsFuture<Bytes>;
    /// Reads up to `length` bytes of a file from `offset` on. Returns fewer at the end of the file.
    fn read_range(&self, path: &str, offset: u64, length: usize) -> FsFuture<Bytes>;
}
