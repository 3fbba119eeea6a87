//! A clock of the time in which this process ran, and timers based on it.
//!
//! `CLOCK_MONOTONIC` continues while the process is stopped or swapped out, or its virtual machine
//! is paused. Deadlines of peers (applications, connections, disks, stores) must not: the process
//! could not hear them then. [`run`] ticks every [`TICK`], and the clock advances by at most
//! [`STEP_MAX`] between two ticks. Without [`run`] it advances like tokio's clock.
//!
//! Invariant: it never runs ahead of tokio's clock. Dates (`SystemTime`) and periodic work
//! (`tokio::time::interval`) do not use it.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::io;
use std::ops::{Add, AddAssign, Sub};
use std::pin::Pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::task::coop;
use tokio::time::{self, MissedTickBehavior};

/// Interval at which [`run`] ticks.
pub const TICK: Duration = Duration::from_millis(100);

/// Maximum advance between two ticks. Allows one tick to be late by a whole [`TICK`].
pub const STEP_MAX: Duration = Duration::from_millis(200);

/// Shorter pauses are counted but not logged: a busy machine causes them.
const LOGGED_MIN: Duration = Duration::from_secs(1);

/// Minimum time between log lines. Pauses in between are summed up in the next one.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Value of `limit_ns` while nothing ticks the clock.
const NO_LIMIT: u64 = u64::MAX;

/// State of one clock.
#[derive(Debug)]
struct Clock {
    /// Time of the first tick, origin of all later ticks and readings.
    epoch: OnceLock<time::Instant>,
    /// Sum of all pauses.
    skipped_ns: AtomicU64,
    /// Upper bound of readings before the next tick, since the epoch and without pauses.
    /// [`NO_LIMIT`] while nothing ticks.
    limit_ns: AtomicU64,
}

/// The clock of the process.
static PROCESS: Clock = Clock::new();

thread_local! {
    /// The clock of this thread, if it has its own.
    static OF_THREAD: Cell<Option<&'static Clock>> = const { Cell::new(None) };
}

fn current() -> &'static Clock {
    OF_THREAD.get().unwrap_or(&PROCESS)
}

impl Clock {
    const fn new() -> Self {
        Self { epoch: OnceLock::new(), skipped_ns: AtomicU64::new(0), limit_ns: AtomicU64::new(NO_LIMIT) }
    }

    fn now(&self) -> time::Instant {
        // The limit is read first: a reader of a tick's limit must also see the pause found by that
        // tick.
        let limit = self.limit_ns.load(Ordering::Acquire);
        let skipped = Duration::from_nanos(self.skipped_ns.load(Ordering::Acquire));
        let now = time::Instant::now() - skipped;
        match self.epoch.get() {
            Some(epoch) if limit != NO_LIMIT => now.min(*epoch + Duration::from_nanos(limit)),
            _ => now,
        }
    }

    /// Lets the clock advance further. Returns the pause since the last tick.
    fn tick(&self) -> Duration {
        let real = time::Instant::now();
        let epoch = *self.epoch.get_or_init(|| real);
        let now = self.now();
        let skipped = real.duration_since(now);
        let before = self.skipped_ns.swap(nanos(skipped), Ordering::AcqRel);
        self.limit_ns.store(nanos(now.duration_since(epoch) + STEP_MAX), Ordering::Release);
        skipped.saturating_sub(Duration::from_nanos(before))
    }
}

/// Ticks the clock until dropped, and logs pauses.
pub async fn run() {
    let clock = current();
    let _ticking = Ticking(clock);
    clock.tick();
    let mut ticks = time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut pauses, mut unlogged, mut last_log) = (0_u32, Duration::ZERO, None::<Instant>);
    loop {
        ticks.tick().await;
        let paused = clock.tick();
        if paused >= LOGGED_MIN {
            (pauses, unlogged) = (pauses + 1, unlogged + paused);
        }
        if pauses > 0 && last_log.is_none_or(|last_log| last_log.elapsed() >= LOG_INTERVAL) {
            tracing::warn!(
                pauses,
                paused = ?unlogged,
                "the process was paused (stopped, swapped out, or machine paused); timeouts are extended by \
                 the pause"
            );
            (pauses, unlogged, last_log) = (0, Duration::ZERO, Some(Instant::now()));
        }
    }
}

