//! State that a later process recovers: the same streams with the same offsets, or holes of the
//! same length.

use super::*;
use uniffle_io::blocking::BlockingDisk;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

const P1: PartitionId = PartitionId(1);

/// Returns the bytes of a partition's stream and the records of its index.
async fn stream_of(store: &LocalStore, key: &ShuffleKey, partition: i32) -> (Vec<u8>, Vec<IndexRecord>) {
    let (records, length) = index_of(store, key, partition).await.unwrap();
    let end = records.iter().map(|record| record.offset + i64::from(record.length)).max().unwrap_or(0);
    assert_eq!(end as u64, length);
    let data = range_of(store, key, partition, (0, length as u32)).await.unwrap();
    (data, records)
}

fn ids(records: &[IndexRecord]) -> Vec<i64> {
    let known = records.iter().filter(|record| record.block_id != FILLER_BLOCK_ID);
    known.map(|record| record.block_id).collect()
}

#[tokio::test(start_paused = true)]
async fn later_process_continues_the_streams() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b"), TestDisk::new("/c")];
    let keys = [key("app-1", 1), key("app-1", 10), key("app-10", 1)];
    let store = store_on(&disks).await;
    for key in &keys {
        let handle = store.register(key);
        store.append_metadata(&handle, b"first").await.unwrap();
        for id in 0..20 {
            let batch = vec![
                extent(1, &[(id, 3000 + id as usize)], id % 2 == 0),
                extent(2, &[(100 + id, 10)], false),
            ];
            store.write(key, batch).await.unwrap();
        }
        store.append_metadata(&handle, b"second").await.unwrap();
    }
    let before = stream_of(&store, &keys[1], 1).await;
    let used = store.used_bytes();
    drop(store);

    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    assert_eq!(recovered.shuffles.iter().map(|it| it.key.clone()).collect::<Vec<_>>(), keys);
    for shuffle in &recovered.shuffles {
        assert_eq!(recovered.records[&shuffle.key], [&b"first"[..], b"second"]);
        assert!(shuffle.lost.is_empty() && shuffle.reason.is_empty() && shuffle.incomplete.is_none());
        assert_eq!(shuffle.present.held(P1).unwrap().iter().collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
    }
    assert_eq!((recovered.blocks, recovered.missing_disks.len()), (120, 0));
    assert_eq!(stream_of(&store, &keys[1], 1).await, before);
    assert_eq!(store.used_bytes(), used);
    for key in &keys {
        store.write(key, vec![extent(1, &[(77, 500)], false)]).await.unwrap();
        let handle = store.handle(key).unwrap();
        store.append_metadata(&handle, b"third").await.unwrap();
    }
    let longer = stream_of(&store, &keys[1], 1).await;
    assert_eq!(longer.0[..before.0.len()], before.0);
    assert_eq!(longer.1[..before.1.len()], before.1);
    drop(store);

    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    assert_eq!(recovered.records[&keys[0]].len(), 3);
    assert_eq!(stream_of(&store, &keys[1], 1).await, longer);
    for key in &keys {
        store.purge(key).await;
        store.remove_files(&key.app).await;
    }
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn torn_end_is_skipped_by_the_next_process() {
    let disks = [TestDisk::new("/a")];
    let key = key("app", 1);
    let store = store_on(&disks).await;
    let handle = store.register(&key);
    store.append_metadata(&handle, b"first").await.unwrap();
    for id in 0..3 {
        store.write(&key, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
    }
    drop((handle, store));
    // The process died during its last append, of a group and of a record in both copies.
    let index =
        disks[0].app_files().into_iter().find(|path| path.extension().is_some_and(|it| it == "index"));
    let logs = log_copies(&disks).into_iter().map(|(_, path)| (path, 0));
    let files: Vec<_> = logs.chain([(index.unwrap(), 50)]).collect();
    assert_eq!(files.len(), 3);
    for (path, cut) in files {
        let mut content = disks[0].memory.content(&path).unwrap();
        content.truncate(content.len() - cut);
        content.extend_from_slice(b"UWML never acknowledged");
        disks[0].memory.write_small(&path, content).await.unwrap();
    }
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    assert_eq!(recovered.records[&key], [&b"first"[..]]);
    assert_eq!((recovered.shuffles[0].reason.as_str(), &recovered.shuffles[0].incomplete), ("", &None));
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 1]);
    store.write(&key, vec![extent(1, &[(7, 100)], false)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 1, 7]);
    drop(store);
    let store = store_on(&disks).await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 1, 7]);
}

