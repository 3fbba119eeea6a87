//! The Rust client over a real HDFS: a reader combines blocks in a worker's memory with its remote
//! files.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use tokio::task::block_in_place;
use uniffle_client::hdfs::Hdfs;
use uniffle_client::{ClientOptions, Cluster, Error, IdLayout, Shuffle, StorageType, TaskFilter};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::{PartitionId, ShuffleId, TaskAttemptId};

use crate::fixture::{open, plain_connector};
use crate::real::{REAL_HDFS_DEADLINE, real};

/// Writes blocks of `length` bytes to each partition as one task. Returns their data.
async fn write(shuffle: &Shuffle, task: i64, partitions: &[i32], (blocks, length): (u32, u32)) -> Vec<Bytes> {
    let generator = BlockGenerator::new(5, IdLayout::SPARK);
    let mut writer = shuffle.writer(TaskAttemptId(task)).unwrap();
    let mut written = Vec::new();
    for partition in partitions.iter().copied().map(PartitionId) {
        for number in 0..blocks {
            let data = generator.block(partition, TaskAttemptId(task), number, length).data;
            writer.write(partition, data.clone()).await.unwrap();
            written.push(data);
        }
    }
    writer.finish().await.unwrap();
    written
}

async fn read(shuffle: &Shuffle, partition: i32, filter: &TaskFilter) -> Result<Vec<Bytes>, Error> {
    let reader = shuffle.reader(PartitionId(partition), filter).await?;
    Ok(reader.read_all().await?.into_iter().map(|block| block.data).collect())
}

fn set<'a>(blocks: impl IntoIterator<Item = &'a Bytes>) -> BTreeSet<Bytes> {
    blocks.into_iter().cloned().collect()
}

fn wait_until_in_hdfs(worker: &WorkerProcess, expected: f64) {
    wait_until("the large partition is in HDFS", REAL_HDFS_DEADLINE, || {
        match worker.metrics().expect("total_memory_spill_to_hdfs") {
            bytes if (bytes - expected).abs() < 0.5 => Ok(()),
            bytes => Err(format!("{bytes} bytes")),
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_combines_memory_and_remote_files() {
    let Some(hdfs) = real().await else { return };
    let root = hdfs.url("/client");
    let made_tables = format!(
        "[embedded_coordinator]\nremote_storage_path = [{root:?}]\n[hdfs_store]\nallowed_paths = [{root:?}]\n\
         [hybrid_store]\nmemory_single_buffer_max_spill_size = \"1MiB\""
    );
    let setup = Setup {
        name: "client",
        capacity: "64MiB",
        disks: 0,
        store_type: "MEMORY_HDFS",
        made_tables,
        ..Setup::default()
    };
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let options = ClientOptions::default().with(|options| {
        options.storage = StorageType::MemoryHdfs;
        options.remote_files = Some(Arc::new(Hdfs::new()));
    });
    let address = format!("127.0.0.1:{}", worker.ready().grpc_port);
    let application = Cluster::new([address], options).unwrap().application("client").await.unwrap();
    let shuffle = application.register_shuffle(ShuffleId(0), 2).await.unwrap();

    // A buffer beyond 1 MiB is flushed; later blocks stay in memory.
    let large = write(&shuffle, 1, &[0], (3, 600_000)).await;
    wait_until_in_hdfs(&worker, 1_800_000.0);
    let small = write(&shuffle, 2, &[0, 1], (1, 1000)).await;
    let all = TaskFilter::all();
    assert_eq!(set(&read(&shuffle, 0, &all).await.unwrap()), set(large.iter().chain(&small[..1])));
    assert_eq!(read(&shuffle, 1, &all).await.unwrap(), small[1..]);

    // Appended to the same files.
    let more = write(&shuffle, 3, &[0], (3, 500_000)).await;
    wait_until_in_hdfs(&worker, 3_301_000.0);
    let everything = set(large.iter().chain(&small[..1]).chain(&more));
    assert_eq!(set(&read(&shuffle, 0, &all).await.unwrap()), everything);

    let fs = open(&*plain_connector(), &root);
    assert!(fs.delete(&format!("/client/{}/0-0", shuffle.key()), true).await.unwrap());
    let error = read(&shuffle, 0, &all).await.unwrap_err();
    assert!(matches!(&error, Error::MissingBlocks { missing, .. } if missing.count == 7), "{error}");
    application.unregister().await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}
