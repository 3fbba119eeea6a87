//! Sends.
//!
//! Both listeners fill a [`SendSession`] through [`crate::service::SendSink`] while a request
//! arrives. It holds the request's resources: the reservation of its ticket and the memory of its
//! blocks. Nothing is visible until [`SendSession::commit`]; a session dropped before returns
//! everything. Nothing on this path waits, allocates per block beyond vector growth, or formats a
//! string.

use std::sync::Arc;

use crate::app::{App, QuotaResource, ShuffleState, WaitStage};
use crate::clock::Instant;
use crate::memory::{BlockFill, Buffer, CommitOutcome, MemoryError, Reservation, ShuffleBuffers};
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Budget, Charge, HeapKind};
use uniffle_wire::BlockHeader;
use uniffle_wire::types::{AppId, BLOCK_BYTES_MAX, BlockId, BlockMeta, PartitionId, TaskAttemptId, TicketId};

use super::Ingest;
use super::partition_limit::{PartitionLimits, PartitionSizes};
use crate::service::ServiceError;
use crate::service::parts::shuffle_of;

/// Number of blocks of a send that are tracked without a charge.
const BLOCKS_FREE: usize = 16;

/// Number of blocks charged at once, which keeps heap accesses rare.
const BLOCKS_AT_ONCE: usize = 256;

/// Number of blocks stored under one acquisition of a partition's lock. Its readers wait a few
/// hundred microseconds for that.
const BLOCKS_STORED_AT_ONCE: usize = 4096;

/// Numbers of partitions and blocks up to which a send is committed or aborted inline: one or two
/// milliseconds. A blocking thread costs two wake-ups and the cache lines of the blocks. A send may
/// have hundreds of thousands of partitions.
const SMALL: (usize, usize) = (1024, 8192);

/// Heap of an uncommitted block, including spare capacity of the lists.
const BLOCK_BYTES: u64 =
    (size_of::<(BlockMeta, BlockFill)>() + size_of::<(BlockMeta, BlockFill)>() / 2) as u64;

/// Header of a send.
#[derive(Debug, Clone, Copy)]
pub struct IncomingSend<'a> {
    /// Application id as sent.
    pub app: &'a str,
    /// Shuffle id.
    pub shuffle: i32,
    /// The ticket.
    pub ticket: i64,
    /// Bytes of the whole message; an upper bound of its payload.
    pub message_bytes: u64,
}

impl Ingest {
    /// Opens a send and redeems its ticket.
    ///
    /// # Errors
    /// Unknown app or shuffle; a ticket that is missing, expired, used, or another app's; an
    /// exhausted quota; sends are refused during a hand-over.
    pub fn begin_send(self: &Arc<Self>, header: IncomingSend<'_>) -> Result<SendSession, ServiceError> {
        let opened = self.open_send(header);
        if opened.is_err() {
            self.parts.metrics.rejected_sends.inc();
            if let Ok(app) = self.parts.app(header.app) {
                app.account.sends_failed.add(1, header.message_bytes);
            }
        }
        opened
    }

    fn open_send(self: &Arc<Self>, header: IncomingSend<'_>) -> Result<SendSession, ServiceError> {
        let app = self.parts.touched_app(header.app)?;
        // The ticket is redeemed first: if anything else is wrong, its memory must be released now.
        let mut funds = self.parts.memory.tickets().redeem(app.id(), TicketId(header.ticket))?;
        self.parts.metrics.ticket_lifetime.observe(funds.age().as_secs_f64());
        self.commits.check()?; // rather now than after all of its bytes
        app.usage.check(QuotaResource::DiskBytes, header.message_bytes)?;
        let missing = || ServiceError::NotRegisteredPart(format!("shuffle {}", header.shuffle));
        let (key, shuffle) = shuffle_of(&app, header.shuffle).ok_or_else(missing)?;
        let buffers = self.parts.memory.shuffle(&key).ok_or_else(missing)?;
        funds.truncate_to(header.message_bytes);
        Ok(SendSession {
            payload_bytes_max: funds.requested_bytes(),
            bookkeeping: Bookkeeping::new(&app.budgets.unfinished_blocks),
            ingest: Arc::clone(self),
            app,
            shuffle,
            buffers,
            funds,
            limits: self.partition_limits(),
            runs: Vec::new(),
            blocks: Vec::new(),
            open: None,
            payload_bytes: 0,
            stored_bytes: 0,
            stored_blocks: 0,
            began: Instant::now(),
            committed: false,
        })
    }
}