/// Marks a clock as ticked until dropped.
struct Ticking(&'static Clock);

impl Drop for Ticking {
    fn drop(&mut self) {
        self.0.tick();
        self.0.limit_ns.store(NO_LIMIT, Ordering::Release);
    }
}

/// Returns the total time in which the process did not run, since [`run`] first started.
#[must_use]
pub fn paused() -> Duration {
    Duration::from_nanos(current().skipped_ns.load(Ordering::Relaxed))
}

/// Gives the calling thread its own clock until the guard is dropped. A test can then pause it
/// without other tests of the process: with [`run`] in a task, one `tokio::time::advance` is one
/// pause.
#[doc(hidden)]
#[must_use]
pub fn of_this_thread() -> OwnClock {
    OwnClock(OF_THREAD.replace(Some(Box::leak(Box::new(Clock::new())))))
}

/// Guard that restores the previous clock of the thread.
#[derive(Debug)]
pub struct OwnClock(Option<&'static Clock>);

impl Drop for OwnClock {
    fn drop(&mut self) {
        OF_THREAD.set(self.0);
    }
}

/// A reading of the clock. Replaces [`tokio::time::Instant`] and is not comparable with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(time::Instant);

impl Instant {
    /// Reads the clock.
    #[must_use]
    pub fn now() -> Self {
        Self(current().now())
    }

    /// Returns the time since this reading.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        Self::now().duration_since(self)
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    #[must_use]
    pub fn duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_duration_since(earlier.0)
    }

    /// Same as [`Instant::duration_since`].
    #[must_use]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.duration_since(earlier)
    }

    /// Returns the reading `duration` before this one, if it is representable.
    #[must_use]
    pub fn checked_sub(self, duration: Duration) -> Option<Self> {
        self.0.checked_sub(duration).map(Self)
    }

    /// Returns the time on tokio's clock at which this reading is reached without a further pause.
    fn due(self) -> time::Instant {
        time::Instant::now() + self.duration_since(Self::now())
    }
}

#[expect(clippy::disallowed_types, reason = "hyper's timers name the standard library's type")]
mod standard {
    impl From<std::time::Instant> for super::Instant {
        fn from(instant: std::time::Instant) -> Self {
            Self(instant.into())
        }
    }

    impl From<super::Instant> for std::time::Instant {
        fn from(instant: super::Instant) -> Self {
            instant.0.into()
        }
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0 + duration)
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        self.0 += duration;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0 - duration)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.duration_since(earlier)
    }
}

pin_project! {
    /// Same as [`tokio::time::Sleep`], based on this clock.
    #[derive(Debug)]
    pub struct Sleep {
        deadline: Instant,
        #[pin]
        timer: time::Sleep,
    }
}

/// Waits for `duration` of this process's time.
pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(Instant::now() + duration.min(FAR))
}

/// Waits until the clock shows `deadline`.
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { deadline, timer: time::sleep_until(deadline.due()) }
}

/// Thirty years. Longer durations would overflow.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

impl Sleep {
    /// Returns the time at which the sleep ends.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Moves the end to `deadline`.
    pub fn reset(self: Pin<&mut Self>, deadline: Instant) {
        let this = self.project();
        *this.deadline = deadline;
        this.timer.reset(deadline.due());
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        loop {
            ready!(this.timer.as_mut().poll(context));
            if Instant::now() >= *this.deadline {
                return Poll::Ready(());
            }
            // There was a pause: wait for the remaining time.
            this.timer.as_mut().reset(this.deadline.due());
        }
    }
}

pin_project! {
    /// Same as [`tokio::time::Timeout`], based on this clock.
    #[derive(Debug)]
    pub struct Timeout<F> {
        #[pin]
        future: F,
        #[pin]
        sleep: Sleep,
    }
}

/// Error of a [`Timeout`] that expired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elapsed(());

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("deadline has elapsed")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for io::Error {
    fn from(_: Elapsed) -> Self {
        io::ErrorKind::TimedOut.into()
    }
}

/// Waits for `future`, for at most `duration` of this process's time.
pub fn timeout<F: Future>(duration: Duration, future: F) -> Timeout<F> {
    Timeout { future, sleep: sleep(duration) }
}

/// Waits for `future` until the clock shows `deadline`.
pub fn timeout_at<F: Future>(deadline: Instant, future: F) -> Timeout<F> {
    Timeout { future, sleep: sleep_until(deadline) }
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let had_budget = coop::has_budget_remaining();
        if let Poll::Ready(output) = this.future.poll(context) {
            return Poll::Ready(Ok(output));
        }
        // A future that uses up the task's budget each time must not suppress its own deadline.
        let is_over = match had_budget && !coop::has_budget_remaining() {
            true => Pin::new(&mut coop::unconstrained(this.sleep)).poll(context),
            false => this.sleep.poll(context),
        };
        is_over.map(|()| Err(Elapsed(())))
    }
}

