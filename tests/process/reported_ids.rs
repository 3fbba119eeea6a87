//! One application reports more block ids than its share of the heap. Results are correct and
//! memory is bounded, also after `kill -9` and after an upgrade in place.

use bytes::Bytes;
use tokio::task::block_in_place;
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::clients::client_of;
use uniffle_testkit::say;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::bitmap;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uniffle_worker::proto::{
    GetShuffleResultForMultiPartRequest, GetShuffleResultRequest, PartitionToBlockIds,
    ReportShuffleResultRequest, StatusCode,
};

const CAPACITY_BYTES: u64 = 256_000_000;
const PARTITIONS: i32 = 2000;
const TASKS: i64 = 10;
const SEQUENCES: i64 = 500;
/// Tasks of the shuffle with arbitrary ids.
const FAR_TASKS: i64 = 3;
/// Partitions of one report: 100,000 ids.
const PARTITIONS_REPORTED: i32 = 200;

/// Layout of block ids.
#[derive(Clone, Copy)]
enum Layout {
    /// Spark's: distant sequence numbers; 21, 20 and 22 bits.
    Spark,
    /// Any 63 bits.
    Far,
}

impl Layout {
    fn key(self) -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(self as i32))
    }

    fn tasks(self) -> i64 {
        match self {
            Self::Spark => TASKS,
            Self::Far => FAR_TASKS,
        }
    }

    fn id(self, partition: i32, task: i64, sequence: i64) -> i64 {
        match self {
            Self::Spark => sequence << 42 | i64::from(partition) << 22 | task << 2,
            Self::Far => {
                let number = (i64::from(partition) * TASKS + task) * SEQUENCES + sequence;
                number.wrapping_mul(0x61c8_8646_80b5_83eb) & i64::MAX
            }
        }
    }

    fn ids(self, partition: i32, task: i64) -> Vec<i64> {
        (0..SEQUENCES).map(|sequence| self.id(partition, task, sequence)).collect()
    }

    /// Returns the expected bitmap for some partitions, in Java's serialization.
    fn bitmap(self, partitions: &[i32]) -> Bytes {
        let tasks = |partition: &i32| (0..self.tasks()).map(|task| (*partition, task)).collect::<Vec<_>>();
        let ids = partitions.iter().flat_map(tasks).flat_map(|(partition, task)| self.ids(partition, task));
        bitmap::encode(&ids.map(i64::unsigned_abs).collect())
    }

    async fn report_all(self, client: &ShuffleClient) {
        client.register(&self.key(), &[(0, PARTITIONS - 1)]).await.unwrap();
        for task in 0..self.tasks() {
            for first in (0..PARTITIONS).step_by(PARTITIONS_REPORTED.unsigned_abs() as usize) {
                let partitions = (first..first + PARTITIONS_REPORTED).map(|partition_id| {
                    PartitionToBlockIds { partition_id, block_ids: self.ids(partition_id, task) }
                });
                let request = ReportShuffleResultRequest {
                    app_id: "app-1".to_owned(),
                    shuffle_id: self.key().shuffle.0,
                    task_attempt_id: task,
                    bitmap_num: 1,
                    partition_to_block_ids: partitions.collect(),
                    partition_stats: Vec::new(),
                };
                let answer = client.raw().report_shuffle_result(request).await.unwrap().into_inner();
                assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
            }
        }
    }

    async fn assert_results(self, client: &ShuffleClient) {
        let (app_id, shuffle_id) = ("app-1".to_owned(), self.key().shuffle.0);
        for partition_id in [0, 1, 199, 200, 1234, PARTITIONS - 1] {
            let request = GetShuffleResultRequest {
                app_id: app_id.clone(),
                shuffle_id,
                partition_id,
                block_id_layout: None,
            };
            let answer = client.raw().get_shuffle_result(request).await.unwrap().into_inner();
            assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
            assert!(
                answer.serialized_bitmap == self.bitmap(&[partition_id]),
                "wrong ids of partition {partition_id}"
            );
        }
        let partitions: Vec<i32> = (150..190).collect();
        let request = GetShuffleResultForMultiPartRequest {
            app_id,
            shuffle_id,
            partitions: partitions.clone(),
            block_id_layout: None,
        };
        let answer = client.raw().get_shuffle_result_for_multi_part(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        assert!(answer.serialized_bitmap == self.bitmap(&partitions));
    }
}

async fn assert_all_results(worker: &WorkerProcess, when: &str) {
    let client = client_of(worker).await.with_answer_bytes_max(64 << 20);
    for layout in [Layout::Spark, Layout::Far] {
        layout.assert_results(&client).await;
    }
    let (peak, bound) = (worker.peak_resident_bytes(), CAPACITY_BYTES / 100 * 105 + (200 << 20));
    say(&format!("{when}: largest resident size {} MiB of {}", peak >> 20, bound >> 20));
    assert!(peak <= bound, "{when}: {} MiB are resident, {} MiB are allowed", peak >> 20, bound >> 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_beyond_the_heap_survive_kill_and_upgrade() {
    let setup = Setup { name: "reported_ids", capacity: "256M", disks: 2, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    for layout in [Layout::Spark, Layout::Far] {
        layout.report_all(&client).await;
    }
    drop(client);
    block_in_place(|| worker.wait_log("reported block ids exceed the heap"));
    assert_all_results(&worker, "reported").await;
    block_in_place(|| {
        worker.kill();
        worker.start_again();
    });
    assert_all_results(&worker, "after kill -9").await;
    block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    assert_all_results(&worker, "after an upgrade").await;
    let client = client_of(&worker).await;
    client.unregister_app("app-1").await.unwrap();
    drop(client);
    block_in_place(|| {
        worker.assert_clean();
        worker.stop();
    });
}
