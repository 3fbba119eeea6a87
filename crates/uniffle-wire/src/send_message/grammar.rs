//! The grammar of the message: nesting levels, decoding steps, known fields and block lengths.

use crate::DecodeError;
use crate::types::BLOCK_BYTES_MAX;

/// The message that contains the current position. Its depth is the index into `Decoder::ends`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageLevel {
    /// `SendShuffleDataRequest`
    Root,
    /// `ShuffleData` (field 4 of the root)
    Data,
    /// `ShuffleBlock` (field 2 of `ShuffleData`)
    Block,
    /// `CombinedShuffleData` (field 7 of the root)
    Combined,
    /// A packed array of `CombinedShuffleData`
    Packed,
}

impl MessageLevel {
    pub(super) fn depth(self) -> usize {
        match self {
            Self::Root => 0,
            Self::Data | Self::Combined => 1,
            Self::Block | Self::Packed => 2,
        }
    }

    /// Returns the wire types that `field` may have, or `None` for an unknown field, which is
    /// skipped.
    pub(super) fn expects(self, field: u32) -> Option<&'static [u32]> {
        match (self, field) {
            (Self::Root, 1 | 4 | 7) | (Self::Data, 2) | (Self::Block, 5) | (Self::Combined, 8) => {
                Some(&[BYTES])
            }
            (Self::Root, 2 | 3 | 5 | 6) | (Self::Data, 1) | (Self::Block, 1..=4 | 6) => Some(&[VARINT]),
            (Self::Combined, 1..=7) => Some(&[VARINT, BYTES]),
            _ => None,
        }
    }
}

pub(super) const VARINT: u32 = 0;
pub(super) const FIXED64: u32 = 1;
pub(super) const BYTES: u32 = 2;
pub(super) const FIXED32: u32 = 5;

/// The element that the next byte belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecodeStep {
    /// A field's key.
    Key,
    /// The varint value of a field, or an element of the packed array `field`.
    Value(u32),
    /// The length prefix of a field.
    Length(u32),
    /// Bytes of an unknown field.
    Skip(u64),
    /// The application id.
    AppId(u64),
    /// Payload of the current block (classic form).
    BlockBytes(u64),
    /// Payload of the collected blocks (contiguous and combined form).
    CollectedBytes(u64),
}

/// Returns `length` if a block may have it.
pub(super) fn block_length(length: u64) -> Option<u32> {
    u32::try_from(length).ok().filter(|length| *length <= BLOCK_BYTES_MAX)
}

/// Returns the error for a block of `length` bytes.
pub(super) fn block_too_large(length: u64) -> DecodeError {
    DecodeError::TooLarge { what: "block length", len: length, max: u64::from(BLOCK_BYTES_MAX) }
}

/// The received part of a protobuf varint, which may be split at any byte.
#[derive(Debug, Default)]
pub(super) struct Varint {
    partial: u64,
    shift: u32,
}

impl Varint {
    /// Returns true between two varints.
    pub(super) fn is_empty(&self) -> bool {
        self.shift == 0
    }

    /// Consumes bytes up to the varint's end. Returns the number of bytes consumed, and the value
    /// once it is complete.
    pub(super) fn push(&mut self, window: &[u8]) -> Result<(usize, Option<u64>), &'static str> {
        // Most keys and many values are a single byte.
        if let [byte @ ..0x80, ..] = window
            && self.shift == 0
        {
            return Ok((1, Some(u64::from(*byte))));
        }
        for (index, byte) in window.iter().copied().enumerate() {
            // The tenth byte holds only bit 63.
            if self.shift == 63 && byte > 1 {
                return Err("a varint is longer than 64 bits");
            }
            self.partial |= u64::from(byte & 0x7f) << self.shift;
            if byte < 0x80 {
                let value = self.partial;
                *self = Self::default();
                return Ok((index + 1, Some(value)));
            }
            self.shift += 7;
        }
        Ok((window.len(), None))
    }
}
