//! Random writers and readers against a real worker process, which is killed, stopped or upgraded
//! at a random instant, or continues.
//!
//! Rule: every block that was acknowledged and reported is readable byte for byte, or its loss is
//! reported. A stop or an upgrade in place must lose nothing, nor a kill with persistent memory.
//! Any other `kill -9` may only lose blocks that were in memory: those that neither
//! [`on_disk`](crate::on_disk) finds in the data directories before the next start, nor clients in
//! remote files. Resending the blocks repairs a loss. Clients read remote files after the worker's
//! disks, and a test disturbs them during a round.

mod clients;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use croaring::Treemap;
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep};
use uniffle_client::block::Block;
use uniffle_client::grpc::{ClientError, ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey};
use uniffle_worker::proto::StatusCode;

use self::clients::{Clients, LAYOUT, PARTITIONS, WantedBlocks, read_with_retries, shuffle};
pub use self::clients::{RemoteRead, RemoteReads};
use self::history::{CheckedHistory, ShuffleBlocks};
use crate::block_generator::BlockGenerator;
use crate::clients::client_of;
use crate::on_disk::{read_directory, stored_blocks};
use crate::oracle::{self, ShuffleVerification, WorkerRefusal, WorkerView, verify};
use crate::say;
use crate::worker::WorkerProcess;

const WRITERS: u32 = 4;
const READERS: u32 = 2;
/// Number of shuffles that stay registered over several rounds.
const OPEN_SHUFFLES_MAX: usize = 3;

/// Returns the number of rounds (`PROCESS_ROUNDS`) and the random generator (`PROCESS_SEED` repeats
/// a run).
pub fn run_of(rounds: u64) -> (u64, ChaCha8Rng) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let rounds = number("PROCESS_ROUNDS").unwrap_or(rounds);
    let seed = number("PROCESS_SEED").unwrap_or_else(rand::random);
    say(&format!("checker: PROCESS_SEED={seed} PROCESS_ROUNDS={rounds}"));
    (rounds, ChaCha8Rng::seed_from_u64(seed))
}

/// End of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoundEnd {
    Kill,
    Stop,
    Upgrade,
    /// The process continues.
    Nothing,
}

impl RoundEnd {
    /// Ends the process and starts the next one, unless it continues. Sets `killed` before a kill,
    /// and returns the blocks on the disks of a killed process.
    fn apply(self, worker: &mut WorkerProcess, killed: &AtomicBool) -> Option<DiskBlocks> {
        match self {
            Self::Nothing => {}
            Self::Kill => {
                killed.store(true, Ordering::SeqCst);
                worker.kill();
                let disk_blocks = DiskBlocks::of(worker);
                worker.start_again();
                return Some(disk_blocks);
            }
            Self::Stop => {
                worker.terminate();
                worker.start_again();
            }
            Self::Upgrade => {
                worker.begin_upgrade();
                worker.finish_upgrade();
            }
        }
        None
    }
}

/// Blocks in the data directories of a killed worker, by shuffle.
#[derive(Debug, Default)]
struct DiskBlocks {
    blocks: BTreeMap<ShuffleKey, BTreeSet<(i32, BlockId)>>,
}

impl DiskBlocks {
    fn of(worker: &WorkerProcess) -> Self {
        let read =
            |path: &PathBuf| read_directory(path).expect("the data directory of an ended worker is readable");
        let directories: Vec<_> = worker.data_paths().iter().map(read).collect();
        let mut found = Self::default();
        for block in stored_blocks(&directories) {
            found.blocks.entry(block.key).or_default().insert((block.partition, block.id));
        }
        found
    }

    fn has(&self, key: &ShuffleKey, partition: i32, id: BlockId) -> bool {
        self.blocks.get(key).is_some_and(|blocks| blocks.contains(&(partition, id)))
    }
}

/// A worker and its remote files, as the oracle sees them.
#[derive(Debug)]
struct CheckedWorker<'a> {
    client: &'a ShuffleClient,
    remote: Option<&'a dyn RemoteReads>,
    /// Blocks that a read may have to wait for if there are remote files.
    expected: &'a ShuffleBlocks,
}

fn refusal(error: &ClientError) -> WorkerRefusal {
    match error.status() {
        Some(StatusCode::NoRegister) => WorkerRefusal::Unknown(error.to_string()),
        _ => WorkerRefusal::Failed(error.to_string()),
    }
}

