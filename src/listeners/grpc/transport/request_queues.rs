//! Limits on waiting requests of a listener. A large request waits here for admission before its
//! remaining bytes are read, fair by application. A request that finds the heap full needs a permit
//! from here to wait. `request_collector` charges, waits, and decides which requests are large.
//!
//! Invariants: admitted large requests count for at most a part of the budget, which leaves heap
//! for their decoded messages. A request counts for at most half of that part, even if it is
//! larger. Uncharged bytes of waiting requests are bounded. A waiter that is dropped returns its
//! permits.

use std::sync::Arc;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Duration;

use super::heap_estimate::varint;
use crate::clock::timeout;
use uniffle_base::sched::{FairSemaphore, Holder, Permit, Reserve, shares};
use uniffle_wire::types::AppId;

/// Permits for large requests that wait for heap, and as many for those that wait for admission. A
/// request that gets no permit is refused at once. Each permit covers [`PERMIT_BYTES`] that were
/// read but not charged: a frame of Java (64 KiB + 1) takes three, one of 1 MiB takes 32.
const WAITERS_MAX: usize = 256;
const PERMIT_BYTES: usize = 32 << 10;

/// Permits for small requests that wait for heap. They are separate because small requests hold
/// little while they wait.
const SMALL_WAITERS_MAX: usize = 512;

/// Divisor of the budget for admitted large requests. Their decoded messages usually take four
/// times their bytes: if bytes could fill the budget, none could be decoded.
const ADMITTED_PART: u64 = 4;

/// Wait queues of one listener.
#[derive(Debug)]
pub(super) struct RequestQueues {
    /// Permits of large requests to wait for heap.
    heap_waiters: Semaphore,
    /// Permits of small requests to wait for heap.
    small_heap_waiters: Semaphore,
    /// Permits of large requests to wait for admission.
    admission_waiters: Semaphore,
    /// Bytes of admitted large requests.
    admitted: Arc<FairSemaphore>,
    admitted_bytes_max: u64,
}

impl RequestQueues {
    /// Creates the queues for a budget of `budget_bytes` bytes.
    pub(in crate::listeners::grpc) fn new(budget_bytes: u64) -> Self {
        let admitted_bytes = budget_bytes / ADMITTED_PART;
        Self {
            heap_waiters: Semaphore::new(WAITERS_MAX),
            small_heap_waiters: Semaphore::new(SMALL_WAITERS_MAX),
            admission_waiters: Semaphore::new(WAITERS_MAX),
            admitted: FairSemaphore::new(admitted_bytes, Reserve::Eighth),
            // A larger request counts as this much. The budget of its connection limits its charge.
            admitted_bytes_max: shares::half(admitted_bytes),
        }
    }

    /// Waits until a request of `length` bytes is admitted. Its first bytes, `prefix`, have been
    /// read. Returns at once while there is room for the whole request. Returns `None` if too many
    /// wait, or after `wait`.
    pub(in crate::listeners::grpc) async fn admit(
        &self,
        length: u32,
        prefix: &[u8],
        wait: Duration,
    ) -> Option<Permit> {
        let bytes = u64::from(length).min(self.admitted_bytes_max);
        let holder = Holder { app: app_of(prefix), weight: 1 };
        if let Some(permit) = self.admitted.try_acquire(&holder, bytes) {
            return Some(permit);
        }
        let _waiter = self.admission_waiters.try_acquire_many(permits_for(prefix.len())).ok()?;
        timeout(wait, self.admitted.acquire(&holder, bytes)).await.ok()
    }

