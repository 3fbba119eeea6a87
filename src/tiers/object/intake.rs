//! What is moved here from local disks: a registration that takes extents whose place in their streams is known, and what
//! its shuffle says, from those who have both.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;

use super::core::Core;
use super::page::Noted;
use super::shuffle::Shuffle;
use super::upload::{MOVED_PARTS_IN_FLIGHT, Source, one_from};
use crate::tiers::StoreError;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A registration that an earlier process left, as those see it who have its other half.
#[derive(Debug, Clone)]
pub struct Bound {
    /// The shuffle.
    pub key: ShuffleKey,
    /// By which number local disks knew the registration last, if any did.
    pub local: Option<u64>,
    /// All numbers by which local disks knew it, in the order in which they were written.
    pub locals: Vec<u64>,
    /// Whether it has segments: then everything that it had said on local disks was here once.
    pub has_segments: bool,
    /// Whether the page with its registration is lost: it is neither being deleted nor was it given up.
    pub has_lost_registration: bool,
    /// Whether all is here that it had said on local disks.
    pub is_whole: bool,
    /// Whether some of its pages are gone.
    pub has_gap: bool,
    /// Whether its pages, which are all there, say that records may be missing.
    pub is_called_incomplete: bool,
    /// Its registrations, as they stand in the metadata log.
    pub registrations: Vec<Bytes>,
    /// Its number here.
    pub incarnation: u64,
}

/// One registration. Clones are the same.
#[derive(Debug, Clone)]
pub struct Uploads {
    pub(super) core: Arc<Core>,
    pub(super) shuffle: Arc<Shuffle>,
}

impl Uploads {
    /// Where a partition's stream ends in the store.
    #[must_use]
    pub fn end(&self, partition: PartitionId) -> u64 {
        self.shuffle.stream_bytes(partition)
    }

    /// Where those of all partitions do.
    #[must_use]
    pub fn ends(&self) -> HashMap<PartitionId, u64> {
        self.shuffle.ends()
    }

    /// Brings up one object of what `source` has; its payload, or none when there is nothing. When this returns it can be
    /// read from the store.
    ///
    /// # Errors
    /// The source's or the store's: nothing of it counts then.
    pub async fn take(&self, source: &mut dyn Source) -> Result<Option<u64>, StoreError> {
        one_from(&self.core, &self.shuffle, source).await
    }

    /// When this returns `Ok` all of it outlives this machine.
    ///
    /// # Errors
    /// `Purged`, `InvalidBatch` when one is too long, or why the store has not taken them.
    pub async fn note(&self, noted: &[Noted]) -> Result<(), StoreError> {
        // Also where the store's answer is lost.
        if noted.iter().any(|noted| matches!(noted, Noted::Local(1..))) {
            self.shuffle.begin_to_be_believed()?;
        }
        let notes = noted.iter().map(|noted| self.shuffle.notes.append(&self.core, noted));
        join_all(notes.collect::<Vec<_>>()).await.into_iter().collect()
    }

    /// Begins to tell what the shuffle has said on local disks, in pages that prove nothing without the first one.
    ///
    /// # Errors
    /// As [`Uploads::note`]; the store may still carry out an attempt at the first page, after a deletion too.
    pub async fn begin_to_tell(&self) -> Result<(), StoreError> {
        self.note(&[Noted::Local(0)]).await?;
        let ended = self.shuffle.notes.end_first_page().await;
        // It is tried again after a pause that grows.
        if ended.is_err() {
            self.core.condition.note(&ended);
        }
        ended
    }

    /// Memory that [`Uploads::take`] holds at most beside records: parts on their way, one that fills, and a chunk that is read.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let part = self.core.settings.part_bytes as u64;
        let held = (MOVED_PARTS_IN_FLIGHT as u64 + 1) * part + READ_CHUNK_BYTES_MAX as u64;
        // What of buffers lies idle (`StreamBuffers`).
        held + held / 16
    }
}
