//! Golden tests: frames made by Java's client jars (docs/protocol.md §7.6), and two by hand, decode
//! and re-encode byte-equal.
//!
//! Truncated frames never complete. Mutated frames are refused, decoded or incomplete. None causes
//! a panic or passes the sink more bytes than a block has.

use bytes::{BufMut, Bytes, BytesMut};
use proptest::prelude::*;

use super::frame::{FRAME_BYTES_LIMIT, FrameHeader, FrameType, HEADER_BYTES};
use super::reply::{Reply, ReplyAnswer, ReplyFields, ReplyPrefix, encode_head};
use super::request::{BlockServer, ReadRequest, SendBlock, SendRequest};
use super::send_frame::SendFrameDecoder;
use super::{BlockHeader, BlockSink, DecodeError, SendHeader};
use crate::types::{BlockId, BlockMeta, TaskAttemptId};

const SEND: &str = "00000096 03 00000000 0000000000000007 00000003617070 00000001 000000000000002a 00000001 00000002 \
     00000001 00000002 0102030405060708 00000003 00000001 0000000011223344 0000000000000005 00000003aabbcc 00000001 \
     00000014 31302e302e302e312d31393939392d3137303030 00000008 31302e302e302e31 00004e1f 00004268 00000009 \
     0000000000000000 00000000000003e8";
const READS: [&str; 7] = [
    "0000001f 04 00000000 0000000000000007 00000003617070 00000001 00000002 00000001 0000000a",
    "00000033 05 00000000 0000000000000007 00000003617070 00000001 00000002 00000001 0000000a 0000000000000040 \
     00000010 00000000000003e8",
    "00000037 18 00000000 0000000000000007 00000003617070 00000001 00000002 00000001 0000000a 0000000000000040 \
     00000010 00000000000003e8 00000003",
    "0000002f 06 00000000 0000000000000007 00000003617070 00000001 00000002 ffffffffffffffff 00000400 \
     00000000000003e8 ffffffff",
    "0000004a 06 00000000 0000000000000007 00000003617070 00000001 00000002 ffffffffffffffff 00000400 \
     00000000000003e8 0000001b 0000000001000000003a3000000100000000000000100000000500",
    "0000002b 15 00000000 0000000000000007 00000003617070 00000001 00000002 0000000000000001 00000010 \
     00000000000003e8",
    // Written by hand after §7.4. riffle reads this layout too.
    "00000053 19 00000000 0000000000000007 00000003617070 00000001 00000002 00000001 0000000a 0000000000000040 \
     00000010 00000000000003e8 00000003 00000001 0000000000000050 0000000000000010 0000000000000005",
];
const REPLIES: [&str; 6] = [
    "00000012 00 00000000 0000000000000007 00000000 000000024f4b",
    "0000001a 0e 00000002 0000000000000007 00000000 000000024f4b 0000000000000063 0102",
    "00000026 17 00000002 0000000000000007 00000000 000000024f4b 0000000000000063 00000002 00000003 00000004 0102",
    "0000003a 10 00000003 0000000000000007 00000000 000000024f4b 00000001 0102030405060708 00000000 00000003 \
     00000009 0000000011223344 0000000000000005 aabbcc",
    "0000001f 10 00000000 0000000000000007 00000004 0000000b4e4f5f5245474953544552 00000000",
    // Written by hand: the response to a sorted read while merge is disabled.
    "0000001e 16 00000000 0000000000000007 00000006 000000026e6f ffffffffffffffff ffffffff",
];

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
}

fn split(frame: &[u8]) -> (FrameHeader, &[u8], &[u8]) {
    let header = FrameHeader::decode(frame.first_chunk().unwrap(), FRAME_BYTES_LIMIT).unwrap();
    let (message, body) = frame[HEADER_BYTES..].split_at(header.message_bytes as usize);
    assert_eq!(body.len(), header.body_bytes as usize);
    (header, message, body)
}

