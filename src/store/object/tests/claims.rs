//! Claims of the worker's prefix: two concurrent processes of one worker, lost claims and
//! responses, and stores that ignore conditions. Also the saved settings.

use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::object::claim::claim_key;
use crate::store::{Cause, StoreErrorKind};
use uniffle_testkit::captured_log::CapturedLog;

#[tokio::test(start_paused = true)]
async fn process_without_the_claim_destroys_nothing() {
    let older = Process::start(&FaultyObjects::default()).await;
    let shuffle = older.register_noted(&key(1)).await;
    shuffle.write(vec![extent(0, 0..3, 100)].into()).await.unwrap();
    let newer = Process::start(&older.store).await;
    assert_eq!(newer.tier.take_recovered().blocks, 3);
    let before = older.store.snapshot().await;

    let error = older.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::InUse);
    let text = error.to_string();
    let names =
        ["p/worker-1/!claim", "in use by another process", &format!("process {}", std::process::id())];
    assert!(names.iter().all(|name| text.contains(name)), "{text}");
    assert!(!shuffle.is_accepting());
    assert!(older.tier.state().complaint.is_some_and(|text| text.contains("claimed")));
    let refused = shuffle.write(vec![extent(0, 3..6, 100)].into()).await.unwrap_err();
    assert_eq!(refused.kind, StoreErrorKind::InUse);
    older.purge(&key(1), Purge::App(Cause::Expired)).await;

    // The newer process replaces the log of the older one.
    for (key, content) in before.into_iter().filter(|(key, _)| !key.contains("/!log/")) {
        assert!(older.store.snapshot().await.get(&key) == Some(&content), "{key}");
    }
    assert_eq!(newer.read(&key(1), 0).await.unwrap(), expected(0..3, 100));
    newer.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    assert!(newer.tier.state().complaint.is_none());
}

/// Regression test: the error advised a retry, which cannot succeed.
#[tokio::test(start_paused = true)]
async fn end_after_a_lost_claim_advises_no_retry() {
    let older = Process::start(&FaultyObjects::default()).await;
    older.register_noted(&key(1)).await;
    let _newer = Process::start(&older.store).await;
    drop(Arc::clone(&older.tier).forget(&key(1).app, &[key(1)], Purge::Shuffles));
    let error = older.tier.forgotten_durable(&key(1).app, Some(&key(1))).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::InUse);
    assert!(!error.to_string().contains("retry"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn lost_claim_is_noticed_by_purge_and_when_idle() {
    let older = Process::start(&FaultyObjects::default()).await;
    older.register_noted(&key(1)).await.write(vec![extent(0, 0..3, 100)].into()).await.unwrap();
    let idle = Process::start(&older.store).await;
    older.purge(&key(1), Purge::Shuffles).await;
    assert_eq!(segments(&older.store).await.len(), 1);
    let newer = Process::start(&older.store).await;
    let stopped = Box::pin(tokio::time::sleep(std::time::Duration::from_secs(60)));
    Arc::clone(&idle.tier).maintain(stopped).await;
    assert!(idle.tier.state().complaint.is_some());
    let stopped = Box::pin(tokio::time::sleep(std::time::Duration::from_secs(60)));
    Arc::clone(&newer.tier).maintain(stopped).await;
    assert!(newer.tier.state().complaint.is_none());
}

#[tokio::test]
async fn lost_claim_is_noticed_by_a_write_of_it() {
    for is_deleted in [false, true] {
        let store = FaultyObjects::default();
        let (objects, extents) = (Arc::new(store.clone()), Budget::new(u64::MAX));
        let older =
            Bucket::open(objects, settings(), &extents, Tasks::new(), &Registry::new()).await.unwrap();
        if is_deleted {
            store.remove(&claim_key("p/worker-1")).await;
        }
        let mut is_first = true;
        store.set(move |call, _| match call {
            Call::Put if std::mem::take(&mut is_first) => ObjectFault::Hold,
            _ => ObjectFault::None,
        });
        let newer_starts = async {
            uniffle_testkit::eventually("the older process is about to write", || match store.held() {
                1 => Ok(()),
                held => Err(format!("{held}")),
            })
            .await;
            let newer = Process::start(&store).await;
            store.heal();
            newer
        };
        let (written, _newer) = futures::join!(older.set_drained(|| true), newer_starts);
        assert_eq!(written.unwrap_err().kind, StoreErrorKind::InUse);
        assert!(older.claim_complaint().is_some(), "deleted: {is_deleted}");
    }
}

#[tokio::test]
async fn one_of_two_concurrent_starts_is_refused() {
    let store = FaultyObjects::default();
    for _ in 0..2 {
        store.set(|call, _| if call == Call::Put { ObjectFault::Hold } else { ObjectFault::None });
        let both = async { futures::join!(Process::try_start(&store), Process::try_start(&store)) };
        let release_held = async {
            uniffle_testkit::eventually("both are about to claim", || match store.held() {
                2 => Ok(()),
                held => Err(format!("{held}")),
            })
            .await;
            store.heal();
        };
        let ((first, second), ()) = futures::join!(both, release_held);
        let refused: Vec<_> = [first.err(), second.err()].into_iter().flatten().collect();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].kind, StoreErrorKind::InUse);
    }
}

