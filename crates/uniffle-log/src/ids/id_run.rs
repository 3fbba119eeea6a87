//! A file with a sorted run of block ids and their partitions, for ids that exceed the heap budget.
//!
//! The file has pages of about [`PAGE_BYTES`]. A page has its length u32, the CRC-32 of the rest
//! u32, and entries in ascending order: a partition i32 and a chunk of its ids. An index in memory
//! has the first partition of each page. A damaged page is an error. Runs are merged
//! ([`IdRun::merged`]), so that a lookup reads few of them. The caller decides which ids leave the
//! heap, and when.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::task::coop::consume_budget;

use super::id_chunk::{CHUNK_IDS_MAX, IdChunk, take};
use super::id_set::IdSet;
use super::scratch::{Scratch, ScratchFile};
use uniffle_wire::types::PartitionId;

/// Size above which a page is closed.
const PAGE_BYTES: usize = 16 << 10;
/// Size of a page's length and checksum.
const PAGE_HEADER_BYTES: usize = 8;
/// Number of bytes written and read at a time.
const WINDOW_BYTES: usize = 256 << 10;

/// Minimum number of newest runs of similar size that are merged.
const MERGE_RUNS_MIN: usize = 4;
/// A run has a similar size if it is at most this many times as large as all newer runs together.
const SIZE_RATIO_MAX: u64 = 4;

/// Heap of a lookup, which reads one run at a time: a window, and its decoded entries. A merge,
/// which is not charged, has a window per run and one for its output.
pub const LOOKUP_BYTES: u64 = 2 * WINDOW_BYTES as u64;

/// A complete run.
#[derive(Debug)]
pub struct IdRun {
    file: ScratchFile,
    /// First partition and offset of each page.
    pages: Vec<(PartitionId, u64)>,
    bytes: u64,
}

impl IdRun {
    /// Writes the union of `runs`.
    ///
    /// # Errors
    /// A run cannot be read, or no data directory can store the new one.
    pub async fn merged(scratch: &Scratch, runs: &[Arc<Self>]) -> io::Result<Self> {
        let mut writer = RunWriter::new(scratch).await?;
        let mut cursors: Vec<_> = runs.iter().map(|run| RunCursor::new(run)).collect();
        loop {
            let mut next = None::<(PartitionId, u64)>;
            for cursor in &mut cursors {
                let first = cursor.peek().await?;
                next = next.into_iter().chain(first).min();
            }
            let Some(next) = next else { return writer.finish().await };
            cursors.iter_mut().for_each(|cursor| cursor.advance_past(next.0, next.1));
            writer.push(next.0, next.1).await?;
        }
    }

    /// Returns the ids of a partition.
    ///
    /// # Errors
    /// The run cannot be read, or is damaged.
    pub async fn ids(&self, partition: PartitionId) -> io::Result<IdSet> {
        let from = self.pages.partition_point(|(first, _)| *first < partition).saturating_sub(1);
        let to = self.pages.partition_point(|(first, _)| *first <= partition);
        let mut chunks = Vec::new();
        let mut reader = RunReader::new(self, from..to);
        while let Some((entry_partition, chunk)) = reader.next().await? {
            if entry_partition == partition {
                chunks.push(chunk);
            }
        }
        Ok(IdSet::from_chunks(chunks))
    }

    /// Returns a reader of all partitions in order.
    #[must_use]
    pub fn partitions(&self) -> RunPartitions<'_> {
        RunPartitions { reader: RunReader::new(self, 0..self.pages.len()), first: None }
    }

    /// Returns the size of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the heap size of the run.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        (size_of::<Self>() + self.pages.capacity() * size_of::<(PartitionId, u64)>()) as u64
    }
}

/// Returns how many of the newest runs should be merged, or 0. `sizes` are ordered from the oldest
/// to the newest run.
#[must_use]
pub fn runs_to_merge(sizes: &[u64]) -> usize {
    let (mut count, mut sum) = (0, 0u64);
    for size in sizes.iter().rev() {
        if count > 0 && *size > sum.saturating_mul(SIZE_RATIO_MAX) {
            break;
        }
        (count, sum) = (count + 1, sum.saturating_add(*size));
    }
    if count >= MERGE_RUNS_MIN { count } else { 0 }
}

