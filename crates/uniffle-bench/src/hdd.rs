//! Compares extent logs with a file per partition on a simulated rotating disk, in seconds of disk
//! time per GB.
//!
//! Memory, flush policy and (for the logs) flusher and store are the worker's own. For files per
//! partition, the benchmark writes the batches of the same policy into a data and an index file
//! each, like the Java server. Blocks of 14 KiB go to all partitions in turn. Memory holds a
//! quarter of them, or 32 MiB, or one per partition, whichever is most. Then each partition is
//! read, index first.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use prometheus::Registry;
use tokio::time::sleep;
use uniffle_base::budget::HeapKind;
use uniffle_io::buffers::HeapBuffers;
use uniffle_io::{BLOCK_ALIGN, Disk, ReadTarget, WriteOpen};
use uniffle_wire::types::{
    AppId, BlockId, BlockMeta, Distribution, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId,
};
use uniffle_worker::flush::policy::{self, Limits, MemoryUsage};
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::memory::{Memory, MemoryConfig, MemoryError, SealedData, ShuffleBuffers};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::store::{LocalConfig, LocalStore, ServedTier as _};

use crate::options::HddArgs;
use crate::report::{BenchReport, GB, HddLine};
use crate::seek_disk::SeekDisk;

const BLOCK_BYTES: u32 = 14 << 10;
/// Number of blocks between two checks of the memory's pressure: one message.
const BLOCKS_PER_SEND: u64 = 256;
/// Bytes of data per byte of memory.
const OVERCOMMIT: u64 = 4;
/// Length of one record of Java's index.
const INDEX_RECORD_BYTES: usize = 40;
/// Largest read of files per partition.
const READ_BYTES: u64 = 1 << 20;

/// Measures all layouts with each number of partitions.
pub(crate) async fn run(args: &HddArgs) -> anyhow::Result<BenchReport> {
    let bytes = args.bytes.as_u64();
    ensure!((1 << 20..=16 << 30).contains(&bytes), "--bytes must be 1 MiB to 16 GiB");
    let mut report = BenchReport::default();
    for &partitions in &args.partitions {
        ensure!((1..=1_000_000).contains(&partitions), "--partitions must be 1 to 1000000");
        for layout in [Layout::Logs, Layout::FilePerPartition] {
            report.hdd.push(measure(layout, partitions, bytes).await?);
        }
    }
    Ok(report)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Logs,
    FilePerPartition,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Self::Logs => "extent logs",
            Self::FilePerPartition => "file per partition",
        }
    }
}

/// State of one measurement.
struct Bench {
    memory: Arc<Memory>,
    buffers: Arc<ShuffleBuffers>,
    store: Arc<LocalStore>,
    disk: SeekDisk,
    key: ShuffleKey,
    limits: Limits,
    partitions: u32,
    /// Lengths of each partition's data file and index file.
    file_lengths: Vec<(u64, u64)>,
}

async fn measure(layout: Layout, partitions: u32, bytes: u64) -> anyhow::Result<HddLine> {
    let registry = Registry::new();
    let mut bench = Bench::new(partitions, bytes, &registry).await?;
    let tasks = Tasks::new();
    let flusher = match layout {
        Layout::Logs => Some(bench.flusher(&tasks, &registry)?),
        Layout::FilePerPartition => None,
    };
    bench.disk.take_work();
    let blocks = bytes / u64::from(BLOCK_BYTES);
    for first in (0..blocks).step_by(usize::try_from(BLOCKS_PER_SEND)?) {
        bench.send(first, BLOCKS_PER_SEND.min(blocks - first), flusher.as_deref()).await?;
    }
    match &flusher {
        Some(flusher) => {
            flusher.flush_all();
            while flusher.unfinished() > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        }
        None => bench.flush_files(policy::Goal { bytes: u64::MAX, blocks: u64::MAX }).await?,
    }
    let written = bench.disk.take_work();
    let mut read_bytes = 0;
    for partition in 0..partitions {
        read_bytes += match layout {
            Layout::Logs => bench.read_logs(partition).await?,
            Layout::FilePerPartition => bench.read_files(partition).await?,
        };
    }
    ensure!(
        read_bytes == blocks * u64::from(BLOCK_BYTES),
        "read {read_bytes} bytes, expected {blocks} blocks"
    );
    let read = bench.disk.take_work();
    tasks.cancel();
    tasks.drained().await;
    let gb = read_bytes as f64 / GB;
    Ok(HddLine {
        layout: layout.name().to_owned(),
        partitions,
        write_seconds_per_gb: written.seconds / gb,
        read_seconds_per_gb: read.seconds / gb,
        seeks_per_partition: read.seeks as f64 / f64::from(partitions),
        files: read.files,
    })
}

