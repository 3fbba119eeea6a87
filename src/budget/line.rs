//! Fair wait queue for parts of a bounded amount that are held for long: read memory, and local
//! responses that wait for their socket. The waiting application that holds least by its weight is
//! served next.
//!
//! Memory and a [`ReadPermits`] permit are granted together. A read holds no disk share while it
//! waits for memory, and no memory while it waits for a disk. A waiter whose share is full is
//! skipped, and so are later waiters for the same share.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use uniffle_io::{ReadPermit, ReadPermits};

use uniffle_wire::types::AppId;

/// A waiter is dropped only together with its `QueueEntry`.
const PLACED: &str = "its place is held";

/// Attempts to serve the next waiter before leaving it to the next release.
const LOOKS_MAX: usize = 4;

/// Fraction of the whole that is reserved for applications that hold nothing.
const NEWCOMERS_PART: u64 = 8;

/// The reader that a part is taken for.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    /// Application of the reader, or `None` for the worker's own reads.
    pub(crate) app: Option<AppId>,
    /// Weight in fair sharing, at least 1.
    pub(crate) weight: u32,
}

/// A bounded amount with a wait queue.
///
/// While nobody waits, everyone gets free capacity except the last eighth. The eighth is for
/// applications that hold nothing yet: their reader starts at once and continues with one response
/// at a time, however slow the others are. A single application may use the eighth until it holds
/// half. Requests of one application are served in order. Capacity is collected for the next
/// waiter, or large requests would never be served.
#[derive(Debug)]
pub(crate) struct Line(Mutex<State>);

#[derive(Debug)]
struct State {
    capacity: u64,
    free: u64,
    readers: HashMap<Option<AppId>, Holding>,
    /// Number of applications that hold something.
    holders: usize,
    waiting: usize,
    /// At least one waiter lacks bytes, not only a share of its [`ReadPermits`].
    is_short: bool,
    arrivals: u64,
}

/// Holdings and waiters of one application.
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

/// The granted bytes, with the read permit that was requested.
pub(crate) type Given = (Permit, Option<ReadPermit>);

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiter").field(&self.bytes).field(&self.arrival).finish_non_exhaustive()
    }
}

/// Bytes taken from the line. They are released on drop.
#[derive(Debug)]
pub(crate) struct Permit {
    line: Arc<Line>,
    app: Option<AppId>,
    bytes: u64,
}

/// A waiter that is being served.
struct Next {
    app: Option<AppId>,
    waiter: Waiter,
    held: Option<ReadPermit>,
}

/// A place in the queue. Dropping it leaves the queue.
struct QueueEntry {
    line: Arc<Line>,
    receiver: oneshot::Receiver<Given>,
}

impl Line {
    pub(crate) fn new(capacity: u64) -> Arc<Self> {
        let (free, readers) = (capacity, HashMap::new());
        let state = State { capacity, free, readers, holders: 0, waiting: 0, is_short: false, arrivals: 0 };
        Arc::new(Self(Mutex::new(state)))
    }

    /// Takes `bytes` for `reader` if they are available without waiting.
    pub(crate) fn try_take(self: &Arc<Self>, reader: &Reader, bytes: u64) -> Option<Permit> {
        let (permit, _) = self.try_take_with(reader, bytes, None)?;
        Some(permit)
    }

    /// Waits for `bytes` for `reader`; at most half of the whole.
    pub(crate) async fn take(self: &Arc<Self>, reader: &Reader, bytes: u64) -> Permit {
        self.take_with(reader, bytes, None).await.0
    }

    /// Takes `bytes` for `reader` and a permit of `turn` if both are available without waiting.
    pub(crate) fn try_take_with(
        self: &Arc<Self>,
        reader: &Reader,
        bytes: u64,
        turn: Option<&dyn ReadPermits>,
    ) -> Option<Given> {
        let held = self.0.lock().take_at_once(reader, bytes, turn)?;
        Some((self.permit(&reader.app, bytes), held))
    }

