//! The first touch of a block of private memory: whether it gets one huge page or small ones.
//!
//! A huge page is one fault, and cheaper to use later. But in a virtual machine a free huge page is often memory that the host
//! has yet to find, while small pages have been in use before: then it costs some ten times the CPU of small ones
//! (docs/benchmarks.md). Nothing says which it is. So what the first touch of blocks costs is measured; where huge pages are dear
//! and small ones are not, the next blocks get small ones, and after a while huge ones are tried again. The kernel makes small
//! pages huge later, in its own time. Blocks that were in use before are not touched again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::buddy::BLOCK_BYTES;
use super::mapping::Mapping;

/// CPU time of a block's first touch up to which huge pages are not dear: 0.2 s/GB.
const DEAR: Duration = Duration::from_micros(400);
/// Small pages are taken when they cost less than huge ones by this factor.
const FACTOR: u32 = 2;
/// Blocks that are tried with one kind of pages.
const TRIED: u32 = 2;
/// Blocks that get small pages before huge ones are tried again.
const RUN: u32 = 64;
/// Dear blocks after which small pages are tried again that were no cheaper.
const TRY_AGAIN: u32 = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FirstTouch {
    policy: Mutex<Policy>,
    /// The kernel cannot take pages ahead.
    is_off: AtomicBool,
}

impl FirstTouch {
    /// The block that `offset` lies in is about to be written to for the first time.
    pub(super) fn of(&self, map: &Mapping, offset: usize) {
        if self.is_off.load(Ordering::Relaxed) {
            return;
        }
        let start = offset - offset % BLOCK_BYTES;
        let pages = self.policy.lock().next();
        match touch(map, start, pages) {
            Some(cost) => self.policy.lock().record(pages, cost),
            None => self.is_off.store(true, Ordering::Relaxed),
        }
    }
}

/// Takes a block's pages and says how much CPU time that was; none when it cannot be done.
#[cfg(not(miri))]
fn touch(map: &Mapping, start: usize, pages: Pages) -> Option<Duration> {
    let range = start..start + BLOCK_BYTES;
    let before = thread_time();
    if pages == Pages::Small {
        map.advise_huge(range.clone(), false);
    }
    let populated = map.populate(range.clone());
    if pages == Pages::Small {
        map.advise_huge(range, true);
    }
    populated.ok().map(|()| thread_time().saturating_sub(before))
}

#[cfg(miri)]
fn touch(_: &Mapping, _: usize, _: Pages) -> Option<Duration> {
    None
}

/// CPU time of this thread.
#[cfg(not(miri))]
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    Huge,
    Small,
}

/// Pure: costs come in, kinds of pages go out.
#[derive(Debug, Default)]
struct Policy {
    /// What a block cost lately; none before the first.
    huge: Option<Duration>,
    small: Option<Duration>,
    /// Blocks with huge pages since the last one with small ones.
    huge_in_a_row: u32,
    /// Blocks that are to get small pages.
    small_left: u32,
}

impl Policy {
    fn next(&mut self) -> Pages {
        if self.small_left == 0 {
            return Pages::Huge;
        }
        self.small_left -= 1;
        Pages::Small
    }

    fn record(&mut self, pages: Pages, cost: Duration) {
        let known = match pages {
            Pages::Huge => &mut self.huge,
            Pages::Small => &mut self.small,
        };
        *known = Some(known.map_or(cost, |before| (before + cost) / 2));
        if pages == Pages::Small {
            self.huge_in_a_row = 0;
            return;
        }
        self.huge_in_a_row += 1;
        let huge = self.huge.unwrap_or_default();
        if self.huge_in_a_row < TRIED || self.small_left > 0 || huge <= DEAR {
            return;
        }
        match self.small {
            Some(small) if small * FACTOR < huge => {
                self.small_left = RUN;
                // By then others may have given memory back: what it cost before says nothing.
                self.huge = None;
            }
            Some(_) if !self.huge_in_a_row.is_multiple_of(TRY_AGAIN) => {}
            _ => self.small_left = TRIED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds of pages that so many blocks get, in order, with how many of each in a row.
    fn runs(policy: &mut Policy, blocks: u32, cost: impl Fn(Pages) -> u64) -> Vec<(Pages, u32)> {
        let mut runs: Vec<(Pages, u32)> = Vec::new();
        for _ in 0..blocks {
            let pages = policy.next();
            policy.record(pages, Duration::from_micros(cost(pages)));
            match runs.last_mut() {
                Some((last, count)) if *last == pages => *count += 1,
                _ => runs.push((pages, 1)),
            }
        }
        runs
    }

    #[test]
    fn p3_huge_pages_that_are_cheap_are_always_taken() {
        let only_huge =
            runs(&mut Policy::default(), 1000, |pages| if pages == Pages::Huge { 250 } else { 1 });
        assert_eq!(only_huge, [(Pages::Huge, 1000)]);
    }

    #[test]
    fn p3_where_huge_pages_are_dear_blocks_get_small_ones_and_huge_ones_are_tried_again() {
        let mut policy = Policy::default();
        let dear = |pages| if pages == Pages::Huge { 5_000 } else { 1_200 };
        let taken = runs(&mut policy, 2 + 2 + 2 + RUN + 2 + RUN, dear);
        let expected = [
            (Pages::Huge, 2),
            (Pages::Small, 2),
            (Pages::Huge, 2),
            (Pages::Small, RUN),
            (Pages::Huge, 2),
            (Pages::Small, RUN),
        ];
        assert_eq!(taken, expected);
        // The host has found memory for huge pages meanwhile: a few are needed to believe it.
        let cheap = runs(&mut policy, 1000, |pages| if pages == Pages::Huge { 100 } else { 1_200 });
        assert_eq!(cheap.last().map(|(pages, _)| *pages), Some(Pages::Huge));
        let small: u32 =
            cheap.iter().filter(|(pages, _)| *pages == Pages::Small).map(|(_, count)| count).sum();
        assert!(small <= 2 * RUN, "{cheap:?}");
    }

    #[test]
    fn p3_small_pages_that_are_no_cheaper_are_tried_now_and_then() {
        let taken = runs(&mut Policy::default(), 1000, |_| 5_000);
        let small: u32 =
            taken.iter().filter(|(pages, _)| *pages == Pages::Small).map(|(_, count)| count).sum();
        assert!((20..=40).contains(&small), "{taken:?}");
    }
}
