//! Tasks of one shuffle that committed, and whose turn it is to flush for them: clients of storage types without MEMORY
//! wait for that before they report (docs/protocol.md §2.6).
//!
//! Commits that come while one flushes are served by the next flush together, so that a wave of tasks that end makes two
//! extents per partition and not one per task.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use tokio::sync::Mutex;

/// How many tasks committed, and which flush serves the next of them.
#[derive(Debug, Default)]
pub struct Commits {
    count: AtomicI32,
    /// Calls of [`Commits::flushed`] that have begun.
    arrived: AtomicU64,
    /// Of these, how many a flush began after and ended well. Held while one flushes.
    served: Mutex<u64>,
}

impl Commits {
    /// Waits until a flush that began after this call has ended well: another's, or `flush`, one at a time.
    ///
    /// # Errors
    /// That of `flush`.
    pub async fn flushed<E>(&self, flush: impl Future<Output = Result<(), E>>) -> Result<(), E> {
        let mine = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        let mut served = self.served.lock().await;
        if *served >= mine {
            return Ok(());
        }
        let all = self.arrived.load(Ordering::Acquire);
        flush.await?;
        *served = all;
        Ok(())
    }

    /// Counts a task; returns how many have committed with it. A task that commits again counts again, as in Java.
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
            gone.await.map_err(|_| "never told")?;
            Ok::<_, &str>(())
        });
        let mut first = std::pin::pin!(first);
        assert!(futures::poll!(&mut first).is_pending());
        let flush = || async {
            // The one that is at work does not count for those who came after it began.
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
        assert_eq!(flushes.load(Ordering::Relaxed), 2, "one fails, one is for the other four");
        assert_eq!((commits.count_one(), commits.count_one()), (1, 2));
    }
}