#[tokio::test]
async fn saved_settings_are_those_of_the_latest_process() {
    let (store, mut saved) = (FaultyObjects::default(), None);
    for text in ["one", "two", "three", "four"] {
        if text == "three" {
            // A lifecycle rule of the bucket.
            store.remove(&claim_key("p/worker-1")).await;
        }
        let process = Process::start(&store).await;
        let settings = process.tier.saved_settings().unwrap();
        assert_eq!(settings.read().await.unwrap(), saved);
        for text in ["before", text] {
            settings.save(text.into()).await.unwrap();
        }
        saved = Some(text.into());
        let newer = Process::start(&store).await;
        assert_eq!(settings.save("late".into()).await.unwrap_err().kind, StoreErrorKind::InUse);
        assert_eq!(newer.tier.saved_settings().unwrap().read().await.unwrap(), saved);
    }
    let objects = store.objects().await.into_iter().filter(|(key, _)| key.contains("/!settings/"));
    assert_eq!(objects.count(), 1, "a start must delete settings of earlier processes");
}

#[tokio::test]
async fn claim_deleted_by_a_bucket_rule_is_restored() {
    let process = Process::start(&FaultyObjects::default()).await;
    process.register_noted(&key(1)).await;
    process.store.remove(&claim_key("p/worker-1")).await;
    process.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
    let newer = Process::start(&process.store).await;
    process.log(&key(1)).append(Bytes::from_static(b"too late")).await.unwrap_err();
    newer.log(&key(1)).append(Bytes::from_static(b"report")).await.unwrap();
}

#[tokio::test]
async fn lost_response_to_a_claim_is_not_another_process() {
    let store = FaultyObjects::default();
    store.set(|call, _| if call == Call::Put { ObjectFault::LoseAnswer } else { ObjectFault::None });
    let process = Process::start(&store).await;
    store.heal();
    process.register_noted(&key(1)).await;
}

#[tokio::test]
async fn store_that_ignores_conditions_is_named_at_the_start() {
    for ignores in [false, true] {
        let (log, store) = (CapturedLog::of_this_thread(), FaultyObjects::default());
        store.set(
            move |call, _| {
                if ignores && call == Call::Put { ObjectFault::Overwrite } else { ObjectFault::None }
            },
        );
        for _ in 0..2 {
            Process::start(&store).await.register_noted(&key(1)).await;
        }
        let text = log.text();
        let warnings = text.lines().filter(|line| line.contains("WARN") && line.contains("If-None-Match"));
        let named =
            warnings.filter(|line| line.contains("p/worker-1/!claim") && line.contains("start only one"));
        assert_eq!(named.count(), if ignores { 2 } else { 0 }, "{text}");
    }
}
