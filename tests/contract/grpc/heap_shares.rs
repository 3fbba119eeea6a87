//! Fairness: shares of the heap budget. An application with a full share does not affect others.
//! Its registrations and sends are refused, and reported ids beyond its share move to disk.

use futures::stream::{FuturesUnordered, StreamExt};
use uniffle_base::budget::HeapKind;
use uniffle_client::block::IdLayout;
use uniffle_client::send::{self, SendForm};
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{
    PartitionToBlockIds, ReportShuffleResultRequest, ShufflePartitionRange, ShuffleRegisterRequest,
    StatusCode,
};

use super::blocks::{batch, block, blocks};
use super::fixture::{Setup, WorkerFixture, key};
use super::raw;

const P: PartitionId = PartitionId(0);

async fn small_heap() -> WorkerFixture {
    WorkerFixture::with(Setup { memory: "heap_capacity = \"32MiB\"", ..Setup::default() }).await
}

fn charged_bytes(fixture: &WorkerFixture, kind: HeapKind) -> u64 {
    fixture.memory().heap().of(kind).used()
}

/// Reports ids of a task attempt. Returns status and text.
async fn report(
    fixture: &WorkerFixture,
    key: &ShuffleKey,
    ids: Vec<(i32, Vec<i64>)>,
) -> (StatusCode, String) {
    let partitions = ids.into_iter();
    let request = ReportShuffleResultRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        task_attempt_id: 1,
        bitmap_num: 1,
        partition_to_block_ids: partitions
            .map(|(partition_id, block_ids)| PartitionToBlockIds { partition_id, block_ids })
            .collect(),
        partition_stats: Vec::new(),
    };
    let answer = fixture.client.raw().report_shuffle_result(request).await.unwrap().into_inner();
    (answer.status(), answer.ret_msg)
}

/// Registers a shuffle with `ranges` ranges that cannot be merged. Returns status and text.
async fn register(fixture: &WorkerFixture, key: &ShuffleKey, ranges: i32) -> (StatusCode, String) {
    let request = ShuffleRegisterRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_ranges: (0..ranges).map(|n| ShufflePartitionRange { start: 2 * n, end: 2 * n }).collect(),
        ..ShuffleRegisterRequest::default()
    };
    let answer = fixture.client.raw().register_shuffle(request).await.unwrap().into_inner();
    (answer.status(), answer.ret_msg)
}

/// Registers shuffles until even a small one is refused.
async fn fill_registrations(fixture: &WorkerFixture, app: &str) {
    let mut shuffle = 0;
    for ranges in [20_000, 2_000, 200, 1] {
        let refused = loop {
            shuffle += 1;
            let (status, text) = register(fixture, &key(app, shuffle), ranges).await;
            if status != StatusCode::Success {
                break text;
            }
        };
        assert!(refused.contains("heap is full for registrations"), "{refused}");
        assert!(refused.contains("memory_store.heap_capacity"), "{refused}");
    }
}

/// Returns ids that are far apart.
fn far(ids: std::ops::Range<i64>) -> Vec<i64> {
    ids.map(|id| id.wrapping_mul(0x61c8_8646_80b5_83eb) & i64::MAX).collect()
}

