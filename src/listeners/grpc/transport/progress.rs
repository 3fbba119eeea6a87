//! Deadlines of calls, extended by progress.
//!
//! A call ends if its caller pauses within the request or stops reading the response. A caller that
//! makes progress is not cut off, however large the response is.
//!
//! Invariants: a call without progress ends within its deadlines. It ends earlier while others wait
//! for memory of its response ([`STALL_MAX`]) or for the worker's successor ([`Tails::close`]).
//! When a call has ended, HTTP/2 may still hold the last bytes of the response. The connection ends
//! if the socket does not take them in time.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::sync::Notify;
use tonic::Status;

use crate::clock::{Instant, sleep, sleep_until};
use crate::listeners::connection_limiter::ConnectionState;
use crate::listeners::{CLOSING_ANSWER, CLOSING_PAUSE, CLOSING_REQUEST, STALL_MAX, STALL_POLL_INTERVAL};

/// Minimum number of bytes a reader must consume to extend its deadline. Single bytes are no
/// progress.
const STEP_BYTES: u64 = 1 << 20;

/// Poll interval of a call that waits for a frame.
const FRAME_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Poll interval of a call that waits for its caller to read the response.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum time between two checks of a call.
const POLL_PAUSE_MIN: Duration = Duration::from_millis(5);

/// Deadlines of one call.
#[derive(Debug, Clone, Copy)]
pub(in crate::listeners::grpc) struct CallDeadlines {
    /// From its header until there is a response. [`bounded`] waits for `answer` longer.
    pub(in crate::listeners::grpc) call: Duration,
    /// Between two frames of its request.
    pub(in crate::listeners::grpc) frame: Duration,
    /// For each [`STEP_BYTES`] of the response.
    pub(in crate::listeners::grpc) answer: Duration,
}

/// Progress of the call that runs in this task.
#[derive(Debug)]
pub(super) struct CallProgress {
    began: Instant,
    deadlines: CallDeadlines,
    /// Deadline of the call, in ms after `began`.
    due_ms: AtomicU64,
    taken: AtomicU64,
    /// When the caller last read part of the response, in ms after `began`. [`NOT_TAKING`] before
    /// the response and while the worker itself is busy.
    taking_ms: AtomicU64,
    /// When to check an awaited frame next, in ms after `began`. [`NO_FRAME`] while no frame is
    /// awaited.
    frame_check_ms: AtomicU64,
    tails: Arc<Tails>,
}

/// There is no response yet, or the call waits for the disk.
const NOT_TAKING: u64 = u64::MAX;

/// No frame is awaited.
const NO_FRAME: u64 = u64::MAX;

/// Waits for the next frame of a request until dropped. It shares the alarm of [`bounded`]: most
/// frames arrive at once, and a timer per frame would cost more than the check.
#[derive(Debug)]
pub(super) struct FrameWait {
    progress: Option<Arc<CallProgress>>,
    began: Instant,
}

/// Marks the worker's own time within a response, in which the caller does not count as stalled.
/// The deadline of the response continues. Ends on drop.
#[derive(Debug)]
pub(super) struct OwnTime(Arc<CallProgress>);

/// Responses whose last bytes HTTP/2 still holds, counted by the period in which it got them.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct Tails {
    began: Instant,
    period: Duration,
    /// Counts by period number modulo three: the current one, the previous one, and the one that
    /// must be empty.
    waiting: [AtomicU32; 3],
    /// When the connection started to close.
    closed: OnceLock<Instant>,
    /// Notified when a tail begins.
    begun: Notify,
}

/// The end of a response, until the socket has taken it or the call is abandoned.
#[derive(Debug)]
pub(super) struct ResponseTail {
    tails: Arc<Tails>,
    at: usize,
}

tokio::task_local! {
    static CALL: Arc<CallProgress>;
}

/// Returns the progress of the call that runs in this task, or `None` outside of calls.
pub(super) fn of_this_call() -> Option<Arc<CallProgress>> {
    CALL.try_with(Arc::clone).ok()
}

