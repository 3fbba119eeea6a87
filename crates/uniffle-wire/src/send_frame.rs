//! Streaming decoder of the TCP protocol's `SendShuffleDataRequest` (docs/protocol.md §7.4, type
//! 3).
//!
//! It accepts the message in pieces of any size, after the frame's nine-byte header. A block's
//! bytes go to the [`BlockSink`] as sub-slices of the fed chunk. The decoder keeps only one partial
//! group of fields (40 B) and the application id. Decoding allocates only the buffer of the id,
//! which [`SendFrameDecoder::restart`] reuses.
//!
//! Every length and count is compared with the rest of the frame, less the fields that must still
//! follow, before it is used. After an error the decoder must not be fed again.

use crate::{BlockHeader, BlockSink, DecodeError, SendHeader};

/// Longest application id that is accepted. The service checks a tighter limit with its own error
/// text.
const APP_BYTES_MAX: u32 = 1024;
/// requestId, length of appId
const START_BYTES: usize = 12;
/// shuffleId, requireBufferId, partition count
const HEADER_REST_BYTES: usize = 16;
/// partitionId, block count
const PARTITION_BYTES: usize = 8;
/// partitionId, blockId, length, shuffleId, crc, taskAttemptId, length of the data. Both lengths
/// must be equal.
const BLOCK_HEAD_BYTES: usize = 40;
/// server count
const SERVER_COUNT_BYTES: usize = 4;
/// Lengths of two empty strings, and two ports.
const SERVER_BYTES_MIN: u64 = 16;
/// grpcPort, nettyPort
const PORTS_BYTES: usize = 8;
/// uncompressLength, freeMemory
const BLOCK_TAIL_BYTES: usize = 12;
/// Length of a block without its data and its servers.
const BLOCK_BYTES_MIN: u64 = (BLOCK_HEAD_BYTES + SERVER_COUNT_BYTES + BLOCK_TAIL_BYTES) as u64;
/// timestamp
const TIMESTAMP_BYTES: usize = 8;
/// Longest group of fields that may have to be assembled from several chunks.
const STASH_BYTES: usize = BLOCK_HEAD_BYTES;

/// Next part of the message. Consecutive fields of fixed size are a group, decoded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    /// Number of bytes of the application id still to come.
    App(u32),
    HeaderRest,
    Partition,
    BlockHead,
    /// Number of bytes of the block's data still to come.
    BlockData(u32),
    ServerCount,
    ServerIdLength,
    /// Number of bytes of a server's id still to skip.
    ServerId(u32),
    ServerHostLength,
    /// Number of bytes of a server's host still to skip.
    ServerHost(u32),
    Ports,
    BlockTail,
    Timestamp,
    Done,
}

/// Decoder of one frame. Keeps its position between two chunks.
#[derive(Debug)]
pub struct SendFrameDecoder {
    state: State,
    /// Number of message bytes that were not fed yet.
    remaining: u64,
    message_bytes: u64,
    stash: [u8; STASH_BYTES],
    stashed: usize,
    app: Vec<u8>,
    request_id: Option<i64>,
    shuffle: i32,
    partition: i32,
    remaining_partitions: u32,
    remaining_blocks: u32,
    remaining_servers: u32,
    block: BlockHeader,
    timestamp_ms: i64,
}

impl SendFrameDecoder {
    /// Starts a message of `message_bytes` bytes.
    pub fn new(message_bytes: u32) -> Self {
        Self {
            state: State::Start,
            remaining: u64::from(message_bytes),
            message_bytes: u64::from(message_bytes),
            stash: [0; STASH_BYTES],
            stashed: 0,
            app: Vec::new(),
            request_id: None,
            shuffle: 0,
            partition: 0,
            remaining_partitions: 0,
            remaining_blocks: 0,
            remaining_servers: 0,
            block: BlockHeader::default(),
            timestamp_ms: 0,
        }
    }

    /// Starts another message and reuses the buffers.
    pub fn restart(&mut self, message_bytes: u32) {
        let mut app = std::mem::take(&mut self.app);
        app.clear();
        *self = Self { app, ..Self::new(message_bytes) };
    }

    /// Returns the request id once it was decoded, also after an error.
    pub fn request_id(&self) -> Option<i64> {
        self.request_id
    }

    /// Returns the number of message bytes that were not fed yet.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Returns the client's clock at sending, in milliseconds. Valid after the end of the message.
    pub fn timestamp_ms(&self) -> i64 {
        self.timestamp_ms
    }

