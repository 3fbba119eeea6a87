//! Local and stored data is deleted only with proof that it is copied or obsolete. Starts on empty
//! disks are refused, unless the worker was drained or the configuration says that they are new. A
//! hung store delays only operations that need it.

use std::time::Duration;

use tokio::task::JoinSet;
use uniffle_testkit::eventually;
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::offload::shuffle::FAILED_FOR;
use crate::store::{DrainBacklog, StoreErrorKind};

async fn fill(process: &Process, key: &ShuffleKey, ids: Range<i64>) {
    for id in ids {
        process.write(key, vec![extent(0, id..id + 1, 3000)]).await;
    }
}

/// Returns the state after a killed process. The first blocks of a shuffle are in the store, and
/// the last ones only on the disks.
async fn divided(key: &ShuffleKey) -> Fixture {
    let process = Fixture::new().start().await;
    process.register(key).await;
    fill(&process, key, 0..20).await;
    process.offload_all(key).await.unwrap();
    process.append_record(key, b"report").await.unwrap();
    fill(&process, key, 20..23).await;
    process.kill().await
}

/// Removes both copies of a log object. Objects are counted from the end: the last one is 0.
pub(super) async fn lose_log_object(fixture: &Fixture, from_the_end: usize) {
    let objects = fixture.store.objects().await.into_iter().map(|(object, _)| object);
    let log: Vec<_> = objects.filter(|object| object.contains("/!log/")).collect();
    let end = log.len() - 2 * from_the_end;
    for object in &log[end - 2..end] {
        fixture.store.remove(object).await;
    }
}

#[tokio::test(start_paused = true)]
async fn reports_do_not_wait_for_a_hung_first_offload() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    process
        .fixture
        .store
        .set(|call, _| if call == Call::Put { ObjectFault::Hold } else { ObjectFault::None });
    let (tier, shuffle) = (Arc::clone(&process.tier), process.tier.find(&key).unwrap());
    let mut offloads = JoinSet::new();
    offloads.spawn(async move { tier.offload_candidate(OffloadCandidate::Oldest(0), &shuffle).await });
    let held = || if process.fixture.store.held() > 0 { Ok(()) } else { Err("not held".to_owned()) };
    eventually("the first log object is being written", held).await;
    let began = tokio::time::Instant::now();
    process.append_record(&key, b"meanwhile").await.unwrap();
    assert_eq!(began.elapsed(), std::time::Duration::ZERO);
    assert!(process.fixture.store.held() > 0, "the store must still hang");

    process.fixture.store.heal();
    assert!(offloads.join_next().await.unwrap().unwrap().unwrap());
    let process = process.kill().await.on_an_empty_machine().start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((records[&key].len(), &recovered.shuffles[0].incomplete), (2, &None));
}

/// The store hangs between its first answer and the record that permits offloads. It may have that
/// record, so a later one must not be acknowledged without it.
#[tokio::test(start_paused = true)]
async fn report_behind_a_hung_offload_ends_in_time() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    let (tier, shuffle) = (Arc::clone(&process.tier), process.tier.find(&key).unwrap());
    let moved = Arc::clone(&shuffle);
    process.fixture.store.set(move |call, _| {
        if call == Call::Put && moved.is_offloaded() { ObjectFault::Hold } else { ObjectFault::None }
    });
    let mut offloads = JoinSet::new();
    offloads.spawn(async move { tier.offload_candidate(OffloadCandidate::Oldest(0), &shuffle).await });
    let held = || if process.fixture.store.held() > 0 { Ok(()) } else { Err("not held".to_owned()) };
    eventually("the record of the offload is being written", held).await;
    for _ in 0..2 {
        let report = process.append_record(&key, b"report");
        let ended = tokio::time::timeout(Duration::from_secs(125), report).await;
        let error = ended.expect("the report did not end").unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Unreachable, "{error}");
        assert!(error.to_string().contains("has not answered"), "{error}");
    }
    assert!(
        offloads.join_next().await.unwrap().unwrap().is_err(),
        "the pass must fail, so that the next one tries again"
    );

    process.fixture.store.heal();
    process.append_record(&key, b"report").await.unwrap();
    process.offload_all(&key).await.unwrap();
    let process = process.kill().await.on_an_empty_machine().start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((records[&key].len(), &recovered.shuffles[0].incomplete), (2, &None));
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..10, 3000));
}