impl Bench {
    async fn new(partitions: u32, bytes: u64, registry: &Registry) -> anyhow::Result<Self> {
        // Each partition may hold a block, which occupies four pages.
        let capacity = (bytes / OVERCOMMIT).max(u64::from(partitions) * 4 * BLOCK_ALIGN as u64).max(32 << 20);
        let config = MemoryConfig {
            capacity_bytes: capacity,
            read_capacity_bytes: 4 << 20,
            heap_bytes: 96 << 20,
            ticket_timeout: Duration::from_secs(60),
            tickets_max: 100,
            blocks_max: 10_000_000,
            backing: Default::default(),
            ..MemoryConfig::default()
        };
        let memory = Memory::new(&config, registry).context("memory")?;
        let disk = SeekDisk::new();
        let disks: Vec<Arc<dyn Disk>> = vec![Arc::new(disk.clone())];
        let store = LocalStore::open(LocalConfig::default(), disks, memory.extents(), registry).await?;
        let key = ShuffleKey::new(AppId::parse("hdd")?, ShuffleId(0));
        store.register(&key);
        let buffers = memory.register(&key, Distribution::Normal);
        let limits = Limits {
            high_watermark: 0.8,
            low_watermark: 0.2,
            single_buffer_bytes_max: 256 << 20,
            huge_partition_bytes: u64::MAX,
            huge_buffer_bytes_max: u64::MAX,
            huge_share_bytes: u64::MAX,
            in_flight_batches_max: 5,
            blocks_high: 8_000_000,
            blocks_low: 2_000_000,
        };
        let file_lengths = vec![(0, 0); usize::try_from(partitions)?];
        Ok(Self { memory, buffers, store, disk, key, limits, partitions, file_lengths })
    }

    fn flusher(&self, tasks: &Tasks, registry: &Registry) -> anyhow::Result<Arc<Flusher>> {
        let config = FlushConfig {
            limits: self.limits,
            cold_bytes: u64::MAX,
            batch_bytes_max: 16 << 20,
            tick: Duration::from_secs(1),
            retry_pause_min: Duration::from_millis(100),
            retry_pause_max: Duration::from_secs(1),
            traces: uniffle_worker::telemetry::traces::Traces::off(),
        };
        let (memory, store) = (self.memory.clone(), self.store.clone());
        Ok(Flusher::start(config, memory, store, tasks.clone(), registry)?)
    }

    /// Puts blocks number `first..first + count` into memory. Waits for free memory.
    async fn send(&mut self, first: u64, count: u64, flusher: Option<&Flusher>) -> anyhow::Result<()> {
        let bytes = count * u64::from(BLOCK_BYTES);
        let ticket = loop {
            match self.memory.tickets().require(&self.key.app, bytes, usize::try_from(count)?) {
                Ok(ticket) => break ticket,
                Err(MemoryError::NoCapacity { .. }) => self.make_room(bytes, flusher).await?,
                Err(error) => return Err(error.into()),
            }
        };
        let mut funds = self.memory.tickets().redeem(&self.key.app, ticket)?;
        let content = vec![0x5a; usize::try_from(BLOCK_BYTES)?];
        for number in first..first + count {
            let partition = PartitionId(i32::try_from(number % u64::from(self.partitions))?);
            let buffer = self.buffers.buffer(partition, self.memory.heap().of(HeapKind::Partitions))?;
            let mut fill = buffer.reserve(BLOCK_BYTES, &mut funds)?;
            fill.write(&content);
            let meta = BlockMeta {
                block_id: BlockId(i64::try_from(number)?),
                task_attempt_id: TaskAttemptId(0),
                length: BLOCK_BYTES,
                uncompressed_length: BLOCK_BYTES,
                crc: 0,
            };
            buffer.commit(vec![(meta, fill)], &mut funds)?;
        }
        drop(funds);
        match flusher {
            Some(flusher) => flusher.check_pressure(),
            None => self.flush_files(policy::flush_goal(self.usage(0), &self.limits)).await?,
        }
        Ok(())
    }

    async fn make_room(&mut self, bytes: u64, flusher: Option<&Flusher>) -> anyhow::Result<()> {
        if let Some(flusher) = flusher {
            flusher.refused(bytes);
            sleep(Duration::from_millis(1)).await;
            return Ok(());
        }
        let goal = policy::flush_goal(self.usage(2 * bytes), &self.limits);
        ensure!(!goal.is_nothing(), "no room for {bytes} bytes and nothing to flush");
        self.flush_files(goal).await
    }

    fn usage(&self, refused: u64) -> MemoryUsage {
        MemoryUsage {
            capacity: self.memory.capacity_bytes(),
            used: self.memory.used_bytes(),
            reserved: self.memory.pre_allocated_bytes(),
            in_flight: 0,
            blocks_in_flight: 0,
            blocks: self.memory.block_count(),
            refused,
        }
    }

