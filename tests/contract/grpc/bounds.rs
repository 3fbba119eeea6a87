//! Bounds on the memory and work of one client, while others are served.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use croaring::Treemap;
use futures::{StreamExt, stream};
use http_body_util::BodyExt;
use prost::Message;
use tokio::runtime::{HistogramConfiguration, Runtime};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::transport::Endpoint;
use uniffle_base::budget::HeapKind;
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::send::{self, SendForm};
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_wire::bitmap;
use uniffle_wire::types::ShuffleKey;
use uniffle_worker::proto::{
    GetMemoryShuffleDataRequest, GetMemoryShuffleDataResponse, GetShuffleResultForMultiPartRequest,
    GetShuffleServerRequest, PartitionToBlockIds, RemoteStorage, RemoteStorageConfItem,
    ReportShuffleResultRequest, ShufflePartitionRange, ShuffleRegisterRequest, StatusCode,
};

use super::blocks::{batch, block};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::raw;

const REPORT: &str = "/rss.common.ShuffleServer/reportShuffleResult";
const GET_MEMORY_DATA: &str = "/rss.common.ShuffleServer/getMemoryShuffleData";

fn report(key: &ShuffleKey, partition: i32, ids: Vec<i64>) -> ReportShuffleResultRequest {
    ReportShuffleResultRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        task_attempt_id: 3,
        bitmap_num: 1,
        partition_to_block_ids: vec![PartitionToBlockIds { partition_id: partition, block_ids: ids }],
        partition_stats: Vec::new(),
    }
}

