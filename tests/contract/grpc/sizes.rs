//! The largest block, a block beyond that limit, and many tiny partitions in one message.

use uniffle_client::block::Block;
use uniffle_client::send::SendForm;
use uniffle_wire::types::PartitionId;
use uniffle_worker::proto::StatusCode;

use super::blocks::{batch, block};
use super::fixture::{Setup, WorkerFixture, key};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_of_512_mib_is_served() {
    const LENGTH: u32 = 512 << 20;
    let setup = Setup { capacity: "600MiB", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    // Zeros, because random bytes would take longer than the rest of the test.
    let id = block(0, 1, 0, 1).meta;
    let largest = Block::new(id.block_id, id.task_attempt_id, vec![0; LENGTH as usize].into());
    fixture.push(&key, &batch(0, std::slice::from_ref(&largest))).await;
    fixture.flush().await;
    let data = fixture.client.read_data(&key, PartitionId(0), 0, u64::from(LENGTH)).await.unwrap();
    assert!(data == largest.data);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_beyond_limit_is_refused_by_its_declared_length() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let mut parts = batch(0, &[block(0, 1, 0, 100)]);
    parts[0].1[0].meta.length = (512 << 20) + 1;
    // Only the declared length is large.
    let ticket = fixture.ticket(&key, 1 << 20).await;
    let refused = fixture.client.send(&key, ticket, SendForm::Contiguous, &parts).await.unwrap_err();
    let status = refused.status().unwrap();
    assert!(matches!(status, StatusCode::InternalError | StatusCode::InvalidRequest), "{refused}");
    fixture.assert_memory_is_free().await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_tiny_partitions_in_one_message_are_served() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 999)]).await.unwrap();
    let parts: Vec<_> = (0..1000).map(|p| (PartitionId(p), vec![block(p, 1, 0, 10)])).collect();
    for form in [SendForm::Classic, SendForm::Contiguous, SendForm::Combined] {
        fixture.client.push(&key, form, &parts).await.unwrap();
    }
    fixture.flush().await;
    for p in [0, 1, 499, 998, 999] {
        fixture.assert_reads(&key, p, &[block(p, 1, 0, 10)]).await;
    }
    fixture.finish().await;
}
