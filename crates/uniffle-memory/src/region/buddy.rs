//! Buddy bookkeeping: which 4 KiB to 2 MiB pieces of a region of 2 MiB blocks are free.
//!
//! Pure arithmetic that never touches the memory itself. Allocation takes the smallest sufficient
//! piece at the lowest address of blocks that were in use before. It opens an unused block only as
//! a last resort, so that pages that were never needed are never touched. Freeing merges a piece
//! with its buddies, so that a region with all pieces freed is whole again.
//!
//! A block's state is a heap-ordered tree in a bitmap of 1,024 bits: node 1 is the block, 2 and 3
//! its halves, …, 512..1024 its 4 KiB units. A set bit is a free piece whose parent is not
//! completely free. That is 128 bytes for 2 MiB.

use std::ops::Range;

/// The smallest piece.
pub(crate) const UNIT_BYTES: usize = 4 << 10;
/// The largest piece and the growth unit of the region: one huge page.
pub(crate) const BLOCK_BYTES: usize = 2 << 20;

const ORDER_MAX: usize = 9;
const ORDERS: usize = ORDER_MAX + 1;
const WORDS: usize = 16;

/// Free pieces of a row of blocks. Offsets are bytes from the start of the row.
#[derive(Debug)]
pub(super) struct Buddy {
    blocks: Vec<[u64; WORDS]>,
    /// Per order: the blocks that have a free piece of exactly this order.
    having: [BlockSet; ORDERS],
    /// Number of the first block that was never used. From here on the bitmaps are still zero.
    fresh: usize,
    /// Number of the first block that cannot be used yet.
    ready: usize,
    free_bytes: u64,
}

