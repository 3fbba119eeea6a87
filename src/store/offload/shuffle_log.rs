//! Metadata records of a shuffle whose data may be offloaded.
//!
//! Records are appended to the log of the disks, which is copied to the store in the background.
//! The store has all records of a shuffle before the first offload. Each later record is
//! acknowledged once the store has it.
//!
//! All other records are acknowledged without the store, with one exception: if an earlier
//! registration of the shuffle has offloaded data, a new registration waits until the store knows
//! that the earlier one has ended.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::shuffle::TieredShuffle;
use crate::store::object::Bucket;
use crate::store::recovery::take_over;
use crate::store::{LocalStore, RegistrationLog, StoreError};
use uniffle_wire::types::ShuffleKey;

/// Incarnations of ended registrations with offloaded data, while the store may not know of the
/// end.
pub(super) type Ends = Mutex<HashMap<ShuffleKey, u64>>;

/// The metadata log for one registration.
pub(super) struct ShuffleLog {
    pub(super) local: Arc<LocalStore>,
    pub(super) object: Arc<Bucket>,
    pub(super) ends: Arc<Ends>,
    pub(super) shuffle: Arc<TieredShuffle>,
}

impl ShuffleLog {
    /// Waits for the store if data of the shuffle or of an earlier registration was offloaded. A
    /// start on empty disks would recover the earlier registration until the store knows that it
    /// has ended.
    async fn acknowledged(&self, position: u64) -> Result<(), StoreError> {
        let key = &self.shuffle.key;
        let earlier = self.ends.lock().get(key).copied();
        if let Some(earlier) = earlier {
            self.object.end_known(position, key).await?;
            forget_end(&self.ends, key, earlier);
        }
        if self.shuffle.is_offloaded() { self.object.known(position).await } else { Ok(()) }
    }
}

/// Removes a registration from `ends`, because the store knows that it has ended.
pub(super) fn forget_end(ends: &Ends, key: &ShuffleKey, incarnation: u64) {
    let mut ends = ends.lock();
    if ends.get(key) == Some(&incarnation) {
        ends.remove(key);
    }
}

impl RegistrationLog for ShuffleLog {
    /// Once data was offloaded, a record that only the disks have was never acknowledged. It counts
    /// as durable when the store has it too. Without disks, the store has everything.
    fn is_recovered_durable(&self) -> bool {
        !self.local.has_disks()
            || self.local.metadata.is_begun()
                && (!self.shuffle.is_offloaded() || self.object.log().is_begun())
    }

    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let append = async move {
            // Records of an offloaded shuffle are acknowledged once the store has them.
            let _writing = match self.shuffle.is_offloaded() {
                true => None,
                false => Some(self.object.require_disks().await?),
            };
            let position =
                take_over::append(&self.local.metadata, &self.shuffle.local.shuffle, record).await?;
            self.acknowledged(position).await
        };
        append.boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        let mark = async move {
            let position =
                take_over::mark_incomplete(&self.local.metadata, &self.shuffle.local.shuffle, reason).await?;
            self.acknowledged(position).await
        };
        mark.boxed()
    }
}
