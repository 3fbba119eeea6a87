//! Injects faults into the responses of a store, and counts its requests.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED};
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use s3s::service::S3Service;

/// Requests that can have a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Reads bytes of an object.
    Get,
    /// Reads the size of an object.
    Head,
    /// Lists objects.
    List,
    /// Puts an object in one request.
    Put,
    /// Uploads a part.
    Part,
    /// Begins an upload.
    Create,
    /// Completes an upload.
    Complete,
    /// Aborts an upload.
    Abort,
    /// Deletes an object.
    Delete,
    /// Lists uploads.
    Uploads,
}

impl On {
    fn of(method: &Method, uri: &Uri) -> Self {
        let query = uri.query().unwrap_or_default();
        let has = |name: &str| query.split('&').any(|part| part.split('=').next() == Some(name));
        match (method.as_str(), has("uploadId"), has("uploads")) {
            ("HEAD", ..) => Self::Head,
            ("PUT", true, _) => Self::Part,
            ("PUT", false, _) => Self::Put,
            ("POST", _, true) => Self::Create,
            ("POST", _, false) => Self::Complete,
            ("DELETE", true, _) => Self::Abort,
            ("DELETE", false, _) => Self::Delete,
            (_, _, true) => Self::Uploads,
            _ if has("list-type") => Self::List,
            _ => Self::Get,
        }
    }
}

/// Fault of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponseFault {
    /// No fault for this request. Planned before a fault, so that only a later request fails.
    None,
    /// Responds with this status and S3 error code, without carrying out the request.
    Refuse(u16, &'static str),
    /// Responds like [`ResponseFault::Refuse`], with an endless text.
    RefuseEndlessly(u16),
    /// Never responds. The request is not carried out.
    Hang,
    /// Closes the connection. The request is not carried out.
    Close,
    /// Carries out the request, then closes the connection.
    LoseAnswer,
    /// Closes the connection after this number of bytes of the body.
    Cut(usize),
    /// Stops sending after this number of bytes of the body.
    Stall(usize),
    /// Shortens the body by one byte, with matching headers.
    Shorter,
    /// Declares another range of the same length.
    OtherRange,
    /// Changes the first byte of the body.
    WrongByte,
    /// Declares the body as the whole object.
    Unranged,
    /// Responds with this text and status 200.
    Text(String),
    /// Responds with an endless text and status 200.
    Endless,
    /// Responds like [`ResponseFault::Endless`], and declares this length.
    Declare(u64),
    /// Carries out the request after this delay.
    Slow(Duration),
}

/// Planned faults by kind of request, and the requests so far.
#[derive(Debug, Default)]
pub struct PlannedFaults {
    planned: Mutex<Vec<(On, VecDeque<ResponseFault>)>>,
    requests: Mutex<Vec<On>>,
}

type FaultyBody = BoxBody<Bytes, io::Error>;

impl PlannedFaults {
    /// Injects `fault` into the next `times` requests of the kind, after the faults planned before.
    pub fn plan(&self, on: On, times: usize, fault: &ResponseFault) {
        let mut planned = self.planned.lock();
        let faults = std::iter::repeat_n(fault.clone(), times);
        match planned.iter_mut().find(|(kind, _)| *kind == on) {
            Some((_, queue)) => queue.extend(faults),
            None => planned.push((on, faults.collect())),
        }
    }

    /// Removes all planned faults.
    pub fn clear(&self) {
        self.planned.lock().clear();
    }

    /// Returns the number of requests of a kind, with or without faults.
    pub fn requests(&self, on: On) -> usize {
        self.requests.lock().iter().filter(|requests| **requests == on).count()
    }

    fn next(&self, on: On) -> Option<ResponseFault> {
        let mut planned = self.planned.lock();
        planned.iter_mut().find(|(kind, _)| *kind == on).and_then(|(_, queue)| queue.pop_front())
    }

