//! The honest application: it writes small sends, reads them back, and checks the worker's health.

use std::fmt;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::clients::{key, local};

use crate::writes::Written;

/// Application id.
pub(super) const APP: &str = "honest";
/// Bytes of one send.
const SEND_BYTES: u32 = 16 << 10;
/// Pause between sends, so that the application itself never overloads the worker.
const SEND_PAUSE: Duration = Duration::from_millis(20);
/// Number of sends between full reads.
const SENDS_PER_READ: usize = 100;
/// Number of sends per shuffle; a new shuffle keeps the repeated reads small.
const SENDS_PER_SHUFFLE: usize = 500;

/// Longer than the asserted bound on a health response.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Blocks that the application has written.
pub(super) struct Honest {
    written: Written,
    sends: usize,
}

/// Latencies of sends, including tickets and reports.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) sends: usize,
    took: Vec<Duration>,
}

/// Latencies of health checks.
#[derive(Debug, Default)]
pub(super) struct Health {
    asked: usize,
    late: usize,
    missed: usize,
    pub(super) longest: Duration,
}

impl Honest {
    pub(super) async fn start(client: &ShuffleClient) -> Self {
        let mut written = Written::register(client, key(APP, 0), 1).await;
        // Data for the slow readers.
        written.task(client, 0, 1 << 20).await.unwrap();
        Self { written, sends: 0 }
    }

    /// Writes and reads until `until`, at least once.
    pub(super) async fn work(&mut self, client: &ShuffleClient, until: Instant) -> Figures {
        let mut figures = Figures::default();
        loop {
            self.sends += 1;
            if self.sends.is_multiple_of(SENDS_PER_SHUFFLE) {
                self.assert_readable(client).await;
                let shuffle = i32::try_from(self.sends / SENDS_PER_SHUFFLE).unwrap();
                self.written = Written::register(client, key(APP, shuffle), 1).await;
            }
            let task = i64::try_from(self.sends).unwrap();
            let began = Instant::now();
            // The ticket waits for memory; a send with a ticket is accepted.
            self.written.task(client, task, SEND_BYTES).await.expect("an honest send was refused");
            figures.took.push(began.elapsed());
            if self.sends.is_multiple_of(SENDS_PER_READ) {
                self.assert_readable(client).await;
            }
            if Instant::now() >= until {
                figures.sends = figures.took.len();
                return figures;
            }
            sleep(SEND_PAUSE).await;
        }
    }

    /// Starts a new shuffle; the in-memory blocks of the old one were lost.
    pub(super) async fn start_new_shuffle(&mut self, client: &ShuffleClient) {
        self.sends = (self.sends / SENDS_PER_SHUFFLE + 1) * SENDS_PER_SHUFFLE;
        let shuffle = i32::try_from(self.sends / SENDS_PER_SHUFFLE).unwrap();
        self.written = Written::register(client, key(APP, shuffle), 1).await;
    }

    /// Asserts that every byte is readable.
    pub(super) async fn assert_readable(&self, client: &ShuffleClient) {
        self.written.assert_readable(client).await;
    }
}

impl Figures {
    /// Adds the sends of a later period.
    pub(super) fn add(&mut self, later: Self) {
        self.sends += later.sends;
        self.took.extend(later.took);
    }

    /// Returns the latency that `percent` percent of the sends did not exceed.
    pub(super) fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.took.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(at).copied().unwrap_or_default()
    }
}

impl Health {
    /// Adds the checks of a later period.
    pub(super) fn add(&mut self, later: &Self) {
        self.asked += later.asked;
        self.late += later.late;
        self.missed += later.missed;
        self.longest = self.longest.max(later.longest);
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, p99, longest] = [50, 99, 100].map(|percent| self.percentile(percent));
        let sends = self.sends;
        write!(f, "{sends} honest sends, median {median:.1?}, 99 % {p99:.1?}, longest {longest:.1?}")
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, late, missed, longest } = self;
        write!(
            f,
            "/health/live {asked} times, {late} after more than 1 s, {missed} asked again, longest {longest:.1?}"
        )
    }
}

/// Checks liveness until `until`.
pub(super) async fn watch(http: u16, until: Instant) -> Health {
    let mut health = Health::default();
    while Instant::now() < until {
        let began = Instant::now();
        // Retries a disconnected check, as health checkers do.
        while !matches!(timeout(WAIT_MAX, ask(http)).await, Ok(Ok(true))) && began.elapsed() < WAIT_MAX {
            health.missed += 1;
            sleep(Duration::from_millis(10)).await;
        }
        let took = began.elapsed();
        health.asked += 1;
        health.late += usize::from(took > Duration::from_secs(1));
        health.longest = health.longest.max(took);
        sleep_until(began + Duration::from_millis(200)).await;
    }
    health
}

async fn ask(http: u16) -> io::Result<bool> {
    let mut stream = TcpStream::connect(local(http)).await?;
    stream.write_all(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n").await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer.starts_with(b"HTTP/1.1 200"))
}
