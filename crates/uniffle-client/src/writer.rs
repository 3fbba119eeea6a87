//! Writes blocks: collects them, sends them to replicas in bounded batches, and reports them at the
//! end.
//!
//! Invariant: nothing is reported unless every block of the task is on `replicas.write` servers.
//! Readers ignore blocks that were sent but never reported (a failed attempt).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use tokio::task::JoinSet;

use crate::block::Block;
use crate::context::ShuffleContext;
use crate::error::Error;
use uniffle_wire::types::{BLOCK_BYTES_MAX, BlockId, PartitionId, TaskAttemptId};

/// Bytes that a block counts in a batch besides its data. Over TCP, the size of a request has twice
/// the data, and for each block less than twice this number of bytes more.
const BLOCK_EXTRA_BYTES: u64 = 128;

/// Blocks of one partition in one batch.
type PartitionBlocks = (PartitionId, Vec<Block>);

/// Writes the output of one task attempt.
#[derive(Debug)]
pub struct ShuffleWriter {
    shuffle: Arc<ShuffleContext>,
    task: TaskAttemptId,
    sequences: HashMap<PartitionId, u32>,
    pending: BTreeMap<PartitionId, Vec<Block>>,
    pending_bytes: u64,
    sends: JoinSet<Result<(), Error>>,
    written: BTreeMap<PartitionId, Vec<BlockId>>,
    totals: WriteTotals,
    /// Set when a send failed or was cancelled: the task's output is incomplete.
    is_broken: bool,
}

/// Totals of a task attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WriteTotals {
    /// Number of blocks.
    pub blocks: u64,
    /// Number of bytes, without replication.
    pub bytes: u64,
}

impl ShuffleWriter {
    pub(crate) fn new(shuffle: Arc<ShuffleContext>, task: TaskAttemptId) -> Result<Self, Error> {
        if shuffle.options().layout.block_id(0, PartitionId(0), task).is_none() {
            return Err(Error::Invalid(format!("task attempt id {task} does not fit the block id layout")));
        }
        Ok(Self {
            shuffle,
            task,
            sequences: HashMap::new(),
            pending: BTreeMap::new(),
            pending_bytes: 0,
            sends: JoinSet::new(),
            written: BTreeMap::new(),
            totals: WriteTotals::default(),
            is_broken: false,
        })
    }

    /// Adds a block of `data` to `partition`. Sends a batch once `send_bytes_max` bytes are
    /// collected. Blocks of about one megabyte suit servers and readers best.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid block, or after an error of an earlier batch. Any other
    /// error means that an earlier batch could not be sent and that the attempt has failed.
    pub async fn write(&mut self, partition: PartitionId, data: impl Into<Bytes>) -> Result<(), Error> {
        let data = data.into();
        let length = data.len();
        self.write_compressed(partition, data, length).await
    }

    /// Adds a compressed block like [`ShuffleWriter::write`]. The reader decompresses `data` to
    /// `uncompressed_length` bytes.
    ///
    /// # Errors
    /// See [`ShuffleWriter::write`].
    pub async fn write_compressed(
        &mut self,
        partition: PartitionId,
        data: Bytes,
        uncompressed_length: usize,
    ) -> Result<(), Error> {
        self.refuse_if_broken()?;
        let block = self.block(partition, data, uncompressed_length)?;
        self.written.entry(partition).or_default().push(block.meta.block_id);
        self.totals.blocks += 1;
        self.totals.bytes += u64::from(block.meta.length);
        self.pending_bytes += u64::from(block.meta.length) + BLOCK_EXTRA_BYTES;
        self.pending.entry(partition).or_default().push(block);
        if self.pending_bytes >= self.shuffle.options().send_bytes_max {
            self.begin_send().await?;
        }
        Ok(())
    }

    /// Sends the collected blocks, waits for all sends, and reports the blocks to all replicas.
    /// Readers find them from then on.
    ///
    /// # Errors
    /// [`Error::WriteQuorum`] if too few replicas acknowledged a block or the report, or
    /// [`Error::Invalid`] after an error of [`ShuffleWriter::write`] about an earlier batch. The
    /// attempt has failed. Another attempt with another id can repeat the work.
    pub async fn finish(mut self) -> Result<WriteTotals, Error> {
        self.refuse_if_broken()?;
        self.begin_send().await?;
        while !self.sends.is_empty() {
            self.join_send().await?;
        }
        report(&self.shuffle, self.task, &self.written).await?;
        Ok(self.totals)
    }

    fn refuse_if_broken(&self) -> Result<(), Error> {
        match self.is_broken {
            true => Err(Error::Invalid("an earlier send of this writer failed".to_owned())),
            false => Ok(()),
        }
    }

