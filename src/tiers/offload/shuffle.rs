//! One registration of a shuffle on the disks and, from its first move on, in the store.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::RwLock;

use crate::tiers::object::{Noted, Uploads};
use crate::tiers::{ExtentWrite, MetadataLog, ShuffleHandle, StoreError, TierBatch, TierShuffle};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Both halves of a registration, and where each partition is cut between them.
#[derive(Debug)]
pub(super) struct Shuffle {
    pub(super) key: ShuffleKey,
    pub(super) local: ShuffleHandle,
    /// Its registration in the store. Who appends what it says holds this shared, who begins or ends to have it in both alone.
    pub(super) uploads: RwLock<Option<Uploads>>,
    /// The store has all that it said.
    pub(super) is_known_there: AtomicBool,
    /// Partitions that are cold, with bytes of which some are on the disks.
    pub(super) cold: Mutex<HashSet<PartitionId>>,
    pub(super) cold_bytes: AtomicU64,
    /// Published bytes at the last look that found nothing that can be moved.
    pub(super) stuck_at: AtomicU64,
}

impl Shuffle {
    pub(super) fn new(key: ShuffleKey, local: ShuffleHandle, uploads: Option<Uploads>) -> Self {
        let is_known_there = AtomicBool::new(uploads.is_some());
        Self {
            key,
            local,
            uploads: RwLock::new(uploads),
            is_known_there,
            cold: Mutex::default(),
            cold_bytes: AtomicU64::new(0),
            stuck_at: AtomicU64::new(u64::MAX),
        }
    }

    /// Takes note of what of a batch is cold.
    fn note_cold(&self, extents: &[(PartitionId, u64)], cold_bytes: u64) {
        let cold = extents.iter().filter(|(_, length)| *length > cold_bytes);
        for (partition, length) in cold {
            self.cold.lock().insert(*partition);
            self.cold_bytes.fetch_add(*length, Ordering::Relaxed);
        }
    }
}

/// A registration that takes batches.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) shuffle: Arc<Shuffle>,
    /// An extent that is longer is cold.
    pub(super) cold_bytes: u64,
}

impl TierShuffle for Handle {
    fn is_accepting(&self) -> bool {
        TierShuffle::is_accepting(&self.shuffle.local)
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let of = |extent: &ExtentWrite| (extent.partition, extent.length);
        let extents: Vec<_> = batch.extents.iter().map(of).collect();
        let write = async move {
            TierShuffle::write(&self.shuffle.local, batch).await?;
            self.shuffle.note_cold(&extents, self.cold_bytes);
            Ok(())
        };
        write.boxed()
    }
}

/// What a registration says, for the disks and the store.
pub(super) struct BothLogs {
    pub(super) local: Arc<dyn MetadataLog>,
    pub(super) shuffle: Arc<Shuffle>,
}

impl MetadataLog for BothLogs {
    fn is_recovered_durable(&self) -> bool {
        self.local.is_recovered_durable()
    }

    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let append = async move {
            let uploads = self.shuffle.uploads.read().await;
            self.local.append(record.clone()).await?;
            match &*uploads {
                Some(uploads) => uploads.note(&[Noted::Said(record)]).await,
                None => Ok(()),
            }
        };
        append.boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        let mark = async move {
            let uploads = self.shuffle.uploads.read().await;
            self.local.mark_incomplete(reason).await?;
            match &*uploads {
                Some(uploads) => uploads.note(&[Noted::Incomplete(reason.to_owned())]).await,
                None => Ok(()),
            }
        };
        mark.boxed()
    }
}
