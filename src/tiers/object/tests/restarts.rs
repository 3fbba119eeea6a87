//! What a process finds that comes after another.

use std::time::Duration;

use tokio::task::JoinSet;
use uniffle_testkit::object_fault::{Call, Fault};

use super::*;
use crate::tiers::Recovered;

async fn told(recovered: &mut Recovered) -> Vec<(ShuffleKey, Bytes)> {
    let mut told = Vec::new();
    while let Some(record) = recovered.said.next().await.unwrap() {
        told.push(record);
    }
    told
}

fn present(recovered: &Recovered, shuffle: i32, partition: i32) -> Vec<u64> {
    let found = recovered.shuffles.iter().find(|it| it.key == key(shuffle)).expect("it was found");
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
    let before = all(process.tier.index(&key(1), PartitionId(0)).unwrap().chunks).await.unwrap();

    let process = Process::start(&process.kill().await).await;
    let mut recovered = process.tier.take_recovered();
    assert_eq!((recovered.shuffles.len(), recovered.blocks, recovered.bytes), (2, 30, 12_054));
    assert!(recovered.shuffles.iter().all(|it| it.incomplete.is_none() && it.reason.is_empty()));
    assert_eq!(present(&recovered, 1, 0), (0..12).collect::<Vec<_>>());
    let texts: Vec<_> = told(&mut recovered).await.into_iter().map(|(key, it)| (key.shuffle.0, it)).collect();
    assert_eq!(texts, [(1, "registration".into()), (2, "registration".into()), (2, "report".into())]);
    let index = process.tier.index(&key(1), PartitionId(0)).unwrap();
    assert_eq!(all(index.chunks).await.unwrap(), before, "offsets are promises");
    assert_eq!(process.read(&key(2), 0).await.unwrap(), expected(0..12, 500));

    // It goes on where the other ended, and a third process knows both.
    let shuffle = process.tier.shuffle(&key(1)).unwrap();
    shuffle.write(vec![extent(0, 12..14, 500)].into()).await.unwrap();
    process.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    let process = Process::start(&process.kill().await).await;
    let mut recovered = process.tier.take_recovered();
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..14, 500));
    assert_eq!(told(&mut recovered).await.len(), 4);
    assert!(recovered.shuffles.iter().all(|it| it.incomplete.is_none() && it.reason.is_empty()));
}

#[tokio::test]
async fn missing_segment_and_its_successors_are_reported_lost() {
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
    assert_eq!(present(&recovered, 1, 0), [0, 1]);
    assert_eq!(
        (present(&recovered, 1, 1), present(&recovered, 1, 2), present(&recovered, 1, 3)),
        (vec![0], vec![], vec![0])
    );
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..2, 50));
}

/// Listeners are closed until it has the answers.
#[tokio::test(start_paused = true)]
async fn start_requests_segments_concurrently() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    for n in 0..96 {
        shuffle.write(vec![extent(0, n..n + 1, 50)].into()).await.unwrap();
    }
    let store = process.kill().await;
    assert_eq!(segments(&store).await.len(), 96);
    store.set(|call, _| if call == Call::Get { Fault::Hold } else { Fault::None });
    let held = store.clone();
    let mut starting = JoinSet::new();
    let start = starting.spawn(async move { Process::start(&held).await });
    let mut rounds = 0;
    while !start.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
        rounds += u64::from(store.held() > 0);
        store.let_go();
    }
    let process = starting.join_next().await.unwrap().unwrap();
    store.heal();
    assert!(rounds <= 20, "{rounds} round trips");
    assert_eq!(present(&process.tier.take_recovered(), 1, 0), (0..96).collect::<Vec<_>>());
}

