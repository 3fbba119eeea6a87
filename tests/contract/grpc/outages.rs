//! Outages of all disks, late disks, and the heartbeat timeout after a restart.

use std::collections::HashMap;
use std::time::Duration;

use uniffle_client::block::Block;
use uniffle_client::grpc::{Backoff, ReadOptions};
use uniffle_client::send::SendForm;
use uniffle_testkit::fault::{EIO, EROFS, Fault, Operation, Rule};
use uniffle_wire::types::{Distribution, PartitionId};
use uniffle_worker::proto::StatusCode;
use uniffle_worker::service::RegisterRequest;
use uniffle_worker::store::LocalConfig;

use super::blocks::{batch, block, blocks};
use super::fixture::{assert_same, eventually, key, short_backoff};
use super::parts::{HEARTBEAT_TIMEOUT, local_config, parts};
use uniffle_testkit::service::{ServiceBuilder, memory_disks};

const P: PartitionId = PartitionId(0);

/// Writes until memory is full while all disks fail with `errno`, then repairs the disks.
async fn all_disks_out(errno: i32) {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let once = Backoff { attempts: 1, ..short_backoff() };
    let client = fixture.client().await.with_backoff(once);
    client.register(&key, &[(0, 0)]).await.unwrap();
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Write, Fault::Errno(errno)));
    }
    let mut all: Vec<Block> = Vec::new();
    loop {
        assert!(all.len() < 100, "memory of 16 MiB accepted 100 blocks of 1 MiB");
        let new = vec![block(0, 1, u32::try_from(all.len()).unwrap(), 1 << 20)];
        if let Err(refused) = client.push(&key, SendForm::Classic, &batch(0, &new)).await {
            assert_eq!(refused.status(), Some(StatusCode::NoBuffer), "{refused}");
            break;
        }
        all.extend(new);
        fixture.flusher.flush_all();
    }
    let client = client.with_backoff(short_backoff());
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!((read.from_disk, fixture.store().available_disks()), (0, 0));

    fixture.heal().await;
    fixture.flushed().await;
    // Waiting data is on disk, and there is room again.
    let more = blocks(0, 2, 0..10);
    client.push(&key, SendForm::Classic, &batch(0, &more)).await.unwrap();
    all.extend(more);
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert!(fixture.service.diagnostics.losses().losses.is_empty());
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_wait_without_loss_while_all_disks_fail() {
    all_disks_out(EIO).await;
    all_disks_out(EROFS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_batch_is_rewritten_to_another_disk() {
    let local = LocalConfig { write_timeout: Duration::from_millis(200), ..local_config() };
    let (fixture, key) = (ServiceBuilder { local, ..parts() }.start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..10);
    client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap();
    // The first of equal disks is chosen.
    fixture.faults[0].add(Rule::once(Operation::Write, Fault::Hang).on(".data"));
    fixture.flusher.flush_all();
    fixture.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    assert_eq!((read.from_memory, fixture.hung()), (0, 1), "the batch must be on the other disk");
    assert!(fixture.memory.budget().used() > 0, "the late call must still hold its memory");
    fixture.heal().await;
    eventually("the batch's memory is free", || match fixture.memory.budget().used() {
        0 => Ok(()),
        used => Err(format!("{used} bytes are charged")),
    })
    .await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    drop(client);
    fixture.finish().await;
}

/// Runs a process on its own runtime with paused time. Everything in it ends with it.
fn life<T>(life: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(life)
}

#[test]
fn heartbeat_timeout_restarts_with_the_worker() {
    const LITTLE: Duration = Duration::from_secs(1);
    /// Longer than the interval of the expiry check, 10 s.
    const LOOK: Duration = Duration::from_secs(11);
    let disks = memory_disks(2);
    life(async {
        let fixture = ServiceBuilder { disks: disks.clone(), ..parts() }.start().await;
        let request = RegisterRequest {
            app: "app-1",
            shuffle: 1,
            ranges: vec![(0, 0)],
            user: String::new(),
            distribution: Distribution::Normal,
            properties: HashMap::new(),
            remote_storage: None,
            from: None,
        };
        fixture.service.lifecycle.register(request).await.unwrap();
        // The last heartbeat was long before the worker dies.
        tokio::time::sleep(HEARTBEAT_TIMEOUT - LITTLE).await;
        assert_eq!(fixture.service.apps().app_count(), 1);
    });
    life(async {
        let fixture = ServiceBuilder { disks, ..parts() }.start().await;
        tokio::time::sleep(HEARTBEAT_TIMEOUT - LITTLE).await;
        assert_eq!(fixture.service.apps().app_count(), 1, "the application expired early");
        tokio::time::sleep(LITTLE + LOOK).await;
        assert_eq!(fixture.service.apps().app_count(), 0, "the application did not expire");
        fixture.finish().await;
    });
}
