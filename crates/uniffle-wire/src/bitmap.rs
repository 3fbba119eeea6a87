//! The 64-bit bitmap that Java clients exchange: `Roaring64NavigableMap`'s legacy serialisation (docs/protocol.md
//! §3.3).
//!
//! One flag byte, an i32 BE count, then per 32-bit high word its i32 BE value and a portable 32-bit Roaring bitmap.
//! Not the portable 64-bit format. Empty input is the empty set, as for every Java reader.

use bytes::Bytes;
use croaring::{Bitmap, JvmLegacy, Portable, Treemap};

/// Flag byte and count of highs.
const HEADER_BYTES: usize = 5;
/// The value of one high word.
const HIGH_BYTES: usize = 4;

/// Serialises `set`; the empty set has its five header bytes.
pub fn encode(set: &Treemap) -> Bytes {
    Bytes::from(set.serialize::<JvmLegacy>())
}

/// Reads a set; `None` if the bytes are not one whole, valid bitmap.
///
/// croaring's own reader slices by the size that it would write, which a crafted input can make larger than what is
/// left; so the shape is walked first.
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
    fn java_vectors() {
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

    #[test]
    fn broken_bitmaps_are_refused_without_a_panic() {
        let good = hex(
            "00 00000002 00000000 3a3000000100000000000000100000000500 00000002 3a3000000100000000000000100000000700",
        );
        for len in 1..good.len() {
            assert_eq!(decode(&good[..len]), None, "cut at {len}");
        }
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                let _ = decode(&bad);
            }
        }
        assert_eq!(decode(&hex("00 7fffffff")), None);
    }
}
