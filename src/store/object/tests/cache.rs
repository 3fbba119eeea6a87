//! Requests that reads send to the store: with a cache on disks, with a failing cache, and without.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use uniffle_io::Disk;
use uniffle_testkit::eventually;
use uniffle_testkit::fault::{self, FaultDisk, Faults, Operation, Rule};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::object::cache::CHUNK_BYTES;
use crate::store::object::location::CLAIM;
use crate::store::{Cause, StoreErrorKind};
use uniffle_base::sched::{FairSemaphore, Holder, Reserve};

/// Starts a worker with a cache of `chunks` chunks on `disk`.
async fn start_with_cache(store: &FaultyObjects, disk: Arc<dyn Disk>, chunks: u64) -> Process {
    let cache_bytes = chunks * CHUNK_BYTES;
    Process::with(store, ObjectSettings { cache_disks: vec![disk], cache_bytes, ..settings() }).await.unwrap()
}

fn memory_disk() -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new("/cache", None))
}

fn faulty_disk() -> (Arc<dyn Disk>, Faults) {
    let faults = Faults::default();
    (Arc::new(FaultDisk::new(memory_disk(), faults.clone())), faults)
}

impl Process {
    fn gets(&self) -> usize {
        let is_counted = |(call, key): &&(Call, String)| *call == Call::Get && !key.ends_with(CLAIM);
        self.store.calls().iter().filter(is_counted).count()
    }

    async fn data(&self, partition: i32, offset: u64, length: u32) -> Result<Vec<u8>, StoreError> {
        read_to_end(self.tier.data(&key(1), PartitionId(partition), offset, length)?.chunks).await
    }

    /// Writes `segments` segments. Each has a block of 1000 bytes of partition 0 and one of
    /// partition 1.
    async fn write_segments(&self, segments: i64) -> Arc<dyn TierShuffle> {
        let shuffle = self.register_noted(&key(1)).await;
        for n in 0..segments {
            shuffle.write(vec![extent(0, n..n + 1, 1000), extent(1, n..n + 1, 1000)].into()).await.unwrap();
        }
        shuffle
    }
}

/// Returns the content of the blocks `ids`.
fn bytes_of(ids: std::ops::Range<i64>, length: u32) -> Vec<u8> {
    ids.flat_map(|id| content(id, length)).collect()
}

#[tokio::test]
async fn cached_chunk_is_read_without_a_request() {
    let process = start_with_cache(&FaultyObjects::default(), memory_disk(), 8).await;
    process.write_segments(3).await;
    assert_eq!(process.data(0, 0, 3000).await.unwrap(), bytes_of(0..3, 1000));
    assert_eq!(process.gets(), 3, "expected one request per segment");
    for partition in [0, 1] {
        assert_eq!(process.read(&key(1), partition).await.unwrap(), expected(0..3, 1000));
        assert_eq!(process.data(partition, 500, 2000).await.unwrap(), bytes_of(0..3, 1000)[500..2500]);
    }
    assert_eq!(process.gets(), 3, "another partition in the same chunks must be read from the cache");
}

#[tokio::test]
async fn concurrent_readers_of_a_chunk_share_a_request() {
    let process = start_with_cache(&FaultyObjects::default(), memory_disk(), 8).await;
    process.write_segments(1).await;
    process.store.set(|call, _| if call == Call::Get { ObjectFault::Hold } else { ObjectFault::None });
    let reads = join_all((0..10).map(|n| process.data(n % 2, 0, 1000)));
    let release = async {
        let is_held = || if process.store.held() > 0 { Ok(()) } else { Err(String::new()) };
        eventually("one reader sends a request", is_held).await;
        process.store.release_held();
    };
    let (read, ()) = futures::join!(reads, release);
    read.into_iter().for_each(|read| assert_eq!(read.unwrap(), bytes_of(0..1, 1000)));
    assert_eq!(process.gets(), 1);
}

