//! A complete in-memory tier in one file, read through the worker like local data.
//! [`Environment::tiers`](uniffle_worker::server::Environment::tiers) passes it to a worker.

use std::collections::HashMap;
use std::fmt;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use uniffle_io::ReadBuffers;
use uniffle_wire::index::{IndexRecord, RECORD_BYTES};
use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleKey};
use uniffle_worker::store::{
    Admission, Capability, ChunkRead, ExtentWrite, MaintainedTier, Purge, RemoteStorage, ServedData,
    ServedIndex, ServedTier, StoreError, StoreErrorKind, Tier, TierBatch, TierNames, TierRole, TierShuffle,
    TierState, TierUsage,
};

/// An in-memory tier.
#[derive(Debug, Default)]
pub struct ThirdTier {
    shuffles: Mutex<HashMap<ShuffleKey, Arc<MemoryShuffle>>>,
    synced_bytes: AtomicU64,
    /// Remote storage of the last registration.
    last_remote_storage: Mutex<Option<RemoteStorage>>,
    on_forget: Mutex<Option<TestHook>>,
    complaint: Mutex<Option<&'static str>>,
}

/// A callback of a test.
struct TestHook(Box<dyn Fn() + Send>);

impl fmt::Debug for TestHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// One registration of a shuffle.
#[derive(Debug, Default)]
struct MemoryShuffle {
    /// `None` once the shuffle was deleted.
    partitions: Mutex<Option<HashMap<PartitionId, TierPartition>>>,
}

/// Data and index of a partition.
#[derive(Debug, Default)]
struct TierPartition {
    index: Vec<u8>,
    data: Vec<u8>,
    ids: Vec<BlockId>,
}

impl TierPartition {
    fn append(&mut self, extent: &ExtentWrite) {
        let mut offset = self.data.len() as u64;
        for block in &extent.blocks {
            self.index.extend_from_slice(&IndexRecord::new(block, offset).encode());
            self.ids.push(block.block_id);
            offset += u64::from(block.length);
        }
        extent.payload().iter().for_each(|piece| self.data.extend_from_slice(piece));
        debug_assert_eq!(self.data.len() as u64, offset, "the bytes must be those of the blocks");
    }
}

impl ThirdTier {
    /// Returns the number of bytes at the last sync.
    pub fn synced_bytes(&self) -> u64 {
        self.synced_bytes.load(Ordering::Acquire)
    }

    /// Returns the remote storage of the last registration.
    pub fn last_remote_storage(&self) -> Option<RemoteStorage> {
        self.last_remote_storage.lock().clone()
    }

    /// Sets a callback that runs before shuffles are deleted, on the same thread.
    pub fn on_forget(&self, call: impl Fn() + Send + 'static) {
        *self.on_forget.lock() = Some(TestHook(Box::new(call)));
    }

    /// Sets the reason why the tier does not work, or removes it.
    pub fn complain(&self, complaint: Option<&'static str>) {
        *self.complaint.lock() = complaint;
    }

    fn find(&self, key: &ShuffleKey) -> Result<Arc<MemoryShuffle>, StoreError> {
        let found = self.shuffles.lock().get(key).cloned();
        found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, key.to_string()))
    }

    /// Applies `take` to a partition. Returns the default for a partition that was never written.
    fn look<T: Default>(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        take: impl FnOnce(&TierPartition) -> T,
    ) -> Result<T, StoreError> {
        let shuffle = self.find(key)?;
        let partitions = shuffle.partitions.lock();
        Ok(partitions.as_ref().and_then(|all| all.get(&partition)).map(take).unwrap_or_default())
    }
}

impl TierShuffle for MemoryShuffle {
    fn is_accepting(&self) -> bool {
        true
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let mut partitions = self.partitions.lock();
        let Some(partitions) = &mut *partitions else {
            return ready(Err(StoreError::new(StoreErrorKind::Purged, "third tier"))).boxed();
        };
        for extent in &batch.extents {
            partitions.entry(extent.partition).or_default().append(extent);
        }
        ready(Ok(())).boxed()
    }
}

const NAMES: TierNames = TierNames {
    name: "third",
    title: "third",
    label: "third",
    spill: "third",
    events: "third",
    queue: "third",
};

impl Tier for ThirdTier {
    fn capability(&self) -> Capability {
        Capability { names: NAMES, writers: 2, in_flight_max: usize::MAX, role: TierRole::Secondary }
    }

