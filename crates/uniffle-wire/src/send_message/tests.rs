//! The decoder against prost (three forms, random cuts), against damage, and against golden bytes.

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::{BlockHeader, BlockSink, DecodeError, SendHeader, proto};

/// Records its calls and fails the test if their order is wrong.
#[derive(Debug, Default)]
struct Recorder {
    header: Option<(String, i32, i64)>,
    partition: Option<i32>,
    blocks: Vec<(i32, BlockHeader, Vec<u8>)>,
    open: Option<(u32, Vec<u8>)>,
}

impl BlockSink for Recorder {
    type Error = DecodeError;

    fn header(&mut self, header: SendHeader<'_>) -> Result<(), DecodeError> {
        assert!(self.header.is_none(), "the sink got more than one header");
        self.header = Some((header.app.to_owned(), header.shuffle, header.ticket));
        Ok(())
    }

    fn partition(&mut self, partition_id: i32) -> Result<(), DecodeError> {
        assert!(self.header.is_some() && self.open.is_none());
        self.partition = Some(partition_id);
        Ok(())
    }

    fn begin_block(&mut self, length: u32) -> Result<(), DecodeError> {
        assert!(self.partition.is_some() && self.open.is_none() && length > 0);
        self.open = Some((length, Vec::new()));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DecodeError> {
        let (length, data) = self.open.as_mut().expect("bytes arrived outside a block");
        data.extend_from_slice(bytes);
        assert!(!bytes.is_empty() && data.len() <= *length as usize, "a block got more bytes than announced");
        Ok(())
    }

    fn end_block(&mut self, block: BlockHeader) -> Result<(), DecodeError> {
        let (length, data) = self.open.take().expect("the end of a block arrived outside a block");
        assert_eq!((data.len(), block.length), (length as usize, i32::try_from(length).unwrap()));
        self.blocks.push((self.partition.unwrap(), block, data));
        Ok(())
    }
}

fn decode_cut(
    bytes: &[u8],
    cuts: &[usize],
    limits: MessageLimits,
) -> Result<(Recorder, MessageSummary), DecodeError> {
    let mut recorder = Recorder::default();
    let mut decoder = Decoder::new(bytes.len() as u64, limits);
    let mut rest = bytes;
    for cut in cuts.iter().cycle().take_while(|_| !cuts.is_empty()) {
        if rest.is_empty() {
            break;
        }
        let (piece, tail) = rest.split_at((*cut).min(rest.len()));
        decoder.feed(piece, &mut recorder)?;
        rest = tail;
    }
    decoder.feed(rest, &mut recorder)?;
    let summary = decoder.finish(&mut recorder)?;
    assert!(recorder.open.is_none(), "a block is open after the end");
    Ok((recorder, summary))
}

fn decode(bytes: &[u8]) -> Result<(Recorder, MessageSummary), DecodeError> {
    decode_cut(bytes, &[], MessageLimits::default())
}

fn what(result: Result<(Recorder, MessageSummary), DecodeError>) -> &'static str {
    match result.expect_err("an invalid message was accepted") {
        DecodeError::Malformed { what, .. } | DecodeError::TooLarge { what, .. } => what,
        DecodeError::Incomplete => "incomplete",
        DecodeError::UnknownType(_) => "unknown type",
    }
}

type Request = proto::SendShuffleDataRequest;

fn block(id: i64, data: &[u8]) -> proto::ShuffleBlock {
    proto::ShuffleBlock {
        block_id: id,
        length: i32::try_from(data.len()).unwrap(),
        uncompress_length: 7,
        crc: i64::from(crc32fast::hash(data)),
        data: Bytes::copy_from_slice(data),
        task_attempt_id: id.wrapping_mul(3),
    }
}

fn request(entries: Vec<(i32, Vec<proto::ShuffleBlock>)>) -> Request {
    Request {
        app_id: "app-1".into(),
        shuffle_id: 4,
        require_buffer_id: 99,
        shuffle_data: entries
            .into_iter()
            .map(|(partition_id, block)| proto::ShuffleData { partition_id, block })
            .collect(),
        timestamp: 1_700_000_000_000,
        stage_attempt_number: 2,
        contiguous_shuffle_data: Bytes::new(),
    }
}

fn contiguous(classic: &Request) -> Request {
    let mut request = classic.clone();
    let mut all = Vec::new();
    for block in request.shuffle_data.iter_mut().flat_map(|entry| entry.block.iter_mut()) {
        all.extend_from_slice(&std::mem::take(&mut block.data));
    }
    request.contiguous_shuffle_data = all.into();
    request
}

