//! Reads a partition: one replica after another, and for each replica memory, then disks, then
//! remote files.
//!
//! Invariant: each expected block is delivered exactly once after its checksum was verified. The
//! end of the partition is only signalled once all of them were delivered. Unexpected blocks
//! (failed attempts, duplicates, fillers) are dropped. After a failure or damage the next replica
//! is read. When none remains, the error lists the missing blocks.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use croaring::Treemap;
use futures::stream::{self, BoxStream};
use tokio::time::timeout;

use crate::block::Block;
use crate::context::ShuffleContext;
use crate::error::{Error, MissingBlocks};
use crate::grpc::{ClientError, IndexResponse, MemoryResponse, REPEATED_RESPONSES_MAX};
use crate::read::{self, DataSegment, Malformed, RecordPosition};
use crate::remote::{self, FilePair, RemoteDirectory, RemoteFile, RemoteFiles};
use crate::results::TaskFilter;
use crate::server::Server;
use uniffle_wire::types::{BlockId, PartitionId};

/// Next part of the current replica to read.
#[derive(Debug)]
enum ReadStage {
    /// Memory, after the last received block.
    Memory {
        after: Option<BlockId>,
        /// Number of consecutive responses without a new block.
        repeated: u32,
    },
    Index,
    Disk(VecDeque<DiskSegment>),
    RemoteDirectory,
    /// Remaining files, and the open file with its remaining segments.
    RemoteFiles(VecDeque<String>, Option<OpenRemoteFile>),
    /// This replica is done; the next one follows.
    End,
}

#[derive(Debug)]
struct DiskSegment {
    storage: i32,
    segment: DataSegment,
}

#[derive(Debug)]
struct OpenRemoteFile {
    stem: String,
    data: Arc<dyn RemoteFile>,
    segments: VecDeque<DataSegment>,
}

/// Reads one partition block by block, in no particular order.
#[derive(Debug)]
pub struct ShuffleReader {
    shuffle: Arc<ShuffleContext>,
    partition: PartitionId,
    /// Sent to servers, which leave unwanted blocks out of memory responses.
    tasks: Option<Treemap>,
    expected: u64,
    missing: Treemap,
    /// Blocks that were read but not delivered yet.
    ready: VecDeque<Block>,
    /// Replicas to read. The first is being read.
    replicas: VecDeque<usize>,
    stage: ReadStage,
    failure: Option<Error>,
}

impl ShuffleReader {
    pub(crate) fn new(
        shuffle: Arc<ShuffleContext>,
        partition: PartitionId,
        expected: Treemap,
        filter: &TaskFilter,
    ) -> Self {
        // The query for its blocks already checked that the partition exists.
        let replicas = shuffle.replica_servers(partition).unwrap_or_default().into();
        Self {
            shuffle,
            partition,
            tasks: filter.tasks().cloned(),
            expected: expected.cardinality(),
            missing: expected,
            ready: VecDeque::new(),
            replicas,
            stage: ReadStage::Memory { after: None, repeated: 0 },
            failure: None,
        }
    }

    /// Returns the partition.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Returns the number of blocks of the partition that pass this reader's filter.
    #[must_use]
    pub fn expected_blocks(&self) -> u64 {
        self.expected
    }

    /// Returns the next block, or `None` when all were delivered. Blocks delivered before an error
    /// are valid, but the partition is incomplete. Cancel-safe.
    ///
    /// # Errors
    /// [`Error::MissingBlocks`].
    pub async fn next(&mut self) -> Result<Option<Block>, Error> {
        loop {
            if let Some(block) = self.ready.pop_front() {
                return Ok(Some(block));
            }
            if self.missing.is_empty() {
                return Ok(None);
            }
            let Some(&replica) = self.replicas.front() else {
                return Err(Error::MissingBlocks {
                    partition: self.partition,
                    missing: MissingBlocks::of(&self.missing),
                    expected: self.expected,
                    source: self.failure.take().map(Box::new),
                });
            };
            let server = Arc::clone(self.shuffle.server(replica));
            if let Err(error) = self.step(&server).await {
                tracing::debug!(partition = %self.partition, %error, "read from replica failed");
                self.failure = Some(error);
                self.stage = self.after_failure();
            }
        }
    }

