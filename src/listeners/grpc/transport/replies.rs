//! Responses to the three data reads and to result queries, encoded by hand: a small head, then the
//! payload as existing `Bytes`. prost would first copy the payload into one contiguous message.
//!
//! Protobuf fields may have any order. All other fields are therefore written before the payload
//! field, whose length is known in advance. This module decides nothing about the data.
//!
//! Invariant: a response has exactly the announced bytes, or the call ends with a gRPC error
//! status. A short response with status 0 cannot happen.

use std::future::Future;

use bytes::{BufMut, Bytes, BytesMut};
use futures::{Stream, StreamExt as _, stream};
use http_body::Frame;
use http_body_util::StreamBody;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use tonic::Status;
use tonic::body::Body;

use super::message::{PREFIX_BYTES, ok_trailers, respond, status_trailers};
use super::progress;
use super::request_collector::excused;
use crate::memory::SMALL_PIECE_BYTES;
use uniffle_wire::types::BlockMeta;

/// Small pieces are combined up to about this size.
const COALESCED_BYTES: usize = 64 << 10;
/// Maximum number of bytes handed to HTTP/2 at a time. The caller's progress is measured between
/// two such steps.
const FRAME_BYTES: usize = 256 << 10;
/// Java reads a message into one array, whose length is an `int`.
const MESSAGE_BYTES_MAX: u64 = i32::MAX as u64;

/// Fields of a message before its payload, preceded by space for the gRPC prefix.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct Head {
    bytes: BytesMut,
}

impl Head {
    fn with_capacity(capacity: usize) -> Self {
        let mut bytes = BytesMut::with_capacity(capacity + PREFIX_BYTES + 24);
        bytes.put_bytes(0, PREFIX_BYTES);
        Self { bytes }
    }

    /// Head of a `GetMemoryShuffleDataResponse` with status SUCCESS: fields 1 (segments), 4 and 5.
    pub(in crate::listeners::grpc) fn memory(blocks: &[BlockMeta], message: &str, is_end: bool) -> Self {
        // A segment of stock clients takes 30 to 45 bytes.
        let mut head = Self::with_capacity(blocks.len() * 48 + message.len());
        let mut offset = 0_u64;
        for block in blocks {
            head.segment(block, offset);
            offset += u64::from(block.length);
        }
        head.string(4, message);
        // BoolValue: an absent `value` is false, an empty message is present.
        head.key(5, WireType::LengthDelimited);
        if is_end {
            head.bytes.put_slice(&[2, 0x08, 1]);
        } else {
            head.bytes.put_u8(0);
        }
        head
    }

    /// Head of a `GetLocalShuffleIndexResponse` with status SUCCESS: fields 3 and 4.
    pub(in crate::listeners::grpc) fn local_index(message: &str, data_file_bytes: u64) -> Self {
        let mut head = Self::with_capacity(message.len());
        head.string(3, message);
        head.varint(4, data_file_bytes);
        head
    }

    /// Head of a `GetLocalShuffleDataResponse` with status SUCCESS: field 3.
    pub(in crate::listeners::grpc) fn local_data(message: &str) -> Self {
        let mut head = Self::with_capacity(message.len());
        head.string(3, message);
        head
    }

    /// Head of a `GetShuffleResultResponse` or one for many partitions, with status SUCCESS: field
    /// 2.
    pub(in crate::listeners::grpc) fn result(message: &str) -> Self {
        let mut head = Self::with_capacity(message.len());
        head.string(2, message);
        head
    }

    /// Appends the fields of `message` that are not written by hand.
    pub(in crate::listeners::grpc) fn fields(&mut self, message: &impl prost::Message) {
        // Cannot fail: the buffer grows.
        let _ = message.encode(&mut self.bytes);
    }