fn combined_message(classic: &Request) -> proto::CombinedShuffleData {
    let mut message = proto::CombinedShuffleData::default();
    let mut all = Vec::new();
    for entry in &classic.shuffle_data {
        message.partition_ids.push(entry.partition_id);
        message.partition_block_counts.push(i32::try_from(entry.block.len()).unwrap());
        for block in &entry.block {
            message.block_ids.push(block.block_id);
            message.lengths.push(block.length);
            message.uncompress_lengths.push(block.uncompress_length);
            message.crcs.push(block.crc);
            message.task_attempt_ids.push(block.task_attempt_id);
            all.extend_from_slice(&block.data);
        }
    }
    message.combined_data = all.into();
    message
}

fn combined(classic: &Request) -> Request {
    Request {
        shuffle_data: Vec::new(),
        contiguous_shuffle_data: combined_message(classic).encode_to_vec().into(),
        ..classic.clone()
    }
}

fn expected(classic: &Request) -> Vec<(i32, BlockHeader, Vec<u8>)> {
    let blocks =
        classic.shuffle_data.iter().flat_map(|entry| entry.block.iter().map(|b| (entry.partition_id, b)));
    blocks
        .map(|(partition, block)| {
            let header = BlockHeader {
                block_id: block.block_id,
                length: block.length,
                uncompressed_length: block.uncompress_length,
                crc: block.crc,
                task_attempt_id: block.task_attempt_id,
            };
            (partition, header, block.data.to_vec())
        })
        .collect()
}

fn any_block() -> impl Strategy<Value = proto::ShuffleBlock> {
    (any::<i64>(), any::<i32>(), any::<i64>(), any::<i64>(), prop::collection::vec(any::<u8>(), 1..300))
        .prop_map(|(block_id, uncompress_length, crc, task_attempt_id, data)| proto::ShuffleBlock {
            block_id,
            length: i32::try_from(data.len()).unwrap(),
            uncompress_length,
            crc,
            data: data.into(),
            task_attempt_id,
        })
}

fn any_request() -> impl Strategy<Value = Request> {
    let entries = prop::collection::vec((any::<i32>(), prop::collection::vec(any_block(), 0..6)), 0..5);
    ("[a-z_0-9]{0,40}", any::<i32>(), any::<i64>(), any::<i64>(), any::<i32>(), entries).prop_map(
        |(app_id, shuffle_id, require_buffer_id, timestamp, stage_attempt_number, entries)| Request {
            app_id,
            shuffle_id,
            require_buffer_id,
            timestamp,
            stage_attempt_number,
            ..request(entries)
        },
    )
}

/// Returns the request in all three forms. A request without blocks has only one form.
fn forms(classic: &Request) -> Vec<Request> {
    if expected(classic).is_empty() {
        return vec![classic.clone()];
    }
    vec![classic.clone(), contiguous(classic), combined(classic)]
}

