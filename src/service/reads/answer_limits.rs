//! Limits on the size of a response from memory, from the free budgets of its application and
//! connection.
//!
//! Readers that do not consume their responses get smaller responses and then none, which leaves
//! room for others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Instant;
use crate::memory::{READ_BLOCKS_MAX, answer_heap_bytes};
use uniffle_base::budget::{Budget, Charge, HeapFull, HeapKind};
use uniffle_base::sched::shares;

use crate::service::ServiceError;

pub(super) const OF_APP: ResponseHolder =
    ResponseHolder { name: "application", divisor: shares::APP_RESPONSE_DIVISOR };
pub(super) const OF_CONNECTION: ResponseHolder =
    ResponseHolder { name: "connection", divisor: shares::CONNECTION_RESPONSE_DIVISOR };

/// Holder of unconsumed responses.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResponseHolder {
    name: &'static str,
    /// One response takes at most this fraction of the free bytes. A single larger block is still
    /// sent whole.
    divisor: u64,
}

/// Free bytes below which a read is refused, because other reads of the application or connection
/// have not consumed their responses.
const ANSWER_BYTES_MIN: u64 = 64 << 10;

/// Number of blocks that every response may have if the heap for block lists has room for them.
const ANSWER_BLOCKS_MIN: usize = 64;

/// Time for which a refused reader counts as waiting. It comes back within seconds.
const REFUSED_WAITS: Duration = Duration::from_secs(10);

/// Time of the last refusal of a reader because unconsumed responses filled a budget.
#[derive(Debug)]
pub(super) struct LastRefusal {
    began: Instant,
    /// Milliseconds after `began`; 0 if there was none.
    at_ms: AtomicU64,
}

impl LastRefusal {
    pub(super) fn none() -> Self {
        Self { began: Instant::now(), at_ms: AtomicU64::new(0) }
    }

    /// Records the time if unconsumed responses are the cause of `refusal`.
    pub(super) fn note(&self, refusal: &ServiceError) {
        if matches!(refusal, ServiceError::TooManyAnswers { .. } | ServiceError::NoHeap(_)) {
            self.at_ms.store(self.now_ms(), Ordering::Relaxed);
        }
    }

    /// Returns whether the last refusal is recent.
    pub(super) fn is_recent(&self) -> bool {
        let at_ms = self.at_ms.load(Ordering::Relaxed);
        at_ms > 0 && Duration::from_millis(self.now_ms() - at_ms) < REFUSED_WAITS
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }
}

/// Returns the number of bytes after which a response from memory ends.
pub(super) fn answer_limit(
    answers: &Budget,
    ResponseHolder { name: whose, divisor }: ResponseHolder,
    wanted: i32,
) -> Result<u64, ServiceError> {
    let free = answers.free();
    if free < ANSWER_BYTES_MIN.min(answers.capacity()) {
        let pinned = answers.used();
        // What others hold reduces the limit of a share.
        let max = answers.capacity().min(pinned + free);
        return Err(ServiceError::TooManyAnswers { pinned, max, whose });
    }
    Ok(u64::try_from(wanted).unwrap_or(0).min(free / divisor))
}

/// Returns how many of `blocks` blocks a memory response may have, and a charge for their lists.
pub(super) fn answer_lists(budget: &Budget, blocks: usize) -> Result<(usize, Charge), ServiceError> {
    let room = budget.free() / shares::APP_RESPONSE_DIVISOR / answer_heap_bytes(1);
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
        assert!(held.len() > 20, "only {} responses were held", held.len());
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
            held.push(slow.charge_unchecked(limit));
        }
        assert!((10..100).contains(&held.len()), "the slow application holds {} responses", held.len());
        assert!(slow.used() <= slow.capacity());
        let refused = answer_limit(&slow, OF_APP, 1).unwrap_err();
        assert!(matches!(refused, ServiceError::TooManyAnswers { max, .. } if max == 32 << 20), "{refused}");
        assert_eq!(answer_limit(&honest, OF_APP, 4 << 20).unwrap(), 4 << 20);
        assert_eq!(
            answer_limit(&honest, OF_APP, -1).unwrap(),
            0,
            "a negative size must be limited to a single block"
        );
        held.pop();
        drop(held.remove(0));
        assert!(
            answer_limit(&slow, OF_APP, 14 << 20).unwrap() > 1 << 20,
            "consumed bytes must be available again"
        );
    }
}