    /// `ShuffleDataBlockSegment`, field 1 of the memory answer.
    fn segment(&mut self, block: &BlockMeta, offset: u64) {
        let fields = [
            (1, block.block_id.0.cast_unsigned()),
            (2, offset),
            (3, u64::from(block.length)),
            (4, sign_extended(block.uncompressed_length)),
            (5, u64::from(block.crc)),
            (6, block.task_attempt_id.0.cast_unsigned()),
        ];
        let length: usize = fields.iter().map(|(tag, value)| varint_field_len(*tag, *value)).sum();
        self.key(1, WireType::LengthDelimited);
        encode_varint(length as u64, &mut self.bytes);
        for (tag, value) in fields {
            self.varint(tag, value);
        }
    }

    fn key(&mut self, tag: u32, wire_type: WireType) {
        encode_key(tag, wire_type, &mut self.bytes);
    }

    fn varint(&mut self, tag: u32, value: u64) {
        if value != 0 {
            self.key(tag, WireType::Varint);
            encode_varint(value, &mut self.bytes);
        }
    }

    fn string(&mut self, tag: u32, text: &str) {
        if !text.is_empty() {
            self.key(tag, WireType::LengthDelimited);
            encode_varint(text.len() as u64, &mut self.bytes);
            self.bytes.put_slice(text.as_bytes());
        }
    }

    /// Finishes the head: key and length of the payload field, and the gRPC prefix of the whole
    /// message.
    fn announce(mut self, payload_tag: u32, payload_bytes: u64) -> Result<Bytes, Status> {
        if payload_bytes > 0 {
            self.key(payload_tag, WireType::LengthDelimited);
            encode_varint(payload_bytes, &mut self.bytes);
        }
        let total = ((self.bytes.len() - PREFIX_BYTES) as u64).saturating_add(payload_bytes);
        let Some(total) = u32::try_from(total).ok().filter(|total| u64::from(*total) <= MESSAGE_BYTES_MAX)
        else {
            return Err(Status::out_of_range(format!(
                "response of {total} bytes exceeds the maximum of {MESSAGE_BYTES_MAX} bytes"
            )));
        };
        self.bytes[1..PREFIX_BYTES].copy_from_slice(&total.to_be_bytes());
        Ok(self.bytes.freeze())
    }
}

/// Returns an int32 field sign-extended to 64 bits.
fn sign_extended(value: u32) -> u64 {
    i64::from(value.cast_signed()).cast_unsigned()
}

fn varint_field_len(tag: u32, value: u64) -> usize {
    if value == 0 { 0 } else { key_len(tag) + encoded_len_varint(value) }
}

/// A payload in memory.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct Payload {
    /// Sum of the lengths of `pieces`.
    pub(in crate::listeners::grpc) bytes: u64,
    pub(in crate::listeners::grpc) pieces: Vec<Bytes>,
}

/// Builds a response from a payload in memory. If `may_copy`, small pieces are combined.
/// `until_sent` is dropped when the socket has taken the last piece: until then the transport may
/// hold all of them.
pub(in crate::listeners::grpc) fn from_memory(
    head: Head,
    payload_tag: u32,
    payload: Payload,
    may_copy: bool,
    until_sent: impl Send + 'static,
) -> Result<http::Response<Body>, Status> {
    let Payload { bytes: payload_bytes, pieces } = payload;
    let present: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
    if present != payload_bytes {
        let text = format!("only {present} of {payload_bytes} bytes are present");
        return Err(excused(Status::internal(text)));
    }
    let head = head.announce(payload_tag, payload_bytes)?;
    let pieces = coalesce(head, pieces, if may_copy { SMALL_PIECE_BYTES } else { 0 });
    let mut end = Some(until_sent);
    let last = pieces.len() - 1;
    let frames = pieces.into_iter().enumerate().map(move |(at, piece)| match end.take_if(|_| at == last) {
        Some(until_sent) => Frame::data(last_bytes(piece, until_sent)),
        None => Frame::data(piece),
    });
    let frames = frames.chain(std::iter::once_with(|| Frame::trailers(ok_trailers())));
    Ok(answer(stream::iter(frames)))
}

