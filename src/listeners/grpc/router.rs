//! Routes one call by path to a method served here or to tonic's router, with metrics and a
//! deadline.
//!
//! Connections are handled in `server`. Invariant: a call is answered within its deadline. Its type
//! is infallible, so every failure becomes a gRPC status.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use fastrace::Span;
use futures::FutureExt as _;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::server::TcpConnectInfo;
use tower::ServiceExt;

use super::calls::convert::note_broken_call;
use super::calls::{bookkeeping, ingest, reads};
use super::config::GrpcConfig;
use super::metrics::methods::{
    GET_LOCAL_SHUFFLE_DATA, GET_LOCAL_SHUFFLE_INDEX, GET_MEMORY_SHUFFLE_DATA, GET_SHUFFLE_RESULT,
    GET_SHUFFLE_RESULT_FOR_MULTI_PART, REGISTER_SHUFFLE, REPORT_SHUFFLE_RESULT, REQUIRE_BUFFER,
    SEND_SHUFFLE_DATA,
};
use super::metrics::{GrpcMetrics, TransitMetrics, label};
use super::transport::heap_estimate::{flat, nested, numbers};
use super::transport::replies;
use super::transport::request_collector::{
    INLINE_BYTES_MAX, RequestCollector, RequestHeap, excused, run_blocking,
};
use crate::clock::timeout;
use crate::runtime::{BlockingPool, Tasks};
use crate::service::{ReadLimits, Service};
use uniffle_base::budget::Charge;

/// Path prefixes of calls that need the caller's address.
const CALLER_PATHS: [&str; 2] =
    ["/rss.common.ShuffleServerInternal/", "/rss.common.CoordinatorServer/heartbeat"];

/// W3C trace context header, as sent by gRPC clients with tracing.
const TRACEPARENT: &str = "traceparent";

/// Largest request of calls served by tonic: ids and short texts, or a coordinator's view of a
/// worker.
const OTHER_BYTES_MAX: u32 = 4 << 20;

/// Largest request of registrations, reports, and results of several partitions.
const SMALL_CALL_BYTES_MAX: u32 = 64 << 20;

/// The connection of a call.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) peer: SocketAddr,
    pub(super) collector: RequestCollector,
    pub(super) reading: ReadLimits,
    /// Permits for ticket requests that may wait in line. Without one a request is granted or
    /// refused at once, so nobody waits here.
    pub(super) tickets: Semaphore,
}

/// State shared by all connections.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) config: GrpcConfig,
    pub(super) service: Arc<Service>,
    pub(super) routes: Routes,
    pub(super) metrics: GrpcMetrics,
    pub(super) tasks: Tasks,
    pub(super) requests: RequestHeap,
}

/// Encodes a response that carries its charge. Large ones are encoded on a blocking thread. The
/// charge lives until the socket has the bytes.
async fn charged(pool: &BlockingPool, mut response: Response<Body>) -> Result<Response<Body>, Status> {
    let Some(charge) = response.extensions_mut().remove::<Arc<Charge>>() else { return Ok(response) };
    let is_small = charge.bytes() <= INLINE_BYTES_MAX as u64;
    let body = response.into_body();
    let held = Arc::clone(&charge);
    let encode = move || {
        let encoded = body.collect().now_or_never();
        drop(held);
        encoded
    };
    let encoded = run_blocking(pool, is_small, encode).await?;
    let encoded = encoded.ok_or_else(|| excused(Status::internal("the response is not complete")))??;
    Ok(replies::whole(encoded.to_bytes(), charge))
}

impl Router {
    /// Serves one call.
    pub(super) async fn call(
        self: Arc<Self>,
        mut request: Request<Incoming>,
        caller: Arc<Caller>,
    ) -> Result<Response<Body>, Infallible> {
        let _span = self.span(&request);
        if CALLER_PATHS.iter().any(|path| request.uri().path().starts_with(path)) {
            // Same as in tonic's own server.
            let remote_addr = Some(caller.peer);
            request.extensions_mut().insert(TcpConnectInfo { local_addr: None, remote_addr });
        }
        self.counted(request, &caller).await
    }

