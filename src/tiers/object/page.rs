//! A page of metadata: records of one registration of a shuffle, its registrations and reports. Version 1 is FROZEN (see the
//! golden test). Everything is big-endian:
//!
//! ```text
//! header, 32 bytes      0  magic "UWOM"            4  version u16 = 1      6  reserved u16 = 0
//!                       8  incarnation u64        16  first u64: the number of the first record
//!                      24  reserved u32 = 0       28  crc32 of bytes 0..28
//! per record            0  length u32              4  crc32 of what follows
//!                       8  kind u8: 1 a record of `durability`, 2 a reason why records may be missing (UTF-8),
//!                          3 by which number local disks know the registration (u64): 0 stands before what it had said
//!                            there, the number behind it
//!                       9  content
//! ```
//!
//! A page is written again, with more records, until it is full, an attempt of a write was not answered or the write failed:
//! what one that failed did is never known, so the next page repeats its number where the acknowledged ones end. So the rule of reading: pages in order of
//! their numbers; from the first record of a page on, all that pages before it said is void; one that begins beyond where
//! the ones before it end shows a gap. Pure: no I/O.

use bytes::Bytes;

/// First bytes of a page.
pub const MAGIC: [u8; 4] = *b"UWOM";
/// The version that is written.
pub const VERSION: u16 = 1;
const HEADER_BYTES: usize = 32;
const FRAME_BYTES: usize = 8;

/// What a page holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Noted {
    /// A registration or a report.
    Said(Bytes),
    /// Why records may be missing.
    Incomplete(String),
    /// Local disks know the registration by this number. Behind a 0 follows what it had said there, and behind that the
    /// number: a shuffle that has the one without the other has said more than is here. The same disks may tell all again between two
    /// such: then it counts what they have missed by now.
    Local(u64),
}

/// Why bytes are no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// It does not begin like one, or is another registration's.
    #[error("the object is no page of this shuffle's metadata")]
    Magic,
    /// A later program wrote it.
    #[error("the page has version {0}, this program knows {VERSION}")]
    Version(u16),
    /// A checksum does not fit, or it ends too early.
    #[error("the page is damaged")]
    Damaged,
}

/// A page without records.
#[must_use]
pub fn begin(incarnation: u64, first: u64) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
    bytes[8..16].copy_from_slice(&incarnation.to_be_bytes());
    bytes[16..24].copy_from_slice(&first.to_be_bytes());
    let crc = crc32fast::hash(&bytes[..28]);
    bytes[28..32].copy_from_slice(&crc.to_be_bytes());
    bytes
}

/// Appends a record to a page; none if it is too long for one.
#[must_use]
pub fn frame(noted: &Noted) -> Option<Vec<u8>> {
    let number;
    let (kind, content): (u8, &[u8]) = match noted {
        Noted::Said(record) => (1, record),
        Noted::Incomplete(reason) => (2, reason.as_bytes()),
        Noted::Local(incarnation) => {
            number = incarnation.to_be_bytes();
            (3, &number)
        }
    };
    let length = u32::try_from(content.len() + 1).ok()?;
    let mut bytes = Vec::with_capacity(FRAME_BYTES + 1 + content.len());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.push(kind);
    bytes.extend_from_slice(content);
    let crc = crc32fast::hash(&bytes[FRAME_BYTES..]);
    bytes[4..8].copy_from_slice(&crc.to_be_bytes());
    Some(bytes)
}

/// The number of the first record, and the records.
///
/// # Errors
/// [`PageError`].
pub fn decode(page: &Bytes, incarnation: u64) -> Result<(u64, Vec<Noted>), PageError> {
    let header = page.first_chunk::<HEADER_BYTES>().ok_or(PageError::Damaged)?;
    let word = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap_or_default());
    if header[0..4] != MAGIC || word(8) != incarnation {
        return Err(PageError::Magic);
    }
    if crc32fast::hash(&header[..28]) != half(&header[28..32]) {
        return Err(PageError::Damaged);
    }
    match u16::from_be_bytes([header[4], header[5]]) {
        VERSION => {}
        version => return Err(PageError::Version(version)),
    }
    let mut records = Vec::new();
    let mut at = HEADER_BYTES;
    while at < page.len() {
        let frame = page.get(at..at + FRAME_BYTES).ok_or(PageError::Damaged)?;
        let length = usize::try_from(half(&frame[0..4])).map_err(|_| PageError::Damaged)?;
        at += FRAME_BYTES;
        let end = at.checked_add(length).filter(|end| *end <= page.len() && length > 0);
        let end = end.ok_or(PageError::Damaged)?;
        let content = page.slice(at..end);
        if crc32fast::hash(&content) != half(&frame[4..8]) {
            return Err(PageError::Damaged);
        }
        records.push(match content[0] {
            1 => Noted::Said(content.slice(1..)),
            2 => Noted::Incomplete(String::from_utf8_lossy(&content[1..]).into_owned()),
            3 => {
                let number = content[1..].try_into().map_err(|_| PageError::Damaged)?;
                Noted::Local(u64::from_be_bytes(number))
            }
            _ => return Err(PageError::Damaged),
        });
        at = end;
    }
    Ok((word(16), records))
}

fn half(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().unwrap_or_default())
}

