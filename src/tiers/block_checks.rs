//! Compares the CRC-32 of blocks with what was written, while their bytes pass by in the order of a stream.
//!
//! Pure: which blocks there are is what a tier's verifier finds out.

use std::collections::VecDeque;
use std::ops::Range;

/// A block that is to pass by.
#[derive(Debug, Clone)]
pub(super) struct Check {
    /// Its place in the stream.
    pub(super) place: Range<u64>,
    /// 0 = was not computed.
    pub(super) crc: u32,
    /// Base of its extent.
    pub(super) base: u64,
}

/// The blocks that are still to pass, and the sum of the one that passes now.
#[derive(Debug)]
pub(super) struct BlockChecks {
    /// In the order of their places.
    checks: VecDeque<Check>,
    /// So many of them have passed since the last mark.
    passed: usize,
    hasher: crc32fast::Hasher,
    /// Where in the stream the next byte stands.
    at: u64,
}

/// Where [`BlockChecks`] were.
#[derive(Debug)]
pub(super) struct Mark {
    hasher: crc32fast::Hasher,
    at: u64,
}

impl BlockChecks {
    /// For bytes from `at` on.
    pub(super) fn new(at: u64) -> Self {
        Self { checks: VecDeque::new(), passed: 0, hasher: crc32fast::Hasher::new(), at }
    }

    /// Where in the stream the next byte stands.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Blocks that are known and have not passed.
    pub(super) fn known(&self) -> usize {
        self.checks.len() - self.passed
    }

    /// Knows a block that begins where the last one ends, or later.
    pub(super) fn push(&mut self, check: Check) {
        self.checks.push_back(check);
    }

    /// Remembers where it is.
    pub(super) fn mark(&mut self) -> Mark {
        self.checks.drain(..self.passed);
        self.passed = 0;
        Mark { hasher: self.hasher.clone(), at: self.at }
    }

    /// Goes back to the last mark.
    pub(super) fn rewind(&mut self, mark: Mark) {
        self.passed = 0;
        (self.hasher, self.at) = (mark.hasher, mark.at);
    }

    /// The first block that ends in the next bytes and has others than were written.
    pub(super) fn check(&mut self, mut bytes: &[u8]) -> Option<Check> {
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

    fn checks(blocks: &[(u64, &[u8])]) -> BlockChecks {
        let mut checks = BlockChecks::new(0);
        for (start, bytes) in blocks {
            let place = *start..*start + bytes.len() as u64;
            checks.push(Check { place, crc: crc32fast::hash(bytes), base: 0 });
        }
        checks
    }

    #[test]
    fn blocks_are_compared_however_their_bytes_are_cut() {
        for cut in 0..9 {
            let mut sound = checks(&[(0, b"abc"), (5, b"wxyz")]);
            let (head, tail) = b"abc??wxyz".split_at(cut);
            assert!(sound.check(head).is_none() && sound.check(tail).is_none(), "{cut}");
            assert_eq!((sound.at(), sound.known()), (9, 0));
        }
        let mut other = checks(&[(0, b"abc"), (5, b"wxyz")]);
        assert_eq!(other.check(b"abc??wxyy").map(|check| check.place), Some(5..9));
    }

    #[test]
    fn what_was_rewound_is_compared_again() {
        let mut checks = checks(&[(0, b"abc"), (3, b"def")]);
        assert!(checks.check(b"ab").is_none());
        let mark = checks.mark();
        assert!(checks.check(b"X").is_some());
        checks.rewind(mark);
        assert!(checks.check(b"cdef").is_none());
        assert_eq!(checks.known(), 0);
    }
}
