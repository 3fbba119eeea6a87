//! State that a process recovers from its predecessor.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use object_store::ObjectMeta;
use tokio::task::JoinSet;
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::{ExtentWrite, Recovered};

async fn all_records(recovered: &mut Recovered) -> Vec<(ShuffleKey, Bytes)> {
    let mut records = Vec::new();
    while let Some(record) = recovered.records.next().await.unwrap() {
        records.push(record);
    }
    records
}

fn present(recovered: &Recovered, shuffle: i32, partition: i32) -> Vec<u64> {
    let found =
        recovered.shuffles.iter().find(|it| it.key == key(shuffle)).expect("the shuffle is recovered");
    found.present.held(PartitionId(partition)).map_or_else(Vec::new, |ids| ids.iter().collect())
}

#[tokio::test]
async fn empty_machine_serves_uploaded_data() {
    let process = Process::start(&FaultyObjects::default()).await;
    for n in [1, 2] {
        let shuffle = process.register_noted(&key(n)).await;
        for batch in 0..3 {
            let first = i64::from(batch) * 4;
            shuffle.write(vec![extent(0, first..first + 4, 500), extent(7, 0..1, 9)].into()).await.unwrap();
        }
    }
    process.log(&key(2)).append(Bytes::from_static(b"report")).await.unwrap();
    let before = read_to_end(process.tier.index(&key(1), PartitionId(0)).unwrap().chunks).await.unwrap();

    let process = Process::start(&process.kill().await).await;
    let mut recovered = process.tier.take_recovered();
    assert_eq!((recovered.shuffles.len(), recovered.blocks, recovered.bytes), (2, 30, 12_054));
    assert!(recovered.shuffles.iter().all(|it| it.incomplete.is_none() && it.reason.is_empty()));
    assert_eq!(present(&recovered, 1, 0), (0..12).collect::<Vec<_>>());
    let texts: Vec<_> =
        all_records(&mut recovered).await.into_iter().map(|(key, it)| (key.shuffle.0, it)).collect();
    assert_eq!(texts, [(1, "registration".into()), (2, "registration".into()), (2, "report".into())]);
    let index = process.tier.index(&key(1), PartitionId(0)).unwrap();
    assert_eq!(read_to_end(index.chunks).await.unwrap(), before, "the offset of a block has changed");
    assert_eq!(process.read(&key(2), 0).await.unwrap(), expected(0..12, 500));

    // The second process appends to the stream of the first, and a third one recovers both.
    let shuffle = process.tier.shuffle(&key(1)).unwrap();
    shuffle.write(vec![extent(0, 12..14, 500)].into()).await.unwrap();
    process.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    let process = Process::start(&process.kill().await).await;
    let mut recovered = process.tier.take_recovered();
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..14, 500));
    assert_eq!(all_records(&mut recovered).await.len(), 4);
    assert!(recovered.shuffles.iter().all(|it| it.incomplete.is_none() && it.reason.is_empty()));
}

#[tokio::test]
async fn only_blocks_of_a_missing_segment_are_lost() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    for n in 0..3 {
        shuffle
            .write(
                vec![extent(0, n * 2..n * 2 + 2, 50), extent(i32::try_from(n).unwrap() + 1, 0..1, 9)].into(),
            )
            .await
            .unwrap();
    }
    let store = process.kill().await;
    let gone = segments(&store).await.remove(1).0;
    store.remove(&gone).await;
    let process = Process::start(&store).await;
    let recovered = process.tier.take_recovered();
    assert!(recovered.shuffles[0].reason.contains(&gone), "{:?}", recovered.shuffles[0]);
    assert_eq!(present(&recovered, 1, 0), [0, 1, 4, 5]);
    assert_eq!(
        (present(&recovered, 1, 1), present(&recovered, 1, 2), present(&recovered, 1, 3)),
        (vec![0], vec![], vec![0])
    );
    let mut read = process.read(&key(1), 0).await.unwrap();
    assert!(
        read.remove(&uniffle_wire::index::FILLER_BLOCK_ID).is_some(),
        "the index lacks the record of the hole"
    );
    let mut served = expected(0..2, 50);
    served.extend(expected(4..6, 50));
    assert_eq!(read, served);
}

