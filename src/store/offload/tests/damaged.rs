//! Unreadable data stays on its disk and holds up no other data.

use std::path::PathBuf;

use super::*;
use crate::store::DrainBacklog;
use crate::store::index::codec;
use crate::store::offload::shuffle::EXCLUDED_FOR;

/// Returns a data file longer than `bytes`, with its disk.
fn data_file(fixture: &Fixture, bytes: usize) -> (&MemoryDisk, PathBuf) {
    let is_one = |disk: &MemoryDisk, path: &PathBuf| {
        let is_data = path.starts_with("apps") && path.extension().is_some_and(|it| it == "data");
        is_data && disk.content(path).is_some_and(|content| content.len() > bytes)
    };
    let find = |disk| Some((disk, MemoryDisk::files(disk).into_iter().find(|path| is_one(disk, path))?));
    fixture.disks.iter().find_map(find).unwrap()
}

#[tokio::test(start_paused = true)]
async fn unreadable_partition_blocks_no_other_and_no_drain() {
    let process = Fixture::new().start().await;
    let (bad, good) = (key(1), key(2));
    process.register(&bad).await;
    for batch in 0..12 {
        let of = |partition: i32| extent(partition, batch * 4..(batch + 1) * 4, 1000);
        process.write(&bad, vec![of(0), of(7), of(3)]).await;
    }
    // Each batch begins with partition 0.
    let (disk, file) = data_file(&process.fixture, 0);
    disk.corrupt(&file, 10, 1);
    process.register(&good).await;
    process.write(&good, vec![extent(0, 0..40, 1000)]).await;

    process.tier.begin_drain();
    assert_eq!(
        process.offload_candidates().await,
        0,
        "the damage must be found before an object has the extent"
    );
    let [stopped, others @ ..] = [0, 3, 7].map(|partition| process.offloaded_bytes(&bad, partition));
    assert!(
        stopped == 44_000 && others == [48_000; 2],
        "all but one extent must be offloaded: {stopped} {others:?}"
    );
    let remaining = DrainBacklog { stuck_bytes: 48_000 - stopped, ..DrainBacklog::default() };
    assert_eq!(process.tier.drain_progress(), remaining);
    assert_eq!(process.fixture.store.open_uploads(), 0);
    for partition in [3, 7] {
        assert_eq!(process.read(&bad, partition).await.unwrap(), expected(0..48, 1000));
    }
    assert_eq!(process.read(&good, 0).await.unwrap(), expected(0..40, 1000));
    assert!(!process.read(&bad, 0).await.unwrap().contains_key(&0), "the damaged block was served");
}

#[tokio::test(start_paused = true)]
async fn damaged_extent_within_a_run_is_skipped_and_kept() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    for ids in [0..100, 100..3100] {
        process.write(&key, vec![extent(0, ids, 1000)]).await;
    }
    let (disk, file) = data_file(&process.fixture, 2_900_000);
    disk.corrupt(&file, 2_500_000, 1);

    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 1, "the object in progress must be abandoned once");
    let end = || process.offloaded_bytes(&key, 0);
    assert_eq!((end(), process.fixture.store.open_uploads()), (100_000, 0));
    assert_eq!(
        process.tier.drain_progress(),
        DrainBacklog { stuck_bytes: 3_000_000, ..DrainBacklog::default() }
    );

    assert!(process.tier.next().is_none());
    tokio::time::advance(EXCLUDED_FOR).await;
    assert_eq!((process.offload_candidates().await, end()), (0, 100_000));
    assert_eq!(
        process.tier.drain_progress(),
        DrainBacklog { stuck_bytes: 3_000_000, ..DrainBacklog::default() }
    );
    let remaining = process.read(&key, 0).await.unwrap();
    assert_eq!((0..3100).filter(|id| remaining.contains_key(id)).count(), 3099);
}

/// Data that was unreadable for a while is served after the next start.
#[tokio::test(start_paused = true)]
async fn partly_unreadable_file_stays_after_an_offload() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    process.write(&key, vec![extent(0, 100..104, 1000), extent(5, 0..4, 1000)]).await;
    let find = |disk: &MemoryDisk, path: &PathBuf| {
        let (group, _) = codec::decode(&disk.content(path)?).ok()?;
        let (entry, _) = group.entries.iter().find(|(entry, _)| entry.partition == PartitionId(0))?;
        usize::try_from(entry.place.offset).ok()
    };
    let of = |disk: &MemoryDisk| {
        disk.files().into_iter().find_map(|path| find(disk, &path).map(|at| (disk.clone(), path, at)))
    };
    let (disk, index, at) = process.fixture.disks.iter().find_map(of).unwrap();
    disk.corrupt(&index, at, 1);
    for _ in 0..3 {
        process.read(&key, 0).await.unwrap_err();
    }
    process.tier.local.mark_damaged_lost(&key, PartitionId(0)).await.unwrap();
    process.offload_all(&key).await.unwrap();
    assert_eq!(process.offloaded_bytes(&key, 5), 4000);

    disk.corrupt(&index, at, 1);
    let process = process.kill().await.start().await;
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(100..104, 1000));
}
