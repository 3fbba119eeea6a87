//! Quotas, mostly over gRPC: excess is refused with the name of the key, existing data stays, and
//! recovered data is never refused.

use std::time::Duration;

use http_body_util::BodyExt;
use uniffle_client::block::Block;
use uniffle_client::send::SendForm;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::app::{QuotaKind, QuotaResource, QuotaSubject};
use uniffle_worker::proto::{
    GetMemoryShuffleDataRequest, ShufflePartitionRange, ShuffleRegisterRequest, StatusCode,
};
use uniffle_worker::service::QuotaConfig;

use super::blocks::{batch, block, blocks};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::raw;

const P: PartitionId = PartitionId(0);

fn with(tables: &str) -> Setup<'_> {
    Setup { tables, ..Setup::default() }
}

async fn register(
    fixture: &WorkerFixture,
    key: &ShuffleKey,
    user: &str,
    partitions: i32,
) -> (StatusCode, String) {
    let request = ShuffleRegisterRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        user: user.to_owned(),
        partition_ranges: vec![ShufflePartitionRange { start: 0, end: partitions - 1 }],
        ..ShuffleRegisterRequest::default()
    };
    let answer = fixture.client.raw().register_shuffle(request).await.unwrap().into_inner();
    (answer.status(), answer.ret_msg)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_are_limited_per_application_and_user() {
    let fixture = WorkerFixture::with(with("[quota]\napp_partitions = 10\nuser_partitions = 15")).await;
    let (a, b, other) = (key("app-a", 1), key("app-b", 1), key("app-c", 1));
    assert_eq!(register(&fixture, &a, "etl", 10).await.0, StatusCode::Success);
    assert_eq!(
        register(&fixture, &a, "etl", 10).await.0,
        StatusCode::Success,
        "registered partitions must not count again"
    );
    let (status, text) = register(&fixture, &key("app-a", 2), "etl", 1).await;
    assert_eq!(status, StatusCode::InternalError);
    assert!(text.contains("quota.app_partitions is 10: 10 in use, 1 more requested"), "{text}");
    let (status, text) = register(&fixture, &b, "etl", 6).await;
    assert!(status == StatusCode::InternalError && text.contains("quota.user_partitions is 15"), "{text}");
    assert!(
        fixture.worker.service().apps().find(&b.app).is_none(),
        "the refused registration left an application"
    );
    assert_eq!(register(&fixture, &other, "anna", 10).await.0, StatusCode::Success);
    assert_eq!(fixture.worker.service().diagnostics.quotas()[0].refused, 1);
    fixture.client.unregister(&a).await.unwrap();
    assert_eq!(register(&fixture, &b, "etl", 10).await.0, StatusCode::Success);
    // A reload takes effect at once and removes nothing.
    let lower = QuotaConfig { app_partitions: 3, ..QuotaConfig::default() };
    fixture.worker.service().lifecycle.set_quotas(&lower);
    assert_eq!(register(&fixture, &b, "etl", 11).await.0, StatusCode::InternalError);
    fixture.worker.service().lifecycle.set_quotas(&QuotaConfig::default());
    assert_eq!(register(&fixture, &b, "etl", 100).await.0, StatusCode::Success);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_ids_are_limited() {
    let fixture = WorkerFixture::with(with("[quota]\napp_reported_ids = 10")).await;
    let key = key("app-1", 1);
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let report = async |task: i64, ids: std::ops::Range<i64>| {
        let ids = ids.map(BlockId).collect();
        fixture.client.report(&key, TaskAttemptId(task), &[(P, ids)]).await
    };
    report(1, 0..8).await.unwrap();
    report(1, 0..8).await.unwrap();
    let refused = report(2, 8..11).await.unwrap_err();
    assert_eq!(refused.status(), Some(StatusCode::InternalError));
    assert!(refused.to_string().contains("quota.app_reported_ids is 10: 8 in use"), "{refused}");
    // Repeated ids count once, as they are stored.
    let repeated: Vec<BlockId> = [8, 9, 8, 9, 8].map(BlockId).to_vec();
    let twice = [(P, repeated.clone()), (P, repeated)];
    fixture.client.report(&key, TaskAttemptId(3), &twice).await.unwrap();
    assert_eq!(fixture.worker.service().diagnostics.quotas()[0].used, 10);
    report(4, 10..11).await.unwrap_err();
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_reports_do_not_exceed_a_quota() {
    let fixture = WorkerFixture::with(with("[quota]\napp_reported_ids = 100")).await;
    let key = key("app-1", 1);
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let report = async |task: i64| {
        let ids = (task * 10..task * 10 + 10).map(BlockId).collect();
        fixture.client.report(&key, TaskAttemptId(task), &[(P, ids)]).await.is_ok()
    };
    let at_once = futures::future::join_all((0..50).map(report)).await;
    // Two concurrent requests for the last capacity may both be refused.
    let taken = at_once.iter().filter(|taken| **taken).count();
    assert!(taken <= 10, "{taken} reports of 10 ids were accepted");
    let mut in_turn = 0;
    for task in 50..100 {
        in_turn += usize::from(report(task).await);
    }
    assert_eq!(taken + in_turn, 10, "{taken} reports were accepted at once");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_quota_refuses_sends_and_flushes_accepted_blocks() {
    let fixture = WorkerFixture::with(with("[quota]\napp_disk = \"1MiB\"")).await;
    let (key, other) = (key("app-1", 1), super::fixture::key("app-2", 1));
    for key in [&key, &other] {
        fixture.client.register(key, &[(0, 0)]).await.unwrap();
    }
    let taken: Vec<Block> = (0..3).map(|n| block(0, 1, n, 400 << 10)).collect();
    for block in &taken {
        fixture.push(&key, &batch(0, std::slice::from_ref(block))).await;
    }
    let (first, second) = (fixture.ticket(&key, 100_000).await, fixture.ticket(&key, 100_000).await);
    fixture.flush().await;
    let small = batch(0, &[block(0, 2, 0, 1000)]);
    let expected = "quota.app_disk is 1048576: ";
    // No ticket is granted, and an earlier ticket allows no send.
    let refused = fixture.client.push(&key, SendForm::Classic, &small).await.unwrap_err();
    assert_eq!(refused.status(), Some(StatusCode::InternalError), "{refused}");
    assert!(refused.to_string().contains(expected), "{refused}");
    let refused = fixture.client.send(&key, first, SendForm::Classic, &small).await.unwrap_err();
    assert!(refused.to_string().contains(expected), "{refused}");
    let tcp = fixture.tcp_client().await;
    let refused = tcp.send(&key, second, &small).await.unwrap_err();
    assert_eq!(refused.status(), Some(StatusCode::InternalError), "{refused}");
    assert!(refused.to_string().contains(expected), "{refused}");
    assert_eq!(fixture.memory().tickets().count(), 0, "tickets were not spent");
    fixture.assert_reads(&key, 0, &taken).await;
    fixture.push(&other, &small).await;
    let explained = fixture.worker.service().diagnostics.explain("app-1").unwrap();
    let quota = &explained.quotas[0];
    assert_eq!((quota.quota, quota.max, quota.refused), ("quota.app_disk", 1 << 20, 3));
    let overhead = quota.used.checked_sub(1_228_800).expect("the quota counts less than the payload");
    assert!((3 * 40..16 << 10).contains(&overhead), "alignment, index and metadata take {overhead} bytes");
    assert!(
        explained.findings.iter().any(|text| text.contains("quota.app_disk")),
        "{:?}",
        explained.findings
    );
    fixture.client.unregister(&key).await.unwrap();
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.push(&key, &small).await;
    drop(tcp);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_beyond_the_quota_get_no_buffer() {
    let fixture = WorkerFixture::with(with("[quota]\napp_open_reads = 1")).await;
    let key = key("app-1", 1);
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let blocks = blocks(0, 1, 0..20);
    fixture.push(&key, &batch(0, &blocks)).await;
    fixture.push(&key, &batch(0, &[block(0, 2, 0, 1 << 20)])).await;
    let request = GetMemoryShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        last_block_id: -1,
        read_buffer_size: i32::MAX,
        ..GetMemoryShuffleDataRequest::default()
    };
    let address = format!("http://{}", fixture.worker.addresses().grpc);
    let endpoint =
        tonic::transport::Endpoint::from_shared(address).unwrap().initial_stream_window_size(65_535);
    let channel = endpoint.initial_connection_window_size(65_535).connect().await.unwrap();
    let path = "/rss.common.ShuffleServer/getMemoryShuffleData";
    let open = raw::open(&channel, path, raw::framed(&request)).await;
    let tcp = fixture.tcp_client().await;
    let over_tcp = tcp.read_memory(&key, P, -1, 1 << 20, None).await.unwrap_err();
    assert_eq!(over_tcp.status(), Some(StatusCode::NoBuffer), "{over_tcp}");
    let over_grpc = fixture.client.raw().get_memory_shuffle_data(request).await.unwrap().into_inner();
    assert_eq!(over_grpc.status(), StatusCode::NoBuffer);
    for text in [over_tcp.to_string(), over_grpc.ret_msg] {
        assert!(text.contains("quota.app_open_reads is 1: 1 in use, 1 more requested"), "{text}");
    }
    let answer = open.collect().await.unwrap().to_bytes();
    assert!(answer.len() > 1 << 20);
    let usage = fixture.worker.service().apps().find(&key.app).unwrap();
    let open_reads = QuotaKind { subject: QuotaSubject::App, resource: QuotaResource::OpenReads };
    eventually("the read has ended", || match usage.usage.used(open_reads) {
        0 => Ok(()),
        open => Err(format!("{open} are open")),
    })
    .await;
    tcp.read_memory(&key, P, -1, 1 << 20, None).await.unwrap();
    drop((tcp, usage));
    fixture.finish().await;
}

#[test]
fn recovered_state_is_accepted_and_counts() {
    let key = key("app-1", 1);
    let all = blocks(0, 1, 0..20);
    let process =
        |life: futures::future::BoxFuture<'_, Option<(tempfile::TempDir, Vec<std::path::PathBuf>)>>| {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let storage = runtime.block_on(life);
            runtime.shutdown_timeout(Duration::from_secs(20));
            storage
        };
    let storage = process(Box::pin(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(&key, &[(0, 99)]).await.unwrap();
        fixture.push(&key, &batch(0, &all)).await;
        let ids = all.iter().map(|block| block.meta.block_id).collect();
        fixture.flush().await;
        fixture.client.report(&key, TaskAttemptId(1), &[(P, ids)]).await.unwrap();
        let WorkerFixture { worker, client, dir, disks } = fixture;
        drop((worker, client));
        Some((dir, disks))
    }));
    let (dir, disks) = storage.unwrap();
    process(Box::pin(async {
        let tables = "[quota]\napp_partitions = 1\napp_reported_ids = 1\napp_disk = 1";
        let fixture = WorkerFixture::on(with(tables), dir, disks).await;
        fixture.assert_reads(&key, 0, &all).await;
        let bytes: u64 = all.iter().map(|block| u64::from(block.meta.length)).sum();
        let used: Vec<_> =
            fixture.worker.service().diagnostics.quotas().iter().map(|quota| quota.used).collect();
        assert_eq!(used[1..], [20, 100]);
        let overhead = used[0].checked_sub(bytes).expect("the quota counts less than the payload");
        assert!(
            (20 * 40..64 << 10).contains(&overhead),
            "alignment, index and metadata take {overhead} bytes"
        );
        assert_eq!(fixture.client.results(&key, &[P], None).await.unwrap().cardinality(), 20);
        let refused = fixture.client.push(&key, SendForm::Classic, &batch(0, &all)).await.unwrap_err();
        assert!(refused.to_string().contains("quota.app_disk is 1"), "{refused}");
        fixture.finish().await;
        None
    }));
}
