//! Failures of the store, and how the tier reacts to them.

use std::collections::BTreeSet;
use std::time::Duration;

use parking_lot::Mutex;
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::log::LogObject;
use crate::store::StoreErrorKind;
use crate::store::object::layout::log_key;

#[tokio::test(start_paused = true)]
async fn failed_upload_leaves_nothing_and_can_be_retried() {
    for failing in [Call::Put, Call::Begin, Call::Part, Call::Complete] {
        let process = Process::start(&FaultyObjects::default()).await;
        let shuffle = process.register(&key(1));
        let bytes = if failing == Call::Put { 100 } else { 5000 };
        let batch = || vec![extent(0, 0..4, bytes)].into();
        process
            .store
            .set(move |call, _| if call == failing { ObjectFault::Refuse } else { ObjectFault::None });
        let error = shuffle.write(batch()).await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Unreachable, "{failing:?}: {error}");
        assert!(!shuffle.is_accepting(), "{failing:?}");
        assert_eq!(
            (process.store.objects().await.len(), process.store.open_uploads()),
            (0, 0),
            "{failing:?}"
        );
        assert_eq!(process.read(&key(1), 0).await.unwrap().len(), 0, "{failing:?}");

        process.store.heal();
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(shuffle.is_accepting(), "{failing:?}");
        shuffle.write(batch()).await.unwrap();
        assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..4, bytes), "{failing:?}");
    }
}

#[tokio::test]
async fn upload_with_lost_response_is_found() {
    for (failing, bytes) in [(Call::Put, 100), (Call::Complete, 5000)] {
        let process = Process::start(&FaultyObjects::default()).await;
        let shuffle = process.register(&key(1));
        process
            .store
            .set(move |call, _| if call == failing { ObjectFault::LoseAnswer } else { ObjectFault::None });
        shuffle.write(vec![extent(0, 0..4, bytes)].into()).await.unwrap();
        assert_eq!(segments(&process.store).await.len(), 1, "{failing:?}");
        assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..4, bytes), "{failing:?}");
    }
}

#[tokio::test]
async fn transit_errors_are_reread_and_stored_ones_reported() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    shuffle.write(vec![extent(0, 0..4, 100)].into()).await.unwrap();
    let mut is_first = true;
    let once = move |call: Call, _: &_| {
        let flips = call == Call::Get && std::mem::take(&mut is_first);
        if flips { ObjectFault::Flip } else { ObjectFault::None }
    };
    process.store.set(once);
    let read = process.tier.data(&key(1), PartitionId(0), 0, 400).unwrap();
    assert_eq!(read_to_end(read.chunks).await.unwrap().len(), 400);

    process.store.set(|call, _| if call == Call::Get { ObjectFault::Flip } else { ObjectFault::None });
    let read = process.tier.data(&key(1), PartitionId(0), 100, 200).unwrap();
    let error = read_to_end(read.chunks).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Corrupt);
    assert!(error.to_string().contains("/s0000000001"), "{error}");
    // Bytes at the edges of a range belong to blocks that lie only partly in it, so they are not
    // verified.
    let read = process.tier.data(&key(1), PartitionId(0), 1, 50).unwrap();
    assert_eq!(read_to_end(read.chunks).await.unwrap().len(), 50);
}

/// Regression test: reads of a segment that was deleted at run time failed for ever, and its blocks
/// were never listed as lost.
#[tokio::test(start_paused = true)]
async fn blocks_of_a_deleted_segment_are_lost_once_confirmed() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register_noted(&key(1)).await;
    for n in 0..2 {
        shuffle.write(vec![extent(0, n * 2..n * 2 + 2, 50), extent(7, n..n + 1, 9)].into()).await.unwrap();
    }
    let reported = Arc::new(Mutex::new(BTreeSet::new()));
    let sink = Arc::clone(&reported);
    process.tier.on_damage(Arc::new(move |_: &ShuffleKey, partition: PartitionId, reason: &str| {
        sink.lock().insert((partition.0, reason.to_owned()));
    }));
    let gone = segments(&process.store).await.remove(0).0;
    let content = process.store.snapshot().await[&gone].clone();
    let fails = async || {
        let mut read = process.tier.data(&key(1), PartitionId(0), 0, 200).unwrap().chunks;
        let error = read.next_chunk(&HeapBuffers).await.unwrap_err();
        error.kind == StoreErrorKind::NotFound && read.may_have_losses()
    };
    let mark = async || process.tier.mark_damaged_lost(&key(1), PartitionId(0)).await;
    process.store.remove(&gone).await;
    assert!(mark().await.is_none(), "a segment is reported missing before a read");
    for failing in [Call::List, Call::Head, Call::Get] {
        assert!(fails().await, "{failing:?}");
        process
            .store
            .set(move |call, _| if call == failing { ObjectFault::Refuse } else { ObjectFault::None });
        assert!(mark().await.is_none(), "{failing:?}");
        process.store.heal();
    }
    process.store.replace(&gone, content).await;
    assert!(mark().await.is_none() && reported.lock().is_empty());
    assert_eq!(process.read(&key(1), 0).await.unwrap(), expected(0..4, 50));

    process.store.remove(&gone).await;
    assert!(fails().await);
    let reason = mark().await.expect("the deleted segment was not reported").to_string();
    assert!(reason.contains(&gone) && reason.contains("deleted by another program"), "{reason}");
    assert_eq!(*reported.lock(), BTreeSet::from([(0, reason.clone()), (7, reason)]));
    assert!(process.tier.data(&key(1), PartitionId(0), 0, 200).unwrap().has_hole);
    let mut read = process.read(&key(1), 0).await.unwrap();
    assert!(
        read.remove(&uniffle_wire::index::FILLER_BLOCK_ID).is_some(),
        "the index lacks the record of the hole"
    );
    assert_eq!(read, expected(2..4, 50));
    assert!(mark().await.is_none());
    // A block may be sent again.
    shuffle.write(vec![extent(0, 0..2, 50)].into()).await.unwrap();
    let mut ids = BTreeSet::new();
    process.tier.visit_present(&key(1), PartitionId(0), &mut |id| _ = ids.insert(id)).await.unwrap();
    assert_eq!(ids, (0..4).collect());
}

