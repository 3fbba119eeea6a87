//! An HTTP/2 connection that frames like grpc-java and sends payload without copying it.
//!
//! hyper gets a request in chunks of at most 65,537 bytes, as Netty does from grpc-java
//! (docs/design/data-path.md §3), and splits them if the server accepts only smaller frames. Frames
//! of concurrent calls on a connection are interleaved. Responses are collected in one buffer. The
//! meaning of the calls is in [`super::session`].

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::message::MessagePieces;

/// Largest chunk that hyper gets at once. grpc-java passes as much to Netty: the high watermark of
/// 64 KiB plus the byte that exceeds it.
const CHUNK_BYTES_MAX: usize = 65_537;
/// grpc-java's default window, for streams and for the connection.
pub(crate) const JAVA_WINDOW_BYTES: u32 = 1 << 20;
/// Largest accepted response.
const RESPONSE_BYTES_MAX: usize = 1 << 30;

/// A list of pieces, none of them empty, that acts as one buffer.
#[derive(Debug)]
pub(crate) struct Chunk {
    pieces: VecDeque<Bytes>,
    remaining: usize,
}

impl Buf for Chunk {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |piece| piece)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let filled = slices.iter_mut().zip(&self.pieces);
        filled.map(|(slice, piece)| *slice = IoSlice::new(piece)).count()
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.remaining, "cannot advance beyond the end");
        self.remaining -= count;
        while count > 0 {
            let front = self.pieces.front_mut().expect("pieces have `remaining` bytes");
            if front.len() > count {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.pieces.pop_front();
        }
    }
}

/// A request body that is sent in chunks of at most [`CHUNK_BYTES_MAX`] bytes.
#[derive(Debug)]
pub(crate) struct ChunkedBody {
    pieces: VecDeque<Bytes>,
    remaining: usize,
}

impl ChunkedBody {
    /// Creates the body of `message`, preceded by gRPC's five-byte prefix.
    fn new(message: MessagePieces) -> anyhow::Result<Self> {
        let mut head = BytesMut::with_capacity(5);
        head.put_u8(0);
        head.put_u32(u32::try_from(message.length).context("the message does not fit gRPC")?);
        let mut pieces = VecDeque::from(message.pieces);
        pieces.push_front(head.freeze());
        Ok(Self { pieces, remaining: message.length + 5 })
    }

    fn next_chunk(&mut self) -> Chunk {
        let remaining = self.remaining.min(CHUNK_BYTES_MAX);
        let mut chunk = Chunk { pieces: VecDeque::new(), remaining };
        let mut left = remaining;
        while left > 0 {
            let front = self.pieces.front_mut().expect("pieces have `remaining` bytes");
            let piece = front.split_to(front.len().min(left));
            left -= piece.len();
            chunk.pieces.push_back(piece);
            if front.is_empty() {
                self.pieces.pop_front();
            }
        }
        self.remaining -= remaining;
        chunk
    }
}

impl Body for ChunkedBody {
    type Data = Chunk;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Chunk>, Self::Error>>> {
        if self.remaining == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::data(self.next_chunk()))))
    }

    fn is_end_stream(&self) -> bool {
        self.remaining == 0
    }

    fn size_hint(&self) -> SizeHint {
        // Java sends no content-length either.
        SizeHint::default()
    }
}

/// A connection. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct GrpcConnection {
    sender: SendRequest<ChunkedBody>,
    address: SocketAddr,
    rpc_timeout: Duration,
}

