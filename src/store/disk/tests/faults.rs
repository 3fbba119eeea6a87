//! I/O errors, one by one: published blocks stay readable, failed ones are written elsewhere
//! or returned.

use super::*;
use uniffle_testkit::fault::{EIO, EMFILE, ENOSPC, Fault, Operation, Rule};

async fn two_disks() -> ([TestDisk; 2], Arc<LocalStore>, ShuffleKey) {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    (disks, store, key)
}

/// Injects `rule` into the disk that is next for a batch. The batch must be written completely all
/// the same.
async fn survives(rule: Rule, expect_healthy: bool, expect_full: bool) {
    let (disks, store, key) = two_disks().await;
    store.write(&key, vec![extent(1, &[(1, 8000)], true)]).await.unwrap(); // to disk 0
    store.write(&key, vec![extent(1, &[(2, 9000)], true)]).await.unwrap(); // to disk 1
    disks[0].faults.add(rule.clone());
    // Disk 0 has more space left, so it is next.
    let batch = vec![extent(1, &[(3, 9000)], true), extent(2, &[(4, 70_000)], false)];
    let published = store.write(&key, batch).await.unwrap();
    assert_eq!(disks[0].faults.injected(), 1, "{rule:?}");
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 3], "{rule:?}");
    assert_eq!(read_all(&store, &key, 2).await.unwrap(), [4]);
    assert_eq!(published.sequence, 2);
    let info = &store.disks()[0];
    assert_eq!((info.is_healthy(), info.is_full()), (expect_healthy, expect_full), "{rule:?}");

    // The disk recovers, and a log that saw an error is never written again.
    let before: Vec<_> = disks[0].app_files();
    store.probe().await;
    store.maintain_once().await;
    assert!(store.disks()[0].is_healthy() && !store.disks()[0].is_full());
    for id in 5..9 {
        store.write(&key, vec![extent(1, &[(id, 9000)], false)]).await.unwrap();
    }
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 3, 5, 6, 7, 8]);
    assert!(disks[0].app_files().len() >= before.len());
    let sequences: Vec<_> = groups(&disks).iter().map(|group| group.header.sequence).collect();
    assert_eq!(sequences, (0..7).collect::<Vec<_>>(), "{rule:?}");
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn failed_data_write_goes_to_another_disk() {
    let fault = |fault| Rule::once(Operation::Write, fault).on(".data");
    survives(fault(Fault::Errno(EIO)), false, false).await;
    survives(fault(Fault::Short { bytes: 5000, errno: EIO }), false, false).await;
    survives(fault(Fault::Errno(ENOSPC)), true, true).await;
    survives(fault(Fault::Short { bytes: 4097, errno: ENOSPC }), true, true).await;
    survives(fault(Fault::Errno(EMFILE)), true, false).await;
}

