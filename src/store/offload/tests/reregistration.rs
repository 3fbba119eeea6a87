//! Stored records and data of an ended registration never count as those of a later registration of
//! the shuffle.

use std::time::Duration;

use tokio::time::Instant;
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::StoreErrorKind;

impl Process {
    /// Unregisters a shuffle, but leaves its objects in the store: the deletion is dropped.
    fn forget(&self, key: &ShuffleKey) {
        drop(Arc::clone(&self.tier).forget(&key.app, std::slice::from_ref(key), Purge::Shuffles));
    }

    /// Creates a registration with objects, and unregisters it. Its objects stay in the store.
    async fn leave_in_store(&self, key: &ShuffleKey) {
        self.register(key).await;
        self.write(key, vec![extent(0, 0..10, 3000)]).await;
        self.offload_all(key).await.unwrap();
        self.append_record(key, b"earlier").await.unwrap();
        self.forget(key);
    }

    async fn try_register(&self, key: &ShuffleKey) -> Result<(), StoreError> {
        self.admit(key);
        self.append_record(key, &Record::Registration(RegistrationRecord::default()).encode()).await
    }
}

/// Only directory `/a` has the later registration, and the directory is missing. Directory `/b` has
/// the earlier one, which is complete in the store.
#[tokio::test(start_paused = true)]
async fn earlier_registration_in_store_is_not_taken_for_the_later() {
    let both = Fixture::new();
    let only = |at: usize| Fixture { disks: vec![both.disks[at].clone()], ..both.clone() };
    let process = both.start().await;
    let key = key(1);
    process.register(&key).await;
    process.write(&key, vec![extent(0, 0..10, 3000)]).await;
    process.offload_all(&key).await.unwrap();
    process.kill().await;

    let process = only(0).start().await;
    process.forget(&key);
    process.register(&key).await;
    process.append_record(&key, b"later").await.unwrap();
    process.kill().await;

    let process = only(1).start().await;
    let (recovered, _) = recovered_records(&process).await;
    let incomplete = recovered.shuffles.iter().find(|it| it.key == key).unwrap().incomplete.as_ref();
    assert!(incomplete.is_some_and(|reason| reason.contains("/a is missing")), "{incomplete:?}");
}

#[tokio::test(start_paused = true)]
async fn empty_machine_ignores_the_earlier_registration() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.leave_in_store(&key).await;
    process.register(&key).await;
    let process = process.kill().await.on_an_empty_machine().start().await;
    let (recovered, records) = recovered_records(&process).await;
    assert!(recovered.shuffles.is_empty() && records.is_empty(), "{recovered:?} {records:?}");
}

/// The client receives the reason, before its own timeout.
#[tokio::test(start_paused = true)]
async fn offloaded_shuffle_is_not_registered_again_while_store_fails() {
    for failing in [Call::Put, Call::Get] {
        for fault in [ObjectFault::Refuse, ObjectFault::Hold] {
            let process = Fixture::new().start().await;
            let (again, other) = (key(1), key(2));
            process.leave_in_store(&again).await;
            process.fixture.store.set(move |call, _| if call == failing { fault } else { ObjectFault::None });
            let began = Instant::now();
            let error = process.try_register(&again).await.unwrap_err();
            assert!(
                began.elapsed() <= Duration::from_secs(20),
                "{failing:?} {fault:?}: {:?}",
                began.elapsed()
            );
            let text = error.to_string();
            assert_eq!(error.kind, StoreErrorKind::Unreachable, "{text}");
            assert!(text.contains("an earlier registration of the shuffle has not been ended"), "{text}");
            process.append_record(&again, b"later").await.unwrap_err();
            process.register(&other).await;

            process.fixture.store.heal();
            process.register(&again).await;
            process.append_record(&again, b"later").await.unwrap();
        }
    }
}

/// A short outage of the store only delays the client.
#[tokio::test(start_paused = true)]
async fn reregistration_succeeds_once_the_store_is_back() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.leave_in_store(&key).await;
    let mut calls = 0;
    process.fixture.store.set(move |call, _| {
        calls += usize::from(call == Call::Put);
        if call == Call::Put && calls < 5 { ObjectFault::Refuse } else { ObjectFault::None }
    });
    process.try_register(&key).await.unwrap();
}

/// Deleting an application also deletes earlier registrations whose objects are still stored.
#[tokio::test(start_paused = true)]
async fn deleted_application_leaves_no_superseded_registration() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.leave_in_store(&key).await;
    let why = Purge::App(crate::store::Cause::Unregistered);
    Arc::clone(&process.tier).forget(&key.app, &[], why).unwrap().await;
    assert_eq!(process.fixture.segments().await, 0);
    process.register(&key).await;
}

