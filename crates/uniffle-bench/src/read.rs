//! Readers: each takes a partition and reads it as the Java client does: reported ids, memory,
//! index, data.
//!
//! Every byte is compared with the written one, unless disabled. Invariant: a partition is only
//! done when each expected block was seen with correct bytes, lengths and checksum, and no unknown
//! block was seen.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use uniffle_client::block::Block;
use uniffle_client::read;
use uniffle_wire::types::{PartitionId, ShuffleKey};

use crate::content::ContentPool;
use crate::session::ClientSession;
use crate::stats::{Stats, TimedOperation, add};
use crate::write::ExpectedIds;

/// Number of consecutive memory responses without a new block after which the server counts as
/// looping.
const REPEATED_RESPONSES_MAX: u32 = 1_000;

/// State that all readers of a phase share.
pub(crate) struct ReadPhase {
    pub(crate) readers: u32,
    /// Total number of partition reads. A partition may be read several times.
    pub(crate) reads: u64,
    pub(crate) partitions: u32,
    pub(crate) read_buffer_bytes: u32,
    /// Disables the comparison of bytes.
    pub(crate) unchecked: bool,
    /// Deadline of the phase: no reader takes another read after it.
    pub(crate) until: Option<Instant>,
    pub(crate) pool: Arc<ContentPool>,
    pub(crate) key: ShuffleKey,
    pub(crate) sessions: Vec<Arc<ClientSession>>,
    pub(crate) stats: Arc<Stats>,
    /// Ids of the written blocks.
    pub(crate) ledger: Arc<ExpectedIds>,
    pub(crate) next: AtomicU64,
    /// Total payload bytes per second, and payload bytes per read.
    pub(crate) pace: Option<(f64, f64)>,
    pub(crate) begin: Instant,
}

/// Runs all readers until they are done or the first error occurs.
pub(crate) async fn run(phase: Arc<ReadPhase>) -> anyhow::Result<()> {
    let mut readers = JoinSet::new();
    for reader in 0..phase.readers {
        readers.spawn(work(phase.clone(), reader));
    }
    while let Some(done) = readers.join_next().await {
        done??;
    }
    Ok(())
}

async fn work(phase: Arc<ReadPhase>, reader: u32) -> anyhow::Result<()> {
    let session = &phase.sessions[usize::try_from(reader)? % phase.sessions.len()];
    loop {
        let number = phase.next.fetch_add(1, Ordering::Relaxed);
        let is_over = phase.until.is_some_and(|until| Instant::now() >= until);
        if number >= phase.reads || is_over {
            return Ok(());
        }
        let partition = i32::try_from(number % u64::from(phase.partitions))?;
        let begin = pace(&phase, number).await;
        let read = read_partition(&phase, session, PartitionId(partition)).await;
        read.with_context(|| format!("partition {partition}"))?;
        phase.stats.record(TimedOperation::ReadPartition, begin.elapsed());
    }
}

/// Waits for the due time of read `number`, and returns it.
async fn pace(phase: &ReadPhase, number: u64) -> Instant {
    let Some((rate, bytes)) = phase.pace else { return Instant::now() };
    let due = phase.begin + Duration::from_secs_f64(number as f64 * bytes / rate);
    sleep_until(due).await;
    due
}

async fn read_partition(
    phase: &ReadPhase,
    session: &ClientSession,
    partition: PartitionId,
) -> anyhow::Result<()> {
    let (stats, key) = (&phase.stats, &phase.key);
    let mut check = PartitionCheck::new(&phase.pool, stats, phase.ledger.sorted(partition));
    check.unchecked = phase.unchecked;
    let reported = session.results(stats, key, partition).await?;
    check.compare_ids(reported.iter())?;
    let limit = i32::try_from(phase.read_buffer_bytes)?;
    let (mut cursor, mut repeated) = (None, 0);
    loop {
        let (blocks, is_end) = session.memory(stats, key, partition, cursor, limit).await?;
        let Some(last) = blocks.last() else { break };
        cursor = Some(last.meta.block_id);
        let new = check.take(&blocks)?;
        add(&stats.blocks_from_memory, new);
        if is_end == Some(true) {
            break;
        }
        repeated = if new == 0 { repeated + 1 } else { 0 };
        ensure!(repeated < REPEATED_RESPONSES_MAX, "memory responses repeat endlessly");
    }
    let (records, data_length) = session.index(stats, key, partition).await?;
    for segment in read::segments(&records, data_length, u64::from(phase.read_buffer_bytes), |_| true)? {
        if segment.records.iter().all(|record| check.seen(record.meta.block_id.0)) {
            add(&stats.blocks_repeated, segment.records.len() as u64);
            continue;
        }
        let data = session.data(stats, key, partition, segment.offset, segment.length).await?;
        let new = check.take(&read::segment_blocks(&segment, &data)?)?;
        add(&stats.blocks_from_disk, new);
    }
    check.finish()
}

/// Expected blocks of one partition, and the blocks seen so far.
struct PartitionCheck<'a> {
    pool: &'a ContentPool,
    stats: &'a Stats,
    expected: Vec<i64>,
    seen: Vec<bool>,
    missing: usize,
    /// Disables the comparison of bytes.
    unchecked: bool,
}

impl<'a> PartitionCheck<'a> {
    /// Creates a check for the ascending ids `expected`.
    fn new(pool: &'a ContentPool, stats: &'a Stats, expected: Vec<i64>) -> Self {
        let missing = expected.len();
        Self { pool, stats, seen: vec![false; missing], expected, missing, unchecked: false }
    }