#[tokio::test(start_paused = true)]
async fn checkpoint_replaces_records_that_outran_the_store() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    process
        .fixture
        .store
        .set(|call, _| if call == Call::Put { ObjectFault::Hold } else { ObjectFault::None });
    let (tier, shuffle) = (Arc::clone(&process.tier), process.tier.find(&key).unwrap());
    let mut offloads = JoinSet::new();
    offloads.spawn(async move { tier.offload_candidate(OffloadCandidate::Oldest(0), &shuffle).await });
    let held = || if process.fixture.store.held() > 0 { Ok(()) } else { Err("not held".to_owned()) };
    eventually("the first log object is being written", held).await;
    for number in 0..10_u8 {
        process.append_record(&key, &[number].repeat(1 << 20)).await.unwrap();
    }
    process.fixture.store.heal();
    assert!(offloads.join_next().await.unwrap().unwrap().unwrap());
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..10, 3000));
    process.offload_all(&key).await.unwrap();
    let process = process.kill().await.on_an_empty_machine().start().await;
    assert_eq!(recovered_records(&process).await.1[&key].len(), 11);
}

/// The process ends at each write of the log copy, while a report is sent.
#[tokio::test(start_paused = true)]
async fn report_during_the_copy_keeps_disk_data() {
    for at in 0..8 {
        let process = Fixture::new().start().await;
        let key = key(1);
        process.register(&key).await;
        fill(&process, &key, 0..10).await;
        let mut puts = 0;
        process.fixture.store.set(move |call, _| {
            puts += usize::from(call == Call::Put);
            if call == Call::Put && puts > at { ObjectFault::Hold } else { ObjectFault::None }
        });
        let (tier, shuffle) = (Arc::clone(&process.tier), process.tier.find(&key).unwrap());
        let mut offloads = JoinSet::new();
        offloads.spawn(async move { tier.offload_candidate(OffloadCandidate::Oldest(0), &shuffle).await });
        let log = process.tier.metadata_log(&key).unwrap();
        let mut saying = JoinSet::new();
        let report = saying.spawn(async move { log.append(Bytes::from_static(b"report")).await.is_ok() });
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let is_acknowledged = report.is_finished() && saying.join_next().await.unwrap().unwrap();
        offloads.shutdown().await;
        let fixture = process.kill().await;
        fixture.store.heal();
        let process = fixture.start().await;
        let (recovered, records) = recovered_records(&process).await;
        assert!(
            records[&key].len() == 2 || !is_acknowledged,
            "write {at}: an acknowledged record is missing"
        );
        assert_eq!(recovered.shuffles[0].incomplete, None, "write {at}: the shuffle is incomplete");
        assert_eq!(
            process.read(&key, 0).await.unwrap(),
            expected(0..10, 3000),
            "write {at}: blocks are missing or wrong"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn start_from_unmounted_disks_is_refused() {
    let key = key(1);
    let fixture = divided(&key).await;
    let unmounted = fixture.unmounted();
    let error = unmounted.try_start().await.map(drop).unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NotMounted, "{error}");
    let text = error.to_string();
    assert!(text.contains("the object store has") && text.contains("require_mounted = false"), "{text}");
    let remaining: Vec<_> = unmounted.disks.iter().flat_map(|disk| disk.files()).collect();
    assert!(
        remaining.is_empty(),
        "a refused start left files, which make the directory look used: {remaining:?}"
    );

    let process = fixture.start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((records[&key].len(), present(&recovered, &key, 0).len()), (2, 23));
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..23, 3000));
}

/// Regression test: such blocks were "in memory when the worker ended".
#[tokio::test(start_paused = true)]
async fn blocks_of_disks_that_are_gone_are_lost_with_them() {
    let key = key(1);
    let fixture = divided(&key).await;
    let process = fixture.start().await;
    assert_eq!(recovered_records(&process).await.0.shuffles[0].reason, "", "the recovery reports a loss");
    let elsewhere = process.kill().await.on_an_empty_machine();
    let reason = recovered_records(&elsewhere.start().await).await.0.shuffles[0].reason.clone();
    assert!(reason.contains("data directory /a is missing"), "{reason}");

    let process = divided(&key).await.start().await;
    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 0);
    let process = process.kill().await.unmounted().start().await;
    assert_eq!(
        recovered_records(&process).await.0.shuffles[0].reason,
        "",
        "the store has all data of the disks, but a loss is reported"
    );
}

