//! Selection of data to be offloaded, and reads during and after an offload.

use std::path::PathBuf;

use parking_lot::Mutex;
use uniffle_testkit::object_fault::{Call, ObjectFault};
use uniffle_wire::index::RECORD_BYTES;

use super::*;

/// Writes batches with `blocks` blocks of 1,000 bytes for each of three partitions.
async fn fill(process: &Process, key: &ShuffleKey, batches: Range<i64>, blocks: i64) {
    for batch in batches {
        let of = |partition: i32| extent(partition, batch * blocks..(batch + 1) * blocks, 1000);
        process.write(key, vec![of(0), of(7), of(3)]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn streams_are_equal_across_the_offload_boundary() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..12, 4).await;
    let before = process.index(&key, PartitionId(7)).await.unwrap();

    assert!(process.offload_once(&key).await.unwrap());
    let boundary = process.offloaded_bytes(&key, 7);
    assert!((1..48_000).contains(&boundary), "a part of the partition must be offloaded: {boundary} bytes");
    assert_eq!(
        process.index(&key, PartitionId(7)).await.unwrap(),
        before,
        "an offload changed offsets of the index"
    );
    for partition in [0, 3, 7] {
        assert_eq!(process.read(&key, partition).await.unwrap(), expected(0..48, 1000));
    }
    let over = (boundary - 500, 1000);
    let read =
        read_to_end(process.tier.data(&key, PartitionId(7), over.0, over.1).unwrap().chunks).await.unwrap();
    let whole =
        read_to_end(process.tier.data(&key, PartitionId(7), 0, 48_000).unwrap().chunks).await.unwrap();
    let at = usize::try_from(over.0).unwrap();
    assert_eq!(read, whole[at..at + 1000]);
    let beyond = process.tier.data(&key, PartitionId(7), 47_999, 2).unwrap_err();
    assert_eq!(beyond.kind, crate::store::StoreErrorKind::InvalidRange);

    fill(&process, &key, 12..13, 4).await;
    process.offload_all(&key).await.unwrap();
    assert_eq!(process.tier.find(&key).unwrap().local.usage().bytes, 0);
    assert_eq!(process.fixture.data_files(), 0, "offloaded files remain on the disks");
    for partition in [0, 3, 7] {
        assert_eq!(process.read(&key, partition).await.unwrap(), expected(0..52, 1000));
    }
    assert_eq!(process.tier.usage(&key).bytes, 156_000);
    fill(&process, &key, 13..14, 4).await;
    assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..56, 1000));
    let (index, _) = process.index(&key, PartitionId(3)).await.unwrap();
    assert_eq!(index.len(), 56 * RECORD_BYTES);
    let mut present = 0;
    process.tier.visit_present(&key, PartitionId(3), &mut |_| present += 1).await.unwrap();
    assert_eq!(present, 56);

    process.purge(&key).await;
    assert_eq!((process.fixture.segments().await, process.fixture.data_files()), (0, 0));
    assert_eq!(process.tier.local.used_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn objects_follow_bytes_and_not_partitions() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    for batch in 0..4 {
        process.write(&key, (0..500).map(|p| extent(p, batch..batch + 1, 50)).collect()).await;
    }
    process.offload_all(&key).await.unwrap();
    let segments = process.fixture.segments().await;
    assert!((3..=8).contains(&segments), "100,000 bytes are in {segments} objects of 40,000");
    assert_eq!(process.read(&key, 499).await.unwrap(), expected(0..4, 50));
    assert_eq!(process.fixture.store.open_uploads(), 0);
}

/// Batches go to the disks alternately. Their extents are contiguous in objects.
#[tokio::test(start_paused = true)]
async fn offloaded_partition_is_read_with_few_requests() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..24, 4).await;
    process.offload_all(&key).await.unwrap();
    let process = process.kill().await.start().await;
    let view = process.tier.local.view(&key, PartitionId(7)).unwrap();
    let mut objects: Vec<_> =
        view.extents.iter().map(crate::store::extents::extent::Extent::object).collect();
    objects.dedup();
    assert!(objects.len() <= process.fixture.segments().await && objects.len() < 12, "{objects:?}");
    let gets = || process.fixture.store.calls().iter().filter(|(call, _)| *call == Call::Get).count();
    let start = gets();
    read_to_end(process.tier.data(&key, PartitionId(7), 0, 96_000).unwrap().chunks).await.unwrap();
    assert!(gets() - start <= 2 * objects.len(), "{} requests were sent for {objects:?}", gets() - start);
    let start = gets();
    process.index(&key, PartitionId(7)).await.unwrap();
    assert!(gets() - start <= objects.len(), "{} requests were sent for {objects:?}", gets() - start);
}

