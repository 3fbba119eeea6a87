//! Reported block ids and the results for reducers: docs/protocol.md §2.8, §2.9.

use bytes::Bytes;
use uniffle_client::block::IdLayout;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{
    BlockIdLayout, GetShuffleResultForMultiPartRequest, GetShuffleResultRequest, PartitionStats,
    PartitionToBlockIds, ReportShuffleResultRequest, ShuffleUnregisterByAppIdRequest, StatusCode,
    TaskAttemptIdToRecords,
};

use super::fixture::{WorkerFixture, key};

const HISTORIC: BlockIdLayout =
    BlockIdLayout { sequence_no_bits: 18, partition_id_bits: 24, task_attempt_id_bits: 21 };

const NOT_REGISTERED: &str = "shuffle app-1/1 is not registered";

fn report(key: &ShuffleKey, partitions: &[(i32, Vec<i64>)]) -> ReportShuffleResultRequest {
    ReportShuffleResultRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        task_attempt_id: 3,
        bitmap_num: 1,
        partition_to_block_ids: partitions
            .iter()
            .map(|(partition_id, block_ids)| PartitionToBlockIds {
                partition_id: *partition_id,
                block_ids: block_ids.clone(),
            })
            .collect(),
        partition_stats: Vec::new(),
    }
}

async fn reported(fixture: &WorkerFixture, request: ReportShuffleResultRequest) -> (StatusCode, String) {
    let answer = fixture.client.raw().report_shuffle_result(request).await.unwrap().into_inner();
    (answer.status(), answer.ret_msg)
}

async fn result_bytes(
    fixture: &WorkerFixture,
    key: &ShuffleKey,
    partitions: &[i32],
    layout: Option<BlockIdLayout>,
) -> (StatusCode, Bytes) {
    let request = GetShuffleResultForMultiPartRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partitions: partitions.to_vec(),
        block_id_layout: layout,
    };
    let answer = fixture.client.raw().get_shuffle_result_for_multi_part(request).await.unwrap().into_inner();
    (answer.status(), answer.serialized_bitmap)
}

/// Returns record numbers of a partition by task attempt.
pub(crate) fn stats(partition_id: i32, tasks: &[(i64, i64)]) -> PartitionStats {
    let task =
        |&(task_attempt_id, record_number): &_| TaskAttemptIdToRecords { task_attempt_id, record_number };
    PartitionStats { partition_id, task_attempt_id_to_records: tasks.iter().map(task).collect() }
}

/// Returns the record numbers in the result of `partitions`.
pub(crate) async fn reported_stats(
    fixture: &WorkerFixture,
    key: &ShuffleKey,
    partitions: &[i32],
) -> Vec<PartitionStats> {
    let request = GetShuffleResultForMultiPartRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partitions: partitions.to_vec(),
        block_id_layout: Some(HISTORIC),
    };
    let answer = fixture.client.raw().get_shuffle_result_for_multi_part(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    answer.partition_stats
}