#[tokio::test]
async fn failed_chunk_is_requested_again_by_the_next_reader() {
    let process = start_with_cache(&FaultyObjects::default(), memory_disk(), 8).await;
    process.write_segments(1).await;
    for fault in [ObjectFault::Refuse, ObjectFault::Cut] {
        process.store.set(move |call, _| if call == Call::Get { fault } else { ObjectFault::None });
        let error = process.data(0, 0, 1000).await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Unhealthy, "{fault:?}: the error must be retryable");
    }
    process.store.heal();
    assert_eq!(process.data(0, 0, 1000).await.unwrap(), bytes_of(0..1, 1000));
}

#[tokio::test]
async fn silent_store_delays_only_its_own_readers() {
    for cache_bytes in [0, 2 * CHUNK_BYTES] {
        let (memory, used) = (12 << 20, Arc::new(AtomicU64::new(0)));
        let pool =
            CountedBuffers { used: Arc::clone(&used), permits: FairSemaphore::new(u64::MAX, Reserve::None) };
        let settings = ObjectSettings {
            segment_bytes: 1 << 20,
            part_bytes: 2 << 20,
            read_memory_bytes: memory,
            cache_disks: vec![memory_disk()],
            cache_bytes,
            ..settings()
        };
        let process = Process::with(&FaultyObjects::default(), settings).await.unwrap();
        let shuffle = process.register_noted(&key(1)).await;
        for partition in [0, 1] {
            shuffle.write(vec![extent(partition, 0..1, 1 << 20)].into()).await.unwrap();
        }
        process.data(0, 0, 1 << 20).await.unwrap();
        process.store.set(|call, _| if call == Call::Get { ObjectFault::Hold } else { ObjectFault::None });
        let read = |partition| {
            let mut read = process.tier.data(&key(1), PartitionId(partition), 0, 1 << 20).unwrap().chunks;
            let pool = &pool;
            async move { read.next_chunk(pool).await.unwrap().unwrap().len() }
        };
        let mut waiting: Vec<_> = (0..20).map(|_| Box::pin(read(1))).collect();
        for reader in &mut waiting {
            assert!(futures::poll!(reader).is_pending());
        }
        let is_held = || if process.store.held() > 0 { Ok(()) } else { Err(String::new()) };
        eventually("a request is sent", is_held).await;
        let held = used.load(Ordering::Relaxed);
        assert!(held <= memory / 3, "concurrent reads hold {held} bytes");
        if cache_bytes > 0 {
            assert_eq!(read(0).await, 1 << 20, "the chunk is cached");
            let held = (process.store.held(), used.load(Ordering::Relaxed));
            assert_eq!(held, (1, 0), "a reader that waits for a chunk holds no memory");
        }
        process.store.heal();
        for reader in waiting {
            assert_eq!(reader.await, 1 << 20);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn failed_cache_disk_falls_back_to_the_store() {
    for operation in [Operation::Write, Operation::Read] {
        for fault in [fault::Fault::Errno(fault::EIO), fault::Fault::Hang] {
            let (disk, faults) = faulty_disk();
            let process = start_with_cache(&FaultyObjects::default(), disk, 8).await;
            process.write_segments(2).await;
            faults.add(Rule::once(operation, fault));
            let read = process.data(0, 0, 2000).await;
            assert_eq!(read.unwrap(), bytes_of(0..2, 1000), "{operation:?} {fault:?}");
            let before = process.gets();
            process.data(0, 0, 1000).await.unwrap();
            assert_eq!(
                process.gets(),
                before + 1,
                "{operation:?} {fault:?}: the failing disk must not be tried again at once"
            );
            faults.release().await;
            tokio::time::advance(Duration::from_secs(61)).await;
            for _ in 0..2 {
                assert_eq!(process.data(0, 0, 2000).await.unwrap(), bytes_of(0..2, 1000));
            }
            assert_eq!(
                process.gets(),
                before + 3,
                "{operation:?} {fault:?}: the disk must be tried again later"
            );
        }
    }
}

#[tokio::test]
async fn unopenable_cache_does_not_fail_reads() {
    let (disk, faults) = faulty_disk();
    faults.add(Rule::always(Operation::OpenWrite, fault::Fault::Errno(fault::EACCES)));
    let process = start_with_cache(&FaultyObjects::default(), disk, 8).await;
    process.write_segments(2).await;
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..2, 1000));
}

#[tokio::test]
async fn corrupt_cached_chunk_is_reread_from_the_store() {
    let (disk, faults) = faulty_disk();
    let process = start_with_cache(&FaultyObjects::default(), disk, 8).await;
    process.write_segments(1).await;
    process.data(0, 0, 1000).await.unwrap();
    faults.add(Rule::once(Operation::Read, fault::Fault::Flip));
    assert_eq!(process.data(0, 0, 1000).await.unwrap(), bytes_of(0..1, 1000));
    assert_eq!(process.gets(), 2, "a chunk with wrong bytes must be read from the store");
    process.data(0, 0, 1000).await.unwrap();
    process.data(0, 0, 1000).await.unwrap();
    assert_eq!(process.gets(), 3, "the dropped chunk must be fetched again");
}

#[tokio::test]
async fn corrupt_cached_index_is_reread_from_the_store() {
    let (disk, faults) = faulty_disk();
    let store = FaultyObjects::default();
    let process = start_with_cache(&store, disk, 8).await;
    process.write_segments(2).await;
    let before = read_to_end(process.tier.index(&key(1), PartitionId(0)).unwrap().chunks).await.unwrap();
    process.kill().await;
    // A new process, which has no records in memory.
    let (disk, faults_now) = faulty_disk();
    drop(faults);
    let settings = ObjectSettings {
        cache_disks: vec![disk],
        cache_bytes: 8 * CHUNK_BYTES,
        index_cache_bytes: 0,
        ..settings()
    };
    let process = Process::with(&store, settings).await.unwrap();
    for _ in 0..2 {
        faults_now.add(Rule::once(Operation::Read, fault::Fault::Flip));
        let index = read_to_end(process.tier.index(&key(1), PartitionId(0)).unwrap().chunks).await.unwrap();
        assert_eq!(index, before);
        assert_eq!(process.data(1, 0, 2000).await.unwrap(), bytes_of(0..2, 1000));
    }
}

/// Number of blocks that are written as one extent, and stored as 15. The records of the last one
/// are in another chunk than its data.
const MANY: i64 = 60_001;

/// Starts a process that recovers [`MANY`] blocks of 10 bytes, with a cache on a faulty disk.
async fn start_with_many_blocks(index_cache_bytes: u64) -> (Process, Faults) {
    let store = FaultyObjects::default();
    let process = Process::with(&store, ObjectSettings::new("p/worker-1")).await.unwrap();
    process.register_noted(&key(1)).await.write(vec![extent(0, 0..MANY, 10)].into()).await.unwrap();
    process.kill().await;
    let (disk, faults) = faulty_disk();
    let settings = ObjectSettings {
        cache_disks: vec![disk],
        cache_bytes: 8 * CHUNK_BYTES,
        index_cache_bytes,
        ..ObjectSettings::new("p/worker-1")
    };
    (Process::with(&store, settings).await.unwrap(), faults)
}

#[tokio::test]
async fn index_records_are_suspected_before_blocks() {
    let flip = |rule: fn(Operation, fault::Fault) -> Rule| rule(Operation::Read, fault::Fault::Flip);
    for (rule, chunks_left) in [(flip(Rule::once), 1), (flip(Rule::always), 0)] {
        for index_cache_bytes in [0, 16 << 20] {
            let (process, faults) = start_with_many_blocks(index_cache_bytes).await;
            faults.add(rule.clone());
            let read = async || process.data(0, 586_000, 2000).await.unwrap() == bytes_of(58_600..58_800, 10);
            assert!(read().await);
            assert!(faults.injected() > 0);
            let chunks = process.tier.objects().cached_bytes() / CHUNK_BYTES;
            assert_eq!(chunks, chunks_left, "possibly damaged chunks must be dropped");
            faults.clear();
            assert!(read().await && read().await);
        }
    }
}

#[tokio::test]
async fn large_extent_is_read_back_completely() {
    let (process, _) = start_with_many_blocks(16 << 20).await;
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..MANY, 10));
}