impl WorkerView for CheckedWorker<'_> {
    async fn results(&self, key: &ShuffleKey, partition: i32) -> Result<BTreeSet<BlockId>, WorkerRefusal> {
        let results = self.client.results(key, &[PartitionId(partition)], Some(LAYOUT)).await;
        let results = results.map_err(|error| refusal(&error))?;
        Ok(results.iter().map(|id| BlockId(id.cast_signed())).collect())
    }

    async fn read(
        &self,
        key: &ShuffleKey,
        partition: i32,
        tasks: &Treemap,
    ) -> Result<oracle::Blocks, WorkerRefusal> {
        let wanted = |id: &BlockId| tasks.contains(LAYOUT.task_of(*id).0.cast_unsigned());
        let mut expected = self.expected.get(&partition).cloned().unwrap_or_default();
        expected.retain(|id, _| wanted(id));
        let undisturbed = AtomicBool::new(false);
        let wanted = WantedBlocks { partition, expected: &expected, tasks: Some(tasks) };
        let read = read_with_retries(self.client, self.remote, key, wanted, &undisturbed).await;
        read.map_err(|error| refusal(&error))
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    rounds: u32,
    blocks: u64,
    reported_lost: u64,
    longest: Duration,
}

/// Runs rounds and records which blocks must be readable.
#[derive(Debug, Default)]
pub struct Checker {
    /// Memory survives the process, so nothing may be lost.
    has_persistent_memory: bool,
    remote: Option<Arc<dyn RemoteReads>>,
    history: Arc<Mutex<CheckedHistory>>,
    /// Registered shuffles, oldest first. Their losses in earlier rounds were repaired.
    open_shuffles: Vec<i32>,
    tallies: BTreeMap<RoundEnd, Tally>,
}

impl Drop for Checker {
    fn drop(&mut self) {
        for (end, tally) in &self.tallies {
            let Tally { rounds, blocks, reported_lost, longest } = tally;
            say(&format!(
                "checker: {end:?}: {rounds} rounds, {blocks} blocks; {reported_lost} reported as lost and on no disk, all others \
                 served; restarts took at most {} ms",
                longest.as_millis()
            ));
        }
    }
}

impl Checker {
    /// Creates a checker of a worker with remote files.
    pub fn with_remote(remote: Arc<dyn RemoteReads>) -> Self {
        let mut checker = Self::default();
        checker.remote = Some(remote);
        checker
    }

    /// Creates a checker of a worker with persistent memory.
    pub fn with_persistent_memory() -> Self {
        let mut checker = Self::default();
        checker.has_persistent_memory = true;
        checker
    }

    /// Runs a round: shuffle `id` is written and read until its end. Then verifies everything.
    pub async fn round(
        &mut self,
        id: i32,
        end: RoundEnd,
        worker: &mut WorkerProcess,
        random: &mut ChaCha8Rng,
    ) {
        let client = client_of(worker).await;
        let ranges: Vec<_> = (0..PARTITIONS).map(|partition| (partition, partition)).collect();
        let mut request = register_request(&shuffle(id), &ranges);
        request.remote_storage = self.remote.as_ref().map(|remote| remote.storage());
        client.register_with(request).await.unwrap();
        self.open_shuffles.push(id);
        let clients = Clients {
            history: Arc::clone(&self.history),
            killed: Arc::default(),
            disturbed: Arc::default(),
            remote: self.remote.clone(),
            ports: (worker.ready().grpc_port, worker.ready().urpc_port.unwrap()),
            generator: BlockGenerator::new(11, LAYOUT),
        };
        let mut work = JoinSet::new();
        let mut child = || ChaCha8Rng::seed_from_u64(random.random());
        for _ in 0..WRITERS {
            work.spawn(clients.clone().write(id, child()));
        }
        for _ in 0..READERS {
            work.spawn(clients.clone().read(id, child()));
        }
        sleep(Duration::from_millis(random.random_range(0..500))).await;
        if let Some(remote) = &self.remote {
            clients.disturbed.store(true, Ordering::SeqCst);
            block_in_place(|| remote.disturb());
            sleep(Duration::from_millis(random.random_range(0..500))).await;
        }
        let began = Instant::now();
        let disk_blocks =
            block_in_place(|| end.apply(worker, &clients.killed)).filter(|_| !self.has_persistent_memory);
        let took = began.elapsed();
        if let Some(remote) = &self.remote {
            block_in_place(|| remote.heal());
        }
        work.abort_all();
        while let Some(ended) = work.join_next().await {
            if let Err(error) = ended {
                assert!(!error.is_panic(), "{end:?} in round {id}: {error}");
            }
        }
        let client = client_of(worker).await;
        let mut tally = self.tallies.remove(&end).unwrap_or_default();
        tally.longest = tally.longest.max(took);
        tally.rounds += 1;
        for id in self.open_shuffles.clone() {
            let lost = self.verify(&client, id, end, disk_blocks.as_ref(), &mut tally).await;
            if lost > 0 {
                self.heal(&client, id, random).await;
            }
        }
        self.tallies.insert(end, tally);
        if self.open_shuffles.len() > OPEN_SHUFFLES_MAX {
            let oldest = self.open_shuffles.remove(0);
            client.unregister(&shuffle(oldest)).await.unwrap();
            self.history.lock().forget(oldest);
        }
    }

