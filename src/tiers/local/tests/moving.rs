//! Migration: reads of data to be moved, and removal of its files.

use futures::FutureExt as _;

use super::*;
use uniffle_testkit::fault::{EIO, ENOSPC, Fault, Operation, Rule};

/// Returns a whole partition as one run.
fn run_of(moving: &Moving, partition: i32) -> Run {
    moving.next_run(PartitionId(partition), 0, u64::MAX).unwrap()
}

#[tokio::test(start_paused = true)]
async fn failed_reads_of_moves_mark_nothing_suspect() {
    let (disks, store, key, handle) = two_disks_with_blocks(1).await;
    disks.iter().for_each(|it| it.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on(".data")));
    let moving = store.moving(&handle);
    for _ in 0..3 {
        let mut read = moving.data(&run_of(&moving, 1)).unwrap();
        read.next_chunk(&HeapBuffers).await.unwrap_err();
        assert!(!read.is_suspect());
    }
    let mut told = Vec::new();
    for _ in 0..4 {
        let mut read = store.data(&key, PartitionId(1), 0, 9000).unwrap();
        read.next_chunk(&HeapBuffers).await.unwrap_err();
        told.push(read.is_suspect());
    }
    assert_eq!(told, [false, false, true, false], "the third reader asks what is lost");
}

#[tokio::test(start_paused = true)]
async fn damaged_block_found_by_a_move_is_omitted() {
    let (disks, store, key, handle) = two_disks_with_blocks(1).await;
    for disk in &disks {
        let files =
            disk.app_files().into_iter().filter(|path| path.extension().is_some_and(|it| it == "data"));
        files.for_each(|path| disk.memory.corrupt(&path, 100, 1));
    }
    let moving = store.moving(&handle);
    let mut read = moving.data(&run_of(&moving, 1)).unwrap();
    assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::Corrupt);
    assert_eq!(store.core.metrics.blocks_damaged.get(), 1);
    assert!(store.data(&key, PartitionId(1), 0, 9000).unwrap().has_hole());
}

/// Releases all data of a shuffle, as after a migration.
async fn release_all(store: &LocalStore, handle: &ShuffleHandle) -> Result<u64, StoreError> {
    let all = store.oldest(handle, u64::MAX, &Stops::new()).await;
    store.release(handle, all.ends).await
}

/// Returns data files and files that wait for deletion.
fn data_files(disks: &[TestDisk]) -> Vec<PathBuf> {
    let of_data =
        |path: &PathBuf| path.starts_with("trash") || path.extension().is_some_and(|it| it == "data");
    disks.iter().flat_map(|disk| disk.memory.files()).filter(of_data).collect()
}

#[tokio::test(start_paused = true)]
async fn disk_without_room_for_a_directory_is_drained() {
    let (disks, store, key, handle) = two_disks_with_blocks(4).await;
    disks.iter().for_each(|it| it.faults.add(Rule::always(Operation::CreateDir, Fault::Errno(ENOSPC))));
    assert!(release_all(&store, &handle).await.unwrap() >= 4 * 9000);
    assert_eq!(data_files(&disks), Vec::<PathBuf>::new());
    disks.iter().for_each(|it| it.faults.clear());
    drop(handle);
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn unremoved_file_is_removed_by_maintenance() {
    for fault in [Fault::Errno(ENOSPC), Fault::Hang] {
        let (disks, store, key, handle) = two_disks_with_blocks(4).await;
        let mut read = store.data(&key, PartitionId(1), 0, 9000).unwrap();
        disks[0].faults.add(Rule::once(Operation::Rename, fault).on(".data"));
        match fault {
            // The call is dropped before the disk has answered.
            Fault::Hang => assert!(release_all(&store, &handle).now_or_never().is_none()),
            _ => assert_eq!(release_all(&store, &handle).await.unwrap_err().kind, StoreErrorKind::NoSpace),
        }
        assert!(!data_files(&disks).is_empty(), "{fault:?}");
        assert_eq!(store.partition_bytes(&key, PartitionId(1)), 36_000);
        assert_eq!(read_all(&store, &key, 1).await.unwrap_err().kind, StoreErrorKind::InvalidRange);

        store.maintain_once().await;
        assert_eq!(data_files(&disks), Vec::<PathBuf>::new(), "{fault:?}");
        let mut left = 0;
        for disk in &disks {
            left +=
                disk.app_files().iter().map(|path| disk.memory.content(path).unwrap().len()).sum::<usize>();
        }
        assert_eq!(store.used_bytes(), left as u64, "index logs stay");
        assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::NotFound);
        assert!(!read.is_suspect() && store.disks().iter().all(|disk| disk.is_healthy()));
        disks[0].faults.release().await;
        drop((read, handle));
        store.purge_app(&key.app).await;
        assert_nothing_left(&store, &disks).await;
    }
}

/// The log of a hole may be readable at a later start.
#[tokio::test(start_paused = true)]
async fn log_with_a_hole_stays_when_the_rest_is_released() {
    let disks = [TestDisk::new("/a")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    let both = vec![extent(1, &[(1, 9000)], true), extent(2, &[(2, 9000)], true)];
    store.write(&key, both).await.unwrap();
    disks[0].faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on(".data"));
    for _ in 0..3 {
        range_of(&store, &key, 1, (0, 9000)).await.unwrap_err();
    }
    store.mark_damaged_lost(&key, PartitionId(1)).await.unwrap();
    disks[0].faults.clear();
    store.probe().await;
    release_all(&store, &handle).await.unwrap();
    store.maintain_once().await;
    assert_eq!(data_files(&disks).len(), 1);
    drop((store, handle));

    let store = store_on(&disks).await;
    assert!(hear(&store).await.shuffles[0].lost.is_empty());
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
}
