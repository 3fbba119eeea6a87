//! The connections of one listener: how many there may be, what each is doing, and which one goes when another wants in.
//!
//! Not here: sockets and deadlines (`acceptor`). Invariants: there are never more connections in the table than allowed;
//! one is in it until it ends or its place is given away. A connection that has not begun its protocol goes before one
//! that never had a request, that one before one of whose requests none has ended, that one before one that has none now,
//! that one before one with a request, and among equals the one that got on least lately. So connections that only hold
//! places cannot keep out one that works, nor can a storm of new ones, whatever they begin, take the place of one that
//! pauses between its requests. Where the protocol can say that a connection ends, one whose place is given away is told so and
//! may end its calls; those on their way out are bounded too, and one more is closed at once.
//!
//! An address with more than half of the places gives way itself, whatever its connections do: the one to go is found among its
//! own. So one machine that keeps thousands of connections busy does not drive out the others. Callers behind one address,
//! alone, see no difference.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{AbortHandle, AbortRegistration};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::{Instant, sleep};

/// Connections that have not begun of which one look through the table chooses so many to go. While they do not begin they
/// stay the right ones, because all others came later or rank higher: so a storm of connects does not look through the
/// table each time.
const CHOSEN: usize = 64;

/// Time for the calls of a connection to end whose place was given to another one.
pub(super) const LEAVING_DEADLINE: Duration = Duration::from_secs(2);

/// Between two looks whether a connection that is to go has a request.
const REST_LOOK: Duration = Duration::from_millis(50);

/// The table. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Places {
    max: usize,
    /// How many of those whose place was given away may end their calls.
    leaving_max: usize,
    since: Instant,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: HashMap<u64, Arc<Seat>>,
    /// Connections that end their calls; their places are given away.
    leaving: HashSet<u64>,
    /// Connections of each address.
    of_peers: HashMap<IpAddr, usize>,
    /// The last address that came to more than half of the places.
    crowd: Option<IpAddr>,
    /// Who goes next, the last one first, ranked as they were when they were chosen.
    chosen: Vec<(Rank, u64)>,
    /// Of whom they were chosen; none = of all.
    chosen_of: Option<IpAddr>,
}

/// What a connection is doing, from what goes first to what goes last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// It has not begun its protocol.
    Opening,
    /// It never had a request.
    Unused,
    /// It has a request, and none has ended yet.
    First,
    /// It has no request.
    Idle,
    /// It has one, and another one has ended.
    Busy,
}

/// The least goes first: the stage, then when it last got on, in ns of the table's age (in ms, connections of one moment tie).
type Rank = (Stage, u64);

/// What a connection is doing; its server keeps this up to date.
#[derive(Debug)]
pub(super) struct Seat {
    peer: IpAddr,
    since: Instant,
    is_open: AtomicBool,
    requests: AtomicU32,
    was_used: AtomicBool,
    progressed_ns: AtomicU64,
    wrote_ns: AtomicU64,
    leave: Notify,
    close: AbortHandle,
}

/// A request of a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Request(Arc<Seat>);

/// A connection's place in the table, given back on drop.
#[derive(Debug)]
pub(super) struct Held {
    number: u64,
    seat: Arc<Seat>,
    table: Arc<Mutex<Table>>,
}

impl Places {
    /// Places for `max` connections, at least one.
    pub(super) fn new(max: usize) -> Self {
        Self { max: max.max(1), leaving_max: 0, since: Instant::now(), table: Arc::default() }
    }

    /// The same for a listener that tells its connections to end their calls ([`Seat::leaving`]), so many at a time.
    pub(super) fn with_leaving(self, leaving_max: usize) -> Self {
        Self { leaving_max, ..self }
    }

    /// A place for a connection of `peer` that is closed through the handle. When none is free a connection leaves for it:
    /// what that one was doing, and for how long it had not got on.
    pub(super) fn take(&self, peer: IpAddr, close: AbortHandle) -> (Held, Option<(Stage, Duration)>) {
        let seat = Arc::new(Seat {
            peer: peer.to_canonical(),
            since: self.since,
            is_open: AtomicBool::new(false),
            requests: AtomicU32::new(0),
            was_used: AtomicBool::new(false),
            progressed_ns: AtomicU64::new(age(self.since)),
            wrote_ns: AtomicU64::new(age(self.since)),
            leave: Notify::new(),
            close,
        });
        let mut table = self.table.lock();
        let closed = if table.open.len() >= self.max { table.close_one(self) } else { None };
        let number = table.insert(Arc::clone(&seat), self.max);
        drop(table);
        let closed =
            closed.map(|(stage, at)| (stage, Duration::from_nanos(age(self.since).saturating_sub(at))));
        (Held { number, seat, table: Arc::clone(&self.table) }, closed)
    }
}

