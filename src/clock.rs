//! The time in which this process ran, and the timers that measure by it.
//!
//! `CLOCK_MONOTONIC` continues while the process is stopped, swapped out, or its virtual machine is paused. Deadlines held
//! against others (applications, nodes, tickets, connections, disks, stores) must not: in that time nobody was heard.
//! [`run`] ticks every [`TICK`], and between two ticks the clock advances by [`STEP_MAX`] at most, also for whoever reads
//! it before the first tick after a pause. Without [`run`] it is tokio's clock.
//!
//! Invariant: it never runs ahead of tokio's clock. Not here: dates (`SystemTime`) and periodic work (`tokio::time::interval`).

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

/// Most that the clock advances between two ticks: one tick that is as late as it takes.
pub const STEP_MAX: Duration = Duration::from_millis(200);

/// A shorter pause is only counted: a busy machine makes those.
const LOGGED_MIN: Duration = Duration::from_secs(1);

/// Pauses within this time after a line in the log are summed up in the next one.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// `limit_ns` of a clock that nobody ticks.
const NO_LIMIT: u64 = u64::MAX;

/// One clock.
#[derive(Debug)]
struct Clock {
    /// When it first ticked. Later ticks and readings count from here.
    epoch: OnceLock<time::Instant>,
    /// Sum of all pauses.
    skipped_ns: AtomicU64,
    /// Latest reading before the next tick, since the epoch and without pauses; [`NO_LIMIT`] while nobody ticks.
    limit_ns: AtomicU64,
}

/// The clock of the process.
static PROCESS: Clock = Clock::new();

thread_local! {
    /// The clock of this thread, where it has one of its own.
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
        // The limit first: who sees a tick's limit sees the pause that it found, too.
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

/// Ticks the clock until it is dropped, and logs each pause.
pub async fn run() {
    let clock = current();
    let _ticking = Ticking(clock);
    clock.tick();
    let mut ticks = time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut pauses, mut untold, mut told) = (0_u32, Duration::ZERO, None::<Instant>);
    loop {
        ticks.tick().await;
        let paused = clock.tick();
        if paused >= LOGGED_MIN {
            (pauses, untold) = (pauses + 1, untold + paused);
        }
        if pauses > 0 && told.is_none_or(|told| told.elapsed() >= LOG_INTERVAL) {
            tracing::warn!(
                pauses,
                paused = ?untold,
                "the process was paused (stopped, swapped out, or machine paused); timeouts are extended by \
                 the pause"
            );
            (pauses, untold, told) = (0, Duration::ZERO, Some(Instant::now()));
        }
    }
}

/// A clock that is ticked, until this is dropped.
struct Ticking(&'static Clock);

impl Drop for Ticking {
    fn drop(&mut self) {
        self.0.tick();
        self.0.limit_ns.store(NO_LIMIT, Ordering::Release);
    }
}

/// Time in which the process did not run, since [`run`] was first started.
#[must_use]
pub fn paused() -> Duration {
    Duration::from_nanos(current().skipped_ns.load(Ordering::Relaxed))
}

/// Gives the calling thread a clock of its own until the guard is dropped, so that a test can pause a process that shares
/// its own with other tests: with [`run`] in a task, one `tokio::time::advance` is one pause.
#[doc(hidden)]
#[must_use]
pub fn of_this_thread() -> OwnClock {
    OwnClock(OF_THREAD.replace(Some(Box::leak(Box::new(Clock::new())))))
}

/// Takes the clock of a thread away again.
#[derive(Debug)]
pub struct OwnClock(Option<&'static Clock>);

impl Drop for OwnClock {
    fn drop(&mut self) {
        OF_THREAD.set(self.0);
    }
}

/// A reading of the clock. Takes the place of [`tokio::time::Instant`], which does not compare with it.
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

    /// Returns the time since `earlier`, zero if that is later.
    #[must_use]
    pub fn duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_duration_since(earlier.0)
    }

    /// As [`Instant::duration_since`].
    #[must_use]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.duration_since(earlier)
    }

    /// Returns the reading `duration` before this one, if there can be one.
    #[must_use]
    pub fn checked_sub(self, duration: Duration) -> Option<Self> {
        self.0.checked_sub(duration).map(Self)
    }

    /// When tokio's clock shows this reading if there is no further pause.
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
    /// As [`tokio::time::Sleep`], by this clock.
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

/// Thirty years: what is beyond would overflow.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

impl Sleep {
    /// When it ends.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Moves its end to `deadline`.
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
            // There was a pause: what it took is still to come.
            this.timer.as_mut().reset(this.deadline.due());
        }
    }
}

pin_project! {
    /// As [`tokio::time::Timeout`], by this clock.
    #[derive(Debug)]
    pub struct Timeout<F> {
        #[pin]
        future: F,
        #[pin]
        sleep: Sleep,
    }
}

/// The time of a [`Timeout`] is over.
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

/// Waits for `future`, for `duration` of this process's time at most.
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
        // A future that uses up the task's budget each time must not keep its own deadline away.
        let is_over = match had_budget && !coop::has_budget_remaining() {
            true => Pin::new(&mut coop::unconstrained(this.sleep)).poll(context),
            false => this.sleep.poll(context),
        };
        is_over.map(|()| Err(Elapsed(())))
    }
}

/// Nanoseconds, for 584 years.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod testing {
    use super::{of_this_thread, run};

    /// Runs `test` on a clock of its own that is ticked: in there `tokio::time::advance` pauses the process.
    pub(crate) async fn ticked<T>(test: impl Future<Output = T>) -> T {
        let _own = of_this_thread();
        let ticks = run();
        tokio::select! {
            biased;
            () = ticks => unreachable!("it ticks until it is dropped"),
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

    /// Waits as a process that runs.
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
        assert!(in_all > 69 * SECOND, "paused after {paused_after:?}: {in_all:?}");
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
            let (told, heard) = tokio::sync::oneshot::channel();
            let mut waiting = std::pin::pin!(timeout(SECOND, heard));
            assert!(futures::poll!(waiting.as_mut()).is_pending());
            advance(60 * SECOND).await;
            assert!(futures::poll!(waiting.as_mut()).is_pending(), "it has its time yet");
            told.send(7).unwrap();
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
            assert_eq!(began.elapsed(), STEP_MAX, "until the next tick");
        }
        let seen = began.elapsed();
        assert_eq!(seen, STEP_MAX);
        advance(10 * SECOND).await;
        assert_eq!(began.elapsed(), seen + 10 * SECOND);
    }
}
