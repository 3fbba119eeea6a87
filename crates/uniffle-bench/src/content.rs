//! Block contents: length, bytes and checksum follow from the seed and the block id. Creating a
//! block costs nothing per byte.
//!
//! All blocks are slices of one pool of random bytes, so creating a block copies nothing and
//! checking it is a comparison. The checksum of each (place, length) is computed once. Invariant:
//! [`ContentPool::describe`] is a pure function of (seed, size distribution, id). Two blocks of
//! equal length have the same bytes with a probability of 1/32,768, so a server that systematically
//! confuses blocks is detected.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};

/// Number of places in the pool where a block may begin.
const PLACES: usize = 32_768;
/// Distance between two places.
const STRIDE_BYTES: usize = 1 << 10;
/// Bit that marks a computed checksum.
const KNOWN: u64 = 1 << 32;

/// 32 quantiles of the block lengths of Spark's writers with default settings: most blocks have a
/// few KiB, the mean is 16.5 KiB.
const SPARK_MIX: [u32; 32] = [
    180, 400, 640, 900, 1_200, 1_500, 1_850, 2_200, 2_600, 3_000, 3_450, 3_950, 4_500, 5_100, 5_750, 6_450,
    7_200, 8_050, 9_000, 10_100, 11_300, 12_700, 14_300, 16_200, 18_500, 21_300, 24_800, 29_500, 36_000,
    47_000, 70_000, 160_000,
];
const TINY: [u32; 6] = [40, 100, 200, 400, 700, 1_000];
/// Largest block.
const BLOCK_BYTES_MAX: u32 = 64 << 20;

/// Distribution of block lengths: each of these lengths is equally likely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes {
    name: String,
    lengths: Vec<u32>,
}

impl Sizes {
    /// Gives every block `length` bytes.
    pub(crate) fn fixed(length: u32) -> Self {
        Self { name: format!("fixed:{length}"), lengths: vec![length] }
    }

    /// Uses each of `lengths` equally often. `lengths` must not be empty.
    pub(crate) fn sample(name: &str, lengths: Vec<u32>) -> Self {
        Self { name: name.to_owned(), lengths }
    }

    /// Returns the mean length of a block.
    pub(crate) fn mean(&self) -> u64 {
        let sum: u64 = self.lengths.iter().map(|&length| u64::from(length)).sum();
        sum / self.lengths.len() as u64
    }

    fn longest(&self) -> u32 {
        self.lengths.iter().copied().max().unwrap_or(1)
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = |lengths: &[u32]| Self { name: text.to_owned(), lengths: lengths.to_vec() };
        match text {
            "spark-mix" => Ok(named(&SPARK_MIX)),
            "tiny" => Ok(named(&TINY)),
            _ => {
                let number = text.strip_prefix("fixed:").unwrap_or(text);
                let size: bytesize::ByteSize =
                    number.parse().map_err(|_| format!("{text:?} is not fixed:SIZE, spark-mix or tiny"))?;
                let length = u32::try_from(size.as_u64()).ok().filter(|&l| l > 0 && l <= BLOCK_BYTES_MAX);
                length.map(Self::fixed).ok_or_else(|| "the block size must be 1 B to 64 MiB".to_owned())
            }
        }
    }
}

/// SplitMix64's step and finalizer. Gives the same sequence on every machine.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix(u64);

impl SplitMix {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a uniform number in `0..below`.
    pub(crate) fn below(&mut self, below: u64) -> u64 {
        u64::try_from((u128::from(self.next()) * u128::from(below)) >> 64)
            .expect("the result is less than `below`")
    }

    /// Returns a uniform number in `0.0..1.0`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Description of a block, from which its bytes can be produced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockDescription {
    pub(crate) length: u32,
    /// Number of the place in the pool where the block begins.
    place: usize,
    /// Index of the length in [`Sizes`].
    class: usize,
}

/// The content of all blocks of a run.
pub(crate) struct ContentPool {
    seed: u64,
    sizes: Sizes,
    bytes: Bytes,
    /// Checksums by place and class, marked with [`KNOWN`], or 0.
    crcs: Vec<AtomicU64>,
}