/// Writes a run in order.
#[derive(Debug)]
pub struct RunWriter {
    file: ScratchFile,
    pages: Vec<(PartitionId, u64)>,
    /// Pages that are not written yet. The last one is incomplete.
    pending: Vec<u8>,
    /// Beginning of the current page in `pending`, or `None` if the next entry begins one.
    page: Option<usize>,
    written: u64,
    partition: PartitionId,
    ids: Vec<u64>,
}

impl RunWriter {
    /// Begins a run.
    ///
    /// # Errors
    /// No data directory can store it.
    pub async fn new(scratch: &Scratch) -> io::Result<Self> {
        Ok(Self {
            file: scratch.file().await?,
            pages: Vec::new(),
            pending: Vec::new(),
            page: None,
            written: 0,
            partition: PartitionId(0),
            ids: Vec::with_capacity(CHUNK_IDS_MAX),
        })
    }

    /// Appends the ids of a partition, which is greater than all earlier ones.
    ///
    /// # Errors
    /// An error of the disk.
    pub async fn push_set(&mut self, partition: PartitionId, set: IdSet) -> io::Result<()> {
        for chunk in set.into_chunks() {
            self.push_chunk(partition, &chunk).await?;
        }
        Ok(())
    }

    async fn push(&mut self, partition: PartitionId, id: u64) -> io::Result<()> {
        if partition != self.partition || self.ids.len() == CHUNK_IDS_MAX {
            self.push_ids().await?;
            self.partition = partition;
        }
        self.ids.push(id);
        Ok(())
    }

    async fn push_ids(&mut self) -> io::Result<()> {
        let Some(chunk) = IdChunk::encode(&self.ids) else { return Ok(()) };
        self.ids.clear();
        self.push_chunk(self.partition, &chunk).await
    }

    async fn push_chunk(&mut self, partition: PartitionId, chunk: &IdChunk) -> io::Result<()> {
        let start = *self.page.get_or_insert_with(|| {
            self.pages.push((partition, self.written + self.pending.len() as u64));
            self.pending.extend_from_slice(&[0; PAGE_HEADER_BYTES]);
            self.pending.len() - PAGE_HEADER_BYTES
        });
        self.pending.extend_from_slice(&partition.0.to_be_bytes());
        chunk.write_to(&mut self.pending);
        if self.pending.len() - start >= PAGE_BYTES {
            self.close_page();
        }
        if self.page.is_none() && self.pending.len() >= WINDOW_BYTES {
            self.write().await?;
        }
        Ok(())
    }

    fn close_page(&mut self) {
        let Some(start) = self.page.take() else { return };
        let content = &self.pending[start + PAGE_HEADER_BYTES..];
        let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let crc = crc32fast::hash(content);
        self.pending[start..start + 4].copy_from_slice(&length.to_be_bytes());
        self.pending[start + 4..start + PAGE_HEADER_BYTES].copy_from_slice(&crc.to_be_bytes());
    }

    async fn write(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let (bytes, offset) = (std::mem::take(&mut self.pending), self.written);
        self.written += bytes.len() as u64;
        self.file.write(bytes, offset).await
    }

    /// Ends the run.
    ///
    /// # Errors
    /// See [`RunWriter::push_set`].
    pub async fn finish(mut self) -> io::Result<IdRun> {
        self.push_ids().await?;
        self.close_page();
        self.write().await?;
        self.pages.shrink_to_fit();
        Ok(IdRun { file: self.file, pages: self.pages, bytes: self.written })
    }
}

/// Reads entries of a run in order, a few pages at a time.
#[derive(Debug)]
struct RunReader<'a> {
    run: &'a IdRun,
    /// Pages that are not read yet.
    pages: Range<usize>,
    entries: std::vec::IntoIter<(PartitionId, IdChunk)>,
}

impl<'a> RunReader<'a> {
    fn new(run: &'a IdRun, pages: Range<usize>) -> Self {
        Self { run, pages, entries: Vec::new().into_iter() }
    }

    /// Returns the next entry, or `None` at the end.
    async fn next(&mut self) -> io::Result<Option<(PartitionId, IdChunk)>> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            if self.pages.is_empty() {
                return Ok(None);
            }
            self.entries = entries(&self.window().await?)?.into_iter();
        }
    }

    /// Reads the next pages, at least one.
    async fn window(&mut self) -> io::Result<Bytes> {
        let pages = &self.run.pages;
        let offset_of = |page: usize| pages.get(page).map_or(self.run.bytes, |(_, offset)| *offset);
        let start = offset_of(self.pages.start);
        let fits = |page: usize| offset_of(page) - start <= WINDOW_BYTES as u64;
        let last = (self.pages.start + 2..=self.pages.end).take_while(|page| fits(*page)).last();
        self.pages.start = last.unwrap_or(self.pages.start + 1);
        let length = usize::try_from(offset_of(self.pages.start) - start).map_err(io::Error::other)?;
        consume_budget().await;
        self.run.file.read(length, start).await
    }
}

