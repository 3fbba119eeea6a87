//! A panic costs only the operation in which it happens: a write is repeated, a read fails without
//! a timeout, and the worker stays usable.

use std::time::Duration;

use tokio::time::timeout;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::ReadOptions;
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::fault::{Fault, Operation, Rule};
use uniffle_wire::types::{PartitionId, TaskAttemptId};
use uniffle_worker::service::WorkerState;

use super::fixture::{assert_same, key};
use super::parts::parts;

/// An immediate response takes much less.
const SOON: Duration = Duration::from_secs(20);

fn blocks(task: i64) -> Vec<Block> {
    let generator = BlockGenerator::new(1, IdLayout::SPARK);
    (0..8).map(|at| generator.block(PartitionId(0), TaskAttemptId(task), at, 10_000)).collect()
}

#[tokio::test]
async fn write_is_retried_after_a_panic() {
    let fixture = parts().start().await;
    let client = fixture.client().await;
    let key = key("panics", 0);
    client.register(&key, &[(0, 0)]).await.unwrap();
    let sent = blocks(1);
    client.push(&key, SendForm::Classic, &[(PartitionId(0), sent.clone())]).await.unwrap();
    for faults in &fixture.faults {
        faults.add(Rule::once(Operation::Write, Fault::Panic).on(".data"));
    }
    fixture.flusher.flush_all();
    fixture.flushed().await;
    let read = client.read_partition(&key, PartitionId(0), &ReadOptions::default()).await.unwrap();
    assert_eq!(read.from_disk, sent.len(), "the batch was not written again");
    assert_same(&read.blocks, &sent);
    assert_eq!(fixture.service.status().state(), WorkerState::Active);
    drop(client);
    fixture.finish().await;
}

#[tokio::test]
async fn panic_during_call_affects_only_that_call() {
    let fixture = parts().start().await;
    let client = fixture.client().await;
    let key = key("panics", 1);
    client.register(&key, &[(0, 0)]).await.unwrap();
    let sent = blocks(1);
    client.push(&key, SendForm::Classic, &[(PartitionId(0), sent.clone())]).await.unwrap();
    fixture.flusher.flush_all();
    fixture.flushed().await;
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Read, Fault::Panic).on(".data"));
    }
    let options = ReadOptions::default();
    let read = timeout(SOON, client.read_partition(&key, PartitionId(0), &options)).await;
    read.expect("the caller waits for a response that will not come").unwrap_err();
    for faults in &fixture.faults {
        faults.clear();
    }
    // The same connection and partition.
    let read = client.read_partition(&key, PartitionId(0), &options).await.unwrap();
    assert_same(&read.blocks, &sent);
    let more = blocks(2);
    client.push(&key, SendForm::Classic, &[(PartitionId(0), more)]).await.unwrap();
    assert_eq!(fixture.service.status().state(), WorkerState::Active);
    drop(client);
    fixture.finish().await;
}
