//! Clients of storage types without MEMORY: tasks commit before they report, and memory is not read
//! (docs/protocol.md §2.6).

use std::sync::Arc;

use futures::future::join_all;
use uniffle_client::block::Block;
use uniffle_client::send::SendForm;
use uniffle_testkit::fault::{EIO, Fault, Faults, Operation, Rule};
use uniffle_wire::types::{PartitionId, ShuffleKey};
use uniffle_worker::proto::{FinishShuffleRequest, ShuffleCommitRequest, ShuffleCommitResponse, StatusCode};

use super::blocks::{batch, blocks};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::parts::parts;

async fn commit(fixture: &WorkerFixture, key: &ShuffleKey) -> ShuffleCommitResponse {
    let request = ShuffleCommitRequest { app_id: key.app.as_str().to_owned(), shuffle_id: key.shuffle.0 };
    fixture.client.raw().commit_shuffle_task(request).await.unwrap().into_inner()
}

async fn finish(fixture: &WorkerFixture, key: &ShuffleKey) -> StatusCode {
    let request = FinishShuffleRequest { app_id: key.app.as_str().to_owned(), shuffle_id: key.shuffle.0 };
    fixture.client.raw().finish_shuffle(request).await.unwrap().into_inner().status()
}

/// Returns the sorted ids in the current index: all blocks that a reader without MEMORY finds.
async fn on_disk(fixture: &WorkerFixture, key: &ShuffleKey, partition: i32) -> Vec<i64> {
    let index = fixture.client.read_index(key, PartitionId(partition)).await.unwrap();
    let mut ids: Vec<i64> = index.records.iter().map(|record| record.meta.block_id.0).collect();
    ids.sort_unstable();
    ids
}

fn ids(blocks: &[Block]) -> Vec<i64> {
    let mut ids: Vec<i64> = blocks.iter().map(|block| block.meta.block_id.0).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_flushes_earlier_sends_to_disk() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let mut sent = [Vec::new(), Vec::new()];
    for task in 1..=3 {
        for (partition, sent) in (0..).zip(&mut sent) {
            let part = blocks(partition, task.into(), 0..10);
            fixture.push(&key, &batch(partition, &part)).await;
            sent.extend(part);
        }
        let answer = commit(&fixture, &key).await;
        assert_eq!((answer.status(), answer.ret_msg.as_str()), (StatusCode::Success, "OK"));
        assert_eq!(answer.commit_count, task, "wrong number of committed tasks");
        for (partition, sent) in (0..).zip(&sent) {
            assert_eq!(on_disk(&fixture, &key, partition).await, ids(sent));
        }
    }
    assert_eq!(finish(&fixture, &key).await, StatusCode::Success);
    assert_eq!(fixture.memory().block_count(), 0);
    fixture.assert_reads(&key, 0, &sent[0]).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_commits_are_counted_and_flushed() {
    const TASKS: i64 = 32;
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let task = async |task: i64| {
        let part = blocks(0, task, 0..5);
        fixture.push(&key, &batch(0, &part)).await;
        let answer = commit(&fixture, &key).await;
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        let there = on_disk(&fixture, &key, 0).await;
        assert!(
            ids(&part).iter().all(|id| there.binary_search(id).is_ok()),
            "blocks of committed task {task} are missing"
        );
        answer.commit_count
    };
    let mut counts = join_all((1..=TASKS).map(task)).await;
    counts.sort_unstable();
    assert_eq!(counts, (1..=32).collect::<Vec<_>>());
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_of_unknown_shuffle_is_refused() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    assert_eq!(commit(&fixture, &key).await.status(), StatusCode::NoRegister);
    assert_eq!(finish(&fixture, &key).await, StatusCode::NoRegister);
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let other = super::fixture::key("app-1", 2);
    assert_eq!(commit(&fixture, &other).await.status(), StatusCode::NoRegister);
    let answer = commit(&fixture, &key).await;
    assert_eq!(
        (answer.status(), answer.commit_count),
        (StatusCode::Success, 1),
        "a commit of a task without blocks must succeed"
    );
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::disallowed_methods, reason = "the test has no task group")]
async fn commit_waits_for_disks_until_shuffle_is_unregistered() {
    let fixture = parts().start().await;
    let client = fixture.client().await;
    let keys = [key("app-1", 1), key("app-1", 2)];
    for key in &keys {
        client.register(key, &[(0, 0)]).await.unwrap();
        client.push(key, SendForm::Classic, &batch(0, &blocks(0, 1, 0..10))).await.unwrap();
    }
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    }
    let commit = |shuffle: i32| {
        let service = Arc::clone(&fixture.service);
        tokio::spawn(async move { service.ingest.commit_task("app-1", shuffle).await })
    };
    let (first, second) = (commit(1), commit(2));
    eventually("writes fail on the disks", || {
        match fixture.faults.iter().map(Faults::injected).sum::<u64>() {
            0..4 => Err("not yet".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    assert!(!first.is_finished() && !second.is_finished());
    let refused = client.unregister(&keys[0]).await.unwrap_err();
    assert_eq!(
        refused.status(),
        Some(StatusCode::InternalError),
        "an unregistration without a usable disk must fail: {refused}"
    );
    assert_eq!(first.await.unwrap().unwrap_err().status(), StatusCode::NoRegister);
    assert!(!second.is_finished());
    fixture.heal().await;
    assert_eq!(second.await.unwrap().unwrap(), 1);
    fixture.flushed().await;
    client.unregister(&keys[0]).await.unwrap();
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_only_worker_refuses_commits() {
    let setup = Setup { store_type: "MEMORY", ..Setup::default() };
    let dir = tempfile::tempdir().unwrap();
    let worker = setup.start(&[dir.path().join("unused")]).await;
    let client = uniffle_client::grpc::ShuffleClient::connect(worker.addresses().grpc).await.unwrap();
    let key = key("app-1", 1);
    client.register(&key, &[(0, 0)]).await.unwrap();
    let request = ShuffleCommitRequest { app_id: "app-1".to_owned(), shuffle_id: 1 };
    let answer = client.raw().commit_shuffle_task(request).await.unwrap().into_inner();
    assert_eq!((answer.status(), answer.commit_count), (StatusCode::InternalError, 0));
    assert!(answer.ret_msg.contains("no tier below memory"), "{}", answer.ret_msg);
    client.unregister_app("app-1").await.unwrap();
    drop(client);
    assert_eq!(worker.stop().await, 0, "tasks are still running");
}
