//! Failing disks as clients see them (docs/architecture.md §6 items 4, 7 and 8), a paused flusher,
//! and the verification of disk reads.

use std::time::Duration;

use uniffle_client::block::Block;
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::fault::{EIO, ENOSPC, Fault, Operation, Rule};
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::clock::Instant;
use uniffle_worker::store::{LocalConfig, VerifyReads};

use super::blocks::{batch, blocks, payload};
use super::fixture::{assert_same, eventually, key};
use super::parts::{local_config, parts};
use uniffle_testkit::service::{ServiceBuilder, ServiceFixture};

const P: PartitionId = PartitionId(0);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_full_during_append_does_not_mix_blocks() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let mut all: Vec<Block> = Vec::new();
    for round in 0..12 {
        // Every second batch is torn on its disk.
        if round % 2 == 1 {
            let bytes = 1 + 700 * usize::try_from(round).unwrap();
            for faults in &fixture.faults {
                faults.clear();
            }
            let errno = if round % 4 == 1 { ENOSPC } else { EIO };
            fixture.faults[0].add(Rule::once(Operation::Write, Fault::Short { bytes, errno }));
            fixture.faults[1].add(Rule::once(Operation::Write, Fault::Short { bytes, errno }));
        }
        let new = blocks(0, round, 0..10);
        client.push(&key, SendForm::Classic, &batch(0, &new)).await.unwrap();
        all.extend(new);
        fixture.flusher.flush_all();
        fixture.flushed().await;
        let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
        assert_same(&read.blocks, &all);
    }
    drop(client);
    fixture.finish().await;
}

/// Retry: a batch that no disk can write is written again after a backoff.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unwritable_batch_stays_readable_and_is_retried() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    for faults in &fixture.faults {
        faults.add(Rule::once(Operation::Write, Fault::Errno(ENOSPC)));
        faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    }
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    fixture.flusher.flush_all();
    let tried = || fixture.faults.iter().map(uniffle_testkit::fault::Faults::injected).sum::<u64>();
    eventually("several attempts fail", || match tried() {
        0..4 => Err(format!("{} failures", tried())),
        _ => Ok(()),
    })
    .await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!(read.from_disk, 0);

    fixture.heal().await;
    fixture.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!(read.from_memory, 0);
    drop(client);
    fixture.finish().await;
}

/// Before memory is handed over, running writes end and no new one starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_flusher_writes_nothing_until_resumed() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let (first, second) = (blocks(0, 1, 0..5), blocks(0, 2, 0..5));
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Write, Fault::Hang).on(".data"));
    }
    client.push(&key, SendForm::Classic, &batch(0, &first)).await.unwrap();
    fixture.flusher.flush_all();
    eventually("the write hangs", || if fixture.hung() > 0 { Ok(()) } else { Err(String::new()) }).await;
    assert!(!fixture.flusher.pause(Instant::now()).await, "the flusher must be writing");
    fixture.heal().await;
    assert!(fixture.flusher.pause(Instant::now() + Duration::from_secs(60)).await);
    let flushed = fixture.flusher.flushed_bytes();

    client.push(&key, SendForm::Classic, &batch(0, &second)).await.unwrap();
    fixture.flusher.flush_all();
    let all = [first, second].concat();
    for _ in 0..50 {
        let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
        assert_same(&read.blocks, &all);
    }
    assert_eq!(fixture.flusher.flushed_bytes(), flushed, "a paused flusher wrote");
    fixture.flusher.resume();
    fixture.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!(read.from_memory, 0);
    drop(client);
    fixture.finish().await;
}

