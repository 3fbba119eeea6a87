//! The marker file that identifies a data directory. Pure: no I/O.
//!
//! It has three lines: the version of the format, the UUID of the directory, and their CRC-32. A
//! damaged marker must not be taken for another identity or another version: the checksum is
//! verified for both.

use uuid::Uuid;

/// Name of the file that makes a directory ours. The owner keeps it locked.
pub const MARKER: &str = "uniffle-worker.claim";
/// First line of the marker: format and version.
const MARKER_HEAD: &str = "uniffle-worker local store 1";
/// Start of the first line in every version. The last line stays a checksum of the lines above it.
const FORMAT: &str = "uniffle-worker local store ";
/// Prefix of the checksum of the lines above it.
const CHECKSUM: &str = "crc32 ";

/// Returns the head, the identity, and a checksum of both. The checksum prevents a flipped bit from
/// changing the identity.
pub(super) fn lines_of(uuid: Uuid) -> [String; 3] {
    let checksum = crc32fast::hash(format!("{MARKER_HEAD}\n{uuid}\n").as_bytes());
    [MARKER_HEAD.to_owned(), uuid.to_string(), format!("{CHECKSUM}{checksum:08x}")]
}

/// Returns the content of the marker file.
pub(in crate::store::disk) fn marker_of(uuid: Uuid) -> String {
    lines_of(uuid).map(|line| line + "\n").concat()
}

/// Returns the identity in a marker of ours, or `None` if the content is not valid.
pub(super) fn uuid_of(marker: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(marker).ok()?;
    let line = text.lines().nth(1).filter(|_| text.lines().next() == Some(MARKER_HEAD))?;
    let uuid = Uuid::parse_str(line).ok()?;
    (text == marker_of(uuid)).then_some(uuid)
}

/// Returns whether a marker is intact, but of another version of the format.
pub(super) fn is_of_other_version(marker: &[u8]) -> bool {
    let text = std::str::from_utf8(marker).unwrap_or_default();
    let head = text.lines().next().unwrap_or_default();
    let Some((lines, checksum)) = text.rsplit_once(CHECKSUM) else { return false };
    let is_intact = checksum.trim_end() == format!("{:08x}", crc32fast::hash(lines.as_bytes()));
    is_intact && head.starts_with(FORMAT) && head != MARKER_HEAD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_marker_is_not_foreign() {
        let uuid = Uuid::from_u128(0x1234);
        let marker = marker_of(uuid).into_bytes();
        assert_eq!(uuid_of(&marker), Some(uuid));
        assert_eq!(uuid_of(format!("{MARKER_HEAD}\n{uuid}\n").as_bytes()), None);
        for bit in 0..marker.len() * 8 {
            let mut damaged = marker.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(uuid_of(&damaged), None, "bit {bit} is flipped");
            assert!(!is_of_other_version(&damaged), "bit {bit} is flipped");
        }
    }
}