/// A block whose bytes have arrived.
type ArrivedBlock = (BlockMeta, BlockFill);

/// Consecutive blocks of one partition.
#[derive(Debug)]
struct BlockRun {
    buffer: Arc<Buffer>,
    /// Number of blocks of the send up to the end of the run.
    end: usize,
}

/// The first blocks of a longer sequence.
struct FirstBlocks<'a> {
    all: &'a mut std::vec::IntoIter<ArrivedBlock>,
    count: usize,
}

impl Iterator for FirstBlocks<'_> {
    type Item = ArrivedBlock;

    fn next(&mut self) -> Option<Self::Item> {
        self.count = self.count.checked_sub(1)?;
        self.all.next()
    }
}

impl AsRef<[ArrivedBlock]> for FirstBlocks<'_> {
    fn as_ref(&self) -> &[ArrivedBlock] {
        &self.all.as_slice()[..self.count]
    }
}

/// Bookkeeping of the uncommitted blocks of a send, charged in advance.
#[derive(Debug)]
struct Bookkeeping {
    blocks: usize,
    paid: usize,
    charge: Charge,
}

impl Bookkeeping {
    fn new(budget: &Budget) -> Self {
        Self { blocks: 0, paid: BLOCKS_FREE, charge: budget.empty_charge() }
    }

    #[inline]
    fn add(&mut self) -> Result<(), HeapFull> {
        self.blocks += 1;
        if self.blocks > self.paid {
            let charged = self.charge.try_grow(BLOCKS_AT_ONCE as u64 * BLOCK_BYTES);
            charged.map_err(|refusal| HeapFull::of(HeapKind::Blocks, refusal))?;
            self.paid += BLOCKS_AT_ONCE;
        }
        Ok(())
    }
}

/// A block whose bytes are arriving.
#[derive(Debug)]
struct OpenBlock {
    fill: BlockFill,
    length: u32,
    crc: crc32fast::Hasher,
}

/// A send that is arriving. Its blocks become readable at the commit; dropping it releases
/// everything.
#[derive(Debug)]
pub struct SendSession {
    ingest: Arc<Ingest>,
    app: Arc<App>,
    shuffle: Arc<ShuffleState>,
    buffers: Arc<ShuffleBuffers>,
    /// Limits at the beginning of the send.
    limits: PartitionLimits,
    // Fills are dropped before the reservation, so that aborted memory is released before the
    // reservation returns.
    open: Option<OpenBlock>,
    blocks: Vec<ArrivedBlock>,
    runs: Vec<BlockRun>,
    funds: Reservation,
    bookkeeping: Bookkeeping,
    payload_bytes_max: u64,
    payload_bytes: u64,
    stored_bytes: u64,
    stored_blocks: u64,
    began: Instant,
    committed: bool,
}

impl SendSession {
    /// Returns the application's heap budget for uncommitted blocks.
    pub(super) fn unfinished_blocks(&self) -> &Budget {
        &self.app.budgets.unfinished_blocks
    }

    /// Returns the sending application.
    pub(in crate::service) fn app(&self) -> &AppId {
        self.app.id()
    }