/// Creates two disks. Returns them with the ids published on the second and the stream.
async fn two_disks(key: &ShuffleKey) -> ([TestDisk; 2], Vec<i64>, (Vec<u8>, Vec<IndexRecord>)) {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = store_on(&disks).await;
    let handle = store.register(key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    let mut on_second = Vec::new();
    for id in 0..12 {
        let published = store.write(key, vec![extent(1, &[(id, 2000)], false)]).await.unwrap();
        // An idle disk of the same size is as good as the other, so the sizes make them alternate.
        disks[published.disk].memory.set_capacity(Some(1 << 38));
        disks[1 - published.disk].memory.set_capacity(Some(1 << 40));
        store.maintain_once().await;
        if published.disk == 1 {
            on_second.push(id);
        }
    }
    assert!(!on_second.is_empty() && on_second.len() < 12);
    let stream = stream_of(&store, key, 1).await;
    (disks, on_second, stream)
}

#[tokio::test(start_paused = true)]
async fn missing_disk_leaves_holes_and_keeps_offsets() {
    let key = key("app", 1);
    let (disks, on_second, before) = two_disks(&key).await;
    let store = store_on(&disks[..1]).await;
    let recovered = recover(&store).await;
    assert_eq!(recovered.missing_disks, ["/b"]);
    let shuffle = &recovered.shuffles[0];
    assert_eq!(
        recovered.records[&key],
        [&b"registered"[..]],
        "the record must be recovered from its other copy"
    );
    // The other one of two directories may have been used alone.
    assert!(shuffle.incomplete.as_ref().unwrap().contains("/b is missing"), "{:?}", shuffle.incomplete);
    assert!(shuffle.reason.contains("/b is missing"), "{}", shuffle.reason);
    let there: Vec<u64> = (0..12).filter(|id| !on_second.contains(id)).map(|id| id as u64).collect();
    assert_eq!(shuffle.present.held(P1).unwrap().iter().collect::<Vec<_>>(), there);
    let (records, _) = index_of(&store, &key, 1).await.unwrap();
    for record in records.iter().filter(|record| record.block_id != FILLER_BLOCK_ID) {
        let place = before.1.iter().find(|it| it.block_id == record.block_id).unwrap();
        assert_eq!(place, record, "the offset of a block has changed");
        let read = range_of(&store, &key, 1, (record.offset as u64, record.length as u32)).await.unwrap();
        assert_eq!(read, payload(record.block_id, 2000));
    }
    // A new block cannot get an offset that a client may already know.
    store.write(&key, vec![extent(1, &[(77, 500)], false)]).await.unwrap();
    let (records, _) = index_of(&store, &key, 1).await.unwrap();
    assert!(records.last().unwrap().offset >= before.0.len() as i64);
    let next = 0;
    let mut end = next;
    for record in &records {
        assert_eq!(record.offset, end, "the stream must have no gap");
        end += i64::from(record.length);
    }
    let hole = store.data(&key, P1, 0, before.0.len() as u32).unwrap();
    assert!(hole.has_hole);
    drop((hole, store));

    // The disk returns. All of its data is back, and so is the data written meanwhile.
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    assert!(recovered.missing_disks.is_empty());
    assert_eq!(recovered.shuffles[0].present.held(P1).unwrap().len(), 13);
    assert_eq!(recovered.shuffles[0].incomplete, None, "the disk was not used alone and must be complete");
    let (records, _) = index_of(&store, &key, 1).await.unwrap();
    assert_eq!(ids(&records[..12]), ids(&before.1));
    assert_eq!(records[..12], before.1);
}

#[tokio::test(start_paused = true)]
async fn missing_or_short_data_file_is_reported_lost() {
    for gone in [true, false] {
        let disk = TestDisk::new("/a");
        let key = key("app", 1);
        let store = store_on(std::slice::from_ref(&disk)).await;
        store.register(&key);
        for id in 0..3 {
            store.write(&key, vec![extent(1, &[(id, 5000)], false)]).await.unwrap();
        }
        let before = index_of(&store, &key, 1).await.unwrap();
        drop(store);
        let path = disk.app_files().into_iter().find(|path| path.ends_with("0.data")).unwrap();
        if gone {
            disk.memory.rename(&path, Path::new("trash/away")).await.unwrap();
        } else {
            let content = disk.memory.content(&path).unwrap();
            disk.memory.write_small(&path, content[..9000].to_vec()).await.unwrap();
        }
        let store = store_on(std::slice::from_ref(&disk)).await;
        let shuffle = store.take_recovered().shuffles.remove(0);
        let lost: Vec<i64> = shuffle.lost.iter().flat_map(|it| &it.blocks).map(|(id, _)| id.0).collect();
        assert_eq!(lost, if gone { vec![0, 1, 2] } else { vec![1, 2] });
        let reason = if gone { "0.data is missing" } else { "0.data is truncated" };
        assert!(shuffle.lost[0].reason.contains(reason), "{}", shuffle.lost[0].reason);
        let (records, length) = index_of(&store, &key, 1).await.unwrap();
        assert_eq!((ids(&records), length), (if gone { vec![] } else { vec![0] }, before.1));
    }
}

#[tokio::test(start_paused = true)]
async fn latest_incarnation_wins_and_numbers_continue() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let key = key("app", 1);
    let store = store_on(&disks).await;
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    // The removal does not complete before the process ends.
    disks.iter().for_each(|disk| disk.faults.add(Rule::always(Operation::Rename, Fault::Errno(EIO))));
    store.purge(&key).await;
    store.probe().await;
    store.register(&key);
    store.write(&key, vec![extent(1, &[(2, 100)], false)]).await.unwrap();
    drop(store);
    disks.iter().for_each(|disk| disk.faults.clear());
    let store = store_on(&disks).await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [2]);
    let other = ShuffleKey::new(key.app.clone(), ShuffleId(2));
    assert_eq!(format!("{:?}", store.register(&other)), "ShuffleHandle(app/2.3)");
    store.purge(&key).await;
    store.purge(&other).await;
    store.remove_files(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn unreadable_disk_loses_nothing_for_the_next_process() {
    let key = key("app", 1);
    let (disks, on_second, before) = two_disks(&key).await;
    disks[1].faults.add(Rule::always(Operation::OpenRead, Fault::Errno(EIO)));
    let store = store_on(&disks).await;
    let shuffle = store.take_recovered().shuffles.remove(0);
    assert!(!shuffle.reason.is_empty());
    assert_eq!(shuffle.present.held(P1).unwrap().len(), 12 - on_second.len() as u64);
    disks[1].faults.clear();
    store.probe().await;
    store.sweep().await;
    drop(store);
    let store = store_on(&disks).await;
    assert_eq!(store.take_recovered().shuffles[0].present.held(P1).unwrap().len(), 12);
    let (records, _) = index_of(&store, &key, 1).await.unwrap();
    assert_eq!(records[..12], before.1);
}

#[tokio::test(start_paused = true)]
async fn files_left_for_a_later_start_are_not_swept() {
    let (disks, store, shuffle, handle) = two_disks_with_blocks(4).await;
    drop((handle, store));
    let store = store_on(&disks).await;
    store.leave(&shuffle);
    // The application continues.
    let other = key("app", 2);
    store.register(&other);
    store.write(&other, vec![extent(1, &[(9, 100)], false)]).await.unwrap();
    store.sweep().await;
    store.maintain_once().await;
    store.purge_app(&shuffle.app).await;
    drop(store);
    let store = store_on(&disks).await;
    assert_eq!(read_all(&store, &shuffle, 1).await.unwrap(), [0, 1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn record_on_too_few_disks_is_an_error() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b"), TestDisk::new("/c")];
    let key = key("app", 1);
    let store = store_on(&disks).await;
    let handle = store.register(&key);
    disks
        .iter()
        .for_each(|disk| disk.faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)).on("/log")));
    assert!(store.append_metadata(&handle, b"lost").await.is_err());
    disks[1].faults.clear();
    store.probe().await;
    let error = store.append_metadata(&handle, b"lost too").await.unwrap_err().to_string();
    assert!(error.contains("only 1 of 3 data directories are writable"), "{error}");
    disks[2].faults.clear();
    store.probe().await;
    store.append_metadata(&handle, b"kept").await.unwrap();
    drop((handle, store));
    disks.iter().for_each(|disk| disk.faults.clear());
    let recovered = recover(&*store_on(&disks).await).await;
    assert_eq!(
        (&recovered.records[&key][..], &recovered.shuffles[0].incomplete),
        (&[Bytes::from_static(b"kept")][..], &None)
    );
}

