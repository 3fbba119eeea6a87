//! Also run under Miri, so they are small and use no time. Tests with files are excluded there.

use std::sync::Arc;

use super::*;
use uniffle_base::budget::Budget;

fn region() -> (Arc<Region>, Budget) {
    let region = Region::new(1).unwrap();
    let budget = Budget::new(region.capacity_bytes());
    (region, budget)
}

fn segment(region: &Arc<Region>, budget: &Budget, bytes: usize) -> Segment {
    region.allocate(bytes, budget.try_charge(bytes as u64).unwrap()).unwrap()
}

fn frozen(segment: &mut Segment, bytes: &[u8]) -> Slice {
    let mut fill = segment.fill(bytes.len()).unwrap();
    assert_eq!(fill.write(bytes), bytes.len());
    fill.freeze()
}

#[test]
fn memory_is_freed_with_its_last_reader() {
    let (region, budget) = region();
    let mut segment = segment(&region, &budget, 4096);
    let slice = frozen(&mut segment, b"hello");
    let part = slice.slice(1..3).into_bytes();
    drop(segment);
    assert_eq!(slice.as_ref(), b"hello");
    drop(slice);
    assert_eq!((&part[..], budget.used(), region.free_bytes()), (&b"el"[..], 4096, (2 << 20) - 4096));
    drop(part);
    assert_eq!((budget.used(), region.largest_free()), (0, SEGMENT_BYTES_MAX));
}

#[test]
fn full_region_returns_the_charge() {
    let (region, _) = region();
    let budget = Budget::new(8 << 20);
    let all = segment(&region, &budget, SEGMENT_BYTES_MAX);
    let charge = region.allocate(4096, budget.try_charge(4096).unwrap()).unwrap_err();
    assert_eq!((charge.bytes(), region.largest_free()), (4096, 0));
    drop((charge, all));
    assert_eq!(budget.used(), 0);
}

#[test]
fn writes_stay_within_their_range() {
    let (region, budget) = region();
    let mut segment = segment(&region, &budget, 4096);
    let mut left = segment.fill(4).unwrap();
    let mut middle = segment.fill(4).unwrap();
    let right = frozen(&mut segment, b"RRRR");
    assert_eq!(middle.write(b"mmmmmmmm"), 4);
    assert_eq!(middle.write(b"x"), 0);
    assert_eq!((left.write(b"ll"), left.remaining()), (2, 2));
    let (left, middle) = (left.freeze(), middle.freeze());
    assert_eq!((left.as_ref(), middle.as_ref(), right.as_ref()), (&b"ll"[..], &b"mmmm"[..], &b"RRRR"[..]));
    assert!(segment.fill(4096).is_none());
    assert_eq!(segment.remaining(), 4096 - 12);
}

#[test]
fn only_absorbed_ranges_are_readable_whatever_their_order() {
    let (region, budget) = region();
    let mut segment = segment(&region, &budget, 4096);
    assert!(segment.readable().is_none(), "a segment without frozen bytes must not be readable");
    let slices = [b"aaaa", b"bbbb", b"cccc", b"dddd"].map(|bytes| frozen(&mut segment, bytes));
    let [a, b, c, d] = slices;
    segment.absorb(d);
    segment.absorb(b);
    assert_eq!(segment.slice(5..7).unwrap().as_ref(), b"bb");
    assert!(segment.slice(3..7).is_none() && segment.slice(4..9).is_none() && segment.slice(0..16).is_none());
    segment.absorb(a);
    assert_eq!(segment.slice(2..6).unwrap().as_ref(), b"aabb");
    segment.absorb(c);
    assert_eq!(segment.readable().unwrap().as_ref(), b"aaaabbbbccccdddd");
    assert_eq!(segment.frozen.len(), 1);
    #[expect(clippy::reversed_empty_ranges, reason = "such a range must be refused")]
    let reversed = segment.slice(6..2);
    assert!(reversed.is_none());
}