    /// Waits until `bytes` and a permit of `turn` are available for `reader`, and takes both.
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
        let mut place = QueueEntry { line: Arc::clone(self), receiver };
        self.serve();
        let Some(turn) = turn else { return (&mut place.receiver).await.expect(PLACED) };
        loop {
            // A released share may be used outside this line, where a release does not serve this
            // queue.
            tokio::select! {
                biased;
                given = &mut place.receiver => return given.expect(PLACED),
                () = turn.freed() => self.serve(),
            }
        }
    }

    /// Returns whether someone waits for more than a share of a disk.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.lock().is_short
    }

    /// Returns whether someone waits, even if only for a share of a disk.
    pub(crate) fn has_waiting(&self) -> bool {
        self.0.lock().waiting > 0
    }

    fn permit(self: &Arc<Self>, app: &Option<AppId>, bytes: u64) -> Permit {
        Permit { line: Arc::clone(self), app: app.clone(), bytes }
    }

    /// Grants free capacity to the waiters that are next.
    fn serve(self: &Arc<Self>) {
        loop {
            let Some(Next { app, waiter, held }) = self.0.lock().next() else { return };
            // Sent outside the lock: without a receiver, the dropped permit releases its bytes,
            // which takes the lock.
            let _ = waiter.give.send((self.permit(&app, waiter.bytes), held));
        }
    }
}

impl State {
    /// Takes everything or nothing. Returns the permit if `turn` was given.
    fn take_at_once(
        &mut self,
        reader: &Reader,
        bytes: u64,
        turn: Option<&dyn ReadPermits>,
    ) -> Option<Option<ReadPermit>> {
        // Waiters for a share are ahead of newcomers that want the same share.
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

    /// Returns the capacity that must be free so that an application holding `held` gets `bytes`
    /// more.
    fn needed(&self, app: &Option<AppId>, held: u64, bytes: u64) -> u64 {
        let is_newcomer = held == 0 || app.is_none();
        let is_alone = self.holders <= 1;
        let is_kept = !is_newcomer && (!is_alone || self.is_greedy(held, bytes));
        bytes + if is_kept { self.capacity / NEWCOMERS_PART } else { 0 }
    }

    /// Returns whether an application holding `held` would exceed half of the whole with `bytes`
    /// more.
    fn is_greedy(&self, held: u64, bytes: u64) -> bool {
        held + bytes > self.capacity / 2
    }

    /// Records `bytes` for a known reader.
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
        // Assumed until `next` has checked.
        self.is_short = true;
        let arrival = self.arrivals;
        self.holding(reader).waiting.push_back(Waiter { arrival, ..waiter });
    }

    /// Removes the next waiter from the queue and takes its request, if everything is available.
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
        // A user of the share outside this line may be faster; then the share is full.
        (0..LOOKS_MAX).find_map(|_| self.take_next())
    }

    /// Removes the next waiter from the queue and takes its request. Returns `None` if there is not
    /// enough, or not any longer.
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
        // Assumed until the other waiters have been checked.
        self.is_short = self.waiting > 0;
        Some(Next { app, waiter, held })
    }

    /// Returns the application that is next and the index of its waiter. Returns `None` if there is
    /// not enough.
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
            // An application that has half and must leave room for others is skipped. For any
            // other, capacity is collected.
            if !(self.is_greedy(holding.held, bytes) && bytes <= self.free) {
                return None;
            }
        }
        None
    }
}

impl Holding {
    /// Returns the first waiter whose shares have room. `full` contains the shares that earlier
    /// waiters need.
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

/// Returns the rank of an application: the less it holds by its weight, the sooner it is served.
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

impl Drop for QueueEntry {
    fn drop(&mut self) {
        self.receiver.close();
        drop(self.receiver.try_recv());
        self.line.serve();
    }
}

#[cfg(test)]
mod tests;
