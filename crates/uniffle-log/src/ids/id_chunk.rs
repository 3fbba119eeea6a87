//! Compact encoding of up to [`CHUNK_IDS_MAX`] ascending block ids: gaps, packed to one width, with
//! exceptions. Pure.
//!
//! A gap is the number of ids left out between two. The payload is: width in bits u8, the smallest
//! gap as LEB128, and the excess of each gap packed to that width (lowest bit first). For each
//! wider excess follow its position u8 and its high bits as LEB128. Ids in Spark's layout come in
//! groups, with narrow gaps within a group and wide ones between two. Invariant: a payload is at
//! most three bytes longer than its ids as `u64`.

use std::sync::Arc;

/// Maximum number of ids of a chunk, because positions of exceptions are bytes.
pub(super) const CHUNK_IDS_MAX: usize = 256;

/// Size of the reference counts in front of a shared payload.
const SHARED_BYTES: u64 = 16;

/// Ascending ids. Clones share the payload.
#[derive(Debug, Clone)]
pub(super) struct IdChunk {
    first: u64,
    last: u64,
    count: u16,
    payload: Arc<[u8]>,
}

impl IdChunk {
    /// Encodes 1 to [`CHUNK_IDS_MAX`] ids, each greater than the one before. Returns `None` if
    /// `ids` is empty.
    pub(crate) fn encode(ids: &[u64]) -> Option<Self> {
        let (first, last) = (*ids.first()?, *ids.last()?);
        debug_assert!(
            ids.len() <= CHUNK_IDS_MAX && ids.is_sorted_by(|a, b| a < b),
            "ids must be ascending and fit into a chunk"
        );
        let mut gaps = [0u64; CHUNK_IDS_MAX];
        let gaps = &mut gaps[..ids.len() - 1];
        for (gap, pair) in gaps.iter_mut().zip(ids.windows(2)) {
            *gap = pair[1] - pair[0] - 1;
        }
        let least = gaps.iter().copied().min().unwrap_or(0);
        gaps.iter_mut().for_each(|gap| *gap -= least);
        let width = best_width(gaps);
        let mut payload = Vec::with_capacity(16 + (gaps.len() * width as usize).div_ceil(8));
        payload.push(u8::try_from(width).unwrap_or(u8::MAX));
        put_varint(&mut payload, least);
        pack(&mut payload, gaps, width);
        for (at, gap) in (0..=u8::MAX).zip(gaps) {
            let high = if width < 64 { *gap >> width } else { 0 };
            if high > 0 {
                payload.push(at);
                put_varint(&mut payload, high);
            }
        }
        let count = u16::try_from(ids.len()).unwrap_or(u16::MAX);
        Some(Self { first, last, count, payload: payload.into() })
    }

    /// Replaces `ids` by those of the chunk.
    pub(crate) fn decode(&self, ids: &mut Vec<u64>) {
        let is_whole = self.try_decode(ids);
        debug_assert!(is_whole, "a chunk is encoded by this process or checked when it is read");
    }

    /// Like [`IdChunk::decode`]. Returns false if the payload is malformed, or does not end with
    /// the last id.
    fn try_decode(&self, ids: &mut Vec<u64>) -> bool {
        ids.clear();
        ids.reserve(usize::from(self.count).min(CHUNK_IDS_MAX));
        ids.push(self.first);
        let mut gaps = [0u64; CHUNK_IDS_MAX];
        let Some(gaps) = gaps.get_mut(..usize::from(self.count).wrapping_sub(1)) else { return false };
        let Some(least) = unpack(&self.payload, gaps) else { return false };
        let mut id = self.first;
        for gap in gaps {
            id = id.wrapping_add(*gap).wrapping_add(least).wrapping_add(1);
            ids.push(id);
        }
        id == self.last
    }

    /// Returns the smallest id.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Returns the greatest id.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Returns the number of ids.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.count)
    }

    /// Returns whether the chunk is full.
    pub(crate) fn is_full(&self) -> bool {
        usize::from(self.count) >= CHUNK_IDS_MAX
    }

    /// Returns the heap size of the payload.
    pub(super) fn heap_bytes(&self) -> u64 {
        SHARED_BYTES + self.payload.len() as u64
    }

    /// Appends count, first and last id, length and payload, as [`IdChunk::read_from`] reads them.
    pub(super) fn write_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.count.to_be_bytes());
        out.extend_from_slice(&self.first.to_be_bytes());
        out.extend_from_slice(&self.last.to_be_bytes());
        out.extend_from_slice(&u16::try_from(self.payload.len()).unwrap_or(u16::MAX).to_be_bytes());
        out.extend_from_slice(&self.payload);
    }

    /// Reads a chunk and advances past it. Returns `None` if `bytes` begin with no whole chunk.
    pub(super) fn read_from(bytes: &mut &[u8]) -> Option<Self> {
        let count = u16::from_be_bytes(*take(bytes)?);
        let (first, last) = (u64::from_be_bytes(*take(bytes)?), u64::from_be_bytes(*take(bytes)?));
        let length = u16::from_be_bytes(*take(bytes)?);
        let (payload, rest) = bytes.split_at_checked(usize::from(length))?;
        *bytes = rest;
        let chunk = Self { first, last, count, payload: payload.into() };
        chunk.try_decode(&mut Vec::new()).then_some(chunk)
    }
}

