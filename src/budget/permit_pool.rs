//! A number of permits with a fair wait queue: applications alternate, so one with a hundred
//! requests precedes another by only one.
//!
//! Permits are collected for the next waiter, or large requests would never be served. Invariant: a
//! dropped waiter returns a grant that it has not received. The order is decided in `rounds`.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::rounds::Rounds;
use uniffle_wire::types::AppId;

/// Free permits and their wait queue.
#[derive(Debug)]
pub struct PermitPool {
    state: Mutex<State>,
    all: usize,
    /// Notifies waiters that need more than permits of this queue.
    freed: Notify,
}

#[derive(Debug)]
struct State {
    free: usize,
    waiting: Rounds<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    count: usize,
    /// Sender of the grant. `None` once it was granted.
    give: Option<oneshot::Sender<()>>,
}

/// Permits that were taken. They are free again on drop.
#[derive(Debug)]
#[must_use = "dropped permits are free at once"]
pub struct PermitGuard {
    places: Arc<PermitPool>,
    count: usize,
}

/// A waiting request. On drop, a grant that was not received becomes free again.
struct Wait<'a> {
    places: &'a PermitPool,
    app: &'a AppId,
    number: u64,
    count: usize,
    given: oneshot::Receiver<()>,
}

impl PermitPool {
    /// Creates `all` permits, all of them free.
    #[must_use]
    pub fn new(all: usize) -> Arc<Self> {
        let state = Mutex::new(State { free: all, waiting: Rounds::default() });
        Arc::new(Self { state, all, freed: Notify::new() })
    }

    /// Waits for `count` permits (or all there are) until it is the turn of `app`.
    pub async fn take(self: &Arc<Self>, app: &AppId, count: usize) -> PermitGuard {
        let count = self.counted(count);
        let mut wait = {
            let mut state = self.state.lock();
            if state.take_at_once(count) {
                return PermitGuard { places: Arc::clone(self), count };
            }
            let (give, given) = oneshot::channel();
            let number = state.waiting.enter(app, Waiter { count, give: Some(give) });
            Wait { places: self, app, number, count, given }
        };
        let given = (&mut wait.given).await;
        debug_assert!(given.is_ok(), "a waiter is dropped only when its wait is");
        PermitGuard { places: Arc::clone(self), count }
    }

    /// Takes `count` permits (or all there are) if they are available without waiting.
    #[must_use]
    pub fn try_take(self: &Arc<Self>, count: usize) -> Option<PermitGuard> {
        let count = self.counted(count);
        let is_given = self.state.lock().take_at_once(count);
        is_given.then(|| PermitGuard { places: Arc::clone(self), count })
    }

    /// Returns whether `count` permits (or all there are) could be taken now.
    #[must_use]
    pub fn has_room(&self, count: usize) -> bool {
        self.state.lock().has_room(self.counted(count))
    }

    /// Waits until permits are free that no waiter in [`PermitPool::take`] needs. One of several
    /// callers is woken.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Releases `count` permits.
    fn give_back(&self, count: usize) {
        let mut state = self.state.lock();
        state.free += count;
        state.serve();
        let is_free = state.has_room(1);
        drop(state);
        if is_free {
            self.freed.notify_one();
        }
    }

    /// Limits `count` to the total, but to at least one: without any permits, everyone waits.
    fn counted(&self, count: usize) -> usize {
        count.min(self.all).max(1)
    }
}

impl State {
    fn has_room(&self, count: usize) -> bool {
        self.waiting.is_empty() && count <= self.free
    }

    fn take_at_once(&mut self, count: usize) -> bool {
        let is_given = self.has_room(count);
        self.free -= if is_given { count } else { 0 };
        is_given
    }

    /// Grants free permits in turn. Permits are collected for the next waiter, or large requests
    /// would never be served.
    fn serve(&mut self) {
        let Self { free, waiting } = self;
        waiting.serve_in_order(|_, Waiter { count, give }| {
            if *count > *free {
                return false;
            }
            // A cancelled waiter takes nothing.
            if give.take().is_some_and(|give| give.send(()).is_ok()) {
                *free -= *count;
            }
            true
        });
    }
}

impl Drop for PermitGuard {
    fn drop(&mut self) {
        self.places.give_back(self.count);
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut state = self.places.state.lock();
        state.waiting.leave(self.app, self.number);
        // Checked under the lock: the grant has been sent already or never will be. A grant that
        // was awaited is not received again.
        let unused = if self.given.try_recv().is_ok() { self.count } else { 0 };
        drop(state);
        self.places.give_back(unused);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn app(name: &str) -> AppId {
        AppId::parse(name).unwrap()
    }

    #[tokio::test]
    async fn permits_are_exhausted_and_returned() {
        let places = PermitPool::new(3);
        let a = app("a");
        let first = places.take(&a, 2).await;
        assert!(places.has_room(1) && !places.has_room(2));
        assert!(places.try_take(2).is_none() && places.try_take(1).is_some());
        assert!(places.take(&a, usize::MAX).now_or_never().is_none());
        drop(first);
        drop(places.take(&a, usize::MAX).await);
        assert_eq!(places.state.lock().free, 3);
    }

    #[test]
    fn requests_wait_without_permits() {
        let places = PermitPool::new(0);
        assert!(places.take(&app("a"), 1).now_or_never().is_none() && places.try_take(0).is_none());
    }

    #[test]
    fn read_of_another_application_is_granted_next() {
        let places = PermitPool::new(2);
        let (hog, honest) = (app("hog"), app("honest"));
        let open = places.take(&hog, usize::MAX).now_or_never().unwrap();
        let mut hogs: Vec<_> = (0..128).map(|_| places.take(&hog, 1).boxed()).collect();
        assert!(hogs.iter_mut().all(|it| it.now_or_never().is_none()));
        let mut other = places.take(&honest, 2).boxed();
        assert!((&mut other).now_or_never().is_none());
        drop(open);
        let of_hog = hogs.remove(0).now_or_never().expect("it was first");
        assert!(hogs[0].as_mut().now_or_never().is_none(), "the next one is waited for, large as it is");
        assert!(places.try_take(1).is_none());
        drop(of_hog);
        let other = other.now_or_never().expect("it is next");
        assert!(hogs[0].as_mut().now_or_never().is_none());
        drop(other);
        // Granted, and dropped before they were polled.
        drop(hogs);
        let state = places.state.lock();
        assert_eq!((state.free, state.waiting.len()), (2, 0));
    }
}
