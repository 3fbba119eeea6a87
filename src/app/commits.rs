//! Committed tasks of one shuffle, and the coalescing of their flushes. With a storage type without
//! MEMORY, a client commits a task before it reports the task, and waits until the task's blocks
//! are flushed (docs/protocol.md §2.6).
//!
//! Commits that arrive during a flush share the next flush. If all tasks end at the same time, a
//! partition therefore gets two extents instead of one per task.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use tokio::sync::Mutex;

/// Number of committed tasks, and the state that lets them share flushes.
#[derive(Debug, Default)]
pub struct Commits {
    count: AtomicI32,
    /// Number of calls of [`Commits::flushed`] that have begun.
    arrived: AtomicU64,
    /// Number of those calls that a successful flush covers: it began after them. Locked during a
    /// flush.
    served: Mutex<u64>,
}

impl Commits {
    /// Waits until a flush that began after this call has succeeded. The flush is either another
    /// caller's or `flush`; only one runs at a time.
    ///
    /// # Errors
    /// Returns the error of `flush`.
    pub async fn flushed<E>(&self, flush: impl Future<Output = Result<(), E>>) -> Result<(), E> {
        let number = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        let mut served = self.served.lock().await;
        if *served >= number {
            return Ok(());
        }
        let all = self.arrived.load(Ordering::Acquire);
        flush.await?;
        *served = all;
        Ok(())
    }

    /// Counts a committed task. Returns the number of commits including this one. A task that
    /// commits again counts again, as in Java.
    pub fn count_one(&self) -> i32 {
        let before =
            self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_add(1));
        before.map_or(i32::MAX, |before| before + 1)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures::future::join_all;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn waiters_share_the_next_flush_and_failures_are_retried() {
        let (commits, flushes) = (Commits::default(), AtomicUsize::new(0));
        let (go, gone) = oneshot::channel::<()>();
        let first = commits.flushed(async {
            gone.await.map_err(|_| "not released")?;
            Ok::<_, &str>(())
        });
        let mut first = std::pin::pin!(first);
        assert!(futures::poll!(&mut first).is_pending());
        let flush = || async {
            // A running flush does not serve calls that began after it.
            match flushes.fetch_add(1, Ordering::Relaxed) {
                0 => Err("a disk failed"),
                _ => Ok(()),
            }
        };
        let mut others = std::pin::pin!(join_all((0..5).map(|_| commits.flushed(flush()))));
        assert!(futures::poll!(&mut others).is_pending());
        go.send(()).unwrap();
        first.await.unwrap();
        let outcomes = others.await;
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_err()).count(), 1);
        assert_eq!(
            flushes.load(Ordering::Relaxed),
            2,
            "expected one failed flush and one for the other four callers"
        );
        assert_eq!((commits.count_one(), commits.count_one()), (1, 2));
    }
}