    fn block(
        &mut self,
        partition: PartitionId,
        data: Bytes,
        uncompressed_length: usize,
    ) -> Result<Block, Error> {
        self.shuffle.replica_servers(partition)?;
        let invalid = |what: &str| Error::Invalid(format!("a block of partition {partition}: {what}"));
        if data.is_empty() || data.len() > BLOCK_BYTES_MAX as usize {
            return Err(invalid("the length must be 1 byte to 512 MiB"));
        }
        let uncompressed =
            i32::try_from(uncompressed_length).ok().and_then(|length| u32::try_from(length).ok());
        let uncompressed = uncompressed.ok_or_else(|| invalid("longer than 2 GiB after decompression"))?;
        let sequence = self.sequences.entry(partition).or_default();
        let id = self.shuffle.options().layout.block_id(*sequence, partition, self.task);
        let id = id.ok_or_else(|| invalid("the block id layout has no more ids for this task"))?;
        *sequence = sequence.saturating_add(1);
        let mut block = Block::new(id, self.task, data);
        block.meta.uncompressed_length = uncompressed;
        Ok(block)
    }

    /// Starts sending the collected blocks. Waits for an earlier send if `sends_in_flight` is
    /// reached.
    async fn begin_send(&mut self) -> Result<(), Error> {
        if self.pending.is_empty() {
            return Ok(());
        }
        while self.sends.len() >= self.shuffle.options().sends_in_flight {
            self.join_send().await?;
        }
        let batch: Vec<PartitionBlocks> = std::mem::take(&mut self.pending).into_iter().collect();
        self.pending_bytes = 0;
        self.sends.spawn(deliver(Arc::clone(&self.shuffle), batch));
        Ok(())
    }

    async fn join_send(&mut self) -> Result<(), Error> {
        let Some(ended) = self.sends.join_next().await else { return Ok(()) };
        let result = ended.unwrap_or_else(|error| Err(Error::unfinished(&error)));
        self.is_broken |= result.is_err();
        result
    }
}

/// Delivery state of a partition's blocks or of their report.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeliveryProgress {
    /// Servers to try, in order.
    replicas: Vec<usize>,
    /// Number of servers that were tried.
    tried: usize,
    acknowledged: usize,
}

/// Result of a call to a server.
struct ServerCall {
    result: Result<(), Error>,
    /// Numbers of the partitions in the call.
    partitions: Vec<usize>,
}

impl DeliveryProgress {
    fn new(replicas: Vec<usize>) -> Self {
        Self { replicas, tried: 0, acknowledged: 0 }
    }
}

/// Selects the next servers to try: as many untried replicas of each partition as it still needs.
/// Returns the numbers of the partitions by server. The result is empty if every partition has
/// enough replicas or none left to try.
fn next_round(progress: &mut [DeliveryProgress], needed: usize) -> BTreeMap<usize, Vec<usize>> {
    let mut round: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (number, partition) in progress.iter_mut().enumerate() {
        let missing = needed.saturating_sub(partition.acknowledged);
        let next = partition.replicas.iter().skip(partition.tried).take(missing);
        let mut count = 0;
        for &server in next {
            round.entry(server).or_default().push(number);
            count += 1;
        }
        partition.tried += count;
    }
    round
}

/// Sends a batch to `replicas.write` servers of each partition. Replaces failed servers with other
/// replicas.
async fn deliver(shuffle: Arc<ShuffleContext>, batch: Vec<PartitionBlocks>) -> Result<(), Error> {
    let needed = shuffle.options().replicas.write;
    let replicas =
        batch.iter().map(|(partition, _)| shuffle.replica_servers(*partition).map(DeliveryProgress::new));
    let mut progress = replicas.collect::<Result<Vec<_>, _>>()?;
    let mut failure = None;
    loop {
        let round = next_round(&mut progress, needed);
        if round.is_empty() {
            break;
        }
        let mut sends = JoinSet::new();
        for (server, numbers) in round {
            let part: Vec<PartitionBlocks> = numbers.iter().map(|&number| batch[number].clone()).collect();
            let (server, key) = (Arc::clone(shuffle.server(server)), shuffle.key().clone());
            sends.spawn(
                async move { ServerCall { result: server.push(&key, &part).await, partitions: numbers } },
            );
        }
        failure = count(sends, &mut progress).await.or(failure);
    }
    let partitions: Vec<PartitionId> = batch.iter().map(|(partition, _)| *partition).collect();
    check_quorum(&progress, &partitions, needed, failure)
}

