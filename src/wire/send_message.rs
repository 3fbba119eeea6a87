//! Streaming decoder of `SendShuffleDataRequest` (PROTOCOL §1.5, §1.8), fed with whatever pieces the socket gives.
//!
//! Not here: gRPC's 5-byte prefix, tickets, memory. The decoder holds no payload: a block's bytes go to the
//! [`SendSink`] as sub-slices of the fed chunk, once its length is known. Only block *headers* are ever collected,
//! and only in the two forms that send them ahead of the bytes.
//!
//! Three forms are told apart while streaming:
//!
//! | form | field 4 | field 7 |
//! | --- | --- | --- |
//! | classic (all stock clients) | blocks with data | absent or empty |
//! | contiguous | blocks with lengths only | the bytes, Σ lengths = its length |
//! | combined (riffle) | absent | a message: arrays, then the bytes |
//!
//! Invariant: the sink sees `header (partition (begin_block write* end_block)+)*`, and between `begin_block(n)` and
//! its `end_block` exactly n bytes. Every length is checked against its parent before anything is done for it.
//!
//! Stricter than protobuf on purpose, because nothing can be taken back once streamed: header fields stand before the
//! data, a partition id before its blocks, and no field of a block repeats its data. Java and prost write that way.

mod collected;
#[cfg(test)]
mod tests;
mod varint;

use crate::types::BLOCK_BYTES_MAX;
use crate::wire::DecodeError;
use collected::{Collected, Refusal};
use varint::Varint;

/// Longest application id carried on to the service, which has its own, tighter bound and its own text.
const APP_ID_BYTES_MAX: u64 = 1024;

/// Bounds of one message.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Blocks in one message. A block of the classic form costs the decoder nothing; the bound is against floods.
    pub blocks_max: u64,
    /// Block headers (40 B each) and partitions (8 B) collected before the bytes come, in the forms that need it.
    pub collected_max: usize,
}

impl Default for Limits {
    /// 4 Mi blocks; 256 Ki collected (10 MiB; a 14 MiB message of 56-byte blocks fits).
    fn default() -> Self {
        Self { blocks_max: 4 << 20, collected_max: 256 << 10 }
    }
}

/// Fields 1 to 3: whose data it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header<'a> {
    /// The application, not validated.
    pub app_id: &'a str,
    /// The shuffle.
    pub shuffle_id: i32,
    /// The ticket of `requireBuffer`.
    pub ticket: i64,
}

/// A block's fields besides its bytes, as the peer wrote them. Absent fields are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockHeader {
    /// Field 1.
    pub block_id: i64,
    /// Field 2; equals the number of bytes handed to the sink when [`SendSink::end_block`] sees it.
    pub length: i32,
    /// Field 3.
    pub uncompressed_length: i32,
    /// Field 4.
    pub crc: i64,
    /// Field 6.
    pub task_attempt_id: i64,
}

/// What a complete message carried, with the fields that stand after the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Blocks handed to the sink. Zero is for the caller to refuse ("No data in request").
    pub blocks: u64,
    /// Payload bytes handed to the sink.
    pub payload_bytes: u64,
    /// Field 5, milliseconds; 0 = unset.
    pub timestamp_ms: i64,
    /// Field 6.
    pub stage_attempt: i32,
}

/// Where decoded blocks go. An error ends the decoding at once.
pub trait SendSink {
    /// The sink's error; decoding errors are turned into it.
    type Error: From<DecodeError>;
    /// Called once, before everything else.
    fn header(&mut self, header: Header<'_>) -> Result<(), Self::Error>;
    /// The partition of the blocks that follow. May repeat an earlier one.
    fn partition(&mut self, partition_id: i32) -> Result<(), Self::Error>;
    /// A block of `length` ≥ 1 bytes begins.
    fn begin_block(&mut self, length: u32) -> Result<(), Self::Error>;
    /// The next bytes of the block.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
    /// All bytes of the block were written; `block.length` is their number.
    fn end_block(&mut self, block: BlockHeader) -> Result<(), Self::Error>;
}

/// The message a position is in. Depth = index into [`Decoder::ends`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// `SendShuffleDataRequest`
    Root,
    /// `ShuffleData` (field 4 of the root)
    Data,
    /// `ShuffleBlock` (field 2 of `ShuffleData`)
    Block,
    /// `CombinedShuffleData` (field 7 of the root)
    Combined,
    /// A packed array of `CombinedShuffleData`
    Packed,
}

impl Level {
    fn depth(self) -> usize {
        match self {
            Self::Root => 0,
            Self::Data | Self::Combined => 1,
            Self::Block | Self::Packed => 2,
        }
    }