#[test]
fn aborted_fill_leaves_unreadable_zeroes() {
    let (region, budget) = region();
    let mut first = segment(&region, &budget, 4096);
    let mut fill = first.fill(4096).unwrap();
    fill.write(&[7; 4096]);
    assert!(!first.is_dead(), "a segment that is being filled must not be dead");
    drop(fill);
    assert!(first.is_dead() && first.slice(0..1).is_none());
    drop(first);
    let mut again = segment(&region, &budget, 4096);
    assert_eq!(again.fill(4096).unwrap().bytes_mut(), &[0; 4096]);
}

#[test]
fn padding_is_zero_and_readable_over_old_content() {
    let (region, budget) = region();
    let mut dirty = segment(&region, &budget, 8192);
    drop(frozen(&mut dirty, &[7; 8192]));
    drop(dirty);
    let mut segment = segment(&region, &budget, 8192);
    let slice = frozen(&mut segment, &[1; 5000]);
    segment.absorb(slice);
    segment.pad_to(4096);
    let whole = segment.readable().unwrap();
    assert_eq!((whole.len(), &whole.as_ref()[5000..]), (8192, &[0; 3192][..]));
    assert_eq!(whole.as_ref().as_ptr().addr() % 4096, 0);
}

#[test]
fn prefix_is_frozen_and_the_rest_discarded() {
    let (region, budget) = region();
    let mut first = segment(&region, &budget, 4096);
    let mut fill = first.fill(4096).unwrap();
    fill.bytes_mut().fill(9);
    let slice = fill.freeze_prefix(10);
    assert_eq!(slice.as_ref(), &[9; 10]);
    drop((slice, first));
    let mut again = segment(&region, &budget, 4096);
    let mut fill = again.fill(4096).unwrap();
    assert_eq!(fill.bytes_mut()[..10], [9; 10]);
    assert_eq!(fill.bytes_mut()[10..], [0; 4086]);
}

#[test]
#[should_panic(expected = "the slice belongs to another segment")]
fn foreign_slice_is_not_absorbed() {
    let (region, budget) = region();
    let mut one = segment(&region, &budget, 4096);
    let mut other = segment(&region, &budget, 4096);
    let foreign = frozen(&mut other, b"x");
    one.absorb(foreign);
}

#[test]
fn threads_fill_and_read_one_segment() {
    let (region, budget) = region();
    let mut shared = segment(&region, &budget, 4096);
    let fills: Vec<_> = (0..4).map(|_| shared.fill(64).unwrap()).collect();
    let writers: Vec<_> = (0u8..)
        .zip(fills)
        .map(|(value, mut fill)| {
            std::thread::spawn(move || {
                fill.write(&[value; 64]);
                fill.freeze()
            })
        })
        .collect();
    for writer in writers {
        shared.absorb(writer.join().unwrap());
    }
    let bytes = shared.readable().unwrap().into_bytes();
    drop(shared);
    let sum =
        std::thread::spawn(move || bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>()).join().unwrap();
    assert_eq!((sum, budget.used()), (64 * (1 + 2 + 3), 0));
}

/// With a budget as large as the region, a granted charge must always find its memory, because
/// memory is freed before its charge.
#[test]
fn memory_is_free_before_its_charge_is() {
    let (region, budget) = region();
    let rounds = if cfg!(miri) { 10 } else { 20_000 };
    let take_and_drop =
        || {
            for _ in 0..rounds {
                let charge = budget.try_charge(2 << 20);
                drop(charge.map(|charge| {
                    region.allocate(2 << 20, charge).expect("every charge has memory behind it")
                }));
            }
        };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(take_and_drop);
        }
    });
    assert_eq!((budget.used(), region.largest_free()), (0, SEGMENT_BYTES_MAX));
}

#[test]
fn discarded_memory_reads_as_zeroes_and_is_reused() {
    let (region, budget) = region();
    let mut first = segment(&region, &budget, 8192);
    drop(frozen(&mut first, b"secret"));
    first.discard();
    drop(first);
    let mut again = segment(&region, &budget, 8192);
    again.discard();
    let mut fill = again.fill(8192).unwrap();
    assert!(fill.bytes_mut()[..4096].iter().all(|byte| *byte == 0));
}

