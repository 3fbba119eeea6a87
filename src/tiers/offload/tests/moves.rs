//! What moves, and what readers see of it.

use uniffle_testkit::object_fault::{Call, Fault};
use uniffle_wire::index::RECORD_BYTES;

use super::*;

/// Batches of a shuffle: in each, so many blocks of 1,000 bytes of each of three partitions.
async fn fill(process: &Process, key: &ShuffleKey, batches: Range<i64>, blocks: i64) {
    for batch in batches {
        let of = |partition: i32| extent(partition, batch * blocks..(batch + 1) * blocks, 1000);
        process.write(key, vec![of(0), of(7), of(3)]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn streams_are_the_same_before_within_and_behind_the_border() {
    let process = World::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..12, 4).await;
    let before = process.index(&key, PartitionId(7)).await.unwrap();

    assert!(process.move_once(&key).await.unwrap());
    let border = process.tier.object.uploads(&key).unwrap().end(PartitionId(7));
    assert!((1..48_000).contains(&border), "some of it has moved: {border}");
    assert_eq!(process.index(&key, PartitionId(7)).await.unwrap(), before, "offsets are promises");
    for partition in [0, 3, 7] {
        assert_eq!(process.read(&key, partition).await.unwrap(), expected(0..48, 1000));
    }
    let over = (border - 500, 1000);
    let read = all(process.tier.data(&key, PartitionId(7), over).unwrap().chunks).await.unwrap();
    let whole = all(process.tier.data(&key, PartitionId(7), (0, 48_000)).unwrap().chunks).await.unwrap();
    let at = usize::try_from(over.0).unwrap();
    assert_eq!(read, whole[at..at + 1000]);
    let beyond = process.tier.data(&key, PartitionId(7), (47_999, 2)).unwrap_err();
    assert_eq!(beyond.kind, crate::tiers::StoreErrorKind::InvalidRange);

    fill(&process, &key, 12..13, 4).await;
    process.move_all(&key).await.unwrap();
    assert_eq!(process.tier.find(&key).unwrap().local.usage().bytes, 0);
    assert_eq!(process.world.data_files(), 0, "local bytes are gone");
    for partition in [0, 3, 7] {
        assert_eq!(process.read(&key, partition).await.unwrap(), expected(0..52, 1000));
    }
    assert_eq!(process.tier.usage(&key).bytes, 156_000);
    fill(&process, &key, 13..14, 4).await;
    assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..56, 1000));
    let (index, _) = process.index(&key, PartitionId(3)).await.unwrap();
    assert_eq!(index.len(), 56 * RECORD_BYTES);
    assert_eq!(process.tier.present(&key, PartitionId(3)).await.unwrap().cardinality(), 56);

    process.purge(&key).await;
    assert_eq!((process.world.store.objects().await, process.world.data_files()), (vec![], 0));
    assert_eq!(process.tier.local.used_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn objects_follow_bytes_and_not_partitions() {
    let process = World::new().start().await;
    let key = key(1);
    process.register(&key).await;
    for batch in 0..4 {
        process.write(&key, (0..500).map(|p| extent(p, batch..batch + 1, 50)).collect()).await;
    }
    process.move_all(&key).await.unwrap();
    let segments = process.world.segments().await;
    assert!((3..=8).contains(&segments), "100,000 bytes in objects of 40,000: {segments}");
    assert_eq!(process.read(&key, 499).await.unwrap(), expected(0..4, 50));
    assert_eq!(process.world.store.open_uploads(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_reader_goes_on_in_the_store_when_its_file_goes() {
    let process = World::new().start().await;
    let key = key(1);
    process.register(&key).await;
    for id in 0..6 {
        process.write(&key, vec![extent(0, id..id + 1, 9000)]).await;
    }
    let mut read = process.tier.data(&key, PartitionId(0), (0, 54_000)).unwrap().chunks;
    process.move_all(&key).await.unwrap();
    assert_eq!(process.world.data_files(), 0);
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&HeapBuffers).await.unwrap() {
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(bytes, expected(0..6, 9000).into_values().collect::<Vec<_>>().concat());
    assert!(!read.is_suspect(), "no disk is to blame");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_takes_nothing_away() {
    let process = World::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..6, 4).await;
    for failing in [Call::Put, Call::Begin, Call::Part, Call::Complete] {
        process.world.store.set(move |call, _| match call {
            call if call == failing => Fault::Refuse,
            _ => Fault::None,
        });
        assert!(process.move_all(&key).await.is_err(), "{failing:?}");
        process.world.store.heal();
        assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..24, 1000), "{failing:?}");
        process.say(&key, b"report").await.unwrap();
    }
    process.move_all(&key).await.unwrap();
    assert_eq!(process.read(&key, 3).await.unwrap(), expected(0..24, 1000));
    assert_eq!((process.world.data_files(), process.world.store.open_uploads()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_purge_in_the_middle_leaves_nothing() {
    let process = World::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..12, 4).await;
    process.world.store.set(|call, _| if call == Call::Part { Fault::Hold } else { Fault::None });
    let purge = async {
        let held = || if process.world.store.held() > 0 { Ok(()) } else { Err(String::new()) };
        uniffle_testkit::eventually("a part is on its way", held).await;
        let purge = process.purge(&key);
        let healed = async { process.world.store.heal() };
        futures::join!(purge, healed);
    };
    let (moved, ()) = futures::join!(process.move_all(&key), purge);
    assert_eq!(moved.unwrap_err().kind, crate::tiers::StoreErrorKind::Purged);
    assert_eq!((process.world.store.objects().await, process.world.store.open_uploads()), (vec![], 0));
    assert_eq!(process.world.data_files(), 0);
}

#[tokio::test(start_paused = true)]
async fn cold_partitions_go_and_the_others_stay() {
    let process = World::new().start().await;
    let key = key(1);
    process.register(&key).await;
    process.write(&key, vec![extent(0, 0..4, 500), extent(1, 0..50, 1000), extent(2, 0..1, 9)]).await;
    let (wanted, shuffle) = process.tier.next().expect("50,000 bytes are more than an object");
    assert_eq!(wanted, Wanted::Cold(0));
    assert!(process.tier.move_some(wanted, &shuffle).await.unwrap());
    let uploads = process.tier.object.uploads(&key).unwrap();
    assert_eq!([0, 1, 2].map(|partition| uploads.end(PartitionId(partition))), [0, 50_000, 0]);
    assert!(process.tier.next().is_none());
    assert_eq!(process.read(&key, 1).await.unwrap(), expected(0..50, 1000));
}
