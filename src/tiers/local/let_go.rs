//! What is left to a successor: the metadata log, to be gone on with as it is ([`LocalStore::leave_log`]), or all but directories that do
//! not answer, where it runs beside this process: a call on them hangs in the kernel, and the process cannot end before it does.
//!
//! Such a process gives its other directories free, and keeps the locks of these until it ends. So the late write of a hung
//! thread meets nobody, and nobody else can have used them: with that it vouches for them (`durability`), and the
//! successor is proven without them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::config::LetGo;
use super::disk::LocalDisk;
use super::store::LocalStore;
use crate::clock::timeout;
use crate::durability::{LogError, Vouch};
use uniffle_io::DiskLock;

/// Clients wait while the log is ended. A successor that is told nothing of it writes it anew.
const LEAVE_DEADLINE: Duration = Duration::from_secs(1);

impl LocalStore {
    /// Ends the metadata log, and says how it is left to the successor that this process becomes: nothing is acknowledged any more.
    pub async fn leave_log(&self) -> LetGo {
        let vouch = timeout(LEAVE_DEADLINE, self.metadata.vouch(Vec::new(), true)).await;
        let vouch = vouch.ok().and_then(Result::ok);
        LetGo { paths: Vec::new(), vouch: vouch.filter(Vouch::is_of_all) }
    }

    /// Whether one of the claimed directories is among `paths`.
    pub fn holds_any(&self, paths: &[PathBuf]) -> bool {
        self.those(paths).next().is_some()
    }

    /// Does without directories that do not answer: the metadata log goes on elsewhere.
    ///
    /// # Errors
    /// It cannot, as when both copies are there.
    pub async fn avoid(&self, paths: &[PathBuf]) -> Result<(), LogError> {
        let silent: Vec<_> = self.those(paths).collect();
        silent.iter().for_each(|disk| disk.note(&io::ErrorKind::TimedOut.into()));
        self.metadata.vouch(silent.iter().map(|disk| disk.uuid).collect(), false).await.map(drop)
    }

    /// Lets go of everything but the locks of `paths`, which are returned: nothing is acknowledged any more.
    pub async fn let_go(&self, paths: Vec<PathBuf>) -> (LetGo, Vec<Box<dyn DiskLock>>) {
        let vouch = self.metadata.vouch(self.those(&paths).map(|disk| disk.uuid).collect(), true).await;
        if let Err(error) = &vouch {
            tracing::error!(%error, "cannot hand over unresponsive directories; results will be refused");
        }
        let is_silent = |root: &Path| paths.iter().any(|path| path == root);
        let locks = self.core.disks.iter().filter_map(|disk| Some((disk, disk.unlock()?)));
        let kept = locks.filter(|(disk, _)| is_silent(disk.io.root())).map(|(_, lock)| lock).collect();
        (LetGo { paths, vouch: vouch.ok() }, kept)
    }

    fn those<'a>(&'a self, paths: &'a [PathBuf]) -> impl Iterator<Item = &'a Arc<LocalDisk>> {
        self.core.disks.iter().filter(|disk| paths.iter().any(|path| path == disk.io.root()))
    }
}