    /// Wire types field `field` may have; `None` = unknown field, to be skipped.
    fn expects(self, field: u32) -> Option<&'static [u32]> {
        match (self, field) {
            (Self::Root, 1 | 4 | 7) | (Self::Data, 2) | (Self::Block, 5) | (Self::Combined, 8) => {
                Some(&[BYTES])
            }
            (Self::Root, 2 | 3 | 5 | 6) | (Self::Data, 1) | (Self::Block, 1..=4 | 6) => Some(&[VARINT]),
            (Self::Combined, 1..=7) => Some(&[VARINT, BYTES]),
            _ => None,
        }
    }
}

const VARINT: u32 = 0;
const FIXED64: u32 = 1;
const BYTES: u32 = 2;
const FIXED32: u32 = 5;

/// What the next byte belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// A field's key.
    Key,
    /// The varint value of a field, or an element of the packed array `field`.
    Value(u32),
    /// The length prefix of a field.
    Length(u32),
    /// Bytes of an unknown field.
    Skip(u64),
    /// The application id.
    AppId(u64),
    /// Payload of the current block (classic form).
    BlockBytes(u64),
    /// Payload of the collected blocks (contiguous and combined form).
    CollectedBytes(u64),
}

/// How the message carries its bytes; PROTOCOL §1.8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Undecided,
    Classic,
    Contiguous,
    Combined,
}

/// The decoder of one message. After an error it must not be fed again.
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    position: u64,
    level: Level,
    ends: [u64; 3],
    step: Step,
    varint: Varint,
    form: Form,

    header_delivered: bool,
    app_id: Vec<u8>,
    incoming_app_id: Vec<u8>,
    shuffle_id: i32,
    ticket: i64,
    summary: Summary,
    /// `ShuffleData` entries seen.
    entries: u64,
    /// Non-empty field 7 seen: no data may follow.
    bytes_field_seen: bool,

    partition_id: i32,
    /// Blocks seen in the current `ShuffleData`.
    entry_blocks: u64,
    block: BlockHeader,
    /// Length of the current block's field 5.
    block_data: Option<u32>,
    collected: Collected,
}

impl Decoder {
    /// A decoder for one message of exactly `message_bytes` bytes (the gRPC prefix says how many; the caller has
    /// checked it against its own maximum).
    #[must_use]
    pub fn new(message_bytes: u64, limits: Limits) -> Self {
        Self {
            limits,
            position: 0,
            level: Level::Root,
            ends: [message_bytes, 0, 0],
            step: Step::Key,
            varint: Varint::default(),
            form: Form::Undecided,
            header_delivered: false,
            app_id: Vec::new(),
            incoming_app_id: Vec::new(),
            shuffle_id: 0,
            ticket: 0,
            summary: Summary::default(),
            entries: 0,
            bytes_field_seen: false,
            partition_id: 0,
            entry_blocks: 0,
            block: BlockHeader::default(),
            block_data: None,
            collected: Collected::default(),
        }
    }

