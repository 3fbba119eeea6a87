//! Buffers for disk reads, and aligned staging buffers for writes that must be gathered.
//!
//! The store requests buffers through [`ReadBuffers`] and does not know who owns the memory (the
//! worker's read pool implements it). [`AlignedPool`] is bounded and recycles its buffers, so that
//! gathering neither grows the heap nor causes new page faults. [`DeviceShare`] limits the read
//! memory of one device. Invariant: a read owns its buffer until the system call has returned, even
//! if its caller gave up.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{BLOCK_ALIGN, BoxFuture};

/// Largest read buffer: reads are streamed in chunks of at most this size.
///
/// Every chunk costs a round trip to a thread of the disk, so larger chunks need less CPU per byte.
/// The measurements are in `benches/notes/disks.md`.
pub const READ_CHUNK_BYTES_MAX: usize = 2 << 20;

/// Largest chunk while read memory is short.
pub const READ_CHUNK_BYTES_SHORT: usize = 1 << 20;

/// Size of one staging buffer, which holds the data of one gathered write call.
pub const STAGING_BYTES: usize = 1 << 20;

/// The part of the read memory that reads of one device may hold. Reads that are stuck on one
/// device leave memory for reads of others.
#[derive(Debug)]
pub struct DeviceShare {
    bytes: u64,
    used: AtomicU64,
}

impl DeviceShare {
    /// Creates a share of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes: bytes.max(1), used: AtomicU64::new(0) })
    }

    /// Returns whether a read of `bytes` bytes could get its part now.
    #[must_use]
    pub fn has_room(&self, bytes: usize) -> bool {
        self.is_free(self.part_for(bytes))
    }

    fn is_free(&self, part: u64) -> bool {
        part <= self.bytes.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Returns the part for a read of `bytes` bytes, at most all of the share.
    fn part_for(&self, bytes: usize) -> u64 {
        (bytes.next_multiple_of(BLOCK_ALIGN) as u64).min(self.bytes)
    }
}

/// The parts that a read needs of the shares of its devices.
#[derive(Debug, Clone, Default)]
pub struct ShareParts(Vec<(Arc<DeviceShare>, u64)>);

impl ShareParts {
    /// Returns the parts for a read of `bytes` bytes. A repeated share counts once.
    pub fn of<'a>(shares: impl IntoIterator<Item = &'a Arc<DeviceShare>>, bytes: usize) -> Self {
        let mut parts = Self::default();
        for share in shares {
            if !parts.contains(share) {
                parts.0.push((Arc::clone(share), share.part_for(bytes)));
            }
        }
        parts
    }

    /// Returns whether the read needs no share.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the read needs a part of `share`.
    #[must_use]
    pub fn contains(&self, share: &Arc<DeviceShare>) -> bool {
        self.0.iter().any(|(it, _)| Arc::ptr_eq(it, share))
    }

    /// Returns a share with too little free for its part, if there is one.
    #[must_use]
    pub fn full(&self) -> Option<&Arc<DeviceShare>> {
        self.0.iter().find(|(share, part)| !share.is_free(*part)).map(|(share, _)| share)
    }

    /// Takes the parts. The owner of the read memory calls this under its lock, if no share is
    /// full.
    pub fn take(&self) {
        for (share, part) in &self.0 {
            share.used.fetch_add(*part, Ordering::Relaxed);
        }
    }

    /// Releases the parts. The owner of the read memory calls this under its lock.
    pub fn release(&self) {
        for (share, part) in &self.0 {
            share.used.fetch_sub(*part, Ordering::Relaxed);
        }
    }
}

/// Guard of the parts that a read has taken. A drop releases them.
pub type ReadPermit = Box<dyn Send>;

/// A source of read buffers.
pub trait ReadBuffers: Send + Sync {
    /// Waits for a buffer of at least `len` bytes (`len` ≤ [`READ_CHUNK_BYTES_MAX`]).
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>>;

