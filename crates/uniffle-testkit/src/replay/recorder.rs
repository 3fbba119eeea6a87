//! A proxy between a client and a worker that records every exchange of both planes.
//!
//! It only interprets two parts of the protocol. It replaces the servers in the response of
//! getShuffleAssignments with itself, while the worker's response is recorded. It parses a TCP
//! frame's header and request id.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use uniffle_wire::frame::{FRAME_BYTES_LIMIT, FrameHeader, HEADER_BYTES};
use uniffle_worker::proto;
use uniffle_worker::runtime::Tasks;

use super::call::{self, framed, message_of};
use crate::recording::{Plane, RecordedExchange, RecordedSession};

const ASSIGNMENTS: &str = "/rss.common.CoordinatorServer/getShuffleAssignments";

type RecordedBody = StreamBody<futures::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

/// A running proxy.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<RecorderShared>,
    tasks: Tasks,
}

#[derive(Debug)]
struct RecorderShared {
    start: Instant,
    upstream: Channel,
    upstream_tcp: Option<SocketAddr>,
    grpc: SocketAddr,
    tcp: SocketAddr,
    exchanges: Mutex<Vec<RecordedExchange>>,
}

impl Recorder {
    /// Starts a proxy on two free ports in front of the worker with these addresses.
    pub async fn start(grpc: SocketAddr, tcp: Option<SocketAddr>) -> io::Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{grpc}")).map_err(io::Error::other)?;
        let grpc_listener = TcpListener::bind("127.0.0.1:0").await?;
        let tcp_listener = TcpListener::bind("127.0.0.1:0").await?;
        let shared = Arc::new(RecorderShared {
            start: Instant::now(),
            upstream: endpoint.connect().await.map_err(io::Error::other)?,
            upstream_tcp: tcp,
            grpc: grpc_listener.local_addr()?,
            tcp: tcp_listener.local_addr()?,
            exchanges: Mutex::default(),
        });
        let tasks = Tasks::new();
        let (all, all_tasks) = (Arc::clone(&shared), tasks.clone());
        accept(grpc_listener, &tasks, move |socket, number| {
            let stop = all_tasks.cancelled();
            let served = serve_grpc(Arc::clone(&all), socket, number);
            all_tasks.spawn("recorded grpc connection", until(stop, served));
        });
        let (all, all_tasks) = (Arc::clone(&shared), tasks.clone());
        accept(tcp_listener, &tasks, move |socket, number| {
            let stop = all_tasks.cancelled();
            let served = serve_tcp(Arc::clone(&all), socket, number);
            all_tasks.spawn("recorded tcp connection", until(stop, served));
        });
        Ok(Self { shared, tasks })
    }

    /// Returns the address for clients.
    pub fn address(&self) -> SocketAddr {
        self.shared.grpc
    }

    /// Stops the proxy and returns the recorded session.
    pub async fn stop(self, title: &str) -> RecordedSession {
        self.tasks.cancel();
        self.tasks.drained().await;
        let mut exchanges = std::mem::take(&mut *self.shared.exchanges.lock());
        exchanges.sort_by_key(|exchange| (exchange.began_us, exchange.ended_us));
        RecordedSession { title: title.to_owned(), exchanges }
    }
}

fn accept(listener: TcpListener, tasks: &Tasks, serve: impl Fn(TcpStream, u32) + Send + 'static) {
    let stop = tasks.cancelled();
    tasks.spawn(
        "recorder accept",
        until(stop, async move {
            for number in 0.. {
                let (socket, _) = listener.accept().await?;
                socket.set_nodelay(true)?;
                serve(socket, number);
            }
            Ok::<_, io::Error>(())
        }),
    );
}

async fn until<E>(stop: impl Future<Output = ()>, served: impl Future<Output = Result<(), E>>) {
    tokio::select! {
        () = stop => {}
        _ = served => {}
    }
}

impl RecorderShared {
    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).expect("a recording is shorter than 2^64 µs")
    }

    fn record(&self, exchange: RecordedExchange) {
        self.exchanges.lock().push(exchange);
    }
}

