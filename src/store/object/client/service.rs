//! One attempt of a request: permit, connection, deadline, response and metrics.
//!
//! `object_store` retries by the kinds of the errors returned here. It repeats a request that may
//! have reached the server only if that is harmless.
//!
//! Invariant: every wait has a deadline, except that for a permit and that of a long response for
//! its reader. A response that waits for its reader keeps its permit, so `answers_ahead` limits
//! their number below that of the permits. Uploads of data never take the permits of reads.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HOST, RANGE};
use http::{HeaderValue, Uri};
use hyper::body::{Body as _, Incoming};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::answer::{AnswerBounds, StoreAnswer, StoreRequest, too_long};
use super::connect::{Connector, Untrusted};
use super::metrics::{Metrics, Reason};
use super::operation::StoreOperation;
use super::pool::{ConnectionPool, ServerOrigin, StoreConnection};
use crate::clock::{Instant, timeout_at};

/// Limit for the text of an error. Real texts have a few hundred bytes.
const ERROR_BYTES_MAX: u64 = 64 << 10;
/// Limit for responses other than objects. A list of 1,000 keys of 1,024 bytes is smaller, even if
/// every byte is escaped.
const TEXT_BYTES_MAX: u64 = 16 << 20;
/// Limit for objects that are read whole: claims, saved settings and parts of the metadata log.
const WHOLE_BYTES_MAX: u64 = 1 << 30;
/// Number of failed attempts remembered to recognize retries.
const FAILED_MAX: usize = 1024;
/// Slowest acceptable rate of a body.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

/// Timeouts of an attempt and of a pause in the response.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttemptTimeouts {
    pub(super) request: Duration,
    pub(super) stall: Duration,
}

/// HTTP transport of `object_store`. Clones share all state.
#[derive(Clone)]
pub(super) struct HttpTransport(Arc<ServiceState>);

struct ServiceState {
    connector: Connector,
    pool: Arc<ConnectionPool>,
    uploads: Arc<Semaphore>,
    others: Arc<Semaphore>,
    timeouts: AttemptTimeouts,
    metrics: Arc<Metrics>,
    /// Fingerprints of failed attempts, the newest last.
    failed: Mutex<VecDeque<u64>>,
}

impl fmt::Debug for HttpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpTransport").field("pool", &self.0.pool).finish_non_exhaustive()
    }
}

impl HttpConnector for HttpTransport {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

impl HttpService for HttpTransport {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.0.attempt(request))
    }
}

impl HttpTransport {
    pub(super) fn new(
        connector: Connector,
        max_concurrency: usize,
        timeouts: AttemptTimeouts,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self(Arc::new(ServiceState {
            connector,
            pool: Arc::new(ConnectionPool::new(2 * max_concurrency)),
            uploads: Arc::new(Semaphore::new(max_concurrency)),
            others: Arc::new(Semaphore::new(max_concurrency)),
            timeouts,
            metrics,
            failed: Mutex::new(VecDeque::new()),
        }))
    }
}

/// Properties of a request that determine the handling of its response.
struct RequestInfo {
    operation: StoreOperation,
    has_range: bool,
    deadline: Instant,
    fingerprint: u64,
}

impl ServiceState {
    async fn attempt(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let operation = StoreOperation::of(request.method(), request.uri());
        let permits = if operation.is_upload() { &self.uploads } else { &self.others };
        let permit =
            Arc::clone(permits).acquire_owned().await.map_err(|closed| wrong(&closed.to_string()))?;

        let (label, begun) = (operation.as_str(), Instant::now());
        let fingerprint = fingerprint(&request);
        let body_bytes = request.body().content_length() as u64;
        self.metrics.requests.with_label_values(&[label]).inc();
        if self.is_retry(fingerprint) {
            self.metrics.retries.with_label_values(&[label]).inc();
        }
        self.metrics.sent_bytes.inc_by(body_bytes);
        self.metrics.in_flight.inc();
        let under_way = StoreRequest { metrics: Arc::clone(&self.metrics), label, begun, _permit: permit };

        let deadline = begun + self.timeouts.request + transfer_time(body_bytes);
        let has_range = request.headers().contains_key(RANGE);
        let info = RequestInfo { operation, has_range, deadline, fingerprint };
        let answered = match timeout_at(deadline, self.exchange(request)).await {
            Ok(answered) => answered,
            Err(_) => Err((Reason::Timeout, late())),
        };
        let (answer, connection) = answered.map_err(|(reason, error)| {
            self.failed(reason, &info);
            error
        })?;
        self.answer(&info, answer, connection, under_way)
    }