    /// Waits for a buffer of at least `len` bytes and `parts`, both together. The default is for
    /// sources outside the read memory, of which devices have no shares.
    fn acquire_with(
        &self,
        len: usize,
        _parts: ShareParts,
    ) -> BoxFuture<'_, (Box<dyn ReadBuffer>, ReadPermit)> {
        Box::pin(async move { (self.acquire(len).await, Box::new(()) as ReadPermit) })
    }

    /// Returns the size of the largest chunk to request at present, in whole disk blocks.
    fn chunk_bytes(&self) -> usize {
        READ_CHUNK_BYTES_MAX
    }
}

/// A buffer that a read fills and that becomes [`Bytes`].
pub trait ReadBuffer: Send {
    /// Returns the whole buffer.
    fn as_mut(&mut self) -> &mut [u8];
    /// Returns the first `len` bytes, immutable from then on. Their memory is released when the
    /// last clone is dropped.
    fn freeze(self: Box<Self>, len: usize) -> Bytes;
}

/// A part of a buffer and the file offset of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPart {
    /// The part to fill.
    pub range: Range<usize>,
    /// Offset of its first byte in the file.
    pub offset: u64,
}

/// A buffer and the parts of it that one read fills.
pub struct ReadTarget {
    /// The buffer, owned by the read until it returns.
    pub buffer: Box<dyn ReadBuffer>,
    /// The parts to fill.
    pub parts: Vec<ReadPart>,
}

impl ReadTarget {
    /// Creates a target with one part of `buffer`.
    pub fn one(buffer: Box<dyn ReadBuffer>, range: Range<usize>, offset: u64) -> Self {
        Self { buffer, parts: vec![ReadPart { range, offset }] }
    }

    /// Returns an empty target, for a read whose thread panicked with the buffer.
    #[must_use]
    pub fn lost() -> Self {
        Self { buffer: Box::new(Vec::new()), parts: Vec::new() }
    }

    /// Returns the bytes of a part, or `None` if the part does not exist or exceeds the buffer.
    pub fn part_mut(&mut self, part: usize) -> Option<&mut [u8]> {
        let range = self.parts.get(part)?.range.clone();
        (*self.buffer).as_mut().get_mut(range)
    }
}

impl fmt::Debug for ReadTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadTarget").field("parts", &self.parts).finish_non_exhaustive()
    }
}

/// Unbounded heap buffers, for tests and for small reads outside the worker's read pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeapBuffers;

impl ReadBuffers for HeapBuffers {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        let buffer: Box<dyn ReadBuffer> = Box::new(vec![0; len]);
        Box::pin(std::future::ready(buffer))
    }
}

impl ReadBuffer for Vec<u8> {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }

    fn freeze(self: Box<Self>, len: usize) -> Bytes {
        let mut bytes = Bytes::from(*self);
        bytes.truncate(len);
        bytes
    }
}

/// Heap buffers for one reader of long streams.
///
/// Buffers of 64 KiB and more begin on a [`BLOCK_ALIGN`] boundary, so that direct reads need no
/// bounce buffer. Buffers of whole chunks are recycled once their last clone is dropped. There are
/// at most as many of them as were in use at once.
#[derive(Debug, Clone, Default)]
pub struct StreamBuffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl StreamBuffers {
    /// Smallest aligned buffer: alignment wastes at most a sixteenth of it.
    const SMALLEST: usize = 16 * BLOCK_ALIGN;

    /// Returns true if a buffer of a whole chunk serves a request for `len` bytes.
    fn is_chunk(len: usize) -> bool {
        (READ_CHUNK_BYTES_MAX - READ_CHUNK_BYTES_MAX / 16..=READ_CHUNK_BYTES_MAX).contains(&len)
    }
}