    /// Decodes the next bytes of the message. Returns true when the message is complete.
    ///
    /// # Errors
    /// Fails if the message breaks the format or the sink returns an error.
    pub fn feed<S: BlockSink>(&mut self, mut chunk: &[u8], sink: &mut S) -> Result<bool, S::Error> {
        if chunk.len() as u64 > self.remaining {
            return Err(self.malformed("more bytes than the frame's length").into());
        }
        while !chunk.is_empty() {
            match self.state {
                State::BlockData(wanted) => {
                    let (bytes, rest) = chunk.split_at(prefix_len(wanted, chunk));
                    sink.write(bytes)?;
                    chunk = rest;
                    let left = self.consume(bytes.len(), wanted);
                    self.state = if left == 0 { State::ServerCount } else { State::BlockData(left) };
                }
                State::App(wanted) => {
                    let (bytes, rest) = chunk.split_at(prefix_len(wanted, chunk));
                    self.app.extend_from_slice(bytes);
                    chunk = rest;
                    let left = self.consume(bytes.len(), wanted);
                    self.state = if left == 0 { State::HeaderRest } else { State::App(left) };
                }
                State::ServerId(wanted) => {
                    let skipped = prefix_len(wanted, chunk);
                    chunk = &chunk[skipped..];
                    let left = self.consume(skipped, wanted);
                    self.state = if left == 0 { State::ServerHostLength } else { State::ServerId(left) };
                }
                State::ServerHost(wanted) => {
                    let skipped = prefix_len(wanted, chunk);
                    chunk = &chunk[skipped..];
                    let left = self.consume(skipped, wanted);
                    self.state = if left == 0 { State::Ports } else { State::ServerHost(left) };
                }
                State::Start => self.fixed::<START_BYTES, S>(&mut chunk, sink, Self::on_start)?,
                State::HeaderRest => self.fixed::<HEADER_REST_BYTES, S>(&mut chunk, sink, Self::on_header)?,
                State::Partition => self.fixed::<PARTITION_BYTES, S>(&mut chunk, sink, Self::on_partition)?,
                State::BlockHead => self.fixed::<BLOCK_HEAD_BYTES, S>(&mut chunk, sink, Self::on_block)?,
                State::ServerCount => {
                    self.fixed::<SERVER_COUNT_BYTES, S>(&mut chunk, sink, Self::on_servers)?
                }
                State::ServerIdLength => self.fixed::<4, S>(&mut chunk, sink, Self::on_server_id)?,
                State::ServerHostLength => self.fixed::<4, S>(&mut chunk, sink, Self::on_server_host)?,
                State::Ports => self.fixed::<PORTS_BYTES, S>(&mut chunk, sink, Self::on_ports)?,
                State::BlockTail => {
                    self.fixed::<BLOCK_TAIL_BYTES, S>(&mut chunk, sink, Self::on_block_tail)?
                }
                State::Timestamp => self.fixed::<TIMESTAMP_BYTES, S>(&mut chunk, sink, Self::on_timestamp)?,
                State::Done => return Err(self.malformed("unexpected bytes after the last field").into()),
            }
        }
        if self.remaining > 0 {
            return Ok(false);
        }
        if self.state == State::Done { Ok(true) } else { Err(DecodeError::Incomplete.into()) }
    }

    /// Passes a group of `N` bytes to `on` once it is complete. A group that is completely in the
    /// chunk is not copied.
    #[inline]
    fn fixed<const N: usize, S: BlockSink>(
        &mut self,
        chunk: &mut &[u8],
        sink: &mut S,
        on: impl FnOnce(&mut Self, &[u8; N], &mut S) -> Result<(), S::Error>,
    ) -> Result<(), S::Error> {
        if self.stashed == 0
            && let Some((group, rest)) = chunk.split_first_chunk::<N>()
        {
            *chunk = rest;
            self.remaining -= N as u64;
            return on(self, group, sink);
        }
        let taken = chunk.len().min(N - self.stashed);
        let (bytes, rest) = chunk.split_at(taken);
        self.stash[self.stashed..self.stashed + taken].copy_from_slice(bytes);
        self.stashed += taken;
        self.remaining -= taken as u64;
        *chunk = rest;
        if self.stashed < N {
            return Ok(());
        }
        self.stashed = 0;
        let mut group = [0; N];
        group.copy_from_slice(&self.stash[..N]);
        on(self, &group, sink)
    }

