//! Backpressure on writers: a queue of ticket requests that wait for memory. Refused clients come
//! back after seconds, but memory is released after milliseconds.
//!
//! Applications alternate ([`FairQueue`]). Shares are not decided here: the next application's
//! request goes to [`crate::memory::Tickets`]; if it is refused, the following application is
//! tried. Nothing is checked while no request waits.
//!
//! The queue is bounded by [`WAITING_MAX`] and [`OF_APP_MAX`]; further requests do not wait. One of
//! the waiting requests at a time drives the queue; when it leaves, another takes over. Dropping a
//! request removes it from the queue and returns an unused ticket.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use crate::clock::{sleep, timeout};
use crate::memory::{MemoryError, Tickets};
use uniffle_base::budget::Budget;
use uniffle_base::sched::FairQueue;
use uniffle_wire::types::{AppId, TicketId};

/// Maximum number of waiting requests of all applications.
const WAITING_MAX: usize = 512;
/// Maximum number of waiting requests of one application.
const OF_APP_MAX: usize = 128;

/// Number of consecutive refused applications after which the queue waits for more memory. The
/// following applications are tried then.
const REFUSED_AT_ONCE: usize = 16;

/// Interval of additional checks. Shares also change over time, when unused tickets expire, not
/// only when memory is released.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Resources that a request waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueuedRequest {
    pub(super) bytes: u64,
    /// Number of partitions named.
    pub(super) partitions: usize,
}

#[derive(Debug)]
struct WaitingRequest {
    wanted: QueuedRequest,
    /// `None` once it was answered.
    give: Option<oneshot::Sender<Result<TicketId, MemoryError>>>,
}

/// Waiting requests, by application, in fair order.
#[derive(Debug)]
pub(super) struct TicketQueue {
    requests: Mutex<FairQueue<AppId, WaitingRequest>>,
    waiting: AtomicUsize,
    /// Permit of the request that drives the queue. Whoever has it serves all in their order.
    driver: Semaphore,
}

impl Default for TicketQueue {
    fn default() -> Self {
        Self { requests: Mutex::default(), waiting: AtomicUsize::new(0), driver: Semaphore::new(1) }
    }
}

/// A position in the queue. Drop leaves the queue and returns an unused ticket.
struct QueuePosition<'a> {
    queue: &'a TicketQueue,
    tickets: &'a Tickets,
    app: &'a AppId,
    number: u64,
    given: oneshot::Receiver<Result<TicketId, MemoryError>>,
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let mut requests = self.queue.requests.lock();
        requests.remove(self.app, self.number);
        self.queue.waiting.store(requests.len(), Ordering::Relaxed);
        drop(requests);
        self.given.close();
        if let Ok(Ok(ticket)) = self.given.try_recv() {
            drop(self.tickets.redeem(self.app, ticket));
        }
    }
}

impl TicketQueue {
    /// Returns whether a request of `app` waits, so that further ones must queue behind it.
    pub(super) fn has(&self, app: &AppId) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 && self.requests.lock().count(app) > 0
    }

    /// Returns the number of waiting requests.
    pub(super) fn len(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Waits for a ticket, at most for `wait_max`. Returns the ticket, or the refusal of a request
    /// for which waiting does not help. Returns `None` if the queue is full or nothing was granted
    /// in time.
    pub(super) async fn wait(
        &self,
        tickets: &Tickets,
        memory: &Budget,
        app: &AppId,
        wanted: QueuedRequest,
        wait_max: Duration,
    ) -> Option<Result<TicketId, MemoryError>> {
        let (give, given) = oneshot::channel();
        let mut position = {
            let mut requests = self.requests.lock();
            if requests.len() >= WAITING_MAX || requests.count(app) >= OF_APP_MAX {
                return None;
            }
            let number = requests.push(app, 1, 1, WaitingRequest { wanted, give: Some(give) });
            self.waiting.store(requests.len(), Ordering::Relaxed);
            QueuePosition { queue: self, tickets, app, number, given }
        };
        tokio::select! {
            biased;
            given = &mut position.given => given.ok(),
            never = self.drive(tickets, memory) => match never {},
            () = sleep(wait_max) => None,
        }
    }

    /// Serves the queue whenever memory is released. Only one caller at a time does this.
    async fn drive(&self, tickets: &Tickets, memory: &Budget) -> Infallible {
        let Ok(_driver) = self.driver.acquire().await else { return std::future::pending().await };
        loop {
            // The timeout only triggers an additional check and is no error.
            let _elapsed = timeout(POLL_INTERVAL, memory.wait_for_release(|| self.serve(tickets))).await;
        }
    }

    fn serve(&self, tickets: &Tickets) {
        let mut requests = self.requests.lock();
        requests.serve(REFUSED_AT_ONCE, |app, WaitingRequest { wanted, give }| {
            let granted = match tickets.require(app, wanted.bytes, wanted.partitions) {
                Err(refused) if is_worth_waiting(&refused) => return false,
                answer => answer,
            };
            if let Some(Err(Ok(ticket))) = give.take().map(|give| give.send(granted)) {
                drop(tickets.redeem(app, ticket));
            }
            true
        });
        self.waiting.store(requests.len(), Ordering::Relaxed);
    }
}

