//! Metrics of the listeners and tiers after the same session over gRPC and TCP, named as in the
//! Java server (docs/protocol.md §10.2, §10.3).

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use uniffle_client::send::{self, SendForm};
use uniffle_client::tcp::{TcpClient, TcpClientError};
use uniffle_wire::request::{
    LocalDataRequest, LocalDataVersion, MemoryRequest, PartitionTarget, Placement, ReadRequest, SendBlock,
    SendRequest, SortedRequest,
};
use uniffle_wire::types::{PartitionId, ShuffleKey};
use uniffle_worker::proto::{
    GetLocalShuffleDataRequest, GetLocalShuffleIndexRequest, GetMemoryShuffleDataRequest,
    GetSortedShuffleDataRequest, StatusCode,
};
use uniffle_worker::runtime::Tasks;

use super::blocks::block;
use super::fixture::{WorkerFixture, eventually, key};

const APP: &str = "app-1";
const P: PartitionId = PartitionId(0);
const BLOCK_BYTES: u32 = 1000;
/// Transport time that the requests declare.
const ON_THE_WAY_MS: i64 = 5_000;

fn now_ms() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// Returns timestamps of which only the first is usable. The others are absent, ahead or far
/// behind.
fn timestamps() -> [i64; 6] {
    let now = now_ms();
    [now - ON_THE_WAY_MS, 0, -1, now + 3_600_000, i64::MAX, 1]
}

/// Returns count and sum of a histogram.
fn histogram(fixture: &WorkerFixture, name: &str) -> (u64, f64) {
    let families = fixture.worker.registry().gather();
    let family = families.iter().find(|family| family.name() == name);
    let family = family.unwrap_or_else(|| panic!("no metric {name}"));
    let [metric] = family.get_metric() else { panic!("{name} has labels") };
    let histogram = metric.get_histogram();
    (histogram.get_sample_count(), histogram.get_sample_sum())
}

/// Asserts that one transport time was observed: the declared one, plus the real one.
fn assert_on_the_way(fixture: &WorkerFixture, name: &str, in_a_second: f64) {
    let (count, sum) = histogram(fixture, name);
    assert_eq!(count, 1, "{name}");
    let ms = sum * 1000.0 / in_a_second;
    assert!((5_000.0..3_600_000.0).contains(&ms), "{name}: {ms} ms");
}

/// The requests of one session, each with all [`timestamps`]: sends, then reads of memory, of disk
/// with one failure, and of missing data.
trait Session {
    async fn send(&self, fixture: &WorkerFixture, timestamp: i64, sequence: u32);
    async fn memory(&self, timestamp: i64);
    async fn data(&self, timestamp: i64);
    async fn sorted(&self, timestamp: i64);

    async fn run(&self, fixture: &WorkerFixture) {
        for (timestamp, sequence) in timestamps().into_iter().zip(0..) {
            self.send(fixture, timestamp, sequence).await;
            self.memory(timestamp).await;
            self.sorted(timestamp).await;
        }
        fixture.flush().await;
        for timestamp in timestamps() {
            self.data(timestamp).await;
        }
    }
}

struct Grpc<'w>(&'w WorkerFixture, ShuffleKey);

impl Session for Grpc<'_> {
    async fn send(&self, fixture: &WorkerFixture, timestamp: i64, sequence: u32) {
        let batch = [(P, vec![block(0, 1, sequence, BLOCK_BYTES)])];
        let ticket = fixture.ticket(&self.1, send::require_size(&batch).unwrap()).await;
        let mut request = send::request(&self.1, ticket, SendForm::Classic, &batch);
        request.timestamp = timestamp;
        let answer = self.0.client.raw().send_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    }

    async fn memory(&self, timestamp: i64) {
        let request = GetMemoryShuffleDataRequest {
            app_id: APP.into(),
            shuffle_id: 1,
            last_block_id: -1,
            read_buffer_size: 1 << 20,
            timestamp,
            ..Default::default()
        };
        let answer = self.0.client.raw().get_memory_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    }

    async fn data(&self, timestamp: i64) {
        let length = i32::try_from(BLOCK_BYTES).unwrap();
        let request = GetLocalShuffleDataRequest {
            app_id: APP.into(),
            shuffle_id: 1,
            length,
            timestamp,
            ..Default::default()
        };
        let answer = self.0.client.raw().get_local_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    }

    async fn sorted(&self, timestamp: i64) {
        let request = GetSortedShuffleDataRequest { app_id: APP.into(), timestamp, ..Default::default() };
        let answer = self.0.client.raw().get_sorted_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::InternalError);
    }
}

