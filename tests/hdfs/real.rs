//! The real HDFS shared by most tests of this binary. Tests with two NameNodes or Kerberos start
//! their own.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};

use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::maven;

/// Time limit of a wait over the real HDFS, whose NameNode may be restarting.
pub(crate) const REAL_HDFS_DEADLINE: Duration = Duration::from_secs(120);

/// Started on first use. Some tests stop its servers, so tests use it one at a time.
static HDFS: LazyLock<Mutex<MiniHdfs>> = LazyLock::new(|| Mutex::new(MiniHdfs::start(&[])));

/// Waits until no other test uses the HDFS. Returns `None` without Java or Maven, which fails in
/// CI.
pub(crate) async fn real() -> Option<MutexGuard<'static, MiniHdfs>> {
    if !maven::is_available() {
        return None;
    }
    Some(HDFS.lock().await)
}