/// Removes the first `N` bytes and returns them.
pub(crate) fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(head)
}

fn bits(value: u64) -> u32 {
    u64::BITS - value.leading_zeros()
}

/// Returns the width, among those of the gaps, that minimizes the size of packed gaps and
/// exceptions.
fn best_width(gaps: &[u64]) -> u32 {
    let mut counts = [0u32; 65];
    gaps.iter().for_each(|gap| counts[bits(*gap) as usize] += 1);
    let total = u32::try_from(gaps.len()).unwrap_or(u32::MAX);
    let cost = |width: u32| {
        let wider = (width + 1..=64).zip(&counts[width as usize + 1..]);
        let exceptions: u32 = wider.map(|(bits, count)| count * (1 + (bits - width).div_ceil(7))).sum();
        (total * width).div_ceil(8) + exceptions
    };
    let used = (0..=64).zip(&counts).filter(|(width, count)| *width == 0 || **count > 0);
    used.map(|(width, _)| width).min_by_key(|width| cost(*width)).unwrap_or(0)
}

fn pack(out: &mut Vec<u8>, gaps: &[u64], width: u32) {
    let (mut pending, mut filled) = (0u128, 0);
    for gap in gaps {
        pending |= u128::from(*gap & mask(width)) << filled;
        filled += width;
        if filled >= 64 {
            out.extend_from_slice(&low_half(pending).to_le_bytes());
            pending >>= 64;
            filled -= 64;
        }
    }
    out.extend_from_slice(&low_half(pending).to_le_bytes()[..filled.div_ceil(8) as usize]);
}

/// Fills `gaps` and returns the number to add to each. Returns `None` if the payload has an
/// unexpected length.
fn unpack(payload: &[u8], gaps: &mut [u64]) -> Option<u64> {
    let (&width, mut rest) = payload.split_first()?;
    let width = u32::from(width).min(64);
    let least = take_varint(&mut rest)?;
    let (mut packed, mut rest) = rest.split_at_checked((gaps.len() * width as usize).div_ceil(8))?;
    let (mut pending, mut filled) = (0u128, 0);
    for gap in gaps.iter_mut() {
        if filled < width {
            let mut word = [0; 8];
            let length = packed.len().min(8);
            word[..length].copy_from_slice(&packed[..length]);
            packed = &packed[length..];
            pending |= u128::from(u64::from_le_bytes(word)) << filled;
            filled += 64;
        }
        *gap = low_half(pending) & mask(width);
        pending >>= width;
        filled -= width;
    }
    while let Some((&at, after)) = rest.split_first() {
        rest = after;
        let high = take_varint(&mut rest)?;
        *gaps.get_mut(usize::from(at))? |= high.checked_shl(width)?;
    }
    Some(least)
}

fn mask(width: u32) -> u64 {
    u64::MAX.checked_shr(u64::BITS - width).unwrap_or(0)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
fn low_half(value: u128) -> u64 {
    value as u64
}

fn put_varint(out: &mut Vec<u8>, value: u64) {
    let mut bytes = [0; 10];
    out.extend_from_slice(postcard::to_slice(&value, &mut bytes).expect("ten bytes hold 64 bits"));
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    *bytes = rest;
    Some(value)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn decoded(chunk: &IdChunk) -> Option<Vec<u64>> {
        let mut ids = vec![7];
        chunk.try_decode(&mut ids).then_some(ids)
    }

    proptest! {
        #[test]
        fn chunk_returns_its_ids(
            ids in prop::collection::btree_set(any::<u64>(), 1..=CHUNK_IDS_MAX),
            shift in 0u32..64,
            cut: prop::sample::Index,
        ) {
            let ids: BTreeSet<u64> = ids.into_iter().map(|id| id >> shift).collect();
            let ids: Vec<u64> = ids.into_iter().collect();
            let chunk = IdChunk::encode(&ids).unwrap();
            prop_assert_eq!(decoded(&chunk), Some(ids.clone()));
            let mut written = Vec::new();
            chunk.write_to(&mut written);
            let mut rest = &written[..];
            prop_assert_eq!(decoded(&IdChunk::read_from(&mut rest).unwrap()), Some(ids.clone()));
            prop_assert!(rest.is_empty());
            prop_assert!(IdChunk::read_from(&mut &written[..cut.index(written.len())]).is_none());
            prop_assert!(chunk.payload.len() <= 8 * ids.len() + 3, "the chunk takes {} bytes", chunk.payload.len());
        }

        #[test]
        fn arbitrary_chunk_bytes_do_not_panic(
            count: u16, first: u64, last: u64, payload in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let chunk = IdChunk { first, last, count, payload: payload.into() };
            let _ = decoded(&chunk);
        }
    }

    #[test]
    fn chunk_size_follows_the_layout_of_the_ids() {
        let bytes = |ids: &mut dyn Iterator<Item = u64>| {
            let ids: Vec<u64> = ids.take(CHUNK_IDS_MAX).collect();
            IdChunk::encode(&ids).unwrap().payload.len()
        };
        assert!(bytes(&mut (0..)) <= 3);
        assert!(bytes(&mut (0..).map(|id| id << 42)) <= 10);
        let tasks_of_sequences = |n: u64| (n / 10) << 43 | 7 << 22 | (n % 10) << 2;
        assert!(bytes(&mut (0..).map(tasks_of_sequences)) <= 2 * CHUNK_IDS_MAX);
    }
}