/// Writes blocks 0 and 1 of a shuffle, and ends the process.
async fn written_store() -> FaultyObjects {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    shuffle.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    process.kill().await
}

/// Lists all objects, with times before those of the next start.
async fn old_list(store: &FaultyObjects) -> Vec<ObjectMeta> {
    let mut listed = store.list_all().await;
    listed.iter_mut().for_each(|object| object.last_modified -= Duration::from_secs(5));
    listed
}

#[tokio::test(start_paused = true)]
async fn start_with_an_old_list_of_objects_is_refused() {
    let store = written_store().await;
    let old = old_list(&store).await;
    for listed in [old, Vec::new()] {
        store.set_list(Some(listed));
        let error = Process::try_start(&store)
            .await
            .map(drop)
            .expect_err("a start must fail if the list lacks the claim");
        assert!(error.to_string().contains("the list of objects lacks p/worker-1/!claim"), "{error}");
    }
    store.set_list(None);
    let process = Process::start(&store).await;
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..2, 50));
}

#[tokio::test(start_paused = true)]
async fn start_waits_for_a_current_list_of_objects() {
    let store = written_store().await;
    store.set_list(Some(old_list(&store).await));
    let lists = AtomicUsize::new(0);
    let healing = store.clone();
    store.set(move |call, _| {
        if call == Call::List && lists.fetch_add(1, Ordering::Relaxed) == 2 {
            healing.set_list(None);
        }
        ObjectFault::None
    });
    let process = Process::start(&store).await;
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..2, 50));
}

#[tokio::test]
async fn segments_without_a_log_are_kept_and_reported() {
    let store = written_store().await;
    let before = store.snapshot().await;
    let log = log_objects(&store).await;
    for key in &log {
        store.remove(key).await;
    }
    let process = Process::start(&store).await;
    let recovered = process.tier.take_recovered();
    let reason = recovered.shuffles[0].incomplete.clone().unwrap();
    assert!(
        reason.contains("the last checkpoint of the metadata log in the object store is lost"),
        "{reason}"
    );
    let kept: Vec<_> = segments(&process.kill().await).await;
    assert_eq!(kept.len(), 1, "{before:?}");
}

async fn write_each(shuffle: Arc<dyn TierShuffle>, extents: Vec<ExtentWrite>) {
    for extent in extents {
        shuffle.write(vec![extent].into()).await.unwrap();
    }
}

/// A starting worker accepts no connections until it has these responses.
#[tokio::test(start_paused = true)]
async fn rounds_of_a_start_do_not_grow_with_the_segments() {
    const SHUFFLES: i32 = 50;
    let mut rounds = Vec::new();
    for segments_each in [2, 200] {
        let process = Process::start(&FaultyObjects::default()).await;
        let mut writing = JoinSet::new();
        for n in 0..SHUFFLES {
            let shuffle = process.register_noted(&key(n)).await;
            let extents = (0..segments_each).map(|id| extent(0, id..id + 1, 50));
            writing.spawn(write_each(shuffle, extents.collect()));
        }
        writing.join_all().await;
        let store = process.kill().await;
        assert_eq!(segments(&store).await.len() as i64, i64::from(SHUFFLES) * segments_each);
        store.set(|call, _| if call == Call::Get { ObjectFault::Hold } else { ObjectFault::None });
        let (held, mut starting, mut count) = (store.clone(), JoinSet::new(), 0);
        let start = starting.spawn(async move { Process::start(&held).await });
        while !start.is_finished() {
            tokio::time::sleep(Duration::from_millis(20)).await;
            count += u64::from(store.held() > 0);
            store.release_held();
        }
        let process = starting.join_next().await.unwrap().unwrap();
        store.heal();
        let all: Vec<u64> = (0..segments_each.unsigned_abs()).collect();
        assert_eq!(present(&process.tier.take_recovered(), 7, 0), all);
        rounds.push(count);
    }
    assert!(
        rounds[1] <= rounds[0] + 10 && rounds[1] <= 30,
        "starts with 100 and 10,000 objects took {rounds:?} rounds"
    );
}

