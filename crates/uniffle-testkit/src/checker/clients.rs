//! The writers and readers of a checked worker.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use croaring::Treemap;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use tokio::time::{Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ClientError, ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_client::tcp::TcpClient;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::RemoteStorage;
use uniffle_worker::runtime::Tasks;

use super::history::CheckedHistory;
use crate::block_generator::BlockGenerator;
use crate::clients::{key, local, long_backoff};

pub(super) const PARTITIONS: i32 = 6;

pub(super) const LAYOUT: IdLayout = IdLayout::SPARK;

/// Time limit for blocks in remote files to become readable.
const REMOTE_WAIT_MAX: Duration = Duration::from_secs(120);

/// A worker's remote files, as its clients see them.
pub trait RemoteReads: Debug + Send + Sync {
    /// Returns the storage with which clients register.
    fn storage(&self) -> RemoteStorage;
    /// Returns the blocks that clients find of a partition, or an error if the storage does not
    /// answer.
    fn read<'a>(&'a self, key: &'a ShuffleKey, partition: i32) -> RemoteRead<'a>;
    /// Breaks something while writers and readers run.
    fn disturb(&self);
    /// Repairs the disturbance.
    fn heal(&self);
}

/// Result of a remote read: blocks by id.
pub type RemoteRead<'a> = BoxFuture<'a, Result<BTreeMap<BlockId, Bytes>, String>>;

#[derive(Debug, Clone)]
pub(super) struct Clients {
    pub(super) history: Arc<Mutex<CheckedHistory>>,
    /// Set just before the process is killed. A read may begin before and end after the kill, and
    /// is then refused because blocks are lost. Such refusals are no fault.
    pub(super) killed: Arc<AtomicBool>,
    /// Set from the disturbance of the remote files to the end of the round.
    pub(super) disturbed: Arc<AtomicBool>,
    pub(super) remote: Option<Arc<dyn RemoteReads>>,
    pub(super) ports: (u16, u16),
    pub(super) generator: BlockGenerator,
}

pub(super) fn shuffle(id: i32) -> ShuffleKey {
    key("checker", id)
}

impl Clients {
    async fn grpc(&self) -> Result<ShuffleClient, ClientError> {
        Ok(ShuffleClient::connect(local(self.ports.0)).await?.with_backoff(long_backoff()))
    }

    /// Sends and reports tasks until the process does not respond or the round ends.
    pub(super) async fn write(self, id: i32, mut random: ChaCha8Rng) {
        let tasks = Tasks::new();
        while let Ok(client) = self.grpc().await {
            let Ok((tcp, driver)) = TcpClient::connect(local(self.ports.1)).await else { return };
            tasks.spawn("tcp client", driver);
            while self.one_batch(id, &mut random, &client, &tcp).await.is_ok() {}
        }
    }

    /// Sends up to seven blocks, each of a task of its own, and reports them in one call. The
    /// oracle filters reads by task, so it can leave out each lost block separately.
    async fn one_batch(
        &self,
        id: i32,
        random: &mut ChaCha8Rng,
        client: &ShuffleClient,
        tcp: &TcpClient,
    ) -> Result<(), String> {
        let key = shuffle(id);
        let mut batch: BTreeMap<i32, Vec<Block>> = BTreeMap::new();
        let mut task = TaskAttemptId(0);
        for _ in 0..random.random_range(1..8) {
            task = self.history.lock().new_task();
            let partition = random.random_range(0..PARTITIONS);
            let length = if random.random_bool(0.1) { 200_000 } else { 20_000 };
            let block = self.generator.block(PartitionId(partition), task, 0, random.random_range(1..length));
            batch.entry(partition).or_default().push(block);
        }
        let batch: Vec<_> = batch.into_iter().map(|(at, blocks)| (PartitionId(at), blocks)).collect();
        let describe = |error: ClientError| error.to_string();
        self.history.lock().sent(id, &batch);
        if random.random_bool(0.5) {
            client.push(&key, SendForm::Classic, &batch).await.map_err(describe)?;
        } else {
            let ticket = client.require_buffer(&key, &batch).await.map_err(describe)?;
            tcp.send(&key, ticket, &batch).await.map_err(|error| error.to_string())?;
        }
        let ids = |blocks: &Vec<Block>| blocks.iter().map(|block| block.meta.block_id).collect();
        let ids: Vec<(PartitionId, Vec<BlockId>)> =
            batch.iter().map(|(at, blocks)| (*at, ids(blocks))).collect();
        let report: Vec<_> = ids.iter().map(|(at, ids)| (at.0, ids.clone())).collect();
        self.history.lock().tried(id, &batch, &report);
        client.report(&key, task, &ids).await.map_err(describe)?;
        self.history.lock().reported(id, &batch, &report);
        Ok(())
    }