/// Why records of a registration may be missing that was told so. What disks said of that before they have told all again is over;
/// but not when others, which have taken it over, go on behind: those know nothing of it.
#[must_use]
pub fn incomplete(records: &[Noted]) -> Option<String> {
    let (mut reason, mut told_again): (Option<&String>, Option<Option<&String>>) = (None, None);
    let mut disks = None;
    for noted in records {
        match noted {
            Noted::Said(_) => {}
            Noted::Incomplete(why) => {
                reason = reason.or(Some(why));
                told_again = told_again.map(|told| told.or(Some(why)));
            }
            Noted::Local(0) => told_again = Some(None),
            Noted::Local(number) => {
                let are_the_same = disks.is_none_or(|known| known == number);
                reason = told_again.take().filter(|_| are_the_same).unwrap_or(reason);
                disks = Some(number);
            }
        }
    }
    reason.cloned()
}

/// The records of pages, as the rule of reading has them.
#[derive(Debug, Default)]
pub struct Reading {
    first: u64,
    /// Those that the pages so far hold, in order.
    pub records: Vec<Noted>,
    /// Why records are missing.
    pub gap: Option<String>,
}

impl Reading {
    /// Takes the next page.
    pub fn take(&mut self, number: u32, page: Result<(u64, Vec<Noted>), PageError>) {
        let (first, records) = match page {
            Ok(page) => page,
            Err(error) => {
                self.gap.get_or_insert_with(|| format!("page {number} of its metadata: {error}"));
                return;
            }
        };
        let end = self.first + self.records.len() as u64;
        if first > end {
            let missing = || format!("records {end} to {} of its metadata are missing", first - 1);
            self.gap.get_or_insert_with(missing);
            self.first += first - end;
        }
        let kept = usize::try_from(first.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.records.truncate(kept);
        self.records.extend(records);
    }

    /// The number of the record that comes next.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.first + self.records.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn said(text: &'static str) -> Noted {
        Noted::Said(Bytes::from_static(text.as_bytes()))
    }

    fn page(first: u64, records: &[Noted]) -> Bytes {
        let mut bytes = begin(9, first);
        records.iter().for_each(|record| bytes.extend(frame(record).unwrap()));
        bytes.into()
    }

    #[test]
    fn page_version_1_is_frozen() {
        let bytes = page(5, &[said("hi"), Noted::Incomplete("x".to_owned())]);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN);
        assert_eq!(decode(&bytes, 9).unwrap(), (5, vec![said("hi"), Noted::Incomplete("x".to_owned())]));
        assert_eq!(decode(&bytes, 8).unwrap_err(), PageError::Magic);
        let local = page(0, &[Noted::Local(7)]);
        let hex: String = local[32..].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((hex.as_str(), decode(&local, 9).unwrap().1), (LOCAL, vec![Noted::Local(7)]));
    }

    const LOCAL: &str = "0000000941e0bdc8030000000000000007";

    const GOLDEN: &str = "55574f4d0001000000000000000000090000000000000005000000008b1622980000000367c98b76016869000000022d\
        3189730278";

    #[test]
    fn failed_write_is_void_and_a_gap_is_noticed() {
        let mut reading = Reading::default();
        reading.take(1, decode(&page(0, &[said("a"), said("b"), said("unverified")]), 9));
        reading.take(3, decode(&page(2, &[said("c")]), 9));
        assert_eq!(reading.records, [said("a"), said("b"), said("c")]);
        assert_eq!((reading.next(), &reading.gap), (3, &None));
        reading.take(4, decode(&page(5, &[said("d")]), 9));
        assert_eq!(reading.gap.as_deref(), Some("records 3 to 4 of its metadata are missing"));
        assert_eq!(reading.next(), 6);
        reading.take(5, Err(PageError::Damaged));
        assert_eq!(reading.records.last(), Some(&said("d")));
    }

    #[test]
    fn missed_records_end_after_a_complete_rewrite() {
        let (told, gap) = (|number| Noted::Local(number), |why: &str| Noted::Incomplete(why.to_owned()));
        let first = [told(0), gap("away"), said("a"), told(7)];
        let of = |more: &[Noted]| incomplete(&[&first[..], more].concat());
        let away = Some("away".to_owned());
        assert_eq!((of(&[]), of(&[said("b")])), (away.clone(), away.clone()));
        assert_eq!(of(&[told(0), said("a"), told(7)]), None);
        assert_eq!(of(&[told(0), said("a"), told(7), gap("later")]).as_deref(), Some("later"));
        assert_eq!(of(&[told(0), gap("still"), told(7)]).as_deref(), Some("still"));
        assert_eq!(of(&[told(0), said("a")]), away, "it has not ended");
        assert_eq!(of(&[told(0), said("a"), told(9)]), away, "others have taken it over");
        assert_eq!(of(&[told(9), told(0), said("a"), told(0), said("a"), told(9)]), None);
    }

    proptest! {
        #[test]
        fn changed_page_is_noticed(at: prop::sample::Index, bit in 0u8..8, cut: prop::sample::Index) {
            let whole = page(5, &[said("hello"), said("there")]);
            let mut flipped = whole.to_vec();
            let at = at.index(flipped.len());
            flipped[at] ^= 1 << bit;
            prop_assert!(decode(&flipped.into(), 9).is_err(), "bit {bit} of byte {at}");
            let cut = cut.index(whole.len());
            match decode(&whole.slice(..cut), 9) {
                Err(_) => {}
                // Between two records: the rule of reading finds that later ones are missing.
                Ok((_, records)) => prop_assert!(records.len() < 2),
            }
        }
    }
}