impl GrpcConnection {
    /// Connects with Java's settings. A peer without HTTP/2 is noticed only at the first call.
    pub(crate) async fn connect(address: SocketAddr, rpc_timeout: Duration) -> anyhow::Result<Self> {
        let stream = timeout(rpc_timeout, TcpStream::connect(address))
            .await
            .map_err(|_| anyhow!("connect to {address}: no answer"))?
            .with_context(|| format!("connect to {address}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(JAVA_WINDOW_BYTES)
            .initial_connection_window_size(JAVA_WINDOW_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .with_context(|| format!("HTTP/2 with {address}"))?;
        // The task ends when the last sender is dropped. Pending calls receive its errors.
        hyper::rt::Executor::execute(&TokioExecutor::new(), async move {
            let _ = connection.await;
        });
        Ok(Self { sender, address, rpc_timeout })
    }

    /// Makes one unary call.
    pub(crate) async fn call<A: prost::Message + Default>(
        &self,
        path: &'static str,
        message: MessagePieces,
    ) -> anyhow::Result<A> {
        let response = timeout(self.rpc_timeout, self.exchange(path, message)).await;
        let response = response.map_err(|_| {
            anyhow!("{path}: no answer from {} within {:?}", self.address, self.rpc_timeout)
        })??;
        A::decode(response).with_context(|| format!("{path}: cannot decode the response"))
    }

    /// Encodes `request` and makes one unary call. Meant for small requests.
    pub(crate) async fn call_encoded<R: prost::Message, A: prost::Message + Default>(
        &self,
        path: &'static str,
        request: &R,
    ) -> anyhow::Result<A> {
        let bytes = Bytes::from(request.encode_to_vec());
        let pieces = MessagePieces { length: bytes.len(), pieces: vec![bytes] };
        self.call(path, pieces).await
    }

    async fn exchange(&self, path: &'static str, message: MessagePieces) -> anyhow::Result<Bytes> {
        let request = hyper::Request::post(format!("http://{}{path}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("user-agent", "uniffle-bench")
            .body(ChunkedBody::new(message)?)?;
        let mut sender = self.sender.clone();
        let connection_lost =
            || format!("{} closed the connection or does not speak gRPC on this port", self.address);
        sender.ready().await.with_context(connection_lost)?;
        let response = sender.send_request(request).await.with_context(connection_lost)?;
        let (head, body) = response.into_parts();
        ensure!(head.status == 200, "{path}: HTTP status {}, not a gRPC response", head.status);
        check_status(path, &head.headers)?;
        collect(path, body).await
    }
}

fn check_status(path: &str, headers: &http::HeaderMap) -> anyhow::Result<()> {
    let Some(status) = headers.get("grpc-status") else { return Ok(()) };
    if status == "0" {
        return Ok(());
    }
    let message = headers.get("grpc-message").and_then(|text| text.to_str().ok()).unwrap_or("");
    bail!("{path}: gRPC status {} {message}", status.to_str().unwrap_or("?"))
}

/// Collects the message of a response into one buffer.
async fn collect(path: &'static str, mut body: Incoming) -> anyhow::Result<Bytes> {
    let mut message = BytesMut::new();
    let mut missing: Option<usize> = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.with_context(|| format!("{path}: the response is truncated"))?;
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(frame) => {
                if let Some(trailers) = frame.trailers_ref() {
                    check_status(path, trailers)?;
                }
                continue;
            }
        };
        if let Some(missing) = missing {
            ensure!(data.len() <= missing, "{path}: more bytes than announced");
        }
        message.extend_from_slice(&data);
        if missing.is_none() && message.len() >= 5 {
            let length = parse_prefix(path, &message)?;
            ensure!(message.len() - 5 <= length, "{path}: more bytes than announced");
            message.advance(5);
            message.reserve(length - message.len());
            missing = Some(length - message.len());
        } else if let Some(missing) = &mut missing {
            *missing -= data.len();
        }
    }
    ensure!(missing == Some(0), "{path}: the response has no complete message");
    Ok(message.freeze())
}

/// Returns the length of the message in gRPC's prefix, with which `head` begins.
fn parse_prefix(path: &str, mut head: &[u8]) -> anyhow::Result<usize> {
    ensure!(head.get_u8() == 0, "{path}: the response is compressed");
    let length = usize::try_from(head.get_u32())?;
    ensure!(
        length <= RESPONSE_BYTES_MAX,
        "{path}: the response has {length} bytes, the limit is {RESPONSE_BYTES_MAX}"
    );
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_chunks_match_grpc_java() {
        let pieces: Vec<Bytes> = (0..20_u8).map(|n| vec![n; 14_336].into()).collect();
        let message = MessagePieces { length: 20 * 14_336, pieces: pieces.clone() };
        let mut request = ChunkedBody::new(message).unwrap();
        let (mut all, mut lengths) = (Vec::new(), Vec::new());
        while request.remaining > 0 {
            let mut chunk = request.next_chunk();
            lengths.push(chunk.remaining());
            let mut slices = [IoSlice::new(&[]); 64];
            let filled = chunk.chunks_vectored(&mut slices);
            assert_eq!(slices[..filled].iter().map(|s| s.len()).sum::<usize>(), chunk.remaining());
            while chunk.has_remaining() {
                let part = chunk.remaining().min(999);
                all.extend_from_slice(&chunk.copy_to_bytes(part));
            }
        }
        assert_eq!(lengths, [65_537, 65_537, 65_537, 65_537, 286_725 - 4 * 65_537]);
        assert_eq!(all[..5], [0, 0, 4, 0x60, 0]);
        assert_eq!(all[5..], pieces.concat());
    }
}