#[tokio::test]
async fn replaced_unverified_upload_leaves_the_chain() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    shuffle.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    // It arrives, and nobody is told, nor can it be removed.
    process.store.set(|call, _| match call {
        Call::Put => Fault::LoseAnswer,
        _ => Fault::Refuse,
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

#[tokio::test]
async fn unproven_metadata_is_incomplete() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    for _ in 0..3 {
        process.log(&key(1)).append(vec![7; 70_000].into()).await.unwrap();
    }
    process.register_noted(&key(2)).await;
    process.log(&key(2)).mark_incomplete("for a reason").await.unwrap();
    let store = process.kill().await;
    let pages = store.objects().await.into_iter().map(|(key, _)| key).filter(|key| key.contains("/1."));
    let pages: Vec<_> = pages.collect();
    assert_eq!(pages.len(), 6, "a page is full with 64 KiB, and has a copy");
    for page in pages.iter().filter(|key| key.ends_with('2')) {
        store.remove(page).await;
    }
    let recovered = Process::start(&store).await.tier.take_recovered();
    let reasons: Vec<_> = recovered.shuffles.iter().map(|it| it.incomplete.clone().unwrap()).collect();
    assert_eq!(reasons, ["records 2 to 2 of its metadata are missing", "for a reason"]);
}

#[tokio::test]
async fn unregistered_and_replaced_objects_are_deleted() {
    let process = Process::start(&FaultyObjects::default()).await;
    let unregistered = process.register(&key(1));
    unregistered.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    process.register_noted(&key(2)).await;
    // The deletion of the first registration does not happen.
    let _ = Arc::clone(&process.tier).forget(&key(2).app, &[key(2)], Purge::Shuffles);
    process.register_noted(&key(2)).await;
    assert_eq!(process.store.objects().await.len(), 5);

    let process = Process::start(&process.kill().await).await;
    assert_eq!(process.tier.take_recovered().shuffles.len(), 1);
    uniffle_testkit::eventually("what is abandoned is gone", || match process.tasks.running() {
        0 => Ok(()),
        left => Err(format!("{left} tasks")),
    })
    .await;
    let left = process.store.objects().await;
    assert!(left.len() == 2 && left.iter().all(|(key, _)| key.contains("/2.")), "{left:?}");
}

#[tokio::test]
async fn silent_store_fails_the_start() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    let store = process.kill().await;
    for failing in [Call::List, Call::Get] {
        store.set(move |call, _| if call == failing { Fault::Refuse } else { Fault::None });
        assert!(Process::try_start(&store).await.is_err(), "{failing:?}");
    }
    store.heal();
    assert_eq!(Process::start(&store).await.tier.take_recovered().blocks, 2);
}

#[tokio::test]
async fn missing_or_old_page_is_repaired_from_its_copy() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    let earlier = process.store.snapshot().await;
    process.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    let store = process.kill().await;
    let whole = store.snapshot().await;
    let pages: Vec<String> = whole.keys().cloned().collect();
    assert_eq!(pages.len(), 2, "{pages:?}");
    for page in &pages {
        for damage in 0..4 {
            match damage {
                0 => store.remove(page).await,
                1 => store.replace(page, earlier[page].clone()).await,
                2 => store.replace(page, whole[page].slice(..50)).await,
                _ => store.replace(page, Bytes::from_static(b"other bytes")).await,
            }
            let process = Process::start(&store).await;
            let mut recovered = process.tier.take_recovered();
            assert_eq!(recovered.shuffles[0].incomplete, None, "{page} {damage}");
            assert_eq!(told(&mut recovered).await.len(), 2, "{page} {damage}");
            assert_eq!(process.kill().await.snapshot().await, whole, "{page} {damage}");
        }
    }
}

/// A store with a copy of a page that is gone, which takes no page at the start.
async fn start_with_a_single_page() -> (Process, BTreeMap<String, Bytes>) {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    process.register_noted(&key(2)).await;
    let store = process.kill().await;
    let whole = store.snapshot().await;
    for key in whole.keys().filter(|key| key.contains("/c0")) {
        store.remove(key).await;
    }
    store.set(|call, path| {
        let is_page = path.as_ref().contains("/m0") || path.as_ref().contains("/c0");
        if call == Call::Put && is_page { Fault::Refuse } else { Fault::None }
    });
    (Process::start(&store).await, whole)
}

#[tokio::test(start_paused = true)]
async fn refused_page_copy_is_written_once_possible() {
    let (process, whole) = start_with_a_single_page().await;
    assert!(process.tier.take_recovered().shuffles.iter().all(|it| it.incomplete.is_none()));
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_ne!(process.store.snapshot().await, whole);
    process.store.heal();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(process.store.snapshot().await, whole);
}

#[tokio::test(start_paused = true)]
async fn page_of_a_deleted_shuffle_is_not_rewritten() {
    let (process, whole) = start_with_a_single_page().await;
    process.purge(&key(1), Purge::Shuffles).await;
    process.store.heal();
    tokio::time::sleep(Duration::from_secs(300)).await;
    let kept = whole.into_iter().filter(|(key, _)| key.contains("/2.")).collect();
    assert_eq!(process.store.snapshot().await, kept);
}
