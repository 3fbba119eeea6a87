//! Reads of the local store: the cache of index records, idle descriptors, probes of busy disks,
//! and adjacent extents. Also the change of a disk's condition at the high watermark.

use std::time::Duration;

use tokio::time::advance;

use super::*;
use uniffle_io::BoxFuture;
use uniffle_io::buffers::{ReadBuffer, ReadBuffers};
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

async fn open_with_index_cache(disks: &[TestDisk], index_cache_bytes: u64) -> Arc<LocalStore> {
    let config = LocalConfig { index_cache_bytes, ..LocalConfig::default() };
    let disks = disks.iter().map(TestDisk::disk).collect();
    open_with(config, disks).await.unwrap()
}

#[tokio::test]
async fn published_index_is_cached_until_purge() {
    let disks = [TestDisk::new("/a")];
    let store = open_with_index_cache(&disks, 1 << 20).await;
    let key = key("app", 1);
    store.register(&key);
    for id in 0..5 {
        store.write(&key, vec![extent(1, &[(id, 100), (id + 10, 50)], false)]).await.unwrap();
    }
    disks[0].faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on(".index"));
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 10, 1, 11, 2, 12, 3, 13, 4, 14]);
    assert_eq!(
        (store.core.metrics.index_cache_hits.get(), store.core.metrics.index_cache_misses.get()),
        (5, 0)
    );
    assert!(store.core.records.used_bytes() > 10 * 40);
    store.purge(&key).await;
    assert_eq!(store.core.records.used_bytes(), 0);
}

#[tokio::test]
async fn evicted_index_is_read_once_and_cached() {
    let disks = [TestDisk::new("/a")];
    // Capacity for eight extents of one block: a record of 40 bytes and an entry of 160.
    let store = open_with_index_cache(&disks, 8 * 200).await;
    let key = key("app", 1);
    store.register(&key);
    for id in 0..10 {
        store.write(&key, vec![extent(i32::try_from(id).unwrap(), &[(id, 100)], false)]).await.unwrap();
    }
    let misses = || store.core.metrics.index_cache_misses.get();
    for _ in 0..2 {
        assert_eq!(read_all(&store, &key, 0).await.unwrap(), [0]);
    }
    assert_eq!(misses(), 1);
    assert_eq!(read_all(&store, &key, 9).await.unwrap(), [9]);
    assert_eq!(misses(), 1);
}

#[tokio::test(start_paused = true)]
async fn idle_descriptors_are_closed() {
    let disks = [TestDisk::new("/a")];
    let store = store_on(&disks).await;
    let (idle, recently_read) = (key("app", 1), key("app", 2));
    for key in [&idle, &recently_read] {
        store.register(key);
        store.write(key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    }
    assert_eq!(store.core.files.len(), 4);
    advance(Duration::from_secs(40)).await;
    assert_eq!(read_all(&store, &recently_read, 1).await.unwrap(), [1]);
    assert_eq!(store.core.files.len(), 6);
    advance(Duration::from_secs(20)).await;
    store.maintain_once().await;
    assert_eq!(store.core.files.len(), 2, "expected the two open files of the last read");
    advance(Duration::from_secs(60)).await;
    store.maintain_once().await;
    assert_eq!(store.core.files.len(), 0);
    for key in [&idle, &recently_read] {
        store.write(key, vec![extent(1, &[(2, 100)], false)]).await.unwrap();
        assert_eq!(read_all(&store, key, 1).await.unwrap(), [1, 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn delayed_probe_does_not_fail_a_disk() {
    let disks = [TestDisk::new("/a")];
    let config = LocalConfig { direct_io: false, index_cache_bytes: 0, ..LocalConfig::default() };
    let store = open_with(config, vec![disks[0].disk()]).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    let hang = || disks[0].faults.add(Rule::once(Operation::Sync, Fault::Hang));

    hang();
    // The probe begins first and hangs. A read completes meanwhile.
    let (probed, read) = tokio::join!(biased; store.core.disks[0].probe(false), read_all(&store, &key, 1));
    assert_eq!((probed.unwrap_err().kind(), read.unwrap()), (io::ErrorKind::TimedOut, vec![1]));
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy, "a busy disk must not count as hung");

    hang();
    assert!(store.core.disks[0].probe(false).await.is_err());
    assert_eq!(store.disks()[0].condition, DiskCondition::Hung);
    assert_eq!(store.available_disks(), 0);
    disks[0].faults.release().await;
}

#[tokio::test]
async fn crossing_the_high_watermark_marks_the_disk_full() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    for disk in &disks {
        disk.memory.set_capacity(Some(1 << 20));
    }
    let store = store_on(&disks).await;
    let mut changes = store.state_changes().unwrap();
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 900_000)], false)]).await.unwrap();
    assert!(changes.has_changed().unwrap(), "the change must be visible without a measurement");
    changes.mark_unchanged();
    assert_eq!(store.available_disks(), 1);
    let usage = store.usage(&key);
    assert_eq!((usage.files, usage.bytes), (2, 900_000));
    let mounts = by_mount(&store.disks());
    assert_eq!(mounts.len(), 2);
    assert_eq!(mounts.iter().filter(|mount| mount.condition == DiskCondition::Full).count(), 1);
    store.purge(&key).await;
    store.maintain_once().await;
    assert!(changes.has_changed().unwrap());
    assert_eq!((store.available_disks(), store.usage(&key)), (2, TierUsage::default()));
}