    fn state(&self) -> TierState {
        let keys: Vec<ShuffleKey> = self.shuffles.lock().keys().cloned().collect();
        let used_bytes = keys.iter().map(|key| self.usage(key).bytes).sum();
        TierState { used_bytes, complaint: *self.complaint.lock(), ..TierState::default() }
    }

    fn prepare(
        self: Arc<Self>,
        remote_storage: Option<&RemoteStorage>,
    ) -> Result<Option<Admission>, StoreError> {
        *self.last_remote_storage.lock() = remote_storage.cloned();
        let register = move |key: &ShuffleKey, _: &[(i32, i32)]| {
            let create = || Arc::new(MemoryShuffle { partitions: Mutex::new(Some(HashMap::new())) });
            self.shuffles.lock().entry(key.clone()).or_insert_with(create);
        };
        Ok(Some(Box::new(register)))
    }

    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>> {
        Some(self.find(key).ok()?)
    }

    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let visited =
            |partition: &TierPartition| partition.ids.iter().for_each(|id| visit(id.0.unsigned_abs()));
        ready(self.look(key, partition, visited)).boxed()
    }

    fn usage(&self, key: &ShuffleKey) -> TierUsage {
        let Ok(shuffle) = self.find(key) else { return TierUsage::default() };
        let partitions = shuffle.partitions.lock();
        let all = || partitions.iter().flat_map(HashMap::values);
        TierUsage {
            files: all().count() as u64,
            bytes: all().map(|partition| partition.data.len() as u64).sum(),
            occupied_bytes: all().map(|partition| partition.data.len() as u64).sum(),
            ..TierUsage::default()
        }
    }

    fn served(&self) -> Option<&dyn ServedTier> {
        Some(self)
    }

    fn forget(self: Arc<Self>, _: &AppId, keys: &[ShuffleKey], _: Purge) -> Option<BoxFuture<'static, ()>> {
        if let Some(TestHook(on_forget)) = &*self.on_forget.lock() {
            on_forget();
        }
        for key in keys {
            if let Some(shuffle) = self.shuffles.lock().remove(key) {
                *shuffle.partitions.lock() = None;
            }
        }
        None
    }

    fn maintenance(self: Arc<Self>) -> Option<Arc<dyn MaintainedTier>> {
        Some(self)
    }
}

impl MaintainedTier for ThirdTier {
    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        stop
    }

    fn refresh_metrics(&self) {}

    fn sync(&self, _: Duration) -> BoxFuture<'_, ()> {
        self.synced_bytes.store(self.state().used_bytes, Ordering::Release);
        ready(()).boxed()
    }
}

impl ServedTier for ThirdTier {
    fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError> {
        let (index, data_length) =
            self.look(key, partition, |it| (it.index.clone(), it.data.len() as u64))?;
        let length = index.len() as u64;
        Ok(ServedIndex {
            length,
            data_length,
            chunks: Box::new(UnitChunks { bytes: index.into(), whole: RECORD_BYTES }),
        })
    }

    fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u32,
    ) -> Result<ServedData, StoreError> {
        let invalid = || StoreError::new(StoreErrorKind::InvalidRange, key.to_string());
        let start = usize::try_from(offset).map_err(|_| invalid())?;
        let end = start.checked_add(length as usize).filter(|_| length > 0).ok_or_else(invalid)?;
        let bytes = self.look(key, partition, |it| it.data.get(start..end).map(Bytes::copy_from_slice))?;
        let chunks = UnitChunks { bytes: bytes.ok_or_else(invalid)?, whole: 1 };
        Ok(ServedData { has_hole: false, chunks: Box::new(chunks) })
    }
}

/// Serves bytes in chunks of whole units.
#[derive(Debug)]
struct UnitChunks {
    bytes: Bytes,
    whole: usize,
}

impl ChunkRead for UnitChunks {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            let length = self.bytes.len().min(buffers.chunk_bytes() / self.whole * self.whole);
            if length == 0 {
                return Ok(None);
            }
            let mut buffer = buffers.acquire(length).await;
            let part = self.bytes.split_to(length);
            (*buffer).as_mut()[..length].copy_from_slice(&part);
            Ok(Some(buffer.freeze(length)))
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        self.bytes.len()
    }
}
