//! Registration, purge and expiry: docs/protocol.md §2.2, §2.3 and §8.4, docs/architecture.md §6
//! items 3 and 10.

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
use super::fixture::{WorkerFixture, assert_same, eventually, files_below, key, require};
use super::parts::parts;
use super::raw;
use uniffle_testkit::service::ServiceFixture;

const P: PartitionId = PartitionId(0);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reregistration_with_further_ranges_loses_nothing() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let (flushed, kept) = (blocks(0, 1, 0..5), blocks(0, 2, 0..5));
    fixture.push(&key, &batch(0, &flushed)).await;
    fixture.flush().await;
    fixture.push(&key, &batch(0, &kept)).await;
    let refused = fixture.client.push(&key, SendForm::Classic, &batch(7, &blocks(7, 1, 0..1))).await;
    assert_eq!(refused.unwrap_err().status(), Some(StatusCode::NoRegister));

    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    fixture.client.register(&key, &[(7, 7), (3, 4)]).await.unwrap();
    fixture.push(&key, &batch(7, &blocks(7, 1, 0..3))).await;
    let all: Vec<Block> = flushed.iter().chain(&kept).cloned().collect();
    fixture.assert_reads(&key, 0, &all).await;
    fixture.assert_reads(&key, 7, &blocks(7, 1, 0..3)).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &all).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reregistered_shuffle_is_empty() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    for round in 0..10 {
        fixture.client.register(&key, &[(0, 0)]).await.unwrap();
        fixture.assert_reads(&key, 0, &[]).await;
        let flushed = blocks(0, round, 0..5);
        fixture.push(&key, &batch(0, &flushed)).await;
        if round % 2 == 0 {
            fixture.flush().await;
        }
        fixture.assert_reads(&key, 0, &flushed).await;
        // The next round registers while the old files are being removed.
        fixture.client.unregister(&key).await.unwrap();
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_with_common_prefix_are_distinct() {
    let fixture = WorkerFixture::start().await;
    let keys = [key("app-1", 1), key("app-1", 10), key("app-10", 1), key("app-", 1), key("app-1 ", 1)];
    for key in &keys {
        fixture.client.register(key, &[(0, 0)]).await.unwrap();
        fixture.push(key, &batch(0, &blocks(0, 1, 0..5))).await;
    }
    fixture.flush().await;
    for key in &keys {
        fixture.push(key, &batch(0, &blocks(0, 2, 0..5))).await;
    }
    let all: Vec<Block> = blocks(0, 1, 0..5).into_iter().chain(blocks(0, 2, 0..5)).collect();

    fixture.client.unregister(&keys[0]).await.unwrap();
    for key in &keys[1..] {
        fixture.assert_reads(key, 0, &all).await;
    }
    fixture.client.unregister_app("app-1").await.unwrap();
    for key in &keys[2..] {
        fixture.assert_reads(key, 0, &all).await;
    }
    let gone = fixture.client.read_partition(&keys[1], P, &ReadOptions::default()).await.unwrap_err();
    assert_eq!(gone.status(), Some(StatusCode::NoRegister));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistration_frees_memory_tickets_and_files() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 9)]).await.unwrap();
    for p in 0..10 {
        fixture.push(&key, &batch(p, &blocks(p, 1, 0..5))).await;
    }
    fixture.flush().await;
    fixture.push(&key, &batch(0, &blocks(0, 2, 0..5))).await;
    fixture.ticket(&key, 1 << 20).await;
    let files: Vec<_> = fixture.disks.iter().flat_map(|disk| files_below(disk)).collect();
    assert!(!files.is_empty(), "no file was written");

    fixture.client.unregister_app("app-1").await.unwrap();
    fixture.assert_memory_is_free().await;
    eventually("no files are left", || match fixture.leftovers() {
        remaining if remaining.is_empty() => Ok(()),
        remaining => Err(format!("{remaining:?}")),
    })
    .await;
    // A repeated call changes nothing and returns NO_REGISTER.
    let again = fixture.client.unregister_app("app-1").await.unwrap_err();
    assert_eq!(again.status(), Some(StatusCode::NoRegister));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistration_during_flush_drops_the_batch() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let (old, new) = (blocks(0, 1, 0..5), blocks(0, 2, 0..5));
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Write, Fault::Hang).on(".data"));
    }
    client.push(&key, SendForm::Classic, &batch(0, &old)).await.unwrap();
    fixture.flusher.flush_all();
    eventually("the write hangs", || if fixture.hung() > 0 { Ok(()) } else { Err(String::new()) }).await;

    client.unregister(&key).await.unwrap();
    client.register(&key, &[(0, 0)]).await.unwrap();
    client.push(&key, SendForm::Classic, &batch(0, &new)).await.unwrap();
    fixture.heal().await;
    fixture.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &new);
    assert_eq!(read.from_disk, 0);
    eventually("the old batch is dropped", || match (fixture.memory.in_flight_bytes(), fixture.files()) {
        (0, files) if files.is_empty() => Ok(()),
        remaining => Err(format!("{remaining:?}")),
    })
    .await;
    fixture.flusher.flush_all();
    fixture.flushed().await;
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &new);
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistration_during_send_fails_it_and_frees_memory() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..5);
    let ticket = fixture.client.require_buffer(&key, &batch(0, &all)).await.unwrap();
    let message = raw::framed(&send::request(&key, ticket, SendForm::Classic, &batch(0, &all)));
    let (head, tail) = (message.slice(..1000), message.slice(1000..));
    let (resume, wait) = oneshot::channel::<()>();
    let late = stream::once(async move {
        drop(wait.await);
        tail
    });
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    let call = raw::call_streamed(&channel, raw::SEND, stream::iter([head]).chain(late));
    let purge = async {
        eventually("the send has begun", || match fixture.memory().tickets().count() {
            0 => Ok(()),
            _ => Err("the ticket exists".to_owned()),
        })
        .await;
        fixture.client.unregister(&key).await.unwrap();
        resume.send(()).unwrap();
    };
    let (answer, ()) = tokio::join!(call, purge);
    assert_eq!(answer.send_status().0, StatusCode::NoRegister);
    fixture.assert_memory_is_free().await;
    drop(channel);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_calls_of_unknown_app_return_no_register() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    let client = &fixture.client;
    let no_register = Some(StatusCode::NoRegister);
    assert_eq!(client.heartbeat("app-1").await.unwrap_err().status(), no_register);
    assert_eq!(client.unregister(&key).await.unwrap_err().status(), no_register);
    assert_eq!(client.unregister_app("app-1").await.unwrap_err().status(), no_register);
    let required = client.require_raw(require(&key, 100)).await.unwrap();
    assert_eq!((required.status(), required.require_buffer_id), (StatusCode::NoRegister, -1));
    let reported = client.report(&key, uniffle_wire::types::TaskAttemptId(1), &[]).await;
    assert_eq!(reported.unwrap_err().status(), no_register);
    assert_eq!(client.results(&key, &[P], None).await.unwrap_err().status(), no_register);
    assert_eq!(fixture.leftovers(), Vec::<String>::new());
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_without_data_reads_as_empty() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 3)]).await.unwrap();
    // Also a partition outside the ranges, and a shuffle that was never registered.
    for (shuffle, partition) in [(1, 3), (1, 99), (2, 0)] {
        let key = super::fixture::key("app-1", shuffle);
        fixture.assert_reads(&key, partition, &[]).await;
        let index = fixture.client.read_index(&key, PartitionId(partition)).await.unwrap();
        assert_eq!((index.records.len(), index.data_length), (0, Some(0)));
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_registrations_with_invalid_ranges_are_refused() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    let mut request = register_request(&key, &[(0, 0), (2, 2)]);
    request.max_concurrency_per_partition_to_write = -1;
    request.properties = [("spark.rss.x".to_owned(), "1".to_owned())].into();
    request.shuffle_data_distribution = 99;
    fixture.client.register_with(request).await.unwrap();
    // No ranges: Tez registers before it knows its partitions.
    fixture.client.register(&super::fixture::key("app-1", 2), &[]).await.unwrap();
    for range in [(-1, 3), (3, 2), (i32::MIN, i32::MAX)] {
        let refused = fixture.client.register(&super::fixture::key("app-2", 1), &[(0, 0), range]).await;
        assert_eq!(refused.unwrap_err().status(), Some(StatusCode::InvalidRequest), "{range:?}");
    }
    assert_eq!(
        fixture.worker.service().apps().app_count(),
        1,
        "a refused registration must not create an application"
    );
    fixture.finish().await;
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
        from: None,
    }
}

