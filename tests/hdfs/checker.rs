//! The checker of killed and stopped workers, over disks and a real HDFS. During the writes of most
//! rounds the DataNode is stopped, or the NameNode is restarted or put into safe mode. The worker
//! is killed as well, or keeps running. In rounds without a fault of HDFS it is killed, stopped or
//! upgraded.
//!
//! `PROCESS_ROUNDS` sets the number of rounds, `PROCESS_SEED` repeats a run.

use std::sync::Arc;

use futures::FutureExt as _;
use parking_lot::Mutex;
use rand::seq::SliceRandom as _;
use tokio::sync::MutexGuard;
use tokio::task::block_in_place;
use uniffle_wire::types::{BlockId, ShuffleKey};
use uniffle_worker::proto::RemoteStorage;
use uniffle_worker::remote::hdfs::RemoteFs;

use crate::fixture::{open, plain_connector};
use crate::reader::try_read_directory;
use crate::real::real;
use uniffle_testkit::checker::{Checker, RemoteRead, RemoteReads, RoundEnd, run_of};
use uniffle_testkit::clients::client_of;
use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const ROUNDS: u64 = PLAN.len() as u64;

/// Faults of HDFS and ends of the process, in random order.
const PLAN: [(Fault, RoundEnd); 9] = [
    (Fault::DataNode, RoundEnd::Kill),
    (Fault::DataNode, RoundEnd::Nothing),
    (Fault::NameNode, RoundEnd::Kill),
    (Fault::NameNode, RoundEnd::Nothing),
    (Fault::SafeMode, RoundEnd::Kill),
    (Fault::SafeMode, RoundEnd::Nothing),
    (Fault::None, RoundEnd::Kill),
    (Fault::None, RoundEnd::Stop),
    (Fault::None, RoundEnd::Upgrade),
];

/// Fault of HDFS in a round.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    DataNode,
    NameNode,
    SafeMode,
}

#[derive(Debug)]
struct Hdfs {
    servers: MutexGuard<'static, MiniHdfs>,
    fs: Arc<dyn RemoteFs>,
    fault: Mutex<Fault>,
}

impl Hdfs {
    fn run(&self, command: &str) {
        drop(self.servers.run(command));
    }
}

impl RemoteReads for Hdfs {
    fn storage(&self) -> RemoteStorage {
        RemoteStorage { path: self.servers.url("/checker"), ..RemoteStorage::default() }
    }

    fn read<'a>(&'a self, key: &'a ShuffleKey, partition: i32) -> RemoteRead<'a> {
        async move {
            let directory = format!("/checker/{key}/{partition}-{partition}");
            let read = try_read_directory(&*self.fs, &directory, "127.0.0.1-").await;
            let blocks = read.map_err(|error| error.to_string())?;
            Ok(blocks.into_iter().map(|(id, data)| (BlockId(id), data)).collect())
        }
        .boxed()
    }

    fn disturb(&self) {
        match *self.fault.lock() {
            Fault::None => {}
            Fault::DataNode => self.run("stop-datanode"),
            Fault::NameNode => self.run("stop-namenode"),
            Fault::SafeMode => self.run("safe-mode on"),
        }
    }

    fn heal(&self) {
        match *self.fault.lock() {
            Fault::None => {}
            Fault::DataNode => self.run("start-datanode"),
            Fault::NameNode => self.run("start-namenode"),
            Fault::SafeMode => self.run("safe-mode off"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_blocks_are_readable_or_listed_as_lost() {
    let Some(servers) = real().await else { return };
    let (rounds, mut random) = run_of(ROUNDS);
    let fs = open(&*plain_connector(), &servers.url("/checker"));
    let hdfs = Arc::new(Hdfs { servers, fs, fault: Mutex::new(Fault::None) });
    // Some chains are cold when flushed, others are not.
    let setup = Setup {
        name: "checker",
        capacity: "24MiB",
        disks: 2,
        store_type: "MEMORY_LOCALFILE_HDFS",
        made_tables: "[hdfs_store]\nwrite_timeout_sec = 20\n[hybrid_store]\n\
                      memory_single_buffer_max_spill_size = \"1MiB\"\n\
                      memory_spill_to_cold_threshold_size = \"1100KiB\""
            .to_owned(),
        ..Setup::default()
    };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let mut checker = Checker::with_remote(Arc::clone(&hdfs) as Arc<dyn RemoteReads>);
    let mut plan = PLAN.to_vec();
    let mut came_to_hdfs = false;
    for round in 0..rounds {
        let place = usize::try_from(round).unwrap() % plan.len();
        if place == 0 {
            plan.shuffle(&mut random);
        }
        let (fault, end) = plan[place];
        *hdfs.fault.lock() = fault;
        checker.round(i32::try_from(round).unwrap(), end, &mut worker, &mut random).await;
        // Rounds also unregister shuffles, which deletes their files.
        came_to_hdfs |= !block_in_place(|| hdfs.servers.list("/checker")).is_empty();
    }
    assert!(came_to_hdfs, "no round wrote a file to HDFS");
    let client = client_of(&worker).await;
    client.unregister_app("checker").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}