/// Heap buffers with a maximum size.
struct SmallBuffers(usize);

impl ReadBuffers for SmallBuffers {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        assert!(len <= self.0, "requested {len} bytes from buffers of {}", self.0);
        HeapBuffers.acquire(len)
    }

    fn chunk_bytes(&self) -> usize {
        self.0
    }
}

#[tokio::test]
async fn adjacent_extents_are_coalesced() {
    let disks = [TestDisk::new("/a")];
    let config = LocalConfig { direct_io: true, ..LocalConfig::default() };
    let store = open_with(config, vec![disks[0].disk()]).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    // Extents of different sizes, one of which exceeds every buffer. All are adjacent in the log.
    let sizes = [(1, 100_000), (2, 70_001), (3, 300_000), (4, 5000), (5, 3_000_001), (6, 66_000)];
    for (id, size) in sizes {
        store.write(&key, vec![extent(1, &[(id, size)], id % 2 == 0)]).await.unwrap();
    }
    let whole: Vec<u8> = sizes.iter().flat_map(|(id, size)| payload(*id, *size)).collect();
    let disk_reads = || store.core.metrics.read_operations.with_label_values(&["/a"]).get();
    for (buffer_bytes, expected) in [(READ_CHUNK_BYTES_MAX, 3), (1 << 20, 4), (512 << 10, 7), (64 << 10, 57)]
    {
        let before = disk_reads();
        let length = whole.len();
        let mut read = store.data(&key, PartitionId(1), 0, length as u32).unwrap().chunks;
        let mut bytes = Vec::new();
        while let Some(chunk) = read.next_chunk(&SmallBuffers(buffer_bytes)).await.unwrap() {
            bytes.extend_from_slice(&chunk);
        }
        assert!(bytes == whole, "the read with buffers of {buffer_bytes} bytes has other data");
        assert_eq!(
            disk_reads() - before,
            expected,
            "wrong number of disk reads with buffers of {buffer_bytes} bytes"
        );
        for (from, to) in [(1, length - 1), (99_999, 100_001), (4097, 480_000), (170_000, length)] {
            let (offset, length) = (from as u64, (to - from) as u32);
            let mut read = store.data(&key, PartitionId(1), offset, length).unwrap().chunks;
            let mut at = from;
            while let Some(chunk) = read.next_chunk(&SmallBuffers(buffer_bytes)).await.unwrap() {
                assert!(
                    chunk == whole[at..at + chunk.len()],
                    "read of {from}..{to} at {at}, buffers of {buffer_bytes} bytes"
                );
                at += chunk.len();
            }
            assert_eq!((at, read.next_room()), (to, 0));
        }
    }
}
