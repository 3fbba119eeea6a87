//! gRPC below its messages: calls with raw bytes, and access to the fields of a message by number.
//!
//! Generated types would drop unknown fields, and a recorded client may be newer than the types.

use std::io;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Full};
use tonic::transport::Channel;
use tower::ServiceExt as _;

/// Compressed flag and length before a message.
const PREFIX_BYTES: usize = 5;

/// Response of a unary call.
#[derive(Debug)]
pub struct UnaryResponse {
    pub headers: http::response::Parts,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

/// Forwards a unary call whose body is complete.
pub async fn forward(channel: &Channel, request: Request<Bytes>) -> io::Result<UnaryResponse> {
    let request = request.map(|body| tonic::body::Body::new(Full::new(body)));
    let answer = channel.clone().oneshot(request).await.map_err(io::Error::other)?;
    let (headers, body) = answer.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?;
    let trailers = body.trailers().cloned();
    Ok(UnaryResponse { headers, body: body.to_bytes(), trailers })
}

/// Calls `path` with a message. Returns `grpc-status` and message of the response.
pub async fn call(channel: &Channel, path: &str, message: &Bytes) -> io::Result<(u32, Bytes)> {
    let request = Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(framed(message))
        .map_err(io::Error::other)?;
    let answered = forward(channel, request).await?;
    Ok((answered.status(), message_of(&answered.body)))
}

impl UnaryResponse {
    /// Returns `grpc-status` from the trailers or the headers.
    pub fn status(&self) -> u32 {
        let of = |headers: &HeaderMap| headers.get("grpc-status")?.to_str().ok()?.parse().ok();
        self.trailers.as_ref().and_then(of).or_else(|| of(&self.headers.headers)).unwrap_or(0)
    }
}

/// Returns a message with its prefix.
pub fn framed(message: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    body.put_u8(0);
    body.put_u32(u32::try_from(message.len()).expect("a message of a recording has at most 4 GiB"));
    body.put_slice(message);
    body.freeze()
}

/// Returns the message of a unary body. Empty if there is none (an error with trailers only).
pub fn message_of(body: &Bytes) -> Bytes {
    assert!(body.first().is_none_or(|compressed| *compressed == 0), "compressed messages are not supported");
    body.slice(PREFIX_BYTES.min(body.len())..)
}

/// Returns the last value of a varint field, or 0, which protobuf omits.
pub fn varint(message: &[u8], field: u64) -> u64 {
    let values = fields(message).into_iter().filter(|found| found.number == field);
    values.filter_map(|found| found.varint).next_back().unwrap_or(0)
}

/// Returns the message with `value` in a varint field. All other fields stay, including unknown
/// ones.
pub fn with_varint(message: &[u8], field: u64, value: u64) -> Bytes {
    let mut out = BytesMut::with_capacity(message.len() + 11);
    let mut is_written = false;
    for found in fields(message) {
        if found.number != field {
            out.put_slice(found.bytes);
        } else if !is_written {
            put_varint(&mut out, field << 3);
            put_varint(&mut out, value);
            is_written = true;
        }
    }
    if !is_written {
        put_varint(&mut out, field << 3);
        put_varint(&mut out, value);
    }
    out.freeze()
}

struct Field<'a> {
    number: u64,
    varint: Option<u64>,
    /// Key and value.
    bytes: &'a [u8],
}

/// Splits a message, which must be well-formed, into fields.
fn fields(message: &[u8]) -> Vec<Field<'_>> {
    let mut found = Vec::new();
    let mut rest = message;
    while rest.has_remaining() {
        let start = rest;
        let key = get_varint(&mut rest);
        let mut value = None;
        match key & 7 {
            0 => value = Some(get_varint(&mut rest)),
            1 => rest.advance(8),
            2 => {
                let length = get_varint(&mut rest);
                rest.advance(usize::try_from(length).expect("the field is within a message in memory"));
            }
            5 => rest.advance(4),
            wire_type => panic!("unknown wire type {wire_type} at byte {}", message.len() - start.len()),
        }
        let bytes = &start[..start.len() - rest.len()];
        found.push(Field { number: key >> 3, varint: value, bytes });
    }
    found
}

fn get_varint(rest: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = rest.get_u8();
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn put_varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8((value & 0x7f) as u8);
}

#[test]
fn replacing_a_field_preserves_others() {
    // 1: "ab", 3: -1, 4: fixed 32, 9: 5
    let message = [&[0x0a, 2, b'a', b'b', 0x18][..], &[0xff; 9], &[1, 0x25, 1, 2, 3, 4, 0x48, 5]].concat();
    assert_eq!((varint(&message, 3), varint(&message, 9), varint(&message, 7)), (u64::MAX, 5, 0));
    let replaced = with_varint(&message, 3, 300);
    assert_eq!(replaced[..], [0x0a, 2, b'a', b'b', 0x18, 0xac, 2, 0x25, 1, 2, 3, 4, 0x48, 5]);
    assert_eq!(varint(&with_varint(&replaced, 12, 7), 12), 7);
}