/// Reports ids of twice the heap share of an application. All are accepted.
async fn fill_reported_ids(fixture: &WorkerFixture, key: &ShuffleKey) {
    for partition in 0..20 {
        let first = i64::from(partition) * 100_000;
        let (status, text) = report(fixture, key, vec![(partition, far(first..first + 100_000))]).await;
        assert_eq!(status, StatusCode::Success, "{text}");
        let reported = fixture.memory().heap().of(HeapKind::ReportedIds);
        assert!(
            reported.used() <= reported.capacity(),
            "reported ids take {} bytes of heap",
            reported.used()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_heap_shares_do_not_block_other_applications() {
    let fixture = small_heap().await;
    for app in ["hog-1", "hog-2"] {
        let hog = key(app, 0);
        assert_eq!(register(&fixture, &hog, 1).await.0, StatusCode::Success);
        fill_reported_ids(&fixture, &hog).await;
        fill_registrations(&fixture, app).await;
    }
    for app in ["app-1", "app-2", "app-3"] {
        for shuffle in 0..5 {
            let (key, written) = (key(app, shuffle), blocks(0, 1, 0..100));
            fixture.client.register(&key, &[(0, 99)]).await.unwrap();
            fixture.push(&key, &batch(0, &written)).await;
            let ids = written.iter().map(|block| block.meta.block_id).collect();
            fixture.client.report(&key, TaskAttemptId(1), &[(P, ids)]).await.unwrap();
            let result = fixture.client.results(&key, &[P], Some(IdLayout::SPARK)).await.unwrap();
            assert_eq!(result.cardinality(), 100);
            fixture.assert_reads(&key, 0, &written).await;
        }
        fixture.client.unregister_app(app).await.unwrap();
    }
    // Nothing was revoked from the applications that fill the heap.
    let before = charged_bytes(&fixture, HeapKind::Registrations);
    assert_eq!(
        register(&fixture, &key("hog-2", 1), 1).await.0,
        StatusCode::Success,
        "a known application must be accepted"
    );
    assert_eq!(charged_bytes(&fixture, HeapKind::Registrations), before);
    // The first exceeds its share while there is a second application, and not after that ends.
    fixture.client.unregister(&key("hog-1", 1)).await.unwrap();
    assert_ne!(register(&fixture, &key("hog-1", 1), 5_000).await.0, StatusCode::Success);
    fixture.client.unregister_app("hog-2").await.unwrap();
    assert_eq!(register(&fixture, &key("hog-1", 1), 5_000).await.0, StatusCode::Success);
    fixture.finish().await;
}

/// Each report is charged for sets that the first one creates, until it is entered. Together they
/// exceed the share of an application.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_reports_wait_for_overcharged_heap() {
    let fixture = small_heap().await;
    let key = key("app-1", 0);
    fixture.client.register(&key, &[(0, 39)]).await.unwrap();
    let reports = (0..8).map(|task| {
        let ids = (0..12_000).map(|n| n << 45 | task).collect();
        report(&fixture, &key, vec![(0, ids)])
    });
    for (status, text) in futures::future::join_all(reports).await {
        assert_eq!(status, StatusCode::Success, "{text}");
    }
    assert_eq!(reported_ids(&fixture, &key, 0).await.len(), 96_000);
    fixture.finish().await;
}

/// Opens 80 sends of one-byte blocks without their last bytes, and waits until one is refused.
/// Sends that wait for heap stay open.
async fn hold_unfinished_blocks(fixture: &WorkerFixture, key: &ShuffleKey) -> impl Sized + use<> {
    let written: Vec<_> = (0..1_000).map(|n| block(0, 1, n, 1)).collect();
    let mut calls = FuturesUnordered::new();
    for number in 0..80 {
        let ticket = fixture.ticket(key, 100 << 10).await;
        let mut message = raw::framed(&send::request(key, ticket, SendForm::Classic, &batch(0, &written)));
        message.truncate(message.len() - 1);
        let address = fixture.worker.addresses().grpc;
        calls.push(async move {
            let channel = raw::connect(address).await;
            (number, raw::call(&channel, raw::SEND, vec![message], raw::End::Stalled).await)
        });
    }
    let (_number, refused) = calls.next().await.unwrap();
    let (status, text) = refused.send_status();
    assert_eq!(status, StatusCode::NoBuffer, "{text}");
    assert!(text.contains("heap is full for unfinished_blocks"), "{text}");
    calls
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_sends_leave_heap_for_other_applications() {
    let fixture = small_heap().await;
    let mut held = Vec::new();
    for app in ["hog-1", "hog-2"] {
        let hog = key(app, 0);
        fixture.client.register(&hog, &[(0, 0)]).await.unwrap();
        held.push(hold_unfinished_blocks(&fixture, &hog).await);
    }
    let (key, written) = (key("app-1", 0), (0..2_500).map(|n| block(0, 1, n, 10)).collect::<Vec<_>>());
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.push(&key, &batch(0, &written)).await;
    fixture.assert_reads(&key, 0, &written).await;
    drop(held);
    fixture.finish().await;
}

async fn reported_ids(fixture: &WorkerFixture, key: &ShuffleKey, partition: i32) -> Vec<u64> {
    fixture.client.results(key, &[PartitionId(partition)], None).await.unwrap().to_vec()
}

#[test]
fn report_beyond_heap_is_served_also_after_restart() {
    use super::restarts::{crashed, process};
    let (large, small) = (key("app-1", 1), key("app-1", 2));
    let ids = |partition: i32| far(i64::from(partition) * 3_500..(i64::from(partition) + 1) * 3_500);
    let assert_reported = async |fixture: &WorkerFixture| {
        for partition in 0..40 {
            let mut expected: Vec<u64> = ids(partition).into_iter().map(i64::unsigned_abs).collect();
            expected.sort_unstable();
            assert!(
                reported_ids(fixture, &large, partition).await == expected,
                "wrong ids of partition {partition}"
            );
        }
        assert_eq!(reported_ids(fixture, &small, 0).await, [7]);
    };
    let home = process(async {
        let fixture = small_heap().await;
        for key in [&large, &small] {
            fixture.client.register(key, &[(0, 39)]).await.unwrap();
        }
        // Other applications leave less than the report needs.
        let reported = fixture.memory().heap().of(HeapKind::ReportedIds).clone();
        let others = reported.charge_unchecked(reported.free() - (1 << 20));
        for _retried in 0..2 {
            let whole = (0..40).map(|partition| (partition, ids(partition))).collect();
            let (status, text) = report(&fixture, &large, whole).await;
            assert_eq!(status, StatusCode::Success, "{text}");
        }
        assert_eq!(report(&fixture, &small, vec![(0, vec![7])]).await.0, StatusCode::Success);
        assert!(reported.used() - others.bytes() < 64 << 10, "the reports must be on disk");
        assert_eq!(fixture.worker.service().apps().block_id_count(), 140_001, "a retry must add nothing");
        assert_reported(&fixture).await;
        drop(others);
        crashed(fixture)
    });
    process(async {
        let setup = Setup { memory: "heap_capacity = \"32MiB\"", ..Setup::default() };
        let fixture = WorkerFixture::on(setup, home.0, home.1).await;
        assert_reported(&fixture).await;
        fixture.finish().await;
    });
}
