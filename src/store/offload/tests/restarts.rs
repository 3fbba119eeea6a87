//! Recovery by a later process, on the same disks or on others.

use uniffle_testkit::object_fault::{Call, ObjectFault};
use uniffle_wire::index::FILLER_BLOCK_ID;

use super::*;
use crate::store::{DrainBacklog, LocalStore, StoreErrorKind};

async fn fill(process: &Process, key: &ShuffleKey, ids: Range<i64>) {
    for id in ids {
        process.write(key, vec![extent(0, id..id + 1, 3000), extent(5, id..id + 1, 700)]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn start_merges_disks_and_store() {
    let process = Fixture::new().start().await;
    let (moved, other) = (key(1), key(2));
    for key in [&moved, &other] {
        process.register(key).await;
        process.append_record(key, b"early").await.unwrap();
        fill(&process, key, 0..40).await;
    }
    assert!(process.offload_once(&moved).await.unwrap());
    process.append_record(&moved, b"late").await.unwrap();
    let before = process.index(&moved, PartitionId(0)).await.unwrap();
    let (files, used) = (process.fixture.data_files(), process.tier.local.used_bytes());

    let process = process.kill().await.start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((records[&moved].len(), records[&other].len()), (3, 2));
    for key in [&moved, &other] {
        assert_eq!(present(&recovered, key, 5), (0..40).collect::<Vec<_>>());
        assert_eq!(process.read(key, 0).await.unwrap(), expected(0..40, 3000));
    }
    for shuffle_state in &recovered.shuffles {
        assert!(
            shuffle_state.lost.is_empty()
                && shuffle_state.reason.is_empty()
                && shuffle_state.incomplete.is_none(),
            "{shuffle_state:?}"
        );
    }
    assert_eq!(process.index(&moved, PartitionId(0)).await.unwrap(), before);
    assert_eq!((process.fixture.data_files(), process.tier.local.used_bytes()), (files, used));
    fill(&process, &moved, 40..44).await;
    process.offload_all(&moved).await.unwrap();
    let process = process.kill().await.start().await;
    let (recovered, _) = recovered_records(&process).await;
    assert_eq!(present(&recovered, &moved, 0), (0..44).collect::<Vec<_>>());
    assert_eq!(process.read(&moved, 0).await.unwrap(), expected(0..44, 3000));
    process.purge(&moved).await;
    process.purge(&other).await;
    assert_eq!((process.fixture.segments().await, process.fixture.data_files()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn empty_machine_serves_offloaded_data_and_reports() {
    let process = Fixture::new().start().await;
    let (moved, kept) = (key(1), key(2));
    for key in [&moved, &kept] {
        process.register(key).await;
        process.append_record(key, b"early").await.unwrap();
        fill(&process, key, 0..20).await;
    }
    process.offload_all(&moved).await.unwrap();
    process.append_record(&moved, b"late").await.unwrap();
    fill(&process, &moved, 20..22).await;

    let process = process.kill().await.on_an_empty_machine().start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!(recovered.shuffles.len(), 1, "a shuffle that was never offloaded must be unknown");
    assert!(recovered.shuffles[0].incomplete.is_none());
    assert_eq!(records[&moved].len(), 3);
    assert_eq!(
        present(&recovered, &moved, 0),
        (0..20).collect::<Vec<_>>(),
        "blocks that were not offloaded must be absent"
    );
    assert_eq!(process.read(&moved, 0).await.unwrap(), expected(0..20, 3000));
    // The shuffle continues there, and the next start finds both parts.
    fill(&process, &moved, 30..33).await;
    process.append_record(&moved, b"on the new machine").await.unwrap();
    let process = process.kill().await.start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((records[&moved].len(), recovered.shuffles.len()), (4, 1));
    let mut all = expected(0..20, 3000);
    all.extend(expected(30..33, 3000));
    assert_eq!(process.read(&moved, 0).await.unwrap(), all);
    process.offload_all(&moved).await.unwrap();
    let process = process.kill().await.on_an_empty_machine().start().await;
    assert_eq!(process.read(&moved, 0).await.unwrap(), all);
    let (_, records) = recovered_records(&process).await;
    assert_eq!(records[&moved].len(), 4);
}

#[tokio::test(start_paused = true)]
async fn ended_registration_is_not_used_for_the_next() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    process.offload_all(&key).await.unwrap();
    // The dropped future deletes no objects. An earlier version registered without waiting for
    // that.
    drop(Arc::clone(&process.tier).forget(&key.app, std::slice::from_ref(&key), Purge::Shuffles));
    process.admit(&key);
    let note = Record::Registration(RegistrationRecord::default()).encode();
    let local = process.tier.local.handle(&key).unwrap();
    process.tier.local.append_metadata(&local, &note).await.unwrap();
    drop(local);
    fill(&process, &key, 50..53).await;
    let process = process.kill().await.start().await;
    let (recovered, _) = recovered_records(&process).await;
    assert_eq!(present(&recovered, &key, 0), [50, 51, 52]);
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(50..53, 3000));
}

/// Its incarnation would be the greatest for years.
#[tokio::test(start_paused = true)]
async fn machine_with_fast_clock_overrides_nothing() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.tier.local.count_from(u64::MAX / 2);
    process.register(&key).await;
    fill(&process, &key, 0..20).await;
    process.offload_all(&key).await.unwrap();
    let stopped = process.kill().await;

    let process = stopped.on_an_empty_machine().start().await;
    fill(&process, &key, 30..33).await;
    process.append_record(&key, b"on the new machine").await.unwrap();
    process.offload_all(&key).await.unwrap();
    process.kill().await;

    let process = stopped.start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((recovered.shuffles.len(), records[&key].len()), (1, 2));
    let mut all = expected(0..20, 3000);
    all.extend(expected(30..33, 3000));
    assert_eq!(process.read(&key, 0).await.unwrap(), all);
}

/// The process ends at every modifying store call of an offload, before or after the call takes
/// effect.
#[tokio::test(start_paused = true)]
async fn interrupted_offload_keeps_every_block_once() {
    let (mut at, mut has_ended) = (0, false);
    while !has_ended {
        assert!(at < 1000, "the offload makes more than {at} calls");
        for fault in [ObjectFault::Refuse, ObjectFault::LoseAnswer] {
            let process = Fixture::new().start().await;
            let key = key(1);
            process.register(&key).await;
            process.append_record(&key, b"report").await.unwrap();
            fill(&process, &key, 0..25).await;
            let mut calls = 0;
            // After this call no call takes effect, as if the process had ended.
            process.fixture.store.set(move |call, _| {
                calls += usize::from(!matches!(call, Call::Get | Call::List));
                match calls {
                    calls if calls <= at => ObjectFault::None,
                    calls if calls == at + 1 => fault,
                    _ => ObjectFault::Refuse,
                }
            });
            has_ended = process.offload_all(&key).await.is_ok();
            let fixture = process.kill().await;
            fixture.store.heal();
            for fixture in [fixture.clone(), fixture] {
                let process = fixture.start().await;
                let (recovered, records) = recovered_records(&process).await;
                assert_eq!(records[&key].len(), 2, "call {at}, {fault:?}: a record is missing");
                let shuffle_state = &recovered.shuffles[0];
                assert!(
                    shuffle_state.lost.is_empty()
                        && shuffle_state.reason.is_empty()
                        && shuffle_state.incomplete.is_none(),
                    "{at} {shuffle_state:?}"
                );
                assert_eq!(
                    present(&recovered, &key, 0),
                    (0..25).collect::<Vec<_>>(),
                    "call {at}, {fault:?}: blocks of partition 0 are not listed"
                );
                assert_eq!(
                    process.read(&key, 0).await.unwrap(),
                    expected(0..25, 3000),
                    "call {at}, {fault:?}: blocks of partition 0 are missing or wrong"
                );
                assert_eq!(
                    process.read(&key, 5).await.unwrap(),
                    expected(0..25, 700),
                    "call {at}, {fault:?}: blocks of partition 5 are missing or wrong"
                );
                process.offload_all(&key).await.unwrap();
                assert_eq!(process.fixture.data_files(), 0, "call {at}, {fault:?}: offloaded files remain");
                assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..25, 3000));
                process.kill().await;
            }
        }
        at += 1;
    }
    assert!(at > 5, "faults were injected into only {at} calls");
}

/// Index groups of offloaded data refer to files that no longer exist.
#[tokio::test(start_paused = true)]
async fn number_of_an_offloaded_file_is_not_reused() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..40).await;
    process.offload_all(&key).await.unwrap();
    assert_eq!(process.fixture.data_files(), 0);

    let process = process.kill().await.start().await;
    fill(&process, &key, 100..140).await;
    assert_eq!(process.read(&key, 0).await.unwrap().len(), 80);

    // All offloaded data is gone.
    let fixture = Fixture { store: FaultyObjects::default(), ..process.kill().await };
    let process = fixture.start().await;
    let (recovered, _) = recovered_records(&process).await;
    assert_eq!(present(&recovered, &key, 0), (100..140).collect::<Vec<_>>());
    let lost = recovered.shuffles[0].lost.iter().filter(|it| it.partition == PartitionId(0));
    assert_eq!(lost.map(|it| it.blocks.len()).sum::<usize>(), 40);
}

