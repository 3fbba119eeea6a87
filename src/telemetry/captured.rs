//! What a unit test's own thread logs, and nothing that other tests log beside it.
//!
//! Invariant: a line is there whichever thread came to it first. tracing remembers for each place that logs whether anybody
//! listens, and while the process has one subscriber it asks the thread that comes there first: one without a subscriber, which
//! any other test's is, would silence the place for all. With two it asks the subscribers themselves; so there are two.

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::dispatcher::{Dispatch, set_default};
use tracing::subscriber::{DefaultGuard, NoSubscriber};

/// Lines of this thread, from its beginning to its end.
#[derive(Debug)]
pub(crate) struct CapturedLog {
    lines: Lines,
    _second: Dispatch,
    _guard: DefaultGuard,
}

#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    /// From now on. The tasks of a current-thread runtime are its thread's.
    pub(crate) fn of_this_thread() -> Self {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let second = Dispatch::new(NoSubscriber::new());
        Self { lines, _second: second, _guard: set_default(&Dispatch::new(subscriber)) }
    }

    /// What was logged so far.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.lines.0.lock()).into_owned()
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A place that another thread, without a subscriber, is the first to come to.
#[test]
fn who_comes_first_does_not_matter() {
    let log = CapturedLog::of_this_thread();
    let tell = || tracing::warn!("told twice, heard once");
    std::thread::scope(|scope| scope.spawn(tell).join().expect("it only logs"));
    assert_eq!(log.text(), "");
    tell();
    assert!(log.text().contains("told twice, heard once"), "{}", log.text());
}