/// Regression test: a start without disks dropped the directories from the log in the store.
#[tokio::test(start_paused = true)]
async fn unmounted_disks_are_refused_after_a_start_without_disks() {
    let key = key(1);
    let fixture = divided(&key).await;
    for _ in 0..2 {
        let (memory, tasks, registry) = (Budget::new(u64::MAX), Tasks::new(), Registry::new());
        let (objects, settings) = (Arc::new(fixture.store.clone()), ObjectSettings::new("p/worker-1"));
        let opened = Bucket::open(objects, settings, &memory, tasks.clone(), &registry).await;
        let opened = OffloadTier::without_disks(opened.unwrap(), &memory, tasks.clone(), &registry);
        let tier = opened.await.unwrap();
        assert_eq!(tier.take_recovered().shuffles.len(), 1);
        tier.object.known(0).await.unwrap();
        tasks.cancel();
        tasks.close();
        tasks.drained().await;
        let error = fixture.unmounted().try_start().await.map(drop).unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::NotMounted, "{error}");
    }
    let process = fixture.start().await;
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..23, 3000));
}

#[tokio::test(start_paused = true)]
async fn returned_disks_are_served() {
    let key = key(1);
    let fixture = divided(&key).await;
    let elsewhere = fixture.on_an_empty_machine();
    let process = elsewhere.start().await;
    process.append_record(&key, b"elsewhere").await.unwrap();
    fill(&process, &key, 50..52).await;
    process.kill().await;

    let mut back = fixture;
    for _ in 0..2 {
        let process = back.start().await;
        let (recovered, records) = recovered_records(&process).await;
        assert_eq!((recovered.shuffles.len(), records[&key].len()), (1, 3));
        assert_eq!(
            recovered.shuffles[0].incomplete, None,
            "the store has all records, but the shuffle is incomplete"
        );
        assert_eq!(present(&recovered, &key, 0), (0..23).collect::<Vec<_>>());
        assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..23, 3000));
        back = process.kill().await;
    }
    // By now the disks have all records.
    let fixture = Fixture { store: FaultyObjects::default(), ..back };
    let process = fixture.start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((records[&key].len(), &recovered.shuffles[0].incomplete), (3, &None));
}

/// Other disks gave the same stream offsets to other blocks, and offloaded these.
#[tokio::test(start_paused = true)]
async fn blocks_missing_in_the_store_keep_their_file() {
    let key = key(1);
    let fixture = divided(&key).await;
    let files = fixture.data_files();
    assert!(files > 0);
    let process = fixture.on_an_empty_machine().start().await;
    fill(&process, &key, 50..54).await;
    process.offload_all(&key).await.unwrap();
    process.kill().await;

    let mut back = fixture;
    for _ in 0..2 {
        let process = back.start().await;
        let (recovered, _) = recovered_records(&process).await;
        let all: Vec<u64> = (0..20).chain(50..54).collect();
        assert_eq!(present(&recovered, &key, 0), all);
        back = process.kill().await;
        assert_eq!(back.data_files(), files);
    }
}

#[tokio::test(start_paused = true)]
async fn drained_worker_starts_on_empty_disks_until_cancelled() {
    let key = key(1);
    let process = divided(&key).await.start().await;
    process.tier.begin_drain();
    assert_eq!(process.tier.drain_progress().shuffles_left, 1);
    assert_eq!(process.offload_candidates().await, 0);
    assert_eq!(process.tier.drain_progress(), DrainBacklog::default());
    let drained = process.kill().await.unmounted();
    let process = drained.start().await;
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..23, 3000));
    // The worker has data on disks again.
    let fixture = process.kill().await;
    assert_eq!(fixture.unmounted().try_start().await.map(drop).unwrap_err().kind, StoreErrorKind::NotMounted);

    let process = fixture.start().await;
    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 0);
    process.tier.cancel();
    process.tier.record_drained().await;
    let fixture = process.kill().await;
    assert_eq!(fixture.unmounted().try_start().await.map(drop).unwrap_err().kind, StoreErrorKind::NotMounted);
}