#[tokio::test]
async fn replaced_unverified_upload_leaves_the_chain() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    shuffle.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    // The upload succeeds, but its response is lost, and the object cannot be deleted.
    process.store.set(|call, _| match call {
        Call::Put => ObjectFault::LoseAnswer,
        _ => ObjectFault::Refuse,
    });
    shuffle.write(vec![extent(0, 2..5, 70)].into()).await.unwrap_err();
    process.store.heal();
    shuffle.write(vec![extent(0, 5..9, 60)].into()).await.unwrap();
    assert_eq!(segments(&process.store).await.len(), 3);

    let process = Process::start(&process.kill().await).await;
    let recovered = process.tier.take_recovered();
    assert_eq!(recovered.shuffles[0].reason, "");
    let mut blocks = expected(0..2, 50);
    blocks.extend(expected(5..9, 60));
    assert_eq!(process.read(&key(1), 0).await.unwrap(), blocks);
}

#[tokio::test(start_paused = true)]
async fn lost_log_object_makes_every_shuffle_incomplete() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    process.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    process.register_noted(&key(2)).await;
    process.log(&key(2)).mark_incomplete("for a reason").await.unwrap();
    let store = process.kill().await;
    let objects = log_objects(&store).await;
    assert_eq!(objects.len(), 10, "{objects:?}");
    for object in &objects[4..6] {
        store.remove(object).await;
    }
    // Later starts report the gap too, although they find nothing missing.
    for _ in 0..2 {
        let process = Process::start(&store).await;
        let mut recovered = process.tier.take_recovered();
        let reasons: Vec<_> = recovered.shuffles.iter().map(|it| it.incomplete.clone().unwrap()).collect();
        assert!(reasons[0].contains("records") && reasons[0].contains("are missing"), "{reasons:?}");
        assert_eq!(reasons.len(), 2);
        assert_eq!(all_records(&mut recovered).await.len(), 2);
        assert!(process.tier.metadata_gap().is_some());
        process.register_noted(&key(3)).await;
        process.purge(&key(3), Purge::Shuffles).await;
        process.kill().await;
    }
    assert_eq!(segments(&store).await.len(), 1, "segments of an unknown shuffle must stay");
}

/// Regression test: the gap never ended, so segments of unknown registrations stayed for ever.
#[tokio::test(start_paused = true)]
async fn gap_ends_once_the_store_knows_it() {
    let process = Process::start(&FaultyObjects::default()).await;
    for n in 1..4 {
        process.register_noted(&key(n)).await.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    }
    let store = process.kill().await;
    let objects = log_objects(&store).await;
    assert_eq!(objects.len(), 8, "expected a checkpoint and three registrations: {objects:?}");
    for object in &objects[4..6] {
        store.remove(object).await;
    }
    let process = Process::start(&store).await;
    process.tier.take_recovered();
    for n in [1, 3] {
        process.purge(&key(n), Purge::Shuffles).await;
    }
    for fault in [ObjectFault::Refuse, ObjectFault::Hold] {
        store.set(move |call, _| if call == Call::Put { fault } else { ObjectFault::None });
        let ended = tokio::time::timeout(Duration::from_secs(11), process.tier.end_metadata_gap());
        ended.await.expect("the call must end, because the caller has other work").unwrap_err();
        assert!(process.tier.metadata_gap().is_some(), "{fault:?}");
    }
    store.heal();
    assert!(process.tier.end_metadata_gap().await.unwrap());
    assert_eq!(process.tier.metadata_gap(), None);
    assert_eq!(segments(&process.kill().await).await.len(), 1);

    let process = Process::start(&store).await;
    assert_eq!((process.tier.take_recovered().shuffles.len(), process.tier.metadata_gap()), (0, None));
    until_segments(&store, 0).await;
}

#[tokio::test]
async fn unregistered_and_replaced_objects_are_deleted() {
    let process = Process::start(&FaultyObjects::default()).await;
    let unregistered = process.register(&key(1));
    unregistered.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    process.register_noted(&key(2)).await;
    // The returned deletion is dropped and never runs.
    let _ = Arc::clone(&process.tier).forget(&key(2).app, &[key(2)], Purge::Shuffles);
    process.register_noted(&key(2)).await.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    assert_eq!(segments(&process.store).await.len(), 2);

    let process = Process::start(&process.kill().await).await;
    assert_eq!(process.tier.take_recovered().shuffles.len(), 1);
    until_segments(&process.store, 1).await;
    let remaining = segments(&process.store).await;
    assert!(remaining[0].0.contains("/2."), "{remaining:?}");
}