    /// Begins `partition`, to which the following blocks belong.
    ///
    /// # Errors
    /// `NO_REGISTER` if it was not registered or is being purged; no heap for a new partition.
    pub fn partition(&mut self, partition: i32) -> Result<(), ServiceError> {
        let id = PartitionId(partition);
        let missing = || ServiceError::NotRegisteredPart(format!("partition {partition}"));
        // Only registered partitions have buffers, and a look-up there takes one lock.
        let buffer = match self.buffers.existing(id) {
            Some(buffer) => buffer,
            None if !self.shuffle.partitions.contains(id) => return Err(missing()),
            None => {
                self.buffers.buffer(id, &self.app.budgets.partitions).map_err(|refusal| match refusal {
                    MemoryError::Purged => missing(),
                    refusal => refusal.into(),
                })?
            }
        };
        self.runs.push(BlockRun { buffer, end: self.blocks.len() });
        Ok(())
    }

    /// Begins a block of `length` bytes and reserves its position in the partition's chain.
    ///
    /// # Errors
    /// A length of 0 or above the limit, a block before the first partition, more payload than the
    /// ticket covers, more blocks than the heap has room for, or a purged shuffle.
    pub fn begin_block(&mut self, length: u32) -> Result<(), ServiceError> {
        if length == 0 || length > BLOCK_BYTES_MAX {
            return Err(ServiceError::Malformed(format!(
                "a block of {length} bytes; 1 to {BLOCK_BYTES_MAX} are allowed"
            )));
        }
        self.payload_bytes += u64::from(length);
        if self.payload_bytes > self.payload_bytes_max {
            let (requested, remaining) = (self.payload_bytes, self.payload_bytes_max);
            return Err(MemoryError::TicketOverspent { requested, remaining }.into());
        }
        self.bookkeeping.add()?;
        let Some(run) = self.runs.last_mut() else {
            return Err(ServiceError::Malformed("a block precedes the first partition".to_owned()));
        };
        let fill = run.buffer.reserve(length, &mut self.funds)?;
        self.open = Some(OpenBlock { fill, length, crc: crc32fast::Hasher::new() });
        Ok(())
    }

    /// Appends bytes to the open block.
    ///
    /// # Errors
    /// More bytes than the block's announced length.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ServiceError> {
        let Some(open) = self.open.as_mut().filter(|open| bytes.len() <= open.fill.remaining()) else {
            return Err(ServiceError::Malformed("more bytes than the block's length".to_owned()));
        };
        open.fill.write(bytes);
        // Checksummed while in cache (docs/design/data-path.md §2).
        open.crc.update(bytes);
        Ok(())
    }

    /// Ends the open block, and compares its checksum (CRC-32) with the one that the client sent.
    ///
    /// # Errors
    /// Bytes are missing, or the header contradicts them or itself.
    pub fn end_block(&mut self, header: BlockHeader) -> Result<(), ServiceError> {
        let Some(open) = self.open.take().filter(|open| open.fill.remaining() == 0) else {
            return Err(ServiceError::Malformed("a block ends before its bytes".to_owned()));
        };
        let meta = block_meta(header, open.length)?;
        if meta.crc != 0 {
            let actual = open.crc.finalize();
            if actual != meta.crc {
                self.ingest.parts.metrics.crc_mismatches.inc();
                return Err(ServiceError::BlockCrc { block: header.block_id, announced: meta.crc, actual });
            }
        }
        if self.blocks.len() == self.blocks.capacity() {
            // By halves, because long lists must not take twice the memory of their contents.
            self.blocks.reserve_exact((self.blocks.len() / 2).max(4));
        }
        self.blocks.push((meta, open.fill));
        if let Some(run) = self.runs.last_mut() {
            run.end = self.blocks.len();
        }
        Ok(())
    }

    /// Returns whether the send is small enough to commit or abort inline.
    pub(in crate::service) fn is_small(&self) -> bool {
        let (partitions, blocks) = SMALL;
        self.runs.len() <= partitions && self.bookkeeping.blocks <= blocks
    }

    /// Makes the blocks visible. Hard limits are checked before any block is stored. Partitions are
    /// committed one after another: if one was purged meanwhile, those before it stay stored
    /// (docs/protocol.md §2.5). Clients treat that as a failed send and repeat it.
    ///
    /// # Errors
    /// The request carried no block, a partition would be too large, its shuffle was purged, there
    /// is no heap for its blocks, or a successor is about to take over.
    pub fn commit(mut self) -> Result<(), ServiceError> {
        if self.open.is_some() || self.blocks.is_empty() {
            return Err(ServiceError::Malformed("No data in request".to_owned()));
        }
        self.check_hard_limit()?;
        let ingest = Arc::clone(&self.ingest);
        let _passing = ingest.commits.pass()?;
        let stored = self.store_all();
        // Added once for all partitions, because every send of the process updates these two
        // counters.
        ingest.parts.metrics.received_bytes.inc_by(self.stored_bytes);
        ingest.parts.metrics.received_blocks.inc_by(self.stored_blocks);
        stored?;
        self.committed = true;
        self.app.account.enter(WaitStage::Receive, self.stored_bytes, self.began.elapsed());
        self.ingest.parts.apps.touch(&self.app);
        if let Some(flusher) = &self.ingest.parts.flusher {
            flusher.check_pressure();
        }
        Ok(())
    }

    /// Releases the memory of the uncommitted blocks at once. Otherwise it would stay allocated
    /// until the flusher's next scan, and clients that fail repeatedly would hold it all the time.
    fn abort(&mut self) {
        self.open = None;
        self.blocks.clear();
        self.runs.iter().for_each(|run| run.buffer.drop_dead());
    }
}