impl Table {
    fn insert(&mut self, seat: Arc<Seat>, max: usize) -> u64 {
        let of_peer = self.of_peers.entry(seat.peer).or_default();
        *of_peer += 1;
        if is_crowd(*of_peer, max) {
            self.crowd = Some(seat.peer);
        }
        let number = self.next;
        self.next += 1;
        self.open.insert(number, seat);
        number
    }

    fn remove(&mut self, number: u64) -> Option<Arc<Seat>> {
        let seat = self.open.remove(&number)?;
        if let Some(of_peer) = self.of_peers.get_mut(&seat.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.of_peers.remove(&seat.peer);
            }
        }
        Some(seat)
    }

    /// The address that gives way, if one has too many of `max` places. Only the last that came to so many can: there are no
    /// two.
    fn crowd(&self, max: usize) -> Option<IpAddr> {
        self.crowd.filter(|peer| self.of_peers.get(peer).is_some_and(|of_peer| is_crowd(*of_peer, max)))
    }

    /// Closes the connection with the least reason to stay.
    fn close_one(&mut self, places: &Places) -> Option<Rank> {
        let crowd = self.crowd(places.max);
        if self.chosen_of != crowd {
            (self.chosen, self.chosen_of) = (Vec::new(), crowd);
        }
        loop {
            if self.chosen.is_empty() {
                let open = self.open.iter().filter(|(_, seat)| crowd.is_none_or(|peer| seat.peer == peer));
                self.chosen = choose(open.map(|(number, seat)| (seat.rank(), *number)).collect());
            }
            let (rank, number) = self.chosen.pop()?;
            // One that ended or did something meanwhile is not the one that was chosen.
            if self.open.get(&number).is_some_and(|seat| seat.rank() == rank)
                && let Some(seat) = self.remove(number)
            {
                if seat.is_open() && self.leaving.len() < places.leaving_max {
                    self.leaving.insert(number);
                    seat.leave.notify_one();
                } else {
                    seat.close.abort();
                }
                return Some(rank);
            }
        }
    }
}

/// Whether an address with so many of `max` places gives way.
fn is_crowd(of_peer: usize, max: usize) -> bool {
    of_peer > max / 2
}

/// Those of `open` that go first, the first one last: of those that have begun it is one.
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