impl FrameWait {
    /// Starts waiting within the current call. Outside of calls the wait has no deadline.
    pub(in crate::listeners::grpc) fn begin() -> Self {
        Self { progress: of_this_call(), began: Instant::now() }
    }

    /// Returns whether the frame is overdue. If not, the call checks again, at `look` at the
    /// latest.
    pub(super) fn is_overdue(&self, look: Option<Instant>) -> bool {
        let Some(progress) = &self.progress else { return false };
        let (now, due) = (Instant::now(), self.due(progress));
        let look = look.map_or(due, |look| look.min(due)).min(now + FRAME_POLL_INTERVAL);
        progress.frame_check_ms.store(progress.after_beginning(look), Ordering::Relaxed);
        due <= now
    }

    /// Returns the status of a call whose frame is overdue.
    pub(super) fn late(&self) -> Status {
        match self.progress.as_ref().and_then(|progress| progress.tails.closed_at()) {
            Some(_) => Status::unavailable("worker shutdown: the rest of the request did not arrive in time"),
            None => Status::deadline_exceeded("request paused for longer than grpc.frame_timeout_sec"),
        }
    }

    fn due(&self, progress: &CallProgress) -> Instant {
        let due = self.began + progress.deadlines.frame;
        progress.tails.closed_at().map_or(due, |closed| {
            due.min(self.began.max(closed) + CLOSING_PAUSE).min(closed + CLOSING_REQUEST)
        })
    }
}

impl Drop for FrameWait {
    fn drop(&mut self) {
        self.progress.iter().for_each(|progress| progress.frame_check_ms.store(NO_FRAME, Ordering::Relaxed));
    }
}

/// Runs `call`. Returns true if it completed, and false if it made too little progress.
/// `others_wait` returns whether others wait for memory of its response.
pub(in crate::listeners::grpc) async fn bounded(
    deadlines: CallDeadlines,
    tails: Arc<Tails>,
    others_wait: impl Fn() -> bool,
    call: impl Future<Output = ()>,
) -> bool {
    let progress = Arc::new(CallProgress {
        began: Instant::now(),
        deadlines,
        due_ms: AtomicU64::new(ms(deadlines.call + deadlines.answer)),
        taken: AtomicU64::new(0),
        taking_ms: AtomicU64::new(NOT_TAKING),
        frame_check_ms: AtomicU64::new(NO_FRAME),
        tails,
    });
    let mut call = pin!(CALL.scope(Arc::clone(&progress), call));
    let mut alarm = pin!(sleep_until(progress.due()));
    poll_fn(|context| {
        if call.as_mut().poll(context).is_ready() {
            return Poll::Ready(true);
        }
        // A response or an awaited frame makes the next check earlier. Progress makes it later,
        // which does not touch the timer.
        let first_check = progress.next_check();
        if first_check < alarm.deadline() {
            alarm.as_mut().reset(first_check);
        }
        loop {
            ready!(alarm.as_mut().poll(context));
            // The call itself detects that its frame is overdue.
            if progress.frame_check() <= Instant::now() && call.as_mut().poll(context).is_ready() {
                return Poll::Ready(true);
            }
            let now = Instant::now();
            let is_stalled = progress.stall_deadline() <= now;
            if progress.due() <= now || is_stalled && others_wait() || progress.delays_successor(now) {
                return Poll::Ready(false);
            }
            let look = if is_stalled {
                now + STALL_POLL_INTERVAL.min(ANSWER_POLL_INTERVAL)
            } else {
                progress.next_check()
            };
            alarm.as_mut().reset(look.max(now + POLL_PAUSE_MIN));
        }
    })
    .await
}

impl CallProgress {
    fn due(&self) -> Instant {
        self.began + Duration::from_millis(self.due_ms.load(Ordering::Relaxed))
    }

    /// Returns when others take precedence, if the caller reads nothing until then.
    fn stall_deadline(&self) -> Instant {
        match self.taking_ms.load(Ordering::Relaxed) {
            NOT_TAKING => self.due(),
            taking => self.began + Duration::from_millis(taking) + STALL_MAX,
        }
    }