/// Reports a task's blocks to all replicas of its partitions. `replicas.write` of them must
/// acknowledge.
async fn report(
    shuffle: &ShuffleContext,
    task: TaskAttemptId,
    written: &BTreeMap<PartitionId, Vec<BlockId>>,
) -> Result<(), Error> {
    let needed = shuffle.options().replicas.write;
    let partitions: Vec<PartitionId> = written.keys().copied().collect();
    let replicas =
        partitions.iter().map(|partition| shuffle.replica_servers(*partition).map(DeliveryProgress::new));
    let mut progress = replicas.collect::<Result<Vec<_>, _>>()?;
    let mut reports = JoinSet::new();
    for (server, numbers) in next_round(&mut progress, usize::MAX) {
        let blocks = numbers.iter().map(|&number| partitions[number]);
        let blocks: Vec<_> = blocks.map(|partition| (partition, written[&partition].clone())).collect();
        let (server, key) = (Arc::clone(shuffle.server(server)), shuffle.key().clone());
        reports.spawn(async move {
            ServerCall { result: server.report(&key, task, &blocks).await, partitions: numbers }
        });
    }
    let failure = count(reports, &mut progress).await;
    check_quorum(&progress, &partitions, needed, failure)
}

/// Waits for calls and counts the acknowledgements of their partitions. Returns the last failure.
async fn count(mut calls: JoinSet<ServerCall>, progress: &mut [DeliveryProgress]) -> Option<Error> {
    let mut failure = None;
    while let Some(ended) = calls.join_next().await {
        match ended {
            Ok(ServerCall { result: Ok(()), partitions }) => {
                partitions.iter().for_each(|&number| progress[number].acknowledged += 1);
            }
            Ok(ServerCall { result: Err(error), .. }) => {
                tracing::debug!(%error, "a replica failed");
                failure = Some(error);
            }
            Err(error) => failure = Some(Error::unfinished(&error)),
        }
    }
    failure
}

fn check_quorum(
    progress: &[DeliveryProgress],
    partitions: &[PartitionId],
    needed: usize,
    failure: Option<Error>,
) -> Result<(), Error> {
    let short = progress.iter().zip(partitions).find(|(progress, _)| progress.acknowledged < needed);
    match short {
        None => Ok(()),
        Some((progress, &partition)) => Err(Error::WriteQuorum {
            partition,
            acknowledged: progress.acknowledged,
            needed,
            source: failure.map(Box::new),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assignment::Assignment;
    use crate::handle::ShuffleHandle;
    use crate::options::ClientOptions;
    use crate::proto::{PartitionRangeAssignment, ShuffleServerId};
    use crate::server::Server;
    use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

    /// Returns a writer for one partition on a server that is never reached.
    fn writer(send_bytes_max: u64) -> ShuffleWriter {
        let server =
            ShuffleServerId { id: "s".to_owned(), ip: "127.0.0.1".to_owned(), port: 1, ..Default::default() };
        let range = PartitionRangeAssignment { start_partition: 0, end_partition: 0, server: vec![server] };
        let assignment = Assignment::new(1, 1, &[range]).unwrap();
        let options = Arc::new(ClientOptions::default().with(|it| it.send_bytes_max = send_bytes_max));
        let servers = assignment.servers().iter().cloned();
        let servers = servers.map(|it| Arc::new(Server::new(it, Arc::clone(&options)).unwrap())).collect();
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        let handle = ShuffleHandle { key, assignment, remote_storage: None };
        let shuffle = Arc::new(ShuffleContext::new(options, servers, handle));
        ShuffleWriter::new(shuffle, TaskAttemptId(1)).unwrap()
    }

    #[tokio::test]
    async fn tiny_blocks_are_sent_before_they_exceed_a_request() {
        let mut writer = writer(10 * (1 + BLOCK_EXTRA_BYTES));
        for _ in 0..9 {
            writer.write(PartitionId(0), vec![1]).await.unwrap();
        }
        assert_eq!(writer.sends.len(), 0);
        writer.write(PartitionId(0), vec![1]).await.unwrap();
        assert_eq!((writer.sends.len(), writer.pending.len()), (1, 0));
    }

    #[test]
    fn replicas_are_tried_until_enough_acknowledged() {
        let mut progress = [DeliveryProgress::new(vec![4, 5, 6]), DeliveryProgress::new(vec![5, 6, 4])];
        let round =
            |progress: &mut [DeliveryProgress]| next_round(progress, 2).into_iter().collect::<Vec<_>>();
        assert_eq!(round(&mut progress), [(4, vec![0]), (5, vec![0, 1]), (6, vec![1])]);
        // Server 5 failed: each partition needs one more.
        progress.iter_mut().for_each(|partition| partition.acknowledged = 1);
        assert_eq!(round(&mut progress), [(4, vec![1]), (6, vec![0])]);
        progress[0].acknowledged = 2;
        // The second has no replica left.
        assert_eq!(round(&mut progress), []);
        let partitions = [PartitionId(7), PartitionId(8)];
        let error = check_quorum(&progress, &partitions, 2, None).unwrap_err();
        let is_of_8 = matches!(
            error,
            Error::WriteQuorum { partition: PartitionId(8), acknowledged: 1, needed: 2, source: None }
        );
        assert!(is_of_8, "{error}");
        progress[1].acknowledged = 2;
        assert!(check_quorum(&progress, &partitions, 2, None).is_ok());
    }
}