struct Tcp(TcpClient, ShuffleKey);

impl Tcp {
    fn target(&self) -> PartitionTarget<'_> {
        PartitionTarget { request_id: self.0.next_request_id(), app: APP, shuffle: 1, partition: P.0 }
    }
}

impl Session for Tcp {
    async fn send(&self, fixture: &WorkerFixture, timestamp_ms: i64, sequence: u32) {
        let block = block(0, 1, sequence, BLOCK_BYTES);
        let ticket = fixture.ticket(&self.1, i32::try_from(BLOCK_BYTES).unwrap() + 1000).await;
        let request_id = self.0.next_request_id();
        let sent = SendBlock {
            block_id: block.meta.block_id.0,
            crc: i64::from(block.meta.crc),
            task_attempt_id: block.meta.task_attempt_id.0,
            data: block.data.clone(),
            servers: Vec::new(),
            uncompressed_length: i32::try_from(BLOCK_BYTES).unwrap(),
            free_memory: 0,
        };
        let request = SendRequest {
            request_id,
            app: APP.to_owned(),
            shuffle: 1,
            ticket: ticket.0,
            partitions: vec![(P.0, vec![sent])],
            timestamp_ms,
        };
        let mut frame = BytesMut::new();
        request.encode_frame(&mut frame);
        let reply = self.0.exchange(request_id, frame.freeze()).await.unwrap();
        assert_eq!(reply.status, i32::from(StatusCode::Success), "{reply:?}");
    }

    async fn memory(&self, timestamp_ms: i64) {
        let request = MemoryRequest {
            target: self.target(),
            last_block_id: -1,
            read_buffer_size: 1 << 20,
            timestamp_ms,
            task_filter: None,
        };
        self.0.read(&ReadRequest::Memory(request)).await.unwrap();
    }

    async fn data(&self, timestamp_ms: i64) {
        let request = LocalDataRequest {
            target: self.target(),
            placement: Placement { partitions_per_range: 1, partitions: 1 },
            offset: 0,
            length: i32::try_from(BLOCK_BYTES).unwrap(),
            timestamp_ms,
            version: LocalDataVersion::V1,
        };
        let reply = self.0.read(&ReadRequest::LocalData(request)).await.unwrap();
        assert_eq!(reply.body.len(), BLOCK_BYTES as usize);
    }

    async fn sorted(&self, timestamp_ms: i64) {
        let request = SortedRequest { target: self.target(), block_id: -1, length: 1, timestamp_ms };
        let refused: TcpClientError = self.0.read(&ReadRequest::Sorted(request)).await.unwrap_err();
        assert_eq!(refused.status(), Some(StatusCode::InternalError));
    }
}