/// Regression test: after a cancelled drain, empty disks were accepted until the next check
/// recorded the cancellation in the store.
#[tokio::test(start_paused = true)]
async fn data_after_a_cancelled_drain_needs_the_disks() {
    for is_registered in [false, true] {
        let key = key(1);
        let process = divided(&key).await.start().await;
        process.tier.begin_drain();
        assert_eq!(process.offload_candidates().await, 0);
        process.tier.cancel();
        let (store, later) = (process.fixture.store.clone(), super::key(2));
        store.set(|call, _| if call == Call::Put { ObjectFault::Refuse } else { ObjectFault::None });
        if is_registered {
            process.admit(&later);
            process.append_record(&later, b"registration").await.unwrap_err();
        } else {
            let shuffle = process.tier.shuffle(&key).unwrap();
            shuffle.write(vec![extent(0, 23..24, 3000)].into()).await.unwrap_err();
        }
        assert_eq!(
            process.fixture.data_files(),
            0,
            "the disks have data although the store still accepts empty disks"
        );
        store.heal();
        match is_registered {
            true => process.append_record(&later, b"registration").await.unwrap(),
            false => fill(&process, &key, 23..24).await,
        }
        let fixture = process.kill().await;
        let error = fixture.unmounted().try_start().await.map(drop).unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::NotMounted, "{error}");
        let process = fixture.start().await;
        let ids = if is_registered { 0..23 } else { 0..24 };
        assert_eq!(process.read(&key, 0).await.unwrap(), expected(ids, 3000));
    }
}

/// A write that is in progress when a drain ends.
#[tokio::test(start_paused = true)]
async fn write_waits_for_the_record_of_a_drain() {
    let key = key(1);
    let process = divided(&key).await.start().await;
    process.tier.begin_drain();
    while let Some((wanted, shuffle)) = process.tier.next() {
        process.tier.offload_candidate(wanted, &shuffle).await.unwrap();
    }
    process.until_known().await;
    let store = process.fixture.store.clone();
    store.set(|call, _| if call == Call::Put { ObjectFault::Hold } else { ObjectFault::None });
    let held = || if store.held() > 0 { Ok(()) } else { Err("not held".to_owned()) };
    let write = async {
        eventually("the record is being written", held).await;
        fill(&process, &key, 23..24).await;
    };
    let heal = async {
        eventually("the record is being written", held).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        store.heal();
    };
    futures::join!(process.tier.record_drained(), write, heal);
    let fixture = process.kill().await;
    let error = fixture.unmounted().try_start().await.map(drop).unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NotMounted, "{error}");
}

/// Regression test: a drain tried only the oldest shuffle, again and again.
#[tokio::test(start_paused = true)]
async fn drain_continues_beside_a_shuffle_that_fails() {
    let process = Fixture::new().start().await;
    let keys = [1, 2, 3].map(key);
    for key in &keys {
        process.register(key).await;
        fill(&process, key, 0..20).await;
    }
    process.fixture.store.set(|_, path| match path.as_ref().contains("/app-1/1.") {
        true => ObjectFault::Refuse,
        false => ObjectFault::None,
    });
    process.tier.begin_drain();
    let left = async || {
        for _ in 0..10 {
            if let Some((wanted, shuffle)) = process.tier.next() {
                process.tier.run(wanted, &shuffle).await;
            }
        }
        keys.each_ref().map(|key| process.tier.find(key).unwrap().local.usage().bytes)
    };
    let [failing, others @ ..] = left().await;
    assert_eq!((failing > 0, others), (true, [0, 0]));
    let failed = process.tier.find(&keys[0]).unwrap();
    assert!(failed.last_failure().is_some());
    tokio::time::advance(FAILED_FOR).await;
    assert_eq!(failed.last_failure(), None, "a shuffle must not stay last after one failure");
    process.fixture.store.heal();
    assert_eq!(left().await, [0; 3]);
}

