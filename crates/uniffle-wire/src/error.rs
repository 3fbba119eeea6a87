//! The error of every codec in this crate.
//!
//! The texts never contain bytes of the input. The response to the peer is chosen by the caller.

/// The input breaks the rules of its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The input ended before the message did.
    #[error("the message is incomplete")]
    Incomplete,
    /// A length or count exceeds its limit. Nothing was allocated for it.
    #[error("{what} is {len}, the limit is {max}")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// Announced size.
        len: u64,
        /// Limit.
        max: u64,
    },
    /// A frame type that does not exist or that this side never receives.
    #[error("unknown frame type {0}")]
    UnknownType(u8),
    /// The input breaks the format.
    #[error("malformed message: {what} (at byte {at})")]
    Malformed {
        /// The broken rule.
        what: &'static str,
        /// Byte offset in the message at which the error was detected.
        at: u64,
    },
}