#[tokio::test(start_paused = true)]
async fn reader_continues_in_the_store_after_an_offload() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    for id in 0..6 {
        process.write(&key, vec![extent(0, id..id + 1, 9000)]).await;
    }
    let mut read = process.tier.data(&key, PartitionId(0), 0, 54_000).unwrap().chunks;
    process.offload_all(&key).await.unwrap();
    assert_eq!(process.fixture.data_files(), 0);
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&HeapBuffers).await.unwrap() {
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(bytes, expected(0..6, 9000).into_values().collect::<Vec<_>>().concat());
    assert!(!read.may_have_losses(), "an error of the store was taken for a loss on a disk");
}

#[tokio::test(start_paused = true)]
async fn failing_store_removes_nothing() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..6, 4).await;
    for failing in [Call::Put, Call::Begin, Call::Part, Call::Complete] {
        process.fixture.store.set(move |call, _| match call {
            call if call == failing => ObjectFault::Refuse,
            _ => ObjectFault::None,
        });
        assert!(process.offload_all(&key).await.is_err(), "{failing:?}");
        process.fixture.store.heal();
        assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..24, 1000), "{failing:?}");
        process.append_record(&key, b"report").await.unwrap();
    }
    process.offload_all(&key).await.unwrap();
    assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..24, 1000));
    assert_eq!((process.fixture.data_files(), process.fixture.store.open_uploads()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn damage_found_by_an_offload_is_reported() {
    let process = Fixture::new().start().await;
    let (key, notifications) = (key(1), Arc::new(Mutex::new(Vec::new())));
    process.register(&key).await;
    fill(&process, &key, 0..6, 4).await;
    let listener = Arc::clone(&notifications);
    process.tier.on_damage(Arc::new(move |key: &ShuffleKey, partition: PartitionId, reason: &str| {
        listener.lock().push((key.clone(), partition, reason.contains("block is corrupt")));
    }));
    let is_data = |path: &PathBuf| path.extension().is_some_and(|it| it == "data");
    let mut damaged = 0;
    for disk in &process.fixture.disks {
        for path in disk.files().into_iter().filter(is_data) {
            // In a block of partition 0, which comes first in each batch.
            disk.corrupt(&path, 100, 1);
            damaged += 1;
        }
    }
    process.offload_all(&key).await.unwrap();
    assert!(damaged > 1);
    let expected = vec![(key.clone(), PartitionId(0), true); 2 * damaged];
    assert_eq!(
        *notifications.lock(),
        expected,
        "each partition must be reported before and after its exclusion"
    );
}

#[tokio::test(start_paused = true)]
async fn disk_is_drained_only_to_the_low_watermark() {
    let fixture = Fixture::new();
    fixture.disks.iter().for_each(|disk| disk.set_capacity(Some(400_000)));
    let process = fixture.start().await;
    let key = key(1);
    process.register(&key).await;
    // Free space is not measured during this loop, because no maintenance runs.
    while process.tier.next().is_none() {
        fill(&process, &key, 0..1, 4).await;
    }
    let mut passes = 0;
    while let Some((wanted, shuffle)) = process.tier.next() {
        assert!(process.tier.offload_candidate(wanted, &shuffle).await.unwrap());
        passes += 1;
    }
    let remaining = process.tier.find(&key).unwrap().local.usage().bytes;
    assert!(remaining > 200_000, "{passes} passes left only {remaining} bytes");
}

#[tokio::test(start_paused = true)]
async fn full_disk_is_writable_after_an_offload() {
    let fixture = Fixture::new();
    let process = fixture.start().await;
    let key = key(1);
    process.register(&key).await;
    let batch = |id: i64| vec![extent(0, id * 10..(id + 1) * 10, 1000)].into();
    let shuffle = process.tier.shuffle(&key).unwrap();
    for round in 0..3 {
        shuffle.write(batch(round)).await.unwrap();
        // The disks are full, which is known only from failed writes.
        fixture.disks.iter().for_each(|disk| disk.set_capacity(Some(1)));
        shuffle.write(batch(9)).await.unwrap_err();
        let (wanted, full) = process.tier.next().expect("data of a full disk must be offloaded");
        fixture.disks.iter().for_each(|disk| disk.set_capacity(None));
        assert!(process.tier.offload_candidate(wanted, &full).await.unwrap());
        assert!(process.tier.next().is_none(), "round {round}: data was offloaded although no disk is full");
    }
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..30, 1000));
}

