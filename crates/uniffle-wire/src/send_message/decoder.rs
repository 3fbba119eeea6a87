//! The push-style decoder: position and nesting first, then the effect of each field.
//!
//! [`BlockSink`] documents the order of the calls to a sink. Headers that precede their bytes are
//! in `collected`. A message is refused unless header fields precede the data, a partition id
//! precedes its blocks, and each block has its data once. Invariant: `take` only receives bytes
//! that lie inside the innermost message.

use super::collected::{CollectedBlocks, HeaderRefusal};
use super::grammar::{
    BYTES, DecodeStep, FIXED32, FIXED64, MessageLevel, VARINT, Varint, block_length, block_too_large,
};
use super::{MessageLimits, MessageSummary};
use crate::types::BLOCK_BYTES_MAX;
use crate::{BlockHeader, BlockSink, DecodeError, SendHeader};

/// Longest application id that is accepted. The service checks a tighter limit with its own error
/// text.
const APP_ID_BYTES_MAX: u64 = 1024;

/// Placement of the block data in the message; docs/protocol.md §1.8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Undecided,
    /// Field 4 has blocks with data; field 7 is absent or empty. All stock clients send this form.
    Classic,
    /// Field 4 has blocks with lengths only, and field 7 the bytes of all.
    Contiguous,
    /// Field 7 is a message with arrays, then the bytes; field 4 is absent. Only riffle sends this
    /// form.
    Combined,
}

/// Decoder of one message. After an error it must not be fed again.
#[derive(Debug)]
pub struct Decoder {
    limits: MessageLimits,
    position: u64,
    level: MessageLevel,
    ends: [u64; 3],
    step: DecodeStep,
    varint: Varint,
    form: Form,

    header_delivered: bool,
    app_id: Vec<u8>,
    incoming_app_id: Vec<u8>,
    shuffle_id: i32,
    ticket: i64,
    summary: MessageSummary,
    /// Number of `ShuffleData` entries seen.
    entries: u64,
    /// True after a non-empty field 7, which no data may follow.
    bytes_field_seen: bool,

    partition_id: i32,
    /// Number of blocks seen in the current `ShuffleData`.
    entry_blocks: u64,
    block: BlockHeader,
    /// Length of the current block's field 5.
    block_data: Option<u32>,
    collected: CollectedBlocks,
}

impl Decoder {
    /// Creates a decoder for one message of exactly `message_bytes` bytes. The caller has checked
    /// this length from the gRPC prefix against its own maximum.
    #[must_use]
    pub fn new(message_bytes: u64, limits: MessageLimits) -> Self {
        Self {
            limits,
            position: 0,
            level: MessageLevel::Root,
            ends: [message_bytes, 0, 0],
            step: DecodeStep::Key,
            varint: Varint::default(),
            form: Form::Undecided,
            header_delivered: false,
            app_id: Vec::new(),
            incoming_app_id: Vec::new(),
            shuffle_id: 0,
            ticket: 0,
            summary: MessageSummary::default(),
            entries: 0,
            bytes_field_seen: false,
            partition_id: 0,
            entry_blocks: 0,
            block: BlockHeader::default(),
            block_data: None,
            collected: CollectedBlocks::default(),
        }
    }

