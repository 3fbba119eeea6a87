//! gRPC's framing of one unary message over an HTTP body, and the headers and trailers of responses
//! that are built without tonic.
//!
//! It does not interpret messages. Invariant: no buffer is sized by an announced length before that
//! is checked.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use prost::Message;
use tonic::body::Body;
use tonic::{Code, Status};

use super::progress::FrameWait;
use crate::clock::Instant;

/// Size of the prefix: one byte of flags and the message's length, big-endian.
pub(super) const PREFIX_BYTES: usize = 5;

/// Bounds of a request body: `Incoming` in the server, a scripted body in tests.
pub(in crate::listeners::grpc) trait RequestBody:
    http_body::Body<Data = Bytes, Error: std::fmt::Display> + Send + Unpin + 'static
{
}
impl<B: http_body::Body<Data = Bytes, Error: std::fmt::Display> + Send + Unpin + 'static> RequestBody for B {}

/// Returns the next data of `body`, never empty, or `None` at its end. Taking data releases flow
/// control. Within a call, the client has `grpc.frame_timeout_sec` for each frame, and less while
/// the connection closes. Outside of calls there is no deadline.
pub(in crate::listeners::grpc) async fn next_data<B: RequestBody>(
    body: &mut B,
) -> Result<Option<Bytes>, Status> {
    next_data_paced(body, |_| Ok(None))
        .await
        .map(|data| data.unwrap_or_else(|never: Infallible| match never {}))
}

/// Returns the next data like [`next_data`]. While none has arrived, `check` decides whether to
/// wait further. It returns when to check again, or `None` if only the frame's deadline counts. The
/// outer error is a broken call, the inner one is that of `check`, which ends the wait.
pub(in crate::listeners::grpc) async fn next_data_paced<B: RequestBody, E>(
    body: &mut B,
    mut check: impl FnMut(Instant) -> Result<Option<Instant>, E>,
) -> Result<Result<Option<Bytes>, E>, Status> {
    loop {
        let mut waiting = None;
        let next = poll_fn(|context| {
            if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(context) {
                return Poll::Ready(Ok(Ok(frame)));
            }
            let waiting = waiting.get_or_insert_with(FrameWait::begin);
            match check(Instant::now()) {
                Ok(look) if waiting.is_overdue(look) => Poll::Ready(Err(waiting.late())),
                Ok(_) => Poll::Pending,
                Err(refused) => Poll::Ready(Ok(Err(refused))),
            }
        });
        let frame = match next.await? {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(Ok(None)),
            Err(refused) => return Ok(Err(refused)),
        };
        let frame = frame.map_err(|error| Status::cancelled(format!("request aborted: {error}")))?;
        // gRPC has no request trailers.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Ok(Ok(Some(data)));
        }
    }
}

/// Reads the prefix. Returns the message's length, and the bytes received with the prefix.
pub(in crate::listeners::grpc) async fn read_prefix<B: RequestBody>(
    body: &mut B,
    length_max: u32,
) -> Result<(u32, Bytes), Status> {
    let mut seen = BytesMut::new();
    loop {
        let Some(mut data) = next_data(body).await? else {
            return Err(Status::internal("request has no message"));
        };
        if seen.is_empty() && data.len() >= PREFIX_BYTES {
            let length = parse_prefix(data.get_u8(), data.get_u32(), length_max)?;
            return Ok((length, data));
        }
        seen.extend_from_slice(&data);
        if seen.len() >= PREFIX_BYTES {
            let length = parse_prefix(seen.get_u8(), seen.get_u32(), length_max)?;
            return Ok((length, seen.freeze()));
        }
    }
}

fn parse_prefix(flags: u8, length: u32, length_max: u32) -> Result<u32, Status> {
    match flags {
        0 => {}
        1 => return Err(Status::unimplemented("compressed messages are not supported")),
        _ => return Err(Status::internal("message has unknown flags")),
    }
    if length > length_max {
        return Err(Status::resource_exhausted(format!(
            "message has {length} bytes, the limit is {length_max} bytes"
        )));
    }
    Ok(length)
}

/// Builds the HTTP response around `body`.
pub(super) fn respond(body: Body) -> http::Response<Body> {
    let mut response = http::Response::new(body);
    response.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Builds the response to a call from a small `message`.
pub(in crate::listeners::grpc) fn respond_message(message: &impl Message) -> http::Response<Body> {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.extend_from_slice(&[0]);
    // The largest have a status, a text and the partition ids of a ticket request. The length fits.
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    message.encode_raw(&mut bytes);
    let body = http_body_util::Full::new(bytes.freeze());
    respond(Body::new(body.with_trailers(async { Some(Ok(ok_trailers())) })))
}

/// Returns the trailers of a call that succeeded on the gRPC level.
pub(super) fn ok_trailers() -> HeaderMap {
    status_trailers(&Status::new(Code::Ok, ""))
}

/// Returns the trailers that carry `status`.
pub(super) fn status_trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    if status.add_header(&mut trailers).is_err() {
        // Only a text that is no valid header value can fail. The code is then sent alone.
        trailers.insert("grpc-status", HeaderValue::from(i32::from(status.code())));
    }
    trailers
}

#[cfg(test)]
pub(in crate::listeners::grpc) mod tests {
    use futures::stream;
    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;
    use crate::proto;

    /// Returns a body that yields `pieces` one by one.
    pub(in crate::listeners::grpc) fn body_of(pieces: Vec<Bytes>) -> impl RequestBody {
        StreamBody::new(stream::iter(pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece)))))
    }

    /// Encodes `message` with its prefix, in pieces of `cut` bytes.
    pub(in crate::listeners::grpc) fn framed(message: &impl Message, cut: usize) -> Vec<Bytes> {
        let bytes = message.encode_to_vec();
        let mut all = vec![0];
        all.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_be_bytes());
        all.extend_from_slice(&bytes);
        all.chunks(cut).map(Bytes::copy_from_slice).collect()
    }

    #[tokio::test]
    async fn small_responses_carry_message_and_status() {
        let answer = proto::SendShuffleDataResponse { status: 6, ret_msg: "no".into() };
        let collected = respond_message(&answer).into_body().collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
        let bytes = collected.to_bytes();
        assert_eq!(proto::SendShuffleDataResponse::decode(&bytes[5..]).unwrap(), answer);
    }
}
