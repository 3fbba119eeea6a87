//! Who waits for a part of a bounded amount that is held for long (read memory, local answers that wait for their socket), and
//! who is next: of the applications that wait, the one that holds least by its weight.
//!
//! While no one waits, everyone gets what is free, but for the last eighth: it is for applications that hold nothing yet, so that a
//! reader of another one begins at once, and goes on if it has one answer at a time, however long the others take for theirs. One
//! that is alone takes of it until it holds half. Requests of one application are served in their order. The one that is next is
//! waited for until there is room for it, or large requests would never be served.
//!
//! What is asked for together with a [`ReadPermits`] is given when both are there: a read holds no part of a disk's share while it waits for
//! memory, nor memory while it waits for a disk. One whose share is full is passed over, and with it those behind it that want of
//! the same share.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use uniffle_io::{ReadPermit, ReadPermits};

use uniffle_wire::types::AppId;

/// Who waits is dropped only when its place is.
const PLACED: &str = "its place is held";

/// Looks for the next one before it is left to the next that comes free.
const LOOKS_MAX: usize = 4;

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
    /// Of those that wait, not all only wait for the share of a [`ReadPermits`].
    is_short: bool,
    arrivals: u64,
}

/// One application.
#[derive(Debug)]
struct Holding {
    weight: u32,
    held: u64,
    waiting: VecDeque<Waiter>,
}

struct Waiter {
    bytes: u64,
    arrival: u64,
    turn: Option<Arc<dyn ReadPermits>>,
    give: oneshot::Sender<Given>,
}

/// What is given, with the turn that was asked for.
pub(crate) type Given = (Permit, Option<ReadPermit>);

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiter").field(&self.bytes).field(&self.arrival).finish_non_exhaustive()
    }
}

/// Bytes taken; back in line when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    line: Arc<Line>,
    app: Option<AppId>,
    bytes: u64,
}

/// One that is served.
struct Next {
    app: Option<AppId>,
    waiter: Waiter,
    held: Option<ReadPermit>,
}

/// A place in the line; left when dropped.
struct Place {
    line: Arc<Line>,
    receiver: oneshot::Receiver<Given>,
}

impl Line {
    pub(crate) fn new(capacity: u64) -> Arc<Self> {
        let (free, readers) = (capacity, HashMap::new());
        let state = State { capacity, free, readers, holders: 0, waiting: 0, is_short: false, arrivals: 0 };
        Arc::new(Self(Mutex::new(state)))
    }

    /// `bytes` for `reader` if no one has to wait for them.
    pub(crate) fn try_take(self: &Arc<Self>, reader: &Reader, bytes: u64) -> Option<Permit> {
        let (permit, _) = self.try_take_with(reader, bytes, None)?;
        Some(permit)
    }

    /// `bytes` for `reader` when it is its turn; at most half of the whole.
    pub(crate) async fn take(self: &Arc<Self>, reader: &Reader, bytes: u64) -> Permit {
        self.take_with(reader, bytes, None).await.0
    }

    /// `bytes` for `reader`, and a turn, if no one has to wait for either.
    pub(crate) fn try_take_with(
        self: &Arc<Self>,
        reader: &Reader,
        bytes: u64,
        turn: Option<&dyn ReadPermits>,
    ) -> Option<Given> {
        let held = self.0.lock().take_at_once(reader, bytes, turn)?;
        Some((self.permit(&reader.app, bytes), held))
    }

    /// `bytes` for `reader`, and a turn, when both are there for it.
    pub(crate) async fn take_with(
        self: &Arc<Self>,
        reader: &Reader,
        bytes: u64,
        turn: Option<Arc<dyn ReadPermits>>,
    ) -> Given {
        if let Some(given) = self.try_take_with(reader, bytes, turn.as_deref()) {
            return given;
        }
        let (give, receiver) = oneshot::channel();
        self.0.lock().enter(reader, Waiter { bytes, arrival: 0, turn: turn.clone(), give });
        let mut place = Place { line: Arc::clone(self), receiver };
        self.serve();
        let Some(turn) = turn else { return (&mut place.receiver).await.expect(PLACED) };
        loop {
            // What comes free of a share may be another one's, who is not told.
            tokio::select! {
                biased;
                given = &mut place.receiver => return given.expect(PLACED),
                () = turn.freed() => self.serve(),
            }
        }
    }

