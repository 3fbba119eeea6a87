//! Ids and block metadata, validated once where they arrive and trusted inside.
//!
//! This module has no I/O and no locks. Elsewhere raw `i32` and `i64` ids appear mostly in
//! messages and requests that are not validated yet.

use std::fmt;
use std::sync::Arc;

/// Longest accepted application id, in bytes. Spark's are `<application id>_<uuid>`, well under
/// 100. The id becomes one path component, which Linux limits to 255 bytes.
pub const APP_ID_BYTES_MAX: usize = 200;

/// Largest accepted block, in bytes. Java's limit is i32::MAX.
pub const BLOCK_BYTES_MAX: u32 = 512 << 20;

/// Reason why a string is not an application id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidAppId {
    /// The id has no characters.
    #[error("application id is empty")]
    Empty,
    /// The id is longer than [`APP_ID_BYTES_MAX`].
    #[error("application id has {0} bytes, the limit is {APP_ID_BYTES_MAX}")]
    TooLong(usize),
    /// The id could escape its directory or is not printable.
    #[error("application id has a character at byte {0} that is not allowed in a path component")]
    Character(usize),
}

/// A validated application id: one safe path component of 1 to [`APP_ID_BYTES_MAX`] bytes.
///
/// `/`, `\`, control characters and a leading `.` are rejected, so that the id can become a
/// directory name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AppId(Arc<str>);

impl AppId {
    /// Validates `text`.
    ///
    /// # Errors
    /// Returns [`InvalidAppId`], which never contains the text itself.
    pub fn parse(text: &str) -> Result<Self, InvalidAppId> {
        if text.is_empty() {
            return Err(InvalidAppId::Empty);
        }
        if text.len() > APP_ID_BYTES_MAX {
            return Err(InvalidAppId::TooLong(text.len()));
        }
        if text.starts_with('.') {
            return Err(InvalidAppId::Character(0));
        }
        let unsafe_character = |c: char| c == '/' || c == '\\' || c.is_control();
        if let Some(at) = text.find(unsafe_character) {
            return Err(InvalidAppId::Character(at));
        }
        Ok(Self(text.into()))
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AppId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for AppId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $raw);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A shuffle of one application (Spark's shuffle id).
    ShuffleId(i32)
);
id!(
    /// A reduce partition of one shuffle.
    PartitionId(i32)
);
id!(
    /// A block. Opaque to the worker: clients define its layout (docs/protocol.md §3.1). 0 is
    /// valid, negative numbers are not.
    BlockId(i64)
);
id!(
    /// The task attempt that wrote a block.
    TaskAttemptId(i64)
);
id!(
    /// Id of the reservation that a `requireBuffer` made. Positive and unique in the process.
    TicketId(i64)
);

/// One shuffle of one application.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShuffleKey {
    /// The application.
    pub app: AppId,
    /// The shuffle.
    pub shuffle: ShuffleId,
}

impl ShuffleKey {
    /// Creates the key of `shuffle` in `app`.
    pub fn new(app: AppId, shuffle: ShuffleId) -> Self {
        Self { app, shuffle }
    }
}

impl fmt::Display for ShuffleKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.app, self.shuffle)
    }
}

/// Order of a shuffle's blocks in an extent (`DataDistribution` of `Rss.proto`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Distribution {
    /// Any order.
    #[default]
    Normal,
    /// Sorted by task attempt inside each extent, stable (docs/protocol.md §3.5).
    LocalOrder,
}

/// Metadata of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMeta {
    /// Block id, unique in the partition.
    pub block_id: BlockId,
    /// Task attempt that wrote the block.
    pub task_attempt_id: TaskAttemptId,
    /// Bytes as sent, 1..=[`BLOCK_BYTES_MAX`].
    pub length: u32,
    /// Bytes after decompression, as the client declares.
    pub uncompressed_length: u32,
    /// CRC-32 of the bytes as sent; 0 = not computed.
    pub crc: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn app_ids_must_be_path_components() {
        for text in ["", "../x", "/x", "a/b", "a\\b", "a\0b", ".hidden", "..", "a\nb"] {
            assert!(AppId::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(AppId::parse(&"x".repeat(5000)), Err(InvalidAppId::TooLong(5000)));
        assert!(AppId::parse("application_1700000000000_0001_1700000000001").is_ok());
        assert!(AppId::parse("local-1700000000000_a b<img>").is_ok());
    }
}
