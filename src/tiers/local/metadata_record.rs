//! Notes: what else of a shuffle must survive a restart, opaque to the store. FROZEN as version 1 (see the golden test).
//!
//! The metadata log of a shuffle is a file of records. Everything is big-endian:
//!
//! ```text
//! header, 32 bytes      0  magic "UWNT"            4  version u16 = 1     6  reserved u16 = 0
//!                       8  incarnation u64        16  number u64 (per shuffle)
//!                      24  length u32             28  crc32 of bytes 0..28 and of the content
//! then the content
//! ```
//!
//! A record may appear several times, on several disks, with the same number and the same bytes. Pure: no I/O.

use bytes::Bytes;

use super::index::GroupError;

/// First bytes of a record.
pub const MAGIC: [u8; 4] = *b"UWNT";
/// The one version there is.
pub const VERSION: u16 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 32;
/// Longest content. Twice the largest message that a listener takes.
pub const CONTENT_BYTES_MAX: usize = 512 << 20;

/// A decoded record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataRecord {
    /// Incarnation of the shuffle, as in its directory's name.
    pub incarnation: u64,
    /// Its number among the shuffle's records.
    pub number: u64,
    /// What it says.
    pub content: Bytes,
}

/// Encodes a record. `None` when the content is longer than [`CONTENT_BYTES_MAX`].
#[must_use]
pub fn encode(incarnation: u64, number: u64, content: &[u8]) -> Option<Bytes> {
    let length = u32::try_from(content.len()).ok().filter(|_| content.len() <= CONTENT_BYTES_MAX)?;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + content.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_be_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&incarnation.to_be_bytes());
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    let crc = crc(&bytes, content);
    bytes.extend_from_slice(&crc.to_be_bytes());
    bytes.extend_from_slice(content);
    Some(bytes.into())
}

/// Bytes that the record whose header begins `bytes` has in all, by its own unchecked word.
///
/// # Errors
/// [`GroupError`] when no record begins here.
pub fn total_bytes(bytes: &[u8]) -> Result<usize, GroupError> {
    let header = bytes.first_chunk::<HEADER_BYTES>().ok_or(GroupError::Incomplete)?;
    if header[0..4] != MAGIC {
        return Err(GroupError::Magic);
    }
    let version = u16::from_be_bytes([header[4], header[5]]);
    if version != VERSION {
        return Err(GroupError::Version(version));
    }
    let length = u32::from_be_bytes([header[24], header[25], header[26], header[27]]) as usize;
    if length > CONTENT_BYTES_MAX {
        return Err(GroupError::Malformed("length"));
    }
    Ok(HEADER_BYTES + length)
}

/// Decodes the record that `bytes` begins with; the rest is ignored.
///
/// # Errors
/// [`GroupError`]; `Incomplete` when more bytes could make a record of it.
pub fn decode(bytes: &[u8]) -> Result<MetadataRecord, GroupError> {
    let record = bytes.get(..total_bytes(bytes)?).ok_or(GroupError::Incomplete)?;
    let (header, content) = record.split_at(HEADER_BYTES);
    let word = |at: usize| header[at..].first_chunk().copied().map(u64::from_be_bytes);
    let stored = header[28..].first_chunk().copied().map(u32::from_be_bytes);
    if stored != Some(crc(&header[..28], content)) {
        return Err(GroupError::Checksum("record"));
    }
    let (Some(incarnation), Some(number)) = (word(8), word(16)) else {
        return Err(GroupError::Incomplete);
    };
    Ok(MetadataRecord { incarnation, number, content: Bytes::copy_from_slice(content) })
}

fn crc(header: &[u8], content: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(content);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The format is a promise to every later version: these bytes must not change while the version is 1.
    #[test]
    fn version_1_is_frozen() {
        let bytes = encode(3, 7, b"hello").unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let golden = [
            "55574e5400010000",
            "0000000000000003",
            "0000000000000007",
            "00000005",
            "21219e7b",
            "68656c6c6f",
        ];
        assert_eq!(hex, golden.concat());
    }

    proptest! {
        #[test]
        fn every_note_survives_and_no_damage_does(
            content in prop::collection::vec(any::<u8>(), 0..200), number: u64, incarnation: u64,
            at: prop::sample::Index, bit in 0u8..8,
        ) {
            let bytes = encode(incarnation, number, &content).unwrap();
            let record = decode(&[&bytes[..], b"next"].concat()).unwrap();
            prop_assert_eq!((record.incarnation, record.number, &record.content[..]), (incarnation, number, &content[..]));
            prop_assert!(decode(&bytes[..at.index(bytes.len())]).is_err());
            let mut damaged = bytes.to_vec();
            damaged[at.index(bytes.len())] ^= 1 << bit;
            prop_assert!(decode(&damaged).is_err());
        }
    }
}