proptest! {
    #[test]
    fn split_messages_of_all_forms_decode_equally(
        classic in any_request(),
        cuts in prop::collection::vec(1_usize..70, 1..20),
    ) {
        let blocks = expected(&classic);
        for form in forms(&classic) {
            let (recorder, summary) = decode_cut(&form.encode_to_vec(), &cuts, MessageLimits::default()).unwrap();
            prop_assert_eq!(&recorder.blocks, &blocks);
            let header = (classic.app_id.clone(), classic.shuffle_id, classic.require_buffer_id);
            prop_assert_eq!(recorder.header, Some(header));
            prop_assert_eq!(summary, MessageSummary {
                blocks: blocks.len() as u64,
                payload_bytes: blocks.iter().map(|(_, _, data)| data.len() as u64).sum(),
                timestamp_ms: classic.timestamp,
            });
        }
    }

    #[test]
    fn damaged_messages_decode_as_in_prost_or_are_refused(
        classic in any_request(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keep in any::<prop::sample::Index>(),
        cuts in prop::collection::vec(1_usize..70, 1..20),
    ) {
        for form in forms(&classic) {
            let mut bytes = form.encode_to_vec();
            if bytes.is_empty() {
                continue;
            }
            drop(decode_cut(&bytes[..keep.index(bytes.len())], &cuts, MessageLimits::default()));
            for (at, value) in &flips {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            // If damaged bytes are accepted, and prost accepts them without field 7, it must decode
            // the same blocks.
            if let Ok((recorder, summary)) = decode_cut(&bytes, &cuts, MessageLimits::default()) {
                let stored: usize = recorder.blocks.iter().map(|(_, _, data)| data.len()).sum();
                prop_assert!(stored <= bytes.len());
                prop_assert_eq!(summary.payload_bytes, stored as u64);
                let damaged = Request::decode(bytes.as_slice());
                if let Some(damaged) = damaged.ok().filter(|damaged| damaged.contiguous_shuffle_data.is_empty())
                {
                    prop_assert_eq!(recorder.blocks, expected(&damaged));
                }
            }
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), cuts in prop::collection::vec(1_usize..9, 1..9)) {
        drop(decode_cut(&bytes, &cuts, MessageLimits::default()));
    }
}

#[test]
fn classic_form_matches_golden_bytes() {
    let bytes = [
        0x0A, 0x01, b'a', // appId "a"
        0x10, 0x03, // shuffleId 3
        0x18, 0x09, // requireBufferId 9
        0x22, 0x12, // shuffleData, 18 bytes
        0x08, 0x05, // partitionId 5
        0x12, 0x0E, // block, 14 bytes
        0x08, 0x96, 0x01, // blockId 150
        0x10, 0x02, // length 2
        0x18, 0x04, // uncompressLength 4
        0x20, 0x07, // crc 7
        0x2A, 0x02, b'x', b'y', // data
        0x30, // taskAttemptId, its value is missing
    ];
    // The block is one byte short: its last key has no value.
    assert_eq!(what(decode(&bytes)), "a message ends inside a field");
    let mut whole = bytes.to_vec();
    whole[8] = 0x13;
    whole[12] = 0x0F;
    whole.push(0x08);
    for cut in 1..whole.len() {
        let (recorder, summary) = decode_cut(&whole, &[cut], MessageLimits::default()).unwrap();
        assert_eq!(recorder.header, Some(("a".to_owned(), 3, 9)));
        let header =
            BlockHeader { block_id: 150, length: 2, uncompressed_length: 4, crc: 7, task_attempt_id: 8 };
        assert_eq!(recorder.blocks, [(5, header, b"xy".to_vec())]);
        assert_eq!((summary.blocks, summary.payload_bytes), (1, 2));
    }
}

#[test]
fn block_fields_may_have_any_order() {
    let block = [0x2A, 2, b'x', b'y', 0x30, 8, 0x10, 2, 0x08, 1];
    let mut bytes = vec![0x0A, 1, b'a', 0x22, 12, 0x12, 10];
    bytes.extend_from_slice(&block);
    let (recorder, _) = decode(&bytes).unwrap();
    let header = BlockHeader { block_id: 1, length: 2, task_attempt_id: 8, ..BlockHeader::default() };
    assert_eq!(recorder.blocks, [(0, header, b"xy".to_vec())]);
}

#[test]
fn unknown_fields_are_skipped_at_every_level() {
    let unknown = [0x50, 0x05, 0x59, 1, 2, 3, 4, 5, 6, 7, 8, 0x62, 2, 9, 9, 0x6D, 1, 2, 3, 4]; // fields 10 to 13
    let mut block = unknown.to_vec();
    block.extend_from_slice(&[0x10, 1, 0x2A, 1, b'z']);
    let mut data = unknown.to_vec();
    data.extend_from_slice(&[0x12, u8::try_from(block.len()).unwrap()]);
    data.extend_from_slice(&block);
    let mut bytes = unknown.to_vec();
    bytes.extend_from_slice(&[0x22, u8::try_from(data.len()).unwrap()]);
    bytes.extend_from_slice(&data);
    bytes.extend_from_slice(&unknown);
    for cut in 1..bytes.len() {
        assert_eq!(decode_cut(&bytes, &[cut], MessageLimits::default()).unwrap().0.blocks[0].2, b"z");
    }
}

#[test]
fn unpacked_arrays_of_combined_form_are_accepted() {
    let arrays = [0x08, 5, 0x10, 1, 0x18, 42, 0x20, 2, 0x28, 3, 0x30, 4, 0x38, 6, 0x42, 2, b'h', b'i'];
    let mut bytes = vec![0x0A, 1, b'a', 0x3A, u8::try_from(arrays.len()).unwrap()];
    bytes.extend_from_slice(&arrays);
    let (recorder, _) = decode(&bytes).unwrap();
    let header = BlockHeader { block_id: 42, length: 2, uncompressed_length: 3, crc: 4, task_attempt_id: 6 };
    assert_eq!(recorder.blocks, [(5, header, b"hi".to_vec())]);
}

#[test]
fn summary_identifies_request_without_blocks() {
    for bytes in [vec![], vec![0x0A, 1, b'a'], vec![0x22, 0], vec![0x22, 2, 0x08, 1], vec![0x3A, 0]] {
        let (recorder, summary) = decode(&bytes).unwrap();
        assert_eq!(summary.blocks, 0);
        assert!(recorder.header.is_some(), "the caller must get the header, to release the ticket");
    }
}

#[test]
fn inconsistent_forms_are_refused() {
    let classic = request(vec![(1, vec![block(1, b"abc"), block(2, b"de")])]);

    let mut short = contiguous(&classic);
    short.contiguous_shuffle_data = Bytes::from_static(b"abcd");
    assert_eq!(what(decode(&short.encode_to_vec())), "the sum of the block lengths differs from the bytes");
    let mut long = contiguous(&classic);
    long.contiguous_shuffle_data = Bytes::from_static(b"abcdef");
    assert_eq!(what(decode(&long.encode_to_vec())), "the sum of the block lengths differs from the bytes");
    let mut twice = classic.clone();
    twice.contiguous_shuffle_data = Bytes::from_static(b"abcde");
    assert_eq!(what(decode(&twice.encode_to_vec())), "the data appears twice");
    let mut mixed = classic.clone();
    mixed.shuffle_data[0].block[1].data = Bytes::new();
    assert_eq!(what(decode(&mixed.encode_to_vec())), "a block's length differs from its data");
    mixed.shuffle_data[0].block.swap(0, 1);
    assert_eq!(what(decode(&mixed.encode_to_vec())), "a block with data after one without");
    let mut lying = classic.clone();
    lying.shuffle_data[0].block[0].length = 2;
    assert_eq!(what(decode(&lying.encode_to_vec())), "a block's length differs from its data");
    let mut empty_entry = combined(&classic);
    empty_entry.shuffle_data.push(proto::ShuffleData::default());
    assert_eq!(what(decode(&empty_entry.encode_to_vec())), "field 7 with empty entries in field 4");
    let mut without = request(vec![(1, vec![block(1, b"abc")])]);
    without.shuffle_data[0].block[0].data = Bytes::new();
    without.app_id = "long enough to hold the declared bytes".into();
    without.shuffle_data.push(proto::ShuffleData { partition_id: 1, block: Vec::new() });
    assert_eq!(what(decode(&without.encode_to_vec())), "blocks declare bytes that are not in the message");
}

#[test]
fn inconsistent_combined_arrays_are_refused() {
    let classic = request(vec![(1, vec![block(1, b"abc"), block(2, b"de")])]);
    let refuse = |change: &dyn Fn(&mut proto::CombinedShuffleData)| {
        let mut message = combined_message(&classic);
        change(&mut message);
        let request = Request {
            shuffle_data: Vec::new(),
            contiguous_shuffle_data: message.encode_to_vec().into(),
            ..classic.clone()
        };
        what(decode(&request.encode_to_vec()))
    };
    assert_eq!(refuse(&|m| m.partition_ids.push(2)), "combined arrays differ in length");
    assert_eq!(refuse(&|m| m.crcs.truncate(1)), "combined arrays differ in length");
    assert_eq!(refuse(&|m| m.partition_block_counts[0] = 3), "block counts differ from the number of blocks");
    assert_eq!(refuse(&|m| m.partition_block_counts[0] = -1), "a block count is negative");
    assert_eq!(refuse(&|m| m.lengths[0] = -3), "a block length is not positive");
    assert_eq!(refuse(&|m| m.lengths[0] = i32::MAX), "block length");
    assert_eq!(refuse(&|m| m.lengths[0] = 4), "the sum of the block lengths differs from the bytes");
    assert_eq!(refuse(&|m| m.combined_data = Bytes::new()), "combined arrays without their bytes");
    // The bytes before the arrays.
    assert_eq!(what(decode(&[0x3A, 3, 0x42, 1, b'x'])), "bytes without block headers before them");
}

#[test]
fn differing_header_fields_after_the_data_are_refused() {
    let entry = [0x22, 9, 0x08, 1, 0x12, 5, 0x10, 1, 0x2A, 1, b'x'];
    let tail = |tail: &[u8]| [&[0x0A, 1, b'a', 0x10, 3, 0x18, 9][..], &entry, tail].concat();
    for same in [&[0x0A, 1, b'a'][..], &[0x10, 3], &[0x18, 9]] {
        assert!(decode(&tail(same)).is_ok());
    }
    for other in [&[0x0A, 1, b'b'][..], &[0x0A, 0], &[0x10, 4], &[0x18, 8]] {
        assert_eq!(what(decode(&tail(other))), "a header field follows the data");
    }
    let late_partition = [0x22, 9, 0x12, 5, 0x10, 1, 0x2A, 1, b'x', 0x08, 1];
    assert_eq!(what(decode(&late_partition)), "a partition id follows its blocks");
    let late_zero = [0x22, 9, 0x12, 5, 0x10, 1, 0x2A, 1, b'x', 0x08, 0];
    assert!(decode(&late_zero).is_ok());
}

#[test]
fn lengths_beyond_their_message_are_refused() {
    assert_eq!(what(decode(&[0x22, 0x7F, 0x08])), "a field is longer than its message");
    assert_eq!(what(decode(&[0x22, 2, 0x12, 5, 0, 0, 0, 0, 0])), "a field is longer than its message");
    assert_eq!(what(decode(&[0x22, 4, 0x12, 2, 0x2A, 9, 0, 0])), "a field is longer than its message");
    assert_eq!(what(decode(&[0x22, 2, 0x12, 0x80, 0x01, 0, 0])), "a message ends inside a field");
    assert_eq!(what(decode(&[0x22, 1, 0x08, 0x01])), "a message ends inside a field");
    assert_eq!(what(decode(&[0x59, 1, 2])), "a field is longer than its message");
    let negative = [0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
    assert_eq!(what(decode(&negative)), "a field is longer than its message");
    let eleven = [0x10, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x02];
    assert_eq!(what(decode(&eleven)), "a varint is longer than 64 bits");
    assert_eq!(what(decode(&[0x00])), "field number 0");
    assert_eq!(what(decode(&[0x0B])), "a known field has another type");
    assert_eq!(what(decode(&[0x7B])), "groups are not part of this protocol");
    assert_eq!(what(decode(&[0x80, 0x80, 0x80, 0x80, 0x10, 0])), "a field number is out of range");
    let negative_block =
        [0x22, 13, 0x12, 11, 0x10, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
    assert_eq!(what(decode(&negative_block)), "a block without bytes");
    let long_name = Request { app_id: "x".repeat(5000), ..Request::default() };
    assert_eq!(what(decode(&long_name.encode_to_vec())), "appId");
}

#[test]
fn small_message_with_huge_lengths_is_refused() {
    // A block that claims 512 MiB without data, and combined arrays that claim 2^31-1 blocks.
    let claim = [0x22, 8, 0x12, 6, 0x10, 0x80, 0x80, 0x80, 0x80, 0x02];
    assert_eq!(what(decode(&claim)), "blocks declare more bytes than the message has");
    let counts = [0x3A, 10, 0x08, 1, 0x10, 0xFF, 0xFF, 0xFF, 0xFF, 0x07, 0x42, 0];
    assert_eq!(what(decode(&counts)), "combined arrays without their bytes");
}

#[test]
fn block_and_header_counts_are_bounded() {
    let classic = request(vec![(1, vec![block(1, b"abc"), block(2, b"de"), block(3, b"f")])]);
    let blocks = MessageLimits { blocks_max: 2, ..MessageLimits::default() };
    let collected = MessageLimits { collected_max: 2, ..MessageLimits::default() };
    for form in forms(&classic) {
        assert_eq!(what(decode_cut(&form.encode_to_vec(), &[7], blocks)), "number of blocks");
    }
    assert!(decode_cut(&classic.encode_to_vec(), &[7], collected).is_ok());
    for form in [contiguous(&classic), combined(&classic)] {
        assert_eq!(what(decode_cut(&form.encode_to_vec(), &[7], collected)), "number of blocks");
    }
}

#[test]
fn bytes_after_the_announced_message_are_refused() {
    let mut decoder = Decoder::new(2, MessageLimits::default());
    let mut recorder = Recorder::default();
    decoder.feed(&[0x10, 1], &mut recorder).unwrap();
    assert_eq!(decoder.remaining(), 0);
    assert!(matches!(decoder.feed(&[0x10], &mut recorder), Err(DecodeError::Malformed { .. })));
}
