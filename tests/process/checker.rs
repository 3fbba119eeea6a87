//! Random writers and readers against the real process, which is killed, stopped or upgraded at a random instant.
//!
//! The rule: every block that was acknowledged and reported is readable byte for byte, or its loss is told. After a stop
//! or an upgrade in place nothing may be lost at all; after a `kill -9` what was in memory may, and then the read fails
//! with a text that says so. A loss is healed by sending the blocks again. `PROCESS_ROUNDS` sets the rounds,
//! `PROCESS_SEED` repeats a run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep};
use uniffle_worker::client::block::{Block, BlockGenerator, IdLayout};
use uniffle_worker::client::grpc::{ClientError, ReadOptions, ShuffleClient};
use uniffle_worker::client::send::SendForm;
use uniffle_worker::client::tcp::TcpClient;
use uniffle_worker::runtime::Tasks;
use uniffle_worker::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};

use crate::support::say;
use crate::support::worker::{Setup, Worker};
use crate::writes::{client_of, key, local, patient};

const ROUNDS: u64 = 30;
const WRITERS: u32 = 4;
const READERS: u32 = 2;
const PARTITIONS: i32 = 6;
/// Shuffles that are kept over the rounds.
const SHUFFLES_KEPT: usize = 3;

/// What ends a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Kill,
    Stop,
    Upgrade,
}

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
                match client
                    .read_partition(&shuffle(id), PartitionId(partition), &ReadOptions::default())
                    .await
                {
                    Ok(read) => {
                        assert_all(&read.blocks, &expected, &format!("{id}/{partition} while written"))
                    }
                    Err(_) if self.killed.load(Ordering::SeqCst) => return,
                    Err(ClientError::Refused { text, status, .. }) => panic!("{status:?}: {text}"),
                    Err(_) => break,
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

fn remember(shuffles: &mut BTreeMap<i32, Blocks>, id: i32, batch: &[(PartitionId, Vec<Block>)]) {
    let partitions = shuffles.entry(id).or_default();
    for (at, blocks) in batch {
        let blocks = blocks.iter().map(|block| (block.meta.block_id, block.clone()));
        partitions.entry(at.0).or_default().extend(blocks);
    }
}

fn assert_all(read: &BTreeMap<BlockId, bytes::Bytes>, expected: &BTreeMap<BlockId, Block>, what: &str) {
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

#[derive(Debug, Default)]
struct Tally {
    rounds: u32,
    blocks: usize,
    told_lost: usize,
    longest: Duration,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_acknowledged_and_reported_block_is_readable_or_told_as_lost() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let rounds = number("PROCESS_ROUNDS").unwrap_or(ROUNDS);
    let seed = number("PROCESS_SEED").unwrap_or_else(rand::random);
    say(&format!("checker: PROCESS_SEED={seed} PROCESS_ROUNDS={rounds}"));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let setup = Setup { name: "checker", capacity: "24MiB", disks: 2, ..Setup::default() };
    let mut worker = block_in_place(|| Worker::start(&setup));
    let mut checker = Checker { history: Arc::default(), kept: Vec::new() };
    let mut tallies: BTreeMap<End, Tally> = BTreeMap::new();
    for round in 0..rounds {
        let end = [End::Kill, End::Stop, End::Upgrade][random.random_range(0..3)];
        let tally = tallies.entry(end).or_default();
        checker.round(i32::try_from(round).expect("small"), end, &mut worker, &mut random, tally).await;
    }
    for (end, tally) in &tallies {
        let Tally { rounds, blocks, told_lost, longest } = tally;
        say(&format!(
            "checker: {end:?}: {rounds} rounds, {blocks} blocks, {told_lost} in partitions told as lost, none lost silently, \
             back after at most {} ms",
            longest.as_millis()
        ));
    }
    let client = client_of(&worker).await;
    client.unregister_app("checker").await.expect("known");
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

#[derive(Debug)]
struct Checker {
    history: Arc<Mutex<History>>,
    /// Shuffles of earlier rounds without a loss.
    kept: Vec<i32>,
}

impl Checker {
    async fn round(
        &mut self,
        id: i32,
        end: End,
        worker: &mut Worker,
        random: &mut ChaCha8Rng,
        tally: &mut Tally,
    ) {
        let client = client_of(worker).await;
        client.register(&shuffle(id), &[(0, PARTITIONS - 1)]).await.expect("registered");
        self.kept.push(id);
        let crew = Crew {
            history: Arc::clone(&self.history),
            killed: Arc::default(),
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
        let began = Instant::now();
        block_in_place(|| match end {
            End::Kill => {
                crew.killed.store(true, Ordering::SeqCst);
                worker.kill();
                worker.start_again();
            }
            End::Stop => {
                worker.terminate();
                worker.start_again();
            }
            End::Upgrade => {
                worker.begin_upgrade();
                worker.finish_upgrade();
            }
        });
        tally.longest = tally.longest.max(began.elapsed());
        tally.rounds += 1;
        work.abort_all();
        while let Some(ended) = work.join_next().await {
            if let Err(error) = ended {
                assert!(!error.is_panic(), "{end:?} in round {id}: {error}");
            }
        }
        let client = client_of(worker).await;
        for id in self.kept.clone() {
            let lost = self.verify(&client, id, end, tally).await;
            if lost > 0 {
                self.heal(&client, id, random).await;
            }
        }
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
            let results = client.results(&shuffle(id), &[at], None).await;
            let results = results.unwrap_or_else(|error| panic!("{what}: {error}"));
            let forgotten = expected.keys().find(|id| !results.contains(id.0.cast_unsigned()));
            assert!(forgotten.is_none(), "{what}: the report of {forgotten:?} is forgotten");
            tally.blocks += expected.len();
            match client.read_partition(&shuffle(id), at, &ReadOptions::default()).await {
                Ok(read) => assert_all(&read.blocks, expected, &what),
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
