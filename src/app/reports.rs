//! Reports of one application that are paid for and not entered yet.
//!
//! A report is charged what it costs at most. Those that come at once name the same parts of a set, and each is charged for them, though
//! only the first that is entered makes them. So while others are on their way, one that finds no heap waits for the next of them to
//! end, and is costed again; of several that wait, the first.

use parking_lot::Mutex;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

/// How many reports are paid for, and the line of those that wait for one of them to end.
#[derive(Debug)]
pub struct Reports {
    paid: Mutex<usize>,
    ended: Notify,
    line: Semaphore,
}

impl Default for Reports {
    fn default() -> Self {
        Self { paid: Mutex::default(), ended: Notify::new(), line: Semaphore::new(1) }
    }
}

/// One that is paid for; dropped, it was entered or given up.
#[derive(Debug)]
pub struct PaidReport<'a>(&'a Reports);

/// It was not paid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotPaid<E> {
    /// Why.
    pub error: E,
    /// Others that were paid for and had not ended at that moment.
    pub others: usize,
}

impl Reports {
    /// Until no other waits before.
    pub async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.line.acquire().await.ok()
    }

    /// When the next one ends, from this call on.
    pub fn ended(&self) -> Notified<'_> {
        self.ended.notified()
    }

    /// Pays for one; no other begins or ends meanwhile.
    ///
    /// # Errors
    /// What `pay` says.
    pub fn pay<T, E>(&self, pay: impl FnOnce() -> Result<T, E>) -> Result<(T, PaidReport<'_>), NotPaid<E>> {
        let mut paid = self.paid.lock();
        let taken = pay().map_err(|error| NotPaid { error, others: *paid })?;
        *paid += 1;
        Ok((taken, PaidReport(self)))
    }
}

impl Drop for PaidReport<'_> {
    fn drop(&mut self) {
        *self.0.paid.lock() -= 1;
        self.0.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn one_that_cannot_be_paid_hears_of_the_end_of_those_before() {
        let reports = Reports::default();
        assert_eq!(reports.pay(|| Err::<(), _>("no heap")).unwrap_err().others, 0);
        let (taken, first) = reports.pay(|| Ok::<_, &str>(7)).unwrap();
        assert_eq!(taken, 7);
        // It may end between the refusal and the waiting.
        let ended = reports.ended();
        assert_eq!(reports.pay(|| Err::<(), _>("no heap")).unwrap_err().others, 1);
        drop(first);
        assert_eq!(ended.now_or_never(), Some(()));
        assert_eq!(reports.ended().now_or_never(), None);
        assert_eq!(reports.pay(|| Err::<(), _>("no heap")).unwrap_err().others, 0);
    }
}
