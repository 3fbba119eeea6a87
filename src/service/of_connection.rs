//! What the reads of one connection may hold, so that one that does not take its answers leaves room for others.
//!
//! Answers from memory pin what they name until the socket has taken them. So how much one of them has follows the pace at
//! which the connection took those before: it begins with what the client asks for, and a client that takes its answers
//! promptly sees no difference. One that took long, or that still takes, makes the next ones smaller by half, down to
//! [`LIMIT_MIN`]; one that was prompt makes them larger again. Clients go on from their cursor until an answer is empty, so a
//! short one is fine; the service gives at least one block whatever the limit. Local answers do not follow it: they hold one
//! chunk or two of read memory, however long they are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ServiceError;
use super::answer_limits::{OF_CONNECTION, answer_limit};
use crate::budget::{Budget, Charge};
use crate::clock::{Instant, timeout};

/// An answer that takes longer makes the next ones smaller. A reader on a link of 10 MB/s takes the usual 14 MiB in less.
const SLOW: Duration = Duration::from_secs(2);
/// One that takes no longer makes them larger again: less than half of [`SLOW`], so that it does not become slow by that.
const PROMPT: Duration = Duration::from_millis(500);
/// However slow a connection is, its answers end after so many bytes, not fewer: below it they cost more than they free.
const LIMIT_MIN: u64 = 256 << 10;

/// What the reads of one connection may hold.
#[derive(Debug)]
pub struct ReadingOfConnection {
    answers: AnswersOfConnection,
    turns: Arc<Semaphore>,
    wait: Duration,
}

impl ReadingOfConnection {
    /// For answers from memory of `answers` bytes together and `turns` local ones at a time, each of which waits `wait`.
    pub(super) fn new(answers: Budget, turns: usize, wait: Duration) -> Self {
        let answers = AnswersOfConnection { room: answers, pace: Arc::default() };
        Self { answers, turns: Arc::new(Semaphore::new(turns)), wait }
    }

    /// For answers from memory.
    #[must_use]
    pub fn answers(&self) -> &AnswersOfConnection {
        &self.answers
    }

    /// One of its local answers, until the value is dropped.
    ///
    /// # Errors
    /// None came free in time.
    pub async fn turn(&self) -> Result<OwnedSemaphorePermit, ServiceError> {
        let turn = timeout(self.wait, Arc::clone(&self.turns).acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or_else(|| no_read_memory(0, self.wait))
    }
}

/// The refusal of a read for which `asked` bytes of read memory did not come free.
pub(super) fn no_read_memory(asked: u64, wait: Duration) -> ServiceError {
    ServiceError::NoReadMemory { asked, waited_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX) }
}

/// What the answers from memory of one connection may have. Clones share it.
#[derive(Debug, Clone)]
pub struct AnswersOfConnection {
    room: Budget,
    pace: Arc<Mutex<Pace>>,
}

/// An answer that the connection is taking, until it is dropped. One that is given up counts as taken: it pins nothing.
#[derive(Debug)]
pub(super) struct Taking {
    pace: Arc<Mutex<Pace>>,
    number: u64,
    bytes: u64,
    _pinned: Charge,
}

impl AnswersOfConnection {
    /// Bytes after which the next answer ends, of which `wanted` were asked for.
    pub(super) fn limit(&self, wanted: i32) -> Result<u64, ServiceError> {
        let limit = answer_limit(&self.room, OF_CONNECTION, wanted)?;
        Ok(limit.min(self.pace.lock().limit()))
    }

    /// Bytes of answers that the connection has not taken.
    #[cfg(test)]
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.room.used()
    }

    /// An answer of `bytes` that was to end after `limit`.
    pub(super) fn take(&self, bytes: u64, limit: u64) -> Taking {
        // The limit is looked at before: one answer too many is let through rather than made twice.
        let _pinned = self.room.force_charge(bytes);
        Taking { pace: Arc::clone(&self.pace), number: self.pace.lock().begin(limit), bytes, _pinned }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.pace.lock().end(self.number, self.bytes);
    }
}

/// How a connection takes its answers from memory.
#[derive(Debug)]
struct Pace {
    /// Bytes after which answers end.
    limit: u64,
    next: u64,
    /// Those that it is taking, in the order in which they began.
    open: BTreeMap<u64, Open>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    began: Instant,
    /// Bytes after which it was to end.
    limit: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { limit: u64::MAX, next: 0, open: BTreeMap::new() }
    }
}

impl Pace {
    fn limit(&mut self) -> u64 {
        if let Some((_, oldest)) = self.open.first_key_value() {
            // It may be taken in the next moment: what is still open never makes answers larger.
            self.limit = limit_after(self.limit, oldest.limit, oldest.began.elapsed()).min(self.limit);
        }
        self.limit
    }

    fn begin(&mut self, limit: u64) -> u64 {
        let number = self.next;
        self.next += 1;
        self.open.insert(number, Open { began: Instant::now(), limit });
        number
    }