#[tokio::test]
async fn wrong_records_of_a_large_batch_are_fetched_again() {
    for reads_before in 0..2 {
        let (process, faults) = start_with_many_blocks(0).await;
        let read =
            async || read_to_end(process.tier.index(&key(1), PartitionId(0)).unwrap().chunks).await.unwrap();
        faults.add(Rule::once(Operation::Read, fault::Fault::Flip).after(reads_before));
        let flipped = read().await;
        assert!(faults.injected() > 0, "{reads_before}");
        assert_eq!(flipped.len(), 40 * usize::try_from(MANY).unwrap());
        assert!(flipped == read().await, "{reads_before}");
    }
}

#[tokio::test]
async fn partly_returned_records_are_fetched_again() {
    let (process, faults) = start_with_many_blocks(0).await;
    faults.add(Rule::once(Operation::Read, fault::Fault::Flip));
    let mut index = process.tier.index(&key(1), PartitionId(0)).unwrap().chunks;
    // Half of an extent's records. The byte in the middle belongs to the checksum of a block.
    let half = SmallBuffers(2049 * 40);
    assert_eq!(index.next_chunk(&half).await.unwrap().unwrap().len(), 2049 * 40);
    assert!(index.next_chunk(&half).await.is_err_and(|error| error.kind == StoreErrorKind::Corrupt));
    assert_eq!(process.tier.objects().cached_bytes(), 0, "correct chunks must be dropped too");
    let index = read_to_end(process.tier.index(&key(1), PartitionId(0)).unwrap().chunks).await.unwrap();
    assert_eq!(index.len(), 40 * usize::try_from(MANY).unwrap());
}

