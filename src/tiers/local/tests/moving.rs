//! What is moved away: reads for that, and files that go.

use super::*;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

/// All of a partition, as a run.
fn run_of(moving: &Moving, partition: i32) -> Run {
    moving.next_run(PartitionId(partition), 0, u64::MAX).unwrap()
}

#[tokio::test(start_paused = true)]
async fn reads_that_move_data_take_no_signal_from_readers() {
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
async fn a_damaged_block_is_found_by_a_reader_and_not_by_what_moves_it() {
    let (disks, store, key, handle) = two_disks_with_blocks(1).await;
    for disk in &disks {
        let files =
            disk.app_files().into_iter().filter(|path| path.extension().is_some_and(|it| it == "data"));
        files.for_each(|path| disk.memory.corrupt(&path, 100, 1));
    }
    let moving = store.moving(&handle);
    let mut read = moving.data(&run_of(&moving, 1)).unwrap();
    assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::Corrupt);
    assert_eq!(store.core.metrics.blocks_damaged.get(), 0);
    assert!(!store.data(&key, PartitionId(1), 0, 9000).unwrap().has_hole());

    let mut read = store.data(&key, PartitionId(1), 0, 9000).unwrap();
    assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::Corrupt);
    assert!(read.is_suspect() && store.data(&key, PartitionId(1), 0, 9000).unwrap().has_hole());
}