#[tokio::test]
async fn stray_file_among_apps_does_not_fail_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disks = || vec![Arc::new(BlockingDisk::new(dir.path(), 1, 1)) as Arc<dyn Disk>];
    let key = key("app", 1);
    let store = open_real(disks()).await.unwrap();
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    drop((handle, store));
    let stray = dir.path().join("apps/notes.txt");
    std::fs::write(&stray, "hi").unwrap();
    let store = open_real(disks()).await.unwrap();
    let info = &store.disks()[0];
    assert_eq!((info.condition, info.fault.as_deref()), (DiskCondition::Healthy, None));
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
    assert!(stray.exists(), "the stray file was deleted");
}

#[tokio::test]
async fn stray_file_named_like_a_shuffle_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let disks = || vec![Arc::new(BlockingDisk::new(dir.path(), 1, 1)) as Arc<dyn Disk>];
    let shuffle = key("app", 1);
    let store = open_real(disks()).await.unwrap();
    let handle = store.register(&shuffle);
    store.append_metadata(&handle, b"registered").await.unwrap();
    store.write(&shuffle, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    drop((handle, store));
    let stray = dir.path().join("apps/app/2.70");
    std::fs::write(&stray, "hi").unwrap();
    let store = open_real(disks()).await.unwrap();
    // No shuffle gets its name, and removals of unknown directories leave it alone.
    let other = key("app", 2);
    let handle = store.register(&other);
    assert_eq!(format!("{handle:?}"), "ShuffleHandle(app/2.71)");
    store.append_metadata(&handle, b"registered").await.unwrap();
    store.write(&other, vec![extent(1, &[(2, 100)], false)]).await.unwrap();
    store.sweep().await;
    store.maintain_once().await;
    let info = &store.disks()[0];
    assert_eq!((info.condition, info.fault.as_deref()), (DiskCondition::Healthy, None));
    assert_eq!(read_all(&store, &shuffle, 1).await.unwrap(), [1]);
    assert_eq!(read_all(&store, &other, 1).await.unwrap(), [2]);
    store.purge_app(&shuffle.app).await;
    assert_eq!(std::fs::read_to_string(&stray).unwrap(), "hi", "the stray file was changed");
}
