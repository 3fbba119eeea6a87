//! Reads a partition as the Java client does: memory up to its end, then the index once, then the
//! data.
//!
//! Splitting responses into blocks is in [`crate::read`]. Invariants: each block is counted
//! once by id, the checksum of every counted block that has one was compared, and a server that
//! repeats itself endlessly is an error.

use std::collections::BTreeMap;

use bytes::Bytes;
use croaring::Treemap;

use super::{ClientError, IndexResponse, MemoryResponse, ShuffleClient, check, failed, malformed};
use crate::block::Block;
use crate::proto;
use crate::read::{self, DataSegment, Malformed, RecordPosition};
use uniffle_wire::index::FILLER_BLOCK_ID;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey};

/// Number of consecutive memory responses without a new block after which reading stops. If the
/// block at the cursor was flushed, the server restarts from its first block, which is legal and
/// rare. This many repetitions are a loop.
pub(crate) const REPEATED_RESPONSES_MAX: u32 = 1_000;

/// Options of a partition read.
#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// Bytes requested at once (`rss.client.read.buffer.size`). Default: 14 MiB, at most i32::MAX.
    pub read_buffer_size: u32,
    /// Task attempts whose blocks are read (a skew reader). Default: all.
    pub tasks: Option<Treemap>,
    /// Blocks to fetch from disk: segments without any of them are skipped. Other blocks of a
    /// fetched segment, and all blocks in memory, are returned too. Default: all.
    pub expected: Option<Treemap>,
    /// Stops at `is_end`, as the client of Java's master branch does. Older clients read until a
    /// response is empty. Default: true.
    pub trust_is_end: bool,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { read_buffer_size: 14 << 20, tasks: None, expected: None, trust_is_end: true }
    }
}

/// Blocks that were read from a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionRead {
    /// Block data by block id.
    pub blocks: BTreeMap<BlockId, Bytes>,
    /// Number of blocks first seen in memory.
    pub from_memory: usize,
    /// Number of blocks first seen on disk.
    pub from_disk: usize,
    /// Number of blocks that were skipped: seen before, which is legal, or in a segment without an
    /// expected block.
    pub skipped: usize,
}

impl PartitionRead {
    /// Adds blocks of one tier. Returns how many are new.
    fn take(&mut self, rpc: &'static str, blocks: Vec<Block>) -> Result<usize, ClientError> {
        let before = self.blocks.len();
        // Fillers replace lost bytes. They are never reported, so a Java client ignores them as
        // unexpected.
        for block in blocks.into_iter().filter(|block| block.meta.block_id.0 != FILLER_BLOCK_ID) {
            if self.blocks.contains_key(&block.meta.block_id) {
                self.skipped += 1;
                continue;
            }
            read::check_crc(&block).map_err(malformed(rpc))?;
            self.blocks.insert(block.meta.block_id, block.data);
        }
        Ok(self.blocks.len() - before)
    }
}