impl Seat {
    /// The connection has begun its protocol.
    pub(super) fn opened(&self) {
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// Whether it has.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Its place is given away: it is to end its calls, soon. One waits for this.
    pub(super) async fn leaving(&self) {
        self.leave.notified().await;
    }

    /// Bytes came or went.
    pub(super) fn progressed(&self) {
        self.progressed_at(self.now());
    }

    /// The moment for [`Seat::progressed_at`].
    pub(super) fn now(&self) -> u64 {
        age(self.since)
    }

    /// Bytes came or went by a call that began at `moment`. The peer may have them, and act, before the call returns.
    pub(super) fn progressed_at(&self, moment: u64) {
        self.progressed_ns.fetch_max(moment, Ordering::Relaxed);
    }

    /// Bytes went by a call that began at `moment`.
    pub(super) fn wrote_at(&self, moment: u64) {
        self.wrote_ns.fetch_max(moment, Ordering::Relaxed);
        self.progressed_at(moment);
    }

    /// Completes once it has had no request and no bytes have come or gone for `time` since this was asked, or no request for
    /// twice that time. Looked at rarely.
    pub(super) async fn resting(&self, time: Duration) {
        let asked = self.now();
        let mut idle_since = asked;
        loop {
            let now = self.now();
            let is_busy = self.requests.load(Ordering::Relaxed) > 0;
            idle_since = if is_busy { now } else { idle_since };
            let silent_since = self.progressed_ns.load(Ordering::Relaxed).max(asked);
            let lasts = |since: u64, time: Duration| Duration::from_nanos(now.saturating_sub(since)) >= time;
            if !is_busy && lasts(silent_since, time) || lasts(idle_since, 2 * time) {
                return;
            }
            sleep(REST_LOOK).await;
        }
    }

    /// For how long no bytes went.
    pub(super) fn unwritten(&self) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(self.wrote_ns.load(Ordering::Relaxed)))
    }

    /// A request has begun.
    pub(super) fn request(self: &Arc<Self>) -> Request {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.progressed();
        Request(Arc::clone(self))
    }

    fn rank(&self) -> Rank {
        let is_busy = self.requests.load(Ordering::Relaxed) > 0;
        let stage = match (self.is_open(), self.was_used.load(Ordering::Relaxed), is_busy) {
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
        self.0.was_used.store(true, Ordering::Relaxed);
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Held {
    pub(super) fn seat(&self) -> &Arc<Seat> {
        &self.seat
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        if table.remove(self.number).is_none() {
            table.leaving.remove(&self.number);
        }
    }
}

/// Nanoseconds since `since`, for 584 years.
fn age(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// What closes a connection, and what the connection runs under.
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

    fn take(places: &Places) -> (Held, Option<Stage>) {
        take_for(places, PEER)
    }

    fn take_for(places: &Places, peer: IpAddr) -> (Held, Option<Stage>) {
        let (held, closed) = places.take(peer, closing().0);
        (held, closed.map(|(stage, _)| stage))
    }

    fn peer(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    fn is_closed(held: &Held) -> bool {
        held.seat.close.is_aborted()
    }

    /// One silent peer held up an upgrade, and with it everybody's connects, for ten seconds.
    #[tokio::test(start_paused = true)]
    async fn quiet_connection_without_request_is_idle() {
        let places = Places::new(1);
        let held = take(&places).0;
        advance(LEAVING_DEADLINE * 5).await;
        let mut resting = std::pin::pin!(held.seat().resting(LEAVING_DEADLINE));
        let mut waits = async |time| tokio::time::timeout(time, &mut resting).await.is_err();
        assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "what was before does not count");
        held.seat().progressed();
        assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "it got on");
        let request = held.seat().request();
        assert!(waits(LEAVING_DEADLINE * 5).await, "its call is being answered");
        drop(request);
        assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "the end of the answer is on its way");
        for _ in 0..2 {
            held.seat().progressed();
            assert!(waits(LEAVING_DEADLINE / 2).await, "the peer takes some of it");
        }
        held.seat().progressed();
        assert!(!waits(LEAVING_DEADLINE / 2).await, "it takes too long");
    }

    #[tokio::test(start_paused = true)]
    async fn connection_is_not_idle_during_a_pause() {
        crate::clock::testing::ticked(async {
            let places = Places::new(1);
            let held = take(&places).0;
            let mut resting = std::pin::pin!(held.seat().resting(LEAVING_DEADLINE));
            assert!(futures::poll!(&mut resting).is_pending());
            advance(LEAVING_DEADLINE * 100).await;
            assert!(futures::poll!(&mut resting).is_pending());
            resting.await;
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn eviction_order_is_unstarted_idle_then_busy() {
        let places = Places::new(3);
        let (busy, idle, opening) = (take(&places).0, take(&places).0, take(&places).0);
        busy.seat().opened();
        let request = busy.seat().request();
        idle.seat().opened();
        advance(Duration::from_secs(9)).await;
        opening.seat().progressed();
        let (first, closed) = take(&places);
        assert_eq!((closed, is_closed(&opening)), (Some(Stage::Opening), true));
        first.seat().opened();
        advance(Duration::from_secs(1)).await;
        first.seat().progressed();
        let (second, closed) = take(&places);
        assert_eq!((closed, is_closed(&idle), is_closed(&first)), (Some(Stage::Unused), true, false));
        second.seat().opened();
        drop(request);
        advance(Duration::from_secs(1)).await;
        second.seat().progressed();
        let (third, closed) = places.take(PEER, closing().0);
        let unused = Some((Stage::Unused, Duration::from_secs(1)));
        assert_eq!((closed, is_closed(&first)), (unused, true), "which is how long it did nothing");
        drop((busy, idle, opening, first, second, third));
        assert!(places.table.lock().open.is_empty());
        assert_eq!(take(&places).1, None);
    }

    #[tokio::test(start_paused = true)]
    async fn chosen_connection_that_starts_stays() {
        let places = Places::new(10);
        let all: Vec<Held> = (0..10).map(|_| take(&places).0).collect();
        all[..3].iter().for_each(|held| held.seat().opened());
        let first = take(&places);
        assert!(first.1 == Some(Stage::Opening) && is_closed(&all[3]));
        all[4].seat().opened();
        advance(Duration::from_secs(1)).await;
        let storm: Vec<_> = (0..100).map(|_| take(&places)).collect();
        assert!(storm.iter().all(|(_, stage)| *stage == Some(Stage::Opening)));
        let stayed = [0, 1, 2, 4].iter().all(|at| !is_closed(&all[*at]));
        assert!(stayed && all[5..].iter().all(is_closed));
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_completed_request_is_evicted_first() {
        let places = Places::new(4);
        let honest: Vec<Held> = (0..2).map(|number| take_for(&places, peer(number)).0).collect();
        for held in &honest {
            held.seat().opened();
            drop(held.seat().request());
        }
        let fill = [take_for(&places, peer(8)).0, take_for(&places, peer(9)).0];
        let mut storm: Vec<(Held, Request)> = Vec::new();
        for number in 10..60 {
            advance(Duration::from_millis(50)).await;
            let (held, closed) = take_for(&places, peer(number));
            let expected = if number < 12 { Stage::Opening } else { Stage::First };
            assert_eq!(closed, Some(expected), "{number}");
            held.seat().opened();
            let request = held.seat().request();
            storm.push((held, request));
        }
        assert!(fill.iter().all(is_closed) && !honest.iter().any(is_closed));
        let closed = storm.iter().filter(|(held, _)| is_closed(held)).count();
        assert_eq!(closed, 48, "each goes for a later one");
        let (last, request) = storm.pop().unwrap();
        drop(request);
        advance(Duration::from_millis(50)).await;
        assert_eq!(take_for(&places, peer(60)).1, Some(Stage::First), "the one before it");
        assert!(!is_closed(&last), "it has completed one");
    }

    #[tokio::test(start_paused = true)]
    async fn dominant_address_is_evicted_although_busy() {
        let places = Places::new(8);
        let honest: Vec<Held> = (0..3).map(|number| take_for(&places, peer(number)).0).collect();
        honest.iter().for_each(|held| held.seat().opened());
        let hostile: Vec<Held> = (0..5).map(|_| take_for(&places, peer(99)).0).collect();
        let requests: Vec<Request> = hostile
            .iter()
            .map(|held| {
                held.seat().opened();
                drop(held.seat().request());
                held.seat().request()
            })
            .collect();
        advance(Duration::from_secs(1)).await;
        hostile[0].seat().progressed();
        let newcomer = take_for(&places, peer(3));
        assert_eq!(newcomer.1, Some(Stage::Busy), "the idlest of that address");
        assert!(is_closed(&hostile[1]) && !is_closed(&hostile[0]) && !honest.iter().any(is_closed));
        // It has half now, so all are equal, and the newcomer has not begun.
        let again = take_for(&places, peer(99));
        assert!(again.1 == Some(Stage::Opening) && is_closed(&newcomer.0));
        let storm: Vec<_> = (0..50).map(|_| take_for(&places, peer(99))).collect();
        assert!(storm.iter().all(|(_, stage)| *stage == Some(Stage::Opening)));
        assert!(!honest.iter().any(is_closed), "what it opens goes for what it opens");
        drop((requests, newcomer, again, storm, hostile, honest));
        let table = places.table.lock();
        assert!(table.open.is_empty() && table.of_peers.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn formerly_dominant_address_is_not_evicted() {
        let places = Places::new(4);
        let mut crowd: Vec<Held> = (0..3).map(|_| take_for(&places, peer(1)).0).collect();
        crowd.iter().for_each(|held| held.seat().opened());
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        crowd.push(take_for(&places, mapped).0);
        crowd.truncate(2);
        let others = [take_for(&places, peer(2)).0, take_for(&places, peer(3)).0];
        advance(Duration::from_secs(1)).await;
        assert_eq!(take_for(&places, peer(4)).1, Some(Stage::Opening));
        assert!(is_closed(&others[0]) && !crowd.iter().any(is_closed));
    }

    #[tokio::test(start_paused = true)]
    async fn busy_connections_are_evicted_a_few_at_a_time() {
        let places = Places::new(1).with_leaving(2);
        let (opening, first) = (take(&places).0, take(&places).0);
        assert!(is_closed(&opening), "nothing of it would be lost");
        let begun = |held: &Held| held.seat().opened();
        begun(&first);
        let second = take(&places).0;
        begun(&second);
        let third = take(&places).0;
        begun(&third);
        for held in [&first, &second] {
            held.seat().leaving().await;
            assert!(!is_closed(held));
        }
        let fourth = take(&places).0;
        assert!(is_closed(&third), "two are on their way out");
        begun(&fourth);
        drop((first, third));
        let _fifth = take(&places).0;
        fourth.seat().leaving().await;
        assert!(!is_closed(&fourth));
        drop((second, fourth));
        assert!(places.table.lock().leaving.is_empty());
    }

    proptest! {
        #[test]
        fn single_address_is_evicted_in_the_usual_order(
            ranks in prop::collection::vec((0u8..5, 0u64..50), 1..40),
        ) {
            let places = Places::new(ranks.len());
            let held: Vec<Held> = ranks.iter().map(|_| take(&places).0).collect();
            let mut requests = Vec::new();
            for (held, (stage, at)) in held.iter().zip(&ranks) {
                let seat = held.seat();
                if *stage > 0 {
                    seat.opened();
                }
                if *stage > 2 {
                    drop(seat.request());
                }
                if [2, 4].contains(stage) {
                    requests.push(seat.request());
                }
                seat.progressed_ns.store(*at, Ordering::Relaxed);
            }
            let least = held.iter().map(|held| (held.seat().rank(), held.number)).min();
            let _newcomer = take(&places);
            let closed = held.iter().find(|held| is_closed(held)).map(|held| (held.seat().rank(), held.number));
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