#[tokio::test(start_paused = true)]
async fn missing_segment_is_reported_lost() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..20).await;
    process.offload_all(&key).await.unwrap();
    fill(&process, &key, 20..22).await;
    let fixture = process.kill().await;
    let objects = fixture.store.objects().await;
    let last = objects.iter().map(|(key, _)| key).rfind(|key| key.contains("/s0")).unwrap();
    let first = objects.iter().map(|(key, _)| key).find(|key| key.contains("/s0")).unwrap();
    assert_ne!(first, last);
    fixture.store.remove(first).await;
    let process = fixture.start().await;
    let (recovered, _) = recovered_records(&process).await;
    let shuffle_state = &recovered.shuffles[0];
    assert!(!shuffle_state.reason.is_empty() || !shuffle_state.lost.is_empty(), "{shuffle_state:?}");
    let lost: usize =
        shuffle_state.lost.iter().filter(|it| it.partition == PartitionId(0)).map(|it| it.blocks.len()).sum();
    let present = present(&recovered, &key, 0);
    assert!(present.len() < 22 && present.contains(&21), "{present:?}");
    assert!(lost > 0, "the index on the disks must show which blocks are lost");
    let read = process.read(&key, 0).await.unwrap();
    assert_eq!(read[&21], content(21, 3000), "blocks after the lost ones must be served");
}

