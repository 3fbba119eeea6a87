//! gRPC calls at the HTTP/2 level: arbitrary bytes in any pieces, complete, aborted or left open.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::{BufMut, Bytes, BytesMut};
use futures::{StreamExt, future, stream};
use http::{HeaderMap, Request};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use prost::Message;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::{Service, ServiceExt};
use uniffle_worker::proto::{SendShuffleDataResponse, StatusCode};

pub(crate) const SEND: &str = "/rss.common.ShuffleServer/sendShuffleData";

/// End of a request after its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Half-closed, as the protocol requires.
    Closed,
    /// Sends nothing more and does not close.
    Stalled,
}

/// The response to a raw call.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) grpc_status: Option<i32>,
    pub(crate) grpc_message: String,
    pub(crate) message: Bytes,
}

impl Answer {
    /// Returns the status and text within the response to a send.
    pub(crate) fn send_status(&self) -> (StatusCode, String) {
        assert_eq!(self.grpc_status, Some(0), "{}", self.grpc_message);
        let answer = SendShuffleDataResponse::decode(&self.message[5..]).unwrap();
        (answer.status(), answer.ret_msg)
    }
}

/// Opens a connection.
pub(crate) async fn connect(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

/// Returns `message` with a gRPC prefix.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    prefixed(&message.encode_to_vec())
}

/// Returns `bytes` with a gRPC prefix.
pub(crate) fn prefixed(bytes: &[u8]) -> Bytes {
    let mut all = BytesMut::with_capacity(bytes.len() + 5);
    all.put_u8(0);
    all.put_u32(u32::try_from(bytes.len()).unwrap());
    all.extend_from_slice(bytes);
    all.freeze()
}

/// Calls `path` with the body `pieces`.
pub(crate) async fn call(channel: &Channel, path: &str, pieces: Vec<Bytes>, end: End) -> Answer {
    let sent = stream::iter(pieces);
    let rest = match end {
        End::Closed => stream::empty().boxed(),
        End::Stalled => stream::once(future::pending::<Bytes>()).boxed(),
    };
    call_streamed(channel, path, sent.chain(rest)).await
}

/// Calls `path` with `message`. Returns the body unread.
pub(crate) async fn open(channel: &Channel, path: &str, message: Bytes) -> Body {
    let request = Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(http_body_util::Full::new(message)))
        .unwrap();
    let mut channel = channel.clone();
    channel.ready().await.unwrap().call(request).await.unwrap().into_body()
}

/// Calls `path` with a body that `pieces` produces.
pub(crate) async fn call_streamed(
    channel: &Channel,
    path: &str,
    pieces: impl stream::Stream<Item = Bytes> + Send + 'static,
) -> Answer {
    let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
    let request = Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(StreamBody::new(frames)))
        .unwrap();
    let mut channel = channel.clone();
    let response = channel.ready().await.unwrap().call(request).await.unwrap();
    let (head, body) = response.into_parts();
    let collected = body.collect().await.unwrap();
    let trailers = collected.trailers().cloned().unwrap_or_default();
    let text =
        |headers: &HeaderMap, name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    // A response without a message has its status in the headers.
    let grpc = |name: &str| text(&trailers, name).or_else(|| text(&head.headers, name));
    Answer {
        grpc_status: grpc("grpc-status").map(|status| status.parse().unwrap()),
        grpc_message: grpc("grpc-message").unwrap_or_default(),
        message: collected.to_bytes(),
    }
}