#[tokio::test(start_paused = true)]
async fn last_batches_are_written_to_a_recovered_disk() {
    let (disks, store, key) = two_disks().await;
    for disk in &disks {
        disk.faults.add(Rule::once(Operation::Write, Fault::Errno(EIO)).on(".data"));
    }
    let batch = |id| vec![extent(1, &[(id, 9000)], true)];
    store.write(&key, batch(1)).await.unwrap_err();
    assert!(store.disks().iter().all(|disk| !disk.is_healthy()));
    disks[1].faults.add(Rule::always(Operation::Write, Fault::Hang));
    store.write(&key, batch(1)).await.unwrap_err();
    let handle = store.handle(&key).unwrap();
    let (first, second) = tokio::join!(
        handle.writer.write(&handle.shuffle, batch(1), true),
        handle.writer.write(&handle.shuffle, batch(2), true)
    );
    assert_eq!((first.unwrap().disk, second.unwrap().disk), (0, 0));
    assert!(store.disks()[0].is_healthy() && !store.disks()[1].is_healthy());
    disks[1].faults.release().await;
    let mut ids = read_all(&store, &key, 1).await.unwrap();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn failed_index_append_goes_to_another_disk() {
    let fault = |fault| Rule::once(Operation::Write, fault).on(".index");
    survives(fault(Fault::Errno(EIO)), false, false).await;
    survives(fault(Fault::Short { bytes: 70, errno: ENOSPC }), true, true).await;
}

#[tokio::test(start_paused = true)]
async fn failed_open_or_mkdir_goes_to_another_disk() {
    for operation in [Operation::OpenWrite, Operation::CreateDir] {
        for (errno, healthy, full) in [(EIO, false, false), (ENOSPC, true, true), (EMFILE, true, false)] {
            let (disks, store, key) = two_disks().await;
            disks[0].faults.add(Rule::once(operation, Fault::Errno(errno)));
            store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
            assert_eq!(disks[0].faults.injected(), 1);
            assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
            let info = &store.disks()[0];
            assert_eq!((info.is_healthy(), info.is_full()), (healthy, full), "{operation:?} {errno}");
            assert_eq!(store.core.metrics.write_local_retries.get(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn batch_refused_by_all_full_disks_can_be_retried() {
    let (disks, store, key) = two_disks().await;
    for disk in &disks {
        disk.faults.add(Rule::always(Operation::Write, Fault::Errno(ENOSPC)).on(".data"));
    }
    let batch = vec![extent(1, &[(1, 100)], false)];
    let error = store.write(&key, batch.clone()).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NoSpace);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), Vec::<i64>::new());
    disks.iter().for_each(|disk| disk.faults.clear());
    let still_full = store.write(&key, batch.clone()).await.unwrap_err();
    assert_eq!(still_full.kind, StoreErrorKind::NoSpace, "a full disk was tried again before maintenance");
    store.maintain_once().await;
    store.write(&key, batch).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
}

#[tokio::test(start_paused = true)]
async fn unwritten_index_group_is_published_before_later_ones() {
    let (disks, store, key) = two_disks().await;
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    for disk in &disks {
        disk.faults.add(Rule::always(Operation::Write, Fault::Short { bytes: 64, errno: EIO }).on(".index"));
    }
    let error = store.write(&key, vec![extent(1, &[(2, 50)], false)]).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Io);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1], "only durable blocks may be visible");
    disks.iter().for_each(|disk| disk.faults.clear());
    store.probe().await;
    store.write(&key, vec![extent(1, &[(3, 70)], false)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 3]);
    let bases: Vec<_> = groups(&disks).iter().map(|it| (it.header.sequence, it.entries[0].0.base)).collect();
    assert_eq!(bases, [(0, 0), (1, 100), (2, 150)]);
}

#[tokio::test(start_paused = true)]
async fn disk_full_within_a_batch_does_not_mix_blocks() {
    let disk = TestDisk::new("/small");
    disk.memory.set_capacity(Some(1 << 20));
    let config = LocalConfig { high_watermark: 1.0, low_watermark: 1.0, ..LocalConfig::default() };
    let store = open_with(config, vec![disk.disk()]).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 300_000)], false)]).await.unwrap();
    disk.memory.set_capacity(Some(400_000)); // Somebody else took the space that was measured.
    let error = store.write(&key, vec![extent(1, &[(2, 200_000)], true)]).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NoSpace);
    assert!(store.disks()[0].is_healthy(), "a full disk must count as healthy");
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
    disk.memory.set_capacity(None);
    store.maintain_once().await;
    store.write(&key, vec![extent(1, &[(3, 250_000)], false)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 3]);
}

#[tokio::test(start_paused = true)]
async fn read_errors_never_become_short_responses() {
    let (disks, store, key) = two_disks().await;
    store.write(&key, vec![extent(1, &[(1, 5000), (2, 5000)], false)]).await.unwrap();
    for (operation, kind) in
        [(Operation::OpenRead, StoreErrorKind::Io), (Operation::Read, StoreErrorKind::Io)]
    {
        for disk in &disks {
            disk.faults.add(Rule::always(operation, Fault::Errno(EIO)));
        }
        let mut read = store.data(&key, PartitionId(1), 10, 9000).unwrap().chunks;
        assert_eq!(read.next_chunk(&HeapBuffers).await.map(drop).unwrap_err().kind, kind);
        assert!(
            read.next_chunk(&HeapBuffers).await.is_err(),
            "after a failed chunk a read must return only errors"
        );
        let mut index = store.index(&key, PartitionId(1)).unwrap().chunks;
        assert_eq!(index.next_chunk(&HeapBuffers).await.unwrap_err().kind, kind);
        assert!(index.next_chunk(&HeapBuffers).await.is_err());
        disks.iter().for_each(|disk| disk.faults.clear());
        assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
    }
}

