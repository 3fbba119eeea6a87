//! Who waits for a part of a bounded amount that is held for long (read memory, local answers that wait for their socket), and
//! who is next: of the applications that wait, the one that holds least by its weight.
//!
//! While no one waits, everyone gets what is free, but for the last eighth: it is for applications that hold nothing yet, so that a
//! reader of another one begins at once, and goes on if it has one answer at a time, however long the others take for theirs. One
//! that is alone takes of it until it holds half. Requests of one application are served in their order. The one that is next is
//! waited for until there is room for it, or large requests would never be served.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use uniffle_wire::types::AppId;

/// Part of the whole that is kept for applications that hold nothing.
const NEWCOMERS_PART: u64 = 8;

/// For whom a part is taken.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    /// None for the worker's own reads.
    pub(crate) app: Option<AppId>,
    /// At least 1.
    pub(crate) weight: u32,
}

/// A bounded amount, with those that wait for parts of it.
#[derive(Debug)]
pub(crate) struct Line(Mutex<State>);

#[derive(Debug)]
struct State {
    capacity: u64,
    free: u64,
    readers: HashMap<Option<AppId>, Holding>,
    /// Applications that hold something.
    holders: usize,
    waiting: usize,
    arrivals: u64,
}

/// One application.
#[derive(Debug)]
struct Holding {
    weight: u32,
    held: u64,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    bytes: u64,
    arrival: u64,
    give: oneshot::Sender<Permit>,
}

/// Bytes taken; back in line when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    line: Arc<Line>,
    app: Option<AppId>,
    bytes: u64,
}

/// A place in the line; left when dropped.
struct Place {
    line: Arc<Line>,
    receiver: oneshot::Receiver<Permit>,
}

impl Line {
    pub(crate) fn new(capacity: u64) -> Arc<Self> {
        let readers = HashMap::new();
        let (free, holders, waiting, arrivals) = (capacity, 0, 0, 0);
        Arc::new(Self(Mutex::new(State { capacity, free, readers, holders, waiting, arrivals })))
    }

    /// `bytes` for `reader` if no one has to wait for them.
    pub(crate) fn try_take(self: &Arc<Self>, reader: &Reader, bytes: u64) -> Option<Permit> {
        self.0.lock().take_at_once(reader, bytes).then(|| self.permit(&reader.app, bytes))
    }

    /// `bytes` for `reader` when it is its turn; at most half of the whole.
    pub(crate) async fn take(self: &Arc<Self>, reader: &Reader, bytes: u64) -> Permit {
        let mut place = {
            let mut state = self.0.lock();
            if state.take_at_once(reader, bytes) {
                drop(state);
                return self.permit(&reader.app, bytes);
            }
            let (give, receiver) = oneshot::channel();
            state.enter(reader, bytes, give);
            Place { line: Arc::clone(self), receiver }
        };
        self.serve();
        (&mut place.receiver).await.expect("a waiter is dropped only when its place is")
    }

    /// Whether someone waits.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.lock().waiting > 0
    }

    fn permit(self: &Arc<Self>, app: &Option<AppId>, bytes: u64) -> Permit {
        Permit { line: Arc::clone(self), app: app.clone(), bytes }
    }

    /// Gives what is free to those whose turn it is.
    fn serve(self: &Arc<Self>) {
        loop {
            let Some((waiter, app)) = self.0.lock().next() else { return };
            // Outside of the lock: a permit that finds no receiver comes back by being dropped.
            let _ = waiter.give.send(self.permit(&app, waiter.bytes));
        }
    }
}

impl State {
    fn take_at_once(&mut self, reader: &Reader, bytes: u64) -> bool {
        if self.waiting > 0 {
            return false;
        }
        let held = self.readers.get(&reader.app).map_or(0, |holding| holding.held);
        let is_given = self.needed(&reader.app, held, bytes) <= self.free;
        if is_given {
            self.holding(reader);
            self.give(&reader.app, bytes);
        }
        is_given
    }

    /// What must be free for one that holds `held` to get `bytes` more.
    fn needed(&self, app: &Option<AppId>, held: u64, bytes: u64) -> u64 {
        let is_newcomer = held == 0 || app.is_none();
        let is_alone = self.holders <= 1;
        let is_kept = !is_newcomer && (!is_alone || self.is_greedy(held, bytes));
        bytes + if is_kept { self.capacity / NEWCOMERS_PART } else { 0 }
    }

    /// Whether one that holds `held` would have more than half with `bytes` more.
    fn is_greedy(&self, held: u64, bytes: u64) -> bool {
        held + bytes > self.capacity / 2
    }

    /// Enters `bytes` for a reader that is known.
    fn give(&mut self, app: &Option<AppId>, bytes: u64) {
        let Some(holding) = self.readers.get_mut(app) else { return };
        if app.is_some() && holding.held == 0 && bytes > 0 {
            self.holders += 1;
        }
        holding.held += bytes;
        self.free -= bytes;
    }