    /// Seals the buffers that the policy selects and appends their blocks to their partitions'
    /// files.
    async fn flush_files(&mut self, goal: policy::Goal) -> anyhow::Result<()> {
        let candidates = self.memory.candidates();
        let sizes: Vec<policy::Candidate> = candidates
            .iter()
            .map(|candidate| policy::Candidate {
                app: 0,
                charged_bytes: candidate.buffer.active_charged_bytes(),
                payload_bytes: candidate.active_bytes,
                blocks: candidate.active_blocks as u64,
                received_bytes: candidate.buffer.received_bytes(),
                in_flight_batches: 0,
            })
            .collect();
        let apps: Vec<_> = self.memory.tickets().holders().into_values().collect();
        for victim in policy::victims(&sizes, &apps, goal, &self.limits) {
            let buffer = &candidates[victim].buffer;
            let Some(batch) = buffer.seal() else { continue };
            let extent = batch.extent(Distribution::Normal);
            let (SealedData::Aligned(pieces) | SealedData::Pieces(pieces)) = extent.data;
            let index = vec![0; extent.blocks.len() * INDEX_RECORD_BYTES];
            self.append(buffer.partition(), without_padding(pieces, batch.bytes()), index).await?;
            buffer.release(&batch);
        }
        Ok(())
    }

    async fn append(
        &mut self,
        partition: PartitionId,
        data: Vec<Bytes>,
        index: Vec<u8>,
    ) -> anyhow::Result<()> {
        let number = usize::try_from(partition.0)?;
        let (data_end, index_end) = self.file_lengths[number];
        let directory = directory(partition);
        let create = data_end == 0;
        if create {
            self.disk.create_dir_all(&directory).await?;
        }
        let options = WriteOpen { create, ..WriteOpen::default() };
        let data_bytes: u64 = data.iter().map(|piece| piece.len() as u64).sum();
        let index_bytes = index.len() as u64;
        self.disk.open_write(&directory.join("data"), options).await?.write_at(data, data_end).await?;
        let index_file = self.disk.open_write(&directory.join("index"), options).await?;
        index_file.write_at(vec![index.into()], index_end).await?;
        self.file_lengths[number] = (data_end + data_bytes, index_end + index_bytes);
        Ok(())
    }

    async fn read_files(&self, partition: u32) -> anyhow::Result<u64> {
        let (data_bytes, index_bytes) = self.file_lengths[usize::try_from(partition)?];
        if data_bytes == 0 {
            return Ok(0);
        }
        let directory = directory(PartitionId(i32::try_from(partition)?));
        for (name, bytes) in [("index", index_bytes), ("data", data_bytes)] {
            let file = self.disk.open_read(&directory.join(name)).await?;
            for offset in (0..bytes).step_by(usize::try_from(READ_BYTES)?) {
                let length = usize::try_from(READ_BYTES.min(bytes - offset))?;
                file.read(ReadTarget::one(Box::new(vec![0; length]), 0..length, offset)).await.1?;
            }
        }
        Ok(data_bytes)
    }

    async fn read_logs(&self, partition: u32) -> anyhow::Result<u64> {
        let partition = PartitionId(i32::try_from(partition)?);
        let mut index = self.store.index(&self.key, partition)?;
        while index.chunks.next_chunk(&HeapBuffers).await?.is_some() {}
        if index.data_length == 0 {
            return Ok(0);
        }
        let length = u32::try_from(index.data_length).context("a partition has more than 4 GiB")?;
        let mut data = self.store.data(&self.key, partition, 0, length)?.chunks;
        let mut bytes = 0;
        while let Some(chunk) = data.next_chunk(&HeapBuffers).await? {
            bytes += chunk.len() as u64;
        }
        Ok(bytes)
    }
}

fn directory(partition: PartitionId) -> PathBuf {
    Path::new("files").join(partition.0.to_string())
}

/// Returns the first `bytes` bytes of `pieces`, without the padding of an aligned extent.
fn without_padding(pieces: Vec<Bytes>, mut bytes: u64) -> Vec<Bytes> {
    let mut remaining = Vec::with_capacity(pieces.len());
    for mut piece in pieces {
        piece.truncate(usize::try_from(bytes).unwrap_or(usize::MAX).min(piece.len()));
        bytes -= piece.len() as u64;
        if !piece.is_empty() {
            remaining.push(piece);
        }
    }
    remaining
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seek_disk::BYTES_PER_SECOND;

    #[tokio::test]
    async fn logs_are_written_faster_than_partition_files() {
        let bytes = 64 << 20;
        let logs = measure(Layout::Logs, 500, bytes).await.unwrap();
        let files = measure(Layout::FilePerPartition, 500, bytes).await.unwrap();
        assert!(
            logs.files < 10 && (1_000..1_010).contains(&files.files),
            "the layouts used {} and {} files",
            logs.files,
            files.files
        );
        assert!(logs.write_seconds_per_gb < files.write_seconds_per_gb / 5.0, "{logs:?} {files:?}");
        assert!(
            logs.write_seconds_per_gb >= GB / BYTES_PER_SECOND * 0.9,
            "writes are faster than the platter"
        );
    }

    #[test]
    fn padding_is_removed() {
        let pieces = vec![Bytes::from_static(b"abc"), Bytes::from_static(b"de\0\0")];
        assert_eq!(without_padding(pieces, 5), [Bytes::from_static(b"abc"), Bytes::from_static(b"de")]);
    }
}