    /// Returns the number of message bytes that have not been fed.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.ends[0] - self.position
    }

    /// Decodes the next bytes of the message, which may be cut anywhere.
    ///
    /// # Errors
    /// Returns a [`DecodeError`] converted into the sink's error, or the sink's own error.
    pub fn feed<S: BlockSink>(&mut self, chunk: &[u8], sink: &mut S) -> Result<(), S::Error> {
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

    /// Returns the memory that collected block headers and partitions occupy.
    #[must_use]
    pub fn collected_bytes(&self) -> usize {
        self.collected.kept_bytes()
    }

    /// Ends the message. Delivers the header to the sink even if there was no data.
    ///
    /// # Errors
    /// `Incomplete` if bytes are missing, `Malformed` if collected blocks got no bytes or `appId`
    /// is not UTF-8, and any error of the sink.
    pub fn finish<S: BlockSink>(mut self, sink: &mut S) -> Result<MessageSummary, S::Error> {
        if self.remaining() > 0 {
            return Err(DecodeError::Incomplete.into());
        }
        self.deliver_header(sink)?;
        if self.form == Form::Contiguous && !self.bytes_field_seen {
            return Err(self.malformed("blocks declare bytes that are not in the message").into());
        }
        Ok(self.summary)
    }

    /// Consumes at least one byte of `window`. It is not empty and does not exceed the innermost
    /// message.
    fn take<S: BlockSink>(&mut self, window: &[u8], sink: &mut S) -> Result<usize, S::Error> {
        match self.step {
            DecodeStep::Key | DecodeStep::Value(_) | DecodeStep::Length(_) => self.take_varints(window, sink),
            DecodeStep::Skip(left) => Ok(self.run(left, window, DecodeStep::Skip).len()),
            DecodeStep::AppId(left) => {
                let piece = self.run(left, window, DecodeStep::AppId);
                self.incoming_app_id.extend_from_slice(piece);
                if self.step == DecodeStep::Key {
                    self.app_id_done()?;
                }
                Ok(piece.len())
            }
            DecodeStep::BlockBytes(left) => {
                let piece = self.run(left, window, DecodeStep::BlockBytes);
                sink.write(piece)?;
                Ok(piece.len())
            }
            DecodeStep::CollectedBytes(left) => {
                let piece = self.run(left, window, DecodeStep::CollectedBytes);
                self.collected.stream(piece, sink)?;
                Ok(piece.len())
            }
        }
    }

    /// Consumes keys, values and lengths of the same message, such as the fields of a block up to
    /// its data, in one loop.
    fn take_varints<S: BlockSink>(&mut self, window: &[u8], sink: &mut S) -> Result<usize, S::Error> {
        let level = self.level;
        let mut taken = 0;
        while taken < window.len()
            && self.level == level
            && matches!(self.step, DecodeStep::Key | DecodeStep::Value(_) | DecodeStep::Length(_))
        {
            let (length, value) = self.varint.push(&window[taken..]).map_err(|what| self.malformed(what))?;
            taken += length;
            self.advance(length);
            if let Some(value) = value {
                self.varint_done(value, sink)?;
            }
        }
        Ok(taken)
    }

    /// Returns the part of `window` that belongs to a run of `left` bytes, and selects the next
    /// step.
    fn run<'w>(&mut self, left: u64, window: &'w [u8], step: fn(u64) -> DecodeStep) -> &'w [u8] {
        let piece = &window[..usize::try_from(left).map_or(window.len(), |left| left.min(window.len()))];
        self.advance(piece.len());
        self.enter(left - piece.len() as u64, step);
        piece
    }

    fn advance(&mut self, taken: usize) {
        self.position += taken as u64;
    }

    /// Expects `left` bytes of `step`, or the next key if `left` is 0.
    fn enter(&mut self, left: u64, step: fn(u64) -> DecodeStep) {
        self.step = if left == 0 { DecodeStep::Key } else { step(left) };
    }

    fn push_level(&mut self, level: MessageLevel, length: u64) {
        self.level = level;
        self.ends[level.depth()] = self.position + length;
        self.step = DecodeStep::Key;
    }

    fn varint_done<S: BlockSink>(&mut self, value: u64, sink: &mut S) -> Result<(), S::Error> {
        match self.step {
            DecodeStep::Key => Ok(self.key(value)?),
            DecodeStep::Value(field) => Ok(self.value(field, value)?),
            DecodeStep::Length(field) => {
                if value > self.ends[self.level.depth()] - self.position {
                    return Err(self.malformed("a field is longer than its message").into());
                }
                self.length(field, value, sink)
            }
            DecodeStep::Skip(_)
            | DecodeStep::AppId(_)
            | DecodeStep::BlockBytes(_)
            | DecodeStep::CollectedBytes(_) => Ok(()),
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
            VARINT => self.step = DecodeStep::Value(field),
            BYTES => self.step = DecodeStep::Length(field),
            FIXED64 if room >= 8 => self.step = DecodeStep::Skip(8),
            FIXED32 if room >= 4 => self.step = DecodeStep::Skip(4),
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
        if self.level == MessageLevel::Packed {
            // The step stays `Value(field)`: the next element follows without a key.
            return self.array_element(field, int32, int64);
        }
        self.step = DecodeStep::Key;
        match (self.level, field) {
            (MessageLevel::Root, 2) => {
                self.require_early(int32 == self.shuffle_id)?;
                self.shuffle_id = int32;
            }
            (MessageLevel::Root, 3) => {
                self.require_early(int64 == self.ticket)?;
                self.ticket = int64;
            }
            (MessageLevel::Root, 5) => self.summary.timestamp_ms = int64,
            (MessageLevel::Data, 1) => {
                if self.entry_blocks > 0 && int32 != self.partition_id {
                    return Err(self.malformed("a partition id follows its blocks"));
                }
                self.partition_id = int32;
            }
            (MessageLevel::Block, 1) => self.block.block_id = int64,
            (MessageLevel::Block, 2) => self.block.length = int32,
            (MessageLevel::Block, 3) => self.block.uncompressed_length = int32,
            (MessageLevel::Block, 4) => self.block.crc = int64,
            (MessageLevel::Block, 6) => self.block.task_attempt_id = int64,
            (MessageLevel::Combined, 1..=7) => self.array_element(field, int32, int64)?,
            _ => {} // unknown field
        }
        Ok(())
    }

    fn length<S: BlockSink>(&mut self, field: u32, length: u64, sink: &mut S) -> Result<(), S::Error> {
        match (self.level, field) {
            (MessageLevel::Root, 1) => {
                if length > APP_ID_BYTES_MAX {
                    return Err(
                        DecodeError::TooLarge { what: "appId", len: length, max: APP_ID_BYTES_MAX }.into()
                    );
                }
                self.incoming_app_id.clear();
                self.enter(length, DecodeStep::AppId);
                if length == 0 {
                    self.app_id_done()?;
                }
            }
            (MessageLevel::Root, 4) => {
                if self.bytes_field_seen {
                    return Err(self.malformed("field 4 follows field 7").into());
                }
                self.deliver_header(sink)?;
                self.entries += 1;
                self.partition_id = 0;
                self.entry_blocks = 0;
                self.push_level(MessageLevel::Data, length);
            }
            (MessageLevel::Root, 7) => self.begin_bytes_field(length, sink)?,
            (MessageLevel::Data, 2) => {
                self.block = BlockHeader::default();
                self.block_data = None;
                self.push_level(MessageLevel::Block, length);
            }
            (MessageLevel::Block, 5) => self.begin_block_data(length, sink)?,
            (MessageLevel::Combined, 8) => {
                if length > 0 {
                    self.begin_collected(length)?;
                    self.enter(length, DecodeStep::CollectedBytes);
                } else {
                    self.step = DecodeStep::Key;
                }
            }
            (MessageLevel::Combined, 1..=7) => {
                self.push_level(MessageLevel::Packed, length);
                self.step = DecodeStep::Value(field);
            }
            _ => self.enter(length, DecodeStep::Skip),
        }
        Ok(())
    }

    /// Closes every message that ends at the current position.
    fn close_ended_levels<S: BlockSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
        while self.position == self.ends[self.level.depth()] {
            let between_fields = match self.step {
                DecodeStep::Key => self.varint.is_empty(),
                DecodeStep::Value(_) => self.level == MessageLevel::Packed && self.varint.is_empty(),
                DecodeStep::Length(_)
                | DecodeStep::Skip(_)
                | DecodeStep::AppId(_)
                | DecodeStep::BlockBytes(_)
                | DecodeStep::CollectedBytes(_) => false,
            };
            if !between_fields {
                return Err(self.malformed("a message ends inside a field").into());
            }
            match self.level {
                MessageLevel::Root => return Ok(()),
                MessageLevel::Data => self.level = MessageLevel::Root,
                MessageLevel::Block => {
                    self.end_block(sink)?;
                    self.level = MessageLevel::Data;
                }
                MessageLevel::Combined => {
                    if !self.collected.is_streamed() {
                        return Err(self.malformed("combined arrays without their bytes").into());
                    }
                    self.level = MessageLevel::Root;
                }
                MessageLevel::Packed => self.level = MessageLevel::Combined,
            }
            self.step = DecodeStep::Key;
        }
        Ok(())
    }

    fn app_id_done(&mut self) -> Result<(), DecodeError> {
        self.require_early(self.incoming_app_id == self.app_id)?;
        std::mem::swap(&mut self.app_id, &mut self.incoming_app_id);
        Ok(())
    }

    /// Accepts header fields after the data only if they repeat the known value.
    fn require_early(&self, unchanged: bool) -> Result<(), DecodeError> {
        if self.header_delivered && !unchanged {
            return Err(self.malformed("a header field follows the data"));
        }
        Ok(())
    }

    fn deliver_header<S: BlockSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
        if self.header_delivered {
            return Ok(());
        }
        let Ok(app) = std::str::from_utf8(&self.app_id) else {
            return Err(self.malformed("appId is not UTF-8").into());
        };
        sink.header(SendHeader { app, shuffle: self.shuffle_id, ticket: self.ticket })?;
        self.header_delivered = true;
        Ok(())
    }

    fn begin_block_data<S: BlockSink>(&mut self, length: u64, sink: &mut S) -> Result<(), S::Error> {
        if self.block_data.is_some() {
            return Err(self.malformed("a block has its data twice").into());
        }
        if length == 0 {
            self.step = DecodeStep::Key; // proto3: empty is absent
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
        self.step = DecodeStep::BlockBytes(length);
        Ok(())
    }

    fn end_block<S: BlockSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
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

    fn begin_bytes_field<S: BlockSink>(&mut self, length: u64, sink: &mut S) -> Result<(), S::Error> {
        if length == 0 {
            self.step = DecodeStep::Key;
            return Ok(());
        }
        if self.bytes_field_seen || self.form == Form::Classic {
            return Err(self.malformed("the data appears twice").into());
        }
        self.bytes_field_seen = true;
        self.deliver_header(sink)?;
        if self.form == Form::Contiguous {
            self.begin_collected(length)?;
            self.enter(length, DecodeStep::CollectedBytes);
        } else if self.entries > 0 {
            return Err(self.malformed("field 7 with empty entries in field 4").into());
        } else {
            self.form = Form::Combined;
            self.push_level(MessageLevel::Combined, length);
        }
        Ok(())
    }

    /// Checks all collected headers against the `length` payload bytes that follow, before the
    /// first byte is consumed.
    fn begin_collected(&mut self, length: u64) -> Result<(), DecodeError> {
        if self.collected.is_streamed() {
            return Err(self.malformed("the data appears twice"));
        }
        self.collected.seal(length).map_err(|refusal| self.located(refusal))?;
        self.count_blocks(self.collected.block_count())?;
        self.summary.payload_bytes += length;
        Ok(())
    }

    fn array_element(&mut self, field: u32, int32: i32, int64: i64) -> Result<(), DecodeError> {
        if self.collected.is_streamed() {
            return Err(self.malformed("a combined array follows the bytes"));
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

    fn located(&self, refusal: HeaderRefusal) -> DecodeError {
        match refusal {
            HeaderRefusal::Malformed(what) => self.malformed(what),
            HeaderRefusal::TooLarge(too_large) => too_large,
        }
    }
}