impl Buddy {
    /// Creates bookkeeping for `blocks` free blocks that were never used.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            // Zeroed by the kernel, so that the table of a large region is not resident until it is
            // needed.
            blocks: vec![[0; WORDS]; blocks],
            having: std::array::from_fn(|_| BlockSet::new(blocks)),
            fresh: 0,
            ready: blocks,
            free_bytes: (blocks * BLOCK_BYTES) as u64,
        }
    }

    /// Creates bookkeeping in which no block can be used before it is [made
    /// ready](Self::make_ready).
    pub(super) fn unready(blocks: usize) -> Self {
        Self { ready: 0, ..Self::new(blocks) }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Returns the bytes of all blocks that were ever used. They may be resident.
    pub(crate) fn touched_bytes(&self) -> u64 {
        (self.fresh * BLOCK_BYTES) as u64
    }

    /// Returns the number of usable blocks. They have the lowest numbers.
    pub(crate) fn ready(&self) -> usize {
        self.ready
    }

    /// Makes the first `blocks` blocks usable.
    pub(super) fn make_ready(&mut self, blocks: usize) {
        self.ready = blocks.clamp(self.ready, self.blocks.len());
    }

    /// Takes a whole block that was never used, if there is one. Returns its offset.
    pub(super) fn take_fresh(&mut self) -> Option<usize> {
        let block = self.open_fresh()?;
        self.clear(block, 1, ORDER_MAX);
        self.free_bytes -= BLOCK_BYTES as u64;
        Some(block * BLOCK_BYTES)
    }

    /// Takes all free pieces of a block that was in use.
    pub(super) fn take_free(&mut self, block: usize) -> Vec<Range<usize>> {
        let mut taken = Vec::new();
        for order in 0..ORDERS {
            while let Some(node) = self.first_free(block, order) {
                let bytes = UNIT_BYTES << order;
                self.clear(block, node, order);
                self.free_bytes -= bytes as u64;
                let offset = block * BLOCK_BYTES + (node - (1 << (ORDER_MAX - order))) * bytes;
                taken.push(offset..offset + bytes);
            }
        }
        taken
    }

    /// Returns the free ranges of blocks that were in use, in ascending order and with neighbours
    /// merged.
    pub(super) fn free_ranges(&self) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (block, words) in self.blocks[..self.fresh].iter().enumerate() {
            let from = ranges.len();
            for (at, word) in words.iter().enumerate() {
                let mut remaining = *word;
                while remaining != 0 {
                    let node = at * 64 + remaining.trailing_zeros() as usize;
                    remaining &= remaining - 1;
                    let depth = node.ilog2() as usize;
                    let bytes = BLOCK_BYTES >> depth;
                    let start = block * BLOCK_BYTES + (node - (1 << depth)) * bytes;
                    ranges.push(start..start + bytes);
                }
            }
            ranges[from..].sort_unstable_by_key(|range| range.start);
        }
        ranges.dedup_by(|next, range| {
            let follows = range.end == next.start;
            range.end = if follows { next.end } else { range.end };
            follows
        });
        ranges
    }

    /// Returns the size of the largest piece that [`Buddy::allocate`] would grant now.
    pub(crate) fn largest_free(&self) -> usize {
        if self.fresh < self.ready {
            return BLOCK_BYTES;
        }
        let order = (0..ORDERS).rev().find(|order| self.having[*order].first().is_some());
        order.map_or(0, |order| UNIT_BYTES << order)
    }

    /// Takes a piece of `bytes`, a power of two from 4 KiB to 2 MiB. Its offset is a multiple of
    /// its size.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<usize> {
        let order = order_of(bytes);
        let found = (order..ORDERS).find_map(|larger| Some((self.having[larger].first()?, larger)));
        let (block, from) = match found {
            Some(found) => found,
            None => (self.open_fresh()?, ORDER_MAX),
        };
        let mut node = self.first_free(block, from).expect("`having` lists only blocks with such a piece");
        self.clear(block, node, from);
        for smaller in (order..from).rev() {
            node *= 2;
            self.set(block, node + 1, smaller);
        }
        self.free_bytes -= bytes as u64;
        let first_of_order = 1 << (ORDER_MAX - order);
        Some(block * BLOCK_BYTES + (node - first_of_order) * bytes)
    }

    /// Takes the piece of `bytes` at `offset` and opens the blocks before it, ready or not. Returns
    /// false and changes nothing if no such piece can start there or part of it is in use.
    pub(crate) fn take(&mut self, offset: usize, bytes: usize) -> bool {
        let is_size = bytes.is_power_of_two() && (UNIT_BYTES..=BLOCK_BYTES).contains(&bytes);
        let block = offset / BLOCK_BYTES;
        if !is_size || !offset.is_multiple_of(bytes) || block >= self.blocks.len() {
            return false;
        }
        self.make_ready(block + 1);
        while self.fresh <= block && self.open_fresh().is_some() {}
        let order = order_of(bytes);
        let node = (1 << (ORDER_MAX - order)) + offset % BLOCK_BYTES / bytes;
        let Some(up) = (0..=ORDER_MAX - order).find(|up| self.is_set(block, node >> up)) else {
            return false;
        };
        self.clear(block, node >> up, order + up);
        for level in (0..up).rev() {
            self.set(block, (node >> level) ^ 1, order + level);
        }
        self.free_bytes -= bytes as u64;
        true
    }

    /// Frees a piece of `bytes` bytes that was taken as a whole.
    pub(crate) fn free(&mut self, offset: usize, bytes: usize) {
        let mut order = order_of(bytes);
        let block = offset / BLOCK_BYTES;
        let mut node = (1 << (ORDER_MAX - order)) + offset % BLOCK_BYTES / bytes;
        debug_assert!(
            offset.is_multiple_of(bytes),
            "offset {offset} is not aligned to a piece of {bytes} bytes"
        );
        debug_assert!(!self.is_in_free_piece(block, node), "double free at {offset}");
        while node > 1 && self.is_set(block, node ^ 1) {
            self.clear(block, node ^ 1, order);
            node /= 2;
            order += 1;
        }
        self.set(block, node, order);
        self.free_bytes += bytes as u64;
    }

    fn open_fresh(&mut self) -> Option<usize> {
        let block = self.fresh;
        if block == self.ready {
            return None;
        }
        self.fresh += 1;
        self.set(block, 1, ORDER_MAX);
        Some(block)
    }

    fn is_set(&self, block: usize, node: usize) -> bool {
        self.blocks[block][node / 64] & (1 << (node % 64)) != 0
    }

    fn is_in_free_piece(&self, block: usize, node: usize) -> bool {
        std::iter::successors(Some(node), |node| (*node > 1).then_some(node / 2))
            .any(|n| self.is_set(block, n))
    }

    fn set(&mut self, block: usize, node: usize, order: usize) {
        self.blocks[block][node / 64] |= 1 << (node % 64);
        self.having[order].insert(block);
    }

    fn clear(&mut self, block: usize, node: usize, order: usize) {
        self.blocks[block][node / 64] &= !(1 << (node % 64));
        if self.first_free(block, order).is_none() {
            self.having[order].remove(block);
        }
    }

    /// Returns the lowest free node of `order`. The nodes of an order are `2^depth..2^(depth+1)`, a
    /// part of word 0 or whole words.
    fn first_free(&self, block: usize, order: usize) -> Option<usize> {
        let words = &self.blocks[block];
        let first = 1usize << (ORDER_MAX - order);
        if first < 64 {
            let mask = ((1u64 << first) - 1) << first;
            let free = words[0] & mask;
            return (free != 0).then(|| free.trailing_zeros() as usize);
        }
        let word = (first / 64..first / 32).find(|word| words[*word] != 0)?;
        Some(word * 64 + words[word].trailing_zeros() as usize)
    }
}