#[tokio::test(start_paused = true)]
async fn readers_retry_a_failing_store_until_it_is_given_up() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    shuffle.write(vec![extent(0, 0..4, 100)].into()).await.unwrap();
    for fault in [ObjectFault::Refuse, ObjectFault::Cut] {
        process.store.set(move |call, _| if call == Call::Get { fault } else { ObjectFault::None });
        let read = || async {
            read_to_end(process.tier.data(&key(1), PartitionId(0), 0, 400).unwrap().chunks).await
        };
        assert_eq!(read().await.unwrap_err().kind, StoreErrorKind::Unhealthy, "{fault:?}");
        tokio::time::advance(Duration::from_secs(121)).await;
        assert_eq!(read().await.unwrap_err().kind, StoreErrorKind::Unreachable, "{fault:?}");
        assert!(process.tier.state().complaint.is_some(), "{fault:?}");
        process.store.heal();
        assert_eq!(read().await.unwrap().len(), 400, "{fault:?}");
        assert!(process.tier.state().complaint.is_none(), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn recovered_store_is_noticed_without_requests() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    process.store.set(|_, _| ObjectFault::Refuse);
    shuffle.write(vec![extent(0, 0..1, 10)].into()).await.unwrap_err();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = Box::pin(async move { drop(stopped.await) });
    let maintained = Arc::clone(&process.tier).maintain(stopped);
    let watch = async {
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert!(process.tier.state().complaint.is_some());
        process.store.heal();
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert!(process.tier.state().complaint.is_none());
        drop(stop);
    };
    futures::join!(maintained, watch);
}

#[tokio::test(start_paused = true)]
async fn refused_deletions_pause_no_writes() {
    let process = Process::start(&FaultyObjects::default()).await;
    let shuffle = process.register(&key(1));
    process.register(&key(2)).write(vec![extent(0, 0..4, 100)].into()).await.unwrap();
    let log = LogObject { generation: 1, process: 1, first: 0, frames: 1 };
    process.store.replace(&log_key("worker-2", log, 0), Bytes::new()).await;
    process.store.set(|call, _| if call == Call::Delete { ObjectFault::Refuse } else { ObjectFault::None });
    process.purge(&key(2), Purge::Shuffles).await;
    assert_eq!(process.tier.objects().core.metrics.deletions_failed.get(), 1);
    process.tier.objects().remove_worker("worker-2").await.unwrap_err();
    process.store.remove(&log_key("worker-2", log, 0)).await;
    // Only the claim is left.
    process.tier.objects().remove_worker("worker-2").await.unwrap_err();
    assert!(shuffle.is_accepting() && process.tier.state().complaint.is_none());
}

/// Returns the metadata records that a start recovers for a single shuffle with complete data.
async fn all_records(process: &Process) -> Vec<Bytes> {
    let mut recovered = process.tier.take_recovered();
    assert_eq!(recovered.shuffles[0].incomplete, None);
    let mut records = Vec::new();
    while let Some((_, record)) = recovered.records.next().await.unwrap() {
        records.push(record);
    }
    records
}

#[tokio::test]
async fn unwritten_record_is_not_acknowledged() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    for fault in [ObjectFault::Refuse, ObjectFault::LoseAnswer] {
        process.store.set(move |call, _| if call == Call::Put { fault } else { ObjectFault::None });
        let error = process.log(&key(1)).append(Bytes::from_static(b"lost")).await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Unreachable, "{fault:?}");
    }
    process.store.heal();
    process.log(&key(1)).append(Bytes::from_static(b"kept")).await.unwrap();
    let process = Process::start(&process.kill().await).await;
    // A record that was not acknowledged may be recovered, but only once.
    assert_eq!(all_records(&process).await, ["registration", "lost", "kept"]);
}

/// The client repeats a request without response, and the store may carry out the first attempt
/// after all later requests.
#[tokio::test]
async fn late_attempt_of_a_log_object_changes_nothing() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    process.store.set(|call, _| if call == Call::Put { ObjectFault::Repeat } else { ObjectFault::None });
    process.log(&key(1)).append(Bytes::from_static(b"first")).await.unwrap();
    process.store.heal();
    process.log(&key(1)).append(Bytes::from_static(b"second")).await.unwrap();
    let before = process.store.snapshot().await;
    assert_eq!(process.store.deliver().await, 2);
    assert_eq!(process.store.snapshot().await, before);
    let process = Process::start(&process.kill().await).await;
    assert_eq!(all_records(&process).await, ["registration", "first", "second"]);
}
