//! Cost of decoding: the streaming decoder for three forms of `SendShuffleDataRequest`, and prost
//! for the classic form.
//!
//! Messages of 14 MiB are fed in pieces of 64 KiB + 1, as grpc-java sends them
//! (docs/design/data-path.md §3). The sink only adds up lengths, so copying into memory segments is
//! not included. prost gets the complete message and slices it (`Bytes` fields), its best case.
//!
//! Run: `cargo bench --bench wire`.
//!
//! Figures: `benches/notes/criterion.md`.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use prost::Message;
use uniffle_wire::send_message::{Decoder, MessageLimits};
use uniffle_wire::{BlockHeader, BlockSink, DecodeError, SendHeader};
use uniffle_worker::proto::{CombinedShuffleData, SendShuffleDataRequest, ShuffleBlock, ShuffleData};

const MESSAGE_BYTES: usize = 14 << 20;
const PIECE_BYTES: usize = (64 << 10) + 1;

/// A sink that adds up lengths.
#[derive(Debug, Default)]
struct Sum {
    bytes: usize,
    blocks: usize,
}

impl BlockSink for Sum {
    type Error = DecodeError;

    fn header(&mut self, header: SendHeader<'_>) -> Result<(), DecodeError> {
        black_box(header);
        Ok(())
    }

    fn partition(&mut self, partition_id: i32) -> Result<(), DecodeError> {
        black_box(partition_id);
        Ok(())
    }

    fn begin_block(&mut self, length: u32) -> Result<(), DecodeError> {
        black_box(length);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DecodeError> {
        self.bytes += black_box(bytes).len();
        Ok(())
    }

    fn end_block(&mut self, block: BlockHeader) -> Result<(), DecodeError> {
        black_box(block);
        self.blocks += 1;
        Ok(())
    }
}

fn decode(message: &[u8]) -> Sum {
    let mut sink = Sum::default();
    let mut decoder = Decoder::new(message.len() as u64, MessageLimits::default());
    for piece in message.chunks(PIECE_BYTES) {
        decoder.feed(piece, &mut sink).expect("a whole message");
    }
    decoder.finish(&mut sink).expect("a whole message");
    sink
}

fn classic(block_bytes: usize) -> SendShuffleDataRequest {
    let block = |id: i64| ShuffleBlock {
        block_id: id << 42 | 77,
        length: i32::try_from(block_bytes).expect("small"),
        uncompress_length: 60_000,
        crc: 0x89AB_CDEF,
        data: vec![7; block_bytes].into(),
        task_attempt_id: 1234,
    };
    let blocks = i64::try_from(MESSAGE_BYTES / block_bytes).expect("small");
    let partitions = blocks.min(8);
    let shuffle_data = (0..partitions)
        .map(|partition| ShuffleData {
            partition_id: i32::try_from(partition).expect("small"),
            block: (0..blocks / partitions).map(block).collect(),
        })
        .collect();
    SendShuffleDataRequest {
        app_id: "application_1700000000000_0001_1700000000001".into(),
        shuffle_id: 3,
        require_buffer_id: 12345,
        shuffle_data,
        timestamp: 1_700_000_000_000,
        ..Default::default()
    }
}

fn payload(request: &SendShuffleDataRequest) -> Bytes {
    let blocks = request.shuffle_data.iter().flat_map(|data| &data.block);
    blocks.flat_map(|block| block.data.iter().copied()).collect::<Vec<u8>>().into()
}

fn contiguous(classic: &SendShuffleDataRequest) -> SendShuffleDataRequest {
    let mut request = classic.clone();
    request.contiguous_shuffle_data = payload(classic);
    for block in request.shuffle_data.iter_mut().flat_map(|data| &mut data.block) {
        block.data = Bytes::new();
    }
    request
}

fn combined(classic: &SendShuffleDataRequest) -> SendShuffleDataRequest {
    let mut message = CombinedShuffleData { combined_data: payload(classic), ..Default::default() };
    for data in &classic.shuffle_data {
        message.partition_ids.push(data.partition_id);
        message.partition_block_counts.push(i32::try_from(data.block.len()).expect("small"));
        for block in &data.block {
            message.block_ids.push(block.block_id);
            message.lengths.push(block.length);
            message.uncompress_lengths.push(block.uncompress_length);
            message.crcs.push(block.crc);
            message.task_attempt_ids.push(block.task_attempt_id);
        }
    }
    let mut request = classic.clone();
    request.shuffle_data.clear();
    request.contiguous_shuffle_data = message.encode_to_vec().into();
    request
}

fn send_message(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("send_message");
    for block_bytes in [100, 1 << 10, 14 << 10, 64 << 10] {
        let classic = classic(block_bytes);
        let forms = [
            ("classic", classic.clone()),
            ("contiguous", contiguous(&classic)),
            ("combined", combined(&classic)),
        ];
        for (form, request) in forms {
            let message = Bytes::from(request.encode_to_vec());
            group.throughput(Throughput::Bytes(message.len() as u64));
            group.bench_with_input(BenchmarkId::new(form, block_bytes), &message, |bencher, message| {
                bencher.iter(|| black_box(decode(message)));
            });
        }
        let message = Bytes::from(classic.encode_to_vec());
        group.bench_with_input(
            BenchmarkId::new("prost classic", block_bytes),
            &message,
            |bencher, message| {
                bencher.iter(|| {
                    SendShuffleDataRequest::decode(black_box(message.clone())).expect("a whole message")
                });
            },
        );
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = send_message
}
criterion_main!(benches);
