//! Connection table of one listener with eviction. Sockets and deadlines are in `acceptor`.
//!
//! Invariant: the table never exceeds its limit. When it is full, connections are evicted in the
//! order of [`Stage`], and within a stage by the time without progress. Idle connections thus
//! cannot keep out a working one. If the protocol can announce an end, an evicted connection may
//! finish its calls; the number of those is bounded too.
//!
//! If one address has more than half of the entries, eviction is limited to its connections.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{AbortHandle, AbortRegistration};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::{Instant, sleep};

/// Maximum number of unopened connections selected for eviction in one scan of the table. They stay
/// the right choice while they do not begin, since all others are newer or rank higher. A storm of
/// connects therefore does not scan the table each time.
const CHOSEN: usize = 64;

/// Time for the calls of an evicted connection to end.
pub(super) const LEAVING_DEADLINE: Duration = Duration::from_secs(2);

/// Poll interval for requests of a connection that is to end.
const REST_LOOK: Duration = Duration::from_millis(50);

/// The connection table. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ConnectionLimiter {
    max: usize,
    /// Maximum number of evicted connections that may finish their calls.
    leaving_max: usize,
    since: Instant,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: HashMap<u64, Arc<ConnectionState>>,
    /// Evicted connections that finish their calls.
    leaving: HashSet<u64>,
    /// Number of connections of each address.
    of_peers: HashMap<IpAddr, usize>,
    /// The latest address to exceed half of the entries.
    dominant_peer: Option<IpAddr>,
    /// Next candidates for eviction, the first one last, with their rank at selection.
    chosen: Vec<(Rank, u64)>,
    /// Address to which the candidates are limited. `None` means all addresses.
    chosen_of: Option<IpAddr>,
}

/// Activity of a connection, in eviction order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// It has not begun its protocol.
    Opening,
    /// It never had a request.
    Unused,
    /// It has its first requests, none of which has ended.
    First,
    /// It has no request now, but has had one.
    Idle,
    /// It has a request, and another one has ended.
    Busy,
}

/// Eviction rank, lowest first: the stage, then the last progress in ns of the table's age. In ms,
/// connections of one moment would tie.
type Rank = (Stage, u64);

/// State of a connection, kept up to date by its server.
#[derive(Debug)]
pub(super) struct ConnectionState {
    peer: IpAddr,
    since: Instant,
    is_open: AtomicBool,
    requests: AtomicU32,
    ended_requests: AtomicU64,
    progressed_ns: AtomicU64,
    wrote_ns: AtomicU64,
    leave: Notify,
    close: AbortHandle,
}

/// A request of a connection, until dropped.
#[derive(Debug)]
pub(super) struct Request(Arc<ConnectionState>);

/// A connection's entry in the table, removed on drop.
#[derive(Debug)]
pub(super) struct ConnectionGuard {
    number: u64,
    state: Arc<ConnectionState>,
    table: Arc<Mutex<Table>>,
}

impl ConnectionLimiter {
    /// Creates a table for `max` connections, at least one.
    pub(super) fn new(max: usize) -> Self {
        Self { max: max.max(1), leaving_max: 0, since: Instant::now(), table: Arc::default() }
    }

    /// Allows `leaving_max` evicted connections at a time to finish their calls
    /// ([`ConnectionState::leaving`]).
    pub(super) fn with_leaving(self, leaving_max: usize) -> Self {
        Self { leaving_max, ..self }
    }

    /// Adds a connection of `peer`, which `close` aborts. If the table is full, evicts one. Returns
    /// its stage and its time without progress.
    pub(super) fn take(
        &self,
        peer: IpAddr,
        close: AbortHandle,
    ) -> (ConnectionGuard, Option<(Stage, Duration)>) {
        let state = Arc::new(ConnectionState {
            peer: peer.to_canonical(),
            since: self.since,
            is_open: AtomicBool::new(false),
            requests: AtomicU32::new(0),
            ended_requests: AtomicU64::new(0),
            progressed_ns: AtomicU64::new(age(self.since)),
            wrote_ns: AtomicU64::new(age(self.since)),
            leave: Notify::new(),
            close,
        });
        let mut table = self.table.lock();
        let closed = if table.open.len() >= self.max { table.close_one(self) } else { None };
        let number = table.insert(Arc::clone(&state), self.max);
        drop(table);
        let closed =
            closed.map(|(stage, at)| (stage, Duration::from_nanos(age(self.since).saturating_sub(at))));
        (ConnectionGuard { number, state, table: Arc::clone(&self.table) }, closed)
    }
}

