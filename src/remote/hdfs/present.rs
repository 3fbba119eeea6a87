//! Finds the blocks of a partition in HDFS. Reads this worker's index files, as clients do
//! (docs/protocol.md §6.4).
//!
//! Used on rare paths: to determine lost blocks (`service::losses::verify`), and at a start to tell
//! which recovered blocks in memory are here too.
//!
//! Files that no writer uses are closed before they are read. A process that was killed during an
//! append leaves them open until its lease ends (an hour). Published blocks in open files may be
//! unreadable, to clients too.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::remote::{RemoteEntry, RemoteFs};
use super::writer::Writers;
use super::{HdfsCore, HdfsShuffle, HdfsStore, layout};
use crate::clock::{Instant, sleep, timeout};
use crate::log::IdSet;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Size of a part of an index that is read at a time, in whole records.
const CHUNK_BYTES: usize = RECORD_BYTES * 25_000;
/// Pause between two checks whether a file is closed, and the deadline for it. The NameNode makes
/// the DataNodes agree on the length of the last block, which takes some of their heartbeats.
const CLOSE_PAUSE: Duration = Duration::from_millis(500);
const CLOSE_DEADLINE: Duration = Duration::from_secs(60);

impl HdfsStore {
    /// Returns the blocks of a partition that a client finds in HDFS. Returns none for a shuffle
    /// without a remote path. If partitions share a directory, the result includes the blocks of
    /// its neighbours.
    ///
    /// # Errors
    /// The file system fails or is suspended: the blocks are unknown then. `Purged` if the shuffle
    /// was removed meanwhile.
    pub async fn present(&self, key: &ShuffleKey, partition: PartitionId) -> Result<IdSet, StoreError> {
        let Some(shuffle) = self.find(key) else { return Ok(IdSet::default()) };
        if !shuffle.remote.is_available() {
            return Err(shuffle.remote.suspended());
        }
        let writers = self.core.writers(&shuffle, partition);
        let found = self.core.find_blocks(&shuffle, &writers).await;
        shuffle.require_present()?;
        if found.is_err() {
            // Only failures are noted: a successful read does not show that DataNodes accept data.
            shuffle.remote.note(&found);
        }
        found
    }
}

impl HdfsCore {
    async fn find_blocks(
        &self,
        shuffle: &Arc<HdfsShuffle>,
        writers: &Arc<Writers>,
    ) -> Result<IdSet, StoreError> {
        let (fs, directory) = (&*shuffle.remote.fs, writers.directory());
        let mut present = IdSet::default();
        let unused = {
            let paused = timeout(self.config.write_timeout, writers.hold()).await;
            let paused = paused.map_err(|late| StoreError::io(directory, late.into()))?;
            let listing = Listing::new(self.list(fs, directory).await?, &self.server_id);
            let (in_use, unused) = listing.indexes().partition::<Vec<_>, _>(|name| paused.uses(name));
            for name in in_use {
                self.add_blocks(fs, directory, &listing, name, &mut present).await?;
            }
            unused.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        if unused.is_empty() {
            return Ok(present);
        }
        for name in &unused {
            for name in [layout::data_of(name), name.clone()] {
                self.close(fs, &format!("{directory}/{name}")).await?;
            }
        }
        let listing = Listing::new(self.list(fs, directory).await?, &self.server_id);
        for name in &unused {
            self.add_blocks(fs, directory, &listing, name, &mut present).await?;
        }
        Ok(present)
    }

    /// Closes a file that no writer uses. Succeeds if the file does not exist.
    async fn close(&self, fs: &dyn RemoteFs, path: &str) -> Result<(), StoreError> {
        let deadline = Instant::now() + CLOSE_DEADLINE;
        loop {
            match self.timed(path, fs.recover(path)).await {
                Ok(true) => return Ok(()),
                Err(error) if error.kind == StoreErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(error),
                Ok(false) if Instant::now() >= deadline => {
                    return Err(StoreError::io(
                        path,
                        io::Error::other("cannot close a partially written file yet"),
                    ));
                }
                Ok(false) => sleep(CLOSE_PAUSE).await,
            }
        }
    }

    /// Adds the blocks of an index whose bytes exist, up to the first one whose bytes do not.
    async fn add_blocks(
        &self,
        fs: &dyn RemoteFs,
        directory: &str,
        listing: &Listing,
        name: &str,
        present: &mut IdSet,
    ) -> Result<(), StoreError> {
        let path = format!("{directory}/{name}");
        let data_bytes = listing.bytes_of(&layout::data_of(name));
        let records_bytes = listing.bytes_of(name) / RECORD_BYTES as u64 * RECORD_BYTES as u64;
        let (mut at, mut end) = (0, 0_u64);
        while at < records_bytes {
            let length = usize::try_from(records_bytes - at).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            let bytes = self.timed(&path, fs.read_range(&path, at, length)).await?;
            if bytes.len() != length {
                return Err(StoreError::io(
                    &path,
                    io::Error::other("an index is shorter than it was listed"),
                ));
            }
            for record in records(&bytes) {
                let Ok(length) = u64::try_from(record.length) else { return Ok(()) };
                end = end.saturating_add(length);
                if end > data_bytes {
                    return Ok(());
                }
                present.add(record.block_id.unsigned_abs());
            }
            at += length as u64;
        }
        Ok(())
    }
}

/// Lengths of our files in a directory.
struct Listing(HashMap<String, u64>);

impl Listing {
    fn new(entries: Vec<RemoteEntry>, server_id: &str) -> Self {
        let own = |entry: &RemoteEntry| !entry.is_dir && layout::is_own(&entry.name, server_id);
        Self(entries.into_iter().filter(own).map(|entry| (entry.name, entry.length)).collect())
    }

    fn indexes(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str).filter(|name| layout::is_index(name))
    }

    /// Returns the length of a file, or 0 if it does not exist.
    fn bytes_of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}
