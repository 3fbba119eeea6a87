//! Captures the log lines of a test's own thread.
//!
//! Invariant: a line is captured even if another thread reaches the log statement first. tracing
//! caches for each statement whether a subscriber is interested. While the process has one
//! subscriber, tracing only asks the subscriber of the current thread. If the thread of another
//! test asks first, it has none, and the statement stays silent for all threads. With two
//! subscribers, tracing asks both. Each capture therefore creates a second one that does nothing.

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::dispatcher::{Dispatch, set_default};
use tracing::subscriber::{DefaultGuard, NoSubscriber};

/// Log lines of this thread while this exists.
#[derive(Debug)]
pub struct CapturedLog {
    lines: CapturedLines,
    _second: Dispatch,
    _guard: DefaultGuard,
}

#[derive(Debug, Clone, Default)]
struct CapturedLines(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    /// Starts capturing. Tasks of a current-thread runtime run on its thread and are included.
    pub fn of_this_thread() -> Self {
        let lines = CapturedLines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let second = Dispatch::new(NoSubscriber::new());
        Self { lines, _second: second, _guard: set_default(&Dispatch::new(subscriber)) }
    }

    /// Returns the lines captured so far.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.lines.0.lock()).into_owned()
    }
}

impl std::io::Write for CapturedLines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn statement_reached_first_elsewhere_is_captured() {
    let log = CapturedLog::of_this_thread();
    let warn = || tracing::warn!("logged twice, captured once");
    std::thread::scope(|scope| scope.spawn(warn).join().expect("the thread only logs"));
    assert_eq!(log.text(), "");
    warn();
    assert!(log.text().contains("logged twice, captured once"), "{}", log.text());
}