#[tokio::test]
async fn cache_does_not_survive_shuffles_or_process() {
    let store = FaultyObjects::default();
    let disk = MemoryDisk::new("/cache", None);
    let process = start_with_cache(&store, Arc::new(disk.clone()), 8).await;
    process.write_segments(2).await;
    process.data(0, 0, 2000).await.unwrap();
    assert_eq!(process.tier.objects().cached_bytes(), 2 * CHUNK_BYTES);
    assert_eq!(disk.files(), Vec::<PathBuf>::new(), "the cache file must have no name");
    process.purge(&key(1), Purge::App(Cause::Unregistered)).await;
    assert_eq!((process.tier.objects().cached_bytes(), process.extents.used()), (0, 0));

    process.write_segments(2).await;
    let orphan = Path::new("uniffle-worker.cache.left");
    disk.create_dir_all(orphan).await.unwrap();
    disk.put(&orphan.join("slots"), Some(vec![1]));
    process.kill().await;
    let process = start_with_cache(&store, Arc::new(disk.clone()), 8).await;
    assert_eq!((disk.files(), process.tier.objects().cached_bytes()), (Vec::new(), 0));
    assert_eq!(process.data(0, 0, 2000).await.unwrap(), bytes_of(0..2, 1000));
}

#[tokio::test]
async fn following_chunks_are_prefetched() {
    let process = start_with_cache(&FaultyObjects::default(), memory_disk(), 8).await;
    process.write_segments(5).await;
    let before = process.gets();
    let mut read = process.tier.data(&key(1), PartitionId(0), 0, 5000).unwrap().chunks;
    let small = SmallBuffers(1000);
    assert_eq!(read.next_chunk(&small).await.unwrap().unwrap().len(), 1000);
    let fetched = || match process.gets() - before {
        5 => Ok(()),
        gets => Err(format!("{gets} of 5")),
    };
    eventually("all requested chunks are fetched", fetched).await;
}