    /// Verifies the results and all blocks of a shuffle. Returns the number of reported losses.
    /// `disk_blocks` holds the blocks that were on the disks when the process was killed.
    async fn verify(
        &self,
        client: &ShuffleClient,
        id: i32,
        end: RoundEnd,
        disk_blocks: Option<&DiskBlocks>,
        tally: &mut Tally,
    ) -> u64 {
        let key = shuffle(id);
        let (shuffle_history, mut expected) = {
            let history = self.history.lock();
            let shuffle_history = history.histories.get(&id).cloned().unwrap_or_default();
            (shuffle_history, history.in_reports.get(&id).cloned().unwrap_or_default())
        };
        // Some reports without a response were accepted.
        for (partition, blocks) in &mut expected {
            let known = client.results(&key, &[PartitionId(*partition)], Some(LAYOUT)).await;
            let known = known.unwrap_or_else(|error| panic!("shuffle {id} after {end:?}: {error}"));
            blocks.retain(|id, _| known.contains(id.0.cast_unsigned()));
        }
        let remote = self.remote.as_deref();
        let mut remote_blocks = BTreeSet::new();
        if let (Some(remote), Some(_)) = (remote, disk_blocks) {
            for partition in shuffle_history.partitions.keys() {
                let blocks = remote.read(&key, *partition).await.unwrap_or_default();
                remote_blocks.extend(blocks.into_keys().map(|id| (*partition, id)));
            }
        }
        let is_known = |partition, id| expected.get(&partition).is_some_and(|all| all.contains_key(&id));
        let is_durable = |partition, id| {
            disk_blocks.is_none_or(|disk_blocks| disk_blocks.has(&key, partition, id))
                || remote_blocks.contains(&(partition, id))
        };
        let checked = CheckedWorker { client, remote, expected: &expected };
        let must_be_served = |partition, id| is_known(partition, id) && is_durable(partition, id);
        let findings = verify(&checked, &key, &shuffle_history, LAYOUT, must_be_served).await;
        let what = format!("shuffle {id} after {end:?}");
        assert_strict(&findings, &what);
        assert!(
            disk_blocks.is_some() || findings.lost.is_empty(),
            "{what}: blocks are reported as lost although none may be: {:?}",
            findings.lost
        );
        let durable = findings.lost.iter().find(|(partition, id)| is_durable(*partition, *id));
        assert!(
            durable.is_none(),
            "{what}: {durable:?} was reported as lost, but is on a disk or in a remote file"
        );
        let lost = findings.lost.len() as u64;
        tally.blocks += findings.served + lost;
        tally.reported_lost += lost;
        lost
    }

    /// Repairs a loss: resends all blocks like recomputed tasks and checks that nothing is lost, or
    /// unregisters the shuffle.
    async fn heal(&mut self, client: &ShuffleClient, id: i32, random: &mut ChaCha8Rng) {
        if random.random_bool(0.3) {
            client.unregister(&shuffle(id)).await.unwrap();
            self.history.lock().forget(id);
            self.open_shuffles.retain(|other| *other != id);
            return;
        }
        let in_reports = self.history.lock().in_reports.get(&id).cloned().unwrap_or_default();
        for (partition, blocks) in &in_reports {
            let blocks: Vec<Block> = blocks.values().cloned().collect();
            for chunk in blocks.chunks(50) {
                let batch = [(PartitionId(*partition), chunk.to_vec())];
                client
                    .push(&shuffle(id), SendForm::Classic, &batch)
                    .await
                    .expect("sends of the classic form are never refused");
            }
        }
        let mut tally = Tally::default();
        let lost = self.verify(client, id, RoundEnd::Stop, None, &mut tally).await;
        assert_eq!(lost, 0, "shuffle {id}: resent blocks are reported as lost");
    }
}

fn assert_strict(findings: &ShuffleVerification, what: &str) {
    assert!(
        findings.violations.is_empty(),
        "{what}: the worker broke a guarantee: {:?}",
        findings.violations
    );
    assert!(
        findings.results_refused.is_none(),
        "{what}: results are refused: {:?}",
        findings.results_refused
    );
    let count = findings.missing.len();
    let first = findings.missing.first();
    assert!(first.is_none(), "{what}: {count} of {} blocks are not served: {first:?}", findings.intact);
}