    fn holding(&mut self, reader: &Reader) -> &mut Holding {
        let fresh = || Holding { weight: reader.weight, held: 0, waiting: VecDeque::new() };
        let holding = self.readers.entry(reader.app.clone()).or_insert_with(fresh);
        holding.weight = reader.weight.max(1);
        holding
    }

    fn enter(&mut self, reader: &Reader, bytes: u64, give: oneshot::Sender<Permit>) {
        self.arrivals += 1;
        self.waiting += 1;
        let arrival = self.arrivals;
        self.holding(reader).waiting.push_back(Waiter { bytes, arrival, give });
    }

    /// Takes what the next one waits for, if there is room for it.
    fn next(&mut self) -> Option<(Waiter, Option<AppId>)> {
        if self.waiting == 0 {
            return None;
        }
        for holding in self.readers.values_mut() {
            let before = holding.waiting.len();
            holding.waiting.retain(|waiter| !waiter.give.is_closed());
            self.waiting -= before - holding.waiting.len();
        }
        self.readers.retain(|_, holding| holding.held > 0 || !holding.waiting.is_empty());
        let mut waiting: Vec<_> = self
            .readers
            .iter()
            .filter_map(|(app, holding)| {
                let first = holding.waiting.front()?;
                Some((turn(holding.held, holding.weight), first.arrival, first.bytes, holding.held, app))
            })
            .collect();
        waiting.sort_unstable();
        // One that has half and is to leave room for others is passed over; everyone else is waited for.
        let mut in_turn = waiting.into_iter();
        let (_, _, bytes, held, app) = in_turn.find(|(_, _, bytes, held, app)| {
            let is_passed_over = self.is_greedy(*held, *bytes)
                && *bytes <= self.free
                && self.needed(app, *held, *bytes) > self.free;
            !is_passed_over
        })?;
        if self.needed(app, held, bytes) > self.free {
            return None;
        }
        let app = app.clone();
        let holding = self.readers.get_mut(&app)?;
        let waiter = holding.waiting.pop_front()?;
        self.give(&app, bytes);
        self.waiting -= 1;
        Some((waiter, app))
    }
}