#[tokio::test]
async fn hint_prefetches_exactly_its_range() {
    let process = start_with_cache(&FaultyObjects::default(), memory_disk(), 8).await;
    process.write_segments(3).await;
    process.tier.hint(&key(1), PartitionId(0), &[1000..2000, 90_000..100_000]);
    let fetched = || if process.gets() == 1 { Ok(()) } else { Err(String::new()) };
    eventually("the chunk is fetched", fetched).await;
    assert_eq!(process.data(0, 1000, 1000).await.unwrap(), bytes_of(1..2, 1000));
    assert_eq!(process.gets(), 1);
}

/// Buffers whose bytes are counted until they are frozen. Only shares of devices limit them.
struct CountedBuffers {
    used: Arc<AtomicU64>,
    permits: Arc<FairSemaphore>,
}

struct CountedBuffer {
    bytes: Vec<u8>,
    used: Arc<AtomicU64>,
}

impl uniffle_io::ReadBuffers for CountedBuffers {
    fn acquire(&self, len: usize) -> uniffle_io::BoxFuture<'_, Box<dyn uniffle_io::ReadBuffer>> {
        self.used.fetch_add(len as u64, Ordering::Relaxed);
        let buffer = CountedBuffer { bytes: vec![0; len], used: Arc::clone(&self.used) };
        Box::pin(std::future::ready(Box::new(buffer) as Box<dyn uniffle_io::ReadBuffer>))
    }

    fn acquire_with(
        &self,
        len: usize,
        parts: uniffle_io::ShareParts,
    ) -> uniffle_io::BoxFuture<'_, (Box<dyn uniffle_io::ReadBuffer>, uniffle_io::ReadPermit)> {
        Box::pin(async move {
            let holder = Holder { app: AppId::parse("app").ok(), weight: 1 };
            let (_, device) = self.permits.acquire_with(&holder, 1, parts).await;
            (self.acquire(len).await, Box::new(device) as uniffle_io::ReadPermit)
        })
    }
}

impl uniffle_io::ReadBuffer for CountedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn freeze(mut self: Box<Self>, len: usize) -> Bytes {
        self.used.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
        Bytes::from(std::mem::take(&mut self.bytes)).slice(..len)
    }
}

/// Buffers for chunks of a few bytes.
struct SmallBuffers(usize);

impl uniffle_io::ReadBuffers for SmallBuffers {
    fn acquire(&self, len: usize) -> uniffle_io::BoxFuture<'_, Box<dyn uniffle_io::ReadBuffer>> {
        HeapBuffers.acquire(len)
    }

    fn chunk_bytes(&self) -> usize {
        self.0
    }
}

#[tokio::test]
async fn adjacent_extents_are_coalesced_without_cache() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    let extents = (0..6).flat_map(|n| [extent(0, n..n + 1, 100), extent(1, n..n + 1, 2000)]);
    // Each batch has one extent of a partition, and these batches share a segment.
    let begins = |call| matches!(call, Call::Put | Call::Begin);
    process.store.set(move |call, _| if begins(call) { ObjectFault::Hold } else { ObjectFault::None });
    let writes = join_all(extents.map(|extent| shuffle.write(vec![extent].into())));
    let release = async {
        let is_held = || if process.store.held() > 0 { Ok(()) } else { Err(String::new()) };
        eventually("the first upload begins", is_held).await;
        process.store.heal();
    };
    let (written, ()) = futures::join!(writes, release);
    written.into_iter().for_each(|write| write.unwrap());
    let found = segments(&process.store).await.len();
    assert!(found <= 3, "{found}");
    let before = process.gets();
    assert_eq!(process.data(0, 0, 600).await.unwrap().len(), 600);
    let gets = process.gets() - before;
    assert!((1..=found).contains(&gets), "{gets} requests were sent for {found} segments");
}