/// Returns a fixture with a reported partition on disk.
async fn flushed_and_reported() -> (ServiceFixture, ShuffleClient, ShuffleKey, Vec<Block>) {
    // Every read goes to the disk.
    let local = LocalConfig { index_cache_bytes: 0, ..local_config() };
    let (fixture, key) = (ServiceBuilder { local, ..parts() }.start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    fixture.flusher.flush_all();
    fixture.flushed().await;
    let ids = all.iter().map(|block| block.meta.block_id).collect();
    client.report(&key, TaskAttemptId(1), &[(P, ids)]).await.unwrap();
    (fixture, client, key, all)
}

/// Asserts that three reads fail with EIO and that the fourth, as by Spark's fourth attempt of a
/// task, names the lost blocks.
async fn assert_fourth_read_names_the_loss(operation: Operation, suffix: &'static str) {
    let (fixture, client, key, all) = flushed_and_reported().await;
    for faults in &fixture.faults {
        faults.add(Rule::always(operation, Fault::Errno(EIO)).on(suffix));
    }
    let options = ReadOptions::default();
    let read = || client.read_partition(&key, P, &options);
    for attempt in 1..4 {
        let error = read().await.unwrap_err().to_string();
        assert!(error.contains("Input/output error"), "attempt {attempt} has another error: {error}");
        assert_eq!(
            fixture.service.diagnostics.losses().losses.is_empty(),
            attempt < 3,
            "only the third failed attempt may report losses, attempt {attempt}"
        );
    }
    let error = read().await.unwrap_err().to_string();
    assert!(error.contains("10 blocks of shuffle app-1/1 partition 0 are lost"), "{error}");
    assert!(error.contains("/disk") && error.contains(suffix), "the error must name disk and file: {error}");
    // Resent blocks are found, and the unreadable copy does not interfere.
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    let healed = read().await.unwrap();
    assert_same(&healed.blocks, &all);
    fixture.heal().await;
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_blocks_are_reported_lost_without_restart() {
    assert_fourth_read_names_the_loss(Operation::Read, ".data").await;
    assert_fourth_read_names_the_loss(Operation::Read, ".index").await;
    assert_fourth_read_names_the_loss(Operation::OpenRead, ".data").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn temporarily_unreadable_blocks_are_not_abandoned() {
    let (fixture, client, key, all) = flushed_and_reported().await;
    // Three reads fail, then the first two attempts to read existing data.
    for faults in &fixture.faults {
        faults.add(Rule { times: 5, ..Rule::once(Operation::Read, Fault::Errno(EIO)).on(".data") });
    }
    for _ in 0..3 {
        client.read_data(&key, P, 0, 1000).await.unwrap_err();
    }
    let injected: u64 = fixture.faults.iter().map(uniffle_testkit::fault::Faults::injected).sum();
    assert_eq!(injected, 5);
    assert!(fixture.service.diagnostics.losses().losses.is_empty());
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_whose_probe_reads_zeros_stays_unhealthy() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    client.push(&key, SendForm::Classic, &batch(0, &blocks(0, 1, 0..10))).await.unwrap();
    // The first of equal disks is chosen.
    let faults = &fixture.faults[0];
    faults.add(Rule::once(Operation::Write, Fault::Errno(EIO)));
    faults.add(Rule::always(Operation::Write, Fault::Zeros));
    fixture.flusher.flush_all();
    fixture.flushed().await;
    let before = faults.injected();
    for _ in 0..3 {
        fixture.store().probe().await;
        assert_eq!(fixture.store().available_disks(), 1);
    }
    assert!(faults.injected() >= before + 3, "no probe was written");
    fixture.heal().await;
    fixture.store().probe().await;
    assert_eq!(fixture.store().available_disks(), 2);
    drop(client);
    fixture.finish().await;
}

/// Returns which of 16 reads of data with a flipped bit is the first to be refused. One read before
/// was correct, so they begin as the second of a sample of 16.
async fn first_refusal(verify_reads: VerifyReads) -> Option<usize> {
    let local = LocalConfig { verify_reads, ..local_config() };
    let (fixture, key) = (ServiceBuilder { local, ..parts() }.start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    fixture.flusher.flush_all();
    fixture.flushed().await;
    let length = payload(&all);
    let whole = client.read_data(&key, P, 0, length).await.unwrap();
    for disk in &fixture.disks {
        for file in disk.files().iter().filter(|file| file.extension().is_some_and(|it| it == "data")) {
            disk.corrupt(file, 100, 4);
        }
    }
    let mut first = None;
    for at in 0..16 {
        match client.read_data(&key, P, 0, length).await {
            Ok(bytes) => assert!(bytes != whole, "no bit was flipped"),
            Err(_) => first = first.or(Some(at)),
        }
    }
    drop(client);
    fixture.finish().await;
    first
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_reads_are_verified_as_configured() {
    assert_eq!(first_refusal(VerifyReads::Always).await, Some(0));
    assert_eq!(first_refusal(VerifyReads::Sampled).await, Some(15));
    assert_eq!(first_refusal(VerifyReads::Off).await, None);
}