impl Table {
    fn insert(&mut self, state: Arc<ConnectionState>, max: usize) -> u64 {
        let of_peer = self.of_peers.entry(state.peer).or_default();
        *of_peer += 1;
        if is_dominant(*of_peer, max) {
            self.dominant_peer = Some(state.peer);
        }
        let number = self.next;
        self.next += 1;
        self.open.insert(number, state);
        number
    }

    fn remove(&mut self, number: u64) -> Option<Arc<ConnectionState>> {
        let state = self.open.remove(&number)?;
        if let Some(of_peer) = self.of_peers.get_mut(&state.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.of_peers.remove(&state.peer);
            }
        }
        Some(state)
    }

    /// Returns the address to which eviction is limited, if one has too many of `max` entries. Only
    /// the latest to exceed half can, since there are no two.
    fn dominant_peer(&self, max: usize) -> Option<IpAddr> {
        self.dominant_peer
            .filter(|peer| self.of_peers.get(peer).is_some_and(|of_peer| is_dominant(*of_peer, max)))
    }

    /// Evicts the connection with the lowest rank.
    fn close_one(&mut self, limiter: &ConnectionLimiter) -> Option<Rank> {
        let dominant_peer = self.dominant_peer(limiter.max);
        if self.chosen_of != dominant_peer {
            (self.chosen, self.chosen_of) = (Vec::new(), dominant_peer);
        }
        loop {
            if self.chosen.is_empty() {
                let open =
                    self.open.iter().filter(|(_, state)| dominant_peer.is_none_or(|peer| state.peer == peer));
                self.chosen = choose(open.map(|(number, state)| (state.rank(), *number)).collect());
            }
            let (rank, number) = self.chosen.pop()?;
            // A connection that ended or made progress since its selection is skipped.
            if self.open.get(&number).is_some_and(|state| state.rank() == rank)
                && let Some(state) = self.remove(number)
            {
                if state.is_open() && self.leaving.len() < limiter.leaving_max {
                    self.leaving.insert(number);
                    state.leave.notify_one();
                } else {
                    state.close.abort();
                }
                return Some(rank);
            }
        }
    }
}

/// Returns whether an address with `of_peer` of `max` entries has too many.
fn is_dominant(of_peer: usize, max: usize) -> bool {
    of_peer > max / 2
}

/// Returns the next connections of `open` to evict, the first one last. Only one if all have begun
/// their protocol.
fn choose(mut open: Vec<(Rank, u64)>) -> Vec<(Rank, u64)> {
    let opening = open.iter().filter(|((stage, _), _)| *stage == Stage::Opening).count();
    let chosen = opening.clamp(1, CHOSEN);
    if open.len() > chosen {
        open.select_nth_unstable(chosen - 1);
        open.truncate(chosen);
    }
    open.sort_unstable_by(|one, other| other.cmp(one));
    open
}