/// Returns whether waiting helps.
pub(super) fn is_worth_waiting(refused: &MemoryError) -> bool {
    matches!(refused, MemoryError::NoCapacity { .. } | MemoryError::OverShare { .. })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn app(name: &str) -> AppId {
        AppId::parse(name).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn ticket_queue_is_bounded_per_application() {
        let (budget, tickets, held) = full();
        let queue = TicketQueue::default();
        let apps = ["a", "b", "c", "d", "e"].map(app);
        let mut waiting = Vec::new();
        for app in &apps[..4] {
            for _ in 0..OF_APP_MAX {
                let mut it = queue.wait(&tickets, &budget, app, WANTED, WAIT_MAX).boxed();
                assert!(futures::poll!(&mut it).is_pending());
                waiting.push(it);
            }
            let beyond = queue.wait(&tickets, &budget, app, WANTED, WAIT_MAX).now_or_never();
            assert!(matches!(beyond, Some(None)));
        }
        assert_eq!(queue.len(), WAITING_MAX);
        let beyond = queue.wait(&tickets, &budget, &apps[4], WANTED, WAIT_MAX).now_or_never();
        assert!(matches!(beyond, Some(None)), "a request beyond the full queue must be refused at once");
        drop(waiting);
        assert_eq!(queue.len(), 0);
        drop(held);
    }

    const WAIT_MAX: Duration = Duration::from_secs(1);

    /// Returns a memory that is completely held, in parts of 30 KiB.
    fn full() -> (Budget, Tickets, Vec<crate::memory::Reservation>) {
        let budget = Budget::new(90 << 10);
        let tickets = Tickets::new(budget.clone(), budget.child(0), Duration::from_secs(20), 100);
        let held = (0..3).map(|_| {
            let ticket = tickets.require(&app("holder"), 26 << 10, 1).unwrap();
            tickets.redeem(&app("holder"), ticket).unwrap()
        });
        let held = held.collect();
        (budget, tickets, held)
    }

    const WANTED: QueuedRequest = QueuedRequest { bytes: 26 << 10, partitions: 1 };

    #[tokio::test(start_paused = true)]
    async fn waiting_ticket_is_granted_when_memory_is_freed() {
        let (budget, tickets, mut held) = full();
        let queue = TicketQueue::default();
        let (a, b) = (app("a"), app("b"));
        let mut first = queue.wait(&tickets, &budget, &a, WANTED, WAIT_MAX).boxed();
        let mut second = queue.wait(&tickets, &budget, &a, WANTED, WAIT_MAX).boxed();
        let mut other = queue.wait(&tickets, &budget, &b, WANTED, WAIT_MAX).boxed();
        for waiting in [&mut first, &mut second, &mut other] {
            assert!(futures::poll!(waiting).is_pending());
        }
        assert_eq!((queue.len(), queue.has(&a), queue.has(&app("c"))), (3, true, false));
        drop(held.pop());
        assert!(first.await.unwrap().is_ok());
        drop(held.pop());
        // The first request drove the queue; now one of the others does.
        assert!(
            futures::poll!(&mut second).is_pending(),
            "the request of the other application must be served first"
        );
        assert!(other.await.unwrap().is_ok());
        assert!(second.await.is_none(), "the wait must end without a ticket, because no memory was freed");
        assert_eq!((queue.len(), tickets.count()), (0, 2));
        drop((tickets, held));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_call_leaves_the_queue_and_its_ticket() {
        let (budget, tickets, mut held) = full();
        let queue = TicketQueue::default();
        let (a, b) = (app("a"), app("b"));
        let mut driver = queue.wait(&tickets, &budget, &a, WANTED, WAIT_MAX).boxed();
        let mut unseen = queue.wait(&tickets, &budget, &b, WANTED, WAIT_MAX).boxed();
        assert!(futures::poll!(&mut driver).is_pending() && futures::poll!(&mut unseen).is_pending());
        held.truncate(1);
        // Serves both; the second is granted a ticket that it never looks at.
        assert!(driver.await.unwrap().is_ok());
        assert_eq!(tickets.count(), 2);
        drop(unseen);
        assert_eq!((tickets.count(), queue.len()), (1, 0));
        drop((tickets, held));
        assert_eq!(budget.used(), 0);
    }
}
