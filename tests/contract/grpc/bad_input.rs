//! Well-formed requests with invalid, extreme or default values, which must do no harm
//! (docs/architecture.md §6 item 3). Unusual but valid application ids are accepted.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use uniffle_client::grpc::{ClientError, ShuffleClient};
use uniffle_wire::types::PartitionId;
use uniffle_worker::proto::{
    AppHeartBeatRequest, GetLocalShuffleDataRequest, GetLocalShuffleIndexRequest,
    GetMemoryShuffleDataRequest, GetShuffleResultRequest, ReportShuffleResultRequest, RequireBufferRequest,
    SendShuffleDataRequest, ShufflePartitionRange, ShuffleRegisterRequest, ShuffleUnregisterByAppIdRequest,
    ShuffleUnregisterRequest, StatusCode,
};

use super::blocks::{batch, blocks};
use super::fixture::{WorkerFixture, key};

/// Returns every path below `dir`.
fn tree(dir: &Path) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                open.push(entry.path());
            }
            all.insert(entry.path());
        }
    }
    all
}

/// Makes calls for `app` with few other fields. Returns the name and status of each. Commits and
/// remote merge are not among them.
async fn calls_for(client: &ShuffleClient, app: &str) -> Vec<(&'static str, StatusCode)> {
    let app = || app.to_owned();
    let mut raw = client.raw();
    let mut statuses = Vec::new();
    let range = ShufflePartitionRange { start: 0, end: 3 };
    macro_rules! call {
        ($rpc:ident, $request:expr) => {{
            let answer = raw.$rpc($request).await.unwrap().into_inner();
            statuses.push((stringify!($rpc), answer.status()));
        }};
    }
    call!(
        register_shuffle,
        ShuffleRegisterRequest { app_id: app(), partition_ranges: vec![range], ..Default::default() }
    );
    call!(require_buffer, RequireBufferRequest { app_id: app(), require_size: 100, ..Default::default() });
    call!(
        send_shuffle_data,
        SendShuffleDataRequest { app_id: app(), require_buffer_id: 1, ..Default::default() }
    );
    call!(
        report_shuffle_result,
        ReportShuffleResultRequest { app_id: app(), bitmap_num: 1, ..Default::default() }
    );
    call!(get_shuffle_result, GetShuffleResultRequest { app_id: app(), ..Default::default() });
    call!(
        get_memory_shuffle_data,
        GetMemoryShuffleDataRequest { app_id: app(), last_block_id: -1, ..Default::default() }
    );
    call!(get_local_shuffle_index, GetLocalShuffleIndexRequest { app_id: app(), ..Default::default() });
    call!(
        get_local_shuffle_data,
        GetLocalShuffleDataRequest { app_id: app(), length: 1, ..Default::default() }
    );
    call!(unregister_shuffle, ShuffleUnregisterRequest { app_id: app(), ..Default::default() });
    call!(unregister_shuffle_by_app_id, ShuffleUnregisterByAppIdRequest { app_id: app() });
    call!(app_heartbeat, AppHeartBeatRequest { app_id: app() });
    statuses
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_app_ids_never_reach_the_file_system() {
    let fixture = WorkerFixture::start().await;
    let above = fixture.dir.path();
    let before = tree(above);
    let long = "x".repeat(5000);
    let absolute = above.join("x").display().to_string();
    let bad = [
        // Paths that leave the data directories would appear in `above`, their parent.
        &absolute,
        "../../x",
        "../../../x",
        "",
        ".",
        "..",
        "../x",
        "../../../../tmp/x",
        "/x",
        "/",
        "a/b",
        "a/../../x",
        "a\\b",
        "a\0b",
        "\0",
        "a\nb",
        ".claim",
        &long,
    ];
    for app in bad {
        for (rpc, status) in calls_for(&fixture.client, app).await {
            let expected = match rpc {
                "register_shuffle" => matches!(status, StatusCode::InvalidRequest),
                "send_shuffle_data" => matches!(status, StatusCode::NoRegister | StatusCode::InternalError),
                _ => matches!(status, StatusCode::NoRegister),
            };
            assert!(expected, "{rpc} of {app:.20?} returned {status:?}");
        }
    }
    assert_eq!(tree(above), before);
    assert_eq!(fixture.worker.service().apps().app_count(), 0);
    fixture.client.register(&key("x", 0), &[(0, 0)]).await.unwrap();
    fixture.push(&key("x", 0), &super::blocks::batch(0, &super::blocks::blocks(0, 1, 0..2))).await;
    fixture.flush().await;
    assert_ne!(tree(above), before, "a valid application must leave files here, or the test checks nothing");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusual_app_ids_are_accepted() {
    let fixture = WorkerFixture::start().await;
    let longest = "y".repeat(200);
    for app in
        ["a b", "ä-ö_😀", "apps", "trash", "uniffle-worker.claim", "-rf", "~", "%2e%2e%2fx", "*", &longest]
    {
        let key = key(app, 1);
        fixture.client.register(&key, &[(0, 0)]).await.unwrap();
        fixture.push(&key, &batch(0, &blocks(0, 1, 0..3))).await;
        fixture.flush().await;
        fixture.assert_reads(&key, 0, &blocks(0, 1, 0..3)).await;
        fixture.client.unregister_app(app).await.unwrap();
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_with_extreme_ids_and_sizes_succeed() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..5);
    fixture.push(&key, &batch(0, &all)).await;
    let mut raw = fixture.client.raw();
    let request = GetMemoryShuffleDataRequest {
        app_id: "app-1".to_owned(),
        shuffle_id: 1,
        last_block_id: -1,
        read_buffer_size: -1,
        ..Default::default()
    };
    for read_buffer_size in [-1, i32::MIN] {
        let request = GetMemoryShuffleDataRequest { read_buffer_size, ..request.clone() };
        let answer = raw.get_memory_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!(answer.shuffle_data_block_segments.len(), 1, "expected one block");
    }
    for last_block_id in [-2, i64::MIN, i64::MAX] {
        let request = GetMemoryShuffleDataRequest { last_block_id, ..request.clone() };
        let answer = raw.get_memory_shuffle_data(request).await.unwrap().into_inner();
        let first = answer.shuffle_data_block_segments.first().map(|segment| segment.block_id);
        assert_eq!(first, Some(all[0].meta.block_id.0), "an unknown cursor must start at the head");
    }
    for partition_id in [-1, i32::MIN, i32::MAX] {
        let request = GetMemoryShuffleDataRequest { partition_id, ..request.clone() };
        let answer = raw.get_memory_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!((answer.status(), answer.data.len()), (StatusCode::Success, 0));
        let index = fixture.client.read_index(&key, PartitionId(partition_id)).await.unwrap();
        assert!(index.records.is_empty());
    }
    for shuffle_id in [-1, i32::MIN] {
        let request = GetMemoryShuffleDataRequest { shuffle_id, ..request.clone() };
        let answer = raw.get_memory_shuffle_data(request).await.unwrap().into_inner();
        assert_eq!(
            (answer.status(), answer.data.len()),
            (StatusCode::Success, 0),
            "the response must be that of an unknown shuffle"
        );
    }
    drop(raw);
    fixture.finish().await;
}

/// No call may panic, even with an empty request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_default_fields_are_answered() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    for (rpc, status) in calls_for(&fixture.client, "").await {
        assert_ne!(status, StatusCode::Success, "{rpc}");
    }
    // Shuffle 0 of a known application, which only has shuffle 1.
    let statuses = calls_for(&fixture.client, "app-1").await;
    let expected = [
        ("register_shuffle", StatusCode::Success),
        ("require_buffer", StatusCode::Success),
        ("send_shuffle_data", StatusCode::InternalError),
        ("report_shuffle_result", StatusCode::Success),
        ("get_shuffle_result", StatusCode::Success),
        ("get_memory_shuffle_data", StatusCode::Success),
        ("get_local_shuffle_index", StatusCode::Success),
        ("get_local_shuffle_data", StatusCode::InternalError),
        ("unregister_shuffle", StatusCode::Success),
        ("unregister_shuffle_by_app_id", StatusCode::Success),
        ("app_heartbeat", StatusCode::NoRegister),
    ];
    assert_eq!(statuses, expected);
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    fixture.push(&key, &batch(0, &blocks(0, 1, 0..5))).await;
    fixture.assert_reads(&key, 0, &blocks(0, 1, 0..5)).await;
    let wrong: Result<(), ClientError> = fixture.client.heartbeat("app-").await;
    assert_eq!(wrong.unwrap_err().status(), Some(StatusCode::NoRegister));
    fixture.finish().await;
}