    /// Returns when to check the awaited frame, or the call's deadline without one.
    fn frame_check(&self) -> Instant {
        match self.frame_check_ms.load(Ordering::Relaxed) {
            NO_FRAME => self.due(),
            look => self.began + Duration::from_millis(look),
        }
    }

    /// Returns when to check the call next.
    fn next_check(&self) -> Instant {
        let taking = match self.taking_ms.load(Ordering::Relaxed) {
            NOT_TAKING => self.due(),
            taking => self.began + Duration::from_millis(taking) + ANSWER_POLL_INTERVAL,
        };
        self.due().min(self.frame_check()).min(taking)
    }

    /// Returns whether the connection is closing and the caller reads so slowly that it delays the
    /// successor.
    fn delays_successor(&self, now: Instant) -> bool {
        let is_taking = self.taking_ms.load(Ordering::Relaxed) != NOT_TAKING;
        let closed = self.tails.closed_at().filter(|_| is_taking);
        closed.is_some_and(|closed| {
            let last_step = self.due().checked_sub(self.deadlines.answer).unwrap_or(self.began);
            now >= last_step.max(closed) + CLOSING_ANSWER
        })
    }

    fn after_beginning(&self, moment: Instant) -> u64 {
        // Rounded up: a check just before its time would be useless.
        ms(moment.saturating_duration_since(self.began)) + 1
    }

    /// Starts the caller's time: the response is ready.
    pub(in crate::listeners::grpc) fn answers(&self) {
        let now = self.began.elapsed();
        self.due_ms.store(ms(now + self.deadlines.answer), Ordering::Relaxed);
        self.taking_ms.store(ms(now), Ordering::Relaxed);
    }

    /// Pauses the detection of a stalled caller while the worker waits for the disk.
    pub(super) fn own_time(self: Arc<Self>) -> OwnTime {
        self.taking_ms.store(NOT_TAKING, Ordering::Relaxed);
        OwnTime(self)
    }

    /// Records that the caller reads `bytes` more of the response.
    pub(in crate::listeners::grpc) fn takes(&self, bytes: usize) {
        let bytes = bytes as u64;
        let before = self.taken.fetch_add(bytes, Ordering::Relaxed);
        if before / STEP_BYTES != (before + bytes) / STEP_BYTES {
            self.answers();
        } else {
            self.taking_ms.store(ms(self.began.elapsed()), Ordering::Relaxed);
        }
    }

    /// Returns the tail of the response, whose last bytes go to HTTP/2 now.
    pub(super) fn tail(&self) -> ResponseTail {
        self.tails.begin()
    }
}

impl Drop for OwnTime {
    fn drop(&mut self) {
        let Self(progress) = self;
        progress.taking_ms.store(ms(progress.began.elapsed()), Ordering::Relaxed);
    }
}