    /// Returns a permit to wait for heap while holding `uncharged` bytes, or `None` if too many
    /// wait.
    pub(super) fn wait_for_heap(&self, is_small: bool, uncharged: usize) -> Option<SemaphorePermit<'_>> {
        match is_small {
            true => self.small_heap_waiters.try_acquire().ok(),
            false => self.heap_waiters.try_acquire_many(permits_for(uncharged)).ok(),
        }
    }

    /// Returns whether any request waits.
    pub(super) fn has_waiters(&self) -> bool {
        let queues = [
            (&self.heap_waiters, WAITERS_MAX),
            (&self.admission_waiters, WAITERS_MAX),
            (&self.small_heap_waiters, SMALL_WAITERS_MAX),
        ];
        queues.into_iter().any(|(permits, most)| permits.available_permits() < most)
    }
}

/// Returns the number of permits for a request that waits with `uncharged` bytes.
fn permits_for(uncharged: usize) -> u32 {
    u32::try_from(uncharged.div_ceil(PERMIT_BYTES).max(1)).unwrap_or(u32::MAX)
}

/// Returns the application of a request that begins with `prefix`. Requests that may be large have
/// it in their first field.
fn app_of(prefix: &[u8]) -> Option<AppId> {
    const APP: u8 = 1 << 3 | 2;
    let mut rest = prefix.strip_prefix(&[APP])?;
    let length = usize::try_from(varint(&mut rest)?).ok()?;
    AppId::parse(std::str::from_utf8(rest.get(..length)?).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, poll};

    use super::*;

    const WAIT: Duration = Duration::from_secs(10);
    const LENGTH: u32 = 100 << 10;

    fn first_of(app: &str) -> Vec<u8> {
        [&[0x0A, u8::try_from(app.len()).unwrap()], app.as_bytes()].concat()
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_waiter_releases_its_permits() {
        let queues = RequestQueues::new(8 << 20);
        let (flood, honest) = (first_of("flood"), first_of("honest"));
        let mut held = Vec::new();
        while let Some(permit) = queues.admit(LENGTH, &flood, WAIT).now_or_never() {
            held.push(permit.unwrap());
        }
        // A quarter of the budget, without its last eighth.
        assert_eq!(held.len() as u64, (2 << 20) * 7 / 8 / u64::from(LENGTH));
        let mut waiting: Vec<_> = (0..50).map(|_| Box::pin(queues.admit(LENGTH, &flood, WAIT))).collect();
        for waiting in &mut waiting {
            assert!(poll!(waiting).is_pending());
        }
        assert!(
            queues.admit(LENGTH, &honest, WAIT).now_or_never().is_some(),
            "the last eighth must be reserved for applications that hold nothing"
        );
        drop(waiting);
        assert!(!queues.has_waiters());
        held.pop();
        assert!(queues.admit(LENGTH, &flood, WAIT).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn queue_is_bounded_by_held_bytes_and_timeout() {
        let queues = RequestQueues::new(8 << 20);
        let mut first = first_of("app-1");
        let held: Vec<_> = std::iter::from_fn(|| queues.admit(LENGTH, &first, WAIT).now_or_never()).collect();
        first.resize(1 << 20, 0);
        let mut waiting: Vec<_> = (0..9).map(|_| Box::pin(queues.admit(LENGTH, &first, WAIT))).collect();
        let last = waiting.last_mut().unwrap().now_or_never();
        assert!(last.is_none(), "the request that is polled first must wait and not be refused");
        for waiting in &mut waiting[..7] {
            assert!(poll!(waiting).is_pending());
        }
        assert!(waiting[7].as_mut().now_or_never().is_some_and(|permit| permit.is_none()));
        assert!(waiting[0].as_mut().await.is_none());
        drop((waiting, held));
        assert!(!queues.has_waiters());
    }

    #[test]
    fn large_request_names_its_application_first() {
        let first = first_of("app-1");
        assert_eq!(app_of(&[&first, &b"\x10\x03"[..]].concat()), AppId::parse("app-1").ok());
        for cut in 0..first.len() {
            assert_eq!(app_of(&first[..cut]), None);
        }
        assert_eq!((app_of(&[0x0A, 1, b'/']), app_of(&[0x12, 1, b'a'])), (None, None));
    }
}
