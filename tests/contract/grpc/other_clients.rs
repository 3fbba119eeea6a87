//! Calls of MapReduce's and Tez's clients (docs/protocol.md §2, §3.1). These clients are not
//! published, so the sequences come from Uniffle's sources instead of recordings.

use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{
    AppHeartBeatRequest, FinishShuffleRequest, GetShuffleResultRequest, ShuffleCommitRequest,
    StartSortMergeRequest, StatusCode,
};

use super::fixture::{WorkerFixture, key};

/// The layout of clients that never send one.
const HISTORIC: IdLayout = IdLayout { sequence_bits: 18, partition_bits: 24, task_bits: 21 };
const PARTITIONS: i32 = 4;
const MAPS: i64 = 3;

fn blocks_of(partition: i32, task: i64) -> Vec<Block> {
    let generator = BlockGenerator::new(7, HISTORIC);
    let block = |sequence| generator.block(PartitionId(partition), TaskAttemptId(task), sequence, 700);
    (0..3).map(block).collect()
}

/// Runs a map task: a send for all partitions, a commit if there is no MEMORY, and a report.
async fn map(fixture: &WorkerFixture, key: &ShuffleKey, task: i64, commits: bool) {
    let batch: Vec<_> = (0..PARTITIONS).map(|it| (PartitionId(it), blocks_of(it, task))).collect();
    fixture.push(key, &batch).await;
    if commits {
        let request = ShuffleCommitRequest { app_id: key.app.as_str().to_owned(), shuffle_id: key.shuffle.0 };
        let answer = fixture.client.raw().commit_shuffle_task(request.clone()).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        if i64::from(answer.commit_count) >= MAPS {
            let request = FinishShuffleRequest { app_id: request.app_id, shuffle_id: request.shuffle_id };
            let answer = fixture.client.raw().finish_shuffle(request).await.unwrap().into_inner();
            assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        }
    }
    let ids = |blocks: &[Block]| blocks.iter().map(|block| block.meta.block_id).collect::<Vec<BlockId>>();
    let report: Vec<_> = batch.iter().map(|(partition, blocks)| (*partition, ids(blocks))).collect();
    fixture.client.report(key, TaskAttemptId(task), &report).await.unwrap();
}

/// Runs a reduce task: gets the expected ids without a layout, then reads all blocks.
async fn reduce(fixture: &WorkerFixture, key: &ShuffleKey, partition: i32) {
    let request = GetShuffleResultRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_id: partition,
        block_id_layout: None,
    };
    let answer = fixture.client.raw().get_shuffle_result(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    let expected: Vec<Block> = (0..MAPS).flat_map(|task| blocks_of(partition, task)).collect();
    let result = uniffle_wire::bitmap::decode(&answer.serialized_bitmap).unwrap();
    assert_eq!(result.cardinality(), expected.len() as u64);
    fixture.assert_reads(key, partition, &expected).await;
}

async fn heartbeat(fixture: &WorkerFixture, app: &str) {
    let request = AppHeartBeatRequest { app_id: app.to_owned() };
    let answer = fixture.client.raw().app_heartbeat(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::Success);
}

/// The application master registers shuffle 0 with one range per reducer before any task runs, and
/// unregisters it at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mapreduce_job_runs_with_and_without_memory() {
    for (app, commits) in [("appattempt_1700000000000_0001_000001", false), ("job-2", true)] {
        let (fixture, key) = (WorkerFixture::start().await, key(app, 0));
        let ranges: Vec<(i32, i32)> = (0..PARTITIONS).map(|partition| (partition, partition)).collect();
        fixture.client.register(&key, &ranges).await.unwrap();
        heartbeat(&fixture, app).await;
        for task in 0..MAPS {
            map(&fixture, &key, task, commits).await;
        }
        assert!(!commits || fixture.memory().block_count() == 0, "committed blocks are still in memory");
        for partition in 0..PARTITIONS {
            reduce(&fixture, &key, partition).await;
        }
        fixture.client.unregister(&key).await.unwrap();
        fixture.finish().await;
    }
}

/// Returns the id of an edge of a DAG as Tez's client computes it in 32 bits.
fn edge(dag: i32, up: i32, down: i32) -> ShuffleId {
    ShuffleId(dag.wrapping_mul(1_000_000).wrapping_add(up * 1000).wrapping_add(down))
}

/// Edges of a DAG are concurrent shuffles. The application continues with the next DAG.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tez_session_runs_successive_dags() {
    let fixture = WorkerFixture::start().await;
    let app = "application_1700000000000_0002";
    // The ids of the second and third DAG exceed 31 bits.
    for dag in [1, 2148, 4000] {
        let edges =
            [edge(dag, 0, 1), edge(dag, 1, 2)].map(|id| ShuffleKey::new(AppId::parse(app).unwrap(), id));
        assert!(dag != 2148 || edges[0].shuffle.0 < 0, "{}", edges[0]);
        for key in &edges {
            // Registered once before the partitions are known, then by every task that asks for
            // them.
            fixture.client.register(key, &[]).await.unwrap();
            for _ in 0..2 {
                fixture.client.register(key, &[(0, PARTITIONS - 1)]).await.unwrap();
            }
            for task in 0..MAPS {
                map(&fixture, key, task, false).await;
            }
        }
        heartbeat(&fixture, app).await;
        fixture.flush().await;
        for key in &edges {
            for partition in 0..PARTITIONS {
                reduce(&fixture, key, partition).await;
            }
            fixture.client.unregister(key).await.unwrap();
        }
    }
    fixture.client.unregister_app(app).await.unwrap();
    fixture.finish().await;
}

/// Java's text for remote merge that is on in the client and off in the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_merge_is_refused_with_the_java_text() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 0));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let (app_id, shuffle_id) = ("app-1".to_owned(), 0);
    let start = StartSortMergeRequest { app_id: app_id.clone(), shuffle_id, ..Default::default() };
    let answer = fixture.client.raw().start_sort_merge(start).await.unwrap().into_inner();
    let refused = (answer.status(), answer.ret_msg.as_str());
    assert_eq!(
        refused,
        (StatusCode::InternalError, "Remote merge is disabled, can not report StartSortMerge!")
    );
    fixture.finish().await;
}