fn order_of(bytes: usize) -> usize {
    assert!(
        bytes.is_power_of_two() && (UNIT_BYTES..=BLOCK_BYTES).contains(&bytes),
        "no piece has a size of {bytes} bytes"
    );
    (bytes / UNIT_BYTES).trailing_zeros() as usize
}

/// A set of block numbers with a fast minimum: a bitmap, a bitmap of its non-zero words, and so on
/// up to one word.
#[derive(Debug)]
pub(crate) struct BlockSet {
    levels: Vec<Vec<u64>>,
}

impl BlockSet {
    pub(crate) fn new(blocks: usize) -> Self {
        let mut levels = Vec::new();
        let mut bits = blocks.max(1);
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0; words]);
            if words == 1 {
                return Self { levels };
            }
            bits = words;
        }
    }

    pub(crate) fn insert(&mut self, mut at: usize) {
        for level in &mut self.levels {
            let was = level[at / 64];
            level[at / 64] |= 1 << (at % 64);
            if was != 0 {
                return;
            }
            at /= 64;
        }
    }

    pub(crate) fn remove(&mut self, mut at: usize) {
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                return;
            }
            at /= 64;
        }
    }

    pub(crate) fn first(&self) -> Option<usize> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = level[at];
            if word == 0 {
                return None;
            }
            at = at * 64 + word.trailing_zeros() as usize;
        }
        Some(at)
    }

    pub(crate) fn last(&self) -> Option<usize> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = level[at];
            if word == 0 {
                return None;
            }
            at = at * 64 + word.ilog2() as usize;
        }
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn freed_memory_is_reused_before_fresh_blocks() {
        let mut buddy = Buddy::new(100);
        let first = buddy.allocate(BLOCK_BYTES).unwrap();
        let second = buddy.allocate(UNIT_BYTES).unwrap();
        assert_eq!((first, second), (0, BLOCK_BYTES));
        buddy.free(first, BLOCK_BYTES);
        for _ in 0..1000 {
            let offset = buddy.allocate(1 << 20).unwrap();
            buddy.free(offset, 1 << 20);
        }
        assert_eq!(buddy.touched_bytes(), 2 * BLOCK_BYTES as u64);
    }

    #[test]
    fn smallest_sufficient_block_at_lowest_address_is_used() {
        let mut buddy = Buddy::new(2);
        let units: Vec<_> = (0..512).map(|_| buddy.allocate(UNIT_BYTES).unwrap()).collect();
        assert_eq!(units, (0..512).map(|i| i * UNIT_BYTES).collect::<Vec<_>>());
        for unit in [300, 200, 201] {
            buddy.free(unit * UNIT_BYTES, UNIT_BYTES);
        }
        assert_eq!(
            buddy.allocate(UNIT_BYTES),
            Some(300 * UNIT_BYTES),
            "a single unit must be used before a pair is split"
        );
        assert_eq!(buddy.allocate(2 * UNIT_BYTES), Some(200 * UNIT_BYTES));
        assert_eq!(buddy.largest_free(), BLOCK_BYTES);
    }

    #[test]
    fn full_level_refuses_and_minimum_is_found() {
        let mut buddy = Buddy::new(5000);
        let all: Vec<_> = (0..5000).map(|_| buddy.allocate(BLOCK_BYTES).unwrap()).collect();
        assert_eq!(buddy.allocate(UNIT_BYTES), None);
        assert_eq!((buddy.free_bytes(), buddy.largest_free()), (0, 0));
        for offset in [all[4999], all[4097], all[130]] {
            buddy.free(offset, BLOCK_BYTES);
        }
        let again: Vec<_> = (0..3).map(|_| buddy.allocate(BLOCK_BYTES).unwrap()).collect();
        assert_eq!(again, [all[130], all[4097], all[4999]]);
    }

    /// The model: a flag per unit that tells whether it is taken.
    struct Bitmap(Vec<bool>);

    impl Bitmap {
        fn take(&mut self, offset: usize, bytes: usize, to: bool) {
            for unit in &mut self.0[offset / UNIT_BYTES..(offset + bytes) / UNIT_BYTES] {
                assert_ne!(*unit, to, "pieces overlap at {offset}");
                *unit = to;
            }
        }

        fn largest_free(&self) -> usize {
            let fits =
                |order: &usize| self.0.chunks(1 << order).any(|piece| piece.iter().all(|taken| !taken));
            (0..ORDERS).rev().find(fits).map_or(0, |order| UNIT_BYTES << order)
        }

        fn free_bytes(&self) -> u64 {
            (self.0.iter().filter(|taken| !**taken).count() * UNIT_BYTES) as u64
        }
    }

    proptest! {
        #[test]
        fn buddy_follows_a_bitmap(steps in prop::collection::vec((any::<bool>(), 0usize..ORDERS, any::<prop::sample::Index>()), 1..400)) {
            let mut buddy = Buddy::new(3);
            let mut model = Bitmap(vec![false; 3 * 512]);
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (grow, order, at) in steps {
                let bytes = UNIT_BYTES << order;
                let place = at.index(3 * BLOCK_BYTES / bytes) * bytes;
                if grow && order % 2 == 0 && at.index(3) == 0 {
                    let units = place / UNIT_BYTES..(place + bytes) / UNIT_BYTES;
                    let is_free = model.0[units].iter().all(|taken| !taken);
                    prop_assert_eq!(buddy.take(place, bytes), is_free);
                    if is_free {
                        model.take(place, bytes, true);
                        live.push((place, bytes));
                    }
                } else if grow || live.is_empty() {
                    let granted = buddy.allocate(bytes);
                    prop_assert_eq!(granted.is_some(), model.largest_free() >= bytes);
                    if let Some(offset) = granted {
                        prop_assert_eq!(offset % bytes, 0);
                        model.take(offset, bytes, true);
                        live.push((offset, bytes));
                    }
                } else {
                    let (offset, bytes) = live.swap_remove(at.index(live.len()));
                    buddy.free(offset, bytes);
                    model.take(offset, bytes, false);
                }
                prop_assert_eq!(buddy.free_bytes(), model.free_bytes());
                prop_assert_eq!(buddy.largest_free(), model.largest_free());
                let free = buddy.free_ranges();
                let units = |range: &Range<usize>| range.start / UNIT_BYTES..range.end / UNIT_BYTES;
                prop_assert!(free.iter().flat_map(units).all(|unit| !model.0[unit]));
                let bytes: usize = free.iter().map(Range::len).sum();
                let never_used = (3 * BLOCK_BYTES) as u64 - buddy.touched_bytes();
                prop_assert_eq!(bytes as u64 + never_used, buddy.free_bytes());
                prop_assert!(free.windows(2).all(|two| two[0].end < two[1].start));
            }
            for (offset, bytes) in live {
                buddy.free(offset, bytes);
            }
            prop_assert!(!buddy.take(3 * BLOCK_BYTES, UNIT_BYTES) && !buddy.take(0, 3 * UNIT_BYTES) && !buddy.take(1, UNIT_BYTES));
            let whole: Vec<_> = (0..3).map(|_| buddy.allocate(BLOCK_BYTES)).collect();
            prop_assert_eq!(whole, vec![Some(0), Some(BLOCK_BYTES), Some(2 * BLOCK_BYTES)]);
        }
    }
}
