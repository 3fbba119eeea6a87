//! Connection table of one listener with eviction. Sockets and deadlines are in `acceptor`.
//!
//! Invariant: the table never exceeds its limit. When it is full, connections are evicted in the
//! order of [`ConnectionActivity`], and within a stage by the time without progress. Idle
//! connections thus cannot keep out a working one. If the protocol can announce an end, an evicted
//! connection may finish its calls; the number of those is bounded too.
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
const REST_POLL_INTERVAL: Duration = Duration::from_millis(50);

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
    /// Next candidates for eviction, the first one last.
    chosen: Vec<EvictionCandidate>,
    /// Address to which the candidates are limited. `None` means all addresses.
    chosen_of: Option<IpAddr>,
}

/// Activity of a connection, in eviction order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ConnectionActivity {
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

/// Eviction rank, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionRank {
    stage: ConnectionActivity,
    /// Last progress in ns of the table's age. In ms, connections of one moment would tie.
    progressed_ns: u64,
}

/// A connection with its rank at selection, in eviction order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionCandidate {
    rank: EvictionRank,
    number: u64,
}

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
    ) -> (ConnectionGuard, Option<(ConnectionActivity, Duration)>) {
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
        let closed = closed.map(|EvictionRank { stage, progressed_ns }| {
            (stage, Duration::from_nanos(age(self.since).saturating_sub(progressed_ns)))
        });
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
    fn close_one(&mut self, limiter: &ConnectionLimiter) -> Option<EvictionRank> {
        let dominant_peer = self.dominant_peer(limiter.max);
        if self.chosen_of != dominant_peer {
            (self.chosen, self.chosen_of) = (Vec::new(), dominant_peer);
        }
        loop {
            if self.chosen.is_empty() {
                let open =
                    self.open.iter().filter(|(_, state)| dominant_peer.is_none_or(|peer| state.peer == peer));
                let candidate = |(number, state): (&u64, &Arc<ConnectionState>)| state.candidate(*number);
                self.chosen = choose(open.map(candidate).collect());
            }
            let EvictionCandidate { rank, number } = self.chosen.pop()?;
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
fn choose(mut open: Vec<EvictionCandidate>) -> Vec<EvictionCandidate> {
    let opening = open.iter().filter(|it| it.rank.stage == ConnectionActivity::Opening).count();
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
    pub(super) async fn wait_until_idle(&self, time: Duration, is_written: impl Fn() -> bool) {
        let called_at = self.now();
        let (mut idle_since, mut ended_before) = (called_at, None);
        loop {
            let now = self.now();
            // Read before the number of ended requests, which a request increments first.
            let is_busy = self.requests.load(Ordering::Acquire) > 0;
            let ended = (!is_busy).then(|| self.ended_requests.load(Ordering::Relaxed));
            idle_since = if is_busy { now } else { idle_since };
            let silent_since = self.progressed_ns.load(Ordering::Relaxed).max(called_at);
            let lasts = |since: u64, time: Duration| Duration::from_nanos(now.saturating_sub(since)) >= time;
            // Responses that were complete at the previous check have been passed to the socket.
            let is_settled = ended.is_some() && ended == ended_before && is_written();
            if is_settled && lasts(called_at, time)
                || !is_busy && lasts(silent_since, time)
                || lasts(idle_since, 2 * time)
            {
                return;
            }
            ended_before = ended;
            sleep(REST_POLL_INTERVAL).await;
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

    fn candidate(&self, number: u64) -> EvictionCandidate {
        EvictionCandidate { rank: self.rank(), number }
    }

    fn rank(&self) -> EvictionRank {
        let is_busy = self.requests.load(Ordering::Relaxed) > 0;
        let stage = match (self.is_open(), self.ended_requests.load(Ordering::Relaxed) > 0, is_busy) {
            (false, _, _) => ConnectionActivity::Opening,
            (true, false, false) => ConnectionActivity::Unused,
            (true, false, true) => ConnectionActivity::First,
            (true, true, false) => ConnectionActivity::Idle,
            (true, true, true) => ConnectionActivity::Busy,
        };
        EvictionRank { stage, progressed_ns: self.progressed_ns.load(Ordering::Relaxed) }
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
mod tests;