    /// Returns the blocks as a stream, which ends after the last block or after the first error.
    ///
    /// A request is only made while the stream is polled and has no block left, so at most one
    /// response is in memory: `read_buffer_bytes` and one block, besides the partition's index of
    /// 40 bytes per block. The stream is [`Unpin`].
    #[must_use]
    pub fn into_stream(self) -> BoxStream<'static, Result<Block, Error>> {
        let blocks = stream::try_unfold(self, |mut reader| async move {
            Ok(reader.next().await?.map(|block| (block, reader)))
        });
        Box::pin(blocks)
    }

    /// Reads all blocks into memory. [`ShuffleReader::next`] and [`ShuffleReader::into_stream`]
    /// need memory for one response only.
    ///
    /// # Errors
    /// See [`ShuffleReader::next`].
    pub async fn read_all(mut self) -> Result<Vec<Block>, Error> {
        let mut blocks = Vec::new();
        while let Some(block) = self.next().await? {
            blocks.push(block);
        }
        Ok(blocks)
    }

    /// Makes one request, or moves to the next stage. The stage only changes after the response.
    async fn step(&mut self, server: &Server) -> Result<(), Error> {
        let (key, partition) = (self.shuffle.key(), self.partition);
        match &mut self.stage {
            ReadStage::Memory { after, repeated } => {
                let (after, repeated) = (*after, *repeated);
                let answer = server.read_memory(key, partition, after, self.tasks.as_ref()).await?;
                self.take_memory(server, answer, repeated)
            }
            ReadStage::Index => {
                let index = server.read_index(key, partition).await?;
                let segments = self.disk_segments(server, &index)?;
                self.stage = ReadStage::Disk(segments);
                Ok(())
            }
            ReadStage::Disk(segments) => {
                let Some(DiskSegment { storage, segment }) = segments.front() else {
                    self.stage = self.remote_stage();
                    return Ok(());
                };
                let (offset, length) = (segment.offset, segment.length);
                let data = server.read_data(key, partition, *storage, offset, length).await?;
                if let Some(DiskSegment { segment, .. }) = segments.pop_front() {
                    self.take_segment(server.id(), &segment, &data);
                }
                Ok(())
            }
            ReadStage::RemoteDirectory => self.list_remote(server).await,
            ReadStage::RemoteFiles(..) => self.read_remote().await,
            ReadStage::End => {
                self.replicas.pop_front();
                self.stage = ReadStage::Memory { after: None, repeated: 0 };
                Ok(())
            }
        }
    }

    fn take_memory(&mut self, server: &Server, answer: MemoryResponse, repeated: u32) -> Result<(), Error> {
        let last = answer.blocks.last().map(|block| block.meta.block_id);
        let found = self.take(server.id(), answer.blocks);
        let repeated = if found { 0 } else { repeated + 1 };
        if repeated >= REPEATED_RESPONSES_MAX {
            return Err(Error::call(server.id())(ClientError::Endless { answers: repeated }));
        }
        let has_more = last.is_some() && answer.is_end != Some(true);
        self.stage = match has_more {
            true => ReadStage::Memory { after: last, repeated },
            false if self.shuffle.options().storage.has_localfile() => ReadStage::Index,
            false => self.remote_stage(),
        };
        Ok(())
    }

    /// Keeps expected and undamaged blocks. Returns true if there was one.
    fn take(&mut self, peer: &str, blocks: impl IntoIterator<Item = Block>) -> bool {
        let mut found = false;
        for block in blocks {
            let id = block.meta.block_id.0.cast_unsigned();
            if !self.missing.contains(id) {
                continue;
            }
            match read::check_crc(&block) {
                Ok(()) => {
                    self.missing.remove(id);
                    self.ready.push_back(block);
                    found = true;
                }
                // Another replica or tier may have an undamaged copy.
                Err(source) => self.failure = Some(Error::call(peer)(malformed(source))),
            }
        }
        found
    }

    fn take_segment(&mut self, peer: &str, segment: &DataSegment, data: &Bytes) {
        match read::segment_blocks(segment, data) {
            Ok(blocks) => drop(self.take(peer, blocks)),
            Err(source) => self.failure = Some(Error::call(peer)(malformed(source))),
        }
    }

    fn disk_segments(&self, server: &Server, index: &IndexResponse) -> Result<VecDeque<DiskSegment>, Error> {
        let mut all = VecDeque::new();
        for run in read::runs(&index.records, index.data_length, &index.storage_ids) {
            let segments = self.segments(run.records).map_err(malformed).map_err(Error::call(server.id()))?;
            all.extend(segments.into_iter().map(|segment| DiskSegment { storage: run.storage, segment }));
        }
        Ok(all)
    }

    /// Returns the reads of a run of records that contain a missing block.
    fn segments(&self, records: &[RecordPosition]) -> Result<Vec<DataSegment>, Malformed> {
        let wanted = |record: &RecordPosition| {
            let task = record.meta.task_attempt_id.0.cast_unsigned();
            self.tasks.as_ref().is_none_or(|tasks| tasks.contains(task))
        };
        let limit = u64::from(self.shuffle.options().read_buffer_bytes);
        let mut segments = read::segments(records, None, limit, wanted)?;
        let is_missing =
            |record: &RecordPosition| self.missing.contains(record.meta.block_id.0.cast_unsigned());
        segments.retain(|segment| segment.length > 0 && segment.records.iter().any(is_missing));
        Ok(segments)
    }

    fn remote(&self) -> Option<(Arc<dyn RemoteFiles>, RemoteDirectory)> {
        let files = self.shuffle.options().remote_files.as_ref().map(Arc::clone);
        files.zip(self.shuffle.handle().remote_storage.clone())
    }

    fn remote_stage(&self) -> ReadStage {
        let has_remote = self.shuffle.options().storage.has_hdfs() && self.remote().is_some();
        if has_remote { ReadStage::RemoteDirectory } else { ReadStage::End }
    }

    /// Returns the stage after a failure. After a failed call to a server its remote files are
    /// read, because it may have written some. After a failed remote file the next one is read.
    fn after_failure(&mut self) -> ReadStage {
        match &mut self.stage {
            ReadStage::Memory { .. } | ReadStage::Index | ReadStage::Disk(_) => self.remote_stage(),
            ReadStage::RemoteFiles(stems, _) => ReadStage::RemoteFiles(std::mem::take(stems), None),
            ReadStage::RemoteDirectory | ReadStage::End => ReadStage::End,
        }
    }

    async fn list_remote(&mut self, server: &Server) -> Result<(), Error> {
        let Some((files, storage)) = self.remote() else {
            self.stage = ReadStage::End;
            return Ok(());
        };
        let directory = remote::directory(&storage, self.shuffle.key(), self.partition);
        let names = self.remote_call(&directory, files.list(&storage, &directory)).await?;
        let stems = remote::files_of(server.id(), &names);
        let stems = stems.into_iter().map(|stem| format!("{directory}/{stem}"));
        self.stage = ReadStage::RemoteFiles(stems.collect(), None);
        Ok(())
    }

    async fn read_remote(&mut self) -> Result<(), Error> {
        let ReadStage::RemoteFiles(stems, open) = &self.stage else { return Ok(()) };
        let Some(OpenRemoteFile { stem, data, segments }) = open else {
            return self.open_remote(stems.front().cloned()).await;
        };
        let Some(segment) = segments.front() else {
            self.set_open(None);
            return Ok(());
        };
        let (stem, data, segment) = (stem.clone(), Arc::clone(data), segment.clone());
        let length = usize::try_from(segment.length).unwrap_or(usize::MAX);
        let bytes = self.remote_call(&stem, data.read(segment.offset, length)).await?;
        self.take_segment(&stem, &segment, &bytes);
        if let ReadStage::RemoteFiles(_, Some(open)) = &mut self.stage {
            open.segments.pop_front();
        }
        Ok(())
    }

    /// Opens the next file. It is removed from the list in any case, so that a failing file is
    /// tried only once.
    async fn open_remote(&mut self, stem: Option<String>) -> Result<(), Error> {
        let (Some(stem), Some((files, storage))) = (stem, self.remote()) else {
            self.stage = ReadStage::End;
            return Ok(());
        };
        let opened = self.remote_call(&stem, FilePair::open(files.as_ref(), &storage, &stem)).await;
        if let ReadStage::RemoteFiles(stems, _) = &mut self.stage {
            stems.pop_front();
        }
        let FilePair { data, records } = opened?;
        let mut segments = VecDeque::new();
        for run in read::runs(&records, Some(data.length()), &[]) {
            segments.extend(self.segments(run.records).map_err(malformed).map_err(Error::call(&stem))?);
        }
        self.set_open(Some(OpenRemoteFile { stem, data, segments }));
        Ok(())
    }

    fn set_open(&mut self, file: Option<OpenRemoteFile>) {
        if let ReadStage::RemoteFiles(_, open) = &mut self.stage {
            *open = file;
        }
    }

    async fn remote_call<T>(
        &self,
        path: &str,
        call: impl Future<Output = std::io::Result<T>>,
    ) -> Result<T, Error> {
        let ended = timeout(self.shuffle.options().rpc_timeout, call).await;
        let result = ended.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        result.map_err(|source| Error::Remote { path: path.to_owned(), source })
    }
}

