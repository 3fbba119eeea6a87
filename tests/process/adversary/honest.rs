//! The honest application: it writes small sends, reads them back, and asks whether the worker lives.

use std::fmt;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::clients::{key, local};

use crate::writes::Written;

/// Its id.
pub(super) const APP: &str = "honest";
/// An honest send.
const SEND_BYTES: u32 = 16 << 10;
/// Between two honest sends, so that an hour of them is no attack.
const SEND_PAUSE: Duration = Duration::from_millis(20);
/// Sends after which all that was written is read.
const SENDS_PER_READ: usize = 100;
/// Writes of one shuffle; then there is a new one, so that what is read again stays small.
const SENDS_PER_SHUFFLE: usize = 500;

/// Longer than what is asserted of an answer to a question after the health.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the application has written.
pub(super) struct Honest {
    written: Written,
    sends: usize,
}

/// How long its sends took, with their tickets and reports.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) sends: usize,
    took: Vec<Duration>,
}

/// How the questions after the health went.
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
        // What slow readers ask for.
        written.task(client, 0, 1 << 20).await.expect("sent");
        Self { written, sends: 0 }
    }

    /// Writes and reads until `until`, at least once.
    pub(super) async fn work(&mut self, client: &ShuffleClient, until: Instant) -> Figures {
        let mut figures = Figures::default();
        loop {
            self.sends += 1;
            if self.sends.is_multiple_of(SENDS_PER_SHUFFLE) {
                self.assert_readable(client).await;
                let shuffle = i32::try_from(self.sends / SENDS_PER_SHUFFLE).expect("not so many");
                self.written = Written::register(client, key(APP, shuffle), 1).await;
            }
            let task = i64::try_from(self.sends).expect("not so many");
            let began = Instant::now();
            // Its ticket is waited for; with that the send is taken.
            self.written.task(client, task, SEND_BYTES).await.expect("an honest send is taken");
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

    /// Begins a new shuffle: what was in memory of the old one is gone.
    pub(super) async fn begin_again(&mut self, client: &ShuffleClient) {
        self.sends = (self.sends / SENDS_PER_SHUFFLE + 1) * SENDS_PER_SHUFFLE;
        let shuffle = i32::try_from(self.sends / SENDS_PER_SHUFFLE).expect("not so many");
        self.written = Written::register(client, key(APP, shuffle), 1).await;
    }

    /// Every byte is there.
    pub(super) async fn assert_readable(&self, client: &ShuffleClient) {
        self.written.assert_readable(client).await;
    }
}

impl Figures {
    /// So many percent of the sends took at most this.
    pub(super) fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.took.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(at).copied().unwrap_or_default()
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

/// Asks whether the worker lives until `until`.
pub(super) async fn watch(http: u16, until: Instant) -> Health {
    let mut health = Health::default();
    while Instant::now() < until {
        let began = Instant::now();
        // One that is cut off is asked again, as those who look after the health do.
        while !matches!(timeout(PATIENCE, ask(http)).await, Ok(Ok(true))) && began.elapsed() < PATIENCE {
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