/// Rebuilds a request and checks the order of the calls.
#[derive(Debug, Default)]
struct Collector {
    request: SendRequest,
    seen_header: bool,
    open: Option<(u32, Vec<u8>)>,
    writes: usize,
    refuse_at_block: Option<usize>,
    blocks: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    Decode(DecodeError),
    Sink,
}

impl From<DecodeError> for Refusal {
    fn from(error: DecodeError) -> Self {
        Self::Decode(error)
    }
}

impl BlockSink for Collector {
    type Error = Refusal;

    fn header(&mut self, header: SendHeader<'_>) -> Result<(), Refusal> {
        assert!(!std::mem::replace(&mut self.seen_header, true));
        self.request.app = header.app.to_owned();
        self.request.shuffle = header.shuffle;
        self.request.ticket = header.ticket;
        Ok(())
    }

    fn partition(&mut self, partition: i32) -> Result<(), Refusal> {
        assert!(self.seen_header && self.open.is_none());
        self.request.partitions.push((partition, Vec::new()));
        Ok(())
    }

    fn begin_block(&mut self, length: u32) -> Result<(), Refusal> {
        assert!(self.open.is_none() && !self.request.partitions.is_empty());
        self.blocks += 1;
        if self.refuse_at_block == Some(self.blocks) {
            return Err(Refusal::Sink);
        }
        self.open = Some((length, Vec::new()));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        assert!(!bytes.is_empty());
        self.writes += 1;
        let (length, data) = self.open.as_mut().unwrap();
        data.extend_from_slice(bytes);
        assert!(data.len() <= *length as usize);
        Ok(())
    }

    fn end_block(&mut self, block: BlockHeader) -> Result<(), Refusal> {
        let (length, data) = self.open.take().unwrap();
        assert_eq!(data.len(), length as usize);
        assert_eq!(i64::from(block.length), i64::from(length));
        self.request.partitions.last_mut().unwrap().1.push(SendBlock {
            block_id: block.block_id,
            crc: block.crc,
            task_attempt_id: block.task_attempt_id,
            data: data.into(),
            uncompressed_length: block.uncompressed_length,
            ..SendBlock::default()
        });
        Ok(())
    }
}

/// Decodes `message` in pieces of `step` bytes.
fn decode(message: &[u8], step: usize) -> Result<SendRequest, Refusal> {
    let mut sink = Collector::default();
    let mut decoder = SendFrameDecoder::new(u32::try_from(message.len()).unwrap());
    let mut done = false;
    for piece in message.chunks(step) {
        assert!(!done);
        done = decoder.feed(piece, &mut sink)?;
    }
    assert!(done && decoder.remaining() == 0 && sink.open.is_none());
    sink.request.request_id = decoder.request_id().unwrap();
    sink.request.timestamp_ms = decoder.timestamp_ms();
    Ok(sink.request)
}

fn server() -> BlockServer {
    BlockServer {
        id: "10.0.0.1-19999-17000".to_owned(),
        host: "10.0.0.1".to_owned(),
        grpc_port: 19999,
        netty_port: 17000,
    }
}

fn block(data: &'static [u8], servers: Vec<BlockServer>) -> SendBlock {
    SendBlock {
        block_id: 0x0102_0304_0506_0708,
        crc: 0x1122_3344,
        task_attempt_id: 5,
        data: Bytes::from_static(data),
        servers,
        uncompressed_length: 9,
        free_memory: 0,
    }
}

fn golden_send() -> SendRequest {
    SendRequest {
        request_id: 7,
        app: "app".to_owned(),
        shuffle: 1,
        ticket: 42,
        partitions: vec![(2, vec![block(&[0xaa, 0xbb, 0xcc], vec![server()])])],
        timestamp_ms: 1000,
    }
}

/// A send with many partitions, blocks and servers, a repeated partition and an empty block list.
fn large_send() -> SendRequest {
    let many =
        vec![block(b"x", vec![]), block(&[7; 300], vec![server(), server()]), block(b"yz", vec![server()])];
    let partitions = vec![(9, many.clone()), (0, vec![]), (9, many), (i32::MAX, vec![block(b"end", vec![])])];
    SendRequest { request_id: -1, partitions, ..golden_send() }
}

