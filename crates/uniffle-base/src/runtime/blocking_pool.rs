//! A bounded pool for work that is too long for a runtime thread.
//!
//! A job on a blocking thread cannot be cancelled. It continues after its caller is dropped and the
//! caller's memory charges are released. The permit therefore belongs to the job, not to the
//! caller, and only a job with a permit occupies a thread.
//!
//! Invariant: the number of running jobs never exceeds the number of permits, even if callers are
//! dropped. If a caller is dropped while it waits for a permit, its job never starts.

use std::num::NonZero;
use std::sync::Arc;

use tokio::task::{JoinError, spawn_blocking};
use uniffle_wire::types::AppId;

use crate::sched::{FairSemaphore, Holder, Reserve};

/// Permits of one listener or service, fair between applications. Clones share them.
#[derive(Debug, Clone)]
pub struct BlockingPool(Arc<FairSemaphore>);

impl BlockingPool {
    /// Creates a pool that runs at most `permits` jobs at once.
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self(FairSemaphore::new(permits as u64, Reserve::None))
    }

    /// Creates a pool of one permit per core, from 2 to 8. More jobs than cores would not finish
    /// any sooner.
    #[must_use]
    pub fn sized_by_cores() -> Self {
        Self::new(std::thread::available_parallelism().map_or(2, NonZero::get).clamp(2, 8))
    }

    /// Runs `work` on a blocking thread once a permit is free. All callers without an application
    /// count as one application, and are served in order.
    ///
    /// # Errors
    /// If `work` panicked, or the runtime is shutting down.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        self.run_for(None, work).await
    }

    /// Runs `work` of `app` like [`BlockingPool::run`]. The next free permit goes to the waiting
    /// application that holds the fewest permits.
    ///
    /// # Errors
    /// See [`BlockingPool::run`].
    pub async fn run_for<T: Send + 'static>(
        &self,
        app: Option<AppId>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let permit = self.0.acquire(&Holder { app, weight: 1 }, 1).await;
        let work = move || {
            let _permit = permit;
            work()
        };
        spawn_blocking(work).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn started_work_survives_its_caller_and_waiters_do_not() {
        let (pool, started, finish) =
            (BlockingPool::new(1), Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(2)));
        let work = |started: &Arc<AtomicUsize>| {
            let (started, finish) = (Arc::clone(started), Arc::clone(&finish));
            move || {
                started.fetch_add(1, Ordering::SeqCst);
                finish.wait();
            }
        };
        let mut first = Box::pin(pool.run(work(&started)));
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        for _ in 0..100 {
            let mut next = Box::pin(pool.run(work(&started)));
            assert!(futures::poll!(&mut next).is_pending());
        }
        finish.wait();
        assert_eq!(pool.run(|| 1).await.unwrap(), 1);
        assert_eq!(started.load(Ordering::SeqCst), 1, "a cancelled waiter must not run its work");
    }

    #[tokio::test]
    async fn permits_are_fair_between_applications() {
        let (pool, finish) = (BlockingPool::new(1), Arc::new(Barrier::new(2)));
        let app = |name| AppId::parse(name).ok();
        let running = Arc::clone(&finish);
        let mut first = Box::pin(pool.run_for(app("many"), move || {
            running.wait();
        }));
        assert!(futures::poll!(&mut first).is_pending());
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let work = |name| {
            let order = Arc::clone(&order);
            pool.run_for(app(name), move || order.lock().push(name))
        };
        let mut waiting: Vec<_> =
            ["many", "many", "many", "other"].into_iter().map(|name| Box::pin(work(name))).collect();
        for wait in &mut waiting {
            assert!(futures::poll!(wait).is_pending());
        }
        finish.wait();
        first.await.unwrap();
        for ran in futures::future::join_all(waiting).await {
            ran.unwrap();
        }
        // Neither holds the only permit when it is returned, so they take turns, `many` first.
        assert_eq!(*order.lock(), ["many", "other", "many", "many"]);
    }
}
