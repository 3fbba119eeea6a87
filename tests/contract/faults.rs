//! Disks that fail while shuffles run, seen by clients: GOALS §3 items 4 and 7.

use uniffle_worker::client::block::Block;
use uniffle_worker::client::grpc::ReadOptions;
use uniffle_worker::client::send::SendForm;
use uniffle_worker::io::fault::{EIO, ENOSPC, Fault, Operation, Rule};
use uniffle_worker::proto::StatusCode;
use uniffle_worker::types::PartitionId;

use super::blocks::{batch, blocks};
use super::rig::Rig;
use super::world::{assert_same, eventually, key};

const P: PartitionId = PartitionId(0);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fills_during_an_append_mixes_nothing() {
    let (rig, key) = (Rig::start().await, key("app-1", 1));
    let client = rig.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let mut all: Vec<Block> = Vec::new();
    for round in 0..12 {
        // Every second batch is torn somewhere on the disk that gets it.
        if round % 2 == 1 {
            let bytes = 1 + 700 * usize::try_from(round).unwrap();
            for faults in &rig.faults {
                faults.clear();
            }
            let errno = if round % 4 == 1 { ENOSPC } else { EIO };
            rig.faults[0].add(Rule::once(Operation::Write, Fault::Short { bytes, errno }));
            rig.faults[1].add(Rule::once(Operation::Write, Fault::Short { bytes, errno }));
        }
        let new = blocks(0, round, 0..10);
        client.push(&key, SendForm::Classic, &batch(0, &new)).await.unwrap();
        all.extend(new);
        rig.flusher.flush_all();
        rig.flushed().await;
        let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
        assert_same(&read.blocks, &all);
    }
    drop(client);
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_no_disk_takes_stays_readable_and_is_tried_again() {
    let (rig, key) = (Rig::start().await, key("app-1", 1));
    let client = rig.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    for faults in &rig.faults {
        faults.add(Rule::once(Operation::Write, Fault::Errno(ENOSPC)));
        faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    }
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    rig.flusher.flush_all();
    let tried = || rig.faults.iter().map(uniffle_worker::io::fault::Faults::injected).sum::<u64>();
    eventually("several attempts fail", || match tried() {
        0..4 => Err(format!("{} failures", tried())),
        _ => Ok(()),
    })
    .await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!(read.from_disk, 0);

    rig.heal().await;
    rig.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!(read.from_memory, 0);
    drop(client);
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_fails_on_the_disk_is_an_error_and_never_short() {
    let (rig, key) = (Rig::start().await, key("app-1", 1));
    let client = rig.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    rig.flusher.flush_all();
    rig.flushed().await;
    for faults in &rig.faults {
        faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)));
    }
    let failed = client.read_data(&key, P, 0, 1000).await.unwrap_err();
    assert_eq!(failed.status(), Some(StatusCode::InternalError), "{failed}");
    rig.heal().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    drop(client);
    rig.finish().await;
}
