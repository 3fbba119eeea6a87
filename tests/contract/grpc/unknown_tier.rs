//! Contract between a worker and a tier that it does not know: reads, metrics, shutdown, purges and
//! registrations.

use std::sync::Arc;
use std::time::Duration;

use uniffle_client::grpc::register_request;
use uniffle_testkit::third_tier::ThirdTier;
use uniffle_worker::proto::RemoteStorage;
use uniffle_worker::store::Tier;

use super::blocks::{batch, blocks, payload};
use super::fixture::{WorkerFixture, key};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_blocks_are_read_from_an_unknown_tier() {
    let fixture = WorkerFixture::with_tier(Arc::new(ThirdTier::default())).await;
    let key = key("app-1", 1);
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let (flushed, other, fresh) = (blocks(0, 1, 0..20), blocks(1, 1, 0..5), blocks(0, 2, 0..4));
    fixture.push(&key, &batch(0, &flushed)).await;
    fixture.push(&key, &batch(1, &other)).await;
    fixture.flush().await;
    assert_eq!(fixture.memory().block_count(), 0);
    fixture.assert_reads(&key, 0, &flushed).await;
    fixture.assert_reads(&key, 1, &other).await;
    fixture.push(&key, &batch(0, &fresh)).await;
    fixture.assert_reads(&key, 0, &[flushed.clone(), fresh.clone()].concat()).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &[flushed, fresh].concat()).await;
    assert!(fixture.metric("total_memory_spill_to_third") > 0.0, "metrics must carry the name of the tier");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_syncs_tiers_after_last_flush() {
    let (tier, key) = (Arc::new(ThirdTier::default()), key("app-1", 1));
    let fixture = WorkerFixture::with_tier(Arc::clone(&tier) as Arc<dyn Tier>).await;
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..20);
    fixture.push(&key, &batch(0, &all)).await;
    assert_eq!(tier.synced_bytes(), 0);
    assert_eq!(fixture.worker.stop().await, 0, "tasks are still running");
    assert_eq!(tier.synced_bytes(), payload(&all));
}

/// An application may have millions of blocks and extents. While they are freed, the only thread of
/// this worker serves other calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn purge_does_not_block_runtime_threads() {
    let tier = Arc::new(ThirdTier::default());
    let fixture = WorkerFixture::with_tier(Arc::clone(&tier) as Arc<dyn Tier>).await;
    let other = key("app-2", 1);
    fixture.client.register(&other, &[(0, 0)]).await.unwrap();
    for unregisters_app in [false, true] {
        let key = key("app-1", 1);
        fixture.client.register(&key, &[(0, 0)]).await.unwrap();
        let (began, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let (release, released) = std::sync::mpsc::channel();
        tier.on_forget(move || {
            let _ = began.send(());
            released.recv_timeout(Duration::from_secs(60)).expect("other calls were not answered meanwhile");
        });
        let end = async {
            match unregisters_app {
                true => fixture.client.unregister_app(key.app.as_str()).await.unwrap(),
                false => fixture.client.unregister(&key).await.unwrap(),
            }
        };
        let meanwhile = async {
            begun.recv().await.unwrap();
            fixture.client.heartbeat(other.app.as_str()).await.unwrap();
            release.send(()).unwrap();
        };
        tokio::join!(end, meanwhile);
        tier.on_forget(|| {});
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tier_receives_the_requested_number_of_writers() {
    let tier = Arc::new(ThirdTier::default());
    let fixture = WorkerFixture::with_tier(Arc::clone(&tier) as Arc<dyn Tier>).await;
    for (shuffle, wanted, expected) in [(1, 2, Some(2)), (2, 0, None), (3, -1, None), (4, i32::MIN, None)] {
        let mut request = register_request(&key("app-1", shuffle), &[(0, 0)]);
        request.remote_storage = Some(RemoteStorage { path: "third://x".to_owned(), ..Default::default() });
        request.max_concurrency_per_partition_to_write = wanted;
        fixture.client.register_with(request).await.unwrap();
        let requested = tier.last_remote_storage().expect("the tier was not asked at the registration");
        assert_eq!((requested.path.as_str(), requested.writers), ("third://x", expected), "{wanted}");
    }
    fixture.finish().await;
}
