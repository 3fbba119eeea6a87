//! Registration, purge and expiry: docs/protocol.md §12 rows 11, 12 and 18, docs/architecture.md §6 items 3 and 10.

use std::time::Duration;

use futures::stream::{self, StreamExt};
use tokio::sync::oneshot;
use uniffle_client::block::Block;
use uniffle_client::grpc::{ReadOptions, register_request};
use uniffle_client::send::{self, SendForm};
use uniffle_testkit::fault::{Fault, Operation, Rule};
use uniffle_wire::types::{Distribution, PartitionId};
use uniffle_worker::proto::StatusCode;
use uniffle_worker::service::{MemoryReadRequest, RegisterRequest, RequireRequest};

use super::blocks::{batch, blocks};
use super::raw;
use super::rig::Rig;
use super::world::{World, assert_same, eventually, files_below, key, require};

const P: PartitionId = PartitionId(0);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registering_again_with_the_same_and_further_ranges_loses_nothing() {
    let (world, key) = (World::start().await, key("app-1", 1));
    world.client.register(&key, &[(0, 1)]).await.unwrap();
    let (flushed, kept) = (blocks(0, 1, 0..5), blocks(0, 2, 0..5));
    world.push(&key, &batch(0, &flushed)).await;
    world.flush().await;
    world.push(&key, &batch(0, &kept)).await;
    let refused = world.client.push(&key, SendForm::Classic, &batch(7, &blocks(7, 1, 0..1))).await;
    assert_eq!(refused.unwrap_err().status(), Some(StatusCode::NoRegister));

    world.client.register(&key, &[(0, 1)]).await.unwrap();
    world.client.register(&key, &[(7, 7), (3, 4)]).await.unwrap();
    world.push(&key, &batch(7, &blocks(7, 1, 0..3))).await;
    let all: Vec<Block> = flushed.iter().chain(&kept).cloned().collect();
    world.assert_reads(&key, 0, &all).await;
    world.assert_reads(&key, 7, &blocks(7, 1, 0..3)).await;
    world.flush().await;
    world.assert_reads(&key, 0, &all).await;
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shuffle_that_was_unregistered_starts_clean_when_it_comes_back() {
    let (world, key) = (World::start().await, key("app-1", 1));
    for round in 0..10 {
        world.client.register(&key, &[(0, 0)]).await.unwrap();
        world.assert_reads(&key, 0, &[]).await;
        let flushed = blocks(0, round, 0..5);
        world.push(&key, &batch(0, &flushed)).await;
        if round % 2 == 0 {
            world.flush().await;
        }
        world.assert_reads(&key, 0, &flushed).await;
        // Registered again at once, while the old files are being removed.
        world.client.unregister(&key).await.unwrap();
    }
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_begin_alike_are_different_apps_and_shuffles() {
    let world = World::start().await;
    let keys = [key("app-1", 1), key("app-1", 10), key("app-10", 1), key("app-", 1), key("app-1 ", 1)];
    for key in &keys {
        world.client.register(key, &[(0, 0)]).await.unwrap();
        world.push(key, &batch(0, &blocks(0, 1, 0..5))).await;
    }
    world.flush().await;
    for key in &keys {
        world.push(key, &batch(0, &blocks(0, 2, 0..5))).await;
    }
    let all: Vec<Block> = blocks(0, 1, 0..5).into_iter().chain(blocks(0, 2, 0..5)).collect();

    world.client.unregister(&keys[0]).await.unwrap();
    for key in &keys[1..] {
        world.assert_reads(key, 0, &all).await;
    }
    world.client.unregister_app("app-1").await.unwrap();
    for key in &keys[2..] {
        world.assert_reads(key, 0, &all).await;
    }
    let gone = world.client.read_partition(&keys[1], P, &ReadOptions::default()).await.unwrap_err();
    assert_eq!(gone.status(), Some(StatusCode::NoRegister));
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistering_frees_memory_tickets_and_files() {
    let (world, key) = (World::start().await, key("app-1", 1));
    world.client.register(&key, &[(0, 9)]).await.unwrap();
    for p in 0..10 {
        world.push(&key, &batch(p, &blocks(p, 1, 0..5))).await;
    }
    world.flush().await;
    world.push(&key, &batch(0, &blocks(0, 2, 0..5))).await;
    world.ticket(&key, 1 << 20).await;
    let files: Vec<_> = world.disks.iter().flat_map(|disk| files_below(disk)).collect();
    assert!(!files.is_empty(), "or nothing is tested");

    world.client.unregister_app("app-1").await.unwrap();
    world.assert_memory_is_free().await;
    eventually("no files are left", || match world.leftovers() {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    })
    .await;
    // Repeating it is harmless.
    let again = world.client.unregister_app("app-1").await.unwrap_err();
    assert_eq!(again.status(), Some(StatusCode::NoRegister));
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistering_during_a_flush_drops_the_batch_and_makes_no_directory() {
    let (rig, key) = (Rig::start().await, key("app-1", 1));
    let client = rig.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let (old, new) = (blocks(0, 1, 0..5), blocks(0, 2, 0..5));
    for faults in &rig.faults {
        faults.add(Rule::always(Operation::Write, Fault::Hang).on(".data"));
    }
    client.push(&key, SendForm::Classic, &batch(0, &old)).await.unwrap();
    rig.flusher.flush_all();
    eventually("the write hangs", || if rig.hung() > 0 { Ok(()) } else { Err(String::new()) }).await;

    client.unregister(&key).await.unwrap();
    client.register(&key, &[(0, 0)]).await.unwrap();
    client.push(&key, SendForm::Classic, &batch(0, &new)).await.unwrap();
    rig.heal().await;
    rig.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &new);
    assert_eq!(read.from_disk, 0);
    eventually("the old batch is gone", || match (rig.memory.in_flight_bytes(), rig.files()) {
        // The new registration has its journals.
        (0, files) if files.iter().all(|file| file.ends_with("1.2/0.journal")) => Ok(()),
        left => Err(format!("{left:?}")),
    })
    .await;
    rig.flusher.flush_all();
    rig.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &new);
    drop(client);
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistering_while_a_send_arrives_fails_the_send_and_frees_its_memory() {
    let (world, key) = (World::start().await, key("app-1", 1));
    world.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..5);
    let ticket = world.client.require_buffer(&key, &batch(0, &all)).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &batch(0, &all)));
    let (head, tail) = (message.slice(..1000), message.slice(1000..));
    let (go_on, wait) = oneshot::channel::<()>();
    let late = stream::once(async move {
        drop(wait.await);
        tail
    });
    let channel = raw::connect(world.worker.addresses().grpc).await;
    let call = raw::call_streamed(&channel, raw::SEND, stream::iter([head]).chain(late));
    let purge = async {
        eventually("the send has begun", || match world.memory().tickets().count() {
            0 => Ok(()),
            _ => Err("its ticket is there".to_owned()),
        })
        .await;
        world.client.unregister(&key).await.unwrap();
        go_on.send(()).unwrap();
    };
    let (answer, ()) = tokio::join!(call, purge);
    assert_eq!(answer.send_status().0, StatusCode::NoRegister);
    world.assert_memory_is_free().await;
    drop(channel);
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_of_an_unknown_app_is_no_register_and_makes_none() {
    let (world, key) = (World::start().await, key("app-1", 1));
    let client = &world.client;
    let no_register = Some(StatusCode::NoRegister);
    assert_eq!(client.heartbeat("app-1").await.unwrap_err().status(), no_register);
    assert_eq!(client.unregister(&key).await.unwrap_err().status(), no_register);
    assert_eq!(client.unregister_app("app-1").await.unwrap_err().status(), no_register);
    let required = client.require_raw(require(&key, 100)).await.unwrap();
    assert_eq!((required.status(), required.require_buffer_id), (StatusCode::NoRegister, -1));
    let one = batch(0, &blocks(0, 1, 0..1));
    let sent = client.send(&key, uniffle_wire::types::TicketId(1), SendForm::Classic, &one).await;
    assert_eq!(sent.unwrap_err().status(), no_register);
    let reported = client.report(&key, uniffle_wire::types::TaskAttemptId(1), &[]).await;
    assert_eq!(reported.unwrap_err().status(), no_register);
    assert_eq!(client.results(&key, &[P], None).await.unwrap_err().status(), no_register);
    assert_eq!(client.read_memory(&key, P, None, 1, None).await.unwrap_err().status(), no_register);
    assert_eq!(client.read_index(&key, P).await.unwrap_err().status(), no_register);
    assert_eq!(client.read_data(&key, P, 0, 1).await.unwrap_err().status(), no_register);
    assert_eq!(world.leftovers(), Vec::<String>::new());
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_without_data_is_empty_and_no_error() {
    let (world, key) = (World::start().await, key("app-1", 1));
    world.client.register(&key, &[(0, 3)]).await.unwrap();
    for (shuffle, partition) in [(1, 3), (1, 99), (2, 0)] {
        let key = super::world::key("app-1", shuffle);
        world.assert_reads(&key, partition, &[]).await;
        let index = world.client.read_index(&key, PartitionId(partition)).await.unwrap();
        assert_eq!((index.records.len(), index.data_length), (0, Some(0)));
    }
    world.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_a_client_of_any_version_registers_with_is_taken() {
    let (world, key) = (World::start().await, key("app-1", 1));
    let mut request = register_request(&key, &[(0, 0), (2, 2)]);
    request.max_concurrency_per_partition_to_write = -1;
    request.properties = [("spark.rss.x".to_owned(), "1".to_owned())].into();
    request.shuffle_data_distribution = 99;
    world.client.register_with(request).await.unwrap();
    // No ranges: Tez registers before it knows its partitions.
    world.client.register(&super::world::key("app-1", 2), &[]).await.unwrap();
    for range in [(-1, 3), (3, 2), (i32::MIN, i32::MAX)] {
        let refused = world.client.register(&super::world::key("app-2", 1), &[(0, 0), range]).await;
        assert_eq!(refused.unwrap_err().status(), Some(StatusCode::InvalidRequest), "{range:?}");
    }
    let negative = world.client.register(&super::world::key("app-2", -1), &[(0, 0)]).await;
    assert_eq!(negative.unwrap_err().status(), Some(StatusCode::InvalidRequest));
    assert_eq!(world.worker.apps().app_count(), 1, "what was refused left no app");
    world.finish().await;
}

fn register<'a>(app: &'a str) -> RegisterRequest<'a> {
    RegisterRequest {
        app,
        shuffle: 1,
        ranges: vec![(0, 3)],
        user: String::new(),
        distribution: Distribution::Normal,
        properties: Default::default(),
        remote_storage: None,
    }
}

/// Sends `length` bytes as block `id` of partition 0 of shuffle 1.
fn put(rig: &Rig, app: &str, id: i64, length: i32) {
    use uniffle_worker::service::{BlockHeader, SendHeader};
    let bytes = vec![7; usize::try_from(length).unwrap()];
    let required = RequireRequest { app, shuffle: 1, bytes: length, partitions: &[0], partition_sizes: &[] };
    let ticket = rig.service.require_buffer(required).unwrap().ticket;
    let header = SendHeader { app, shuffle: 1, ticket, message_bytes: 1 << 20 };
    let mut session = rig.service.begin_send(header).unwrap();
    session.partition(0).unwrap();
    session.begin_block(u32::try_from(length).unwrap()).unwrap();
    session.write(&bytes).unwrap();
    let header = BlockHeader {
        block_id: id,
        length,
        uncompressed_length: length,
        crc: i64::from(crc32fast::hash(&bytes)),
        task_attempt_id: 1,
    };
    session.end_block(header).unwrap();
    session.commit(0).unwrap();
}

/// Paused time, so without the gRPC listener: 60 s of silence, looked for every 10 s.
#[tokio::test(start_paused = true)]
async fn an_app_whose_heartbeat_stops_is_purged_after_the_timeout_and_no_other() {
    let rig = Rig::start().await;
    for app in ["silent", "alive", "reading"] {
        rig.service.register(register(app)).await.unwrap();
        put(&rig, app, 1, 10_000);
    }
    rig.flusher.flush_all();
    rig.flushed().await;
    put(&rig, "silent", 2, 10_000);
    let required =
        RequireRequest { app: "silent", shuffle: 1, bytes: 5000, partitions: &[0], partition_sizes: &[] };
    rig.service.require_buffer(required).unwrap();

    let read = MemoryReadRequest {
        app: "reading",
        shuffle: 1,
        partition: 0,
        last_block_id: -1,
        read_buffer_size: 1000,
        task_filter: None,
    };
    for second in 1..=80 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        rig.service.heartbeat("alive").unwrap();
        rig.service.read_memory(read).unwrap();
        if second < 60 {
            assert_eq!(rig.service.apps().app_count(), 3, "after {second} s");
        }
    }
    let left: Vec<String> = rig.service.apps().apps().iter().map(|app| app.id().to_string()).collect();
    assert!(left.len() == 2 && !left.contains(&"silent".to_owned()), "{left:?}");
    assert_eq!(rig.memory.budget().used(), 0, "stored blocks and the ticket are gone");
    let files = rig.files();
    assert!(!files.iter().any(|file| file.to_string_lossy().contains("silent")), "{files:?}");
    assert!(rig.service.heartbeat("silent").is_err(), "a late heartbeat makes no app");
    rig.finish().await;
}
