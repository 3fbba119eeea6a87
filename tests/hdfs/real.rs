//! The real HDFS shared by the tests of this binary, and workers over it.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};

use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::maven;

/// Upper bound for operations that wait for a restarted NameNode.
pub(crate) const SETTLE_DEADLINE: Duration = Duration::from_secs(120);

/// Started on first use. Some tests stop its servers, so tests use it one at a time.
static HDFS: LazyLock<Mutex<MiniHdfs>> = LazyLock::new(|| Mutex::new(MiniHdfs::start(&[])));

/// Waits for the HDFS. Returns `None` without Java or Maven.
pub(crate) async fn real() -> Option<MutexGuard<'static, MiniHdfs>> {
    if !maven::is_available() {
        return None;
    }
    Some(HDFS.lock().await)
}