fn malformed(source: Malformed) -> ClientError {
    ClientError::Malformed { rpc: "read", source }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::*;
    use crate::assignment::Assignment;
    use crate::grpc::tests::{Double, PARTITION, Running, Script, blocks, disk, key, memory, serve};
    use crate::options::ClientOptions;
    use crate::proto::{PartitionRangeAssignment, ShuffleServerId};
    use crate::{Cluster, ShuffleHandle};

    /// A reader of the double's partition with a read buffer of 300 bytes.
    async fn reader(script: Script) -> (Double, ShuffleReader, Running) {
        let (double, address, running) = serve(script).await;
        let server = ShuffleServerId {
            id: "h-1".to_owned(),
            ip: address.ip().to_string(),
            port: address.port().into(),
            netty_port: 0,
            jetty_port: 0,
        };
        let range = PartitionRangeAssignment { start_partition: 0, end_partition: 2, server: vec![server] };
        let assignment = Assignment::new(3, 1, &[range]).unwrap();
        let options = ClientOptions::default().with(|options| {
            options.read_buffer_bytes = 300;
            options.failures.attempts = 1;
        });
        let cluster = Cluster::new(["localhost:1"], options).unwrap();
        let handle = ShuffleHandle { key: key(), assignment, remote_storage: None };
        let shuffle = cluster.attach(handle).unwrap();
        let reader = shuffle.reader(PARTITION, &TaskFilter::all()).await.unwrap();
        (double, reader, running)
    }

    fn report(script: &mut Script, blocks: &[Block]) {
        script.reported = blocks.iter().map(|block| block.meta.block_id.0.cast_unsigned()).collect();
    }

    #[tokio::test]
    async fn stream_requests_data_only_when_polled() {
        let all = blocks(0..10);
        let mut script = Script::default();
        script.memory.extend([memory(&all[8..], None), memory(&[], None)]);
        disk(&mut script, &all[..8]);
        report(&mut script, &all);
        let (double, reader, running) = reader(script).await;
        let mut stream = reader.into_stream();
        let requests = || {
            let script = double.0.lock();
            (script.cursors.len(), script.data_reads.len())
        };
        assert_eq!(requests(), (0, 0));
        let mut read = Vec::new();
        // Two blocks from memory, then three blocks from each range of at least 300 bytes.
        for expected in [(1, 0), (1, 0), (2, 1), (2, 1), (2, 1), (2, 2), (2, 2), (2, 2), (2, 3)] {
            read.push(stream.next().await.unwrap().unwrap());
            assert_eq!(requests(), expected, "unexpected requests after {} blocks", read.len());
        }
        read.push(stream.next().await.unwrap().unwrap());
        assert!(stream.next().await.is_none());
        read.sort_by_key(|block| block.meta.block_id);
        assert_eq!(read, all);
        drop(stream);
        running.end().await;
    }

    #[tokio::test]
    async fn stream_ends_after_missing_blocks() {
        let all = blocks(0..3);
        let mut script = Script::default();
        script.memory.push_back(memory(&all[..2], Some(true)));
        report(&mut script, &all);
        let (_double, reader, running) = reader(script).await;
        let read: Vec<Result<Block, Error>> = reader.into_stream().collect().await;
        assert_eq!(read.len(), 3);
        let Err(Error::MissingBlocks { missing, expected: 3, .. }) = &read[2] else { panic!("{read:?}") };
        assert_eq!(missing.first, [all[2].meta.block_id]);
        running.end().await;
    }
}