    pub(super) async fn answer(
        self: Arc<Self>,
        store: S3Service,
        request: Request<Incoming>,
    ) -> Result<Response<FaultyBody>, io::Error> {
        let on = On::of(request.method(), request.uri());
        self.requests.lock().push(on);
        let Some(fault) = self.next(on) else { return carry_out(&store, request).await };
        match fault {
            ResponseFault::None => carry_out(&store, request).await,
            ResponseFault::Refuse(status, code) => {
                // A server reads the request body, so that its response is not lost to a reset.
                drop(request.into_body().collect().await);
                Ok(error(status, code))
            }
            ResponseFault::RefuseEndlessly(status) => Ok(endless(status)),
            ResponseFault::Endless => Ok(endless(200)),
            ResponseFault::Declare(bytes) => {
                let mut answer = endless(200);
                answer.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(bytes));
                answer.headers_mut().insert(LAST_MODIFIED, HeaderValue::from_static(ANY_DATE));
                answer.headers_mut().insert(ETAG, HeaderValue::from_static("\"any\""));
                Ok(answer)
            }
            ResponseFault::Text(text) => Ok(Response::new(full(Bytes::from(text)))),
            ResponseFault::Hang => std::future::pending().await,
            ResponseFault::Close => Err(io::Error::other("closed by the fault layer")),
            ResponseFault::LoseAnswer => {
                carry_out(&store, request).await?;
                Err(io::Error::other("the answer is lost"))
            }
            ResponseFault::Slow(delay) => {
                tokio::time::sleep(delay).await;
                carry_out(&store, request).await
            }
            ResponseFault::Cut(bytes) => Ok(broken(carry_out(&store, request).await?, bytes, BodyEnd::Close)),
            ResponseFault::Stall(bytes) => {
                Ok(broken(carry_out(&store, request).await?, bytes, BodyEnd::Silence))
            }
            ResponseFault::Unranged => {
                let mut answer = carry_out(&store, request).await?;
                *answer.status_mut() = StatusCode::OK;
                answer.headers_mut().remove(CONTENT_RANGE);
                Ok(answer)
            }
            ResponseFault::Shorter | ResponseFault::OtherRange | ResponseFault::WrongByte => {
                rewritten(carry_out(&store, request).await?, &fault).await
            }
        }
    }
}

async fn carry_out(store: &S3Service, request: Request<Incoming>) -> Result<Response<FaultyBody>, io::Error> {
    let answer = store
        .call(request.map(s3s::Body::from))
        .await
        .map_err(|error| io::Error::other(format!("{error:?}")))?;
    Ok(answer.map(|body| body.map_err(io::Error::other).boxed()))
}

fn full(bytes: Bytes) -> FaultyBody {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

fn error(status: u16, code: &str) -> Response<FaultyBody> {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>planned</Message></Error>"
    );
    let mut answer = Response::new(full(text.into()));
    *answer.status_mut() = StatusCode::from_u16(status).unwrap();
    answer.headers_mut().insert("x-amz-request-id", http::HeaderValue::from_static("planned"));
    answer
}

async fn rewritten(
    answer: Response<FaultyBody>,
    fault: &ResponseFault,
) -> Result<Response<FaultyBody>, io::Error> {
    let (mut head, body) = answer.into_parts();
    let mut bytes = body.collect().await?.to_bytes().to_vec();
    let (start, size) = {
        let range =
            head.headers.get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).unwrap_or("bytes 0-0/1");
        let (range, size) = range.trim_start_matches("bytes ").split_once('/').unwrap();
        let start: u64 = range.split('-').next().and_then(|start| start.parse().ok()).unwrap();
        (start, size.to_owned())
    };
    let mut start_now = start;
    match fault {
        ResponseFault::Shorter => drop(bytes.pop()),
        ResponseFault::OtherRange => start_now += 1,
        _ => bytes[0] ^= 1,
    }
    let last = start_now + bytes.len() as u64 - 1;
    let range = HeaderValue::from_str(&format!("bytes {start_now}-{last}/{size}")).unwrap();
    head.headers.insert(CONTENT_RANGE, range);
    head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
    Ok(Response::from_parts(head, full(bytes.into())))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyEnd {
    Close,
    Silence,
}

/// A body that breaks after `remaining` bytes.
struct Broken {
    body: FaultyBody,
    remaining: usize,
    after: BodyEnd,
}

fn broken(answer: Response<FaultyBody>, remaining: usize, after: BodyEnd) -> Response<FaultyBody> {
    answer.map(|body| Broken { body, remaining, after }.boxed())
}

impl Body for Broken {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.remaining == 0 {
            return match self.after {
                BodyEnd::Close => Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into()))),
                BodyEnd::Silence => Poll::Pending,
            };
        }
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        let Some(Ok(frame)) = frame else { return Poll::Ready(frame) };
        Poll::Ready(Some(Ok(frame.map_data(|data| {
            let taken = data.slice(..data.len().min(self.remaining));
            self.remaining -= taken.len();
            taken
        }))))
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

const ANY_DATE: &str = "Sat, 28 Nov 2026 00:00:00 GMT";

/// An endless text.
struct Endless;

fn endless(status: u16) -> Response<FaultyBody> {
    let mut answer = Response::new(Endless.boxed());
    *answer.status_mut() = StatusCode::from_u16(status).unwrap();
    answer
}

impl Body for Endless {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        static TEXT: [u8; 16 << 10] = [b' '; 16 << 10];
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&TEXT)))))
    }
}