/// Builds a response from a message with its prefix. `until_sent` is dropped when the socket has
/// taken it.
pub(in crate::listeners::grpc) fn whole(
    message: Bytes,
    until_sent: impl Send + 'static,
) -> http::Response<Body> {
    let frames = std::iter::once_with(|| Frame::data(last_bytes(message, until_sent)));
    let frames = frames.chain(std::iter::once_with(|| Frame::trailers(ok_trailers())));
    answer(stream::iter(frames))
}

/// Returns the last bytes of a response with `until_sent` attached, which is dropped when the
/// socket has taken them. Must be called when they are handed to HTTP/2.
fn last_bytes(bytes: Bytes, until_sent: impl Send + 'static) -> Bytes {
    let tail = progress::of_this_call().map(|progress| progress.tail());
    Bytes::from_owner(Last { bytes, _until_sent: (until_sent, tail) })
}

struct Last<T> {
    bytes: Bytes,
    _until_sent: T,
}

impl<T> AsRef<[u8]> for Last<T> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Combines runs of pieces smaller than `small` bytes, starting with the head. Other pieces are
/// unchanged.
fn coalesce(head: Bytes, pieces: Vec<Bytes>, small: usize) -> Vec<Bytes> {
    let mut whole = Vec::with_capacity(pieces.len().min(1024) + 1);
    let mut run = BytesMut::from(head);
    for piece in pieces {
        if piece.len() < small {
            run.extend_from_slice(&piece);
            if run.len() >= COALESCED_BYTES {
                whole.push(run.split().freeze());
            }
            continue;
        }
        if !run.is_empty() {
            whole.push(run.split().freeze());
        }
        whole.push(piece);
    }
    if !run.is_empty() {
        whole.push(run.freeze());
    }
    whole
}

/// Source of a streamed payload.
pub(in crate::listeners::grpc) trait Chunks: Send + 'static {
    /// Returns the next chunk, or `None` at the end. The text of an error reaches the client.
    fn next(&mut self) -> impl Future<Output = Option<Result<Bytes, String>>> + Send;
}

/// State of a streamed response.
enum Streaming<C, T> {
    Head(Bytes, u64, C, T),
    Payload(u64, C, Option<T>),
    Done,
}

/// Builds a response whose payload of `payload_bytes` bytes is still being read. An error, or
/// another number of bytes than announced, ends the call with `INTERNAL` in the trailers.
/// `until_sent` is dropped when the socket has taken the last chunk.
pub(in crate::listeners::grpc) fn from_chunks<C: Chunks>(
    head: Head,
    payload_tag: u32,
    payload_bytes: u64,
    chunks: C,
    until_sent: impl Send + 'static,
) -> Result<http::Response<Body>, Status> {
    let head = head.announce(payload_tag, payload_bytes)?;
    let start = Streaming::Head(head, payload_bytes, chunks, until_sent);
    let frames = stream::unfold(start, |state| async {
        match state {
            Streaming::Head(head, remaining, chunks, until_sent) => {
                Some((Frame::data(head), Streaming::Payload(remaining, chunks, Some(until_sent))))
            }
            Streaming::Payload(remaining, chunks, until_sent) => {
                Some(next_frame(remaining, chunks, until_sent).await)
            }
            Streaming::Done => None,
        }
    });
    Ok(answer(frames))
}

/// Builds a response from `frames`. hyper polls for the next frame only when the caller can take
/// it. Each poll therefore counts as progress of the caller.
fn answer(frames: impl Stream<Item = Frame<Bytes>> + Send + 'static) -> http::Response<Body> {
    let progress = progress::of_this_call();
    if let Some(progress) = &progress {
        progress.answers();
    }
    let taken = move |frame: Frame<Bytes>| {
        if let (Some(progress), Some(data)) = (&progress, frame.data_ref()) {
            progress.takes(data.len());
        }
        Ok::<_, Status>(frame)
    };
    let frames = frames.flat_map(|frame| stream::iter(steps(frame)));
    respond(Body::new(StreamBody::new(frames.map(taken))))
}

