//! A worker ends, another starts on the same directories: what was acknowledged is there, byte for byte, at the same
//! offsets. A crash is a runtime that is shut down with everything in it; what it had not written is gone.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use uniffle_worker::client::block::{Block, IdLayout};
use uniffle_worker::client::grpc::ReadOptions;
use uniffle_worker::types::{PartitionId, ShuffleKey, TaskAttemptId};

use super::blocks::{batch, blocks};
use super::world::{Setup, World, assert_same, key};

const P: PartitionId = PartitionId(0);

/// Runs `life` as a process of its own would: nothing of it outlives it but files.
fn process<T>(life: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let result = runtime.block_on(life);
    runtime.shutdown_timeout(Duration::from_secs(20));
    result
}

/// The worker is gone, its directories are left.
fn crashed(world: World) -> (TempDir, Vec<PathBuf>) {
    let World { worker, client, dir, disks } = world;
    drop((worker, client));
    (dir, disks)
}

async fn report(world: &World, key: &ShuffleKey, task: i64, blocks: &[Block]) {
    let ids = blocks.iter().map(|block| block.meta.block_id).collect();
    world.client.report(key, TaskAttemptId(task), &[(P, ids)]).await.unwrap();
}

async fn reported(world: &World, key: &ShuffleKey) -> Vec<u64> {
    world.client.results(key, &[P], Some(IdLayout::SPARK)).await.unwrap().to_vec()
}

fn ids(blocks: &[Block]) -> Vec<u64> {
    let mut ids: Vec<u64> = blocks.iter().map(|block| block.meta.block_id.0.cast_unsigned()).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn after_a_crash_everything_flushed_and_reported_is_served_at_the_same_offsets() {
    let (kept, other) = (key("app-1", 1), key("app-10", 10));
    let (first, second) = (blocks(0, 1, 0..40), blocks(0, 2, 0..40));
    let (home, before) = process(async {
        let world = World::start().await;
        for key in [&kept, &other] {
            world.client.register(key, &[(0, 3)]).await.unwrap();
        }
        for (task, part) in [(1, &first), (2, &second)] {
            world.push(&kept, &batch(0, part)).await;
            world.flush().await;
            report(&world, &kept, task, part).await;
        }
        world.push(&other, &batch(0, &first)).await;
        world.flush().await;
        world.client.unregister_app("app-10").await.unwrap();
        let index = world.client.read_index(&kept, P).await.unwrap();
        (crashed(world), index)
    });
    process(async {
        let world = World::on(Setup::default(), home.0, home.1).await;
        let all = [first, second].concat();
        let index = world.client.read_index(&kept, P).await.unwrap();
        assert_eq!(index.records, before.records);
        world.assert_reads(&kept, 0, &all).await;
        assert_eq!(reported(&world, &kept).await, ids(&all));
        // It goes on: more blocks, more reports, ranges that were registered before are known.
        let third = blocks(3, 3, 0..10);
        world.push(&kept, &batch(3, &third)).await;
        world.flush().await;
        world.assert_reads(&kept, 3, &third).await;
        world.finish().await;
    });
}

#[test]
fn an_orderly_stop_is_survived_too_and_an_unregistered_app_does_not_come_back() {
    let (kept, gone) = (key("app-1", 1), key("app-1", 2));
    let all = blocks(0, 1, 0..20);
    let (dir, disks) = process(async {
        let world = World::start().await;
        for key in [&kept, &gone] {
            world.client.register(key, &[(0, 0)]).await.unwrap();
            world.push(key, &batch(0, &all)).await;
        }
        world.flush().await;
        report(&world, &kept, 1, &all).await;
        world.client.unregister(&gone).await.unwrap();
        let World { worker, client, dir, disks } = world;
        drop(client);
        assert_eq!(worker.stop().await, 0);
        (dir, disks)
    });
    process(async {
        let world = World::on(Setup::default(), dir, disks).await;
        let options = ReadOptions::default();
        let read = world.client.read_partition(&kept, P, &options).await.unwrap();
        assert_same(&read.blocks, &all);
        assert_eq!(reported(&world, &kept).await, ids(&all));
        assert_eq!(world.worker.apps().apps()[0].shuffles().len(), 1);
        world.finish().await;
    });
}

#[test]
fn without_recovery_a_start_finds_nothing_and_deletes_what_was_there() {
    let key = key("app-1", 1);
    let home = process(async {
        let world = World::start().await;
        world.client.register(&key, &[(0, 0)]).await.unwrap();
        world.push(&key, &batch(0, &blocks(0, 1, 0..20))).await;
        world.flush().await;
        crashed(world)
    });
    process(async {
        let setup = Setup { local: "recovery = false", ..Setup::default() };
        let world = World::on(setup, home.0, home.1).await;
        assert_eq!(world.worker.apps().app_count(), 0);
        assert!(world.client.read_index(&key, P).await.is_err());
        world.finish().await;
    });
}