/// Reports one block of partition 0 with these record numbers.
pub(crate) async fn report_stats(
    fixture: &WorkerFixture,
    key: &ShuffleKey,
    task: i64,
    partition_stats: Vec<PartitionStats>,
) {
    let request = ReportShuffleResultRequest {
        task_attempt_id: task,
        partition_stats,
        ..report(key, &[(0, vec![task])])
    };
    assert_eq!(reported(fixture, request).await.0, StatusCode::Success);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn multi_partition_result_contains_record_numbers() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 9)]).await.unwrap();
    assert_eq!(reported_stats(&fixture, &key, &[0, 1]).await, []);
    // The second report is a retry. The last has new numbers for a known block.
    for _ in 0..2 {
        report_stats(&fixture, &key, 7, vec![stats(0, &[(7, 100)]), stats(1, &[(7, 0)])]).await;
    }
    report_stats(&fixture, &key, 3, vec![stats(0, &[(3, i64::MAX)])]).await;
    report_stats(&fixture, &key, 3, vec![stats(2, &[(3, 5)])]).await;
    let of_0 = stats(0, &[(3, i64::MAX), (7, 100)]);
    assert_eq!(reported_stats(&fixture, &key, &[0]).await, std::slice::from_ref(&of_0));
    assert_eq!(
        reported_stats(&fixture, &key, &[2, 0, 1, 0, 5]).await,
        [of_0, stats(1, &[(7, 0)]), stats(2, &[(3, 5)])]
    );
    fixture.finish().await;
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter_map(|c| c.to_digit(16)).map(|d| u8::try_from(d).unwrap()).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// An empty success would look like a shuffle without blocks, and readers would not fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_of_purged_shuffle_stay_refused() {
    let (fixture, gone, new) = (WorkerFixture::start().await, key("app-1", 1), key("app-1", 2));
    fixture.client.register(&gone, &[(0, 9)]).await.unwrap();
    assert_eq!(reported(&fixture, report(&gone, &[(0, vec![7])])).await.0, StatusCode::Success);
    let whole = ShuffleUnregisterByAppIdRequest { app_id: gone.app.as_str().to_owned() };
    fixture.client.raw().unregister_shuffle_by_app_id(whole).await.unwrap();
    fixture.client.register(&new, &[(0, 9)]).await.unwrap();
    let one = GetShuffleResultRequest {
        app_id: gone.app.as_str().to_owned(),
        shuffle_id: gone.shuffle.0,
        partition_id: 0,
        block_id_layout: Some(HISTORIC),
    };
    let answer = fixture.client.raw().get_shuffle_result(one).await.unwrap().into_inner();
    assert_eq!((answer.status(), answer.ret_msg.as_str()), (StatusCode::NoRegister, NOT_REGISTERED));
    assert_eq!(result_bytes(&fixture, &gone, &[0], Some(HISTORIC)).await.0, StatusCode::NoRegister);
    assert_eq!(
        result_bytes(&fixture, &new, &[0], Some(HISTORIC)).await.0,
        StatusCode::Success,
        "the result of a shuffle without reports must succeed"
    );
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_equal_the_java_bytes() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 5000)]).await.unwrap();
    let success = |bytes: &str| (StatusCode::Success, Bytes::from(hex(bytes)));
    let nothing = success("00 00000000");
    assert_eq!(
        result_bytes(&fixture, &key, &[0, 1], Some(HISTORIC)).await,
        nothing,
        "the result before any report must be empty"
    );

    let high = (1_i64 << 33) + 7;
    let ids = [(0, vec![1, 2]), (1, vec![5 + (1 << 21)]), (4096, vec![high])];
    assert_eq!(reported(&fixture, report(&key, &ids)).await.0, StatusCode::Success);
    let one_and_two = success("00 00000001 00000000 3a30000001000000000001001000000001000200");
    assert_eq!(result_bytes(&fixture, &key, &[0], Some(HISTORIC)).await, one_and_two);
    assert_eq!(
        result_bytes(&fixture, &key, &[7], Some(HISTORIC)).await,
        nothing,
        "the result of a partition without blocks must be empty"
    );

    let single = GetShuffleResultRequest {
        app_id: "app-1".to_owned(),
        shuffle_id: 1,
        partition_id: 0,
        block_id_layout: Some(HISTORIC),
    };
    let answer = fixture.client.raw().get_shuffle_result(single).await.unwrap().into_inner();
    assert_eq!((answer.status(), answer.serialized_bitmap), one_and_two);
    assert_eq!(answer.ret_msg, "OK");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_beyond_32_bits_equal_the_java_bytes() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 5000)]).await.unwrap();
    let ids = [(0, vec![5]), (4096, vec![(1 << 33) + 7])];
    assert_eq!(reported(&fixture, report(&key, &ids)).await.0, StatusCode::Success);
    let expected = hex("00 00000002 00000000 3a3000000100000000000000100000000500 \
         00000002 3a3000000100000000000000100000000700");
    let result = result_bytes(&fixture, &key, &[4096, 0], Some(HISTORIC)).await;
    assert_eq!(result, (StatusCode::Success, expected.into()));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_contain_exactly_the_requested_partitions() {
    let fixture = WorkerFixture::start().await;
    let layouts = [
        (1, None, IdLayout::HISTORIC),
        (2, Some(IdLayout::SPARK), IdLayout::SPARK),
        (3, Some(IdLayout::HISTORIC), IdLayout::HISTORIC),
        (
            4,
            Some(IdLayout { sequence_bits: 31, partition_bits: 6, task_bits: 26 }),
            IdLayout { sequence_bits: 31, partition_bits: 6, task_bits: 26 },
        ),
    ];
    for (shuffle, asked, layout) in layouts {
        let key = key("app-1", shuffle);
        fixture.client.register(&key, &[(0, 9)]).await.unwrap();
        let id =
            |p: i32, n: u32| layout.block_id(n, PartitionId(p), TaskAttemptId(i64::from(n) + 1)).unwrap();
        let ids = |p: i32| (0..20).map(|n| id(p, n)).collect::<Vec<BlockId>>();
        let all: Vec<_> = (0..10).map(|p| (PartitionId(p), ids(p))).collect();
        // A repeated report changes nothing.
        for _ in 0..2 {
            fixture.client.report(&key, TaskAttemptId(1), &all).await.unwrap();
        }
        let set = fixture.client.results(&key, &[PartitionId(3), PartitionId(8)], asked).await.unwrap();
        let mut expected: Vec<u64> =
            [3, 8].into_iter().flat_map(ids).map(|id| id.0.cast_unsigned()).collect();
        expected.sort_unstable();
        assert_eq!(set.iter().collect::<Vec<u64>>(), expected, "{layout:?}");
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_layouts_are_refused() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let status_of = async |widths| {
        let (sequence_no_bits, partition_id_bits, task_attempt_id_bits) = widths;
        let layout = BlockIdLayout { sequence_no_bits, partition_id_bits, task_attempt_id_bits };
        result_bytes(&fixture, &key, &[0], Some(layout)).await.0
    };
    for widths in [(0, 32, 31), (32, 10, 21), (-1, 32, 32), (18, 24, 20), (i32::MAX, i32::MAX, 65)] {
        assert_eq!(status_of(widths).await, StatusCode::InvalidRequest, "{widths:?}");
    }
    assert_eq!(status_of((31, 1, 31)).await, StatusCode::Success, "the widest fields must be accepted");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_report_stores_nothing() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let good = report(&key, &[(0, vec![1])]);
    assert_eq!(reported(&fixture, good).await, (StatusCode::Success, "OK".to_owned()));
    let mut other_bitmaps = report(&key, &[(0, vec![2])]);
    other_bitmaps.bitmap_num = 2;
    assert_eq!(reported(&fixture, other_bitmaps).await.0, StatusCode::InternalError);
    let mut no_bitmaps = report(&key, &[(0, vec![2])]);
    no_bitmaps.bitmap_num = -1;
    assert_eq!(reported(&fixture, no_bitmaps).await.0, StatusCode::InvalidRequest);
    let negative = report(&key, &[(0, vec![2]), (1, vec![3, -1])]);
    assert_ne!(reported(&fixture, negative).await.0, StatusCode::Success);

    let set = fixture.client.results(&key, &[PartitionId(0), PartitionId(1)], None).await.unwrap();
    assert_eq!(set.iter().collect::<Vec<u64>>(), [1]);
    fixture.finish().await;
}

/// Java only checks the application. Here the blocks were refused, so accepted ids would be results
/// without blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_of_unregistered_shuffle_is_refused() {
    let (fixture, known) = (WorkerFixture::start().await, key("app-1", 99));
    fixture.client.register(&known, &[(0, 0)]).await.unwrap();
    let unknown = key("app-1", 1);
    let (status, text) = reported(&fixture, report(&unknown, &[(0, vec![2])])).await;
    assert_eq!((status, text.as_str()), (StatusCode::NoRegister, "shuffle 1 is not registered"));
    // The refused id is also absent after the shuffle is registered.
    fixture.client.register(&unknown, &[(0, 0)]).await.unwrap();
    let set = fixture.client.results(&unknown, &[PartitionId(0)], None).await.unwrap();
    assert!(set.is_empty());
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_results_never_contain_partial_reports() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let layout = IdLayout::SPARK;
    let writer = |task: i64| {
        let (client, key) = (fixture.client.clone(), key.clone());
        async move {
            let id = |n| layout.block_id(n, PartitionId(0), TaskAttemptId(task)).unwrap();
            let ids: Vec<BlockId> = (0..1000).map(id).collect();
            client.report(&key, TaskAttemptId(task), &[(PartitionId(0), ids)]).await.unwrap();
        }
    };
    let reader = async {
        for _ in 0..50 {
            let set = fixture.client.results(&key, &[PartitionId(0)], Some(layout)).await.unwrap();
            assert_eq!(set.cardinality() % 1000, 0);
        }
    };
    tokio::join!(reader, futures::future::join_all((0..20).map(writer)));
    let set = fixture.client.results(&key, &[PartitionId(0)], Some(layout)).await.unwrap();
    assert_eq!(set.cardinality(), 20_000);
    fixture.finish().await;
}
