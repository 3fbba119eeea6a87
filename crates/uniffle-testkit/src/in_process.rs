//! A client of a service in this process. It follows the Java client step by step but uses no
//! sockets, so it works with paused time.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use croaring::Treemap;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::read;
use uniffle_wire::bitmap;
use uniffle_wire::index::FILLER_BLOCK_ID;
use uniffle_wire::types::{BlockId, Distribution, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::log::PartitionBlockIds;
use uniffle_worker::proto::StatusCode;
use uniffle_worker::service::{
    BlockHeader, ChunkStream, IdWidths, IncomingSend, MemoryReadRequest, ReadRange, RegisterRequest,
    ReportRequest, RequestedPartition, RequireRequest, SendSession, Service, ServiceError,
};

use crate::oracle::{Blocks, WorkerRefusal, WorkerView};

/// Number of retries after NO_BUFFER.
const NO_BUFFER_WAITS: u32 = 60;
const NO_BUFFER_PAUSE: Duration = Duration::from_secs(1);
/// Attempts of a failing read, as Spark repeats a task. By the fourth attempt the worker has
/// determined the losses.
const READ_ATTEMPTS: u32 = 4;
/// Bytes requested per read.
const READ_BUFFER_BYTES: u32 = 14 << 20;

/// Blocks by partition.
pub type PartitionBatch = [(i32, Vec<Block>)];

/// A client of a service.
#[derive(Debug, Clone)]
pub struct InProcess {
    pub service: Arc<Service>,
    pub layout: IdLayout,
}

impl InProcess {
    /// Registers a shuffle with partitions `0..partitions`.
    ///
    /// # Errors
    /// Returns the service's error.
    pub async fn register(&self, key: &ShuffleKey, partitions: i32) -> Result<(), ServiceError> {
        let request = RegisterRequest {
            app: key.app.as_str(),
            shuffle: key.shuffle.0,
            ranges: vec![(0, partitions - 1)],
            user: "tester".to_owned(),
            distribution: Distribution::Normal,
            properties: HashMap::new(),
            remote_storage: None,
            from: None,
        };
        self.service.lifecycle.register(request).await.map(drop)
    }

    /// Sends a batch.
    ///
    /// # Errors
    /// Returns the service's error.
    pub fn send(&self, key: &ShuffleKey, batch: &PartitionBatch) -> Result<(), ServiceError> {
        let bytes: usize =
            batch.iter().flat_map(|(_, blocks)| blocks).map(|block| block.data.len() + 32).sum();
        let partitions: Vec<i32> = batch.iter().map(|(partition, _)| *partition).collect();
        let (app, shuffle) = (key.app.as_str(), key.shuffle.0);
        let grant = self.service.ingest.require_buffer(RequireRequest {
            app,
            shuffle,
            bytes: i32::try_from(bytes).expect("a batch of a test has at most 2 GiB"),
            partitions: &partitions,
            partition_sizes: &[],
        })?;
        let (ticket, message_bytes) = (grant.ticket, bytes as u64 + 1_000);
        let mut session =
            self.service.ingest.begin_send(IncomingSend { app, shuffle, ticket, message_bytes })?;
        for (partition, blocks) in batch {
            session.partition(*partition)?;
            blocks.iter().try_for_each(|block| send_block(&mut session, block))?;
        }
        session.commit()
    }

    /// Reports the blocks of a task.
    ///
    /// # Errors
    /// Returns the service's error.
    pub async fn report(
        &self,
        key: &ShuffleKey,
        task: TaskAttemptId,
        ids: &[(i32, Vec<BlockId>)],
    ) -> Result<(), ServiceError> {
        let partition = |(partition, ids): &(i32, Vec<BlockId>)| PartitionBlockIds {
            partition: PartitionId(*partition),
            block_ids: ids.iter().map(|id| id.0).collect(),
        };
        let request = ReportRequest {
            app: key.app.as_str(),
            shuffle: key.shuffle.0,
            task_attempt: task.0,
            bitmap_count: 1,
            partitions: ids.iter().map(partition).collect(),
            records: Vec::new(),
        };
        self.service.ingest.report(request).await
    }

    async fn try_results(&self, key: &ShuffleKey, partition: i32) -> Result<Bytes, ServiceError> {
        let IdLayout { sequence_bits, partition_bits, task_bits } = self.layout;
        let bits = |bits: u32| i32::try_from(bits).expect("a width is at most 63");
        let layout = IdWidths {
            sequence: bits(sequence_bits),
            partition: bits(partition_bits),
            task: bits(task_bits),
        };
        let (reads, app) = (&self.service.reads, key.app.as_str());
        let results = reads.results(app, key.shuffle.0, &[partition], Some(layout)).await?;
        Ok(results.bitmap)
    }

    /// Reads memory up to its end, then the index once, then the wanted data.
    async fn try_read(
        &self,
        key: &ShuffleKey,
        partition: i32,
        tasks: &Treemap,
    ) -> Result<Blocks, ServiceError> {
        let mut found = Blocks::new();
        self.read_memory(key, partition, tasks, &mut found)?;
        let target = RequestedPartition { app: key.app.as_str(), shuffle: key.shuffle.0, partition };
        let (reads, limits) = (&self.service.reads, self.service.reads.read_limits());
        let index = reads.read_index(&limits, target).await?;
        let (length, data_length) = (index.length, index.data_length);
        let records = read::decode_index(&collect(index.chunks, length).await?).map_err(malformed)?;
        let wanted = |record: &read::RecordPosition| {
            let id = record.meta.block_id;
            let passes = tasks.contains(record.meta.task_attempt_id.0.cast_unsigned());
            id.0 != FILLER_BLOCK_ID && passes && !found.contains_key(&id)
        };
        let limit = u64::from(READ_BUFFER_BYTES);
        for segment in read::segments(&records, Some(data_length), limit, wanted).map_err(malformed)? {
            let offset = i64::try_from(segment.offset).expect("the offset fits into i64");
            let length = i32::try_from(segment.length).expect("the length of a segment fits into i32");
            let answer = reads.read_data(&limits, target, ReadRange { offset, length }).await?;
            let data = collect(answer.chunks, answer.length).await?;
            for block in read::segment_blocks(&segment, &Bytes::from(data)).map_err(malformed)? {
                found.insert(block.meta.block_id, block.data);
            }
        }
        Ok(found)
    }

    fn read_memory(
        &self,
        key: &ShuffleKey,
        partition: i32,
        tasks: &Treemap,
        found: &mut Blocks,
    ) -> Result<(), ServiceError> {
        let filter = bitmap::encode(tasks);
        let mut last_block_id = -1;
        loop {
            let request = MemoryReadRequest {
                app: key.app.as_str(),
                shuffle: key.shuffle.0,
                partition,
                last_block_id,
                read_buffer_size: READ_BUFFER_BYTES.cast_signed(),
                task_filter: Some(&filter),
                window: None,
            };
            let answer = self.service.reads.read_memory(request)?.read;
            let Some(last) = answer.blocks.last() else { return Ok(()) };
            last_block_id = last.block_id.0;
            let mut data = Bytes::from(answer.data.concat());
            for block in &answer.blocks {
                found.insert(block.block_id, data.split_to(block.length as usize));
            }
            if answer.is_end {
                return Ok(());
            }
        }
    }
}

/// Adds a whole block to a send.
///
/// # Errors
/// Returns the service's error.
pub fn send_block(session: &mut SendSession, block: &Block) -> Result<(), ServiceError> {
    session.begin_block(block.meta.length)?;
    session.write(&block.data)?;
    session.end_block(BlockHeader {
        block_id: block.meta.block_id.0,
        length: block.meta.length.cast_signed(),
        uncompressed_length: block.meta.uncompressed_length.cast_signed(),
        crc: i64::from(block.meta.crc),
        task_attempt_id: block.meta.task_attempt_id.0,
    })
}

/// Collects all chunks of a response, whose length must match the announced one.
async fn collect(mut chunks: ChunkStream, length: u64) -> Result<Vec<u8>, ServiceError> {
    let mut all = Vec::new();
    while let Some(chunk) = chunks.next().await? {
        all.extend_from_slice(&chunk);
    }
    match all.len() as u64 == length {
        true => Ok(all),
        false => Err(ServiceError::Malformed(format!("announced {length} bytes, received {}", all.len()))),
    }
}

fn malformed(error: read::Malformed) -> ServiceError {
    ServiceError::Malformed(error.to_string())
}

fn refusal(error: &ServiceError) -> WorkerRefusal {
    match error.status() {
        StatusCode::NoRegister => WorkerRefusal::Unknown(error.to_string()),
        _ => WorkerRefusal::Failed(error.to_string()),
    }
}

impl WorkerView for InProcess {
    async fn results(&self, key: &ShuffleKey, partition: i32) -> Result<BTreeSet<BlockId>, WorkerRefusal> {
        let mut waits = 0;
        loop {
            match self.try_results(key, partition).await {
                Ok(bytes) => {
                    let known = bitmap::decode(&bytes).expect("the result is no valid bitmap");
                    return Ok(known.iter().map(|id| BlockId(id.cast_signed())).collect());
                }
                Err(error) if error.status() == StatusCode::NoBuffer && waits < NO_BUFFER_WAITS => waits += 1,
                Err(error) => return Err(refusal(&error)),
            }
            tokio::time::sleep(NO_BUFFER_PAUSE).await;
        }
    }

    async fn read(&self, key: &ShuffleKey, partition: i32, tasks: &Treemap) -> Result<Blocks, WorkerRefusal> {
        let (mut waits, mut attempts) = (0, 1);
        loop {
            match self.try_read(key, partition, tasks).await {
                Ok(found) => return Ok(found),
                Err(error) if error.status() == StatusCode::NoBuffer && waits < NO_BUFFER_WAITS => waits += 1,
                // Losses and unknown shuffles are reported at once. Any other failure is retried.
                Err(
                    error @ (ServiceError::Lost(_)
                    | ServiceError::NotRegistered
                    | ServiceError::NoLongerRegistered(_)),
                ) => {
                    return Err(refusal(&error));
                }
                Err(_) if attempts < READ_ATTEMPTS => attempts += 1,
                Err(error) => return Err(refusal(&error)),
            }
            tokio::time::sleep(NO_BUFFER_PAUSE).await;
        }
    }
}