impl ConnectionState {
    /// Records that the connection has begun its protocol.
    pub(super) fn opened(&self) {
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// Returns whether the connection has begun its protocol.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Waits until the connection is evicted and should end its calls. Supports one waiter.
    pub(super) async fn leaving(&self) {
        self.leave.notified().await;
    }

    /// Records that bytes were transferred.
    pub(super) fn progressed(&self) {
        self.progressed_at(self.now());
    }

    /// Returns the current time for [`ConnectionState::progressed_at`].
    pub(super) fn now(&self) -> u64 {
        age(self.since)
    }

    /// Records bytes transferred by a call that began at `moment`. The peer may receive them and
    /// act before the call returns.
    pub(super) fn progressed_at(&self, moment: u64) {
        self.progressed_ns.fetch_max(moment, Ordering::Relaxed);
    }

    /// Records bytes written by a call that began at `moment`.
    pub(super) fn wrote_at(&self, moment: u64) {
        self.wrote_ns.fetch_max(moment, Ordering::Relaxed);
        self.progressed_at(moment);
    }

    /// Waits until the connection has no request and can be closed: `time` after the call if
    /// `is_written` confirms that the socket has all responses, after `time` without any bytes, or
    /// after twice that time without a request. Polls rarely.
    ///
    /// Only the task that writes the responses may poll this, and must write before each poll.
    pub(super) async fn resting(&self, time: Duration, is_written: impl Fn() -> bool) {
        let asked = self.now();
        let (mut idle_since, mut ended_before) = (asked, None);
        loop {
            let now = self.now();
            // Read before the number of ended requests, which a request increments first.
            let is_busy = self.requests.load(Ordering::Acquire) > 0;
            let ended = (!is_busy).then(|| self.ended_requests.load(Ordering::Relaxed));
            idle_since = if is_busy { now } else { idle_since };
            let silent_since = self.progressed_ns.load(Ordering::Relaxed).max(asked);
            let lasts = |since: u64, time: Duration| Duration::from_nanos(now.saturating_sub(since)) >= time;
            // Responses that were complete at the previous check have been passed to the socket.
            let is_settled = ended.is_some() && ended == ended_before && is_written();
            if is_settled && lasts(asked, time)
                || !is_busy && lasts(silent_since, time)
                || lasts(idle_since, 2 * time)
            {
                return;
            }
            ended_before = ended;
            sleep(REST_LOOK).await;
        }
    }

    /// Returns the time since bytes were last written.
    pub(super) fn unwritten(&self) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(self.wrote_ns.load(Ordering::Relaxed)))
    }

    /// Records the start of a request.
    pub(super) fn request(self: &Arc<Self>) -> Request {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.progressed();
        Request(Arc::clone(self))
    }

    fn rank(&self) -> Rank {
        let is_busy = self.requests.load(Ordering::Relaxed) > 0;
        let stage = match (self.is_open(), self.ended_requests.load(Ordering::Relaxed) > 0, is_busy) {
            (false, _, _) => Stage::Opening,
            (true, false, false) => Stage::Unused,
            (true, false, true) => Stage::First,
            (true, true, false) => Stage::Idle,
            (true, true, true) => Stage::Busy,
        };
        (stage, self.progressed_ns.load(Ordering::Relaxed))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.0.progressed();
        self.0.ended_requests.fetch_add(1, Ordering::Relaxed);
        self.0.requests.fetch_sub(1, Ordering::Release);
    }
}

impl ConnectionGuard {
    pub(super) fn state(&self) -> &Arc<ConnectionState> {
        &self.state
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        if table.remove(self.number).is_none() {
            table.leaving.remove(&self.number);
        }
    }
}