    /// Bytes of the message that have not been fed.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.ends[0] - self.position
    }

    /// Decodes the next bytes of the message, cut anywhere.
    ///
    /// # Errors
    /// [`DecodeError`] as the sink's error, or the sink's own.
    pub fn feed<S: SendSink>(&mut self, chunk: &[u8], sink: &mut S) -> Result<(), S::Error> {
        let mut rest = chunk;
        while !rest.is_empty() {
            let room = self.ends[self.level.depth()] - self.position;
            if room == 0 {
                return Err(self.malformed("bytes follow the message").into());
            }
            let window = &rest[..usize::try_from(room).map_or(rest.len(), |room| room.min(rest.len()))];
            let taken = self.take(window, sink)?;
            rest = &rest[taken..];
            self.close_ended_levels(sink)?;
        }
        Ok(())
    }

    /// Ends the message; the sink has seen its header even when there was no data.
    ///
    /// # Errors
    /// `Incomplete` when bytes are missing, `Malformed` when collected blocks got no bytes.
    pub fn finish<S: SendSink>(mut self, sink: &mut S) -> Result<Summary, S::Error> {
        if self.remaining() > 0 {
            return Err(DecodeError::Incomplete.into());
        }
        // A message of zero bytes never came through `feed`; any other was closed by it.
        self.deliver_header(sink)?;
        if self.form == Form::Contiguous && !self.bytes_field_seen {
            return Err(self.malformed("blocks declare bytes that are not in the message").into());
        }
        Ok(self.summary)
    }

    /// Consumes at least one byte of `window`, which is not empty and ends at the innermost message's end at most.
    fn take<S: SendSink>(&mut self, window: &[u8], sink: &mut S) -> Result<usize, S::Error> {
        match self.step {
            Step::Key | Step::Value(_) | Step::Length(_) => {
                let (taken, value) = self.varint.push(window).map_err(|what| self.malformed(what))?;
                self.advance(taken);
                if let Some(value) = value {
                    self.varint_done(value, sink)?;
                }
                Ok(taken)
            }
            Step::Skip(left) => Ok(self.run(left, window, Step::Skip).len()),
            Step::AppId(left) => {
                let piece = self.run(left, window, Step::AppId);
                self.incoming_app_id.extend_from_slice(piece);
                if self.step == Step::Key {
                    self.app_id_done()?;
                }
                Ok(piece.len())
            }
            Step::BlockBytes(left) => {
                let piece = self.run(left, window, Step::BlockBytes);
                sink.write(piece)?;
                Ok(piece.len())
            }
            Step::CollectedBytes(left) => {
                let piece = self.run(left, window, Step::CollectedBytes);
                self.collected.stream(piece, sink)?;
                Ok(piece.len())
            }
        }
    }

    /// The part of `window` that belongs to a run of `left` bytes; moves on to the next step.
    fn run<'w>(&mut self, left: u64, window: &'w [u8], step: fn(u64) -> Step) -> &'w [u8] {
        let piece = &window[..usize::try_from(left).map_or(window.len(), |left| left.min(window.len()))];
        self.advance(piece.len());
        self.enter(left - piece.len() as u64, step);
        piece
    }

    fn advance(&mut self, taken: usize) {
        self.position += taken as u64;
    }

    /// Expects `left` bytes of `step`, or the next key when there are none.
    fn enter(&mut self, left: u64, step: fn(u64) -> Step) {
        self.step = if left == 0 { Step::Key } else { step(left) };
    }

    fn push_level(&mut self, level: Level, length: u64) {
        self.level = level;
        self.ends[level.depth()] = self.position + length;
        self.step = Step::Key;
    }

    fn varint_done<S: SendSink>(&mut self, value: u64, sink: &mut S) -> Result<(), S::Error> {
        match self.step {
            Step::Key => Ok(self.key(value)?),
            Step::Value(field) => Ok(self.value(field, value)?),
            Step::Length(field) => {
                if value > self.ends[self.level.depth()] - self.position {
                    return Err(self.malformed("a field is longer than its message").into());
                }
                self.length(field, value, sink)
            }
            Step::Skip(_) | Step::AppId(_) | Step::BlockBytes(_) | Step::CollectedBytes(_) => Ok(()),
        }
    }

    fn key(&mut self, key: u64) -> Result<(), DecodeError> {
        let Ok(key) = u32::try_from(key) else {
            return Err(self.malformed("a field number is out of range"));
        };
        let (field, wire_type) = (key >> 3, key & 7);
        if field == 0 {
            return Err(self.malformed("field number 0"));
        }
        if self.level.expects(field).is_some_and(|types| !types.contains(&wire_type)) {
            return Err(self.malformed("a known field has another type"));
        }
        let room = self.ends[self.level.depth()] - self.position;
        match wire_type {
            VARINT => self.step = Step::Value(field),
            BYTES => self.step = Step::Length(field),
            FIXED64 if room >= 8 => self.step = Step::Skip(8),
            FIXED32 if room >= 4 => self.step = Step::Skip(4),
            FIXED64 | FIXED32 => return Err(self.malformed("a field is longer than its message")),
            _ => return Err(self.malformed("groups are not part of this protocol")),
        }
        Ok(())
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "protobuf: int32 is the low 32 bits of its varint, int64 its two's complement"
    )]
    fn value(&mut self, field: u32, value: u64) -> Result<(), DecodeError> {
        let (int32, int64) = (value as i32, value as i64);
        if self.level == Level::Packed {
            // Stays in `Value(field)`: the next element follows without a key.
            return self.array_element(field, int32, int64);
        }
        self.step = Step::Key;
        match (self.level, field) {
            (Level::Root, 2) => {
                self.require_early(int32 == self.shuffle_id)?;
                self.shuffle_id = int32;
            }
            (Level::Root, 3) => {
                self.require_early(int64 == self.ticket)?;
                self.ticket = int64;
            }
            (Level::Root, 5) => self.summary.timestamp_ms = int64,
            (Level::Root, 6) => self.summary.stage_attempt = int32,
            (Level::Data, 1) => {
                if self.entry_blocks > 0 && int32 != self.partition_id {
                    return Err(self.malformed("a partition id stands after its blocks"));
                }
                self.partition_id = int32;
            }
            (Level::Block, 1) => self.block.block_id = int64,
            (Level::Block, 2) => self.block.length = int32,
            (Level::Block, 3) => self.block.uncompressed_length = int32,
            (Level::Block, 4) => self.block.crc = int64,
            (Level::Block, 6) => self.block.task_attempt_id = int64,
            (Level::Combined, 1..=7) => self.array_element(field, int32, int64)?,
            _ => {} // unknown field
        }
        Ok(())
    }

    fn length<S: SendSink>(&mut self, field: u32, length: u64, sink: &mut S) -> Result<(), S::Error> {
        match (self.level, field) {
            (Level::Root, 1) => {
                if length > APP_ID_BYTES_MAX {
                    return Err(
                        DecodeError::TooLarge { what: "appId", len: length, max: APP_ID_BYTES_MAX }.into()
                    );
                }
                self.incoming_app_id.clear();
                self.enter(length, Step::AppId);
                if length == 0 {
                    self.app_id_done()?;
                }
            }
            (Level::Root, 4) => {
                if self.bytes_field_seen {
                    return Err(self.malformed("field 4 stands after field 7").into());
                }
                self.deliver_header(sink)?;
                self.entries += 1;
                self.partition_id = 0;
                self.entry_blocks = 0;
                self.push_level(Level::Data, length);
            }
            (Level::Root, 7) => self.begin_bytes_field(length, sink)?,
            (Level::Data, 2) => {
                self.block = BlockHeader::default();
                self.block_data = None;
                self.push_level(Level::Block, length);
            }
            (Level::Block, 5) => self.begin_block_data(length, sink)?,
            (Level::Combined, 8) => {
                if length > 0 {
                    self.begin_collected(length)?;
                    self.enter(length, Step::CollectedBytes);
                } else {
                    self.step = Step::Key;
                }
            }
            (Level::Combined, 1..=7) => {
                self.push_level(Level::Packed, length);
                self.step = Step::Value(field);
            }
            _ => self.enter(length, Step::Skip),
        }
        Ok(())
    }

    /// Leaves every message that ends at the current position.
    fn close_ended_levels<S: SendSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
        while self.position == self.ends[self.level.depth()] {
            let between_fields = match self.step {
                Step::Key => self.varint.is_empty(),
                Step::Value(_) => self.level == Level::Packed && self.varint.is_empty(),
                Step::Length(_)
                | Step::Skip(_)
                | Step::AppId(_)
                | Step::BlockBytes(_)
                | Step::CollectedBytes(_) => false,
            };
            if !between_fields {
                return Err(self.malformed("a message ends inside a field").into());
            }
            match self.level {
                Level::Root => return Ok(()),
                Level::Data => self.level = Level::Root,
                Level::Block => {
                    self.end_block(sink)?;
                    self.level = Level::Data;
                }
                Level::Combined => {
                    if !self.collected.is_streamed() {
                        return Err(self.malformed("combined arrays without their bytes").into());
                    }
                    self.level = Level::Root;
                }
                Level::Packed => self.level = Level::Combined,
            }
            self.step = Step::Key;
        }
        Ok(())
    }

    fn app_id_done(&mut self) -> Result<(), DecodeError> {
        self.require_early(self.incoming_app_id == self.app_id)?;
        std::mem::swap(&mut self.app_id, &mut self.incoming_app_id);
        Ok(())
    }

    /// Header fields may follow the data only when they say nothing new.
    fn require_early(&self, unchanged: bool) -> Result<(), DecodeError> {
        if self.header_delivered && !unchanged {
            return Err(self.malformed("a header field stands after the data"));
        }
        Ok(())
    }

    fn deliver_header<S: SendSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
        if self.header_delivered {
            return Ok(());
        }
        let Ok(app_id) = std::str::from_utf8(&self.app_id) else {
            return Err(self.malformed("appId is not UTF-8").into());
        };
        sink.header(Header { app_id, shuffle_id: self.shuffle_id, ticket: self.ticket })?;
        self.header_delivered = true;
        Ok(())
    }

    fn begin_block_data<S: SendSink>(&mut self, length: u64, sink: &mut S) -> Result<(), S::Error> {
        if self.block_data.is_some() {
            return Err(self.malformed("a block has its data twice").into());
        }
        if length == 0 {
            self.step = Step::Key; // proto3: empty is absent
            return Ok(());
        }
        if self.form == Form::Contiguous {
            return Err(self.malformed("a block with data after one without").into());
        }
        let Some(bytes) = block_length(length) else {
            return Err(block_too_large(length).into());
        };
        self.form = Form::Classic;
        self.block_data = Some(bytes);
        self.count_blocks(1)?;
        if self.entry_blocks == 0 {
            sink.partition(self.partition_id)?;
        }
        self.entry_blocks += 1;
        sink.begin_block(bytes)?;
        self.summary.payload_bytes += length;
        self.step = Step::BlockBytes(length);
        Ok(())
    }

    fn end_block<S: SendSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
        if let Some(bytes) = self.block_data {
            if u32::try_from(self.block.length) != Ok(bytes) {
                return Err(self.malformed("a block's length differs from its data").into());
            }
            return sink.end_block(self.block);
        }
        let Some(length) = u32::try_from(self.block.length).ok().filter(|length| *length > 0) else {
            return Err(self.malformed("a block without bytes").into());
        };
        if length > BLOCK_BYTES_MAX {
            return Err(block_too_large(u64::from(length)).into());
        }
        if self.form == Form::Classic {
            return Err(self.malformed("a block's length differs from its data").into());
        }
        self.form = Form::Contiguous;
        let max = self.limits.collected_max;
        if self.entry_blocks == 0 {
            self.collected.push_partition(self.partition_id, max).map_err(|refusal| self.located(refusal))?;
        }
        self.entry_blocks += 1;
        self.collected.push_block(self.block, max).map_err(|refusal| self.located(refusal))?;
        if self.collected.payload_bytes() > self.remaining() {
            return Err(self.malformed("blocks declare more bytes than the message has").into());
        }
        Ok(())
    }

    fn begin_bytes_field<S: SendSink>(&mut self, length: u64, sink: &mut S) -> Result<(), S::Error> {
        if length == 0 {
            self.step = Step::Key;
            return Ok(());
        }
        if self.bytes_field_seen || self.form == Form::Classic {
            return Err(self.malformed("the data is there twice").into());
        }
        self.bytes_field_seen = true;
        self.deliver_header(sink)?;
        if self.form == Form::Contiguous {
            self.begin_collected(length)?;
            self.enter(length, Step::CollectedBytes);
        } else if self.entries > 0 {
            return Err(self.malformed("field 7 with empty entries in field 4").into());
        } else {
            self.form = Form::Combined;
            self.push_level(Level::Combined, length);
        }
        Ok(())
    }

    /// All headers are here and `length` bytes of payload follow: check them as a whole before the first is taken.
    fn begin_collected(&mut self, length: u64) -> Result<(), DecodeError> {
        if self.collected.is_streamed() {
            return Err(self.malformed("the data is there twice"));
        }
        self.collected.seal(length).map_err(|refusal| self.located(refusal))?;
        self.count_blocks(self.collected.block_count())?;
        self.summary.payload_bytes += length;
        Ok(())
    }

    fn array_element(&mut self, field: u32, int32: i32, int64: i64) -> Result<(), DecodeError> {
        if self.collected.is_streamed() {
            return Err(self.malformed("a combined array stands after the bytes"));
        }
        let max = self.limits.collected_max;
        let taken = match field {
            1 => self.collected.array_partition_id(int32, max),
            2 => self.collected.array_block_count(int32, max),
            _ => self.collected.array_block_field(field, int32, int64, max),
        };
        taken.map_err(|refusal| self.located(refusal))
    }

    fn count_blocks(&mut self, more: u64) -> Result<(), DecodeError> {
        self.summary.blocks += more;
        if self.summary.blocks > self.limits.blocks_max {
            return Err(DecodeError::TooLarge {
                what: "number of blocks",
                len: self.summary.blocks,
                max: self.limits.blocks_max,
            });
        }
        Ok(())
    }

    fn malformed(&self, what: &'static str) -> DecodeError {
        DecodeError::Malformed { what, at: self.position }
    }

    fn located(&self, refusal: Refusal) -> DecodeError {
        match refusal {
            Refusal::Malformed(what) => self.malformed(what),
            Refusal::TooLarge(too_large) => too_large,
        }
    }
}

fn block_length(length: u64) -> Option<u32> {
    u32::try_from(length).ok().filter(|length| *length <= BLOCK_BYTES_MAX)
}

fn block_too_large(length: u64) -> DecodeError {
    DecodeError::TooLarge { what: "block length", len: length, max: u64::from(BLOCK_BYTES_MAX) }
}
