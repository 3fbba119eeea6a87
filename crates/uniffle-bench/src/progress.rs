//! Progress of a phase: a bar with rate and remaining time on a terminal, periodic lines otherwise.
//!
//! It writes to stderr only, so that reports on stdout stay clean. It does not measure: the caller
//! reports the bytes.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Interval between two lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Progress of one phase.
pub(crate) struct PhaseProgress {
    name: String,
    bar: Option<ProgressBar>,
    begin: Instant,
    last_line: Mutex<Instant>,
    expected: u64,
}

impl PhaseProgress {
    pub(crate) fn start(name: &str, expected: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "{prefix} {bar:16} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
            let style = ProgressStyle::with_template(style).expect("the template is constant and valid");
            ProgressBar::new(expected).with_style(style).with_prefix(name.to_owned())
        });
        let now = Instant::now();
        Self { name: name.to_owned(), bar, begin: now, last_line: Mutex::new(now), expected }
    }

    pub(crate) fn at(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            return;
        }
        let mut last = self.last_line.lock();
        if last.elapsed() >= LINE_INTERVAL {
            *last = Instant::now();
            let seconds = self.begin.elapsed().as_secs_f64();
            let (done, all) = (bytes as f64 / 1e9, self.expected as f64 / 1e9);
            let _ = writeln!(
                std::io::stderr().lock(),
                "{}: {done:.2} of {all:.2} GB after {seconds:.0} s, {:.3} GB/s",
                self.name,
                done / seconds
            );
        }
    }

    pub(crate) fn end(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            bar.finish_and_clear();
        }
    }
}
