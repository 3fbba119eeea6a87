//! Index records of an extent: encoding of its blocks, and verification of records that were read.
//!
//! The blocks of an extent are contiguous. The offset of a record is therefore the sum of the
//! lengths before it. Pure: no I/O.

use uniffle_wire::index::{FILLER_BLOCK_ID, IndexRecord, RECORD_BYTES, records};
use uniffle_wire::types::BlockMeta;

/// Appends the records of contiguous blocks, the first at offset `base`. Returns the offset of
/// their end.
pub(crate) fn encode_blocks(blocks: &[BlockMeta], base: u64, records: &mut Vec<u8>) -> u64 {
    records.reserve(blocks.len() * RECORD_BYTES);
    let mut offset = base;
    for block in blocks {
        records.extend_from_slice(&IndexRecord::new(block, offset).encode());
        offset += u64::from(block.length);
    }
    offset
}

/// Returns a record for bytes of unknown content: a hole or a damaged block.
pub(in crate::store) fn filler(offset: i64, length: i32) -> IndexRecord {
    IndexRecord {
        offset,
        length,
        uncompressed_length: 0,
        crc: 0,
        block_id: FILLER_BLOCK_ID,
        task_attempt_id: -1,
    }
}

/// Verifier of the records of one extent, with offsets relative to it.
#[derive(Debug, Clone, Default)]
pub(in crate::store) struct RecordCheck {
    /// Bytes of data described so far.
    length: u64,
    crc: crc32fast::Hasher,
    is_broken: bool,
}

impl RecordCheck {
    /// Adds the next records, which are whole. Returns false if one so far is empty or does not
    /// begin at the end of the previous one.
    pub(in crate::store) fn accept(&mut self, bytes: &[u8]) -> bool {
        self.crc.update(bytes);
        for record in records(bytes) {
            self.is_broken |= record.length <= 0 || u64::try_from(record.offset) != Ok(self.length);
            self.length = self.length.saturating_add(u64::from(record.length.unsigned_abs()));
        }
        !self.is_broken
    }

    /// Returns whether the records are contiguous, describe `length` bytes of data, and have the
    /// checksum `crc`.
    pub(in crate::store) fn matches(self, length: u64, crc: u32) -> bool {
        !self.is_broken && self.length == length && self.crc.finalize() == crc
    }
}

/// Verifies all records of an extent at once. See [`RecordCheck::matches`].
pub(in crate::store) fn are_sound(bytes: &[u8], length: u64, crc: u32) -> bool {
    let mut check = RecordCheck::default();
    check.accept(bytes) && check.matches(length, crc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{BlockId, TaskAttemptId};

    fn encoded(base: u64) -> Vec<u8> {
        let block = |length: u32| BlockMeta {
            block_id: BlockId(1),
            task_attempt_id: TaskAttemptId(2),
            length,
            uncompressed_length: length,
            crc: 3,
        };
        let mut records = Vec::new();
        assert_eq!(encode_blocks(&[block(3), block(4), block(5)], base, &mut records), base + 12);
        records
    }

    #[test]
    fn records_are_verified_in_any_chunks() {
        let records = encoded(0);
        let crc = crc32fast::hash(&records);
        assert!(are_sound(&records, 12, crc));
        for cut in [0, 1, 2, 3] {
            let (mut check, (head, tail)) = (RecordCheck::default(), records.split_at(cut * RECORD_BYTES));
            assert!(check.accept(head) && check.accept(tail) && check.matches(12, crc), "{cut}");
        }
        assert!(!are_sound(&records, 13, crc));
        assert!(!are_sound(&records, 12, crc ^ 1));
    }

    /// A valid checksum proves only that the bytes are those that were written.
    #[test]
    fn broken_records_with_a_valid_checksum_are_refused() {
        let refused = |records: &[u8], length| !are_sound(records, length, crc32fast::hash(records));
        assert!(refused(&encoded(1), 12));
        let records = encoded(0);
        assert!(refused(&records[RECORD_BYTES..], 9), "a list without its first record was accepted");
        for (length, sum) in [(0_i32, 9), (-3, 12)] {
            let mut records = records.clone();
            records[8..12].copy_from_slice(&length.to_be_bytes());
            assert!(refused(&records, sum), "records with a length of {length} were accepted");
        }
        let mut check = RecordCheck::default();
        assert!(!check.accept(&records[RECORD_BYTES..]));
        assert!(!check.accept(&[]), "records after a broken one were accepted");
    }
}