    /// Counts `taken` bytes as fed. Returns how many of the `wanted` bytes are left.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "`prefix_len` gave at most `wanted`, a u32")]
    fn consume(&mut self, taken: usize, wanted: u32) -> u32 {
        self.remaining -= taken as u64;
        wanted - taken as u32
    }

    fn malformed(&self, what: &'static str) -> DecodeError {
        DecodeError::Malformed { what, at: self.message_bytes - self.remaining }
    }

    /// Checks a count of entries of at least `entry_bytes` bytes each. At least `trailing_min`
    /// bytes must follow the entries.
    fn count(
        &self,
        what: &'static str,
        raw: i32,
        entry_bytes: u64,
        trailing_min: u64,
    ) -> Result<u32, DecodeError> {
        let count = u32::try_from(raw).map_err(|_| self.malformed("a count is negative"))?;
        let max = self.remaining.saturating_sub(trailing_min) / entry_bytes;
        if u64::from(count) > max {
            return Err(DecodeError::TooLarge { what, len: u64::from(count), max });
        }
        Ok(count)
    }

    /// Checks a length in bytes. At least `trailing_min` bytes must follow them.
    fn length(&self, what: &'static str, length: u32, trailing_min: u64) -> Result<u32, DecodeError> {
        let max = self.remaining.saturating_sub(trailing_min);
        if u64::from(length) > max {
            return Err(DecodeError::TooLarge { what, len: u64::from(length), max });
        }
        Ok(length)
    }

    /// Returns the least number of bytes after the current block's servers.
    fn min_after_servers(&self) -> u64 {
        BLOCK_TAIL_BYTES as u64 + u64::from(self.remaining_blocks) * BLOCK_BYTES_MIN + self.min_after_blocks()
    }

    /// Returns the least number of bytes after the current partition.
    fn min_after_blocks(&self) -> u64 {
        u64::from(self.remaining_partitions) * PARTITION_BYTES as u64 + TIMESTAMP_BYTES as u64
    }

    fn on_start<S: BlockSink>(&mut self, group: &[u8; START_BYTES], _: &mut S) -> Result<(), S::Error> {
        let mut group = IntegerGroup(group);
        self.request_id = Some(group.i64());
        let raw = group.i32();
        let length = u32::try_from(raw).map_err(|_| self.malformed("appId is null"))?;
        let trailing_min = (HEADER_REST_BYTES + TIMESTAMP_BYTES) as u64;
        let max = self.remaining.saturating_sub(trailing_min).min(u64::from(APP_BYTES_MAX));
        if u64::from(length) > max {
            return Err(DecodeError::TooLarge { what: "appId", len: u64::from(length), max }.into());
        }
        self.state = if length == 0 { State::HeaderRest } else { State::App(length) };
        Ok(())
    }

    fn on_header<S: BlockSink>(
        &mut self,
        group: &[u8; HEADER_REST_BYTES],
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let mut group = IntegerGroup(group);
        let (shuffle, ticket, partitions) = (group.i32(), group.i64(), group.i32());
        let app = std::str::from_utf8(&self.app).map_err(|_| self.malformed("appId is not UTF-8"))?;
        self.remaining_partitions =
            self.count("partition count", partitions, PARTITION_BYTES as u64, TIMESTAMP_BYTES as u64)?;
        self.shuffle = shuffle;
        sink.header(SendHeader { app, shuffle, ticket })?;
        self.next_partition();
        Ok(())
    }

    fn next_partition(&mut self) {
        self.state = if self.remaining_partitions == 0 { State::Timestamp } else { State::Partition };
    }

    fn on_partition<S: BlockSink>(
        &mut self,
        group: &[u8; PARTITION_BYTES],
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let mut group = IntegerGroup(group);
        self.partition = group.i32();
        self.remaining_partitions -= 1;
        self.remaining_blocks =
            self.count("block count", group.i32(), BLOCK_BYTES_MIN, self.min_after_blocks())?;
        sink.partition(self.partition)?;
        self.next_block();
        Ok(())
    }

    fn next_block(&mut self) {
        if self.remaining_blocks == 0 {
            self.next_partition();
        } else {
            self.state = State::BlockHead;
        }
    }

