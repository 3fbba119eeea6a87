//! Buffers for reads from disk, in a separate small region, so that readers are bounded too.
//!
//! Invariant: a buffer is exclusive until it is frozen, and its memory is reused only after its
//! last `Bytes` was dropped. Waiting applications are served fairly (`sched::FairSemaphore`). The
//! caller limits the time of the wait.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::Notify;
use uniffle_io::buffers::{READ_CHUNK_BYTES_MAX, READ_CHUNK_BYTES_SHORT, ReadBuffer, ReadBuffers};
use uniffle_io::{BoxFuture, ReadPermit, ShareParts};

use crate::region::{Fill, Region, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Slice};
use uniffle_base::budget::Budget;
use uniffle_base::sched::{DevicePermit, FairSemaphore, Holder, Permit, Reserve};
use uniffle_wire::types::AppId;

/// Read buffers of a bounded total, for one application or for the worker itself.
#[derive(Clone)]
pub struct ReadPool {
    region: Arc<Region>,
    budget: Budget,
    /// Permits for bytes. With a permit the allocation succeeds unless the free memory is
    /// fragmented.
    permits: Arc<FairSemaphore>,
    holder: Holder,
    freed: Arc<Notify>,
    waits: Arc<AtomicU64>,
}

impl ReadPool {
    /// Creates a pool of `capacity_bytes`, at least 2 MiB.
    ///
    /// # Errors
    /// When the memory cannot be mapped.
    pub fn new(capacity_bytes: u64) -> io::Result<Self> {
        let region = Region::new(capacity_bytes)?;
        let budget = Budget::new(region.capacity_bytes());
        let permits = FairSemaphore::new(region.capacity_bytes(), Reserve::Eighth);
        let holder = Holder { app: None, weight: 1 };
        Ok(Self { region, budget, permits, holder, freed: Arc::new(Notify::new()), waits: Arc::default() })
    }

    /// Advises the kernel to use huge pages for the buffers, or not to.
    #[must_use]
    pub fn with_huge_pages(self, is_wanted: bool) -> Self {
        self.region.advise_huge_pages(is_wanted);
        self
    }

    /// Returns a handle to the same buffers for `app`, which has `weight` in fair sharing.
    pub fn of(&self, app: &AppId, weight: u32) -> Self {
        Self { holder: Holder { app: Some(app.clone()), weight }, ..self.clone() }
    }

    /// Waits for a buffer of `len` bytes. Panics if `len` exceeds [`READ_CHUNK_BYTES_MAX`], which
    /// would be a bug.
    pub async fn acquire(&self, len: usize) -> ReadBuf {
        self.acquire_both(len, &ShareParts::default()).await.0
    }

    /// Waits for a buffer and `parts`. Neither is held while the other is awaited.
    async fn acquire_both(&self, len: usize, parts: &ShareParts) -> (ReadBuf, DevicePermit) {
        let bytes = segment_bytes(len);
        let mut granted = self.permits.try_acquire_with(&self.holder, bytes as u64, parts);
        if granted.is_none() && parts.full().is_none() {
            self.waits.fetch_add(1, Ordering::Relaxed);
        }
        loop {
            // Before the attempt, so that a buffer freed in between is not missed.
            let freed = self.freed.notified();
            let (permit, device) = match granted.take() {
                Some(granted) => granted,
                None => self.permits.acquire_with(&self.holder, bytes as u64, parts.clone()).await,
            };
            if let Some(buffer) = self.allocate(len, bytes, permit) {
                return (buffer, device);
            }
            drop(device);
            // Enough memory is free but fragmented. It merges as buffers are freed, and buffers are
            // short-lived.
            freed.await;
        }
    }

    /// Returns a buffer of `len` bytes if one is available now.
    #[must_use]
    pub fn try_acquire(&self, len: usize) -> Option<ReadBuf> {
        let bytes = segment_bytes(len);
        let permit = self.permits.try_acquire(&self.holder, bytes as u64)?;
        self.allocate(len, bytes, permit)
    }

    /// Returns a buffer of `len` bytes if one is available now, nobody waits, and at least half of
    /// the pool stays free.
    #[must_use]
    pub fn try_acquire_spare(&self, len: usize) -> Option<ReadBuf> {
        if self.permits.has_waiters() {
            return None;
        }
        let used = self.used_bytes() + segment_bytes(len) as u64;
        if used > self.capacity_bytes() / 2 { None } else { self.try_acquire(len) }
    }

    /// Returns the size that a read should request. It is smaller if more than half of the pool
    /// would be in use with this read and its read-ahead, so that many readers progress at once.
    pub fn chunk_bytes(&self) -> usize {
        let is_spare = self.used_bytes() + 2 * READ_CHUNK_BYTES_MAX as u64 <= self.capacity_bytes() / 2;
        if is_spare { READ_CHUNK_BYTES_MAX } else { READ_CHUNK_BYTES_SHORT }
    }

    /// Takes `parts` for a buffer that is held already, if they are available now and nobody waits.
    #[must_use]
    pub fn try_acquire_parts(&self, parts: &ShareParts) -> Option<ReadPermit> {
        let (_, device) = self.permits.try_acquire_with(&self.holder, 0, parts)?;
        Some(Box::new(device))
    }