fn encoded(request: &SendRequest) -> Vec<u8> {
    let mut out = BytesMut::new();
    request.encode_frame(&mut out);
    out.to_vec()
}

fn without_servers(mut request: SendRequest) -> SendRequest {
    request.partitions.iter_mut().flat_map(|(_, blocks)| blocks).for_each(|block| block.servers.clear());
    request
}

#[test]
fn golden_send_decodes_and_encodes_byte_equal() {
    let frame = unhex(SEND);
    assert_eq!(encoded(&golden_send()), frame);
    let (header, message, _) = split(&frame);
    assert_eq!(header.kind, FrameType::Send);
    assert_eq!(decode(message, message.len()).unwrap(), without_servers(golden_send()));
}

#[test]
fn golden_reads_decode_and_encode_byte_equal() {
    for text in READS {
        let frame = unhex(text);
        let (header, message, _) = split(&frame);
        let request = ReadRequest::decode(header.kind, message).unwrap();
        assert_eq!((request.target().request_id, request.target().app), (7, "app"));
        assert_eq!((request.target().shuffle, request.target().partition), (1, 2));
        let mut out = BytesMut::new();
        request.encode_frame(&mut out);
        assert_eq!(out, frame, "{text}");
    }
}

#[test]
fn golden_replies_decode_and_encode_byte_equal() {
    for text in REPLIES {
        let frame = unhex(text);
        let (header, message, body) = split(&frame);
        let reply = Reply::decode(header.kind, message, Bytes::copy_from_slice(body)).unwrap();
        assert_eq!(reply.request_id, 7);
        let meta: Vec<BlockMeta>;
        let fields = match &reply.answer {
            ReplyAnswer::Rpc => ReplyFields::Rpc,
            ReplyAnswer::LocalIndex { data_length, storage_ids: None } => {
                ReplyFields::LocalIndex { data_length: *data_length }
            }
            ReplyAnswer::LocalIndex { data_length, storage_ids: Some(ids) } => {
                ReplyFields::LocalIndexV2 { data_length: *data_length, storage_ids: ids }
            }
            ReplyAnswer::LocalData => ReplyFields::LocalData,
            ReplyAnswer::Memory(segments) => {
                let to_meta = |segment: &super::reply::ReplySegment| BlockMeta {
                    block_id: BlockId(segment.block_id),
                    task_attempt_id: TaskAttemptId(segment.task_attempt_id),
                    length: u32::try_from(segment.length).unwrap(),
                    uncompressed_length: u32::try_from(segment.uncompressed_length).unwrap(),
                    crc: u32::try_from(segment.crc).unwrap(),
                };
                meta = segments.iter().map(to_meta).collect();
                ReplyFields::Memory(&meta)
            }
            ReplyAnswer::MemoryV2 { .. } => unreachable!("the worker does not send it"),
            ReplyAnswer::Sorted { next_block_id, state } => {
                ReplyFields::Sorted { next_block_id: *next_block_id, state: *state }
            }
        };
        let prefix = ReplyPrefix { request_id: 7, status: reply.status, message: &reply.message };
        let mut out = BytesMut::new();
        encode_head(prefix, fields, reply.body.len() as u64, &mut out).unwrap();
        out.extend_from_slice(&reply.body);
        assert_eq!(out, frame, "{text}");
    }
}

#[test]
fn send_may_be_split_anywhere() {
    for request in [golden_send(), large_send()] {
        let frame = encoded(&request);
        let message = &frame[HEADER_BYTES..];
        for step in 1..=message.len() {
            assert_eq!(
                decode(message, step).unwrap(),
                without_servers(request.clone()),
                "message in pieces of {step} bytes"
            );
        }
    }
}