impl Tails {
    /// Creates the counters. A peer that does not take the end of a response within `period` loses
    /// the connection, after twice that time at the latest.
    pub(in crate::listeners::grpc) fn new(period: Duration) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            period,
            waiting: Default::default(),
            closed: OnceLock::new(),
            begun: Notify::new(),
        })
    }

    /// Ends calls whose callers pause, since others wait for the worker's successor.
    pub(in crate::listeners::grpc) fn close(&self) {
        let _earlier = self.closed.set(Instant::now());
    }

    fn closed_at(&self) -> Option<Instant> {
        self.closed.get().copied()
    }

    fn begin(self: &Arc<Self>) -> ResponseTail {
        let at = self.now() as usize % 3;
        self.waiting[at].fetch_add(1, Ordering::Relaxed);
        self.begun.notify_one();
        ResponseTail { tails: Arc::clone(self), at }
    }

    /// Returns whether HTTP/2 holds the end of no response.
    pub(in crate::listeners::grpc) fn are_taken(&self) -> bool {
        self.waiting.iter().all(|waiting| waiting.load(Ordering::Relaxed) == 0)
    }

    /// Resolves when the end of a response was not taken in time.
    pub(in crate::listeners::grpc) async fn stuck(&self) {
        for period in self.now() + 1.. {
            sleep_until(self.began + self.period.saturating_mul(period)).await;
            // Tails from two periods back have had at least one whole period.
            if self.waiting[(period as usize + 1) % 3].load(Ordering::Relaxed) > 0 {
                return;
            }
        }
    }

    /// Resolves when a tail exists, the socket has taken nothing for [`STALL_MAX`], and others
    /// wait.
    pub(in crate::listeners::grpc) async fn stalls_others(
        &self,
        connection_state: &ConnectionState,
        others_wait: impl Fn() -> bool,
    ) {
        loop {
            self.begun.notified().await;
            let begun = Instant::now();
            while !self.are_taken() {
                // A connection that was idle has written nothing for long when a response begins.
                let untaken = connection_state.unwritten().min(begun.elapsed());
                if untaken >= STALL_MAX && others_wait() {
                    return;
                }
                sleep(STALL_MAX.saturating_sub(untaken).max(STALL_POLL_INTERVAL)).await;
            }
        }
    }

    /// Returns the number of the current period.
    fn now(&self) -> u32 {
        let periods = self.began.elapsed().as_nanos() / self.period.as_nanos().max(1);
        u32::try_from(periods).unwrap_or(u32::MAX - 1)
    }
}

