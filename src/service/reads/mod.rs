//! Reads: memory, local index, local data, and the expected block ids. "Local" is each tier that
//! the worker serves, an object store included.
//!
//! Rule against data loss: a block is visible in memory until its index record is readable in the
//! next tier. Clients read the tiers downwards and never go back, so a block may be seen twice,
//! never zero times. The flusher keeps the rule (publish, then release). No response may be cached
//! here.

pub(super) mod admission;
mod answer_limits;
pub(super) mod metrics;
pub(super) mod read_ahead;
pub(super) mod response_window;
pub(super) mod results;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::app::{App, QuotaResource, ShuffleState, WaitStage};
use crate::clock::{Instant, timeout};
use crate::memory::{MemoryRead, ReadLimit, ReadPool};
use crate::service::ServiceError;
use crate::service::losses::refuse_unknown;
use crate::service::losses::verify::Verifier;
use crate::service::parts::ServiceParts;
use crate::store::{ChunkRead, ServedData, ServedIndex, StoreError, StoreErrorKind};
use uniffle_base::budget::{Budget, Charge};
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_io::{ReadBuffer, ReadBuffers, ReadPermit, ShareParts};
use uniffle_wire::bitmap;
use uniffle_wire::request::AnnouncedRange;
use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleId, ShuffleKey};

use admission::{ReadAdmission, ReadLimits, no_read_memory};
use answer_limits::{LastRefusal, OF_APP, answer_limit, answer_lists};
use metrics::ReadInProgress;
use response_window::{ResponseWindow, UnreadResponse};

/// Divisor of the limit on all unconsumed responses: one connection may hold that fraction.
const CONNECTION_DIVISOR: u64 = 8;

/// Divisor of the read memory: the first chunks of one connection's local responses may hold that
/// fraction.
const PERMITS_DIVISOR: u64 = 4;
const PERMITS_MIN: u64 = 2;
const PERMITS_MAX: u64 = 64;

/// Number of blocks of a partition that a filter may examine on a runtime thread, which takes half
/// a millisecond.
const QUICK_BLOCKS_MAX: usize = 50_000;

/// Time that a local read waits for read memory before NO_BUFFER.
const READ_MEMORY_WAIT: Duration = Duration::from_secs(10);

/// Maximum number of hints processed per request; clients send a few.
const HINTS_MAX: usize = 16;

/// Calls for readers: memory, local index and data, and the expected block ids
/// ([`Reads::results`]).
#[derive(Debug)]
pub struct Reads {
    parts: Arc<ServiceParts>,
    last_refusal: LastRefusal,
}

/// A `getMemoryShuffleData` request.
#[derive(Debug, Clone, Copy)]
pub struct MemoryReadRequest<'a> {
    /// Application id as sent.
    pub app: &'a str,
    /// Shuffle id.
    pub shuffle: i32,
    /// Partition id.
    pub partition: i32,
    /// The last block that the client has, −1 for none.
    pub last_block_id: i64,
    /// Number of bytes after which the response ends; 0 or less means one block.
    pub read_buffer_size: i32,
    /// Requested task attempts as Java's bitmap; absent or empty means all.
    pub task_filter: Option<&'a [u8]>,
    /// Limits on the connection's unconsumed responses; `None` outside a connection.
    pub window: Option<&'a ResponseWindow>,
}

/// A partition to read, as sent.
#[derive(Debug, Clone, Copy)]
pub struct RequestedPartition<'a> {
    /// Application id.
    pub app: &'a str,
    /// Shuffle id.
    pub shuffle: i32,
    /// Partition id.
    pub partition: i32,
}

/// A range of a partition's data stream, as sent.
#[derive(Debug, Clone, Copy)]
pub struct ReadRange {
    /// Offset of the first byte.
    pub offset: i64,
    /// Number of bytes.
    pub length: i32,
}

/// The application that reads a shuffle.
struct ReadCaller {
    key: ShuffleKey,
    app: Arc<App>,
    /// Counts the read as open.
    open: Charge,
}

/// Blocks of a partition that are in memory.
#[derive(Debug)]
pub struct MemoryAnswer {
    /// The blocks.
    pub read: MemoryRead,
    /// True if the heap is charged for copies of the small blocks.
    pub may_copy: bool,
    /// Keeps the blocks pinned; to be held until the reader has them.
    pub response_guard: ResponseGuard,
}