/// Otherwise results would be silently short.
#[tokio::test(start_paused = true)]
async fn reports_lost_from_the_store_stay_missing_on_new_disks() {
    for (is_lost, is_elsewhere) in [(false, true), (true, true), (true, false)] {
        let process = Fixture::new().start().await;
        let key = key(1);
        process.register(&key).await;
        fill(&process, &key, 0..10).await;
        process.offload_all(&key).await.unwrap();
        for report in [b"a", b"b", b"c"] {
            process.append_record(&key, report).await.unwrap();
        }
        let mut fixture = process.kill().await;
        if is_elsewhere {
            fixture = fixture.on_an_empty_machine();
        }
        if is_lost {
            super::guards::lose_log_object(&fixture, 1).await;
        }
        for start in 0..3 {
            let process = fixture.start().await;
            let (recovered, records) = recovered_records(&process).await;
            let (shuffle_state, is_known) = (&recovered.shuffles[0], records[&key].len() == 4);
            let is_all = !is_lost || !is_elsewhere;
            let found = (shuffle_state.incomplete.is_none(), is_known);
            assert_eq!(found, (is_all, is_all), "{is_lost} {is_elsewhere} {start} {shuffle_state:?}");
            assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..10, 3000));
            process.until_known().await;
            fixture = process.kill().await;
        }
    }
}