/// The store takes the record that permits offloads, but its answer is lost. The next record is not
/// in the store, and a start that finds only the store must not take its records for complete.
#[tokio::test(start_paused = true)]
async fn unanswered_offload_does_not_make_later_records_complete() {
    let mut has_lost_the_last = false;
    for at in 0..10 {
        let process = Fixture::new().start().await;
        let key = key(1);
        process.register(&key).await;
        process.write(&key, vec![extent(0, 0..10, 3000)]).await;
        // From this write on, writes take effect but get no answer. Deletions fail.
        let mut puts = 0;
        process.fixture.store.set(move |call, _| match call {
            Call::Put if puts >= at => ObjectFault::LoseAnswer,
            Call::Put => {
                puts += 1;
                ObjectFault::None
            }
            Call::Delete => ObjectFault::Refuse,
            _ => ObjectFault::None,
        });
        if process.offload_all(&key).await.is_ok() {
            break;
        }
        let acknowledged = process.append_record(&key, b"later").await.is_ok();
        has_lost_the_last |= !acknowledged;
        let fixture = process.kill().await;
        fixture.store.heal();
        let process = fixture.on_an_empty_machine().start().await;
        let (recovered, records) = recovered_records(&process).await;
        let is_complete = recovered.shuffles.iter().any(|it| it.incomplete.is_none());
        let is_known =
            records.get(&key).is_some_and(|records| records.contains(&Bytes::from_static(b"later")));
        assert!(
            !(acknowledged && is_complete) || is_known,
            "write {at}: a complete shuffle lacks an acknowledged record: {recovered:?} {records:?}"
        );
        assert!(
            acknowledged || is_complete,
            "write {at}: a record was refused although the store lacks a part of the shuffle"
        );
    }
    assert!(has_lost_the_last);
}

/// A start may leave stored data for a later start. A new registration of the shuffle ends that.
#[tokio::test(start_paused = true)]
async fn deferred_objects_do_not_join_a_later_registration() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.register(&key).await;
    process.write(&key, vec![extent(0, 0..10, 3000)]).await;
    process.offload_all(&key).await.unwrap();
    let process = process.kill().await.start().await;
    process.tier.leave(&key);
    process.register(&key).await;
    let process = process.kill().await.on_an_empty_machine().start().await;
    assert!(recovered_records(&process).await.0.shuffles.is_empty());
}

/// Returns a process with a shuffle to be offloaded. `fault` gets each call of the store, and
/// whether the call is a write after the first `from` ones.
async fn about_to_offload(
    key: &ShuffleKey,
    from: usize,
    fault: impl Fn(Call, bool) -> ObjectFault + Send + 'static,
) -> Process {
    let process = Fixture::new().start().await;
    process.register(key).await;
    process.write(key, vec![extent(0, 0..10, 3000)]).await;
    let mut puts = 0;
    process.fixture.store.set(move |call, _| {
        puts += usize::from(call == Call::Put);
        fault(call, call == Call::Put && puts > from)
    });
    process
}

/// Delayed writes of objects take effect after the shuffle's objects were deleted and it was
/// registered again. With `Repeat`, an earlier attempt had already taken effect. The disks are lost
/// afterwards.
#[tokio::test(start_paused = true)]
async fn late_write_does_not_join_a_later_registration() {
    let mut arrived = 0;
    for (fault, from) in
        [ObjectFault::Late, ObjectFault::Repeat].into_iter().flat_map(|it| (0..8).map(move |at| (it, at)))
    {
        let key = key(1);
        let of = move |_, is_after| if is_after { fault } else { ObjectFault::None };
        let process = about_to_offload(&key, from, of).await;
        let moved = process.offload_all(&key).await;
        let records = process.append_record(&key, b"earlier").await;
        assert!(
            fault == ObjectFault::Late || records.is_ok(),
            "write {from}: the record was refused: {moved:?} {records:?}"
        );
        process.fixture.store.heal();
        process.purge(&key).await;
        process.register(&key).await;
        process.append_record(&key, b"later").await.unwrap();
        arrived += process.fixture.store.deliver().await;

        let process = process.kill().await.on_an_empty_machine().start().await;
        let (recovered, records) = recovered_records(&process).await;
        let is_complete = recovered.shuffles.iter().any(|it| it.incomplete.is_none());
        assert!(
            !is_complete,
            "{fault:?} from write {from}: the shuffle counts as complete: {recovered:?} {records:?}"
        );
    }
    assert!(arrived > 0);
}

/// Only shuffles with offloaded data wait for the store.
#[tokio::test(start_paused = true)]
async fn shuffles_without_offloaded_data_never_wait_for_the_store() {
    let process = Fixture::new().start().await;
    process.until_known().await;
    process.fixture.store.set(|_, _| ObjectFault::Hold);
    let began = Instant::now();
    for key in [key(1), key(2), key(1)] {
        process.register(&key).await;
        process.write(&key, vec![extent(0, 0..10, 3000)]).await;
        process.append_record(&key, b"report").await.unwrap();
        process.purge(&key).await;
        process.tier.forgotten_durable(&key.app, Some(&key)).await.unwrap();
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}

/// The end is durable once the disks have it; the store is not required.
#[tokio::test(start_paused = true)]
async fn end_of_an_offloaded_shuffle_does_not_wait_for_the_store() {
    let process = Fixture::new().start().await;
    let key = key(1);
    process.leave_in_store(&key).await;
    process.fixture.store.set(|_, _| ObjectFault::Hold);
    let began = Instant::now();
    process.tier.forgotten_durable(&key.app, Some(&key)).await.unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
}
