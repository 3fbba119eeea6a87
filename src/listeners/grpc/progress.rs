//! What keeps a call alive: progress, not age.
//!
//! Not here: what a call does. A caller who pauses inside a request, or does not take an answer, ends its call; one that
//! gets on is not cut off, however large the answer is. Invariant: a call without progress ends within the deadlines.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Taking so much of an answer is progress. A caller who takes a byte now and then is none.
const STEP_BYTES: u64 = 1 << 20;

/// How long a call may take over what.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallDeadlines {
    /// From its head until there is an answer.
    pub(super) call: Duration,
    /// Between two frames of its request.
    pub(super) frame: Duration,
    /// For each [`STEP_BYTES`] of the answer.
    pub(super) answer: Duration,
}

/// What is known of the call that runs in this task.
#[derive(Debug)]
pub(super) struct Progress {
    began: Instant,
    deadlines: CallDeadlines,
    /// In ms after `began`.
    due_ms: AtomicU64,
    taken: AtomicU64,
}

tokio::task_local! {
    static CALL: Arc<Progress>;
}

/// The progress of the call that runs in this task; none outside of calls.
pub(super) fn of_this_call() -> Option<Arc<Progress>> {
    CALL.try_with(Arc::clone).ok()
}

/// How long the next frame of this call's request may take.
pub(super) fn frame_deadline() -> Option<Duration> {
    CALL.try_with(|progress| progress.deadlines.frame).ok()
}

/// Runs `call` until it ends (true) or has not got on in time (false).
pub(super) async fn bounded(deadlines: CallDeadlines, call: impl Future<Output = ()>) -> bool {
    let progress = Arc::new(Progress {
        began: Instant::now(),
        deadlines,
        due_ms: AtomicU64::new(ms(deadlines.call + deadlines.answer)),
        taken: AtomicU64::new(0),
    });
    let mut call = pin!(CALL.scope(Arc::clone(&progress), call));
    let mut alarm = pin!(sleep_until(progress.due()));
    poll_fn(|context| {
        if call.as_mut().poll(context).is_ready() {
            return Poll::Ready(true);
        }
        // An answer brings the deadline nearer, and progress moves it away, which does not touch the timer.
        if progress.due() < alarm.deadline() {
            alarm.as_mut().reset(progress.due());
        }
        loop {
            ready!(alarm.as_mut().poll(context));
            if progress.due() <= Instant::now() {
                return Poll::Ready(false);
            }
            alarm.as_mut().reset(progress.due());
        }
    })
    .await
}

impl Progress {
    fn due(&self) -> Instant {
        self.began + Duration::from_millis(self.due_ms.load(Ordering::Relaxed))
    }

    /// There is an answer: from here on the caller's time runs.
    pub(super) fn answers(&self) {
        self.due_ms.store(ms(self.began.elapsed() + self.deadlines.answer), Ordering::Relaxed);
    }

    /// The caller takes `bytes` more of its answer.
    pub(super) fn takes(&self, bytes: usize) {
        let bytes = bytes as u64;
        let before = self.taken.fetch_add(bytes, Ordering::Relaxed);
        if before / STEP_BYTES != (before + bytes) / STEP_BYTES {
            self.answers();
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const DEADLINES: CallDeadlines = CallDeadlines {
        call: Duration::from_secs(100),
        frame: Duration::from_secs(5),
        answer: Duration::from_secs(10),
    };

    async fn takes(bytes: usize, every: Duration, times: u32) {
        let progress = of_this_call().unwrap();
        progress.answers();
        for _ in 0..times {
            progress.takes(bytes);
            sleep(every).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_taken_lives_however_long_it_takes() {
        let began = Instant::now();
        assert!(bounded(DEADLINES, takes(1 << 20, Duration::from_secs(9), 1000)).await);
        assert!(began.elapsed() >= Duration::from_secs(9000));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_of_which_a_byte_is_taken_now_and_then_does_not() {
        let began = Instant::now();
        assert!(!bounded(DEADLINES, takes(1, Duration::from_secs(1), 1000)).await);
        assert_eq!(began.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_without_an_answer_ends_too() {
        let began = Instant::now();
        assert!(!bounded(DEADLINES, std::future::pending()).await);
        assert_eq!(began.elapsed().as_secs(), 110);
        assert!(of_this_call().is_none() && frame_deadline().is_none());
    }
}