fn results(key: &ShuffleKey, partitions: Vec<i32>) -> GetShuffleResultForMultiPartRequest {
    GetShuffleResultForMultiPartRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partitions,
        block_id_layout: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_partitions_are_merged_up_to_a_limit() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 9)]).await.unwrap();
    // Scattered ids: merging them once takes milliseconds, and merging them 300,000 times minutes.
    let ids = (0..20_000).map(|id| id << 33).collect();
    let taken = fixture.client.raw().report_shuffle_result(report(&key, 0, ids)).await;
    assert_eq!(taken.unwrap().into_inner().status(), StatusCode::Success);
    let asked = (0..3).map(|_| async {
        let request = results(&key, vec![0; 300_000]);
        fixture.client.raw().get_shuffle_result_for_multi_part(request).await.unwrap().into_inner()
    });
    for answer in futures::future::join_all(asked).await {
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        assert_eq!(bitmap::decode(&answer.serialized_bitmap).unwrap().cardinality(), 20_000);
    }
    let refused = results(&key, vec![0; 1_000_001]);
    let answer = fixture.client.raw().get_shuffle_result_for_multi_part(refused).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::InvalidRequest);
    assert_eq!(answer.ret_msg, "partitions has 1000001 entries, the limit is 1000000");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_reports_do_not_block_small_ones() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 9)]).await.unwrap();
    let heap = fixture.memory().heap().clone();
    let requests = heap.of(HeapKind::Requests);
    let channel = raw::connect(fixture.worker.addresses().grpc).await;
    // Reports of one connection that declare more bytes than the heap has, and never end.
    let (mut senders, mut calls) = (Vec::new(), Vec::new());
    for _ in 0..24 {
        let (sender, receiver) = mpsc::channel(1);
        let pieces = tokio_stream::wrappers::ReceiverStream::new(receiver);
        senders.push(sender);
        let channel = channel.clone();
        calls.push(async move { raw::call_streamed(&channel, REPORT, pieces).await });
    }
    let sending = stream::iter(senders).for_each_concurrent(None, |sender| async move {
        let mut prefix = vec![0];
        prefix.extend_from_slice(&(60_u32 << 20).to_be_bytes());
        let _gone = sender.send(Bytes::from(prefix)).await;
        // Sends until the worker has ended the call.
        while sender.send(Bytes::from(vec![0x80; 256 << 10])).await.is_ok() {}
    });
    let watching = async {
        let mut peak = 0;
        loop {
            peak = peak.max(requests.used());
            // Another connection is served meanwhile.
            fixture.client.heartbeat("app-1").await.unwrap();
            let small = fixture.client.raw().report_shuffle_result(report(&key, 1, vec![7; 100])).await;
            assert_eq!(small.unwrap().into_inner().status(), StatusCode::Success);
            if peak > requests.capacity() / 3 {
                return peak;
            }
        }
    };
    let peak = tokio::select! {
        peak = tokio::time::timeout(Duration::from_secs(60), watching) => peak.expect("the reports did not take a third of the heap"),
        _ = futures::future::join(sending, futures::future::join_all(calls)) => panic!("all calls ended at once"),
    };
    assert!(
        peak <= requests.capacity() / 2 + (1 << 20),
        "requests held {peak} of {} bytes",
        requests.capacity()
    );
    drop(channel);
    eventually("their memory is free again", || match requests.used() {
        0 => Ok(()),
        remaining => Err(format!("{remaining} bytes")),
    })
    .await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn send_of_too_many_tiny_blocks_gets_no_buffer() {
    let setup = Setup { memory: "heap_capacity = \"32MiB\"", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let blocks: Vec<_> = (0..200_000).map(|n| block(0, 1, n, 1)).collect();
    for form in [SendForm::Classic, SendForm::Contiguous] {
        let ticket = fixture.ticket(&key, 8 << 20).await;
        let request = send::request(&key, ticket, form, &batch(0, &blocks));
        let channel = raw::connect(fixture.worker.addresses().grpc).await;
        let answer = raw::call(&channel, raw::SEND, vec![raw::framed(&request)], raw::End::Closed).await;
        let (status, text) = answer.send_status();
        assert_eq!(status, StatusCode::NoBuffer, "{form:?}: {text}");
        assert!(text.contains("unfinished_blocks") && text.contains("memory_store.heap_capacity"), "{text}");
        fixture.assert_memory_is_free().await;
    }
    fixture.push(&key, &batch(0, &blocks[..10_000])).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_registration_names_field_and_stores_nothing() {
    let fixture =
        WorkerFixture::with(Setup { memory: "heap_capacity = \"512MiB\"", ..Setup::default() }).await;
    let request = |user: usize, ranges: i32, path: usize, [settings, value]: [usize; 2]| {
        let setting = |n: usize| RemoteStorageConfItem { key: n.to_string(), value: "v".repeat(value) };
        ShuffleRegisterRequest {
            app_id: "app-1".to_owned(),
            shuffle_id: 1,
            partition_ranges: (0..ranges)
                .map(|n| ShufflePartitionRange { start: 2 * n, end: 2 * n })
                .collect(),
            remote_storage: Some(RemoteStorage {
                path: "p".repeat(path),
                remote_storage_conf: (0..settings).map(setting).collect(),
            }),
            user: "u".repeat(user),
            ..ShuffleRegisterRequest::default()
        }
    };
    let cases = [
        (request(100_000, 1, 0, [0, 0]), "user has 100000 bytes, the limit is 1024"),
        (request(1, 262_145, 0, [0, 0]), "partitionRanges has 262145 ranges, the limit is 262144"),
        (request(1, 1, 8001, [0, 0]), "remoteStorage.path has 8001 bytes, the limit is 8000"),
        (request(1, 1, 1, [1001, 0]), "remoteStorage.remoteStorageConf has 1001 settings, the limit is 1000"),
        (
            request(1, 1, 1, [2, 40_000]),
            "remoteStorage.remoteStorageConf has 80002 bytes, the limit is 65536",
        ),
    ];
    for (request, message) in cases {
        let answer = fixture.client.raw().register_shuffle(request).await.unwrap().into_inner();
        assert_eq!((answer.status(), answer.ret_msg.as_str()), (StatusCode::InvalidRequest, message));
    }
    assert_eq!((fixture.worker.service().apps().app_count(), fixture.memory().heap().whole().used()), (0, 0));
    let answer = fixture
        .client
        .raw()
        .register_shuffle(request(1024, 1000, 8000, [1000, 50]))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_responses_pin_bounded_memory() {
    let setup = Setup { capacity: "64MiB", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let blocks: Vec<_> = (0..24).map(|n| block(0, 1, n, 1 << 20)).collect();
    fixture.push(&key, &batch(0, &blocks)).await;
    let request = GetMemoryShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        last_block_id: -1,
        read_buffer_size: i32::MAX,
        ..GetMemoryShuffleDataRequest::default()
    };
    let (mut refused, mut bodies) = (0, Vec::new());
    let answered = fixture.memory().answered();
    let address = format!("http://{}", fixture.worker.addresses().grpc);
    for _ in 0..40 {
        // HTTP/2's initial windows, which for a connection cannot be smaller.
        let endpoint = Endpoint::from_shared(address.clone()).unwrap().initial_stream_window_size(65_535);
        let channel = endpoint.initial_connection_window_size(65_535).connect().await.unwrap();
        bodies.push(raw::open(&channel, GET_MEMORY_DATA, raw::framed(&request)).await);
        assert!(
            answered.used() <= answered.capacity() / 2 + (2 << 20),
            "responses hold {} bytes",
            answered.used()
        );
    }
    for body in bodies {
        let whole = body.collect().await.unwrap().to_bytes();
        let answer = GetMemoryShuffleDataResponse::decode(whole.slice(5..)).unwrap();
        match answer.status() {
            StatusCode::Success => assert!(!answer.data.is_empty()),
            status => {
                assert_eq!(status, StatusCode::NoBuffer);
                assert!(answer.ret_msg.contains("unread responses"), "{}", answer.ret_msg);
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "no request was refused, so nothing was bounded");
    eventually("nothing is pinned", || match answered.used() {
        0 => Ok(()),
        remaining => Err(format!("{remaining} bytes")),
    })
    .await;
    fixture.assert_reads(&key, 0, &blocks).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_connection_holds_its_share_until_timeout() {
    let setup = Setup { capacity: "64MiB", tables: "[grpc]\nanswer_timeout_sec = 1", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let blocks: Vec<_> = (0..24).map(|n| block(0, 1, n, 1 << 20)).collect();
    fixture.push(&key, &batch(0, &blocks)).await;
    let request = GetMemoryShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        last_block_id: -1,
        read_buffer_size: i32::MAX,
        ..GetMemoryShuffleDataRequest::default()
    };
    let answered = fixture.memory().answered();
    let endpoint = Endpoint::from_shared(format!("http://{}", fixture.worker.addresses().grpc)).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535);
    let channel = endpoint.connect().await.unwrap();
    let mut bodies = Vec::new();
    for _ in 0..16 {
        bodies.push(raw::open(&channel, GET_MEMORY_DATA, raw::framed(&request)).await);
        let share = answered.capacity() / 8;
        assert!(
            answered.used() <= share + (1 << 20),
            "responses hold {} bytes, the share is {share}",
            answered.used()
        );
    }
    fixture.assert_reads(&key, 0, &blocks).await;
    // HTTP/2 holds complete responses that the socket does not accept. The connection is closed,
    // and all memory is freed.
    eventually("nothing is pinned", || match answered.used() {
        0 => Ok(()),
        remaining => Err(format!("{remaining} bytes")),
    })
    .await;
    let ended = futures::future::join_all(bodies.into_iter().map(BodyExt::collect)).await;
    assert!(ended.iter().any(Result::is_err), "no connection was closed");
    fixture.assert_reads(&key, 0, &blocks).await;
    drop((ended, channel));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_responses_are_dropped_for_requests_waiting_for_heap() {
    let setup = Setup { capacity: "64MiB", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let blocks: Vec<_> = (0..24).map(|n| block(0, 1, n, 1 << 20)).collect();
    fixture.push(&key, &batch(0, &blocks)).await;
    let request = GetMemoryShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        last_block_id: -1,
        read_buffer_size: i32::MAX,
        ..GetMemoryShuffleDataRequest::default()
    };
    let (answered, heap) = (fixture.memory().answered(), fixture.memory().heap().whole());
    let free = heap.free();
    let endpoint = Endpoint::from_shared(format!("http://{}", fixture.worker.addresses().grpc)).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535);
    let channel = endpoint.connect().await.unwrap();
    let mut bodies = Vec::new();
    for _ in 0..4 {
        bodies.push(raw::open(&channel, GET_MEMORY_DATA, raw::framed(&request)).await);
    }
    assert!(answered.used() > 0 && heap.free() < free);
    // Memory must be free long before the 120 s that each response may take.
    let began = Instant::now();
    drop(heap.charge(free).await.unwrap());
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    eventually("nothing is pinned", || match answered.used() {
        0 => Ok(()),
        remaining => Err(format!("{remaining} bytes")),
    })
    .await;
    fixture.assert_reads(&key, 0, &blocks).await;
    drop((bodies, channel));
    fixture.finish().await;
}

/// Limit for one poll on the worker's runtime. It is generous, because test builds are not
/// optimised and the machine may be busy.
const POLL_MAX: Duration = Duration::from_secs(2);

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder
        .worker_threads(2)
        .enable_all()
        .enable_metrics_poll_time_histogram()
        .metrics_poll_time_histogram_configuration(HistogramConfiguration::linear(POLL_MAX, 2));
    builder.build().unwrap()
}

/// Returns the number of polls that took longer than [`POLL_MAX`].
fn long_polls(runtime: &Runtime) -> u64 {
    let metrics = runtime.metrics();
    (0..metrics.num_workers()).map(|worker| metrics.poll_time_histogram_bucket_count(worker, 1)).sum()
}

/// Registers many ranges, reports and queries scattered ids, and reads with a large task filter.
async fn make_large_requests(client: ShuffleClient, key: ShuffleKey) {
    let ranges = (0..100_000).map(|n| ShufflePartitionRange { start: 2 * n, end: 2 * n }).collect();
    let registration = ShuffleRegisterRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_ranges: ranges,
        ..ShuffleRegisterRequest::default()
    };
    let taken = client.raw().register_shuffle(registration).await.unwrap().into_inner();
    assert_eq!(taken.status(), StatusCode::Success, "{}", taken.ret_msg);
    for partition in 0..3 {
        let ids = (0..40_000).map(|id| id << 33 | i64::from(partition)).collect();
        let taken =
            client.raw().report_shuffle_result(report(&key, partition, ids)).await.unwrap().into_inner();
        assert_eq!(taken.status(), StatusCode::Success, "{}", taken.ret_msg);
    }
    let partitions: Vec<i32> = (0..900_000).map(|n| n % 3).collect();
    let answer = client.raw().get_shuffle_result_for_multi_part(results(&key, partitions)).await;
    let answer = answer.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    assert_eq!(bitmap::decode(&answer.serialized_bitmap).unwrap().cardinality(), 120_000);
    let filter: Treemap = (0..20_000_u64).map(|task| task << 33).collect();
    let read = GetMemoryShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        last_block_id: -1,
        serialized_expected_task_ids_bitmap: Some(bitmap::encode(&filter)),
        ..GetMemoryShuffleDataRequest::default()
    };
    let answer = client.raw().get_memory_shuffle_data(read).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
}

/// Requests the largest assignment of a default configuration: the coordinator computes it and the
/// listener encodes it.
async fn assignment(address: SocketAddr) {
    const RANGES: i32 = 1 << 17;
    let channel = raw::connect(address).await;
    let mut coordinator = CoordinatorServerClient::new(channel).max_decoding_message_size(64 << 20);
    let request = GetShuffleServerRequest {
        application_id: "app-1".to_owned(),
        partition_num: RANGES,
        partition_num_per_range: 1,
        data_replica: 1,
        assignment_shuffle_server_number: -1,
        ..GetShuffleServerRequest::default()
    };
    let answer = coordinator.get_shuffle_assignments(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    let last = answer.assignments.last().unwrap();
    assert_eq!((answer.assignments.len(), last.end_partition), (RANGES as usize, RANGES - 1));
}

#[test]
fn requests_do_not_block_runtime_threads() {
    let (of_worker, of_clients) = (runtime(), runtime());
    let setup = Setup { memory: "heap_capacity = \"512MiB\"", ..Setup::default() };
    let fixture = of_worker.block_on(WorkerFixture::with(setup));
    let address = fixture.worker.addresses().grpc;
    of_clients.block_on(async {
        let clients = (0..3).map(|app| async move {
            let client = ShuffleClient::connect(address).await.unwrap();
            make_large_requests(client, key(&format!("app-{app}"), 1)).await;
            assignment(address).await;
        });
        futures::future::join_all(clients).await;
    });
    assert_eq!(long_polls(&of_worker), 0);
    drop(of_clients);
    of_worker.block_on(fixture.finish());
}