/// A response in progress: until this is dropped, the reader's socket is accepting it.
#[derive(Debug)]
pub struct ResponseGuard {
    app: Arc<App>,
    began: Instant,
    reading: ReadInProgress,
    _pinned: Charge,
    _unread: Option<UnreadResponse>,
    _lists: Charge,
    _open: Charge,
}

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        let bytes = self.reading.bytes;
        if bytes > 0 {
            self.app.account.enter(WaitStage::Answer, bytes, self.began.elapsed());
        }
    }
}

/// Index bytes of a partition.
#[derive(Debug)]
pub struct IndexAnswer {
    /// Total length of the chunks.
    pub length: u64,
    /// Length of the partition's data stream.
    pub data_length: u64,
    /// The bytes.
    pub chunks: ChunkStream,
    /// To be held until the reader has the bytes.
    pub admission: ReadAdmission,
}

/// A range of a partition's data stream.
#[derive(Debug)]
pub struct DataAnswer {
    /// Total length of the chunks.
    pub length: u64,
    /// The bytes.
    pub chunks: ChunkStream,
    /// To be held until the reader has the bytes.
    pub admission: ReadAdmission,
}

/// Bytes that are read from disk while they are sent. The first chunk has already been read.
#[derive(Debug)]
pub struct ChunkStream {
    first: Option<Bytes>,
    /// `None` if nothing was flushed.
    source: Option<Box<dyn ChunkRead>>,
    pool: ReadPool,
    app: Arc<App>,
    began: Instant,
    /// Time spent waiting for the disk; the rest of the response time is the reader's.
    on_disk: Duration,
    reading: ReadInProgress,
    _open: Charge,
    /// Receives errors of a disk that returned altered bytes or fails repeatedly.
    reporter: Option<ErrorReporter>,
}

/// A stream's next bytes, together with the stream.
pub(super) type NextChunk = BoxFuture<'static, (Box<ChunkStream>, Result<Option<Bytes>, ServiceError>)>;

/// Target for the errors of a disk read.
#[derive(Debug)]
struct ErrorReporter {
    verifier: Arc<Verifier>,
    shuffle: Arc<ShuffleState>,
    partition: PartitionId,
}

impl ChunkStream {
    /// Returns the next bytes, or `None` after the last.
    ///
    /// # Errors
    /// The disk failed; the response cannot be completed.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ServiceError> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        let pool = self.pool.clone();
        self.read_from(&pool).await
    }

    async fn read_from(&mut self, pool: &dyn ReadBuffers) -> Result<Option<Bytes>, ServiceError> {
        let began = Instant::now();
        let chunk = match &mut self.source {
            Some(source) => source.next_chunk(pool).await,
            None => Ok(None),
        };
        self.on_disk += began.elapsed();
        self.report_failure(&chunk).await;
        chunk.map_err(|error| match error.kind {
            StoreErrorKind::Unhealthy => ServiceError::DiskHangs(error),
            _ => error.into(),
        })
    }

    /// Reports data that a checksum has shown to be lost, or a disk that fails repeatedly.
    async fn report_failure<T>(&mut self, read: &Result<T, StoreError>) {
        let Err(error) = read else { return };
        if !self.source.as_ref().is_some_and(|source| source.may_have_losses()) {
            return;
        }
        let Some(ErrorReporter { verifier, shuffle, partition }) = self.reporter.take() else { return };
        verifier.verify_partition(shuffle, partition, error).await;
    }

    /// Reads the next bytes if there is spare read memory for them and they are not the first.
    /// Returns the stream otherwise.
    pub(super) fn next_if_spare(mut self: Box<Self>) -> Result<NextChunk, Box<Self>> {
        let room = self.source.as_ref().map_or(0, |source| source.next_room()).min(self.pool.chunk_bytes());
        if self.first.is_some() || room == 0 {
            return Err(self);
        }
        let Some(buffer) = self.pool.try_acquire_spare(room) else { return Err(self) };
        self.reading.ahead.inc();
        let held = Mutex::new(Some(Box::new(buffer) as Box<dyn ReadBuffer>));
        let buffers = HeldBuffer { held, pool: self.pool.clone() };
        Ok(async move {
            let result = self.read_from(&buffers).await;
            (self, result)
        }
        .boxed())
    }
}

impl Drop for ChunkStream {
    fn drop(&mut self) {
        let length = self.reading.bytes;
        if length == 0 {
            return;
        }
        self.reading.waited_for_disk(self.on_disk);
        let account = &self.app.account;
        account.enter(WaitStage::DiskRead, length, self.on_disk);
        account.enter(WaitStage::Answer, length, self.began.elapsed().saturating_sub(self.on_disk));
    }
}

