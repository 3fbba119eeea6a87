//! A protobuf varint that may be split at any byte.

/// The part of a varint that was received so far.
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
