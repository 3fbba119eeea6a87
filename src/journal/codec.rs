//! Fields of a note.

/// Writes fields.
#[derive(Debug)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn new(kind: u8, version: u8) -> Self {
        Self(vec![kind, version])
    }

    pub(super) fn unsigned(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    pub(super) fn signed(&mut self, value: i64) {
        self.unsigned(((value << 1) ^ (value >> 63)).cast_unsigned());
    }

    pub(super) fn count(&mut self, count: usize) {
        self.unsigned(count as u64);
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads fields; `None` when there is none.
#[derive(Debug)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..u64::BITS).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    pub(super) fn signed(&mut self) -> Option<i64> {
        let value = self.unsigned()?;
        Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    pub(super) fn signed_as<T: TryFrom<i64>>(&mut self) -> Option<T> {
        T::try_from(self.signed()?).ok()
    }

    /// A number of things of which each has at least one byte.
    pub(super) fn count(&mut self) -> Option<usize> {
        let count = usize::try_from(self.unsigned()?).ok()?;
        (count <= self.0.len()).then_some(count)
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = self.count()?;
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn text(&mut self) -> Option<String> {
        std::str::from_utf8(self.bytes()?).ok().map(str::to_owned)
    }
}