fn mismatches(store: &LocalStore) -> [u64; 2] {
    let metrics = &store.core.metrics;
    [metrics.read_crc_mismatches.get(), metrics.blocks_damaged.get()]
}

/// Through the page cache and bypassing it, with the block in one chunk and in several.
#[tokio::test(start_paused = true)]
async fn block_that_is_valid_on_reread_is_served() {
    for sizes in [[500, 600, 700], [50_000, 60_000, 70_000], [500_000, 1_000_000, 3_000_000]] {
        let (disks, store, key) = two_disks().await;
        let blocks: Vec<_> = (1..).zip(sizes).collect();
        store.write(&key, vec![extent(1, &blocks, false)]).await.unwrap();
        disks[0].faults.add(Rule::once(Operation::Read, Fault::Flip).on(".data"));
        assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 3], "{sizes:?}");
        assert_eq!(disks[0].faults.injected(), 1);
        assert_eq!(mismatches(&store), [1, 0]);
        assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    }
}

/// The client has the wrong bytes before the end of the block reveals them. The response ends, and
/// no block is marked.
#[tokio::test(start_paused = true)]
async fn block_misread_once_is_not_abandoned() {
    let (disks, store, key) = two_disks().await;
    store.write(&key, vec![extent(1, &[(1, 5_000_000)], false)]).await.unwrap();
    disks[0].faults.add(Rule::once(Operation::Read, Fault::Flip).on(".data"));
    let error = range_of(&store, &key, 1, (0, 5_000_000)).await.unwrap_err();
    assert!(error.to_string().contains("nothing is lost"), "{error}");
    assert_eq!(mismatches(&store), [1, 0]);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
}