impl ReadBuffers for StreamBuffers {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        if len < Self::SMALLEST {
            return HeapBuffers.acquire(len);
        }
        let recycled = Self::is_chunk(len).then(|| self.0.lock().pop()).flatten();
        let whole = if Self::is_chunk(len) { READ_CHUNK_BYTES_MAX } else { len };
        let memory = recycled.unwrap_or_else(|| vec![0; whole + BLOCK_ALIGN]);
        let address = memory.as_ptr().addr();
        let start = address.next_multiple_of(BLOCK_ALIGN) - address;
        let home = Self::is_chunk(len).then(|| Arc::clone(&self.0));
        let buffer: Box<dyn ReadBuffer> = Box::new(StreamBuffer { memory, range: start..start + len, home });
        Box::pin(std::future::ready(buffer))
    }
}

struct StreamBuffer {
    memory: Vec<u8>,
    range: Range<usize>,
    home: Option<Arc<Mutex<Vec<Vec<u8>>>>>,
}

impl ReadBuffer for StreamBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }

    fn freeze(mut self: Box<Self>, len: usize) -> Bytes {
        self.range.end = self.range.end.min(self.range.start + len);
        Bytes::from_owner(*self)
    }
}

impl AsRef<[u8]> for StreamBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl Drop for StreamBuffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.lock().push(std::mem::take(&mut self.memory));
        }
    }
}

/// A bounded pool of recycled [`STAGING_BYTES`] buffers that begin on a [`BLOCK_ALIGN`] boundary.
#[derive(Debug)]
pub struct AlignedPool {
    free: Mutex<Vec<Vec<u8>>>,
    permits: Arc<Semaphore>,
}

impl AlignedPool {
    /// Creates a pool of at most `buffers` buffers. Memory is allocated on first use.
    #[must_use]
    pub fn new(buffers: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), permits: Arc::new(Semaphore::new(buffers.max(1))) })
    }

    /// Waits for a buffer. Holding one while waiting for another can deadlock: fill it and write it
    /// before the next request.
    pub async fn acquire(self: &Arc<Self>) -> AlignedBuffer {
        let permit =
            Arc::clone(&self.permits).acquire_owned().await.expect("the pool never closes its semaphore");
        let memory = self.free.lock().pop().unwrap_or_else(AlignedBuffer::allocate);
        AlignedBuffer::around(memory, Some(PoolSlot { pool: Arc::clone(self), permit }))
    }

    /// Returns the number of free buffers.
    pub fn available(&self) -> usize {
        self.permits.available_permits()
    }
}

/// Pool to which a buffer returns, with the permit for it.
struct PoolSlot {
    pool: Arc<AlignedPool>,
    permit: OwnedSemaphorePermit,
}

/// An aligned buffer that is filled from its start and becomes [`Bytes`].
pub struct AlignedBuffer {
    memory: Vec<u8>,
    /// First aligned byte of `memory`, which is one alignment longer than the buffer.
    start: usize,
    filled: usize,
    home: Option<PoolSlot>,
}

impl AlignedBuffer {
    /// Creates a buffer outside any pool.
    #[must_use]
    pub fn unpooled() -> Self {
        Self::around(Self::allocate(), None)
    }

    fn allocate() -> Vec<u8> {
        vec![0; STAGING_BYTES + BLOCK_ALIGN]
    }

    fn around(memory: Vec<u8>, home: Option<PoolSlot>) -> Self {
        let address = memory.as_ptr().addr();
        let start = address.next_multiple_of(BLOCK_ALIGN) - address;
        Self { memory, start, filled: 0, home }
    }

    /// Returns the number of bytes that still fit.
    pub fn room(&self) -> usize {
        STAGING_BYTES - self.filled
    }