/// Sends `length` bytes as block `id` of partition 0 of shuffle 1.
fn put(fixture: &ServiceFixture, app: &str, id: i64, length: i32) {
    use uniffle_worker::service::{BlockHeader, IncomingSend};
    let bytes = vec![7; usize::try_from(length).unwrap()];
    let required = RequireRequest { app, shuffle: 1, bytes: length, partitions: &[0], partition_sizes: &[] };
    let ticket = fixture.service.ingest.require_buffer(required).unwrap().ticket;
    let header = IncomingSend { app, shuffle: 1, ticket, message_bytes: 1 << 20 };
    let mut session = fixture.service.ingest.begin_send(header).unwrap();
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
    session.commit().unwrap();
}

/// Needs paused time, so it runs without the gRPC listener. The timeout of [`parts`] is 60 s.
#[tokio::test(start_paused = true)]
async fn app_without_calls_expires_after_timeout() {
    let fixture = parts().start().await;
    for app in ["silent", "alive", "reading"] {
        fixture.service.lifecycle.register(register(app)).await.unwrap();
        put(&fixture, app, 1, 10_000);
    }
    fixture.flusher.flush_all();
    fixture.flushed().await;
    put(&fixture, "silent", 2, 10_000);
    let required =
        RequireRequest { app: "silent", shuffle: 1, bytes: 5000, partitions: &[0], partition_sizes: &[] };
    fixture.service.ingest.require_buffer(required).unwrap();

    let read = MemoryReadRequest {
        app: "reading",
        shuffle: 1,
        partition: 0,
        last_block_id: -1,
        read_buffer_size: 1000,
        task_filter: None,
        window: None,
    };
    for second in 1..=80 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        fixture.service.lifecycle.heartbeat("alive").unwrap();
        fixture.service.reads.read_memory(read).unwrap();
        if second < 60 {
            assert_eq!(fixture.service.apps().app_count(), 3, "an application has expired after {second} s");
        }
    }
    let remaining: Vec<String> =
        fixture.service.apps().apps().iter().map(|app| app.id().to_string()).collect();
    assert!(remaining.len() == 2 && !remaining.contains(&"silent".to_owned()), "{remaining:?}");
    assert_eq!(fixture.memory.budget().used(), 0, "stored blocks and the ticket must be freed");
    let files = fixture.files();
    assert!(!files.iter().any(|file| file.to_string_lossy().contains("silent")), "{files:?}");
    assert!(
        fixture.service.lifecycle.heartbeat("silent").is_err(),
        "a late heartbeat must not create an application"
    );
    fixture.finish().await;
}