impl ContentPool {
    /// Creates the random bytes of the pool.
    pub(crate) fn new(seed: u64, sizes: Sizes) -> Self {
        let longest = usize::try_from(sizes.longest()).expect("a u32 fits into usize");
        let total = (PLACES * STRIDE_BYTES + longest).next_multiple_of(8);
        let mut bytes = BytesMut::with_capacity(total);
        let mut random = SplitMix::new(seed);
        while bytes.len() < total {
            bytes.extend_from_slice(&random.next().to_le_bytes());
        }
        let crcs = (0..PLACES * sizes.lengths.len()).map(|_| AtomicU64::new(0)).collect();
        Self { seed, sizes, bytes: bytes.freeze(), crcs }
    }

    pub(crate) fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Returns the description of block `id`.
    pub(crate) fn describe(&self, id: i64) -> BlockDescription {
        let hash = mix(self.seed ^ id.cast_unsigned().wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let place = usize::try_from(hash % PLACES as u64).expect("a remainder is less than PLACES");
        let classes = self.sizes.lengths.len() as u64;
        let class =
            usize::try_from((hash >> 32) % classes).expect("the index is less than the number of classes");
        BlockDescription { length: self.sizes.lengths[class], place, class }
    }

    /// Returns the block's bytes.
    pub(crate) fn bytes(&self, block: BlockDescription) -> Bytes {
        self.bytes.slice(Self::range(block))
    }

    /// Returns the block's bytes for a comparison.
    pub(crate) fn view(&self, block: BlockDescription) -> &[u8] {
        &self.bytes[Self::range(block)]
    }

    /// Returns the block's checksum.
    pub(crate) fn crc(&self, block: BlockDescription) -> u32 {
        let cell = &self.crcs[block.place * self.sizes.lengths.len() + block.class];
        let known = cell.load(Ordering::Relaxed);
        if known & KNOWN != 0 {
            return u32::try_from(known & !KNOWN).expect("only 32 bits remain");
        }
        let crc = crc32fast::hash(self.view(block));
        cell.store(KNOWN | u64::from(crc), Ordering::Relaxed);
        crc
    }

    fn range(block: BlockDescription) -> std::ops::Range<usize> {
        let begins = block.place * STRIDE_BYTES;
        begins..begins + usize::try_from(block.length).expect("a u32 fits into usize")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_by_name() {
        assert_eq!("fixed:14KiB".parse::<Sizes>().unwrap(), Sizes::fixed(14 << 10).renamed("fixed:14336"));
        assert_eq!("100".parse::<Sizes>().unwrap().mean(), 100);
        let mix: Sizes = "spark-mix".parse().unwrap();
        assert!((10_000..25_000).contains(&mix.mean()), "{}", mix.mean());
        assert!("tiny".parse::<Sizes>().unwrap().longest() <= 1_000);
        for wrong in ["", "fixed:0", "fixed:1GiB", "sparkmix", "fixed:x"] {
            assert!(wrong.parse::<Sizes>().is_err(), "{wrong:?}");
        }
    }

    impl Sizes {
        fn renamed(self, name: &str) -> Self {
            Self { name: name.to_owned(), ..self }
        }
    }

    #[test]
    fn blocks_follow_from_seed_and_id() {
        let pool = |seed| ContentPool::new(seed, "tiny".parse().unwrap());
        let (a, b, other) = (pool(1), pool(1), pool(2));
        let mut differ = 0;
        for id in 0..100 {
            let block = a.describe(id);
            assert_eq!(block, b.describe(id));
            assert_eq!(a.bytes(block), b.bytes(block));
            assert_eq!(a.crc(block), crc32fast::hash(&a.bytes(block)));
            assert_eq!(a.crc(block), a.crc(block), "the table must keep the checksum");
            differ += usize::from(other.view(other.describe(id)) != a.view(block));
        }
        assert!(differ > 90);
    }

    #[test]
    fn block_lengths_are_equally_likely() {
        let pool = ContentPool::new(3, "tiny".parse().unwrap());
        let mut counts = std::collections::BTreeMap::new();
        for id in 0..6_000 {
            *counts.entry(pool.describe(id).length).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), TINY.len());
        assert!(counts.values().all(|&n| (850..1_150).contains(&n)), "{counts:?}");
    }

    #[test]
    fn random_numbers_stay_below_their_bound() {
        let mut random = SplitMix::new(9);
        assert!((0..1_000).all(|_| random.below(7) < 7));
        assert!((0..1_000).all(|_| (0.0..1.0).contains(&random.unit())));
    }
}
