//! Full disks: why they refuse writes, and the room that the final flush leaves for the metadata
//! log.

use std::time::Duration;

use super::vanished::with_two_blocks;
use super::*;
use uniffle_testkit::fault::{ENOSPC, Fault, Operation, Rule};

#[tokio::test(start_paused = true)]
async fn full_disk_says_why_and_takes_data_after_one_probe() {
    let (disk, store, key, _) = with_two_blocks().await;
    let write = async |id: i64| store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await;
    for id in 3..6 {
        // Another program repeatedly uses up the inodes.
        let used = disk.memory.files().len() + disk.memory.directories().len();
        disk.memory.set_inodes(Some(used as u64));
        let current = store.handle(&key).unwrap().shuffle.logs();
        current.iter().for_each(|log| log.close());
        assert_eq!(write(id).await.unwrap_err().kind, StoreErrorKind::NoSpace);
        let info = &store.disks()[0];
        assert_eq!(info.condition, DiskCondition::Full);
        let why = info.fault.clone().unwrap();
        assert!(why.contains("no inodes are left, 0 of"), "{why}");
        store.maintain_once().await;
        assert_eq!(store.disks()[0].condition, DiskCondition::Full, "the probe must find the disk full");
        disk.memory.set_inodes(None);
        store.maintain_once().await;
        assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
        assert_eq!(store.disks()[0].fault, None);
        write(id).await.unwrap();
    }
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn last_flush_fills_every_disk_above_watermark() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    disks.iter().for_each(|disk| disk.memory.set_capacity(Some(1 << 20)));
    let config = LocalConfig { high_watermark: 0.01, low_watermark: 0.001, ..LocalConfig::default() };
    let store = open_with(config, disks.iter().map(TestDisk::disk).collect()).await.unwrap();
    let key = key("app", 1);
    let handle = store.register(&key);
    // One refused a write some time ago, and both are above the watermark.
    store.core.disks[0].note(&std::io::Error::from_raw_os_error(ENOSPC));
    disks.iter().for_each(|disk| disk.memory.put(Path::new("other"), Some(vec![0; 100_000])));
    store.core.disks[1].measure().await.unwrap();
    let batch = |id| vec![extent(1, &[(id, 300_000)], true)];
    assert_eq!(handle.write(batch(0)).await.unwrap_err().kind, StoreErrorKind::NoSpace);
    let write = async |id| handle.writer.write(&handle.shuffle, batch(id), true).await;
    let mut taken = Vec::new();
    for id in 0..6 {
        taken.push(write(id).await.unwrap().disk);
    }
    taken.sort_unstable();
    assert_eq!(taken, [0, 0, 0, 1, 1, 1]);
    assert_eq!(write(6).await.unwrap_err().kind, StoreErrorKind::NoSpace, "both disks are full now");
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 1, 2, 3, 4, 5]);
}

/// Without room for the record of a purge, the space of a full disk could not be freed.
#[tokio::test(start_paused = true)]
async fn last_flush_leaves_room_for_the_metadata_log() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    disks.iter().for_each(|disk| disk.memory.set_capacity(Some(1 << 20)));
    let config = LocalConfig { high_watermark: 1.0, low_watermark: 1.0, ..LocalConfig::default() };
    let store = open_with(config, disks.iter().map(TestDisk::disk).collect()).await.unwrap();
    let key = key("app", 1);
    let handle = store.register(&key);
    let (mut id, mut ids) = (0, Vec::new());
    for bytes in [100_000, 10_000, 1000, 100, 1] {
        while handle.writer.write(&handle.shuffle, vec![extent(1, &[(id, bytes)], true)], true).await.is_ok()
        {
            ids.push(id);
            id += 1;
        }
        id += 1;
    }
    // A file system allocates at least a page for a record.
    store.append_metadata(&handle, &[7; 4096]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), ids);
}

/// The index group of many small blocks is larger than their data.
#[tokio::test(start_paused = true)]
async fn last_batch_leaves_room_despite_a_large_index() {
    let disk = TestDisk::new("/a");
    disk.memory.set_capacity(Some(1 << 20));
    let store = open_with(roomy(), vec![disk.disk()]).await.unwrap();
    let key = key("app", 1);
    let handle = store.register(&key);
    let room = store.core.disks[0].candidate().free_bytes as usize;
    disk.memory.put(Path::new("other"), Some(vec![0; room - 30_000]));
    let batch = |blocks: i64| vec![extent(1, &(0..blocks).map(|id| (id, 4)).collect::<Vec<_>>(), true)];
    let write = async |blocks| handle.writer.write(&handle.shuffle, batch(blocks), true).await;
    assert_eq!(write(1000).await.unwrap_err().kind, StoreErrorKind::NoSpace);
    assert_eq!(write(600).await.unwrap().blocks, 600);
    let free_bytes = store.core.disks[0].io.space().await.unwrap().free_bytes;
    assert!(free_bytes >= (1 << 20) / 64, "the batch left {free_bytes} bytes to the metadata log");
    store.append_metadata(&handle, &[7; 4096]).await.unwrap();
}

/// Regression test: without the lock `last_room`, the second batch measured disk `/a` before the
/// first was written there, and chose it afterwards.
#[tokio::test(start_paused = true)]
async fn concurrent_last_batches_leave_room_for_the_metadata_log() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    disks.iter().for_each(|disk| disk.memory.set_capacity(Some(1 << 20)));
    let store = open_with(roomy(), disks.iter().map(TestDisk::disk).collect()).await.unwrap();
    disks[1].memory.put(Path::new("other"), Some(vec![0; 1_000_000]));
    let key = key("app", 1);
    let handle = store.register(&key);
    let room = store.core.disks[0].candidate().free_bytes as usize;
    // Either batch has room. Both together would fit on the disk, but use a part of the log's
    // reserve.
    let batch = |id| vec![extent(1, &[(id, room / 2 + 4096)], true)];
    disks[0].faults.add(Rule::always(Operation::Write, Fault::Slow(Duration::from_secs(1))));
    disks[1].faults.add(Rule::once(Operation::Space, Fault::Slow(Duration::from_secs(5))).after(1));
    let write = async |id| handle.writer.write(&handle.shuffle, batch(id), true).await;
    let (first, second) = tokio::join!(write(0), write(1));
    assert_eq!(first.unwrap().disk, 0);
    let free_bytes = store.core.disks[0].io.space().await.unwrap().free_bytes;
    assert!(free_bytes >= (1 << 20) / 64, "the batches left {free_bytes} bytes to the metadata log");
    assert_eq!(second.unwrap_err().kind, StoreErrorKind::NoSpace);
    store.append_metadata(&handle, &[7; 4096]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0]);
}
