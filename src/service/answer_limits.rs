//! How much one answer from memory may have, of what its application and its connection have left: readers that take nothing
//! get smaller answers and then none, and leave room for others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::budget::{Budget, Charge, HeapFull, HeapKind};
use crate::clock::Instant;
use crate::memory::{READ_BLOCKS_MAX, answer_heap_bytes};

use super::ServiceError;

/// Part of what an application, or a connection, may still have unanswered that one answer from memory takes at most; a block
/// that is larger still goes out whole. So many readers at once get smaller answers, and slow ones never all of it.
pub(super) const OF_APP: (&str, u64) = ("application", 4);
pub(super) const OF_CONNECTION: (&str, u64) = ("connection", 2);

/// When less of it is left, readers wait: others of the application do not take what they asked for.
const ANSWER_BYTES_MIN: u64 = 64 << 10;

/// Part of what an application has left for lists of blocks that one answer takes at most.
const ANSWER_LISTS_DIVISOR: u8 = 4;
/// Blocks that every answer may have, if any heap is left for lists of them.
const ANSWER_BLOCKS_MIN: usize = 64;

/// A reader that was refused comes back within seconds; for so long it counts as one that waits.
const REFUSED_WAITS: Duration = Duration::from_secs(10);

/// When a reader was last refused for what answers hold that are not taken.
#[derive(Debug)]
pub(super) struct LastRefusal {
    began: Instant,
    /// After `began`; none = 0.
    at_ms: AtomicU64,
}

impl LastRefusal {
    pub(super) fn none() -> Self {
        Self { began: Instant::now(), at_ms: AtomicU64::new(0) }
    }

    /// Notes one if `refusal` is of that kind.
    pub(super) fn note(&self, refusal: &ServiceError) {
        if matches!(refusal, ServiceError::TooManyAnswers { .. } | ServiceError::NoHeap(_)) {
            self.at_ms.store(self.now_ms(), Ordering::Relaxed);
        }
    }

    /// Whether that was lately.
    pub(super) fn is_recent(&self) -> bool {
        let at_ms = self.at_ms.load(Ordering::Relaxed);
        at_ms > 0 && Duration::from_millis(self.now_ms() - at_ms) < REFUSED_WAITS
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }
}

/// Bytes after which an answer from memory ends.
pub(super) fn answer_limit(
    answers: &Budget,
    (whose, divisor): (&'static str, u64),
    wanted: i32,
) -> Result<u64, ServiceError> {
    let free = answers.free();
    if free < ANSWER_BYTES_MIN.min(answers.capacity()) {
        let (pinned, max) = (answers.used(), answers.capacity());
        return Err(ServiceError::TooManyAnswers { pinned, max, whose });
    }
    Ok(u64::try_from(wanted).unwrap_or(0).min(free / divisor))
}

/// How many of `blocks` blocks an answer from memory may have, with what their lists take at most: a quarter of what the
/// application has left of the heap, so that readers that take nothing leave room for others.
pub(super) fn answer_lists(budget: &Budget, blocks: usize) -> Result<(usize, Charge), ServiceError> {
    let room = budget.free() / u64::from(ANSWER_LISTS_DIVISOR) / answer_heap_bytes(1);
    let room = usize::try_from(room).unwrap_or(usize::MAX).max(ANSWER_BLOCKS_MIN);
    let blocks = blocks.min(READ_BLOCKS_MAX).min(room);
    let charge = budget.try_charge(answer_heap_bytes(blocks));
    Ok((blocks, charge.map_err(|refusal| HeapFull::of(HeapKind::Answers, refusal))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn refused_reader_counts_as_waiting_for_a_while() {
        let last = LastRefusal::none();
        assert!(!last.is_recent());
        last.note(&ServiceError::Unsupported("something else"));
        assert!(!last.is_recent());
        last.note(&ServiceError::TooManyAnswers { pinned: 1, max: 1, whose: "connection" });
        tokio::time::advance(REFUSED_WAITS / 2).await;
        assert!(last.is_recent());
        tokio::time::advance(REFUSED_WAITS / 2 + Duration::from_millis(1)).await;
        assert!(!last.is_recent());
    }

    #[test]
    fn block_lists_are_charged_before_allocation() {
        let budget = Budget::new(16 << 20);
        assert_eq!(answer_lists(&budget, 7).unwrap().0, 7);
        let mut held = Vec::new();
        let refused = loop {
            match answer_lists(&budget, 1 << 20) {
                Ok((blocks, charge)) => {
                    assert!((ANSWER_BLOCKS_MIN..=READ_BLOCKS_MAX).contains(&blocks));
                    assert_eq!(charge.bytes(), answer_heap_bytes(blocks));
                    held.push(charge);
                }
                Err(refused) => break refused.to_string(),
            }
        };
        assert!(held.len() > 20, "{} answers", held.len());
        assert!(refused.contains("answers") && refused.contains("memory_store.heap_capacity"), "{refused}");
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn unread_responses_get_smaller_and_end() {
        let whole = Budget::new(64 << 20);
        let (slow, honest) = (whole.child(32 << 20), whole.child(32 << 20));
        let mut held = Vec::new();
        while let Ok(limit) = answer_limit(&slow, OF_APP, 14 << 20) {
            assert!(limit <= slow.free() / 4);
            held.push(slow.force_charge(limit));
        }
        assert!((10..100).contains(&held.len()), "{} answers", held.len());
        assert!(slow.used() <= slow.capacity());
        let refused = answer_limit(&slow, OF_APP, 1).unwrap_err();
        assert!(matches!(refused, ServiceError::TooManyAnswers { max, .. } if max == 32 << 20), "{refused}");
        assert_eq!(answer_limit(&honest, OF_APP, 4 << 20).unwrap(), 4 << 20);
        assert_eq!(answer_limit(&honest, OF_APP, -1).unwrap(), 0, "one block");
        held.pop();
        drop(held.remove(0));
        assert!(answer_limit(&slow, OF_APP, 14 << 20).unwrap() > 1 << 20, "what is taken is free again");
    }
}
