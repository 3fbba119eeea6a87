//! Random writers and readers against the real process, which is killed, stopped or upgraded at a random instant.
//!
//! The rule: every block that was acknowledged and reported is readable byte for byte, or its loss is told. After a stop
//! or an upgrade in place nothing may be lost at all; after a `kill -9` what was in memory may, and then the read fails
//! with a text that says so. A loss is healed by sending the blocks again. A worker may have remote files as well, which
//! readers read behind it, as clients do, and which a test disturbs while a round goes on.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::block_generator::BlockGenerator;
use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ClientError, ReadOptions, ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_client::tcp::TcpClient;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::RemoteStorage;
use uniffle_worker::runtime::Tasks;

use crate::clients::{client_of, key, local, patient};
use crate::say;
use crate::worker::Worker;

const WRITERS: u32 = 4;
const READERS: u32 = 2;
const PARTITIONS: i32 = 6;
/// Shuffles that are kept over the rounds.
const SHUFFLES_KEPT: usize = 3;

/// How long blocks in remote files may take to be readable after a disturbance.
const REMOTE_PATIENCE: Duration = Duration::from_secs(120);

/// The run's rounds (`PROCESS_ROUNDS`) and its random numbers (`PROCESS_SEED` repeats a run).
pub fn run_of(rounds: u64) -> (u64, ChaCha8Rng) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let rounds = number("PROCESS_ROUNDS").unwrap_or(rounds);
    let seed = number("PROCESS_SEED").unwrap_or_else(rand::random);
    say(&format!("checker: PROCESS_SEED={seed} PROCESS_ROUNDS={rounds}"));
    (rounds, ChaCha8Rng::seed_from_u64(seed))
}

/// What ends a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    Kill,
    Stop,
    Upgrade,
    /// The process goes on.
    Nothing,
}

impl End {
    /// Ends the process, `killed` being set before, and begins the next.
    fn bring_to(self, worker: &mut Worker, killed: &AtomicBool) {
        match self {
            Self::Nothing => {}
            Self::Kill => {
                killed.store(true, Ordering::SeqCst);
                worker.kill();
                worker.start_again();
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
    }
}

/// Where a worker's cold data is, as its clients see it.
pub trait Remote: Debug + Send + Sync {
    /// What they register with.
    fn storage(&self) -> RemoteStorage;
    /// What they find of a partition; an error when it does not answer.
    fn read<'a>(&'a self, key: &'a ShuffleKey, partition: i32) -> RemoteRead<'a>;
    /// Breaks something, while writers and readers are at work.
    fn disturb(&self);
    /// Repairs it.
    fn heal(&self);
}

/// Blocks by id.
pub type RemoteRead<'a> = BoxFuture<'a, Result<BTreeMap<BlockId, Bytes>, String>>;

/// Blocks by partition, of one shuffle.
type Blocks = BTreeMap<i32, BTreeMap<BlockId, Block>>;

/// What is known of the shuffles, by id.
#[derive(Debug, Default)]
struct History {
    /// Acknowledged and reported, and the report was acknowledged too.
    reported: BTreeMap<i32, Blocks>,
    /// Those, and what was in reports that no answer came to: the worker may know of them.
    in_reports: BTreeMap<i32, Blocks>,
    next_task: i64,
}

impl History {
    fn forget(&mut self, id: i32) {
        self.reported.remove(&id);
        self.in_reports.remove(&id);
    }
}

#[derive(Debug, Clone)]
struct Crew {
    history: Arc<Mutex<History>>,
    /// The process is about to be killed: a read may have begun before and end after it, without what was lost. Java's
    /// client finds that out by the ids that it expects.
    killed: Arc<AtomicBool>,
    /// Remote files cannot be read, or not all.
    disturbed: Arc<AtomicBool>,
    remote: Option<Arc<dyn Remote>>,
    ports: (u16, u16),
    generator: BlockGenerator,
}

fn shuffle(id: i32) -> ShuffleKey {
    key("checker", id)
}

impl Crew {
    async fn grpc(&self) -> Result<ShuffleClient, ClientError> {
        Ok(ShuffleClient::connect(local(self.ports.0)).await?.with_backoff(patient()))
    }

    /// Sends and reports tasks until the process does not answer or the round ends.
    async fn write(self, id: i32, mut random: ChaCha8Rng) {
        let tasks = Tasks::new();
        while let Ok(client) = self.grpc().await {
            let Ok((tcp, driver)) = TcpClient::connect(local(self.ports.1)).await else { return };
            tasks.spawn("tcp client", driver);
            while self.one_task(id, &mut random, &client, &tcp).await.is_ok() {}
        }
    }

    async fn one_task(
        &self,
        id: i32,
        random: &mut ChaCha8Rng,
        client: &ShuffleClient,
        tcp: &TcpClient,
    ) -> Result<(), String> {
        let task = {
            let mut history = self.history.lock();
            history.next_task += 1;
            TaskAttemptId(history.next_task)
        };
        let key = shuffle(id);
        let mut batch: BTreeMap<i32, Vec<Block>> = BTreeMap::new();
        for sequence in 0..random.random_range(1..8) {
            let partition = random.random_range(0..PARTITIONS);
            let length = if random.random_bool(0.1) { 200_000 } else { 20_000 };
            let block =
                self.generator.block(PartitionId(partition), task, sequence, random.random_range(1..length));
            batch.entry(partition).or_default().push(block);
        }
        let batch: Vec<_> = batch.into_iter().map(|(at, blocks)| (PartitionId(at), blocks)).collect();
        let said = |error: ClientError| error.to_string();
        if random.random_bool(0.5) {
            client.push(&key, SendForm::Classic, &batch).await.map_err(said)?;
        } else {
            let ticket = client.require_buffer(&key, &batch).await.map_err(said)?;
            tcp.send(&key, ticket, &batch).await.map_err(|error| error.to_string())?;
        }
        let ids = |blocks: &Vec<Block>| blocks.iter().map(|block| block.meta.block_id).collect();
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, ids(blocks))).collect();
        remember(&mut self.history.lock().in_reports, id, &batch);
        client.report(&key, task, &ids).await.map_err(said)?;
        remember(&mut self.history.lock().reported, id, &batch);
        Ok(())
    }