    /// Reads random partitions. Blocks reported before must be readable as long as the process
    /// responds.
    pub(super) async fn read(self, id: i32, mut random: ChaCha8Rng) {
        while let Ok(client) = self.grpc().await {
            loop {
                let partition = random.random_range(0..PARTITIONS);
                let expected =
                    self.history.lock().reported.get(&id).and_then(|all| all.get(&partition)).cloned();
                let expected = expected.unwrap_or_default();
                let key = shuffle(id);
                let wanted = WantedBlocks { partition, expected: &expected, tasks: None };
                match read_with_retries(&client, self.remote.as_deref(), &key, wanted, &self.disturbed).await
                {
                    Ok(_) if self.disturbed.load(Ordering::SeqCst) => {}
                    Ok(read) => assert_all(
                        &read,
                        &expected,
                        &format!("partition {id}/{partition}, read during writes"),
                    ),
                    Err(_) if self.killed.load(Ordering::SeqCst) => return,
                    Err(ClientError::Refused { text, status, .. }) => panic!("{status:?}: {text}"),
                    Err(_) => break,
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// Blocks of a partition to read.
pub(super) struct WantedBlocks<'a> {
    pub(super) partition: i32,
    pub(super) expected: &'a BTreeMap<BlockId, Block>,
    /// `None` for all tasks.
    pub(super) tasks: Option<&'a Treemap>,
}

/// Reads like a client: memory, then the worker's disks, then remote files.
async fn read_all(
    client: &ShuffleClient,
    remote: Option<&dyn RemoteReads>,
    key: &ShuffleKey,
    partition: i32,
    tasks: Option<&Treemap>,
) -> Result<BTreeMap<BlockId, Bytes>, ClientError> {
    let options = ReadOptions { tasks: tasks.cloned(), ..ReadOptions::default() };
    let read = client.read_partition(key, PartitionId(partition), &options).await?;
    let mut found = read.blocks;
    if let Some(remote) = remote {
        // A storage that does not respond counts as empty. The caller evaluates missing blocks.
        let mut remote_blocks = remote.read(key, partition).await.unwrap_or_default();
        let wanted =
            |id: &BlockId| tasks.is_none_or(|tasks| tasks.contains(LAYOUT.task_of(*id).0.cast_unsigned()));
        remote_blocks.retain(|id, _| wanted(id));
        found.extend(remote_blocks);
    }
    Ok(found)
}

/// Reads once. With undisturbed remote files, repeats until all expected blocks are found or the
/// time limit is reached. Java's client sees the last HDFS block of a file that is being appended
/// to, [`RemoteReads`] does not. A file that was left open is visible to neither before it is
/// closed. Lost blocks never come back.
pub(super) async fn read_with_retries(
    client: &ShuffleClient,
    remote: Option<&dyn RemoteReads>,
    key: &ShuffleKey,
    wanted: WantedBlocks<'_>,
    disturbed: &AtomicBool,
) -> Result<BTreeMap<BlockId, Bytes>, ClientError> {
    let deadline = Instant::now() + REMOTE_WAIT_MAX;
    loop {
        let read = read_all(client, remote, key, wanted.partition, wanted.tasks).await?;
        let may_come = remote.is_some() && !disturbed.load(Ordering::SeqCst) && Instant::now() < deadline;
        if is_complete(&read, wanted.expected) || !may_come {
            return Ok(read);
        }
        sleep(Duration::from_millis(50)).await;
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
                Some(_) => "different from the block that was sent",
            }
        );
    }
}