#[test]
fn unsplit_block_is_written_once() {
    let frame = encoded(&golden_send());
    let mut sink = Collector::default();
    let message = &frame[HEADER_BYTES..];
    let mut decoder = SendFrameDecoder::new(u32::try_from(message.len()).unwrap());
    assert!(decoder.feed(message, &mut sink).unwrap());
    assert_eq!(sink.writes, 1);
    decoder.restart(u32::try_from(message.len()).unwrap());
    assert!(decoder.feed(message, &mut Collector::default()).unwrap());
}

#[test]
fn truncated_send_never_completes() {
    let frame = encoded(&large_send());
    let message = &frame[HEADER_BYTES..];
    for length in 1..message.len() {
        // The frame claims to end here, which contradicts the counts.
        let mut decoder = SendFrameDecoder::new(u32::try_from(length).unwrap());
        assert!(decoder.feed(&message[..length], &mut Collector::default()).is_err(), "{length}");
        // The frame is longer, and the remainder is still to come.
        let mut decoder = SendFrameDecoder::new(u32::try_from(message.len()).unwrap());
        assert_eq!(decoder.feed(&message[..length], &mut Collector::default()), Ok(false), "{length}");
        assert_eq!(decoder.remaining(), (message.len() - length) as u64);
    }
}

#[test]
fn refusal_by_sink_keeps_the_request_id() {
    let frame = encoded(&large_send());
    let mut sink = Collector { refuse_at_block: Some(2), ..Collector::default() };
    let mut decoder = SendFrameDecoder::new(u32::try_from(frame.len() - HEADER_BYTES).unwrap());
    assert_eq!(decoder.feed(&frame[HEADER_BYTES..], &mut sink), Err(Refusal::Sink));
    assert_eq!(decoder.request_id(), Some(-1));
    assert_eq!(sink.request.partitions[0].1.len(), 1);
}

/// Decodes the golden send with the four bytes at `at` of its message replaced. Offsets: 8 length
/// of the appId, 27 partition count, 35 block count, 39 partitionId, 51 and 75 block length, 55
/// shuffleId, 82 server count, 86 and 110 lengths of the server's names.
fn patched(at: usize, value: i32) -> Result<SendRequest, Refusal> {
    let mut frame = unhex(SEND);
    frame[HEADER_BYTES + at..HEADER_BYTES + at + 4].copy_from_slice(&value.to_be_bytes());
    decode(&frame[HEADER_BYTES..], usize::MAX)
}

#[test]
fn lengths_and_counts_that_contradict_the_frame_are_refused() {
    let too_large = |result| match result {
        Err(Refusal::Decode(DecodeError::TooLarge { what, .. })) => what,
        other => panic!("{other:?}"),
    };
    let malformed = |result| match result {
        Err(Refusal::Decode(DecodeError::Malformed { what, .. })) => what,
        other => panic!("{other:?}"),
    };
    for value in [i32::MAX, 1000, 200] {
        assert_eq!(too_large(patched(8, value)), "appId");
        assert_eq!(too_large(patched(27, value)), "partition count");
        assert_eq!(too_large(patched(35, value)), "block count");
        assert_eq!(too_large(patched(82, value)), "server count");
        assert_eq!(too_large(patched(86, value)), "server name length");
        assert_eq!(too_large(patched(110, value)), "server name length");
    }
    assert_eq!(too_large(patched(35, 2)), "block count");
    assert_eq!(malformed(patched(8, -1)), "appId is null");
    assert_eq!(malformed(patched(27, -1)), "a count is negative");
    assert_eq!(malformed(patched(35, i32::MIN)), "a count is negative");
    assert_eq!(malformed(patched(82, -1)), "a count is negative");
    assert_eq!(malformed(patched(39, 3)), "a block's partition differs from its list");
    assert_eq!(malformed(patched(55, 2)), "a block's shuffle differs from its request");
    assert_eq!(malformed(patched(51, 4)), "a block's length differs from its data");
    assert_eq!(malformed(patched(75, -1)), "a block's length differs from its data");
    // With a count of zero, more bytes than the timestamp remain.
    assert_eq!(malformed(patched(27, 0)), "unexpected bytes after the last field");
    assert_eq!(malformed(patched(35, 0)), "unexpected bytes after the last field");
}