impl ShuffleClient {
    /// Calls `getMemoryShuffleData` for the blocks after `after` (`None` = from the start). Retries
    /// on NO_BUFFER.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn read_memory(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        after: Option<BlockId>,
        read_buffer_size: u32,
        tasks: Option<&Treemap>,
    ) -> Result<MemoryResponse, ClientError> {
        const RPC: &str = "getMemoryShuffleData";
        let request = proto::GetMemoryShuffleDataRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partition_id: partition.0,
            last_block_id: after.map_or(-1, |id| id.0),
            read_buffer_size: i32::try_from(read_buffer_size).unwrap_or(i32::MAX),
            timestamp: 0,
            serialized_expected_task_ids_bitmap: tasks.map(read::encode_bitmap),
        };
        self.retry_no_buffer(|| async {
            let answer = self.raw().get_memory_shuffle_data(request.clone()).await;
            let answer = answer.map_err(failed(RPC))?.into_inner();
            check(RPC, answer.status, answer.ret_msg)?;
            let blocks = read::memory_blocks(&answer.shuffle_data_block_segments, &answer.data);
            Ok(MemoryResponse { blocks: blocks.map_err(malformed(RPC))?, is_end: answer.is_end })
        })
        .await
    }

    /// Calls `getLocalShuffleIndex`. Retries on NO_BUFFER.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn read_index(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
    ) -> Result<IndexResponse, ClientError> {
        const RPC: &str = "getLocalShuffleIndex";
        let request = proto::GetLocalShuffleIndexRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partition_id: partition.0,
            partition_num_per_range: 1,
            partition_num: partition.0.saturating_add(1),
        };
        self.retry_no_buffer(|| async {
            let answer = self.raw().get_local_shuffle_index(request.clone()).await;
            let answer = answer.map_err(failed(RPC))?.into_inner();
            check(RPC, answer.status, answer.ret_msg)?;
            let records = read::decode_index(&answer.index_data).map_err(malformed(RPC))?;
            // −1 means that the length is unknown and that the index is authoritative.
            let data_length = u64::try_from(answer.data_file_len).ok();
            Ok(IndexResponse { records, data_length, storage_ids: answer.storage_ids })
        })
        .await
    }

    /// Calls `getLocalShuffleData` for exactly `length` bytes. Retries on NO_BUFFER.
    ///
    /// # Errors
    /// See [`ClientError`]. A response of another length is [`Malformed::DataLength`].
    pub async fn read_data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u64,
    ) -> Result<Bytes, ClientError> {
        self.read_data_of(key, partition, -1, offset, length).await
    }

    /// Reads like [`ShuffleClient::read_data`] from the disk with number `storage`, for a server
    /// whose index has storage ids. [`ShuffleClient::read_partition`] ignores those ids.
    ///
    /// # Errors
    /// See [`ShuffleClient::read_data`].
    pub async fn read_data_of(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        storage: i32,
        offset: u64,
        length: u64,
    ) -> Result<Bytes, ClientError> {
        const RPC: &str = "getLocalShuffleData";
        let number = |what, value: u64| Malformed::Number { what, value: value.cast_signed() };
        let request = proto::GetLocalShuffleDataRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partition_id: partition.0,
            partition_num_per_range: 1,
            partition_num: partition.0.saturating_add(1),
            offset: i64::try_from(offset).map_err(|_| malformed(RPC)(number("offset", offset)))?,
            length: i32::try_from(length).map_err(|_| malformed(RPC)(number("length", length)))?,
            timestamp: 0,
            storage_id: storage,
            next_read_segments: Vec::new(),
        };
        self.retry_no_buffer(|| async {
            let answer = self.raw().get_local_shuffle_data(request.clone()).await;
            let answer = answer.map_err(failed(RPC))?.into_inner();
            check(RPC, answer.status, answer.ret_msg)?;
            if answer.data.len() as u64 != length {
                let source = Malformed::DataLength { expected: length, got: answer.data.len() };
                return Err(malformed(RPC)(source));
            }
            Ok(answer.data)
        })
        .await
    }

    /// Reads a whole partition from all tiers that the server reads: memory, then the index and its
    /// data. Files in HDFS are not read.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn read_partition(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        options: &ReadOptions,
    ) -> Result<PartitionRead, ClientError> {
        let mut result = PartitionRead::default();
        self.drain_memory(key, partition, options, &mut result).await?;
        let index = self.read_index(key, partition).await?;
        for segment in wanted_segments(&index, options)? {
            let unread = |record: &RecordPosition| {
                let id = record.meta.block_id;
                let expected = options.expected.as_ref();
                !result.blocks.contains_key(&id)
                    && expected.is_none_or(|set| set.contains(id.0.cast_unsigned()))
            };
            if !segment.records.iter().any(unread) {
                result.skipped += segment.records.len();
                continue;
            }
            let data = self.read_data(key, partition, segment.offset, segment.length).await?;
            let blocks = read::segment_blocks(&segment, &data).map_err(malformed("getLocalShuffleData"))?;
            result.from_disk += result.take("getLocalShuffleData", blocks)?;
        }
        Ok(result)
    }

    /// Reads the whole memory tier.
    async fn drain_memory(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        options: &ReadOptions,
        result: &mut PartitionRead,
    ) -> Result<(), ClientError> {
        let mut cursor = None;
        let mut repeated = 0;
        loop {
            let answer = self
                .read_memory(key, partition, cursor, options.read_buffer_size, options.tasks.as_ref())
                .await?;
            let Some(last) = answer.blocks.last().map(|block| block.meta.block_id) else { return Ok(()) };
            cursor = Some(last);
            let new = result.take("getMemoryShuffleData", answer.blocks)?;
            result.from_memory += new;
            if options.trust_is_end && answer.is_end == Some(true) {
                return Ok(());
            }
            repeated = if new == 0 { repeated + 1 } else { 0 };
            if repeated >= REPEATED_RESPONSES_MAX {
                return Err(ClientError::Endless { answers: repeated });
            }
        }
    }
}

fn wanted_segments(index: &IndexResponse, options: &ReadOptions) -> Result<Vec<DataSegment>, ClientError> {
    let wanted = |record: &RecordPosition| {
        let task = record.meta.task_attempt_id.0.cast_unsigned();
        options.tasks.as_ref().is_none_or(|tasks| tasks.contains(task))
    };
    let limit = u64::from(options.read_buffer_size);
    let segments = read::segments(&index.records, index.data_length, limit, wanted);
    segments.map_err(malformed("getLocalShuffleIndex"))
}
