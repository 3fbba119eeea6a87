//! Segments: distribution of batches over objects, purges, and the memory of segments in progress.

use futures::future::join_all;
use uniffle_testkit::eventually;
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::Cause;
use crate::store::object::layout::Registered;
use crate::store::object::shuffle::ObjectShuffle;
use crate::store::object::upload::segment::segment_heap_bytes;

#[tokio::test]
async fn objects_follow_bytes_and_not_partitions() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    let extents = (0..1000).map(|partition| extent(partition, 0..2, 10)).collect::<Vec<_>>();
    shuffle.write(extents.into()).await.unwrap();
    let objects = process.store.objects().await;
    assert_eq!(objects.len(), 1, "{objects:?}");
    for partition in [0, 500, 999] {
        assert_eq!(process.read(&key(1), partition).await.unwrap(), expected(0..2, 10));
    }
    assert_eq!(process.tier.usage(&key(1)).bytes, 20_000);
    assert_eq!(process.tier.state().used_bytes, objects[0].1);
}

#[tokio::test]
async fn waiting_batches_share_segments() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    process.store.set(|call, _| if call == Call::Begin { ObjectFault::Hold } else { ObjectFault::None });
    let batch = |n: i64| shuffle.write(vec![extent(0, n * 10..n * 10 + 10, 1000)].into());
    let others = async {
        let began = || if process.store.held() > 0 { Ok(()) } else { Err(String::new()) };
        eventually("an upload has begun", began).await;
        let queued = async {
            eventually("the others wait", || match process.tier.objects().waiting(&key(1)) {
                8 => Ok(()),
                waiting => Err(format!("{waiting} wait")),
            })
            .await;
            process.store.heal();
        };
        futures::join!(join_all((1..9).map(batch)), queued).0
    };
    let (first, others) = futures::join!(batch(0), others);
    others.into_iter().chain([first]).for_each(|write| write.unwrap());
    let segments = segments(&process.store).await;
    assert_eq!(segments.len(), 3, "expected 10,000 bytes and twice 40,000: {segments:?}");
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..90, 1000));
}

#[tokio::test]
async fn long_segment_is_uploaded_in_parts() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    shuffle.write(vec![extent(0, 0..9, 3333), extent(1, 0..1, 5)].into()).await.unwrap();
    let calls = process.store.calls();
    let count = |call: Call| calls.iter().filter(|(it, key)| *it == call && key.contains("/s0")).count();
    assert_eq!(
        (count(Call::Begin), count(Call::Part), count(Call::Complete), count(Call::Put)),
        (1, 4, 1, 0)
    );
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..9, 3333));
    assert_eq!(process.read(&key(1), 1).await.unwrap(), expected(0..1, 5));
}

#[tokio::test]
async fn stream_continues_across_segments() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    for n in 0..5 {
        shuffle.write(vec![extent(0, n * 3..n * 3 + 3, 700)].into()).await.unwrap();
    }
    assert_eq!(segments(&process.store).await.len(), 5);
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..15, 700));
    assert!(process.extents.used() > 0, "further extents must be charged");
    let mut present = Vec::new();
    process.tier.visit_present(&key(1), PartitionId(0), &mut |id| present.push(id)).await.unwrap();
    assert_eq!(present, (0..15).collect::<Vec<_>>());
}

#[tokio::test]
async fn purge_waits_for_uploads_and_leaves_nothing() {
    let process = Process::start(&FaultyObjects::default()).await;
    let (shuffle, sibling) = (process.register_noted(&key(4)).await, process.register_noted(&key(40)).await);
    sibling.write(vec![extent(0, 0..3, 100)].into()).await.unwrap();
    shuffle.write(vec![extent(0, 0..3, 100)].into()).await.unwrap();
    process.store.set(|call, _| if call == Call::Put { ObjectFault::Hold } else { ObjectFault::None });
    let write = shuffle.write(vec![extent(0, 3..6, 100)].into());
    let purge = async {
        eventually("the upload is running", || {
            if process.store.held() > 0 { Ok(()) } else { Err(String::new()) }
        })
        .await;
        let removal = Arc::clone(&process.tier).forget(&key(4).app, &[key(4)], Purge::Shuffles).unwrap();
        process.store.heal();
        removal.await;
    };
    let (written, ()) = futures::join!(write, purge);
    assert_eq!(written.unwrap_err().kind, crate::store::StoreErrorKind::Purged);
    let remaining = segments(&process.store).await;
    assert!(remaining.len() == 1 && remaining.iter().all(|(key, _)| key.contains("/40.")), "{remaining:?}");

    process.purge(&key(40), Purge::App(Cause::Unregistered)).await;
    assert_eq!(segments(&process.store).await, []);
    assert_eq!((process.extents.used(), process.tier.state().used_bytes), (0, 0));
}