    /// Starts the span of a call. Without tracing it does no lookups.
    fn span(&self, request: &Request<Incoming>) -> Span {
        if self.config.traces.is_off() {
            return Span::noop();
        }
        let parent = request.headers().get(TRACEPARENT).and_then(|value| value.to_str().ok());
        self.config.traces.begin(label(request.uri().path()), parent)
    }

    async fn counted(
        self: Arc<Self>,
        request: Request<Incoming>,
        caller: &Caller,
    ) -> Result<Response<Body>, Infallible> {
        let _counted = self.metrics.begin(request.uri().path());
        if request.uri().path() == SEND_SHUFFLE_DATA {
            // Has its own deadline, because it continues to read after that.
            return Ok(ingest::send_shuffle_data(
                &self.service,
                &self.config,
                &self.tasks,
                &self.metrics.transit().send,
                request.into_body(),
            )
            .await);
        }
        let answer = timeout(self.config.call_deadline, Box::pin(self.small_call(request, caller))).await;
        let answer = answer.unwrap_or_else(|_elapsed| Err(Status::deadline_exceeded("call timed out")));
        Ok(answer.unwrap_or_else(|status| {
            note_broken_call(&self.service, &status);
            status.into_http()
        }))
    }

    /// Serves a call whose request is collected before it is decoded.
    async fn small_call(
        &self,
        request: Request<Incoming>,
        caller: &Caller,
    ) -> Result<Response<Body>, Status> {
        let Caller { collector, reading, .. } = caller;
        let small = self.config.read_request_bytes_max;
        let TransitMetrics { memory, local_data, .. } = self.metrics.transit();
        let service = &self.service;
        match request.uri().path() {
            REQUIRE_BUFFER => {
                let (request, _charge) = collector.message(&mut request.into_body(), small, numbers).await?;
                ingest::require_buffer(service, &caller.tickets, request).await
            }
            GET_MEMORY_SHUFFLE_DATA => {
                let (request, _charge) = collector.message(&mut request.into_body(), small, flat).await?;
                reads::memory(service, memory, &collector.pool, reading, request).await
            }
            GET_LOCAL_SHUFFLE_INDEX => {
                let (request, _charge) = collector.message(&mut request.into_body(), small, flat).await?;
                reads::local_index(service, reading, request).await
            }
            GET_LOCAL_SHUFFLE_DATA => {
                let (request, _charge) = collector.message(&mut request.into_body(), small, nested).await?;
                reads::local_data(service, local_data, reading, request).await
            }
            REGISTER_SHUFFLE => {
                let (request, _charge) =
                    collector.message(&mut request.into_body(), SMALL_CALL_BYTES_MAX, nested).await?;
                bookkeeping::register(service, caller.peer.ip(), request).await
            }
            REPORT_SHUFFLE_RESULT => {
                let (request, _charge) =
                    collector.message(&mut request.into_body(), SMALL_CALL_BYTES_MAX, nested).await?;
                bookkeeping::report(service, request).await
            }
            GET_SHUFFLE_RESULT => {
                let (request, _charge) = collector.message(&mut request.into_body(), small, numbers).await?;
                bookkeeping::result(service, request).await
            }
            GET_SHUFFLE_RESULT_FOR_MULTI_PART => {
                let (request, _charge) =
                    collector.message(&mut request.into_body(), SMALL_CALL_BYTES_MAX, numbers).await?;
                bookkeeping::result_of_many(service, &collector.pool, request).await
            }
            _ => {
                let (request, _charge) = collector.whole(request, OTHER_BYTES_MAX).await?;
                match self.routes.clone().oneshot(request).await {
                    Ok(response) => charged(&self.requests.pool, response).await,
                    Err(never) => match never {},
                }
            }
        }
    }
}