#[tokio::test(start_paused = true)]
async fn wrong_checksum_does_not_affect_other_blocks() {
    for size in [900, 90_000] {
        let (disks, store, key) = two_disks().await;
        let p = PartitionId(1);
        store.write(&key, vec![extent(1, &[(1, size), (2, size), (3, size)], true)]).await.unwrap();
        let path = disks[0].app_files().into_iter().find(|path| path.ends_with("0.data")).unwrap();
        disks[0].memory.corrupt(&path, size + 10, 1);
        let all = (0, 3 * size as u32);
        assert!(!store.data(&key, p, all.0, all.1).unwrap().has_hole);
        assert_eq!(range_of(&store, &key, 1, all).await.unwrap_err().kind, StoreErrorKind::Corrupt);
        assert_eq!(mismatches(&store), [1, 1]);
        assert_eq!(store.disks()[0].condition, DiskCondition::Broken);

        let (records, _) = index_of(&store, &key, 1).await.unwrap();
        let found: Vec<_> = records.iter().map(|it| (it.block_id, it.offset, it.length)).collect();
        let length = size as i32;
        let places =
            [1, FILLER_BLOCK_ID, 3].into_iter().zip(0..).map(|(id, n)| (id, n * size as i64, length));
        assert_eq!(found, places.collect::<Vec<_>>());
        assert_eq!(present(&store, &key, p).await, [1, 3]);
        for (id, n) in [(1, 0), (3, 2)] {
            let place = (n * size as u64, size as u32);
            assert_eq!(range_of(&store, &key, 1, place).await.unwrap(), payload(id, size));
            assert!(!store.data(&key, p, place.0, place.1).unwrap().has_hole);
        }
        // A client with an older index learns of the hole, and the service learns of the possible
        // loss.
        assert!(store.data(&key, p, size as u64 - 1, 2).unwrap().has_hole);
        store.write(&key, vec![extent(1, &[(2, size)], false)]).await.unwrap();
        assert_eq!(present(&store, &key, p).await, [1, 2, 3]);
        range_of(&store, &key, 1, (0, 4 * size as u32)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn flipped_bit_in_the_index_is_found_before_it_is_served() {
    let (disks, store, key) = two_disks().await;
    store.write(&key, vec![extent(1, &[(1, 50), (2, 60)], false)]).await.unwrap();
    let path = disks[0].app_files().into_iter().find(|path| path.ends_with("1.index")).unwrap();
    let size = disks[0].memory.content(&path).unwrap().len();
    for at in size - 80..size {
        disks[0].memory.corrupt(&path, at, 4);
        assert_eq!(
            index_of(&store, &key, 1).await.unwrap_err().kind,
            StoreErrorKind::Corrupt,
            "byte {at} is corrupt"
        );
        disks[0].memory.corrupt(&path, at, 4);
    }
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn file_that_is_too_short_is_corrupt() {
    let (disks, store, key) = two_disks().await;
    store.write(&key, vec![extent(1, &[(1, 9000)], false)]).await.unwrap();
    let path = disks[0].app_files().into_iter().find(|path| path.ends_with("0.data")).unwrap();
    disks[0].memory.write_small(&path, payload(1, 8000)).await.unwrap();
    let error = range_of(&store, &key, 1, (0, 9000)).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Corrupt);
}

#[tokio::test(start_paused = true)]
async fn failed_removal_is_retried() {
    for operation in [Operation::Rename, Operation::Remove] {
        let (disks, store, key) = two_disks().await;
        for id in 0..4 {
            store.write(&key, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
        }
        disks[1].faults.add(Rule::once(operation, Fault::Errno(EIO)));
        store.purge(&key).await;
        assert_eq!(store.core.metrics.deletion_failed.get(), 1);
        assert!(!disks[1].app_files().is_empty() || operation == Operation::Remove);
        assert!(disks[0].app_files().is_empty());
        store.maintain_once().await;
        assert!(!store.disks()[1].is_healthy(), "removals must wait until the disk is healthy");
        store.probe().await;
        store.maintain_once().await;
        store.purge_app(&key.app).await;
        assert_nothing_left(&store, &disks).await;
    }
}

#[tokio::test(start_paused = true)]
async fn failed_probe_counts_by_its_error() {
    let (disks, store, _) = two_disks().await;
    disks[0].faults.add(Rule::once(Operation::Write, Fault::Errno(ENOSPC)));
    disks[1].faults.add(Rule::once(Operation::Sync, Fault::Errno(EIO)));
    store.probe().await;
    let infos = store.disks();
    assert!(infos[0].is_healthy() && infos[0].is_full(), "a full disk must not count as corrupt");
    assert!(!infos[1].is_healthy());
    disks[1].faults.add(Rule::once(Operation::OpenWrite, Fault::Errno(EMFILE)));
    store.probe().await;
    assert!(!store.disks()[1].is_healthy(), "a probe that fails with EMFILE must not make the disk healthy");
    store.probe().await;
    assert!(store.disks()[1].is_healthy());
    disks[1].faults.add(Rule::once(Operation::OpenWrite, Fault::Errno(EMFILE)));
    store.probe().await;
    assert!(store.disks()[1].is_healthy(), "EMFILE must not count against the disk");
}

/// Writes with eight concurrent writers. Returns the number of batches per disk.
async fn write_many(store: &LocalStore, key: &ShuffleKey, ids: std::ops::Range<i64>) -> [u32; 2] {
    use futures::StreamExt;
    let writes = ids.map(|id| store.write(key, vec![extent(1, &[(id, 9000)], true)]));
    let mut taken = [0; 2];
    let mut writes = std::pin::pin!(futures::stream::iter(writes).buffer_unordered(8));
    while let Some(published) = writes.next().await {
        taken[published.unwrap().disk] += 1;
    }
    taken
}

#[tokio::test(start_paused = true)]
async fn slow_disk_gets_less_until_it_is_fast() {
    let (disks, store, key) = two_disks().await;
    let slow = |disk: &TestDisk, millis| {
        let fault = Fault::Slow(std::time::Duration::from_millis(millis));
        disk.faults.add(Rule::always(Operation::Write, fault).on(".data"));
    };
    slow(&disks[0], 500);
    slow(&disks[1], 50);
    let began = tokio::time::Instant::now();
    let taken = write_many(&store, &key, 0..2000).await;
    // With placement by in-flight work alone, the slow disk would get half of the writers: 180
    // batches, 22 s.
    assert!((1..=100).contains(&taken[0]), "{taken:?}");
    assert!(began.elapsed() < std::time::Duration::from_secs(18), "{:?}", began.elapsed());
    disks[0].faults.clear();
    slow(&disks[0], 50);
    write_many(&store, &key, 2000..4000).await;
    let taken = write_many(&store, &key, 4000..5000).await;
    assert!(taken[0] > 350 && taken[1] > 350, "{taken:?}");
    assert_eq!(read_all(&store, &key, 1).await.unwrap().len(), 5000);
}