    /// Compares the reported ids, which a bitmap yields in ascending order.
    fn compare_ids(&self, reported: impl Iterator<Item = u64>) -> anyhow::Result<()> {
        let expected = self.expected.iter().map(|id| id.cast_unsigned());
        ensure!(reported.eq(expected), "the reported block ids differ from the written ones");
        Ok(())
    }

    fn seen(&self, id: i64) -> bool {
        self.expected.binary_search(&id).is_ok_and(|index| self.seen[index])
    }

    /// Checks blocks. Returns how many are new.
    fn take(&mut self, blocks: &[Block]) -> anyhow::Result<u64> {
        let mut new = 0;
        for block in blocks {
            let id = block.meta.block_id.0;
            let Ok(index) = self.expected.binary_search(&id) else {
                bail!("block {id} was never written to this partition")
            };
            self.compare(block)?;
            add(&self.stats.read_bytes, block.data.len() as u64);
            if std::mem::replace(&mut self.seen[index], true) {
                add(&self.stats.blocks_repeated, 1);
            } else {
                self.missing -= 1;
                new += 1;
            }
        }
        Ok(new)
    }

    fn compare(&self, block: &Block) -> anyhow::Result<()> {
        let meta = &block.meta;
        let id = meta.block_id.0;
        let written = self.pool.describe(id);
        ensure!(
            meta.length == written.length,
            "block {id} has {} bytes, not {}",
            meta.length,
            written.length
        );
        ensure!(meta.uncompressed_length == written.length, "block {id}: uncompressed length differs");
        ensure!(meta.crc == self.pool.crc(written), "block {id}: checksum differs");
        let task = id & ((1 << crate::plan::LAYOUT.task_bits) - 1);
        ensure!(meta.task_attempt_id.0 == task, "block {id}: task attempt {} is wrong", meta.task_attempt_id);
        let expected = self.pool.view(written);
        ensure!(block.data.len() == expected.len(), "block {id} has {} bytes", block.data.len());
        if !self.unchecked && block.data != expected {
            let at = block.data.iter().zip(expected).position(|(got, expected)| got != expected);
            bail!("block {id} differs from what was written at byte {}", at.unwrap_or(0));
        }
        Ok(())
    }

    fn finish(&self) -> anyhow::Result<()> {
        let total = self.expected.len();
        ensure!(self.missing == 0, "{} of {total} blocks are missing", self.missing);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use uniffle_wire::types::BlockId;

    use super::*;
    use crate::plan::WorkPlan;

    fn written() -> (Arc<ContentPool>, Vec<Block>) {
        let pool = Arc::new(ContentPool::new(1, "tiny".parse().unwrap()));
        let message = WorkPlan::new(pool.clone(), 1, 1, 0.0)
            .with_messages(5_000, 1)
            .messages_of(0)
            .next_message(u64::MAX);
        let planned = &message.partitions[0].1;
        let blocks =
            planned.iter().map(|p| Block::new(BlockId(p.id), message.task, pool.bytes(p.block))).collect();
        (pool, blocks)
    }

    fn check<'a>(pool: &'a ContentPool, stats: &'a Stats, blocks: &[Block]) -> PartitionCheck<'a> {
        let mut ids: Vec<i64> = blocks.iter().map(|block| block.meta.block_id.0).collect();
        ids.sort_unstable();
        PartitionCheck::new(pool, stats, ids)
    }

    #[test]
    fn written_blocks_pass_and_duplicates_count_once() {
        let (pool, blocks) = written();
        let stats = Stats::default();
        let mut check = check(&pool, &stats, &blocks);
        assert!(check.compare_ids(check.expected.iter().map(|id| id.cast_unsigned())).is_ok());
        assert_eq!(check.take(&blocks).unwrap(), blocks.len() as u64);
        assert_eq!(check.take(&blocks).unwrap(), 0);
        assert!(check.finish().is_ok());
        assert_eq!(crate::stats::get(&stats.blocks_repeated), blocks.len() as u64);
    }

    #[test]
    fn missing_unknown_and_unreported_blocks_are_detected() {
        let (pool, blocks) = written();
        let stats = Stats::default();
        let mut missing = check(&pool, &stats, &blocks);
        missing.take(&blocks[1..]).unwrap();
        assert!(missing.finish().unwrap_err().to_string().starts_with("1 of "));
        let mut unknown = check(&pool, &stats, &blocks[1..]);
        assert!(unknown.take(&blocks).unwrap_err().to_string().contains("never written"));
        assert!(missing.compare_ids([1].into_iter()).is_err());
    }

    #[test]
    fn single_wrong_bit_is_detected() {
        let (pool, blocks) = written();
        let stats = Stats::default();
        let wrong: [fn(&mut Block); 5] = [
            |block| {
                let mut bytes = block.data.to_vec();
                *bytes.last_mut().unwrap() ^= 1;
                block.data = Bytes::from(bytes);
            },
            |block| block.meta.crc ^= 1,
            |block| block.meta.length ^= 1,
            |block| block.meta.uncompressed_length ^= 1,
            |block| block.meta.task_attempt_id.0 ^= 1,
        ];
        for wrong in wrong {
            let mut block = blocks[0].clone();
            wrong(&mut block);
            assert!(check(&pool, &stats, &blocks).take(&[block]).is_err());
        }
        let mut block = blocks[0].clone();
        block.data = Bytes::from(vec![0; block.data.len()]);
        let mut unchecked = check(&pool, &stats, &blocks);
        unchecked.unchecked = true;
        assert!(unchecked.take(&[block.clone()]).is_ok());
        block.data.truncate(block.data.len() - 1);
        assert!(unchecked.take(&[block]).is_err(), "a block of another length than announced was accepted");
    }
}
