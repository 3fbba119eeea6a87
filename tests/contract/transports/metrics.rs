//! Metrics of the listeners and tiers after the same session over gRPC and TCP, named as in the
//! Java server (docs/protocol.md §10.2, §10.3).

use std::time::{SystemTime, UNIX_EPOCH};

use uniffle_client::send::{self, SendForm};
use uniffle_wire::request::{LocalDataRequest, MemoryRequest, ReadRequest, SortedRequest};
use uniffle_wire::types::ShuffleKey;
use uniffle_worker::proto::StatusCode;

use super::client::{DataClient, Transport, refused, successful};
use crate::grpc::blocks::{batch, block};
use crate::grpc::fixture::{Setup, WorkerFixture, eventually, key};

const APP: &str = "app-1";
const BLOCK_BYTES: u32 = 1000;
/// Transport time that the requests declare.
const ON_THE_WAY_MS: i64 = 5_000;

fn now_ms() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// Returns timestamps of which only the first is usable. The others are absent, ahead or far
/// behind.
fn timestamps() -> [i64; 7] {
    let now = now_ms();
    [now - ON_THE_WAY_MS, 0, -1, now + 3_600_000, i64::MAX, i64::MIN, 1]
}

/// Returns count and sum of a histogram.
fn histogram(fixture: &WorkerFixture, name: &str) -> (u64, f64) {
    let families = fixture.worker.registry().gather();
    let family = families.iter().find(|family| family.name() == name);
    let family = family.unwrap_or_else(|| panic!("metric {name} does not exist"));
    let [metric] = family.get_metric() else { panic!("{name} has labels") };
    let histogram = metric.get_histogram();
    (histogram.get_sample_count(), histogram.get_sample_sum())
}

/// Asserts that one transport time was observed: the declared one, plus the real one.
fn assert_on_the_way(fixture: &WorkerFixture, name: &str, in_a_second: f64) {
    let (count, sum) = histogram(fixture, name);
    assert_eq!(count, 1, "{name}");
    let ms = sum * 1000.0 / in_a_second;
    assert!((5_000.0..3_600_000.0).contains(&ms), "{name} is {ms} ms");
}

/// Runs a session, in which each request is sent with all [`timestamps`]: sends and reads of memory
/// that succeed, sorted reads that are refused, and reads of disk.
async fn run_session(fixture: &WorkerFixture, client: &DataClient, key: &ShuffleKey) {
    for (timestamp_ms, sequence) in timestamps().into_iter().zip(0..) {
        let batch = batch(0, &[block(0, 1, sequence, BLOCK_BYTES)]);
        let ticket = fixture.client.require_buffer(key, &batch).await.unwrap();
        let mut send = send::request(key, ticket, SendForm::Classic, &batch);
        send.timestamp = timestamp_ms;
        successful(client.send_request(send).await);
        let memory = MemoryRequest { timestamp_ms, ..client.memory_request(key, 0) };
        let reply = successful(client.read(ReadRequest::Memory(memory)).await);
        assert_eq!(reply.body.len(), (sequence + 1) as usize * BLOCK_BYTES as usize);
        let sorted = SortedRequest { target: client.target(key, 0), block_id: -1, length: 1, timestamp_ms };
        refused(client.read(ReadRequest::Sorted(sorted)).await, StatusCode::InternalError);
    }
    fixture.flush().await;
    let length = i32::try_from(BLOCK_BYTES).unwrap();
    for timestamp_ms in timestamps() {
        let data = LocalDataRequest { timestamp_ms, ..client.data_request(key, 0, length) };
        let reply = successful(client.read(ReadRequest::LocalData(data)).await);
        assert_eq!(reply.body.len(), BLOCK_BYTES as usize);
    }
    let index = client.read_index(key, 0).await;
    assert_eq!(index.records.len(), timestamps().len());
    assert!(index.storage_ids.is_empty(), "a partition on several disks must be one stream to clients");
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
            remaining => Err(remaining.to_string()),
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
    let (fixture, client, key) = Transport::Grpc.start(Setup::default(), &[(0, 0)]).await;
    run_session(&fixture, &client, &key).await;
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
                "milliseconds and seconds disagree"
            );
        }
    }
    assert_eq!(histogram(&fixture, "netty_send_shuffle_data_request_transport_latency").0, 0);
    drop(client);
    assert_tiers(fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_listener_measures_transport_time() {
    let (fixture, client, key) = Transport::Tcp.start(Setup::default(), &[(0, 0)]).await;
    run_session(&fixture, &client, &key).await;
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
            assert_eq!(histogram(&fixture, &on_the_way).0, 0, "index requests over TCP have no timestamp");
        } else {
            assert_on_the_way(&fixture, &on_the_way, 1000.0);
        }
        if let Some(riffle) = riffle {
            assert_on_the_way(&fixture, &format!("{riffle}_transport_time"), 1.0);
            let (count, seconds) = histogram(&fixture, &format!("{riffle}_process_time"));
            assert_eq!(count, requests);
            assert!(
                (seconds * 1000.0 - histogram(&fixture, &java).1).abs() < 1e-6,
                "milliseconds and seconds disagree"
            );
        }
    }
    assert_eq!(fixture.metric("urpc_request_number"), 0.0);
    assert_eq!(histogram(&fixture, "grpc_send_shuffle_data_transport_latency").0, 0);
    drop(client);
    assert_tiers(fixture).await;
}
