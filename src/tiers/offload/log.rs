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
use crate::tiers::object::ObjectTier;
use crate::tiers::{LocalStore, MetadataLog, StoreError};
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
