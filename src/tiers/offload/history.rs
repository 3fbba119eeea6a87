//! The records of a shuffle are copied into the store before its first move.
//!
//! The copy has two phases. In the first the disks' log is copied while new records are acknowledged without the store and collected
//! ([`Arrived`]), so a store that does not answer delays no report. In the second, which is one request, the collected records and the
//! number of the registration follow; records wait meanwhile. A start believes the copy once it has that number. A record that is
//! copied twice says nothing new.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::shuffle::{Arrived, InStore, Shuffle};
use super::tier::OffloadTier;
use crate::clock::Instant;
use crate::durability::{Heard, LogError};
use crate::tiers::object::{Noted, Uploads};
use crate::tiers::{Purge, StoreError, StoreErrorKind, Tier as _};

/// Records and bytes that are brought up together.
const TOGETHER_MAX: usize = 256;
const TOGETHER_BYTES_MAX: usize = 1 << 20;

const AGAIN_PAUSE_MIN: Duration = Duration::from_secs(10);
const AGAIN_PAUSE_MAX: Duration = Duration::from_secs(600);

/// When something is [told again](OffloadTier::tell_again), and which one is tried.
#[derive(Debug)]
pub(super) struct Again {
    due: Instant,
    pause: Duration,
    failed: usize,
}

impl Default for Again {
    fn default() -> Self {
        Self { due: Instant::now(), pause: Duration::ZERO, failed: 0 }
    }
}

impl OffloadTier {
    /// Makes sure that the store has all records of a shuffle. One caller at a time.
    ///
    /// # Errors
    /// The store's, or that the metadata log cannot be read: then the store has nothing of the shuffle.
    pub(super) async fn make_known(&self, shuffle: &Arc<Shuffle>) -> Result<Uploads, StoreError> {
        if shuffle.is_known_there.load(Ordering::Acquire)
            && let InStore::Everything(uploads) = &*shuffle.in_store.read().await
        {
            return Ok(uploads.clone());
        }
        let arrived = Arc::new(Arrived::new(&self.memory));
        let uploads = {
            let mut in_store = shuffle.in_store.write().await;
            let begun = self.object.begin(&shuffle.key)?;
            // What is forgotten is forgotten here first: one that is still known here goes from the store as well.
            if !self.is_present(shuffle) {
                self.discard_object(&shuffle.key);
                return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
            }
            // A call that was dropped in its second phase may have written the number: then every record still waits for the store.
            if !matches!(&*in_store, InStore::Everything(_)) {
                *in_store = InStore::Copying(Arc::clone(&arrived));
            }
            begun
        };
        match self.copy_history(shuffle, &uploads, &arrived).await {
            Ok(()) => {
                shuffle.is_known_there.store(true, Ordering::Release);
                Ok(uploads)
            }
            Err(error) => {
                // Together: what is said next finds that the store may have all but that.
                let mut in_store = shuffle.in_store.write().await;
                *in_store = InStore::Nothing;
                self.discard_object(&shuffle.key);
                Err(error)
            }
        }
    }

    async fn copy_history(
        &self,
        shuffle: &Shuffle,
        uploads: &Uploads,
        arrived: &Arrived,
    ) -> Result<(), StoreError> {
        uploads.begin_to_tell().await?;
        self.tell_history(shuffle, uploads).await?;
        let (records, charge) = arrived.take()?;
        uploads.note(&records).await?;
        drop((records, charge));
        // Every record that was acknowledged without the store is in it before the number is.
        let mut in_store = shuffle.in_store.write().await;
        let (mut records, _charge) = arrived.take()?;
        records.push(Noted::Local(shuffle.local.incarnation()));
        // First: a start may believe the copy from here on, also where the answer is lost or this call is dropped.
        *in_store = InStore::Everything(uploads.clone());
        uploads.note(&records).await
    }

    /// Tells all that the disks' log has.
    async fn tell_history(&self, shuffle: &Shuffle, uploads: &Uploads) -> Result<(), StoreError> {
        let mut source = 0;
        loop {
            match self.tell_from(shuffle, uploads, source).await? {
                Ok(()) => return Ok(()),
                // What was told twice says nothing new.
                Err(error) => {
                    tracing::warn!(shuffle = %shuffle.key, %error, "this copy of the metadata log cannot be read; reading the other one");
                    source += 1;
                }
            }
        }
    }

    /// Tells what one source of the log has; an error of the log in what is returned, others at once.
    async fn tell_from(
        &self,
        shuffle: &Shuffle,
        uploads: &Uploads,
        source: usize,
    ) -> Result<Result<(), LogError>, StoreError> {
        let history = self.local.history(&shuffle.local).await?;
        let cannot_be_read = || StoreError::new(StoreErrorKind::Unhealthy, "the metadata log cannot be read");
        let mut reader = history.read(source).ok_or_else(cannot_be_read)?;
        let (mut together, mut bytes) = (Vec::new(), 0);
        loop {
            let heard = match reader.next().await {
                Ok(heard) => heard,
                Err(error) => return Ok(Err(error)),
            };
            let is_over = heard.is_none();
            match heard {
                Some(Heard::Said(said)) => {
                    bytes += said.len();
                    together.push(Noted::Said(said));
                }
                Some(Heard::Incomplete(reason)) => together.push(Noted::Incomplete(reason)),
                None => {}
            }
            if is_over || together.len() >= TOGETHER_MAX || bytes >= TOGETHER_BYTES_MAX {
                uploads.note(&together).await?;
                together.clear();
                bytes = 0;
            }
            if is_over {
                return Ok(Ok(()));
            }
        }
    }

    /// Tells all again of one of the shuffles of which the store was told, while a directory was away, that records may be missing, and
    /// of which the disks have proven since that none is. Whether there was one.
    pub(super) async fn tell_again(&self, again: &mut Again) -> bool {
        let is_called_incomplete = |it: &Shuffle| it.is_called_incomplete.load(Ordering::Acquire);
        let shuffles = self.shuffles.iter().filter(|it| is_called_incomplete(it));
        let shuffles: Vec<_> = shuffles.map(|it| Arc::clone(&*it)).collect();
        if shuffles.is_empty() || Instant::now() < again.due {
            return false;
        }
        let shuffle = &shuffles[again.failed % shuffles.len()];
        let uploads = match &*shuffle.in_store.read().await {
            InStore::Everything(uploads) => uploads.clone(),
            InStore::Nothing | InStore::Copying(_) => return false,
        };
        let told = async {
            uploads.note(&[Noted::Local(0)]).await?;
            self.tell_history(shuffle, &uploads).await?;
            uploads.note(&[Noted::Local(shuffle.local.incarnation())]).await
        };
        match told.await {
            Ok(()) => {
                shuffle.is_called_incomplete.store(false, Ordering::Release);
                true
            }
            Err(error) => {
                tracing::warn!(shuffle = %shuffle.key, %error, "the object store is not told yet that nothing of it is missing");
                // What was told of it stays in the store: a log that cannot be read is not told over and over.
                again.pause = (again.pause * 2).clamp(AGAIN_PAUSE_MIN, AGAIN_PAUSE_MAX);
                again.due = Instant::now() + again.pause;
                again.failed += 1;
                false
            }
        }
    }

    /// Deletes what the store has of a shuffle.
    pub(super) fn discard_object(&self, key: &uniffle_wire::types::ShuffleKey) {
        let deletion = Arc::clone(&self.object).forget(&key.app, std::slice::from_ref(key), Purge::Shuffles);
        if let Some(deletion) = deletion {
            self.tasks.spawn("object clean-up", deletion);
        }
    }
}