/// Splits a frame into steps of at most [`FRAME_BYTES`].
fn steps(frame: Frame<Bytes>) -> impl Iterator<Item = Frame<Bytes>> {
    let mut rest = Some(frame);
    std::iter::from_fn(move || {
        let mut data = match rest.take()?.into_data() {
            Ok(data) => data,
            Err(trailers) => return Some(trailers),
        };
        if data.len() > FRAME_BYTES {
            let step = data.split_to(FRAME_BYTES);
            rest = Some(Frame::data(data));
            return Some(Frame::data(step));
        }
        Some(Frame::data(data))
    })
}

async fn next_frame<C: Chunks, T: Send + 'static>(
    remaining: u64,
    mut chunks: C,
    mut until_sent: Option<T>,
) -> (Frame<Bytes>, Streaming<C, T>) {
    let own_time = progress::of_this_call().map(progress::CallProgress::own_time);
    let next = chunks.next().await;
    drop(own_time);
    let failed = match next {
        None if remaining == 0 => return (Frame::trailers(ok_trailers()), Streaming::Done),
        None => format!("data ended {remaining} bytes early"),
        Some(Ok(chunk)) => match remaining.checked_sub(chunk.len() as u64) {
            Some(remaining) => {
                let chunk = match until_sent.take_if(|_| remaining == 0) {
                    Some(until_sent) => last_bytes(chunk, until_sent),
                    None => chunk,
                };
                return (Frame::data(chunk), Streaming::Payload(remaining, chunks, until_sent));
            }
            None => "data is longer than announced".to_owned(),
        },
        Some(Err(text)) => text,
    };
    (Frame::trailers(status_trailers(&Status::internal(failed))), Streaming::Done)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use http_body_util::BodyExt;
    use prost::Message;

    use super::*;
    use crate::proto;
    use uniffle_wire::types::{BlockId, TaskAttemptId};

    /// Reads a response. Returns its message bytes, `grpc-status` and number of data frames.
    async fn read(response: http::Response<Body>) -> (Bytes, String, usize) {
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let mut body = response.into_body();
        let (mut bytes, mut status, mut frames) = (BytesMut::new(), String::new(), 0);
        while let Some(frame) = body.frame().await {
            match frame.unwrap().into_data() {
                Ok(data) => {
                    frames += 1;
                    bytes.extend_from_slice(&data);
                }
                Err(frame) => {
                    status = frame.trailers_ref().unwrap()["grpc-status"].to_str().unwrap().to_owned();
                }
            }
        }
        (bytes.freeze(), status, frames)
    }

    fn message(bytes: &Bytes) -> Bytes {
        assert_eq!(bytes[0], 0);
        let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
        assert_eq!(bytes.len(), 5 + length);
        bytes.slice(5..)
    }

    fn blocks(lengths: &[u32]) -> Vec<BlockMeta> {
        let meta = |(index, length): (usize, &u32)| BlockMeta {
            block_id: BlockId(i64::try_from(index).unwrap() << 40),
            task_attempt_id: TaskAttemptId(-1),
            length: *length,
            uncompressed_length: u32::MAX,
            crc: u32::MAX,
        };
        lengths.iter().enumerate().map(meta).collect()
    }

    #[tokio::test]
    async fn memory_responses_decode_with_prost() {
        let lengths = [3, 5000, 10, 9000];
        let pieces: Vec<_> = lengths.iter().map(|length| Bytes::from(vec![7; *length as usize])).collect();
        let blocks = blocks(&lengths);
        let head = Head::memory(&blocks, "OK", true);
        let large = pieces[1].as_ptr();
        assert_eq!(
            coalesce(Bytes::new(), pieces.clone(), 4096)[1].as_ptr(),
            large,
            "large pieces must not be copied"
        );

        let uncopied = coalesce(Bytes::from_static(b"head"), pieces.clone(), 0);
        assert_eq!(uncopied.len(), 5, "uncharged pieces must not be copied");
        let (bytes, status, frames) =
            read(from_memory(head, 2, Payload { bytes: 14013, pieces }, true, ()).unwrap()).await;
        assert_eq!((status.as_str(), frames), ("0", 4));
        let answer = proto::GetMemoryShuffleDataResponse::decode(message(&bytes)).unwrap();
        assert_eq!(answer.data.len(), 14013);
        assert_eq!((answer.status, answer.ret_msg.as_str(), answer.is_end), (0, "OK", Some(true)));
        let mut offset = 0;
        for (segment, block) in answer.shuffle_data_block_segments.iter().zip(&blocks) {
            assert_eq!(segment.block_id, block.block_id.0);
            assert_eq!(segment.offset, offset);
            assert_eq!(segment.length, i32::try_from(block.length).unwrap());
            assert_eq!(segment.uncompress_length, -1);
            assert_eq!(segment.crc, i64::from(u32::MAX));
            assert_eq!(segment.task_attempt_id, -1);
            offset += i64::from(block.length);
        }
    }

    #[tokio::test]
    async fn empty_memory_response_marks_the_end() {
        for is_end in [false, true] {
            let head = Head::memory(&[], "", is_end);
            let (bytes, status, _) =
                read(from_memory(head, 2, Payload { bytes: 0, pieces: Vec::new() }, false, ()).unwrap())
                    .await;
            let answer = proto::GetMemoryShuffleDataResponse::decode(message(&bytes)).unwrap();
            assert_eq!(
                answer,
                proto::GetMemoryShuffleDataResponse { is_end: Some(is_end), ..Default::default() }
            );
            assert_eq!(status, "0");
        }
    }

    #[tokio::test]
    async fn pieces_of_wrong_length_are_refused() {
        let short = Payload { bytes: 4, pieces: vec![Bytes::from_static(b"abc")] };
        assert!(from_memory(Head::local_data("OK"), 1, short, true, ()).is_err());
        assert!(Head::local_data("OK").announce(1, u64::from(u32::MAX)).is_err());
        assert!(Head::local_data("OK").announce(1, u64::MAX).is_err());
    }

    struct Script(VecDeque<Result<Bytes, String>>);

    impl Chunks for Script {
        async fn next(&mut self) -> Option<Result<Bytes, String>> {
            self.0.pop_front()
        }
    }

    fn script<const N: usize>(chunks: [Result<&'static str, &'static str>; N]) -> Script {
        let owned = |chunk: Result<&'static str, &'static str>| {
            chunk.map(|text| Bytes::from_static(text.as_bytes())).map_err(str::to_owned)
        };
        Script(chunks.into_iter().map(owned).collect())
    }

    #[tokio::test]
    async fn streamed_responses_decode_with_prost() {
        let chunks = script([Ok("abc"), Ok("de")]);
        let (bytes, status, _) =
            read(from_chunks(Head::local_index("OK", 77), 1, 5, chunks, ()).unwrap()).await;
        let answer = proto::GetLocalShuffleIndexResponse::decode(message(&bytes)).unwrap();
        assert_eq!((&answer.index_data[..], answer.data_file_len), (&b"abcde"[..], 77));
        assert_eq!((answer.ret_msg.as_str(), status.as_str()), ("OK", "0"));

        let chunks = script([Ok("abcde")]);
        let (bytes, _, _) = read(from_chunks(Head::local_data("OK"), 1, 5, chunks, ()).unwrap()).await;
        let answer = proto::GetLocalShuffleDataResponse::decode(message(&bytes)).unwrap();
        assert_eq!((&answer.data[..], answer.ret_msg.as_str()), (&b"abcde"[..], "OK"));
    }

    #[tokio::test]
    async fn broken_stream_ends_with_an_error_status() {
        let broken = [script([Ok("abc")]), script([Ok("abc"), Err("disk")]), script([Ok("abc"), Ok("def")])];
        for chunks in broken {
            let (bytes, status, _) =
                read(from_chunks(Head::local_data("OK"), 1, 5, chunks, ()).unwrap()).await;
            assert_eq!(status, "13");
            assert!(bytes.ends_with(b"abc"), "bytes beyond the announced length were sent");
        }
    }
}
