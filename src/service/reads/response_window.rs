//! Limits on the memory responses of one connection, so that a connection that does not consume
//! them leaves room for others.
//!
//! A response from memory pins its blocks until the socket has accepted them. The size limit of
//! responses therefore follows the connection's pace. It starts at the requested size, and prompt
//! clients see no difference. A slow response halves the limit of the next ones, down to
//! [`LIMIT_MIN`]; a prompt one raises it again. Clients continue from their cursor until a response
//! is empty, so a short one is safe. The service sends at least one block whatever the limit. Local
//! responses have no such limit: each holds only one or two chunks of read memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::answer_limits::{OF_CONNECTION, answer_limit};
use crate::clock::Instant;
use crate::service::ServiceError;
use uniffle_base::budget::{Budget, Charge};

/// Duration above which a response makes the next ones smaller. A reader on a link of 10 MB/s takes
/// the usual 14 MiB in less.
const SLOW: Duration = Duration::from_secs(2);
/// Duration up to which a response makes the next ones larger. It is less than half of [`SLOW`], so
/// that doubling does not make the connection slow.
const PROMPT: Duration = Duration::from_millis(500);
/// Minimum size limit of a response, however slow the connection is. Smaller responses cost more
/// than they free.
const LIMIT_MIN: u64 = 256 << 10;

/// Limits on the memory responses of one connection. Clones share it.
#[derive(Debug, Clone)]
pub struct ResponseWindow {
    room: Budget,
    pace: Arc<Mutex<ResponsePace>>,
}

/// A response that the connection is consuming, until it is dropped. An aborted response counts as
/// consumed: it pins nothing.
#[derive(Debug)]
pub(super) struct UnreadResponse {
    pace: Arc<Mutex<ResponsePace>>,
    number: u64,
    bytes: u64,
    _pinned: Charge,
}

impl ResponseWindow {
    /// Creates a window of responses that may pin `room` in total.
    pub(super) fn new(room: Budget) -> Self {
        Self { room, pace: Arc::default() }
    }

    /// Returns the number of bytes after which the next response ends, if `wanted` were requested.
    /// It is also at most a part of the room that unread responses leave.
    ///
    /// # Errors
    /// `TooManyAnswers` if they leave almost none.
    pub(in crate::service) fn limit(&self, wanted: i32) -> Result<u64, ServiceError> {
        let limit = answer_limit(&self.room, OF_CONNECTION, wanted)?;
        Ok(limit.min(self.pace.lock().limit()))
    }

    /// Returns the bytes of responses that the connection has not consumed.
    #[cfg(test)]
    pub(in crate::service) fn pinned_bytes(&self) -> u64 {
        self.room.used()
    }

    /// Begins a response of `bytes` bytes that had the limit `limit`.
    pub(super) fn take(&self, bytes: u64, limit: u64) -> UnreadResponse {
        // The limit was checked earlier: exceeding it by one response is cheaper than building the
        // response twice.
        let _pinned = self.room.charge_unchecked(bytes);
        UnreadResponse { pace: Arc::clone(&self.pace), number: self.pace.lock().begin(limit), bytes, _pinned }
    }
}

impl Drop for UnreadResponse {
    fn drop(&mut self) {
        self.pace.lock().end(self.number, self.bytes);
    }
}

/// Pace at which a connection consumes its memory responses.
#[derive(Debug)]
struct ResponsePace {
    /// Size limit of responses in bytes.
    limit: u64,
    next: u64,
    /// Unfinished responses, in the order in which they began.
    open: BTreeMap<u64, Open>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    began: Instant,
    /// Size limit of the response in bytes.
    limit: u64,
}

impl Default for ResponsePace {
    fn default() -> Self {
        Self { limit: u64::MAX, next: 0, open: BTreeMap::new() }
    }
}

impl ResponsePace {
    fn limit(&mut self) -> u64 {
        if let Some((_, oldest)) = self.open.first_key_value() {
            // An open response may still finish promptly or slowly, so it never raises the limit.
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
        // A small prompt response does not show that a large one would be prompt.
        let is_conclusive = took > SLOW || bytes >= open.limit.max(LIMIT_MIN);
        if is_conclusive {
            self.limit = limit_after(self.limit, open.limit, took);
        }
    }
}

/// Returns the limit of a connection's responses after one with the limit `given` took `took`;
/// `now` is the limit so far. The result follows from the response's own limit, so that several
/// slow responses at once halve it only once.
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

    fn connection() -> ResponseWindow {
        ResponseWindow::new(Budget::new(256 * MIB))
    }

    /// Runs a full response that takes `took`. Returns its limit.
    async fn answer(connection: &ResponseWindow, took: Duration) -> u64 {
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
            assert_eq!(
                limit_after(now, given, took),
                then,
                "limit {now}, response of {given} bytes in {took:?}"
            );
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
        assert_eq!(
            connection.limit(ASKED).unwrap(),
            7 * MIB,
            "further queries must not reduce the limit again"
        );
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
