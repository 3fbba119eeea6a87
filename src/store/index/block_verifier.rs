//! Compares the CRC-32 of blocks with the recorded ones, while their bytes pass in the order of a
//! stream.
//!
//! Pure: the checksums are loaded by the reader of the disk or the bucket.

use std::collections::VecDeque;
use std::ops::Range;

/// A block to verify.
#[derive(Debug, Clone)]
pub(in crate::store) struct BlockCheck {
    /// Range of the block in the stream.
    pub(in crate::store) place: Range<u64>,
    /// Recorded checksum, or 0 if none was computed.
    pub(in crate::store) crc: u32,
    /// Base of the block's extent.
    pub(in crate::store) base: u64,
}

/// Verifies blocks. Has the expected checksums of the next blocks, and the running checksum of the
/// current one.
#[derive(Debug)]
pub(in crate::store) struct BlockVerifier {
    /// Blocks, ordered by their ranges.
    checks: VecDeque<BlockCheck>,
    /// Number of blocks that have passed since the last mark.
    passed: usize,
    hasher: crc32fast::Hasher,
    /// Offset of the next byte in the stream.
    at: u64,
}

/// A saved position of [`BlockVerifier`].
#[derive(Debug)]
pub(in crate::store) struct VerifierMark {
    hasher: crc32fast::Hasher,
    at: u64,
}

impl BlockVerifier {
    /// Creates the verifier of bytes from offset `at` on.
    pub(in crate::store) fn new(at: u64) -> Self {
        Self { checks: VecDeque::new(), passed: 0, hasher: crc32fast::Hasher::new(), at }
    }

    /// Returns the offset of the next byte in the stream.
    pub(in crate::store) fn at(&self) -> u64 {
        self.at
    }

    /// Returns the number of known blocks that have not passed.
    pub(in crate::store) fn known(&self) -> usize {
        self.checks.len() - self.passed
    }

    /// Adds a block that begins at or after the end of the last one.
    pub(in crate::store) fn push(&mut self, check: BlockCheck) {
        self.checks.push_back(check);
    }

    /// Saves the current position.
    pub(in crate::store) fn mark(&mut self) -> VerifierMark {
        self.checks.drain(..self.passed);
        self.passed = 0;
        VerifierMark { hasher: self.hasher.clone(), at: self.at }
    }

    /// Returns to the last mark.
    pub(in crate::store) fn rewind(&mut self, mark: VerifierMark) {
        self.passed = 0;
        (self.hasher, self.at) = (mark.hasher, mark.at);
    }

    /// Returns the first block that ends in the next bytes and has a wrong checksum. The verifier
    /// must then be rewound before it is used again.
    pub(in crate::store) fn check(&mut self, mut bytes: &[u8]) -> Option<BlockCheck> {
        while !bytes.is_empty()
            && let Some(check) = self.checks.get(self.passed)
        {
            let until = if self.at < check.place.start { check.place.start } else { check.place.end };
            let len = usize::try_from(until - self.at).unwrap_or(usize::MAX).min(bytes.len());
            let (head, rest) = bytes.split_at(len);
            if self.at >= check.place.start {
                self.hasher.update(head);
            }
            self.at += len as u64;
            bytes = rest;
            if self.at == check.place.end {
                let actual = std::mem::take(&mut self.hasher).finalize();
                if check.crc != 0 && actual != check.crc {
                    return Some(check.clone());
                }
                self.passed += 1;
            }
        }
        self.at += bytes.len() as u64;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(blocks: &[(u64, &[u8])]) -> BlockVerifier {
        let mut checks = BlockVerifier::new(0);
        for (start, bytes) in blocks {
            let place = *start..*start + bytes.len() as u64;
            checks.push(BlockCheck { place, crc: crc32fast::hash(bytes), base: 0 });
        }
        checks
    }

    #[test]
    fn blocks_are_verified_in_any_pieces() {
        for cut in 0..9 {
            let mut intact = checks(&[(0, b"abc"), (5, b"wxyz")]);
            let (head, tail) = b"abc??wxyz".split_at(cut);
            assert!(intact.check(head).is_none() && intact.check(tail).is_none(), "{cut}");
            assert_eq!((intact.at(), intact.known()), (9, 0));
        }
        let mut other = checks(&[(0, b"abc"), (5, b"wxyz")]);
        assert_eq!(other.check(b"abc??wxyy").map(|check| check.place), Some(5..9));
    }

    #[test]
    fn rewound_bytes_are_verified_again() {
        let mut checks = checks(&[(0, b"abc"), (3, b"def")]);
        assert!(checks.check(b"ab").is_none());
        let mark = checks.mark();
        assert!(checks.check(b"X").is_some());
        checks.rewind(mark);
        assert!(checks.check(b"cdef").is_none());
        assert_eq!(checks.known(), 0);
    }
}