/// A buffer acquired in advance. A caller that needs another one, such as for a chunk that is read
/// again, waits for it as usual.
struct HeldBuffer {
    held: Mutex<Option<Box<dyn ReadBuffer>>>,
    pool: ReadPool,
}

impl ReadBuffers for HeldBuffer {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        match self.held.lock().take() {
            Some(buffer) => std::future::ready(buffer).boxed(),
            None => ReadBuffers::acquire(&self.pool, len),
        }
    }

    /// If the parts are not free, the buffer is not kept while waiting for them. The future yields
    /// once before it enters the queue: a future polled only once would keep a grant to itself.
    fn acquire_with(
        &self,
        len: usize,
        parts: ShareParts,
    ) -> BoxFuture<'_, (Box<dyn ReadBuffer>, ReadPermit)> {
        let held = self.held.lock().take();
        match held.and_then(|buffer| Some((buffer, self.pool.try_acquire_parts(&parts)?))) {
            Some(both) => std::future::ready(both).boxed(),
            None => async move {
                tokio::task::yield_now().await;
                self.pool.acquire_with(len, parts).await
            }
            .boxed(),
        }
    }

    fn chunk_bytes(&self) -> usize {
        let held = self.held.lock().as_mut().map(|buffer| buffer.as_mut().as_mut().len());
        held.unwrap_or_else(|| self.pool.chunk_bytes())
    }
}

impl Reads {
    pub(super) fn new(parts: &Arc<ServiceParts>) -> Self {
        Self { parts: Arc::clone(parts), last_refusal: LastRefusal::none() }
    }

    /// Returns whether a memory read may be too long for a runtime thread. Recovered blocks are
    /// verified first, and a filter that admits few blocks is applied to all blocks of a partition.
    #[must_use]
    pub fn may_take_long(&self, request: &MemoryReadRequest<'_>) -> bool {
        self.parts.memory.has_unverified() || self.filters_more_than(QUICK_BLOCKS_MAX, request)
    }

    /// Returns whether a filter may be applied to more than `blocks` blocks.
    pub(super) fn filters_more_than(&self, blocks: usize, request: &MemoryReadRequest<'_>) -> bool {
        let is_filtered = request.task_filter.is_some_and(|filter| !filter.is_empty());
        is_filtered && self.blocks_in_memory(request) > blocks
    }

    /// Returns the number of blocks in memory of the requested partition.
    fn blocks_in_memory(&self, request: &MemoryReadRequest<'_>) -> usize {
        // An invalid id is refused later, which takes no time.
        let Ok(app) = AppId::parse(request.app) else { return 0 };
        let shuffle = self.parts.memory.shuffle(&ShuffleKey::new(app, ShuffleId(request.shuffle)));
        let buffer = shuffle.and_then(|shuffle| shuffle.existing(PartitionId(request.partition)));
        buffer.map_or(0, |buffer| buffer.block_count())
    }

    /// Returns the blocks of a partition that are in memory. See [`Reads::may_take_long`].
    ///
    /// # Errors
    /// Unknown app, an exceeded quota of open reads, an invalid filter bitmap, a requested block
    /// that is lost or being verified, too many unread responses, or no heap for the response. A
    /// partition that never received data has no blocks, which is no error.
    pub fn read_memory(&self, request: MemoryReadRequest<'_>) -> Result<MemoryAnswer, ServiceError> {
        self.answer_from_memory(request).inspect_err(|error| self.last_refusal.note(error))
    }

    /// Returns whether others wait for resources held by responses: read memory, heap, or response
    /// budget. Unconsumed responses must then release them soon.
    #[must_use]
    pub fn has_waiters(&self) -> bool {
        self.parts.memory.read_pool().is_waited_for()
            || self.parts.memory.heap().whole().is_waited_for()
            || self.last_refusal.is_recent()
    }

