//! The check at start: a file is written, read and deleted in a remote directory, as a batch would be.

use bytes::Bytes;

use super::{HdfsStore, RemoteLocation, RemoteStorage};
use crate::tiers::{StoreError, StoreErrorKind};

/// What is written; every server under a name of its own.
const CONTENT: &[u8] = b"uniffle-worker was here; this file can be deleted";

impl HdfsStore {
    /// Makes the directory and uses it once.
    ///
    /// # Errors
    /// Whatever does not work, with the path.
    pub async fn precheck(&self, location: &RemoteLocation) -> Result<(), StoreError> {
        let storage = RemoteStorage { path: location.to_string(), ..RemoteStorage::default() };
        let prepared = self.prepare(&storage)?;
        let (core, fs) = (&self.core, &*prepared.remote.fs);
        let root = &*prepared.root;
        let file = format!("{}/.precheck-{}", root.trim_end_matches('/'), core.server_id);
        core.timed(root, fs.make_dirs(root)).await?;
        // Of a worker that died at this point.
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
