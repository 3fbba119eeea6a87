//! The 40-byte index record that clients read (docs/protocol.md §5.2; `ShuffleIndexSegment` and
//! `FileBasedShuffleSegment` in Java).
//!
//! All fields are big-endian; there is no header or trailer. The local store keeps the same bytes
//! with offsets relative to their extent, so the layout must not change. [`rebase`] turns them into
//! stream offsets when they are served.

use crate::types::BlockMeta;

/// Length of a record, in bytes.
pub const RECORD_BYTES: usize = 40;

/// Block id of a record that covers bytes of unknown content. No client writes such a block: its
/// sequence number, partition and task would all have their largest value.
pub const FILLER_BLOCK_ID: i64 = i64::MAX;

/// Position of one block in the data stream of its partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexRecord {
    /// Offset in the data stream. On disk: in the extent.
    pub offset: i64,
    /// Bytes as stored.
    pub length: i32,
    /// Bytes after decompression.
    pub uncompressed_length: i32,
    /// CRC-32 of the stored bytes, 0 = not computed.
    pub crc: i64,
    /// Block id, unique in the partition. [`FILLER_BLOCK_ID`] marks unknown content.
    pub block_id: i64,
    /// Task attempt that wrote the block.
    pub task_attempt_id: i64,
}

impl IndexRecord {
    /// Creates the record of `block` at `offset`. Offsets and lengths were checked when the block
    /// was accepted.
    pub fn new(block: &BlockMeta, offset: u64) -> Self {
        Self {
            offset: offset.cast_signed(),
            length: block.length.cast_signed(),
            uncompressed_length: block.uncompressed_length.cast_signed(),
            crc: i64::from(block.crc),
            block_id: block.block_id.0,
            task_attempt_id: block.task_attempt_id.0,
        }
    }

    /// Returns the record as 40 bytes, big-endian.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0..8].copy_from_slice(&self.offset.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.uncompressed_length.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.crc.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.block_id.to_be_bytes());
        bytes[32..40].copy_from_slice(&self.task_attempt_id.to_be_bytes());
        bytes
    }

    /// Reads one record. Every bit pattern is a record: the caller validates the fields.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Self {
        Self {
            offset: i64::from_be_bytes(array(&bytes[0..8])),
            length: i32::from_be_bytes(array(&bytes[8..12])),
            uncompressed_length: i32::from_be_bytes(array(&bytes[12..16])),
            crc: i64::from_be_bytes(array(&bytes[16..24])),
            block_id: i64::from_be_bytes(array(&bytes[24..32])),
            task_attempt_id: i64::from_be_bytes(array(&bytes[32..40])),
        }
    }
}

/// Returns the records of a whole index response. A trailing partial record is ignored.
pub fn records(bytes: &[u8]) -> impl Iterator<Item = IndexRecord> + '_ {
    bytes.as_chunks::<RECORD_BYTES>().0.iter().map(IndexRecord::decode)
}

/// Adds `base` to the offset of every whole record in `bytes`, in place.
pub fn rebase(bytes: &mut [u8], base: u64) {
    for record in bytes.as_chunks_mut::<RECORD_BYTES>().0 {
        let offset = u64::from_be_bytes(array(&record[0..8])).wrapping_add(base);
        record[0..8].copy_from_slice(&offset.to_be_bytes());
    }
}

/// Copies `bytes`, whose length must be `N`, into an array.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The vector of docs/protocol.md §5.2.
    #[test]
    fn record_matches_the_java_vector() {
        let record = IndexRecord {
            offset: 64,
            length: 3,
            uncompressed_length: 9,
            crc: 0x1122_3344,
            block_id: 0x0102_0304_0506_0708,
            task_attempt_id: 5,
        };
        let hex: String = record.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "0000000000000040000000030000000900000000112233440102030405060708\
             0000000000000005"
        );
    }

    proptest! {
        #[test]
        fn index_records_round_trip_and_rebase(
            offset in 0i64..1 << 60, length: i32, crc: i64, block_id: i64, base in 0u64..1 << 60,
        ) {
            let record = IndexRecord {
                offset, length, uncompressed_length: length.wrapping_neg(), crc, block_id,
                task_attempt_id: !block_id,
            };
            let mut bytes = record.encode();
            prop_assert_eq!(IndexRecord::decode(&bytes), record);
            rebase(&mut bytes, base);
            let moved = IndexRecord { offset: offset + base.cast_signed(), ..record };
            prop_assert_eq!(records(&bytes).collect::<Vec<_>>(), vec![moved]);
        }
    }
}