    fn answer_from_memory(&self, request: MemoryReadRequest<'_>) -> Result<MemoryAnswer, ServiceError> {
        let caller = self.caller(request.app, request.shuffle)?;
        let (key, app) = (&caller.key, &caller.app);
        let filter = match request.task_filter {
            None | Some([]) => None,
            Some(bytes) => Some(bitmap::decode(bytes).ok_or_else(|| {
                ServiceError::Malformed("serializedExpectedTaskIdsBitmap is not a valid bitmap".to_owned())
            })?),
        };
        let partition = PartitionId(request.partition);
        let buffer = self.parts.memory.shuffle(key).and_then(|shuffle| shuffle.existing(partition));
        // Verified before the check for losses, because damaged blocks found here are lost.
        buffer.iter().for_each(|buffer| buffer.verify());
        if let Some(shuffle) = app.shuffle(key.shuffle) {
            self.parts.losses.refuse(app, &shuffle, partition, filter.as_ref())?;
        }
        let Some(buffer) = buffer else {
            let read = MemoryRead { is_end: false, ..MemoryRead::default() };
            let lists = app.budgets.answer_lists.empty_charge();
            let response_guard = self.response_guard(caller, None, 0, lists);
            return Ok(MemoryAnswer { read, may_copy: false, response_guard });
        };
        let after = Some(BlockId(request.last_block_id)).filter(|id| id.0 != -1);
        let mut limit = answer_limit(&app.budgets.answers, OF_APP, request.read_buffer_size)?;
        if let Some(answers) = request.window {
            limit = limit.min(answers.limit(request.read_buffer_size)?);
        }
        let (blocks_max, mut lists) = answer_lists(&app.budgets.answer_lists, buffer.block_count())?;
        let read = buffer.read_some(after, ReadLimit { bytes: limit, blocks: blocks_max }, filter.as_ref());
        drop(lists.split_up_to(lists.bytes().saturating_sub(read.heap_bytes())));
        let may_copy = lists.try_grow(read.small_bytes()).is_ok();
        self.parts.metrics.read_bytes.inc_by(read.length);
        self.parts.metrics.read_memory_bytes.inc_by(read.length);
        app.account.memory_reads.add(1, read.length);
        let unread = request.window.map(|answers| answers.take(read.length, limit));
        let response_guard = self.response_guard(caller, unread, read.length, lists);
        Ok(MemoryAnswer { read, may_copy, response_guard })
    }

    /// Creates the limits on the reads of a new connection.
    #[must_use]
    pub fn read_limits(&self) -> ReadLimits {
        let read_memory = self.parts.memory.read_pool().capacity_bytes();
        let chunks = read_memory / PERMITS_DIVISOR / READ_CHUNK_BYTES_MAX as u64;
        let permits = usize::try_from(chunks.clamp(PERMITS_MIN, PERMITS_MAX)).unwrap_or(1);
        let room = Budget::new(self.parts.memory.answered().capacity() / CONNECTION_DIVISOR);
        ReadLimits::new(ResponseWindow::new(room), permits, READ_MEMORY_WAIT)
    }

    fn response_guard(
        &self,
        ReadCaller { app, open: _open, .. }: ReadCaller,
        _unread: Option<UnreadResponse>,
        bytes: u64,
        _lists: Charge,
    ) -> ResponseGuard {
        // The limit was checked earlier: exceeding it by one response is cheaper than building the
        // response twice.
        let _pinned = app.budgets.answers.charge_unchecked(bytes);
        ResponseGuard {
            app,
            _pinned,
            _unread,
            _lists,
            _open,
            began: Instant::now(),
            reading: self.parts.metrics.reads.memory.begin(bytes),
        }
    }

    /// Returns all index records of a partition in the tier that the worker serves. They are empty
    /// if nothing was flushed.
    ///
    /// # Errors
    /// Unknown app, an exceeded quota of open reads, losses that are being determined, a failing
    /// tier, or no admission or read memory in time.
    pub async fn read_index(
        &self,
        limits: &ReadLimits,
        target: RequestedPartition<'_>,
    ) -> Result<IndexAnswer, ServiceError> {
        let admission = limits.admit(target.app).await?;
        let caller = self.caller(target.app, target.shuffle)?;
        let (key, partition) = (&caller.key, PartitionId(target.partition));
        let reads = &self.parts.metrics.reads.local_index;
        let read = match self.parts.tiers.served() {
            Some(tier) => tier.index(key, partition),
            None => Err(StoreError::new(StoreErrorKind::NotFound, "no tier with data that workers serve")),
        };
        let read = match read {
            // A missing shuffle has no flushed data: the response is empty, not an error
            // (docs/protocol.md §2.11).
            Err(error) if error.kind == StoreErrorKind::NotFound => {
                let chunks = self.stream(caller, reads.begin(0), None, None);
                return Ok(IndexAnswer { length: 0, data_length: 0, chunks, admission });
            }
            read => read?,
        };
        let ServedIndex { length, data_length, chunks } = read;
        let shuffle = caller.app.shuffle(key.shuffle);
        if let Some(shuffle) = &shuffle {
            refuse_unknown(shuffle, partition)?;
        }
        let reporter = shuffle.map(|shuffle| ErrorReporter {
            verifier: Arc::clone(&self.parts.verifier),
            shuffle,
            partition,
        });
        let chunks = self.start(self.stream(caller, reads.begin(length), Some(chunks), reporter)).await?;
        Ok(IndexAnswer { length, data_length, chunks, admission })
    }

