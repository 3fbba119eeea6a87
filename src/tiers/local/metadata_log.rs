//! The metadata log of a shuffle: every record goes to two disks when two are healthy.
//!
//! A report that is lost would make a shuffle's result short without anybody noticing, so one disk is not enough. The
//! order of the disks is the same for all records of a shuffle, which keeps its files few; a copy that fails goes to
//! the next disk. A full disk (above its watermark) is asked last: a record is small and it may be all that fits.

use bytes::Bytes;

use super::log::LogKind;
use super::metadata_record;
use super::shuffle::Shuffle;
use super::{Core, LocalStore, ShuffleHandle};
use crate::tiers::{DiskCondition, StoreError, StoreErrorKind};

/// Copies of a record.
const COPIES: usize = 2;

impl LocalStore {
    /// Writes a metadata record of a shuffle: when this returns `Ok` it survives the process, and power loss where writes are
    /// synced.
    ///
    /// # Errors
    /// `Purged`; `InvalidBatch` when it is too long; otherwise the last disk's error: no disk took it.
    pub async fn append_metadata(&self, handle: &ShuffleHandle, content: &[u8]) -> Result<(), StoreError> {
        self.core.append_metadata(&handle.shuffle, content).await
    }
}

impl Core {
    pub(super) async fn append_metadata(&self, shuffle: &Shuffle, content: &[u8]) -> Result<(), StoreError> {
        let record = metadata_record::encode(shuffle.incarnation, shuffle.next_record(), content);
        let record = record.ok_or_else(|| shuffle.error(StoreErrorKind::InvalidBatch))?;
        self.write_record(shuffle, record).await
    }

    async fn write_record(&self, shuffle: &Shuffle, record: Bytes) -> Result<(), StoreError> {
        let mut disks = self.disks_in_order(shuffle).into_iter();
        let mut copies = 0;
        let mut last_error = None;
        while copies < COPIES {
            let next: Vec<usize> = disks.by_ref().take(COPIES - copies).collect();
            if next.is_empty() {
                break;
            }
            let writes = next.into_iter().map(|disk| self.write_copy(shuffle, disk, record.clone()));
            for written in futures::future::join_all(writes).await {
                match written {
                    Ok(()) => copies += 1,
                    Err(error) => {
                        tracing::warn!(shuffle = %shuffle.key, %error, "metadata record failed, trying next disk");
                        self.metrics.write_exceptions.inc();
                        last_error = Some(error);
                    }
                }
            }
            shuffle.require_present()?;
        }
        match (copies, last_error) {
            (0, error) => Err(error.unwrap_or_else(|| self.no_disk())),
            _ => Ok(()),
        }
    }

    /// The disks in the order in which a shuffle's records are offered to them.
    fn disks_in_order(&self, shuffle: &Shuffle) -> Vec<usize> {
        let count = self.disks.len();
        let first = usize::try_from(shuffle.incarnation % count as u64).unwrap_or(0);
        let all = (0..count).map(|step| (first + step) % count);
        let mut disks: Vec<(DiskCondition, usize)> =
            all.map(|index| (self.disks[index].condition(), index)).collect();
        disks.retain(|(condition, _)| *condition <= DiskCondition::Full);
        disks.sort_by_key(|(condition, _)| *condition);
        disks.into_iter().map(|(_, index)| index).collect()
    }

    async fn write_copy(&self, shuffle: &Shuffle, disk: usize, record: Bytes) -> Result<(), StoreError> {
        let disk = &self.disks[disk];
        let bytes = record.len() as u64;
        let (log, offset) = shuffle.reserve(self, disk, LogKind::Metadata, bytes).await?;
        let file = self.writer(&log).await?;
        match disk.call(self.config.metadata_timeout, file.write_at(vec![record], offset)).await {
            Ok(()) => self.make_durable(&log, &file, self.config.metadata_timeout).await,
            Err(error) => {
                log.close();
                Err(StoreError::io(log.full_path(), error))
            }
        }
    }
}