    /// Returns the number of bytes stored so far, including padding.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Copies as much of `bytes` as fits. Returns the number of bytes copied.
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.room());
        let at = self.start + self.filled;
        self.memory[at..at + taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        taken
    }

    /// Pads with zeros up to the next multiple of [`BLOCK_ALIGN`], so that bytes of an earlier use
    /// never reach a file.
    pub fn pad(&mut self) {
        let end = self.filled.next_multiple_of(BLOCK_ALIGN);
        self.memory[self.start + self.filled..self.start + end].fill(0);
        self.filled = end;
    }

    /// Returns the stored bytes, immutable. The memory returns to the pool when the last clone is
    /// dropped.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for AlignedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.filled]
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuffer").field("filled", &self.filled).finish_non_exhaustive()
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if let Some(PoolSlot { pool, permit }) = self.home.take() {
            // The memory is returned before the permit, so that the next holder of the permit finds
            // it.
            pool.free.lock().push(std::mem::take(&mut self.memory));
            drop(permit);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn buffers_are_aligned_padded_with_zeros_and_recycled() {
        let pool = AlignedPool::new(1);
        let mut first = pool.acquire().await;
        assert_eq!(first.put(&[7; 5000]), 5000);
        assert!(pool.acquire().now_or_never().is_none(), "the pool must be bounded");
        let bytes = first.freeze();
        assert_eq!(bytes.as_ptr().addr() % BLOCK_ALIGN, 0);
        let clone = bytes.slice(1..2);
        drop(bytes);
        assert_eq!(pool.available(), 0, "a clone must keep the buffer");
        drop(clone);
        let mut second = pool.acquire().await;
        second.put(&[1; 10]);
        second.pad();
        assert_eq!(second.filled(), BLOCK_ALIGN);
        assert!(
            second.as_ref()[10..].iter().all(|byte| *byte == 0),
            "the buffer has bytes of its first user"
        );
    }

    #[test]
    fn stream_buffers_are_aligned_and_whole_chunks_reused() {
        let buffers = StreamBuffers::default();
        let acquire = |len| buffers.acquire(len).now_or_never().unwrap();
        for (len, recycled) in
            [(READ_CHUNK_BYTES_MAX, 1), (READ_CHUNK_BYTES_MAX - 5, 1), (1 << 16, 0), (1 << 20, 0)]
        {
            buffers.0.lock().clear();
            let mut buffer = acquire(len);
            let bytes = (*buffer).as_mut();
            assert_eq!((bytes.len(), bytes.as_ptr().addr() % BLOCK_ALIGN), (len, 0));
            bytes.fill(7);
            let frozen = buffer.freeze(100);
            assert_eq!(frozen, [7; 100].as_slice());
            let clone = frozen.slice(1..2);
            drop(frozen);
            assert_eq!(buffers.0.lock().len(), 0, "a clone must keep the buffer");
            drop(clone);
            assert_eq!(buffers.0.lock().len(), recycled, "{len}");
            assert_eq!((*acquire(len)).as_mut().len(), len);
        }
    }

    #[test]
    fn parts_of_shares_are_whole_blocks_or_all() {
        let (large, small) = (DeviceShare::new(10 * BLOCK_ALIGN as u64), DeviceShare::new(100));
        let parts = ShareParts::of([&large, &small, &large], 5000);
        assert!(parts.full().is_none());
        parts.take();
        assert!(
            large.has_room(8 * BLOCK_ALIGN) && !large.has_room(8 * BLOCK_ALIGN + 1),
            "two blocks must be used"
        );
        assert!(parts.full().is_some_and(|share| Arc::ptr_eq(share, &small)) && !small.has_room(1));
        parts.release();
        assert!(large.has_room(10 * BLOCK_ALIGN) && small.has_room(usize::MAX / 2));
    }

    #[test]
    fn full_buffer_accepts_no_bytes() {
        let mut buffer = AlignedBuffer::unpooled();
        assert_eq!(buffer.put(&vec![1; STAGING_BYTES + 3]), STAGING_BYTES);
        assert_eq!(buffer.put(&[1]), 0);
        assert_eq!(buffer.room(), 0);
    }
}
