//! What keeps a call alive: progress, not age.
//!
//! Not here: what a call does. A caller who pauses inside a request, or does not take an answer, ends its call; one that
//! gets on is not cut off, however large the answer is. Invariants: a call without progress ends within the deadlines; what is
//! left of an answer when its call has ended, because HTTP/2 has it and the socket has not, is taken in time or its
//! connection ends.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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
    tails: Arc<Tails>,
}

/// Answers of a connection whose last bytes HTTP/2 has and the socket has not, by the period in which it got them.
#[derive(Debug)]
pub(super) struct Tails {
    began: Instant,
    period: Duration,
    /// By the number of the period modulo three: the one that runs, the one before, and the one that must be empty.
    waiting: [AtomicU32; 3],
}

/// The end of an answer, until the socket has taken it or it is given up.
#[derive(Debug)]
pub(super) struct Tail {
    tails: Arc<Tails>,
    at: usize,
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
pub(super) async fn bounded(
    deadlines: CallDeadlines,
    tails: Arc<Tails>,
    call: impl Future<Output = ()>,
) -> bool {
    let progress = Arc::new(Progress {
        began: Instant::now(),
        deadlines,
        due_ms: AtomicU64::new(ms(deadlines.call + deadlines.answer)),
        taken: AtomicU64::new(0),
        tails,
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

    /// The last bytes of the answer go to HTTP/2 now.
    pub(super) fn tail(&self) -> Tail {
        self.tails.begin()
    }
}

impl Tails {
    /// A peer that does not take an answer's end within `period` loses the connection, at the latest after twice that time.
    pub(super) fn new(period: Duration) -> Arc<Self> {
        Arc::new(Self { began: Instant::now(), period, waiting: Default::default() })
    }

    fn begin(self: &Arc<Self>) -> Tail {
        let at = self.now() as usize % 3;
        self.waiting[at].fetch_add(1, Ordering::Relaxed);
        Tail { tails: Arc::clone(self), at }
    }

    /// Resolves when an answer's end was not taken in time.
    pub(super) async fn stuck(&self) {
        for period in self.now() + 1.. {
            sleep_until(self.began + self.period.saturating_mul(period)).await;
            // Those of the period before the last, two back, have had a whole one.
            if self.waiting[(period as usize + 1) % 3].load(Ordering::Relaxed) > 0 {
                return;
            }
        }
    }

    /// The number of the period that runs.
    fn now(&self) -> u32 {
        let periods = self.began.elapsed().as_nanos() / self.period.as_nanos().max(1);
        u32::try_from(periods).unwrap_or(u32::MAX - 1)
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.tails.waiting[self.at].fetch_sub(1, Ordering::Relaxed);
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
        assert!(
            bounded(DEADLINES, Tails::new(DEADLINES.answer), takes(1 << 20, Duration::from_secs(9), 1000))
                .await
        );
        assert!(began.elapsed() >= Duration::from_secs(9000));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_of_which_a_byte_is_taken_now_and_then_does_not() {
        let began = Instant::now();
        assert!(
            !bounded(DEADLINES, Tails::new(DEADLINES.answer), takes(1, Duration::from_secs(1), 1000)).await
        );
        assert_eq!(began.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_without_an_answer_ends_too() {
        let began = Instant::now();
        assert!(!bounded(DEADLINES, Tails::new(DEADLINES.answer), std::future::pending()).await);
        assert_eq!(began.elapsed().as_secs(), 110);
        assert!(of_this_call().is_none() && frame_deadline().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn n8_the_end_of_an_answer_has_its_deadline_too() {
        let tails = Tails::new(DEADLINES.answer);
        let began = Instant::now();
        // Ends that are taken, in every period, keep the connection.
        let taken = async {
            for _ in 0..100 {
                let tail = tails.begin();
                sleep(DEADLINES.answer * 9 / 10).await;
                drop(tail);
            }
        };
        tokio::select! {
            () = tails.stuck() => panic!("closed after {:?}", began.elapsed()),
            () = taken => {}
        }
        let left = tails.begin();
        let began = Instant::now();
        tails.stuck().await;
        assert!(
            (DEADLINES.answer..=2 * DEADLINES.answer).contains(&began.elapsed()),
            "{:?}",
            began.elapsed()
        );
        drop(left);
        assert!(tails.waiting.iter().all(|waiting| waiting.load(Ordering::Relaxed) == 0));
    }
}