    /// Whether someone waits for more than the share of a turn.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.lock().is_short
    }

    /// Whether someone waits, be it for the share of a turn.
    pub(crate) fn has_waiting(&self) -> bool {
        self.0.lock().waiting > 0
    }

    fn permit(self: &Arc<Self>, app: &Option<AppId>, bytes: u64) -> Permit {
        Permit { line: Arc::clone(self), app: app.clone(), bytes }
    }

    /// Gives what is free to those whose turn it is.
    fn serve(self: &Arc<Self>) {
        loop {
            let Some(Next { app, waiter, held }) = self.0.lock().next() else { return };
            // Outside of the lock: what finds no receiver comes back by being dropped.
            let _ = waiter.give.send((self.permit(&app, waiter.bytes), held));
        }
    }
}

impl State {
    /// The turn, if there was one to take and everything was given.
    fn take_at_once(
        &mut self,
        reader: &Reader,
        bytes: u64,
        turn: Option<&dyn ReadPermits>,
    ) -> Option<Option<ReadPermit>> {
        // Those that wait for a share are ahead of others that want of it.
        if self.is_short || (turn.is_some() && self.waiting > 0) {
            return None;
        }
        let held = self.readers.get(&reader.app).map_or(0, |holding| holding.held);
        if self.needed(&reader.app, held, bytes) > self.free {
            return None;
        }
        let held = match turn {
            Some(turn) => Some(turn.try_take()?),
            None => None,
        };
        self.holding(reader);
        self.give(&reader.app, bytes);
        Some(held)
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

    fn enter(&mut self, reader: &Reader, waiter: Waiter) {
        self.arrivals += 1;
        self.waiting += 1;
        // Until it is known.
        self.is_short = true;
        let arrival = self.arrivals;
        self.holding(reader).waiting.push_back(Waiter { arrival, ..waiter });
    }

    /// Takes what the next one waits for, if it is there.
    fn next(&mut self) -> Option<Next> {
        self.is_short = false;
        if self.waiting == 0 {
            return None;
        }
        for holding in self.readers.values_mut() {
            let before = holding.waiting.len();
            holding.waiting.retain(|waiter| !waiter.give.is_closed());
            self.waiting -= before - holding.waiting.len();
        }
        self.readers.retain(|_, holding| holding.held > 0 || !holding.waiting.is_empty());
        // One that does not wait in this line may be quicker to a share: then it is full.
        (0..LOOKS_MAX).find_map(|_| self.take_next())
    }

    /// Takes the one whose turn it is out of the line with what it waits for; none when there is not enough, or no longer.
    fn take_next(&mut self) -> Option<Next> {
        let (app, at) = self.find()?;
        let holding = self.readers.get_mut(&app)?;
        let held = match &holding.waiting.get(at)?.turn {
            Some(turn) => Some(turn.try_take()?),
            None => None,
        };
        let waiter = holding.waiting.remove(at)?;
        self.give(&app, waiter.bytes);
        self.waiting -= 1;
        // Until it is known: the others are looked at next.
        self.is_short = self.waiting > 0;
        Some(Next { app, waiter, held })
    }

    /// Whose turn it is, and which of those that wait for that application; none when there is not enough.
    fn find(&mut self) -> Option<(Option<AppId>, usize)> {
        let mut apps: Vec<_> = self
            .readers
            .iter()
            .filter_map(|(app, holding)| {
                let first = holding.waiting.front()?;
                Some((turn(holding.held, holding.weight), first.arrival, app))
            })
            .collect();
        apps.sort_unstable();
        let mut full = SmallVec::<[usize; 8]>::new();
        for (_, _, app) in apps {
            let holding = self.readers.get(app)?;
            let Some(at) = holding.first_with_room(&mut full) else { continue };
            let bytes = holding.waiting.get(at)?.bytes;
            let needed = self.needed(app, holding.held, bytes);
            if needed <= self.free {
                return Some((app.clone(), at));
            }
            self.is_short = true;
            // One that has half and is to leave room for others is passed over; everyone else is waited for.
            if !(self.is_greedy(holding.held, bytes) && bytes <= self.free) {
                return None;
            }
        }
        None
    }
}

impl Holding {
    /// The first that waits and whose shares have room; `full` are those for which others wait, who are ahead of it.
    fn first_with_room(&self, full: &mut SmallVec<[usize; 8]>) -> Option<usize> {
        self.waiting.iter().position(|waiter| {
            let Some(turn) = &waiter.turn else { return true };
            if turn.shares().iter().any(|share| full.contains(share)) {
                return false;
            }
            let full_share = turn.full_share();
            full.extend(full_share);
            full_share.is_none()
        })
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
mod tests;
