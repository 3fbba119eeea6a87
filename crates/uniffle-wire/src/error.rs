//! Why bytes could not be decoded: the one error of every codec in `wire`.
//!
//! Not here: what a caller answers to a peer. The texts never repeat bytes of the input.

/// The input is not what its format promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The input ended before the message did.
    #[error("the message is incomplete")]
    Incomplete,
    /// A length or count is over its bound; nothing was allocated for it.
    #[error("{what} is {len}, at most {max} is allowed")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Announced size.
        len: u64,
        /// The bound.
        max: u64,
    },
    /// A frame of a type that does not exist or that this side never receives.
    #[error("frame type {0} is not known here")]
    UnknownType(u8),
    /// The input breaks the format.
    #[error("malformed message: {what} (at byte {at})")]
    Malformed {
        /// The broken rule.
        what: &'static str,
        /// Byte offset in the message at which it was noticed.
        at: u64,
    },
}
