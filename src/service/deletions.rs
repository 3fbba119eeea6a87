//! Deletions of what was forgotten, some at a time in each tier.
//!
//! Applications end when their clients say so and when they were silent for too long, thousands of them together if a cluster of
//! clients goes away. Each end leaves files to be deleted. Invariants: a tier has at most [`AT_ONCE`] tasks for that, however many
//! ended; deletions begin in the order of the ends; one tier does not wait for another.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use crate::runtime::Tasks;

/// Deletions of a tier under way. Local ones are of all that is ready, a file at a time for each disk; of a remote store they are
/// questions to be answered.
const AT_ONCE: usize = 16;

type Deletion = BoxFuture<'static, ()>;

/// Those of all tiers.
#[derive(Debug)]
pub(super) struct Deletions {
    lanes: Vec<Arc<Lane>>,
    tasks: Tasks,
}

#[derive(Default)]
struct Lane(Mutex<State>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Deletion>,
    /// Tasks that work them off.
    tasks: usize,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").finish_non_exhaustive()
    }
}

impl Deletions {
    /// For so many tiers.
    pub(super) fn new(tiers: usize, tasks: Tasks) -> Self {
        Self { lanes: (0..tiers).map(|_| Arc::default()).collect(), tasks }
    }

    /// Has `deletion` done when it is its turn.
    pub(super) fn add(&self, tier: usize, deletion: Deletion) {
        let Some(lane) = self.lanes.get(tier) else { return };
        if !lane.add(deletion) {
            return;
        }
        let lane = Arc::clone(lane);
        self.tasks.spawn("delete shuffle files", async move {
            while let Some(next) = lane.next() {
                // It is counted and logged as that of a task; the others go on.
                let _panic = AssertUnwindSafe(next).catch_unwind().await;
            }
        });
    }
}

impl Lane {
    /// Whether another task is to work.
    fn add(&self, deletion: Deletion) -> bool {
        let mut state = self.0.lock();
        state.waiting.push_back(deletion);
        let is_wanted = state.tasks < AT_ONCE;
        state.tasks += usize::from(is_wanted);
        is_wanted
    }

    /// For a task, which ends when there is none.
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
                assert!(number % 7 > 0, "on purpose");
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
            0 => Err("it is not".to_owned()),
            _ => Ok(()),
        };
        eventually("that of the other tier is done", one_is_done).await;
        allowed.add_permits(3000);
        tasks.drained().await;
        assert_eq!(done.load(Ordering::Relaxed), 3001);
        // And from the beginning.
        deletions.add(0, async {}.boxed());
        assert_eq!(tasks.running(), 1);
    }
}