    /// Returns exactly `length` bytes of a partition's data stream, starting at `offset`.
    ///
    /// # Errors
    /// Unknown app, an exceeded quota of open reads, no tier that the worker serves, a range that
    /// is negative, empty, beyond the published data or with a hole in which blocks are lost, a
    /// failing tier, or no admission or read memory in time.
    pub async fn read_data(
        &self,
        limits: &ReadLimits,
        target: RequestedPartition<'_>,
        ReadRange { offset, length }: ReadRange,
    ) -> Result<DataAnswer, ServiceError> {
        let admission = limits.admit(target.app).await?;
        let caller = self.caller(target.app, target.shuffle)?;
        let invalid =
            |field, value| ServiceError::InvalidField { field, value, allowed: "must be 0 or more" };
        let offset = u64::try_from(offset).map_err(|_| invalid("offset", offset))?;
        let length = u32::try_from(length).map_err(|_| invalid("length", i64::from(length)))?;
        let Some(tier) = self.parts.tiers.served() else {
            return Err(ServiceError::Unsupported("this worker has no local disks"));
        };
        let partition = PartitionId(target.partition);
        let ServedData { has_hole, chunks } = tier.data(&caller.key, partition, offset, length)?;
        // Bytes that were never reported are not lost: they read as zeros, so that segments around
        // them can be read.
        let shuffle = caller.app.shuffle(caller.key.shuffle);
        if let Some(shuffle) = shuffle.as_ref().filter(|_| has_hole) {
            self.parts.losses.refuse(&caller.app, shuffle, partition, None)?;
        }
        let reporter = shuffle.map(|shuffle| ErrorReporter {
            verifier: Arc::clone(&self.parts.verifier),
            shuffle,
            partition,
        });
        let length = u64::from(length);
        let reading = self.parts.metrics.reads.local_data.begin(length);
        let chunks = self.start(self.stream(caller, reading, Some(chunks), reporter)).await?;
        self.parts.metrics.read_bytes.inc_by(length);
        Ok(DataAnswer { length, chunks, admission })
    }

    /// Passes on a client's hints about its next reads. Hints are never refused: those after the
    /// first [`HINTS_MAX`] and invalid ranges are ignored.
    pub fn hint(&self, target: RequestedPartition<'_>, hints: impl ExactSizeIterator<Item = AnnouncedRange>) {
        if hints.len() == 0 {
            return;
        }
        let (Some(tier), Ok(app)) = (self.parts.tiers.served(), AppId::parse(target.app)) else { return };
        let range = |AnnouncedRange { offset, length }: AnnouncedRange| {
            let start = u64::try_from(offset).ok()?;
            let length = u64::try_from(length).ok().filter(|length| *length > 0)?;
            Some(start..start.checked_add(length)?)
        };
        let ranges: SmallVec<[_; 4]> = hints.take(HINTS_MAX).filter_map(range).collect();
        tier.hint(&ShuffleKey::new(app, ShuffleId(target.shuffle)), PartitionId(target.partition), &ranges);
    }

    fn caller(&self, app: &str, shuffle: i32) -> Result<ReadCaller, ServiceError> {
        let app = self.parts.touched_app(app)?;
        let open = app.usage.take(QuotaResource::OpenReads, 1)?;
        Ok(ReadCaller { key: ShuffleKey::new(app.id().clone(), ShuffleId(shuffle)), app, open })
    }

    fn stream(
        &self,
        ReadCaller { app, open: _open, .. }: ReadCaller,
        reading: ReadInProgress,
        source: Option<Box<dyn ChunkRead>>,
        reporter: Option<ErrorReporter>,
    ) -> ChunkStream {
        let pool = self.parts.memory.read_pool_of(app.id());
        let (began, on_disk) = (Instant::now(), Duration::ZERO);
        ChunkStream { first: None, source, pool, app, began, on_disk, reading, _open, reporter }
    }

    /// Reads the first chunk while an error can still be returned as a status.
    async fn start(&self, mut stream: ChunkStream) -> Result<ChunkStream, ServiceError> {
        self.parts.metrics.read_memory_requests.inc();
        let requested = stream.reading.bytes;
        stream.first = timeout(READ_MEMORY_WAIT, stream.next()).await.map_err(|_| {
            self.parts.metrics.read_memory_refused.inc();
            no_read_memory(requested, READ_MEMORY_WAIT)
        })??;
        Ok(stream)
    }
}