    fn end(&mut self, number: u64, bytes: u64) {
        let Some(open) = self.open.remove(&number) else { return };
        let took = open.began.elapsed();
        // A small answer that is prompt does not say that a large one would be.
        let tells = took > SLOW || bytes >= open.limit.max(LIMIT_MIN);
        if tells {
            self.limit = limit_after(self.limit, open.limit, took);
        }
    }
}

/// The limit of a connection's answers, `now` so far, after one with the limit `given` took so long. It follows from the answer's
/// own limit, so that of several under way at once the slow ones halve it once.
fn limit_after(now: u64, given: u64, took: Duration) -> u64 {
    let given = given.max(LIMIT_MIN);
    if took > SLOW {
        now.min((given / 2).max(LIMIT_MIN))
    } else if took <= PROMPT {
        now.max(given.saturating_mul(2))
    } else {
        now
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const MIB: u64 = 1 << 20;
    const ASKED: i32 = 14 << 20;

    fn connection() -> AnswersOfConnection {
        ReadingOfConnection::new(Budget::new(256 * MIB), 1, Duration::ZERO).answers().clone()
    }

    /// A full answer that takes so long; its limit.
    async fn answer(connection: &AnswersOfConnection, took: Duration) -> u64 {
        let limit = connection.limit(ASKED).unwrap();
        let taking = connection.take(limit, limit);
        advance(took).await;
        drop(taking);
        limit
    }

    #[test]
    fn slow_response_halves_and_prompt_one_doubles_the_limit() {
        let (slow, prompt) = (SLOW + Duration::from_millis(1), PROMPT);
        for (now, given, took, then) in [
            (u64::MAX, 14 * MIB, prompt, u64::MAX),
            (u64::MAX, 14 * MIB, SLOW, u64::MAX),
            (u64::MAX, 14 * MIB, slow, 7 * MIB),
            (7 * MIB, 14 * MIB, slow, 7 * MIB),
            (7 * MIB, 7 * MIB, slow, 7 * MIB / 2),
            (7 * MIB, 7 * MIB, SLOW, 7 * MIB),
            (7 * MIB, 7 * MIB, prompt, 14 * MIB),
            (7 * MIB, 3 * MIB, prompt, 7 * MIB),
            (LIMIT_MIN, LIMIT_MIN, slow, LIMIT_MIN),
            (LIMIT_MIN, 0, slow, LIMIT_MIN),
            (LIMIT_MIN, 0, prompt, 2 * LIMIT_MIN),
            (u64::MAX / 2 + 1, u64::MAX / 2 + 1, prompt, u64::MAX),
        ] {
            assert_eq!(limit_after(now, given, took), then, "{now} after {given} in {took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn prompt_reader_gets_its_requested_size() {
        let connection = connection();
        for _ in 0..9 {
            assert_eq!(answer(&connection, PROMPT).await, 14 * MIB);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_reader_gets_less_until_it_is_prompt() {
        let (connection, slow) = (connection(), SLOW * 2);
        let mut limits = Vec::new();
        for took in [slow; 7].into_iter().chain([PROMPT; 8]) {
            limits.push(answer(&connection, took).await);
        }
        assert!(limits[..7].is_sorted_by(|one, next| one >= next), "{limits:?}");
        assert_eq!((limits[0], limits[1], limits[7]), (14 * MIB, 7 * MIB, LIMIT_MIN));
        assert_eq!(limits[14], 14 * MIB, "{limits:?}");
        let state = connection.pace.lock();
        assert!(state.open.is_empty() && connection.pinned_bytes() == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_slow_responses_halve_the_limit_once() {
        let connection = connection();
        let taking: Vec<_> = (0..4).map(|_| connection.take(14 * MIB, 14 * MIB)).collect();
        advance(SLOW * 2).await;
        drop(taking);
        assert_eq!(connection.limit(ASKED).unwrap(), 7 * MIB);
    }

    #[tokio::test(start_paused = true)]
    async fn unread_response_reduces_the_next_ones() {
        let connection = connection();
        let first = connection.take(14 * MIB, 14 * MIB);
        advance(SLOW).await;
        assert_eq!(connection.limit(ASKED).unwrap(), 14 * MIB);
        advance(Duration::from_millis(1)).await;
        assert_eq!(connection.limit(ASKED).unwrap(), 7 * MIB);
        assert_eq!(connection.limit(ASKED).unwrap(), 7 * MIB, "however often it is asked");
        drop(first);
    }

    #[tokio::test(start_paused = true)]
    async fn small_prompt_response_does_not_raise_the_limit() {
        let connection = connection();
        answer(&connection, SLOW * 2).await;
        drop(connection.take(10, 7 * MIB));
        assert_eq!(connection.limit(ASKED).unwrap(), 7 * MIB);
    }
}
