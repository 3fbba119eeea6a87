//! The check at start: writes, reads and deletes a file in a remote directory, like a batch.

use bytes::Bytes;

use super::{HdfsStore, RemoteLocation, RemoteStorage};
use crate::store::{StoreError, StoreErrorKind};

/// Content of the file. Every server uses its own file name.
const CONTENT: &[u8] = b"uniffle-worker was here; this file can be deleted";

impl HdfsStore {
    /// Creates the directory and uses it once.
    ///
    /// # Errors
    /// The operation that fails, with the path.
    pub async fn precheck(&self, location: &RemoteLocation) -> Result<(), StoreError> {
        let storage = RemoteStorage { path: location.to_string(), ..RemoteStorage::default() };
        let prepared = self.prepare(&storage)?;
        let (core, fs) = (&self.core, &*prepared.remote.fs);
        let root = &*prepared.root;
        let file = format!("{}/.precheck-{}", root.trim_end_matches('/'), core.server_id);
        core.timed(root, fs.make_dirs(root)).await?;
        // Removes the file of a worker that ended during its check.
        core.timed(&file, fs.delete(&file, false)).await?;
        let half = CONTENT.len() / 2;
        core.timed(&file, fs.create(&file, vec![Bytes::from_static(&CONTENT[..half])])).await?;
        core.timed(&file, fs.append(&file, vec![Bytes::from_static(&CONTENT[half..])])).await?;
        let read = core.timed(&file, fs.read(&file)).await?;
        if read != CONTENT {
            return Err(StoreError::new(StoreErrorKind::Corrupt, &file));
        }
        core.timed(&file, fs.delete(&file, false)).await?;
        tracing::info!(path = %location, "checked the remote path");
        Ok(())
    }
}