async fn serve_grpc(shared: Arc<RecorderShared>, socket: TcpStream, connection: u32) -> hyper::Result<()> {
    let service = service_fn(move |request| forward(Arc::clone(&shared), request, connection));
    http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), service).await
}

/// Forwards one unary call.
async fn forward(
    shared: Arc<RecorderShared>,
    request: Request<Incoming>,
    connection: u32,
) -> io::Result<Response<RecordedBody>> {
    let (head, body) = request.into_parts();
    let request = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let began_us = shared.now_us();
    let path = head.uri.path().to_owned();
    let answered = call::forward(&shared.upstream, Request::from_parts(head, request.clone())).await?;
    let (status, answer) = (answered.status(), message_of(&answered.body));
    let body = if path == ASSIGNMENTS { shared.assignments(&answer) } else { answered.body };
    shared.record(RecordedExchange {
        began_us,
        ended_us: shared.now_us(),
        connection,
        plane: Plane::Grpc { path, status },
        request: message_of(&request),
        answer,
    });
    let mut frames = vec![Ok(Frame::data(body))];
    frames.extend(answered.trailers.map(|trailers| Ok(Frame::trailers(trailers))));
    Ok(Response::from_parts(answered.headers, StreamBody::new(futures::stream::iter(frames))))
}

impl RecorderShared {
    /// Replaces the servers of the assignments with this proxy.
    fn assignments(&self, answer: &Bytes) -> Bytes {
        let mut answer = proto::GetShuffleAssignmentsResponse::decode(answer.clone()).unwrap();
        for server in answer.assignments.iter_mut().flat_map(|range| &mut range.server) {
            server.ip = self.grpc.ip().to_string();
            server.port = i32::from(self.grpc.port());
            server.netty_port = i32::from(self.tcp.port());
            server.id = format!("{}-{}-{}", server.ip, server.port, server.netty_port);
        }
        framed(&answer.encode_to_vec())
    }
}

/// Requests without a response yet. Ids are unique among them: only retries reuse an id.
type OpenRequests = Mutex<HashMap<i64, (u64, Bytes)>>;

async fn serve_tcp(shared: Arc<RecorderShared>, client: TcpStream, connection: u32) -> io::Result<()> {
    let server = TcpStream::connect(shared.upstream_tcp.ok_or(io::ErrorKind::Unsupported)?).await?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let open = OpenRequests::default();
    let requests = async {
        loop {
            let frame = read_frame(&mut from_client).await?;
            open.lock().insert(request_id(&frame), (shared.now_us(), frame.clone()));
            to_server.write_all(&frame).await?;
        }
    };
    let answers = async {
        loop {
            let answer = read_frame(&mut from_server).await?;
            let open_request = open.lock().remove(&request_id(&answer));
            if let Some((began_us, request)) = open_request {
                let (ended_us, plane) = (shared.now_us(), Plane::Tcp);
                let answer = answer.clone();
                shared.record(RecordedExchange { began_us, ended_us, connection, plane, request, answer });
            }
            to_client.write_all(&answer).await?;
        }
    };
    tokio::select! {
        ended = requests => ended,
        ended = answers => ended,
    }
}

/// Reads a whole frame, including the header.
async fn read_frame(socket: &mut (impl tokio::io::AsyncRead + Unpin)) -> io::Result<Bytes> {
    let mut bytes = [0; HEADER_BYTES];
    socket.read_exact(&mut bytes).await?;
    let header = FrameHeader::decode(&bytes, FRAME_BYTES_LIMIT)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let mut frame = bytes.to_vec();
    frame.resize(HEADER_BYTES + header.message_bytes as usize + header.body_bytes as usize, 0);
    socket.read_exact(&mut frame[HEADER_BYTES..]).await?;
    Ok(frame.into())
}

/// Returns the request id of a frame of any type.
pub(super) fn request_id(frame: &Bytes) -> i64 {
    let message = &frame[HEADER_BYTES..];
    message.first_chunk().map_or(-1, |bytes| i64::from_be_bytes(*bytes))
}