/// Checks the metrics of the tiers after either session, and unregisters the shuffle.
async fn assert_tiers(fixture: WorkerFixture) {
    let requests = timestamps().len() as f64;
    let sent = requests * f64::from(BLOCK_BYTES);
    assert!(fixture.metric("total_read_time") > 0.0);
    assert!(fixture.metric("total_write_time") > 0.0);
    assert_eq!(fixture.metric("total_write_slow"), 0.0);
    assert_eq!(fixture.metric("total_memory_spill_to_localfile"), sent);
    assert_eq!(fixture.metric("total_memory_spill_in_flushing_operations"), 1.0);
    for now in [
        "read_memory_data_thread_num",
        "read_memory_data_buffer_size",
        "read_local_data_file_thread_num",
        "read_local_data_file_buffer_size",
        "read_local_index_file_thread_num",
        "memory_spill_in_flushing_operations",
        "memory_spill_in_flushing_bytes",
    ] {
        eventually(now, || match fixture.metric(now) {
            0.0 => Ok(()),
            left => Err(left.to_string()),
        })
        .await;
    }
    assert_eq!(fixture.metric("total_delete_data"), 0.0);
    fixture.client.unregister(&key(APP, 1)).await.unwrap();
    eventually("the files are deleted", || {
        let seen = (
            fixture.metric("total_delete_data"),
            histogram(&fixture, "total_remove_resource_by_shuffle_ids_time").0,
            histogram(&fixture, "total_remove_resource_time").0,
        );
        if seen == (sent, 1, 0) { Ok(()) } else { Err(format!("{seen:?}")) }
    })
    .await;
    fixture.client.unregister_app(APP).await.unwrap();
    eventually("the application is removed", || match histogram(&fixture, "total_remove_resource_time").0 {
        1 => Ok(()),
        other => Err(other.to_string()),
    })
    .await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_listener_measures_transport_time() {
    let (fixture, key) = (WorkerFixture::start().await, key(APP, 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    Grpc(&fixture, key).run(&fixture).await;
    let index = GetLocalShuffleIndexRequest { app_id: APP.into(), shuffle_id: 1, ..Default::default() };
    let index = fixture.client.raw().get_local_shuffle_index(index).await.unwrap().into_inner();
    let (records, sent) = (index.index_data.len() / 40, timestamps().len());
    assert_eq!((index.status(), records), (StatusCode::Success, sent));
    assert!(index.storage_ids.is_empty(), "a partition on several disks is one stream to clients");
    let requests = timestamps().len() as u64;
    for (stem, riffle) in [
        ("send_shuffle_data", Some("grpc_send_data")),
        ("get_memory_shuffle_data", Some("grpc_get_memory_data")),
        ("get_local_shuffle_data", Some("grpc_get_localfile_data")),
        ("get_sorted_shuffle_data", None),
    ] {
        assert_on_the_way(&fixture, &format!("grpc_{stem}_transport_latency"), 1000.0);
        let java = format!("grpc_{stem}_process_latency");
        eventually("the calls have ended", || match histogram(&fixture, &java).0 {
            count if count == requests => Ok(()),
            count => Err(format!("{java}: {count}")),
        })
        .await;
        assert_eq!(fixture.metric(&format!("grpc_{stem}_total")), requests as f64);
        assert_eq!(fixture.metric(&format!("grpc_{stem}")), 0.0);
        if let Some(riffle) = riffle {
            assert_on_the_way(&fixture, &format!("{riffle}_transport_time"), 1.0);
            let (count, seconds) = histogram(&fixture, &format!("{riffle}_process_time"));
            assert_eq!(count, requests);
            assert!(
                (seconds * 1000.0 - histogram(&fixture, &java).1).abs() < 1e-6,
                "milliseconds and seconds"
            );
        }
    }
    assert_eq!(histogram(&fixture, "netty_send_shuffle_data_request_transport_latency").0, 0);
    assert_tiers(fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_listener_measures_transport_time() {
    let (fixture, key) = (WorkerFixture::start().await, key(APP, 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let (tcp, driver) = TcpClient::connect(fixture.worker.addresses().tcp.unwrap()).await.unwrap();
    let clients = Tasks::new();
    clients.spawn("tcp client", driver);
    let session = Tcp(tcp, key.clone());
    session.run(&fixture).await;
    session.0.read_index(&key, P).await.unwrap();
    let requests = timestamps().len() as u64;
    for (stem, riffle) in [
        ("send_shuffle_data", Some("urpc_send_data")),
        ("get_memory_shuffle_data", None),
        ("get_local_shuffle_data", Some("urpc_get_localfile_data")),
        ("get_sorted_shuffle_data", None),
        ("get_local_shuffle_index", None),
    ] {
        let of_index = stem.ends_with("index");
        let expected = if of_index { 1 } else { requests };
        let java = format!("netty_{stem}_request_process_latency");
        let now = format!("netty_{stem}_request");
        eventually("all is answered", || match (histogram(&fixture, &java).0, fixture.metric(&now)) {
            (count, 0.0) if count == expected => Ok(()),
            other => Err(format!("{java}: {other:?}")),
        })
        .await;
        assert_eq!(fixture.metric(&format!("netty_{stem}_request_total")), expected as f64);
        let on_the_way = format!("netty_{stem}_request_transport_latency");
        if of_index {
            assert_eq!(histogram(&fixture, &on_the_way).0, 0, "TCP requests have no time of sending");
        } else {
            assert_on_the_way(&fixture, &on_the_way, 1000.0);
        }
        if let Some(riffle) = riffle {
            assert_on_the_way(&fixture, &format!("{riffle}_transport_time"), 1.0);
            let (count, seconds) = histogram(&fixture, &format!("{riffle}_process_time"));
            assert_eq!(count, requests);
            assert!(
                (seconds * 1000.0 - histogram(&fixture, &java).1).abs() < 1e-6,
                "milliseconds and seconds"
            );
        }
    }
    assert_eq!(fixture.metric("urpc_request_number"), 0.0);
    assert_eq!(histogram(&fixture, "grpc_send_shuffle_data_transport_latency").0, 0);
    drop(session);
    clients.drained().await;
    assert_tiers(fixture).await;
}