/// Objects of an ended shuffle are not data of the disks, so they do not hold up a drain.
#[tokio::test(start_paused = true)]
async fn drain_without_shuffles_ends_once_stored() {
    let key = key(1);
    let process = divided(&key).await.start().await;
    process
        .fixture
        .store
        .set(|call, _| if call == Call::Delete { ObjectFault::Refuse } else { ObjectFault::None });
    drop(Arc::clone(&process.tier).forget(&key.app, std::slice::from_ref(&key), Purge::Shuffles));
    process.tier.begin_drain();
    assert_eq!(process.tier.drain_progress().shuffles_left, 1);
    process.until_known().await;
    process.tier.record_drained().await;
    assert_eq!(process.tier.drain_progress(), DrainBacklog::default());
    let fixture = process.kill().await;
    fixture.store.heal();
    fixture.unmounted().start().await;
}

/// A failed start must not reset the drained state.
#[tokio::test(start_paused = true)]
async fn drained_state_survives_a_failed_start() {
    let key = key(1);
    let process = divided(&key).await.start().await;
    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 0);
    let drained = process.kill().await.unmounted();
    let nowhere = Fixture { disks: Vec::new(), ..drained.clone() };
    nowhere.try_start().await.map(drop).unwrap_err();
    let process = drained.start().await;
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..23, 3000));
}

#[tokio::test(start_paused = true)]
async fn segments_stay_when_the_log_in_the_store_is_damaged() {
    for (is_elsewhere, lost) in [false, true].into_iter().flat_map(|it| (1..3).map(move |lost| (it, lost))) {
        let key = key(1);
        let mut fixture = divided(&key).await;
        let segments = fixture.segments().await;
        lose_log_object(&fixture, lost).await;
        if is_elsewhere {
            fixture = fixture.on_an_empty_machine();
        }
        for start in 0..3 {
            let process = fixture.start().await;
            let (recovered, _) = recovered_records(&process).await;
            assert_eq!(
                process.fixture.segments().await,
                segments,
                "{lost} start {start}: segments have changed"
            );
            if is_elsewhere {
                let is_proven =
                    recovered.shuffles.iter().any(|shuffle_state| shuffle_state.incomplete.is_none());
                assert!(!is_proven, "{lost} start {start}: the shuffle counts as complete: {recovered:?}");
                assert!(process.tier.metadata_gap().is_some(), "{lost} start {start}: no gap is reported");
            } else {
                let shuffle_state = &recovered.shuffles[0];
                assert_eq!(
                    shuffle_state.incomplete, None,
                    "{lost} start {start}: the shuffle is incomplete: {shuffle_state:?}"
                );
                assert_eq!(
                    present(&recovered, &key, 0),
                    (0..23).collect::<Vec<_>>(),
                    "{lost} start {start}: blocks are missing"
                );
                assert!(
                    shuffle_state.lost.is_empty(),
                    "{lost} start {start}: extents are lost: {shuffle_state:?}"
                );
                assert_eq!(
                    process.read(&key, 0).await.unwrap(),
                    expected(0..23, 3000),
                    "start {start}: blocks are missing or wrong"
                );
            }
            process.until_known().await;
            fixture = process.kill().await;
        }
    }
}

/// The later registration has the greater incarnation. Local data of the earlier one stays while
/// the metadata has a gap.
#[tokio::test(start_paused = true)]
async fn later_registration_elsewhere_is_served_without_deletion() {
    let here = Fixture::new();
    let process = here.start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    let number = process.tier.local.handle(&key).unwrap().incarnation();
    process.kill().await;
    let files = here.data_files();

    let process = here.on_an_empty_machine().start().await;
    process.tier.local.count_from(number + 100);
    process.register(&key).await;
    fill(&process, &key, 50..60).await;
    process.offload_all(&key).await.unwrap();
    process.kill().await;
    let segments = here.segments().await;

    let process = here.start().await;
    let (recovered, _) = recovered_records(&process).await;
    assert_eq!((recovered.shuffles.len(), &recovered.shuffles[0].incomplete), (1, &None));
    assert!(process.tier.metadata_gap().is_some());
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(50..60, 3000));
    assert_eq!((here.segments().await, here.data_files()), (segments, files));
    process.append_record(&key, b"more").await.unwrap();
    process.purge(&key).await;
    process.register(&key).await;
    fill(&process, &key, 70..73).await;
    let process = process.kill().await.start().await;
    let (recovered, _) = recovered_records(&process).await;
    assert_eq!((present(&recovered, &key, 0), &recovered.shuffles[0].incomplete), (vec![70, 71, 72], &None));
}
