//! The real HDFS that the tests of this binary take turns with, and whole workers over it.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};

use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::maven;

/// What waits for a NameNode that has just come back.
pub(crate) const SETTLE_DEADLINE: Duration = Duration::from_secs(120);

/// Started by the first test that needs it. Some tests stop its servers, so one test has it at a time.
static HDFS: LazyLock<Mutex<MiniHdfs>> = LazyLock::new(|| Mutex::new(MiniHdfs::start(&[])));

/// The next turn. `None` when Java or Maven is missing.
pub(crate) async fn real() -> Option<MutexGuard<'static, MiniHdfs>> {
    if !maven::is_available() {
        return None;
    }
    Some(HDFS.lock().await)
}