/// The less one holds by its weight, the sooner it is served.
fn turn(held: u64, weight: u32) -> u64 {
    held / u64::from(weight.max(1))
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut locked = self.line.0.lock();
        let state = &mut *locked;
        state.free += self.bytes;
        if let Some(holding) = state.readers.get_mut(&self.app) {
            holding.held -= self.bytes;
            if self.app.is_some() && self.bytes > 0 && holding.held == 0 {
                state.holders -= 1;
            }
            if holding.held == 0 && holding.waiting.is_empty() {
                state.readers.remove(&self.app);
            }
        }
        let is_wanted = state.waiting > 0;
        drop(locked);
        if is_wanted {
            self.line.serve();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.receiver.close();
        drop(self.receiver.try_recv());
        self.line.serve();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use futures::future::BoxFuture;

    use super::*;

    fn reader(name: &str, weight: u32) -> Reader {
        Reader { app: Some(AppId::parse(name).unwrap()), weight }
    }

    fn waiting(line: &Arc<Line>, reader: &Reader, bytes: u64) -> BoxFuture<'static, Permit> {
        let (line, reader) = (Arc::clone(line), reader.clone());
        let mut waiting = async move { line.take(&reader, bytes).await }.boxed();
        assert!((&mut waiting).now_or_never().is_none(), "it has to wait");
        waiting
    }

    fn is_served(waiting: &mut BoxFuture<'static, Permit>) -> Option<Permit> {
        waiting.now_or_never()
    }

    #[test]
    fn n8_an_application_that_takes_all_it_can_leaves_room_for_another() {
        let line = Line::new(160);
        let (flood, honest) = (reader("flood", 1), reader("honest", 1));
        let held: Vec<_> = std::iter::from_fn(|| line.try_take(&flood, 10)).collect();
        assert_eq!(held.len(), 14);
        let next = waiting(&line, &flood, 10);
        assert!(line.try_take(&honest, 20).is_none(), "others wait");
        let small = line.take(&honest, 20).now_or_never();
        assert!(small.is_some(), "but it is its turn");
        drop(small);
        drop((next, held));
        assert_eq!(line.0.lock().free, 160);
    }

    #[test]
    fn n8_several_applications_that_take_all_they_can_leave_room_for_one_that_holds_nothing() {
        let line = Line::new(160);
        let crowd: Vec<_> = ["a", "b", "c"].iter().map(|name| reader(name, 1)).collect();
        let mut held = Vec::new();
        loop {
            let before = held.len();
            held.extend(crowd.iter().filter_map(|reader| line.try_take(reader, 10)));
            if held.len() == before {
                break;
            }
        }
        assert_eq!(held.len(), 14, "seven eighths");
        let queued: Vec<_> = crowd.iter().map(|reader| waiting(&line, reader, 10)).collect();
        let honest = reader("honest", 1);
        for _ in 0..9 {
            let answer = line.take(&honest, 20).now_or_never();
            assert!(answer.is_some(), "one answer at a time goes on");
        }
        assert!(queued.len() == 3 && line.0.lock().holders == 3);
        drop((queued, held));
        let state = line.0.lock();
        assert_eq!((state.free, state.holders, state.readers.len()), (160, 0, 0));
    }

    #[test]
    fn f8_places_of_readers_that_do_not_read_leave_some_for_another_application() {
        let line = Line::new(32);
        let (hog, honest) = (reader("hog", 1), reader("honest", 1));
        let held: Vec<_> = std::iter::from_fn(|| line.try_take(&hog, 1)).collect();
        assert_eq!(held.len(), 28);
        let queued: Vec<_> = (0..30).map(|_| waiting(&line, &hog, 1)).collect();
        let mut place = line.take(&honest, 1).now_or_never().expect("an eighth is kept");
        for _ in 0..9 {
            let mut next = waiting(&line, &honest, 1);
            drop(place);
            place = is_served(&mut next).expect("it holds nothing any more");
        }
        drop((queued, held, place));
        let state = line.0.lock();
        assert_eq!((state.free, state.waiting, state.readers.len()), (32, 0, 0));
    }

    #[test]
    fn of_one_place_or_none_nothing_is_kept() {
        let (one, other) = (reader("one", 1), reader("other", 1));
        drop(waiting(&Line::new(0), &one, 1));
        let line = Line::new(1);
        let place = line.try_take(&one, 1).expect("it is free");
        let mut next = waiting(&line, &other, 1);
        drop(place);
        assert!(is_served(&mut next).is_some());
    }

    #[test]
    fn an_application_alone_takes_nearly_all_and_of_two_a_large_request_is_waited_for() {
        let line = Line::new(160);
        let (one, other) = (reader("one", 1), reader("other", 1));
        let mut held: Vec<_> = std::iter::from_fn(|| line.try_take(&one, 10)).collect();
        assert_eq!(held.len(), 14);
        held.truncate(8);
        let of_other = line.try_take(&other, 10).unwrap();
        // 70 are free, of which 20 are kept.
        let mut large = waiting(&line, &other, 60);
        let mut small = waiting(&line, &one, 10);
        held.pop();
        let large = is_served(&mut large).expect("80 are free");
        assert!(is_served(&mut small).is_none());
        drop(large);
        assert!(is_served(&mut small).is_some());
        drop(of_other);
    }

    #[test]
    fn of_those_that_wait_the_one_that_holds_least_is_next_not_the_first() {
        let line = Line::new(128);
        let (flood, other, heavy) = (reader("flood", 1), reader("other", 1), reader("heavy", 4));
        let whole = line.try_take(&Reader { app: None, weight: 1 }, 32).unwrap();
        let mut held = vec![line.try_take(&flood, 30).unwrap(), line.try_take(&flood, 10).unwrap()];
        let of_heavy = line.try_take(&heavy, 40).unwrap();
        let mut of_flood = waiting(&line, &flood, 10);
        let mut first = waiting(&line, &other, 30);
        let mut second = waiting(&line, &other, 10);
        let mut third = waiting(&line, &heavy, 10);
        drop(held.pop());
        assert!(is_served(&mut first).is_none(), "it is next, and waited for until there is room");
        drop(held.pop());
        let first = is_served(&mut first).unwrap();
        let of_flood = is_served(&mut of_flood);
        assert!(of_flood.is_some(), "it holds nothing any more");
        assert!(is_served(&mut third).is_none(), "what is left is for those that hold nothing");
        drop(of_flood);
        let third = is_served(&mut third);
        assert!(third.is_some(), "by weight it holds 10, the other 30");
        assert!(is_served(&mut second).is_none());
        drop(of_heavy);
        assert!(is_served(&mut second).is_some());
        drop((whole, first, third));
        let state = line.0.lock();
        assert!(state.readers.is_empty());
        assert_eq!((state.free, state.holders), (128, 0));
    }

    #[test]
    fn one_that_waits_no_more_holds_nothing_up() {
        let line = Line::new(100);
        let (a, b) = (reader("a", 1), reader("b", 1));
        let held = line.try_take(&Reader { app: None, weight: 1 }, 90).unwrap();
        let large = waiting(&line, &a, 50);
        let mut small = waiting(&line, &b, 10);
        assert!(line.try_take(&b, 10).is_none(), "others wait");
        drop(large);
        assert!(is_served(&mut small).is_some());
        // Served, and dropped before it was looked at.
        let unseen = waiting(&line, &a, 50);
        drop(held);
        drop(unseen);
        let state = line.0.lock();
        assert_eq!((state.free, state.waiting), (100, 0));
    }
}
