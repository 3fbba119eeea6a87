//! Work that may be too long for a runtime thread, on blocking threads, a bounded number at once.
//!
//! Work on a blocking thread ends by itself: a caller that goes does not take it along, and what it holds is charged to nobody by
//! then. So there are places, which the work has and not its caller. Invariant: however many callers come and go, no more work runs
//! than there are places, and none waits for a thread that others need. Who waits for a place holds what is charged to it, and gives
//! both up when it goes.

use std::num::NonZero;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

/// Places of one listener or service. Clones share them.
#[derive(Debug, Clone)]
pub struct Aside(Arc<Semaphore>);

impl Aside {
    /// So many at once.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self(Arc::new(Semaphore::new(places)))
    }

    /// As many as there are cores, from 2 to 8: more would not be done any sooner.
    #[must_use]
    pub fn of_cores() -> Self {
        Self::new(std::thread::available_parallelism().map_or(2, NonZero::get).clamp(2, 8))
    }

    /// Does `work` when there is a place.
    ///
    /// # Errors
    /// It panicked, or the runtime ends.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        // It is never closed.
        let place = Arc::clone(&self.0).acquire_owned().await;
        let work = move || {
            let _place = place;
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
        let (aside, begun, ended) = (Aside::new(1), Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(2)));
        let work = |begun: &Arc<AtomicUsize>| {
            let (begun, ended) = (Arc::clone(begun), Arc::clone(&ended));
            move || {
                begun.fetch_add(1, Ordering::SeqCst);
                ended.wait();
            }
        };
        let mut first = Box::pin(aside.run(work(&begun)));
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        for _ in 0..100 {
            let mut next = Box::pin(aside.run(work(&begun)));
            assert!(futures::poll!(&mut next).is_pending());
        }
        ended.wait();
        assert_eq!(aside.run(|| 1).await.unwrap(), 1);
        assert_eq!(begun.load(Ordering::SeqCst), 1, "of those that went while they waited none was done");
    }
}