/// Decodes the entries of whole pages.
fn entries(mut window: &[u8]) -> io::Result<Vec<(PartitionId, IdChunk)>> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "block ids on disk are corrupt");
    let mut entries = Vec::new();
    while !window.is_empty() {
        let length = u32::from_be_bytes(*take(&mut window).ok_or_else(damaged)?);
        let crc = u32::from_be_bytes(*take(&mut window).ok_or_else(damaged)?);
        let (mut content, rest) = window.split_at_checked(length as usize).ok_or_else(damaged)?;
        if crc32fast::hash(content) != crc {
            return Err(damaged());
        }
        while !content.is_empty() {
            let partition = i32::from_be_bytes(*take(&mut content).ok_or_else(damaged)?);
            entries.push((PartitionId(partition), IdChunk::read_from(&mut content).ok_or_else(damaged)?));
        }
        window = rest;
    }
    Ok(entries)
}

/// Position of a merge in a run.
struct RunCursor<'a> {
    reader: RunReader<'a>,
    partition: PartitionId,
    ids: Vec<u64>,
    at: usize,
}

impl<'a> RunCursor<'a> {
    fn new(run: &'a IdRun) -> Self {
        let reader = RunReader::new(run, 0..run.pages.len());
        Self { reader, partition: PartitionId(0), ids: Vec::new(), at: 0 }
    }

    /// Returns the next id with its partition.
    async fn peek(&mut self) -> io::Result<Option<(PartitionId, u64)>> {
        loop {
            if let Some(id) = self.ids.get(self.at) {
                return Ok(Some((self.partition, *id)));
            }
            let Some((partition, chunk)) = self.reader.next().await? else { return Ok(None) };
            chunk.decode(&mut self.ids);
            (self.partition, self.at) = (partition, 0);
        }
    }

    /// Advances past the next id if it is `id` of `partition`.
    fn advance_past(&mut self, partition: PartitionId, id: u64) {
        if self.partition == partition && self.ids.get(self.at) == Some(&id) {
            self.at += 1;
        }
    }
}

/// Reader of the partitions of a run, see [`IdRun::partitions`].
#[derive(Debug)]
pub struct RunPartitions<'a> {
    reader: RunReader<'a>,
    /// First entry of the next partition.
    first: Option<(PartitionId, IdChunk)>,
}

impl RunPartitions<'_> {
    /// Returns the next partition with its ids.
    ///
    /// # Errors
    /// See [`IdRun::ids`].
    pub async fn next(&mut self) -> io::Result<Option<(PartitionId, IdSet)>> {
        let mut next = match self.first.take() {
            None => self.reader.next().await?,
            first => first,
        };
        let Some((partition, _)) = next else { return Ok(None) };
        let mut chunks = Vec::new();
        while let Some((_, chunk)) = next.take_if(|(of, _)| *of == partition) {
            chunks.push(chunk);
            next = self.reader.next().await?;
        }
        self.first = next;
        Ok(Some((partition, IdSet::from_chunks(chunks))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_runs_of_like_size_are_merged() {
        assert_eq!(runs_to_merge(&[]), 0);
        assert_eq!(runs_to_merge(&[10, 10, 10]), 0);
        assert_eq!(runs_to_merge(&[10, 10, 10, 10]), 4);
        assert_eq!(runs_to_merge(&[1000, 10, 10, 10, 10]), 4);
        assert_eq!(runs_to_merge(&[100, 10, 10, 10, 10]), 5);
        assert_eq!(runs_to_merge(&[1000, 100, 10]), 0);
        // However many runs are written, a lookup reads few.
        let mut sizes = Vec::new();
        for _ in 0..10_000 {
            sizes.push(1);
            while let count @ 1.. = runs_to_merge(&sizes) {
                let merged = sizes.drain(sizes.len() - count..).sum();
                sizes.push(merged);
            }
            assert!(sizes.len() <= 24, "{sizes:?}");
        }
    }
}