#[test]
fn equal_but_invalid_block_lengths_are_refused() {
    let mut message = unhex(SEND)[HEADER_BYTES..].to_vec();
    message[51..55].copy_from_slice(&(-1_i32).to_be_bytes());
    message[75..79].copy_from_slice(&(-1_i32).to_be_bytes());
    assert!(matches!(
        decode(&message, 8),
        Err(Refusal::Decode(DecodeError::Malformed { what: "a block's length is negative", .. }))
    ));
    message[51..55].copy_from_slice(&i32::MAX.to_be_bytes());
    message[75..79].copy_from_slice(&i32::MAX.to_be_bytes());
    assert!(matches!(
        decode(&message, 8),
        Err(Refusal::Decode(DecodeError::TooLarge { what: "block length", .. }))
    ));
}

#[test]
fn app_id_that_is_not_utf8_is_refused() {
    let mut message = unhex(SEND)[HEADER_BYTES..].to_vec();
    message[12] = 0xff;
    assert!(matches!(decode(&message, 5), Err(Refusal::Decode(DecodeError::Malformed { .. }))));
    for text in READS {
        let mut frame = unhex(text);
        frame[HEADER_BYTES + 12] = 0xff;
        let (header, message, _) = split(&frame);
        assert!(ReadRequest::decode(header.kind, message).is_err(), "{text}");
    }
}

#[test]
fn reads_of_any_other_length_are_refused() {
    for text in READS {
        let frame = unhex(text);
        let (header, message, _) = split(&frame);
        for length in 0..message.len() {
            assert!(
                ReadRequest::decode(header.kind, &message[..length]).is_err(),
                "{text} cut at byte {length} was accepted"
            );
        }
        let mut longer = message.to_vec();
        longer.put_u8(0);
        assert!(ReadRequest::decode(header.kind, &longer).is_err(), "{text}");
    }
}

#[test]
fn reply_frames_are_not_requests() {
    for text in REPLIES {
        let frame = unhex(text);
        assert!(FrameHeader::decode_request(frame.first_chunk().unwrap(), FRAME_BYTES_LIMIT).is_err());
        let (header, message, _) = split(&frame);
        assert!(ReadRequest::decode(header.kind, message).is_err());
    }
}

/// Number of cases. `WIRE_CASES=1000000000 cargo test -p uniffle-wire golden` runs for hours.
fn cases() -> u32 {
    std::env::var("WIRE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// Frames with changed bytes, fed in pieces, cause no panic. The payload of a request is never
    /// longer than the frame.
    #[test]
    fn mutated_frames_never_panic(
        which in 0..READS.len() + REPLIES.len() + 2,
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        step in 1_usize..64,
    ) {
        let mut frame = match which {
            0 => unhex(SEND),
            1 => encoded(&large_send()),
            n if n < READS.len() + 2 => unhex(READS[n - 2]),
            n => unhex(REPLIES[n - 2 - READS.len()]),
        };
        for (at, value) in flips {
            let at = at.index(frame.len());
            frame[at] = value;
        }
        let Ok(header) = FrameHeader::decode(frame.first_chunk().unwrap(), FRAME_BYTES_LIMIT) else {
            return Ok(());
        };
        let rest = &frame[HEADER_BYTES..];
        let message = &rest[..rest.len().min(header.message_bytes as usize)];
        let _ = ReadRequest::decode(header.kind, message);
        let _ = Reply::decode(header.kind, message, Bytes::new());
        let mut decoder = SendFrameDecoder::new(header.message_bytes);
        let mut sink = Collector::default();
        for piece in message.chunks(step) {
            if decoder.feed(piece, &mut sink).is_err() {
                break;
            }
        }
        let payload: usize = sink.request.partitions.iter().flat_map(|(_, blocks)| blocks).map(|b| b.data.len()).sum();
        prop_assert!(payload <= message.len());
    }
}