/// The disks of the first process do not know the reports of the second one.
#[tokio::test(start_paused = true)]
async fn reports_elsewhere_in_a_lost_log_object_are_noticed() {
    let here = Fixture::new();
    let process = here.start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    process.offload_all(&key).await.unwrap();
    process.kill().await;
    let process = here.on_an_empty_machine().start().await;
    recovered_records(&process).await;
    for report in [b"a", b"b", b"c"] {
        process.append_record(&key, report).await.unwrap();
    }
    process.kill().await;
    super::guards::lose_log_object(&here, 2).await;
    let process = here.start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert!(records[&key].len() < 4, "{records:?}");
    let reason = recovered.shuffles[0].incomplete.as_deref().unwrap_or_default();
    assert!(reason.contains("continued the log in the object store"), "{reason}");
}

/// If it were acknowledged because the disks have it, it would be silently missing on the next
/// machine.
#[tokio::test(start_paused = true)]
async fn resent_report_reaches_the_store() {
    let process = Fixture::new().start().await;
    let (moved, kept) = (key(1), key(2));
    for key in [&moved, &kept] {
        process.register(key).await;
        fill(&process, key, 0..10).await;
    }
    process.offload_all(&moved).await.unwrap();
    process
        .fixture
        .store
        .set(|call, _| if call == Call::Put { ObjectFault::Refuse } else { ObjectFault::None });
    process.append_record(&moved, b"report").await.unwrap_err();
    let fixture = process.kill().await;
    fixture.store.set(|call, path| {
        let is_log = path.as_ref().contains("/!log/");
        if call == Call::Put && is_log { ObjectFault::Refuse } else { ObjectFault::None }
    });

    let process = fixture.start().await;
    let (_, records) = recovered_records(&process).await;
    assert_eq!(records[&moved].len(), 2);
    process.tier.recovered_durable().await;
    let needs_none = |key| process.tier.metadata_log(key).unwrap().is_recovered_durable();
    assert_eq!([&moved, &kept].map(needs_none), [false, true]);
    process.fixture.store.heal();
    process.append_record(&moved, b"report").await.unwrap();
    assert_eq!([&moved, &kept].map(needs_none), [true, true]);

    let process = process.kill().await.on_an_empty_machine().start().await;
    let (_, records) = recovered_records(&process).await;
    assert_eq!(records[&moved].len(), 2);
}

/// The store proves that all records of the shuffle are known, so its results are not refused. A
/// block whose stream offset was reused must not count as present, or it would be lost silently.
#[tokio::test(start_paused = true)]
async fn block_with_a_reused_place_is_missing() {
    let both = Fixture::new();
    let only = |at: usize| Fixture { disks: vec![both.disks[at].clone()], ..both.clone() };
    let process = both.start().await;
    let key = key(1);
    process.register(&key).await;
    fill(&process, &key, 0..10).await;
    process.offload_all(&key).await.unwrap();
    process.kill().await;
    for (disk, first) in [(0, 20), (1, 30)] {
        let process = only(disk).start().await;
        fill(&process, &key, first..first + 3).await;
        process.kill().await;
    }
    let process = both.start().await;
    let (recovered, _) = recovered_records(&process).await;
    assert!(recovered.shuffles[0].incomplete.is_none() && !recovered.shuffles[0].reason.is_empty());
    let gap = process.tier.metadata_gap().unwrap();
    assert!(gap.contains("was used separately from the others"), "{gap}");
    let read = process.read(&key, 0).await.unwrap();
    let served: Vec<u64> =
        read.keys().filter(|id| **id != FILLER_BLOCK_ID).map(|id| id.unsigned_abs()).collect();
    assert_eq!(present(&recovered, &key, 0), served);
    assert_eq!(served.len(), 13, "{served:?}");
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_a_missing_directory() {
    let both = Fixture::new();
    let process = both.start().await;
    let (key, later) = (key(1), key(2));
    process.register(&key).await;
    fill(&process, &key, 0..1).await;
    process.kill().await;
    let is_empty = |disk: &&MemoryDisk| {
        disk.files().iter().all(|path| path.extension().is_none_or(|extension| extension != "data"))
    };
    let disks: Vec<_> = both.disks.iter().filter(is_empty).cloned().collect();
    assert_eq!(disks.len(), 1, "the data must be on one of two disks");

    let process = Fixture { disks, ..both.clone() }.start().await;
    process.register(&later).await;
    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 0);
    let remaining = DrainBacklog { shuffles_left: 1, ..DrainBacklog::default() };
    assert_eq!(process.tier.drain_progress(), remaining, "the other directory must have no unknown shuffles");
    process.kill().await;

    let process = both.start().await;
    recovered_records(&process).await;
    process.tier.begin_drain();
    assert_eq!(process.offload_candidates().await, 0);
    assert_eq!(process.tier.drain_progress(), DrainBacklog::default());
    let process = process.kill().await.on_an_empty_machine().start().await;
    assert_eq!(process.read(&key, 0).await.unwrap(), expected(0..1, 3000));
}