    /// Sends a request. Returns the head of the response and the connection that delivers its body.
    async fn exchange(
        &self,
        request: HttpRequest,
    ) -> Result<(http::Response<Incoming>, StoreConnection), (Reason, HttpError)> {
        let origin =
            ServerOrigin::of(request.uri()).ok_or_else(|| (Reason::Refused, wrong("URL has no host")))?;
        let mut request = relative(request).map_err(|error| (Reason::Refused, error))?;
        while let Some(mut connection) = self.pool.take(&origin) {
            if connection.sender.ready().await.is_err() {
                continue;
            }
            match connection.sender.try_send_request(request).await {
                Ok(answer) => return Ok((answer, connection)),
                Err(mut failed) => match failed.take_message() {
                    // The server closed the idle connection and has not seen the request.
                    Some(unsent) => request = unsent,
                    None => return Err((Reason::Cut, interrupted(failed.into_error()))),
                },
            }
        }
        let connect = self.connector.connect(&origin).await;
        let mut connection = connect.map_err(|error| {
            if let Some(untrusted) = Untrusted::of(&origin, &error) {
                return (Reason::Refused, HttpError::new(HttpErrorKind::Unknown, untrusted));
            }
            let error =
                std::io::Error::new(error.kind(), format!("{}:{}: {error}", origin.host, origin.port));
            (Reason::Connect, HttpError::new(HttpErrorKind::Connect, error))
        })?;
        let answer = connection.sender.try_send_request(request).await;
        let answer = answer.map_err(|failed| (Reason::Cut, interrupted(failed.into_error())))?;
        Ok((answer, connection))
    }

    fn answer(
        &self,
        info: &RequestInfo,
        answer: http::Response<Incoming>,
        connection: StoreConnection,
        under_way: StoreRequest,
    ) -> Result<HttpResponse, HttpError> {
        let (head, body) = answer.into_parts();
        if let Some(reason) = Reason::of(head.status) {
            self.failed(reason, info);
        }
        let is_cut = !head.status.is_success();
        let bytes_max = match info.operation {
            _ if is_cut => ERROR_BYTES_MAX,
            // hyper compares the body with its length, `object_store` the range with the request.
            StoreOperation::Get if info.has_range => u64::MAX,
            StoreOperation::Get => WHOLE_BYTES_MAX,
            _ => TEXT_BYTES_MAX,
        };
        let declared_bytes = body.size_hint().lower();
        if declared_bytes > bytes_max && !is_cut {
            // `object_store` reserves memory for the declared length.
            self.failed(Reason::Damaged, info);
            return Err(too_long(bytes_max));
        }
        let deadline = info.deadline + transfer_time(declared_bytes.min(bytes_max));
        let bounds = AnswerBounds { bytes_max, is_cut, deadline, stall_timeout: self.timeouts.stall };
        let body = StoreAnswer::new(body, bounds, connection, Arc::clone(&self.pool), under_way);
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
    }

    fn failed(&self, reason: Reason, info: &RequestInfo) {
        self.metrics.failed(reason);
        let mut failed = self.failed.lock();
        if failed.len() >= FAILED_MAX {
            failed.pop_front();
        }
        failed.push_back(info.fingerprint);
    }

    fn is_retry(&self, fingerprint: u64) -> bool {
        let mut failed = self.failed.lock();
        let at = failed.iter().position(|it| *it == fingerprint);
        at.is_some_and(|at| failed.remove(at).is_some())
    }
}

fn fingerprint(request: &HttpRequest) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.method().hash(&mut hasher);
    request.uri().hash(&mut hasher);
    hasher.finish()
}

/// Returns the additional time allowed for a body of `bytes` bytes.
fn transfer_time(bytes: u64) -> Duration {
    Duration::from_secs(bytes / BYTES_PER_SECOND_MIN)
}

/// Converts a request to the form of HTTP/1.1: the path in the request line, the host in a header.
fn relative(mut request: HttpRequest) -> Result<HttpRequest, HttpError> {
    let uri = request.uri();
    let host = uri.authority().map_or("", |authority| authority.as_str());
    let host = HeaderValue::from_str(host).map_err(|error| wrong(&error.to_string()))?;
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let path: Uri = path.parse().map_err(|_| wrong("invalid path"))?;
    request.headers_mut().insert(HOST, host);
    *request.uri_mut() = path;
    Ok(request)
}

fn late() -> HttpError {
    let late = std::io::Error::new(std::io::ErrorKind::TimedOut, "request timeout");
    HttpError::new(HttpErrorKind::Timeout, late)
}

/// Creates the error of a request that the server may have seen.
fn interrupted(error: hyper::Error) -> HttpError {
    HttpError::new(HttpErrorKind::Interrupted, error)
}

fn wrong(what: &str) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(what.to_owned()))
}