/// Returns the nanoseconds since `since`, capped at 584 years.
fn age(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Creates the handle that closes a connection, and the registration under which the connection
/// runs.
pub(super) fn closing() -> (AbortHandle, AbortRegistration) {
    AbortHandle::new_pair()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;
    use tokio::time::advance;

    use super::*;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn take(limiter: &ConnectionLimiter) -> (ConnectionGuard, Option<Stage>) {
        take_for(limiter, PEER)
    }

    fn take_for(limiter: &ConnectionLimiter, peer: IpAddr) -> (ConnectionGuard, Option<Stage>) {
        let (held, closed) = limiter.take(peer, closing().0);
        (held, closed.map(|(stage, _)| stage))
    }

    fn peer(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    fn is_closed(held: &ConnectionGuard) -> bool {
        held.state.close.is_aborted()
    }

    /// Regression test: one silent peer delayed an upgrade, and all connects, for ten seconds.
    #[tokio::test(start_paused = true)]
    async fn quiet_connection_without_request_is_idle() {
        let limiter = ConnectionLimiter::new(1);
        let held = take(&limiter).0;
        advance(LEAVING_DEADLINE * 5).await;
        let mut resting = std::pin::pin!(held.state().resting(LEAVING_DEADLINE, || false));
        let mut waits = async |time| tokio::time::timeout(time, &mut resting).await.is_err();
        assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "earlier time does not count");
        held.state().progressed();
        assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "it made progress");
        let request = held.state().request();
        assert!(waits(LEAVING_DEADLINE * 5).await, "its call is being answered");
        drop(request);
        assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "the end of the answer is on its way");
        for _ in 0..2 {
            held.state().progressed();
            assert!(waits(LEAVING_DEADLINE / 2).await, "the peer takes some of it");
        }
        held.state().progressed();
        assert!(!waits(LEAVING_DEADLINE / 2).await, "it takes too long");
    }

    /// Regression test: a peer that continued to send after its request was refused delayed an
    /// upgrade by twice the time of a silent one.
    #[tokio::test(start_paused = true)]
    async fn received_bytes_do_not_delay_a_settled_connection() {
        let limiter = ConnectionLimiter::new(1);
        let (held, is_written) = (take(&limiter).0, std::cell::Cell::new(true));
        let request = held.state().request();
        let mut resting = std::pin::pin!(held.state().resting(LEAVING_DEADLINE, || is_written.get()));
        let sends = async |looks: u32| {
            for _ in 0..2 * looks {
                held.state().progressed();
                tokio::time::sleep(REST_LOOK / 2).await;
            }
        };
        let mut waits = async |looks: u32| tokio::select! { biased; () = &mut resting => false, () = sends(looks) => true };
        assert!(waits(100).await, "its call is being answered");
        drop(request);
        is_written.set(false);
        assert!(waits(10).await, "the socket takes the response");
        let short = held.state().request();
        drop(short);
        is_written.set(true);
        assert!(waits(1).await, "the last response may not be written yet");
        assert!(!waits(2).await, "it is written");
    }

    #[tokio::test(start_paused = true)]
    async fn settled_connection_gets_time_to_announce_requests() {
        let limiter = ConnectionLimiter::new(1);
        let held = take(&limiter).0;
        let mut resting = std::pin::pin!(held.state().resting(LEAVING_DEADLINE, || true));
        for _ in 0..LEAVING_DEADLINE.as_millis() / REST_LOOK.as_millis() - 1 {
            held.state().progressed();
            assert!(
                tokio::time::timeout(REST_LOOK, &mut resting).await.is_err(),
                "requests may be on their way"
            );
        }
        held.state().progressed();
        assert!(tokio::time::timeout(2 * REST_LOOK, &mut resting).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn connection_is_not_idle_during_a_pause() {
        crate::clock::testing::ticked(async {
            let limiter = ConnectionLimiter::new(1);
            let held = take(&limiter).0;
            let mut resting = std::pin::pin!(held.state().resting(LEAVING_DEADLINE, || false));
            assert!(futures::poll!(&mut resting).is_pending());
            advance(LEAVING_DEADLINE * 100).await;
            assert!(futures::poll!(&mut resting).is_pending());
            resting.await;
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn eviction_order_is_unstarted_idle_then_busy() {
        let limiter = ConnectionLimiter::new(3);
        let (busy, idle, opening) = (take(&limiter).0, take(&limiter).0, take(&limiter).0);
        busy.state().opened();
        let request = busy.state().request();
        idle.state().opened();
        advance(Duration::from_secs(9)).await;
        opening.state().progressed();
        let (first, closed) = take(&limiter);
        assert_eq!((closed, is_closed(&opening)), (Some(Stage::Opening), true));
        first.state().opened();
        advance(Duration::from_secs(1)).await;
        first.state().progressed();
        let (second, closed) = take(&limiter);
        assert_eq!((closed, is_closed(&idle), is_closed(&first)), (Some(Stage::Unused), true, false));
        second.state().opened();
        drop(request);
        advance(Duration::from_secs(1)).await;
        second.state().progressed();
        let (third, closed) = limiter.take(PEER, closing().0);
        let unused = Some((Stage::Unused, Duration::from_secs(1)));
        assert_eq!((closed, is_closed(&first)), (unused, true), "which is how long it did nothing");
        drop((busy, idle, opening, first, second, third));
        assert!(limiter.table.lock().open.is_empty());
        assert_eq!(take(&limiter).1, None);
    }

    #[tokio::test(start_paused = true)]
    async fn chosen_connection_that_starts_stays() {
        let limiter = ConnectionLimiter::new(10);
        let all: Vec<ConnectionGuard> = (0..10).map(|_| take(&limiter).0).collect();
        all[..3].iter().for_each(|held| held.state().opened());
        let first = take(&limiter);
        assert!(first.1 == Some(Stage::Opening) && is_closed(&all[3]));
        all[4].state().opened();
        advance(Duration::from_secs(1)).await;
        let storm: Vec<_> = (0..100).map(|_| take(&limiter)).collect();
        assert!(storm.iter().all(|(_, stage)| *stage == Some(Stage::Opening)));
        let stayed = [0, 1, 2, 4].iter().all(|at| !is_closed(&all[*at]));
        assert!(stayed && all[5..].iter().all(is_closed));
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_completed_request_is_evicted_first() {
        let limiter = ConnectionLimiter::new(4);
        let honest: Vec<ConnectionGuard> = (0..2).map(|number| take_for(&limiter, peer(number)).0).collect();
        for held in &honest {
            held.state().opened();
            drop(held.state().request());
        }
        let fill = [take_for(&limiter, peer(8)).0, take_for(&limiter, peer(9)).0];
        let mut storm: Vec<(ConnectionGuard, Request)> = Vec::new();
        for number in 10..60 {
            advance(Duration::from_millis(50)).await;
            let (held, closed) = take_for(&limiter, peer(number));
            let expected = if number < 12 { Stage::Opening } else { Stage::First };
            assert_eq!(closed, Some(expected), "{number}");
            held.state().opened();
            let request = held.state().request();
            storm.push((held, request));
        }
        assert!(fill.iter().all(is_closed) && !honest.iter().any(is_closed));
        let closed = storm.iter().filter(|(held, _)| is_closed(held)).count();
        assert_eq!(closed, 48, "each goes for a later one");
        let (last, request) = storm.pop().unwrap();
        drop(request);
        advance(Duration::from_millis(50)).await;
        assert_eq!(take_for(&limiter, peer(60)).1, Some(Stage::First), "the one before it");
        assert!(!is_closed(&last), "it has completed one");
    }

    #[tokio::test(start_paused = true)]
    async fn dominant_address_is_evicted_although_busy() {
        let limiter = ConnectionLimiter::new(8);
        let honest: Vec<ConnectionGuard> = (0..3).map(|number| take_for(&limiter, peer(number)).0).collect();
        honest.iter().for_each(|held| held.state().opened());
        let hostile: Vec<ConnectionGuard> = (0..5).map(|_| take_for(&limiter, peer(99)).0).collect();
        let requests: Vec<Request> = hostile
            .iter()
            .map(|held| {
                held.state().opened();
                drop(held.state().request());
                held.state().request()
            })
            .collect();
        advance(Duration::from_secs(1)).await;
        hostile[0].state().progressed();
        let newcomer = take_for(&limiter, peer(3));
        assert_eq!(newcomer.1, Some(Stage::Busy), "the idlest of that address");
        assert!(is_closed(&hostile[1]) && !is_closed(&hostile[0]) && !honest.iter().any(is_closed));
        // The address now has only half of the entries, so the newcomer, which has not begun, ranks
        // lowest.
        let again = take_for(&limiter, peer(99));
        assert!(again.1 == Some(Stage::Opening) && is_closed(&newcomer.0));
        let storm: Vec<_> = (0..50).map(|_| take_for(&limiter, peer(99))).collect();
        assert!(storm.iter().all(|(_, stage)| *stage == Some(Stage::Opening)));
        assert!(!honest.iter().any(is_closed), "its connections are evicted for its own");
        drop((requests, newcomer, again, storm, hostile, honest));
        let table = limiter.table.lock();
        assert!(table.open.is_empty() && table.of_peers.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn formerly_dominant_address_is_not_evicted() {
        let limiter = ConnectionLimiter::new(4);
        let mut dominant: Vec<ConnectionGuard> = (0..3).map(|_| take_for(&limiter, peer(1)).0).collect();
        dominant.iter().for_each(|held| held.state().opened());
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        dominant.push(take_for(&limiter, mapped).0);
        dominant.truncate(2);
        let others = [take_for(&limiter, peer(2)).0, take_for(&limiter, peer(3)).0];
        advance(Duration::from_secs(1)).await;
        assert_eq!(take_for(&limiter, peer(4)).1, Some(Stage::Opening));
        assert!(is_closed(&others[0]) && !dominant.iter().any(is_closed));
    }

    #[tokio::test(start_paused = true)]
    async fn busy_connections_are_evicted_a_few_at_a_time() {
        let limiter = ConnectionLimiter::new(1).with_leaving(2);
        let (opening, first) = (take(&limiter).0, take(&limiter).0);
        assert!(is_closed(&opening), "nothing of it would be lost");
        let begun = |held: &ConnectionGuard| held.state().opened();
        begun(&first);
        let second = take(&limiter).0;
        begun(&second);
        let third = take(&limiter).0;
        begun(&third);
        for held in [&first, &second] {
            held.state().leaving().await;
            assert!(!is_closed(held));
        }
        let fourth = take(&limiter).0;
        assert!(is_closed(&third), "two are on their way out");
        begun(&fourth);
        drop((first, third));
        let _fifth = take(&limiter).0;
        fourth.state().leaving().await;
        assert!(!is_closed(&fourth));
        drop((second, fourth));
        assert!(limiter.table.lock().leaving.is_empty());
    }

    proptest! {
        #[test]
        fn single_address_is_evicted_in_the_usual_order(
            ranks in prop::collection::vec((0u8..5, 0u64..50), 1..40),
        ) {
            let limiter = ConnectionLimiter::new(ranks.len());
            let held: Vec<ConnectionGuard> = ranks.iter().map(|_| take(&limiter).0).collect();
            let mut requests = Vec::new();
            for (held, (stage, at)) in held.iter().zip(&ranks) {
                let state = held.state();
                if *stage > 0 {
                    state.opened();
                }
                if *stage > 2 {
                    drop(state.request());
                }
                if [2, 4].contains(stage) {
                    requests.push(state.request());
                }
                state.progressed_ns.store(*at, Ordering::Relaxed);
            }
            let least = held.iter().map(|held| (held.state().rank(), held.number)).min();
            let _newcomer = take(&limiter);
            let closed = held.iter().find(|held| is_closed(held)).map(|held| (held.state().rank(), held.number));
            prop_assert_eq!(closed, least);
        }

        #[test]
        fn evicted_connections_are_the_least_active(
            ranks in prop::collection::vec((0u8..5, 0u64..50), 0..300),
        ) {
            let stages = [Stage::Opening, Stage::Unused, Stage::First, Stage::Idle, Stage::Busy];
            let stage = |number| stages[usize::from(number)];
            let open = ranks.iter().map(|(number, at)| (stage(*number), *at));
            let open: Vec<(Rank, u64)> = open.zip(0..).collect();
            let mut chosen = choose(open.clone());
            chosen.reverse();
            let mut sorted = open;
            sorted.sort_unstable();
            let opening = sorted.iter().take_while(|((stage, _), _)| *stage == Stage::Opening).count();
            sorted.truncate(opening.clamp(1, CHOSEN));
            prop_assert_eq!(chosen, sorted);
        }
    }
}