#[tokio::test]
async fn segment_counted_after_its_purge_is_not_stored() {
    let (objects, extents) = (Arc::new(FaultyObjects::default()), Budget::new(u64::MAX));
    let opened = Bucket::open(objects, settings(), &extents, Tasks::new(), &Registry::new()).await;
    let bucket = opened.unwrap();
    let shuffle = ObjectShuffle::new(&bucket.core, Registered { key: key(1), incarnation: 1 });
    shuffle.count(&bucket.core, 100, 120);
    assert_eq!(bucket.stored_bytes(), 120);
    shuffle.forget(&bucket.core);
    shuffle.count(&bucket.core, 200, 240);
    assert_eq!(bucket.stored_bytes(), 0);
}

/// `forget` is called under a lock that registrations wait for, so the returned future frees the
/// extents.
#[tokio::test]
async fn extents_are_freed_by_the_returned_removal() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    for round in 0..3 {
        shuffle.write(vec![extent(0, round * 3..round * 3 + 3, 100)].into()).await.unwrap();
    }
    let charged = process.extents.used();
    let removal = Arc::clone(&process.tier).forget(&key(1).app, &[key(1)], Purge::Shuffles).unwrap();
    assert!(charged > 0 && process.extents.used() >= charged);
    assert_eq!(process.tier.state().used_bytes, 0);
    removal.await;
    assert_eq!(process.extents.used(), 0);
}

#[tokio::test]
async fn later_objects_survive_the_purge_of_an_application() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    let keys = [key(1)];
    let removal = Arc::clone(&process.tier).forget(&key(1).app, &keys, Purge::App(Cause::Expired)).unwrap();
    let again = process.register_noted(&key(1)).await;
    again.write(vec![extent(0, 0..3, 100)].into()).await.unwrap();
    removal.await;
    assert_eq!(segments(&process.store).await.len(), 1);
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..3, 100));
}

#[tokio::test(start_paused = true)]
async fn stop_waits_for_deletions_unless_the_store_is_silent() {
    let process = Process::start(&FaultyObjects::default()).await;
    for n in [1, 2] {
        process.register_noted(&key(n)).await.write(vec![extent(0, 0..3, 100)].into()).await.unwrap();
    }
    process.store.set(|call, _| if call == Call::Delete { ObjectFault::Hold } else { ObjectFault::None });
    let deletion = |n| Arc::clone(&process.tier).forget(&key(n).app, &[key(n)], Purge::Shuffles).unwrap();
    process.tasks.spawn("deletion", deletion(1));
    let waited = process.tier.end_deletions(std::time::Duration::from_secs(5));
    let begun = tokio::time::Instant::now();
    waited.await;
    assert_eq!((begun.elapsed().as_secs(), segments(&process.store).await.len()), (5, 2));

    process.tasks.spawn("deletion", deletion(2));
    let release_held = async {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        process.store.heal();
    };
    futures::join!(process.tier.end_deletions(std::time::Duration::from_secs(5)), release_held);
    assert_eq!((begun.elapsed().as_secs(), segments(&process.store).await), (6, vec![]));
    process.tier.end_deletions(std::time::Duration::from_secs(5)).await;
}

#[tokio::test]
async fn memory_of_segments_in_progress_is_bounded() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.store.set(|call, _| if call == Call::Put { ObjectFault::Hold } else { ObjectFault::None });
    let shuffles: Vec<_> = (0..100).map(|n| process.register(&key(n))).collect();
    let batch = || vec![extent(0, 0..4, 10)];
    let most = settings().segment_heap_bytes / segment_heap_bytes(&batch());
    let writes = join_all(shuffles.iter().map(|shuffle| shuffle.write(batch().into())));
    let others = async {
        eventually("the heap bounds the concurrent uploads", || match process.store.held() {
            held if held == most => Ok(()),
            held => Err(format!("{held} of {most}")),
        })
        .await;
        assert_eq!(process.extents.used(), most * segment_heap_bytes(&batch()));
        process.store.heal();
    };
    let (written, ()) = futures::join!(writes, others);
    written.into_iter().for_each(|write| write.unwrap());
    assert_eq!(process.extents.used(), 0, "the first extent must be charged with its partition, not here");
    for n in [0, 99] {
        assert_eq!(process.read(&key(n), 0).await.unwrap(), expected(0..4, 10));
    }
    let large = vec![extent(1, 0..1000, 10)];
    assert!(segment_heap_bytes(&large) > settings().segment_heap_bytes);
    shuffles[0].write(large.into()).await.unwrap();
}
