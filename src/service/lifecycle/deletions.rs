//! Deletion of removed shuffles' data, with bounded concurrency in each tier.
//!
//! Applications end when their clients unregister them or when they expire. Thousands may end
//! together if a cluster of clients disappears. Each end leaves files to delete. Invariants: a tier
//! has at most [`AT_ONCE`] deletion tasks, however many applications ended; deletions begin in the
//! order of the ends; tiers do not wait for each other.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use crate::runtime::Tasks;

/// Maximum number of concurrent deletions of a tier. A local deletion removes all ready files, one
/// at a time per disk. A deletion in a remote store waits for its responses.
const AT_ONCE: usize = 16;

type Deletion = BoxFuture<'static, ()>;

/// Deletion queues of all tiers.
#[derive(Debug)]
pub(super) struct Deletions {
    queues: Vec<Arc<TierDeletions>>,
    tasks: Tasks,
}

#[derive(Default)]
struct TierDeletions(Mutex<State>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Deletion>,
    /// Number of tasks that process the queue.
    tasks: usize,
}

impl std::fmt::Debug for TierDeletions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TierDeletions").finish_non_exhaustive()
    }
}

impl Deletions {
    /// Creates queues for `tiers` tiers.
    pub(super) fn new(tiers: usize, tasks: Tasks) -> Self {
        Self { queues: (0..tiers).map(|_| Arc::default()).collect(), tasks }
    }

    /// Queues `deletion` for the tier with index `tier`.
    pub(super) fn add(&self, tier: usize, deletion: Deletion) {
        let Some(queue) = self.queues.get(tier) else { return };
        if !queue.add(deletion) {
            return;
        }
        let queue = Arc::clone(queue);
        self.tasks.spawn("delete shuffle files", async move {
            while let Some(next) = queue.next() {
                // A panic is counted and logged as that of a task; the other deletions continue.
                let _panic = AssertUnwindSafe(next).catch_unwind().await;
            }
        });
    }
}

impl TierDeletions {
    /// Queues a deletion. Returns whether another task is needed.
    fn add(&self, deletion: Deletion) -> bool {
        let mut state = self.0.lock();
        state.waiting.push_back(deletion);
        let is_wanted = state.tasks < AT_ONCE;
        state.tasks += usize::from(is_wanted);
        is_wanted
    }

    /// Returns the next deletion for a task, which ends if there is none.
    fn next(&self) -> Option<Deletion> {
        let mut state = self.0.lock();
        let next = state.waiting.pop_front();
        state.tasks -= usize::from(next.is_none());
        next
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;
    use uniffle_testkit::eventually;

    use super::*;

    #[tokio::test]
    async fn deletions_run_in_few_tasks_and_independent_tiers() {
        let (tasks, allowed, done) =
            (Tasks::new(), Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
        let deletions = Deletions::new(2, tasks.clone());
        for number in 0..3000 {
            let (allowed, done) = (Arc::clone(&allowed), Arc::clone(&done));
            let deletion = async move {
                allowed.acquire().await.unwrap().forget();
                done.fetch_add(1, Ordering::Relaxed);
                assert!(number % 7 > 0, "deliberate panic of a deletion");
            };
            deletions.add(0, deletion.boxed());
        }
        let other = Arc::clone(&done);
        let unhindered = async move {
            other.fetch_add(1, Ordering::Relaxed);
        };
        deletions.add(1, unhindered.boxed());
        assert_eq!(tasks.running(), AT_ONCE + 1);
        let one_is_done = || match done.load(Ordering::Relaxed) {
            0 => Err("no deletion is done".to_owned()),
            _ => Ok(()),
        };
        eventually("the deletion of the other tier is done", one_is_done).await;
        allowed.add_permits(3000);
        tasks.drained().await;
        assert_eq!(done.load(Ordering::Relaxed), 3001);
        // The queue starts tasks again after it was empty.
        deletions.add(0, async {}.boxed());
        assert_eq!(tasks.running(), 1);
    }
}
