//! What is to be removed from one disk. Every disk has a list of its own: one that deletes slowly holds up no other.
//!
//! Invariants: no more than so many work a list off at a time, so that a disk that hangs holds no more of those that work for all
//! disks. Who comes while they do need not: they go on until nothing on the list is ready.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::shuffle::Shuffle;
use uniffle_wire::types::AppId;

/// Two, so that the list of one disk is worked off while a shuffle of it waits for a file that is being created on another.
const WORKERS_MAX: usize = 2;

/// The list of one disk.
#[derive(Debug, Default)]
pub(super) struct Deletes(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Shuffles whose directories there are to go.
    shuffles: VecDeque<Arc<Shuffle>>,
    /// Apps whose directories there are to go if nothing is left in them.
    apps: HashSet<AppId>,
    workers: usize,
}

impl Deletes {
    pub(super) fn add(&self, shuffle: Arc<Shuffle>) {
        self.0.lock().shuffles.push_back(shuffle);
    }

    /// For one who works the list off; none while enough others do, who see to `app`, too.
    pub(super) fn begin(&self, app: Option<&AppId>) -> Option<Deleting<'_>> {
        let mut state = self.0.lock();
        state.apps.extend(app.cloned());
        if state.workers == WORKERS_MAX {
            return None;
        }
        state.workers += 1;
        let (left, failed) = (VecDeque::new(), VecDeque::new());
        Some(Deleting { list: self, left, failed, is_counted: true })
    }
}

/// One who works a list off. What is left of what it took goes back when this is dropped, so that a cancelled purge forgets
/// nothing but empty directories of apps, which a sweep finds.
#[derive(Debug)]
pub(super) struct Deleting<'a> {
    list: &'a Deletes,
    left: VecDeque<Arc<Shuffle>>,
    /// Not to be tried again by this one.
    failed: VecDeque<Arc<Shuffle>>,
    is_counted: bool,
}

impl Deleting<'_> {
    /// Takes every shuffle on the list that `is_ready`; what is not there meanwhile is [`Deleting::next`]. Gives the apps; none
    /// when there is nothing, and then it is over.
    pub(super) fn take(&mut self, is_ready: impl Fn(&Shuffle) -> bool) -> Option<HashSet<AppId>> {
        let mut state = self.list.0.lock();
        state.shuffles.retain(|shuffle| {
            let takes = is_ready(shuffle);
            if takes {
                self.left.push_back(Arc::clone(shuffle));
            }
            !takes
        });
        if self.left.is_empty() && state.apps.is_empty() {
            // Under the lock: who finds no place is seen to by one who looks again.
            state.workers -= usize::from(std::mem::take(&mut self.is_counted));
            return None;
        }
        Some(std::mem::take(&mut state.apps))
    }

    /// Of what was taken.
    pub(super) fn next(&self) -> Option<Arc<Shuffle>> {
        self.left.front().map(Arc::clone)
    }

    /// The next one is done with.
    pub(super) fn done(&mut self, is_removed: bool) {
        let next = self.left.pop_front();
        self.failed.extend(next.filter(|_| !is_removed));
    }
}

impl Drop for Deleting<'_> {
    fn drop(&mut self) {
        let mut state = self.list.0.lock();
        state.shuffles.append(&mut self.failed);
        state.shuffles.append(&mut self.left);
        state.workers -= usize::from(self.is_counted);
    }
}