/// Converts to nanoseconds, capped at 584 years.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[doc(hidden)]
pub mod testing {
    use super::{of_this_thread, run};

    /// Runs `test` with a ticked clock of its own. In it, `tokio::time::advance` pauses the
    /// process.
    pub async fn ticked<T>(test: impl Future<Output = T>) -> T {
        let _own = of_this_thread();
        let ticks = run();
        tokio::select! {
            biased;
            () = ticks => unreachable!("the ticks do not end"),
            done = test => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::testing::ticked;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Waits like a process that is not paused.
    async fn pass(duration: Duration) {
        time::sleep(duration).await;
    }

    #[tokio::test(start_paused = true)]
    async fn clock_without_ticks_equals_tokios() {
        let (ours, tokios) = (Instant::now(), time::Instant::now());
        advance(1000 * SECOND).await;
        assert_eq!(ours.elapsed(), tokios.elapsed());
        assert_eq!(timeout(SECOND, std::future::pending::<()>()).await, Err(Elapsed(())));
        assert_eq!(tokios.elapsed(), 1001 * SECOND);
        assert_eq!(timeout(Duration::MAX, async { 1 }).await, Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn clock_counts_running_time_but_no_pauses() {
        ticked(async {
            let (ours, tokios) = (Instant::now(), time::Instant::now());
            pass(10 * SECOND).await;
            assert_eq!(ours.elapsed(), 10 * SECOND);
            advance(3600 * SECOND).await;
            let seen = ours.elapsed();
            assert!(seen <= 10 * SECOND + STEP_MAX, "{seen:?}");
            pass(10 * SECOND).await;
            let seen = ours.elapsed();
            assert!((20 * SECOND..=20 * SECOND + STEP_MAX).contains(&seen), "{seen:?}");
            let all = tokios.elapsed();
            assert_eq!(paused(), all - seen);
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn several_short_pauses_count_one_step_each() {
        ticked(async {
            let ours = Instant::now();
            for _ in 0..50 {
                advance(9 * SECOND).await;
                pass(TICK).await;
            }
            let seen = ours.elapsed();
            assert!(seen <= 50 * (STEP_MAX + TICK), "{seen:?}");
            assert!(seen >= 50 * TICK, "{seen:?}");
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn timers_are_extended_by_a_pause() {
        for paused_after in [0, 5, 9] {
            ticked(ten_seconds_with_a_pause(paused_after * SECOND)).await;
        }
    }

    async fn ten_seconds_with_a_pause(paused_after: Duration) {
        let (ours, tokios) = (Instant::now(), time::Instant::now());
        let pausing = async {
            pass(paused_after).await;
            advance(60 * SECOND).await;
        };
        let waiting = timeout(10 * SECOND, std::future::pending::<()>());
        assert_eq!(tokio::join!(waiting, pausing).0, Err(Elapsed(())));
        let (took, in_all) = (ours.elapsed(), tokios.elapsed());
        assert!((10 * SECOND..=10 * SECOND + TICK).contains(&took), "{took:?}");
        assert!(
            in_all > 69 * SECOND,
            "with a pause after {paused_after:?} the deadline passed after {in_all:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn reset_sleep_ends_at_its_new_deadline() {
        ticked(async {
            let began = Instant::now();
            let mut alarm = std::pin::pin!(sleep(SECOND));
            alarm.as_mut().reset(began + 5 * SECOND);
            advance(100 * SECOND).await;
            assert_eq!(alarm.deadline(), began + 5 * SECOND);
            alarm.await;
            assert!(began.elapsed() >= 5 * SECOND, "{:?}", began.elapsed());
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn future_ready_after_a_pause_is_not_late() {
        ticked(async {
            let (last_log, heard) = tokio::sync::oneshot::channel();
            let mut waiting = std::pin::pin!(timeout(SECOND, heard));
            assert!(futures::poll!(waiting.as_mut()).is_pending());
            advance(60 * SECOND).await;
            assert!(futures::poll!(waiting.as_mut()).is_pending(), "the wait ended before its deadline");
            last_log.send(7).unwrap();
            assert_eq!(waiting.await, Ok(Ok(7)));
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn clock_continues_after_its_ticks_end() {
        let _own = of_this_thread();
        let began = Instant::now();
        {
            let mut ticks = std::pin::pin!(run());
            assert!(futures::poll!(ticks.as_mut()).is_pending());
            advance(60 * SECOND).await;
            assert_eq!(began.elapsed(), STEP_MAX);
        }
        let seen = began.elapsed();
        assert_eq!(seen, STEP_MAX);
        advance(10 * SECOND).await;
        assert_eq!(began.elapsed(), seen + 10 * SECOND);
    }
}
