//! Records of a shuffle above an object store.
//!
//! Records are appended to the disks' log, which is copied to the store in the background. Before data of a shuffle is moved, the store
//! has its records; from then on a record is acknowledged once the store has it. Nothing else waits for the store, except a registration
//! of a shuffle of which an earlier registration had moved data: the store must know first that the earlier one is over.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::shuffle::Shuffle;
use super::tier::OffloadTier;
use crate::tiers::object::{ObjectTier, Uploads};
use crate::tiers::{LocalStore, MetadataLog, StoreError, StoreErrorKind, Tier as _};
use uniffle_wire::types::ShuffleKey;

/// Registrations with moved data that are over, by number, as long as the store may not know that.
pub(super) type Ends = Mutex<HashMap<ShuffleKey, u64>>;

/// The metadata log, for one registration.
pub(super) struct ShuffleLog {
    pub(super) local: Arc<LocalStore>,
    pub(super) object: Arc<ObjectTier>,
    pub(super) ends: Arc<Ends>,
    pub(super) shuffle: Arc<Shuffle>,
}

impl ShuffleLog {
    /// Waits for the store, if data of the shuffle was moved, or of an earlier registration: on empty disks a start would believe that
    /// one until the store knows of this.
    async fn acknowledged(&self, position: u64) -> Result<(), StoreError> {
        let key = &self.shuffle.key;
        let earlier = self.ends.lock().get(key).copied();
        if let Some(earlier) = earlier {
            self.object.end_known(position, key).await?;
            forget_end(&self.ends, key, earlier);
        }
        if self.shuffle.is_moved() { self.object.known(position).await } else { Ok(()) }
    }
}

/// The store knows that a registration is over.
pub(super) fn forget_end(ends: &Ends, key: &ShuffleKey, incarnation: u64) {
    let mut ends = ends.lock();
    if ends.get(key) == Some(&incarnation) {
        ends.remove(key);
    }
}

impl MetadataLog for ShuffleLog {
    /// A record that is known of the disks alone was acknowledged to nobody once data was moved.
    fn is_recovered_durable(&self) -> bool {
        self.local.is_log_begun() && (!self.shuffle.is_moved() || self.object.log().is_begun())
    }

    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let append = async move {
            let position = self.local.append_record(&self.shuffle.local, record).await?;
            self.acknowledged(position).await
        };
        append.boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        let mark = async move {
            let position = self.local.mark_incomplete(&self.shuffle.local, reason).await?;
            self.acknowledged(position).await
        };
        mark.boxed()
    }
}

impl OffloadTier {
    /// Makes sure that the store has all records of a shuffle, and will have later ones before they are acknowledged. One caller at a time.
    ///
    /// # Errors
    /// `Purged`; the store does not take them, or the log cannot be written.
    pub(super) async fn make_known(&self, shuffle: &Arc<Shuffle>) -> Result<Uploads, StoreError> {
        if !self.is_present(shuffle) {
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        if !shuffle.is_known() {
            // First without the records waiting: the store may hang.
            self.object.known(self.object.log().add_mark()).await?;
            self.set_moved(shuffle)?;
            let position = self.local.mark_moved(&shuffle.local).await?;
            self.object.known(position).await?;
            shuffle.set_known();
        }
        let uploads = self.object.begin(&shuffle.key, shuffle.local.incarnation())?;
        // What is forgotten is forgotten here first.
        if !self.is_present(shuffle) {
            self.object.leave(&shuffle.key);
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        Ok(uploads)
    }

    /// From now on records of a shuffle wait for the store: one whose position is given before is in the store with the next one.
    fn set_moved(&self, shuffle: &Arc<Shuffle>) -> Result<(), StoreError> {
        // Whoever forgets the shuffle finds this, or this finds that it is forgotten.
        let _ends = self.ends.lock();
        if !self.is_present(shuffle) {
            return Err(StoreError::new(StoreErrorKind::Purged, shuffle.key.to_string()));
        }
        shuffle.set_moved();
        Ok(())
    }
}