    fn on_block<S: BlockSink>(
        &mut self,
        group: &[u8; BLOCK_HEAD_BYTES],
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let mut group = IntegerGroup(group);
        let partition = group.i32();
        let block_id = group.i64();
        let length = group.i32();
        let shuffle = group.i32();
        let crc = group.i64();
        let task_attempt_id = group.i64();
        let data_length = group.i32();
        self.remaining_blocks -= 1;
        if partition != self.partition {
            return Err(self.malformed("a block's partition differs from its list").into());
        }
        if shuffle != self.shuffle {
            return Err(self.malformed("a block's shuffle differs from its request").into());
        }
        if length != data_length {
            return Err(self.malformed("a block's length differs from its data").into());
        }
        let length =
            u32::try_from(data_length).map_err(|_| self.malformed("a block's length is negative"))?;
        let trailing_min = SERVER_COUNT_BYTES as u64 + self.min_after_servers();
        let length = self.length("block length", length, trailing_min)?;
        self.block =
            BlockHeader { block_id, length: data_length, uncompressed_length: 0, crc, task_attempt_id };
        sink.begin_block(length)?;
        self.state = if length == 0 { State::ServerCount } else { State::BlockData(length) };
        Ok(())
    }

    fn on_servers<S: BlockSink>(
        &mut self,
        group: &[u8; SERVER_COUNT_BYTES],
        _: &mut S,
    ) -> Result<(), S::Error> {
        let raw = i32::from_be_bytes(*group);
        self.remaining_servers =
            self.count("server count", raw, SERVER_BYTES_MIN, self.min_after_servers())?;
        self.next_server();
        Ok(())
    }

    fn next_server(&mut self) {
        self.state = if self.remaining_servers == 0 { State::BlockTail } else { State::ServerIdLength };
    }

    /// Checks the length of a server's string, after which `bytes_after` bytes of the same server
    /// must follow. A null string has a negative length, which counts as 0.
    fn server_string(&self, group: [u8; 4], bytes_after: u64) -> Result<u32, DecodeError> {
        let length = u32::try_from(i32::from_be_bytes(group)).unwrap_or(0);
        let more_servers = u64::from(self.remaining_servers) * SERVER_BYTES_MIN;
        self.length("server name length", length, bytes_after + more_servers + self.min_after_servers())
    }

    fn on_server_id<S: BlockSink>(&mut self, group: &[u8; 4], _: &mut S) -> Result<(), S::Error> {
        self.remaining_servers -= 1;
        let length = self.server_string(*group, 4 + PORTS_BYTES as u64)?;
        self.state = if length == 0 { State::ServerHostLength } else { State::ServerId(length) };
        Ok(())
    }

    fn on_server_host<S: BlockSink>(&mut self, group: &[u8; 4], _: &mut S) -> Result<(), S::Error> {
        let length = self.server_string(*group, PORTS_BYTES as u64)?;
        self.state = if length == 0 { State::Ports } else { State::ServerHost(length) };
        Ok(())
    }

    fn on_ports<S: BlockSink>(&mut self, _: &[u8; PORTS_BYTES], _: &mut S) -> Result<(), S::Error> {
        self.next_server();
        Ok(())
    }

    fn on_block_tail<S: BlockSink>(
        &mut self,
        group: &[u8; BLOCK_TAIL_BYTES],
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.block.uncompressed_length = IntegerGroup(group).i32();
        sink.end_block(self.block)?;
        self.next_block();
        Ok(())
    }

    fn on_timestamp<S: BlockSink>(
        &mut self,
        group: &[u8; TIMESTAMP_BYTES],
        _: &mut S,
    ) -> Result<(), S::Error> {
        self.timestamp_ms = i64::from_be_bytes(*group);
        self.state = State::Done;
        if self.remaining > 0 {
            return Err(self.malformed("unexpected bytes after the last field").into());
        }
        Ok(())
    }
}

/// Returns how many bytes of `chunk` belong to a run of `wanted` bytes.
#[inline]
fn prefix_len(wanted: u32, chunk: &[u8]) -> usize {
    usize::try_from(wanted).unwrap_or(usize::MAX).min(chunk.len())
}

/// Reads integers from a group of fixed size. Reading past the end returns zeros.
struct IntegerGroup<'a>(&'a [u8]);

impl IntegerGroup<'_> {
    #[inline]
    fn i32(&mut self) -> i32 {
        i32::from_be_bytes(self.array())
    }

    #[inline]
    fn i64(&mut self) -> i64 {
        i64::from_be_bytes(self.array())
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let Some((first, rest)) = self.0.split_first_chunk::<N>() else {
            debug_assert!(false, "the length of a group is the sum of its fields");
            return [0; N];
        };
        self.0 = rest;
        *first
    }
}