#[tokio::test]
async fn failing_store_fails_the_start() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    let store = process.kill().await;
    for failing in [Call::List, Call::Get] {
        store.set(move |call, _| if call == failing { ObjectFault::Refuse } else { ObjectFault::None });
        assert!(Process::try_start(&store).await.is_err(), "{failing:?}");
    }
    store.heal();
    assert_eq!(Process::start(&store).await.tier.take_recovered().blocks, 2);
}

#[tokio::test]
async fn log_object_damaged_in_one_copy_costs_nothing() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    process.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    let store = process.kill().await;
    let whole = store.snapshot().await;
    for object in whole.keys() {
        for damage in 0..3 {
            match damage {
                0 => store.remove(object).await,
                1 => store.replace(object, whole[object].slice(..30)).await,
                _ => store.replace(object, Bytes::from_static(b"other bytes")).await,
            }
            // Opens only the bucket: a whole start would begin a new generation of the log.
            let (objects, extents, tasks) = (Arc::new(store.clone()), Budget::new(u64::MAX), Tasks::new());
            let registry = Registry::new();
            let opened = Bucket::open(objects, settings(), &extents, tasks.clone(), &registry);
            let stored = opened.await.unwrap().take_found().unwrap();
            let gap = stored.log.as_ref().and_then(|log| log.found.gap());
            assert_eq!((stored.shuffles.len(), gap), (1, None), "{object} {damage}");
            tasks.cancel();
            tasks.close();
            tasks.drained().await;
            store.replace(object, whole[object].clone()).await;
        }
    }
    let process = Process::start(&store).await;
    assert_eq!(all_records(&mut process.tier.take_recovered()).await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn start_writes_the_log_again_in_both_copies() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    let store = process.kill().await;
    for object in log_objects(&store).await.iter().filter(|key| key.ends_with(".1")) {
        store.remove(object).await;
    }
    store.set(|call, path| {
        let is_log = path.as_ref().contains("/!log/");
        if call == Call::Put && is_log { ObjectFault::Refuse } else { ObjectFault::None }
    });
    let process = Process::start(&store).await;
    assert!(process.tier.take_recovered().shuffles.iter().all(|it| it.incomplete.is_none()));
    tokio::time::sleep(Duration::from_secs(300)).await;
    store.heal();
    tokio::time::sleep(Duration::from_secs(300)).await;
    let objects = log_objects(&store).await;
    assert_eq!(objects.len(), 2, "{objects:?}");
    let process = Process::start(&process.kill().await).await;
    assert_eq!(all_records(&mut process.tier.take_recovered()).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn interrupted_checkpoint_is_skipped() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    for n in 0..3 {
        process.log(&key(1)).append(vec![n; 700_000].into()).await.unwrap();
    }
    let store = process.kill().await;
    for puts in 0..8 {
        let mut remaining = puts;
        store.set(move |call, path| {
            let counts = call == Call::Put && path.as_ref().contains("/!log/");
            remaining -= i32::from(counts);
            if counts && remaining < 0 { ObjectFault::Refuse } else { ObjectFault::None }
        });
        let process = Process::start(&store).await;
        let mut recovered = process.tier.take_recovered();
        assert_eq!(recovered.shuffles[0].incomplete, None, "{puts}");
        assert_eq!(all_records(&mut recovered).await.len(), 4, "{puts}");
        tokio::time::sleep(Duration::from_millis(500)).await;
        process.kill().await;
    }
}

#[tokio::test]
async fn start_on_an_earlier_layout_is_refused() {
    let store = FaultyObjects::default();
    for version in [1, 2] {
        let claim = format!("uniffle-worker object store {version}\nx\n");
        store.replace("p/worker-1/!claim", claim.into()).await;
        let error = Process::try_start(&store).await.map(drop).unwrap_err();
        assert_eq!(error.kind, crate::store::StoreErrorKind::NotOurs);
        assert!(error.to_string().contains("earlier development build"), "{error}");
    }
    store.remove("p/worker-1/!claim").await;
    store.replace("p/worker-1/app/1.5/m0000000001", Bytes::from_static(b"page")).await;
    let error = Process::try_start(&store).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("m0000000001"), "{error}");
}