impl SendSession {
    /// Checks the hard limit of each run. Runs are checked separately, because a client sends one
    /// per partition.
    fn check_hard_limit(&self) -> Result<(), ServiceError> {
        if self.limits.bytes_max.is_none() {
            return Ok(());
        }
        let mut start = 0;
        for run in &self.runs {
            let blocks = &self.blocks[std::mem::replace(&mut start, run.end)..run.end];
            let sizes = PartitionSizes {
                received: run.buffer.received_bytes(),
                in_memory: run.buffer.in_memory_bytes(),
                requested: blocks.iter().map(|(meta, _)| u64::from(meta.length)).sum(),
            };
            if self.limits.is_too_large(sizes.received + sizes.requested) {
                let partition = run.buffer.partition().0;
                return Err(self.ingest.partition_too_large(&self.app, self.shuffle.key(), partition, sizes));
            }
        }
        Ok(())
    }

    /// Commits the blocks to their partitions, and flushes partitions that became too large.
    fn store_all(&mut self) -> Result<(), ServiceError> {
        self.buffers.pay_for_blocks(self.blocks.len(), &mut self.funds)?;
        let runs = std::mem::take(&mut self.runs);
        let mut blocks = std::mem::take(&mut self.blocks).into_iter();
        let mut start = 0;
        let stored = runs.iter().try_for_each(|run| {
            let count = run.end - std::mem::replace(&mut start, run.end);
            self.store(&run.buffer, FirstBlocks { all: &mut blocks, count })
        });
        if let Some(flusher) = &self.ingest.parts.flusher {
            flusher.flush_oversized(&self.buffers, runs.iter().map(|run| &run.buffer));
        }
        self.blocks = blocks.collect();
        self.runs = runs;
        stored
    }