    /// Returns whether a read waits for a buffer.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.permits.is_short()
    }

    /// Returns how often a buffer had to wait for free bytes.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Returns the bytes of buffers in use.
    pub fn used_bytes(&self) -> u64 {
        self.budget.used()
    }

    /// Returns the total bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.budget.capacity()
    }

    fn allocate(&self, len: usize, bytes: usize, permit: Permit) -> Option<ReadBuf> {
        let charge = self.budget.try_charge(bytes as u64).ok()?;
        let mut segment = self.region.allocate(bytes, charge).ok()?;
        let fill = segment.fill(len)?;
        let lease = Lease { permit: Some(permit), freed: Arc::clone(&self.freed) };
        Some(ReadBuf { fill, lease })
    }
}

impl fmt::Debug for ReadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (used, capacity) = (self.used_bytes(), self.capacity_bytes());
        f.debug_struct("ReadPool").field("used", &used).field("capacity", &capacity).finish_non_exhaustive()
    }
}

fn segment_bytes(len: usize) -> usize {
    assert!(len <= READ_CHUNK_BYTES_MAX, "a read buffer of {len} bytes is too large");
    const { assert!(READ_CHUNK_BYTES_MAX <= SEGMENT_BYTES_MAX) };
    len.next_power_of_two().max(SEGMENT_BYTES_MIN)
}

/// The permit of a buffer, released after its memory. Dropping it wakes waiters for merged memory.
#[derive(Debug)]
struct Lease {
    permit: Option<Permit>,
    freed: Arc<Notify>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.freed.notify_waiters();
    }
}

/// A buffer of a [`ReadPool`]. The memory is freed before the lease: fields drop in this order.
#[derive(Debug)]
pub struct ReadBuf {
    fill: Fill,
    lease: Lease,
}

struct Frozen {
    slice: Slice,
    _lease: Lease,
}

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        self.slice.as_ref()
    }
}

impl ReadBuf {
    /// Returns the length of the buffer in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.fill.len()
    }

    /// Returns true for a buffer of no bytes.
    pub fn is_empty(&self) -> bool {
        self.fill.is_empty()
    }

    /// Returns the page-aligned buffer. It contains earlier data of the memory: overwrite it before
    /// exposing it.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.fill.bytes_mut()
    }

    /// Freezes the first `len` bytes, which must have been written. The rest is zeroed.
    #[must_use]
    pub fn freeze(self, len: usize) -> Bytes {
        let slice = self.fill.freeze_prefix(len);
        Bytes::from_owner(Frozen { slice, _lease: self.lease })
    }
}

impl ReadBuffers for ReadPool {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        Box::pin(async move { Box::new(Self::acquire(self, len).await) as Box<dyn ReadBuffer> })
    }

    fn acquire_with(
        &self,
        len: usize,
        parts: ShareParts,
    ) -> BoxFuture<'_, (Box<dyn ReadBuffer>, ReadPermit)> {
        Box::pin(async move {
            let (buffer, device) = self.acquire_both(len, &parts).await;
            (Box::new(buffer) as Box<dyn ReadBuffer>, Box::new(device) as ReadPermit)
        })
    }

    fn chunk_bytes(&self) -> usize {
        Self::chunk_bytes(self)
    }
}

impl ReadBuffer for ReadBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }

    fn freeze(self: Box<Self>, len: usize) -> Bytes {
        Self::freeze(*self, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn buffer_returns_when_its_last_bytes_are_dropped() {
        let pool = ReadPool::new(2 << 20).unwrap();
        let mut first = pool.acquire(1 << 20).await;
        first.bytes_mut()[..3].copy_from_slice(b"abc");
        let bytes = first.freeze(3);
        let second = pool.try_acquire(1 << 20).unwrap();
        assert!(pool.try_acquire(1).is_none(), "the pool must be bounded");
        let waiting = tokio::time::timeout(std::time::Duration::ZERO, pool.acquire(1 << 20));
        assert!(waiting.await.is_err());
        assert_eq!(pool.waits(), 1);
        let part = bytes.slice(1..2);
        drop(bytes);
        assert_eq!((&part[..], pool.used_bytes()), (&b"b"[..], 2 << 20));
        drop((part, second));
        assert_eq!(pool.used_bytes(), 0);
        assert_eq!(pool.region.largest_free(), SEGMENT_BYTES_MAX);
    }

    #[test]
    fn chunks_are_small_when_memory_is_short() {
        let pool = ReadPool::new(8 << 20).unwrap();
        let mut held = Vec::new();
        let mut sizes = Vec::new();
        for _ in 0..6 {
            sizes.push(pool.chunk_bytes() >> 20);
            held.extend(pool.try_acquire(pool.chunk_bytes()));
        }
        assert_eq!((sizes, held.len()), (vec![2, 1, 1, 1, 1, 1], 6));
    }

    #[tokio::test]
    async fn fragmented_memory_is_awaited() {
        let pool = ReadPool::new(2 << 20).unwrap();
        let mut small: Vec<_> = (0..512).map(|_| pool.try_acquire(4096).unwrap()).collect();
        // Every second unit stays in use: half of the memory is free, but no two adjacent units
        // are.
        let kept: Vec<_> = (0..256).map(|at| small.remove(at)).collect();
        drop(small);
        let other = pool.clone();
        let mut waiting = std::pin::pin!(async move { other.acquire(8192).await });
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        drop(kept);
        assert_eq!(waiting.await.len(), 8192);
        assert_eq!(pool.used_bytes(), 0);
    }
}