#[tokio::test(start_paused = true)]
async fn purge_during_an_offload_leaves_nothing() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..12, 4).await;
    process
        .fixture
        .store
        .set(|call, _| if call == Call::Part { ObjectFault::Hold } else { ObjectFault::None });
    let purge = async {
        let held = || if process.fixture.store.held() > 0 { Ok(()) } else { Err(String::new()) };
        uniffle_testkit::eventually("a part is being uploaded", held).await;
        let purge = process.purge(&key);
        let healed = async { process.fixture.store.heal() };
        futures::join!(purge, healed);
    };
    let (moved, ()) = futures::join!(process.offload_all(&key), purge);
    assert_eq!(moved.unwrap_err().kind, crate::store::StoreErrorKind::Purged);
    assert_eq!((process.fixture.segments().await, process.fixture.store.open_uploads()), (0, 0));
    assert_eq!(process.fixture.data_files(), 0);
}

#[tokio::test(start_paused = true)]
async fn shuffle_purged_before_its_offload_is_not_offloaded() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..6, 4).await;
    let before = process.tier.find(&key).unwrap();
    process.purge(&key).await;
    process.register(&key).await;
    let error = process.tier.offload_candidate(OffloadCandidate::Oldest(0), &before).await.unwrap_err();
    assert_eq!(error.kind, crate::store::StoreErrorKind::Purged);
    assert!(process.fixture.segments().await == 0 && process.tier.object.uploads(&key).is_none());

    // The next registration of the shuffle has no records of the earlier one.
    fill(&process, &key, 50..53, 4).await;
    process.offload_all(&key).await.unwrap();
    let process = process.kill().await.on_an_empty_machine().start().await;
    let (_, records) = recovered_records(&process).await;
    assert_eq!(records[&key].len(), 1);
    assert_eq!(process.read(&key, 3).await.unwrap(), expected(200..212, 1000));
}

#[tokio::test(start_paused = true)]
async fn process_without_the_claim_keeps_its_disk_data() {
    let process = Fixture::new().start().await;
    let (fixture, key) = (process.fixture.clone(), key(1));
    process.register(&key).await;
    fill(&process, &key, 0..12, 4).await;
    assert!(process.offload_once(&key).await.unwrap());
    let files = fixture.data_files();
    assert!(files > 0 && process.tier.state().complaint.is_none());
    let newer = fixture.on_an_empty_machine().start().await;
    let objects = fixture.store.objects().await;

    let error = process.offload_all(&key).await.unwrap_err();
    assert_eq!(error.kind, crate::store::StoreErrorKind::InUse, "{error}");
    assert_eq!(fixture.data_files(), files, "files unknown to the newer process must stay");
    assert!(process.tier.state().complaint.is_some_and(|text| text.contains("claimed")));
    assert!(!process.tier.object.is_worth_trying(), "the superseded process must not offload more");
    assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..48, 1000));
    let now = fixture.store.objects().await;
    let is_segment = |(object, _): &&(String, u64)| object.contains("/s0");
    let mut segments = objects.iter().filter(is_segment);
    assert!(segments.all(|object| now.contains(object)), "an object of the newer process was deleted");
    drop(newer);
}

#[tokio::test(start_paused = true)]
async fn only_cold_partitions_are_offloaded() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    process.write(&key, vec![extent(0, 0..4, 500), extent(1, 0..50, 1000), extent(2, 0..1, 9)]).await;
    let (wanted, shuffle) =
        process.tier.next().expect("50,000 cold bytes fill an object and must be offloaded");
    assert_eq!(wanted, OffloadCandidate::Cold(0));
    process
        .fixture
        .store
        .set(|call, _| if call == Call::Complete { ObjectFault::Refuse } else { ObjectFault::None });
    process.tier.offload_candidate(wanted, &shuffle).await.unwrap_err();
    process.fixture.store.heal();
    assert_eq!(
        process.tier.next().map(|(wanted, _)| wanted),
        Some(wanted),
        "after an error the partitions must be as cold as before"
    );
    assert!(process.tier.offload_candidate(wanted, &shuffle).await.unwrap());
    assert_eq!([0, 1, 2].map(|partition| process.offloaded_bytes(&key, partition)), [0, 50_000, 0]);
    assert!(process.tier.next().is_none());
    assert_eq!(process.read(&key, 1).await.unwrap(), expected(0..50, 1000));
}

#[tokio::test(start_paused = true)]
async fn lack_of_cold_partitions_does_not_stop_a_drain() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    process.write(&key, vec![extent(1, 0..50, 1000)]).await;
    process.offload_all(&key).await.unwrap();
    process.write(&key, vec![extent(0, 0..4, 500)]).await;
    let (wanted, shuffle) = process.tier.next().unwrap();
    assert_eq!(wanted, OffloadCandidate::Cold(0));
    assert!(!process.tier.offload_candidate(wanted, &shuffle).await.unwrap());
    assert_eq!(process.tier.drain_progress().stuck_bytes, 0);
    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 0);
    assert_eq!(process.tier.drain_progress(), crate::store::DrainBacklog::default());
}