/// The next machine of a drained worker has only the store's records, so the store must be complete
/// too.
#[tokio::test(start_paused = true)]
async fn returned_disk_completes_an_offloaded_shuffle() {
    let both = Fixture::new();
    let process = both.start().await;
    let key = key(1);
    process.register(&key).await;
    process.append_record(&key, b"report").await.unwrap();
    process.kill().await;
    let only = Fixture { disks: vec![both.disks[0].clone()], ..both.clone() };
    let process = only.start().await;
    assert!(recovered_records(&process).await.0.shuffles[0].incomplete.is_some());
    process.offload_all(&key).await.unwrap();
    process.kill().await;

    let process = both.start().await;
    assert_eq!(recovered_records(&process).await.0.shuffles[0].incomplete, None);
    process.tier.begin_drain();
    assert_eq!(
        process.tier.drain_progress().shuffles_left,
        1,
        "on another machine the results would be refused, so the shuffle must remain"
    );
    assert_eq!(process.offload_candidates().await, 0);
    assert_eq!(process.tier.drain_progress(), DrainBacklog::default());
    let process = process.kill().await.on_an_empty_machine().start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert_eq!((&recovered.shuffles[0].incomplete, records[&key].len()), (&None, 2));
}

#[tokio::test(start_paused = true)]
async fn store_without_disks_opens_and_registers() {
    let (store, key) = (FaultyObjects::default(), key(1));
    for life in 0..2 {
        let (memory, tasks, registry) = (Budget::new(u64::MAX), Tasks::new(), Registry::new());
        let (objects, settings) = (Arc::new(store.clone()), ObjectSettings::new("p/worker-1"));
        let opened = Bucket::open(objects, settings, &memory, tasks.clone(), &registry).await;
        let opened = OffloadTier::without_disks(opened.unwrap(), &memory, tasks.clone(), &registry);
        let tier = opened.await.unwrap();
        let mut recovered = tier.take_recovered();
        let keys: Vec<_> = recovered.shuffles.iter().map(|it| it.key.clone()).collect();
        if life == 0 {
            assert!(keys.is_empty() && recovered.records.next().await.unwrap().is_none());
            Arc::clone(&tier).prepare(None).unwrap().unwrap()(&key, &[]);
            let log = tier.metadata_log(&key).unwrap();
            log.append(Bytes::from_static(b"registration")).await.unwrap();
            assert!(tier.shuffle(&key).unwrap().is_accepting());
        } else {
            assert_eq!(keys, std::slice::from_ref(&key));
            let records = recovered.records.next().await.unwrap();
            assert_eq!(records, Some((key.clone(), Bytes::from_static(b"registration"))));
        }
        tasks.cancel();
        tasks.close();
        tasks.drained().await;
    }
    let opened =
        LocalStore::open(LocalConfig::default(), Vec::new(), &Budget::new(1), &Registry::new()).await;
    assert_eq!(
        opened.unwrap_err().kind,
        StoreErrorKind::Unhealthy,
        "a start without disks must fail, because no store has the log"
    );
}