impl Drop for ResponseTail {
    fn drop(&mut self) {
        self.tails.waiting[self.at].fetch_sub(1, Ordering::Relaxed);
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

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
    async fn read_response_has_no_total_deadline() {
        let began = Instant::now();
        assert!(
            bounded(
                DEADLINES,
                Tails::new(DEADLINES.answer),
                || true,
                takes(1 << 20, Duration::from_secs(9), 1000)
            )
            .await
        );
        assert!(began.elapsed() >= Duration::from_secs(9000));
    }

    #[tokio::test(start_paused = true)]
    async fn call_survives_a_pause_of_the_process() {
        crate::clock::testing::ticked(async {
            let call = bounded(DEADLINES, Tails::new(DEADLINES.answer), || true, async {
                of_this_call().unwrap().answers();
                tokio::time::sleep(Duration::from_secs(3605)).await;
            });
            let pause = tokio::time::advance(Duration::from_secs(3600));
            assert!(tokio::join!(call, pause).0, "the call was closed 5 s into its 10 s");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn response_read_in_single_bytes_times_out() {
        let began = Instant::now();
        assert!(
            !bounded(
                DEADLINES,
                Tails::new(DEADLINES.answer),
                || true,
                takes(1, Duration::from_secs(1), 1000)
            )
            .await
        );
        assert_eq!(began.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn call_without_response_ends() {
        let began = Instant::now();
        assert!(!bounded(DEADLINES, Tails::new(DEADLINES.answer), || true, std::future::pending()).await);
        assert_eq!(began.elapsed().as_secs(), 110);
        assert!(of_this_call().is_none());
    }

    /// Receives a request with a frame every `seconds` seconds. Returns the outcome and the seconds
    /// it took.
    async fn receives(seconds: u64, frames: usize) -> (Result<usize, tonic::Code>, u64) {
        let began = Instant::now();
        let frame =
            || Ok::<_, std::convert::Infallible>(http_body::Frame::data(bytes::Bytes::from_static(b"x")));
        let paced = futures::stream::unfold(0, move |number| async move {
            sleep(Duration::from_secs(seconds)).await;
            (number < frames).then(|| (frame(), number + 1))
        });
        let mut body = http_body_util::StreamBody::new(Box::pin(paced));
        let mut outcome = Ok(0);
        let call = async {
            while let Ok(count) = outcome {
                match crate::listeners::grpc::transport::message::next_data(&mut body).await {
                    Ok(Some(_)) => outcome = Ok(count + 1),
                    Ok(None) => break,
                    Err(status) => outcome = Err(status.code()),
                }
            }
        };
        assert!(bounded(DEADLINES, Tails::new(DEADLINES.answer), || false, call).await);
        (outcome, began.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn each_frame_of_a_request_has_its_own_deadline() {
        assert_eq!(receives(4, 20).await, (Ok(20), 84));
        assert_eq!(receives(6, 20).await, (Err(tonic::Code::DeadlineExceeded), 5));
        assert_eq!(receives(0, 1000).await, (Ok(1000), 0));
    }

    /// Returns the lifetime in seconds of a response whose caller reads 1 MiB and then nothing.
    async fn lives(others_wait: bool, waits_for_disk: bool) -> u64 {
        let deadlines = CallDeadlines { answer: Duration::from_secs(100), ..DEADLINES };
        let began = Instant::now();
        let call = async {
            let progress = of_this_call().unwrap();
            progress.answers();
            sleep(Duration::from_secs(7)).await;
            progress.takes(1 << 20);
            let _own_time = waits_for_disk.then(|| progress.own_time());
            sleep(Duration::from_secs(1000)).await;
        };
        assert!(!bounded(deadlines, Tails::new(deadlines.answer), || others_wait, call).await);
        began.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn unread_response_is_dropped_for_waiting_requests() {
        assert_eq!(lives(true, false).await, 17);
        assert_eq!(lives(false, false).await, 107);
        assert_eq!(
            lives(true, true).await,
            107,
            "time in which the disk is slow must not count against the caller"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn unread_response_end_is_dropped_for_waiting_requests() {
        let limiter = crate::listeners::connection_limiter::ConnectionLimiter::new(1);
        let (held, _) =
            limiter.take([127, 0, 0, 1].into(), crate::listeners::connection_limiter::closing().0);
        let tails = Tails::new(Duration::from_secs(100));
        let waiting = std::cell::Cell::new(false);
        let mut closes = pin!(tails.stalls_others(held.state(), || waiting.get()));
        assert!(
            timeout(Duration::from_secs(50), closes.as_mut()).await.is_err(),
            "the connection was closed although no request waits"
        );
        let tail = tails.begin();
        held.state().wrote_at(held.state().now());
        assert!(
            timeout(Duration::from_secs(50), closes.as_mut()).await.is_err(),
            "the connection was closed although no request waits"
        );
        waiting.set(true);
        held.state().wrote_at(held.state().now());
        let began = Instant::now();
        closes.await;
        assert!((STALL_MAX..=2 * STALL_MAX).contains(&began.elapsed()), "{:?}", began.elapsed());
        drop(tail);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_gets_time_for_its_first_response() {
        let limiter = crate::listeners::connection_limiter::ConnectionLimiter::new(1);
        let (held, _) =
            limiter.take([127, 0, 0, 1].into(), crate::listeners::connection_limiter::closing().0);
        let tails = Tails::new(Duration::from_secs(100));
        let mut closes = pin!(tails.stalls_others(held.state(), || true));
        assert!(timeout(10 * STALL_MAX, closes.as_mut()).await.is_err(), "an idle connection was closed");
        for _ in 0..2 {
            let tail = tails.begin();
            assert!(
                timeout(STALL_MAX / 2, closes.as_mut()).await.is_err(),
                "the connection was closed right after a response began"
            );
            drop(tail);
            assert!(timeout(10 * STALL_MAX, closes.as_mut()).await.is_err(), "an idle connection was closed");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_response_has_a_deadline() {
        let tails = Tails::new(DEADLINES.answer);
        let began = Instant::now();
        // The connection stays if the tails of every period are taken in time.
        let taken = async {
            for _ in 0..100 {
                let tail = tails.begin();
                sleep(DEADLINES.answer * 9 / 10).await;
                drop(tail);
            }
        };
        tokio::select! {
            () = tails.stuck() => panic!("the connection was closed after {:?}", began.elapsed()),
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
        assert!(tails.are_taken());
    }
}