    /// Reads random partitions; what was reported before must be there as long as the process answers.
    async fn read(self, id: i32, mut random: ChaCha8Rng) {
        while let Ok(client) = self.grpc().await {
            loop {
                let partition = random.random_range(0..PARTITIONS);
                let expected =
                    self.history.lock().reported.get(&id).and_then(|all| all.get(&partition)).cloned();
                let expected = expected.unwrap_or_default();
                let wanted = (partition, &expected);
                match read_patiently(&client, self.remote.as_deref(), id, wanted, &self.disturbed).await {
                    Ok(_) if self.disturbed.load(Ordering::SeqCst) => {}
                    Ok(read) => assert_all(&read, &expected, &format!("{id}/{partition} while written")),
                    Err(_) if self.killed.load(Ordering::SeqCst) => return,
                    Err(ClientError::Refused { text, status, .. }) => panic!("{status:?}: {text}"),
                    Err(_) => break,
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// What a client finds: in memory, on the worker's disks, and then in remote files.
async fn read_all(
    client: &ShuffleClient,
    remote: Option<&dyn Remote>,
    id: i32,
    partition: i32,
) -> Result<BTreeMap<BlockId, Bytes>, ClientError> {
    let key = shuffle(id);
    let read = client.read_partition(&key, PartitionId(partition), &ReadOptions::default()).await?;
    let mut found = read.blocks;
    if let Some(remote) = remote {
        // One that does not answer is as good as empty: what is missing then is judged by the caller.
        found.extend(remote.read(&key, partition).await.unwrap_or_default());
    }
    Ok(found)
}

/// The same until all that is expected is there or time is up: a remote file that is being appended to shows its last
/// HDFS block to Java's client and not to this one, and a file that was left open to neither before it is closed. What is
/// lost does not come back.
async fn read_patiently(
    client: &ShuffleClient,
    remote: Option<&dyn Remote>,
    id: i32,
    (partition, expected): (i32, &BTreeMap<BlockId, Block>),
    disturbed: &AtomicBool,
) -> Result<BTreeMap<BlockId, Bytes>, ClientError> {
    let give_up = Instant::now() + REMOTE_PATIENCE;
    loop {
        let read = read_all(client, remote, id, partition).await?;
        let may_come = remote.is_some() && !disturbed.load(Ordering::SeqCst) && Instant::now() < give_up;
        if is_complete(&read, expected) || !may_come {
            return Ok(read);
        }
        sleep(Duration::from_millis(50)).await;
    }
}

fn remember(shuffles: &mut BTreeMap<i32, Blocks>, id: i32, batch: &[(PartitionId, Vec<Block>)]) {
    let partitions = shuffles.entry(id).or_default();
    for (at, blocks) in batch {
        let blocks = blocks.iter().map(|block| (block.meta.block_id, block.clone()));
        partitions.entry(at.0).or_default().extend(blocks);
    }
}

fn is_complete(read: &BTreeMap<BlockId, Bytes>, expected: &BTreeMap<BlockId, Block>) -> bool {
    expected.keys().all(|id| read.contains_key(id))
}

fn assert_all(read: &BTreeMap<BlockId, Bytes>, expected: &BTreeMap<BlockId, Block>, what: &str) {
    for (id, block) in expected {
        let found = read.get(id);
        assert!(
            found.is_some_and(|data| *data == block.data),
            "{what}: block {id} is {}",
            match found {
                None => "missing",
                Some(_) => "not what was sent",
            }
        );
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    rounds: u32,
    blocks: usize,
    told_lost: usize,
    longest: Duration,
}

/// Runs rounds, and remembers what must be readable.
#[derive(Debug, Default)]
pub struct Checker {
    remote: Option<Arc<dyn Remote>>,
    history: Arc<Mutex<History>>,
    /// Shuffles of earlier rounds without a loss.
    kept: Vec<i32>,
    tallies: BTreeMap<End, Tally>,
}

impl Drop for Checker {
    fn drop(&mut self) {
        for (end, tally) in &self.tallies {
            let Tally { rounds, blocks, told_lost, longest } = tally;
            say(&format!(
                "checker: {end:?}: {rounds} rounds, {blocks} blocks, {told_lost} in partitions told as lost, none lost \
                 silently, back after at most {} ms",
                longest.as_millis()
            ));
        }
    }
}

impl Checker {
    /// A checker of a worker with remote files.
    pub fn with_remote(remote: Arc<dyn Remote>) -> Self {
        let mut checker = Self::default();
        checker.remote = Some(remote);
        checker
    }

    /// Shuffle `id` is written and read until the round's end; then everything is verified.
    pub async fn round(&mut self, id: i32, end: End, worker: &mut Worker, random: &mut ChaCha8Rng) {
        let client = client_of(worker).await;
        let ranges: Vec<_> = (0..PARTITIONS).map(|partition| (partition, partition)).collect();
        let mut request = register_request(&shuffle(id), &ranges);
        request.remote_storage = self.remote.as_ref().map(|remote| remote.storage());
        client.register_with(request).await.expect("registered");
        self.kept.push(id);
        let crew = Crew {
            history: Arc::clone(&self.history),
            killed: Arc::default(),
            disturbed: Arc::default(),
            remote: self.remote.clone(),
            ports: (worker.ready().grpc_port, worker.ready().urpc_port.expect("on")),
            generator: BlockGenerator::new(11, IdLayout::SPARK),
        };
        let mut work = JoinSet::new();
        let mut child = || ChaCha8Rng::seed_from_u64(random.random());
        for _ in 0..WRITERS {
            work.spawn(crew.clone().write(id, child()));
        }
        for _ in 0..READERS {
            work.spawn(crew.clone().read(id, child()));
        }
        sleep(Duration::from_millis(random.random_range(0..500))).await;
        if let Some(remote) = &self.remote {
            crew.disturbed.store(true, Ordering::SeqCst);
            block_in_place(|| remote.disturb());
            sleep(Duration::from_millis(random.random_range(0..500))).await;
        }
        let began = Instant::now();
        block_in_place(|| end.bring_to(worker, &crew.killed));
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
        for id in self.kept.clone() {
            let lost = self.verify(&client, id, end, &mut tally).await;
            if lost > 0 {
                self.heal(&client, id, random).await;
            }
        }
        self.tallies.insert(end, tally);
        if self.kept.len() > SHUFFLES_KEPT {
            let oldest = self.kept.remove(0);
            client.unregister(&shuffle(oldest)).await.expect("known");
            self.history.lock().forget(oldest);
        }
    }

    /// Reads everything of a shuffle; how many blocks are in partitions whose loss was told.
    async fn verify(&self, client: &ShuffleClient, id: i32, end: End, tally: &mut Tally) -> usize {
        let reported = self.history.lock().reported.get(&id).cloned().unwrap_or_default();
        let mut lost = 0;
        for (partition, expected) in &reported {
            let what = format!("shuffle {id} partition {partition} after {end:?}");
            let at = PartitionId(*partition);
            let (remote, nothing) = (self.remote.as_deref(), AtomicBool::new(false));
            let results = client.results(&shuffle(id), &[at], None).await;
            let results = results.unwrap_or_else(|error| panic!("{what}: {error}"));
            let forgotten = expected.keys().find(|id| !results.contains(id.0.cast_unsigned()));
            assert!(forgotten.is_none(), "{what}: the report of {forgotten:?} is forgotten");
            tally.blocks += expected.len();
            match read_patiently(client, remote, id, (*partition, expected), &nothing).await {
                Ok(read) => assert_all(&read, expected, &what),
                Err(error) => {
                    let told = error.to_string();
                    assert!(end == End::Kill && told.contains("lost"), "{what}: {told}");
                    tally.told_lost += expected.len();
                    lost += expected.len();
                }
            }
        }
        lost
    }

    /// Sends everything of a shuffle again, as recomputed tasks do; then nothing is lost any more. Or forgets it.
    async fn heal(&mut self, client: &ShuffleClient, id: i32, random: &mut ChaCha8Rng) {
        if random.random_bool(0.3) {
            client.unregister(&shuffle(id)).await.expect("known");
            self.history.lock().forget(id);
            self.kept.retain(|kept| *kept != id);
            return;
        }
        let in_reports = self.history.lock().in_reports.get(&id).cloned().unwrap_or_default();
        for (partition, blocks) in &in_reports {
            let blocks: Vec<Block> = blocks.values().cloned().collect();
            for some in blocks.chunks(50) {
                let batch = [(PartitionId(*partition), some.to_vec())];
                client.push(&shuffle(id), SendForm::Classic, &batch).await.expect("sends are never refused");
            }
        }
        let mut nothing = Tally::default();
        let lost = self.verify(client, id, End::Stop, &mut nothing).await;
        assert_eq!(lost, 0);
    }
}
