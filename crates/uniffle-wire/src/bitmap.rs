//! The 64-bit bitmap that Java clients exchange, in the legacy serialisation of
//! `Roaring64NavigableMap` (docs/protocol.md §3.3).
//!
//! The format is one flag byte, an i32 BE count, then for each 32-bit high word its i32 BE value
//! and a portable 32-bit Roaring bitmap. It differs from the portable 64-bit format. Empty input
//! decodes to the empty set, as in every Java reader. Invariant: Java clients can read every
//! encoded bitmap.

use std::iter::Peekable;

use bytes::Bytes;
use croaring::{Bitmap, JvmLegacy, Portable, Treemap};

/// Flag byte and count of highs.
const HEADER_BYTES: usize = 5;
/// Length of one high word.
const HIGH_BYTES: usize = 4;
/// First word of a portable bitmap without runs.
const COOKIE: u32 = 0x303a;
/// Cookie and number of containers.
const BITMAP_HEAD_BYTES: usize = 8;
/// Key, count and offset of one container.
const CONTAINER_HEAD_BYTES: usize = 8;
/// Most ids that a container lists as two bytes each. A larger container is a bitmap of
/// [`BITS_BYTES`] bytes.
const ARRAY_IDS_MAX: usize = 4096;
const BITS_BYTES: u32 = 8192;

/// Serialises `set`. The empty set is encoded as the five header bytes.
pub fn encode(set: &Treemap) -> Bytes {
    Bytes::from(set.serialize::<JvmLegacy>())
}

/// Returns the length of [`encode_ascending`]'s result for the same ids.
pub fn encoded_bytes(ids: impl Iterator<Item = u64>) -> u64 {
    let (mut bytes, mut in_container, mut last) = (HEADER_BYTES as u64, 0_usize, None::<u64>);
    for id in ids {
        let differs = |bits: u32| last.is_none_or(|last| last >> bits != id >> bits);
        if differs(32) {
            bytes += (HIGH_BYTES + BITMAP_HEAD_BYTES) as u64;
        }
        if differs(16) {
            (bytes, in_container) = (bytes + CONTAINER_HEAD_BYTES as u64, 0);
        }
        // An array stops growing at the length of the equivalent bitmap.
        in_container += 1;
        bytes += if in_container <= ARRAY_IDS_MAX { 2 } else { 0 };
        last = Some(id);
    }
    bytes
}

/// Serialises strictly ascending ids. Allocates only the result, one container, and the headers of
/// one high word.
pub fn encode_ascending(ids: impl Iterator<Item = u64>, capacity: usize) -> Bytes {
    let mut out = Vec::with_capacity(capacity.max(HEADER_BYTES));
    out.extend_from_slice(&[0; HEADER_BYTES]);
    let mut ids = ids.peekable();
    let mut highs = 0u32;
    while let Some(first) = ids.peek().copied() {
        highs += 1;
        let high = u32::try_from(first >> 32).unwrap_or(u32::MAX);
        out.extend_from_slice(&high.to_be_bytes());
        encode_high(&mut ids, high, &mut out);
    }
    out[1..HEADER_BYTES].copy_from_slice(&highs.to_be_bytes());
    Bytes::from(out)
}

/// Appends the portable 32-bit bitmap of the ids whose high word is `high`.
///
/// The containers are written first and then moved behind their headers.
fn encode_high(ids: &mut Peekable<impl Iterator<Item = u64>>, high: u32, out: &mut Vec<u8>) {
    let start = out.len();
    let (mut heads, mut lows): (Vec<(u16, u32)>, Vec<u16>) = (Vec::new(), Vec::new());
    while let Some(first) = ids.peek().copied().filter(|id| *id >> 32 == u64::from(high)) {
        lows.clear();
        let mut bits = None;
        let mut count = 0u32;
        while let Some(id) = ids.next_if(|id| *id >> 16 == first >> 16) {
            count += 1;
            match &mut bits {
                None if lows.len() < ARRAY_IDS_MAX => lows.push(lowest(id)),
                bits => set_bit(bits.get_or_insert_with(|| bits_of(&lows)), lowest(id)),
            }
        }
        heads.push((lowest(first >> 16), count));
        match bits {
            Some(bits) => bits.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes())),
            None => lows.iter().for_each(|low| out.extend_from_slice(&low.to_le_bytes())),
        }
    }
    let bodies = out.len() - start;
    let head_bytes = BITMAP_HEAD_BYTES + CONTAINER_HEAD_BYTES * heads.len();
    out.resize(out.len() + head_bytes, 0);
    out.copy_within(start..start + bodies, start + head_bytes);
    let mut head = Vec::with_capacity(head_bytes);
    head.extend_from_slice(&COOKIE.to_le_bytes());
    head.extend_from_slice(&u32::try_from(heads.len()).unwrap_or(u32::MAX).to_le_bytes());
    for (key, count) in &heads {
        head.extend_from_slice(&key.to_le_bytes());
        head.extend_from_slice(&u16::try_from(count - 1).unwrap_or(u16::MAX).to_le_bytes());
    }
    let mut offset = u32::try_from(head_bytes).unwrap_or(u32::MAX);
    for (_, count) in &heads {
        head.extend_from_slice(&offset.to_le_bytes());
        offset += if *count as usize <= ARRAY_IDS_MAX { 2 * count } else { BITS_BYTES };
    }
    out[start..start + head_bytes].copy_from_slice(&head);
}

