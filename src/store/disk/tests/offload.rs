//! Offload: reads of data to be offloaded, and removal of its files.

use futures::FutureExt as _;

use super::vanished::settled;
use super::*;
use crate::store::extents::extent::{Extent, OBJECT};
use crate::store::offload::{ChosenExtents, Excluded, Run};
use uniffle_testkit::fault::{EIO, ENOSPC, Fault, Operation, Rule};

/// Returns the chosen extents of a whole shuffle, and its first run.
async fn first_run(store: &LocalStore, handle: &DiskShuffleHandle) -> (ChosenExtents, Run) {
    let mut chosen = store.oldest(handle, u64::MAX, Excluded::new()).await;
    let run = chosen.next_run().await.unwrap();
    (chosen, run)
}

#[tokio::test(start_paused = true)]
async fn failed_reads_of_offloads_mark_nothing_suspect() {
    let (disks, store, key, handle) = two_disks_with_blocks(1).await;
    disks.iter().for_each(|it| it.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on(".data")));
    let (chosen, run) = first_run(&store, &handle).await;
    for _ in 0..3 {
        let mut read = chosen.data(&run);
        read.next_chunk(&HeapBuffers).await.unwrap_err();
        assert!(!read.may_have_losses());
    }
    let mut may_have_losses = Vec::new();
    for _ in 0..4 {
        let mut read = store.data(&key, PartitionId(1), 0, 9000).unwrap().chunks;
        read.next_chunk(&HeapBuffers).await.unwrap_err();
        may_have_losses.push(read.may_have_losses());
    }
    assert_eq!(
        may_have_losses,
        [false, false, true, false],
        "the third failed read triggers the search for lost blocks"
    );
}

#[tokio::test(start_paused = true)]
async fn damaged_block_found_by_an_offload_is_a_hole() {
    let (disks, store, key, handle) = two_disks_with_blocks(1).await;
    for disk in &disks {
        let files =
            disk.app_files().into_iter().filter(|path| path.extension().is_some_and(|it| it == "data"));
        files.for_each(|path| disk.memory.corrupt(&path, 100, 1));
    }
    let (chosen, run) = first_run(&store, &handle).await;
    let mut read = chosen.data(&run);
    assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::Corrupt);
    assert_eq!(store.core.metrics.blocks_damaged.get(), 1);
    assert!(store.data(&key, PartitionId(1), 0, 9000).unwrap().has_hole);
}

/// Returns the extents of a shuffle as an object has them after an offload.
async fn copies(store: &LocalStore, handle: &DiskShuffleHandle) -> Vec<(PartitionId, Extent)> {
    let (mut chosen, first) = first_run(store, handle).await;
    let (mut next, mut copies) = (Some(first), Vec::new());
    while let Some(run) = next {
        let copy = |extent: &Extent| (run.partition, Extent { data_log: OBJECT, index_log: 1, ..*extent });
        copies.extend(run.extents.iter().map(copy));
        next = chosen.next_run().await;
    }
    copies
}

/// Regression test: after a restart, all data of one disk was older than that of the next one.
#[tokio::test(start_paused = true)]
async fn data_of_an_earlier_process_is_chosen_by_age() {
    let (disks, store, key, handle) = two_disks_with_blocks(40).await;
    let oldest = async |store: &LocalStore, handle: &DiskShuffleHandle| {
        let mut chosen = store.oldest(handle, 1, Excluded::new()).await;
        let mut bytes = 0;
        while let Some(run) = chosen.next_run().await {
            bytes += run.extents.iter().map(|extent| extent.length).sum::<u64>();
        }
        bytes
    };
    let before = oldest(&store, &handle).await;
    drop((store, handle));
    for disks in [disks.each_ref(), [&disks[1], &disks[0]]] {
        let store = open(disks.map(TestDisk::disk).to_vec()).await.unwrap();
        recover(&store).await;
        assert_eq!(oldest(&store, &store.handle(&key).unwrap()).await, before);
    }
}

/// Relocates all data of a shuffle to an object, as an offload does.
async fn relocate_all(store: &LocalStore, handle: &DiskShuffleHandle) -> Result<u64, StoreError> {
    store.relocate(handle, copies(store, handle).await).await
}

/// Returns the bytes of all files of shuffles.
fn app_bytes(disks: &[TestDisk]) -> u64 {
    let of = |disk: &TestDisk| {
        let files = disk.app_files();
        files.iter().map(|path| disk.memory.content(path).unwrap().len() as u64).sum::<u64>()
    };
    disks.iter().map(of).sum()
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
    assert!(relocate_all(&store, &handle).await.unwrap() >= 4 * 9000);
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
        let mut read = store.data(&key, PartitionId(1), 0, 9000).unwrap().chunks;
        disks[0].faults.add(Rule::once(Operation::Rename, fault).on(".data"));
        match fault {
            // The call is dropped before the disk has answered.
            Fault::Hang => assert!(relocate_all(&store, &handle).now_or_never().is_none()),
            _ => assert_eq!(relocate_all(&store, &handle).await.unwrap_err().kind, StoreErrorKind::NoSpace),
        }
        assert!(!data_files(&disks).is_empty(), "{fault:?}");
        assert_eq!(store.partition_bytes(&key, PartitionId(1)), 36_000);
        assert_eq!(read_all(&store, &key, 1).await.unwrap_err().kind, StoreErrorKind::InvalidRange);

        store.maintain_once().await;
        assert_eq!(data_files(&disks), Vec::<PathBuf>::new(), "{fault:?}");
        assert_eq!(store.used_bytes(), app_bytes(&disks));
        assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::NotFound);
        assert!(!read.may_have_losses() && store.disks().iter().all(|disk| disk.is_healthy()));
        disks[0].faults.release().await;
        drop((read, handle));
        store.purge_app(&key.app).await;
        assert_nothing_left(&store, &disks).await;
    }
}

/// Regression test: the bytes of the file were subtracted twice.
#[tokio::test(start_paused = true)]
async fn vanished_file_without_extents_is_uncounted_once() {
    let (disks, store, _, handle) = two_disks_with_blocks(4).await;
    handle.shuffle.relocate(&copies(&store, &handle).await);
    let path = disks[0].app_files().into_iter().find(|path| path.extension().is_some_and(|it| it == "data"));
    disks[0].memory.remove(&path.unwrap());
    store.sweep().await;
    settled(&store).await;
    assert_eq!(store.core.metrics.files_vanished.get(), 1);
    assert_eq!(store.used_bytes(), app_bytes(&disks));
    store.relocate(&handle, Vec::new()).await.unwrap();
    assert_eq!(data_files(&disks), Vec::<PathBuf>::new());
    assert_eq!(store.used_bytes(), app_bytes(&disks));
}

/// The log of a hole may be readable at a later start.
#[tokio::test(start_paused = true)]
async fn log_with_a_hole_stays_after_an_offload() {
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
    relocate_all(&store, &handle).await.unwrap();
    store.maintain_once().await;
    assert_eq!(data_files(&disks).len(), 1);
    drop((store, handle));

    let store = store_on(&disks).await;
    assert!(recover(&store).await.shuffles[0].lost.is_empty());
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
}