    fn store(&mut self, buffer: &Buffer, blocks: FirstBlocks<'_>) -> Result<(), ServiceError> {
        if blocks.count == 0 {
            return Ok(());
        }
        let cares = self.shuffle.ledger.is_watched();
        let ids: Vec<u64> = match cares {
            true => blocks.as_ref().iter().map(|(meta, _)| meta.block_id.0.unsigned_abs()).collect(),
            false => Vec::new(),
        };
        let stored = self.commit_to(buffer, blocks)?;
        if cares {
            self.ingest.parts.losses.note_committed(&self.shuffle, buffer.partition(), &ids);
        } else if self.shuffle.ledger.is_watched() {
            self.ingest.parts.losses.count_again(&self.shuffle, buffer.partition());
        }
        self.stored_bytes += stored.bytes;
        self.stored_blocks += stored.blocks as u64;
        if stored.duplicate_blocks > 0 {
            self.app.account.duplicates.add(stored.duplicate_blocks as u64, stored.duplicate_bytes);
            buffer.drop_dead();
        }
        let received_bytes = buffer.received_bytes();
        if self.limits.is_huge(received_bytes) {
            self.mark_huge(buffer.partition(), received_bytes);
        }
        Ok(())
    }

    fn commit_to(&mut self, buffer: &Buffer, blocks: FirstBlocks<'_>) -> Result<CommitOutcome, MemoryError> {
        let (mut left, mut total) = (blocks.count, CommitOutcome::default());
        while left > 0 {
            let count = left.min(BLOCKS_STORED_AT_ONCE);
            left -= count;
            total += buffer.commit(FirstBlocks { all: &mut *blocks.all, count }, &mut self.funds)?;
        }
        Ok(total)
    }

    fn mark_huge(&self, partition: PartitionId, received_bytes: u64) {
        if !self.shuffle.partitions.mark_huge(partition) {
            return;
        }
        self.ingest.parts.metrics.huge_partitions_marked.inc();
        if self.app.account.mark_huge() {
            self.ingest.parts.metrics.apps_with_huge_partition_marked.inc();
        }
        tracing::info!(
            shuffle = %self.shuffle.key(),
            %partition,
            received_bytes,
            "partition is huge; its memory is limited from now on"
        );
    }
}

impl Drop for SendSession {
    fn drop(&mut self) {
        if !self.committed {
            self.abort();
            self.ingest.parts.metrics.rejected_sends.inc();
            self.app.account.sends_failed.add(1, self.payload_bytes);
        }
    }
}

fn block_meta(header: BlockHeader, length: u32) -> Result<BlockMeta, ServiceError> {
    if i64::from(header.length) != i64::from(length) {
        let text = format!("block {} announces {} bytes and has {length}", header.block_id, header.length);
        return Err(ServiceError::Malformed(text));
    }
    let invalid = |field, value, allowed| ServiceError::InvalidField { field, value, allowed };
    if header.block_id < 0 {
        return Err(invalid("blockId", header.block_id, "must be 0 or more"));
    }
    let crc = u32::try_from(header.crc)
        .map_err(|_| invalid("crc", header.crc, "must be a CRC-32 of 0 to 2^32-1"))?;
    let uncompressed_length = u32::try_from(header.uncompressed_length).map_err(|_| {
        invalid("uncompressLength", i64::from(header.uncompressed_length), "must be 0 or more")
    })?;
    Ok(BlockMeta {
        block_id: BlockId(header.block_id),
        task_attempt_id: TaskAttemptId(header.task_attempt_id),
        length,
        uncompressed_length,
        crc,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_whose_length_differs_from_its_bytes_is_refused() {
        let header =
            BlockHeader { block_id: 1, length: 3, uncompressed_length: 9, crc: 7, task_attempt_id: 5 };
        assert!(block_meta(header, 3).is_ok());
        assert!(block_meta(header, 4).is_err());
        assert!(block_meta(BlockHeader { length: -1, ..header }, 4).is_err());
        assert!(block_meta(BlockHeader { block_id: -1, ..header }, 3).is_err());
        assert!(block_meta(BlockHeader { crc: 1 << 32, ..header }, 3).is_err());
        assert!(block_meta(BlockHeader { crc: -1, ..header }, 3).is_err());
        assert!(block_meta(BlockHeader { uncompressed_length: -1, ..header }, 3).is_err());
    }
}