type Bits = Box<[u64; BITS_BYTES as usize / 8]>;

fn bits_of(lows: &[u16]) -> Bits {
    let mut bits = Box::new([0; BITS_BYTES as usize / 8]);
    lows.iter().for_each(|low| set_bit(&mut bits, *low));
    bits
}

fn set_bit(bits: &mut Bits, low: u16) {
    bits[usize::from(low >> 6)] |= 1 << (low & 63);
}

#[expect(clippy::cast_possible_truncation, reason = "the lowest bits")]
fn lowest(id: u64) -> u16 {
    id as u16
}

/// Reads a set. Returns `None` unless the bytes begin with a valid bitmap.
///
/// croaring's own reader slices by the size that it would write. A crafted input can make that size
/// exceed the remaining input, so the layout is checked first.
pub fn decode(bytes: &[u8]) -> Option<Treemap> {
    if bytes.is_empty() {
        return Some(Treemap::new());
    }
    let (header, mut rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let highs = u32::from_be_bytes(header[1..].try_into().ok()?);
    for _ in 0..highs {
        let (_, bitmap) = rest.split_at_checked(HIGH_BYTES)?;
        let size = Bitmap::try_deserialize::<Portable>(bitmap)?.get_serialized_size_in_bytes::<Portable>();
        rest = bitmap.get(size..)?;
    }
    Treemap::try_deserialize::<JvmLegacy>(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    /// The vectors of docs/protocol.md §3.3, made by RoaringBitmap 0.9.15.
    #[test]
    fn bitmaps_match_java_vectors() {
        let cases = [
            (vec![], "00 00000000"),
            (vec![1, 2], "00 00000001 00000000 3a30000001000000000001001000000001000200"),
            (
                vec![5, (1u64 << 33) + 7],
                "00 00000002 00000000 3a3000000100000000000000100000000500 00000002 3a3000000100000000000000100000000700",
            ),
        ];
        for (ids, text) in cases {
            let set = Treemap::of(&ids);
            assert_eq!(encode(&set).as_ref(), hex(text));
            assert_eq!(decode(&hex(text)), Some(set));
        }
        let run_optimised = decode(&hex("00 00000001 00000000 3b3000000100000f27010000000f27"));
        assert_eq!(run_optimised.map(|set| set.cardinality()), Some(10_000));
        assert_eq!(decode(&[]).map(|set| set.cardinality()), Some(0));
    }

    proptest! {
        #[test]
        fn ascending_ids_encode_like_a_set(
            groups in prop::collection::vec((0u64..1 << 34, 1u64..6000, 1u64..40), 0..8), spread in 0u32..29,
        ) {
            let groups = groups.into_iter();
            let ids: BTreeSet<u64> = groups.flat_map(|(first, count, step)| {
                (0..count).map(move |n| (first << spread).wrapping_add(n * step) >> 1)
            }).collect();
            let set: Treemap = ids.iter().copied().collect();
            let expected = encode(&set);
            prop_assert_eq!(encoded_bytes(ids.iter().copied()), expected.len() as u64);
            prop_assert_eq!(encode_ascending(ids.iter().copied(), 0), expected);
        }
    }

    #[test]
    fn malformed_bitmaps_are_refused() {
        let good = hex(
            "00 00000002 00000000 3a3000000100000000000000100000000500 00000002 3a3000000100000000000000100000000700",
        );
        for len in 1..good.len() {
            assert_eq!(decode(&good[..len]), None, "a bitmap cut at byte {len} was accepted");
        }
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                // May be another valid bitmap, but does not panic.
                let _ = decode(&bad);
            }
        }
        assert_eq!(decode(&hex("00 7fffffff")), None);
    }
}
