//! Pace of a send: how far its bytes are behind the slowest rate at which it may keep memory that
//! others wait for.
//!
//! The module does not decide whether others wait ([`crate::memory::Tickets::must_yield`]) or how
//! to react ([`crate::service::SendSink`]). Only bytes of the message count, so neither pings nor
//! other calls on the connection are progress. The functions are pure: the caller passes the
//! current time.

use std::time::Duration;

use crate::clock::Instant;

/// The slowest rate. A sender with a share of 1/400 of a 1 Gbit link is faster.
const BYTES_PER_SEC_MIN: u64 = 256 << 10;
/// Time that a whole send may take at the slowest rate. Large sends must therefore be faster.
const WHOLE_SEND: Duration = Duration::from_secs(5);
/// Delay from which a send is slow.
const BEHIND_MAX: Duration = Duration::from_secs(1);
/// Interval of the checks of a slow send.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The pace of one send.
#[derive(Debug)]
pub(super) struct SendPace {
    bytes_per_sec: u64,
    /// Bytes that had arrived at the last check.
    arrived: u64,
    /// Time at which the arrived bytes are due at the slowest rate. It is never in the future, so a
    /// burst does not allow a later pause.
    due: Instant,
    next_check: Instant,
}

impl SendPace {
    /// Creates the pace of a send of `message_bytes` bytes that begins at `now`.
    pub(super) fn new(message_bytes: u64, now: Instant) -> Self {
        let bytes_per_sec = (message_bytes / WHOLE_SEND.as_secs()).max(BYTES_PER_SEC_MIN);
        Self { bytes_per_sec, arrived: 0, due: now, next_check: now + BEHIND_MAX }
    }

    /// Returns the slowest rate.
    pub(super) fn bytes_per_sec(&self) -> u64 {
        self.bytes_per_sec
    }

    /// Returns when to call [`SendPace::is_slow`] next.
    pub(super) fn next_check(&self) -> Instant {
        self.next_check
    }

    /// Returns whether the send is slow, if `arrived` of its bytes have arrived by `now`.
    pub(super) fn is_slow(&mut self, arrived: u64, now: Instant) -> bool {
        let more = arrived.saturating_sub(self.arrived);
        let bought = Duration::from_nanos(more.saturating_mul(1_000_000_000) / self.bytes_per_sec);
        self.arrived = arrived;
        self.due = (self.due + bought).min(now);
        let is_slow = now.duration_since(self.due) >= BEHIND_MAX;
        self.next_check = (self.due + BEHIND_MAX).max(now + CHECK_INTERVAL);
        is_slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns when a send of `message_bytes`, of which `bytes` arrive every `every`, is first slow
    /// within a minute.
    fn slow_after(message_bytes: u64, bytes: u64, every: Duration) -> Option<Duration> {
        let began = Instant::now();
        let mut pace = SendPace::new(message_bytes, began);
        while pace.next_check() < began + ms(60_000) {
            let now = pace.next_check();
            let came = now.duration_since(began).as_millis() / every.as_millis().max(1);
            let arrived = u64::try_from(came).unwrap() * bytes;
            if arrived >= message_bytes {
                return None;
            }
            if pace.is_slow(arrived, now) {
                return Some(now.duration_since(began));
            }
        }
        None
    }

    #[test]
    fn send_with_few_bytes_is_slow() {
        assert_eq!(slow_after(4 * MIB, 0, ms(1)), Some(ms(1000)));
        let trickle = slow_after(4 * MIB, 1, ms(10)).unwrap();
        assert!(trickle < ms(1300), "{trickle:?}");
        let half = slow_after(4 * MIB, 4 * MIB / 5 / 200, ms(10)).unwrap();
        assert!(half < ms(2500), "{half:?}");
    }

    #[test]
    fn send_at_the_slowest_rate_is_not_slow_and_ends_in_time() {
        assert_eq!(slow_after(4 * MIB, 4 * MIB / 5 / 100 + 1, ms(10)), None);
        assert_eq!(slow_after(64 << 10, BYTES_PER_SEC_MIN / 100, ms(10)), None);
        assert_eq!(SendPace::new(100 * MIB, Instant::now()).bytes_per_sec(), 20 * MIB);
    }

    #[test]
    fn burst_buys_no_pause() {
        let began = Instant::now();
        let mut pace = SendPace::new(4 * MIB, began);
        assert!(!pace.is_slow(4 * MIB - 1, began + ms(1000)));
        assert!(!pace.is_slow(4 * MIB - 1, began + ms(1900)));
        assert!(pace.is_slow(4 * MIB - 1, began + ms(2000)));
    }
}