#[test]
fn claimed_segment_shows_adopted_ranges_only() {
    let (region, budget) = region();
    let mut first = segment(&region, &budget, 8192);
    drop(frozen(&mut first, b"abcdefgh"));
    drop(first);
    let charge = |bytes: u64| budget.try_charge(bytes).unwrap();
    let mut again = region.claim(0, 8192, charge(8192)).unwrap();
    assert!(region.claim(4096, 4096, charge(4096)).is_err(), "a range in use was claimed");
    let middle = again.adopt(2..4).unwrap();
    assert_eq!((middle.as_ref(), middle.place()), (&b"cd"[..], 2));
    assert!(again.adopt(3..5).is_none() && again.adopt(8190..8193).is_none());
    again.absorb(middle);
    assert!(again.keep(4..6) && again.keep(7..8) && !again.keep(7..9) && !again.keep(8190..8193));
    assert_eq!(again.frozen[..], [2..6, 7..8]);
    again.close();
    assert!(again.slice(0..4).is_none() && again.slice(6..8).is_none() && again.fill(1).is_none());
    assert_eq!(again.slice(2..6).unwrap().as_ref(), b"cdef");
    assert_eq!(again.slice(7..8).unwrap().as_ref(), b"h");
}

/// Existing slices keep their content too.
#[cfg(not(miri))]
#[test]
fn file_content_survives_unlinked_pages() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let bytes = Region::bytes_of(40 << 20).unwrap();
    file.set_len(bytes).unwrap();
    let region = Region::shared(&file, 0, bytes).unwrap();
    region.take_pages(bytes).unwrap();
    let budget = Budget::new(bytes);
    let mut segments: Vec<_> = (0..20).map(|_| segment(&region, &budget, 2 << 20)).collect();
    let slices: Vec<_> = (0..20u8).map(|at| frozen(&mut segments[usize::from(at)], &[at; 5000])).collect();
    region.unlink_pages();
    for (slice, at) in slices.iter().zip(0..20u8) {
        assert!(slice.as_ref() == [at; 5000], "{at}");
    }
    assert_eq!(frozen(&mut segments[7], b"more").as_ref(), b"more");
}

#[test]
fn prefault_takes_each_fresh_block_once_and_frees_it() {
    let region = Region::new(6 << 20).unwrap();
    let budget = Budget::new(6 << 20);
    let used = segment(&region, &budget, 2 << 20);
    assert!(region.prefault_block().unwrap() && region.prefault_block().unwrap());
    assert!(!region.prefault_block().unwrap());
    assert_eq!((region.touched_bytes(), region.free_bytes()), (6 << 20, 4 << 20));
    drop(used);
    assert_eq!(region.free_bytes(), 6 << 20);
}

#[cfg(not(miri))]
#[test]
fn prefault_takes_the_pages_of_a_file() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4 << 20).unwrap();
    let region = Region::shared(&file, 0, 4 << 20).unwrap();
    assert!(region.prefault_block().unwrap() && region.prefault_block().unwrap());
    assert!(!region.prefault_block().unwrap());
    assert_eq!(region.ready_bytes(), 4 << 20);
}

/// Returns whether huge pages are advised at `address`, by the flags of its mapping.
#[cfg(all(not(miri), target_os = "linux"))]
fn is_advised_huge(address: *const u8) -> bool {
    let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let number = |text: &str| usize::from_str_radix(text, 16).ok();
    let mut is_here = false;
    for line in mappings.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((start, end)) = range.and_then(|(start, end)| Some((number(start)?, number(end)?))) {
            is_here = (start..end).contains(&address.addr());
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_here) {
            return flags.split(' ').any(|flag| flag == "hg");
        }
    }
    panic!("the region is mapped")
}

#[cfg(all(not(miri), target_os = "linux"))]
#[test]
fn only_used_blocks_are_advised_huge_after_use() {
    if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        return;
    }
    let region = Region::new(6 << 20).unwrap();
    let budget = Budget::new(6 << 20);
    region.advise_huge_pages(false);
    let advised = || [0, 2 << 20, 4 << 20].map(|offset| is_advised_huge(region.map.at(offset, 1)));
    let first = segment(&region, &budget, 2 << 20);
    let second = segment(&region, &budget, 4096);
    assert_eq!(advised(), [false; 3]);
    region.advise_used_pages();
    assert_eq!(advised(), [true, true, false]);
    drop((first, second));
    region.advise_used_pages();
    assert_eq!(advised(), [true, true, false]);
}
