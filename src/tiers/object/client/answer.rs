//! The body of an answer: bounded in size and time, counted, and its connection given back once it was read whole.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use object_store::client::{HttpError, HttpErrorKind};
use tokio::sync::OwnedSemaphorePermit;

use super::metrics::{Metrics, Reason};
use super::operation::Mismatch;
use super::pool::{Connection, Pool};
use crate::clock::{Instant, Sleep, sleep_until};

/// A request from its first byte to the end of its answer; dropped, it is over.
pub(super) struct Request {
    pub(super) metrics: Arc<Metrics>,
    pub(super) label: &'static str,
    pub(super) begun: Instant,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl Drop for Request {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        let seconds = self.metrics.seconds.with_label_values(&[self.label]);
        seconds.observe(self.begun.elapsed().as_secs_f64());
    }
}

/// How much of an answer is read, and how long that may take.
pub(super) struct Bounds {
    /// With a length that is known, it must have it.
    pub(super) exact: Option<u64>,
    /// More is an error, or is not read.
    pub(super) bytes_max: u64,
    /// Whether what is beyond `bytes_max` is left out without an error: texts of errors.
    pub(super) is_cut: bool,
    pub(super) deadline: Instant,
    pub(super) stall_timeout: Duration,
}

/// A body that is read in chunks. Dropped before its end it closes its connection.
pub(super) struct Answer {
    body: Incoming,
    bounds: Bounds,
    received: u64,
    is_over: bool,
    /// At the deadline, or when nothing has come for too long.
    alarm: Pin<Box<Sleep>>,
    connection: Option<Connection>,
    pool: Arc<Pool>,
    request: Option<Request>,
}

impl Answer {
    pub(super) fn new(
        body: Incoming,
        bounds: Bounds,
        connection: Connection,
        pool: Arc<Pool>,
        request: Request,
    ) -> Self {
        let alarm = Box::pin(sleep_until(bounds.deadline.min(Instant::now() + bounds.stall_timeout)));
        let (connection, request) = (Some(connection), Some(request));
        let mut answer = Self { body, bounds, received: 0, is_over: false, alarm, connection, pool, request };
        if answer.body.is_end_stream() {
            // Nobody asks a body for more that says it is empty.
            answer.end(true);
        }
        answer
    }

    /// The connection can be used again after an answer that was read `whole`.
    fn end(&mut self, whole: bool) {
        self.is_over = true;
        if let Some(connection) = self.connection.take().filter(|_| whole) {
            self.pool.put(connection);
        }
        drop(self.request.take());
    }

    fn fail(&mut self, reason: Reason, error: HttpError) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if let Some(request) = &self.request {
            request.metrics.failed(reason);
        }
        self.end(false);
        Poll::Ready(Some(Err(error)))
    }

    fn mismatch(&mut self, wanted: u64, got: String) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let mismatch = Mismatch { wanted: format!("{wanted} bytes"), got };
        self.fail(Reason::Damaged, HttpError::new(HttpErrorKind::Decode, mismatch))
    }

    fn take(&mut self, data: Bytes) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let before = self.received;
        self.received = before.saturating_add(data.len() as u64);
        if let Some(request) = &self.request {
            request.metrics.received_bytes.inc_by(data.len() as u64);
        }
        if let Some(exact) = self.bounds.exact.filter(|exact| self.received > *exact) {
            return self.mismatch(exact, "more".to_owned());
        }
        if self.received <= self.bounds.bytes_max {
            let next = Instant::now() + self.bounds.stall_timeout;
            self.alarm.as_mut().reset(self.bounds.deadline.min(next));
            if self.body.is_end_stream() && self.bounds.exact.is_none_or(|exact| exact == self.received) {
                // Who has all of it may not ask for more.
                self.end(true);
            }
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if !self.bounds.is_cut {
            return self.mismatch(self.bounds.bytes_max, "more".to_owned());
        }
        let room = usize::try_from(self.bounds.bytes_max.saturating_sub(before)).unwrap_or(data.len());
        self.end(false);
        Poll::Ready(Some(Ok(Frame::data(data.slice(..room.min(data.len()))))))
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => this.take(data),
                // Trailers.
                Err(frame) => Poll::Ready(Some(Ok(frame))),
            },
            Poll::Ready(Some(Err(error))) => {
                this.fail(Reason::Cut, HttpError::new(HttpErrorKind::Interrupted, error))
            }
            Poll::Ready(None) => match this.bounds.exact {
                Some(exact) if this.received < exact => {
                    let cut = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
                    this.fail(Reason::Cut, HttpError::new(HttpErrorKind::Interrupted, cut))
                }
                _ => {
                    this.end(true);
                    Poll::Ready(None)
                }
            },
            Poll::Pending => {
                ready!(this.alarm.as_mut().poll(cx));
                let late = std::io::Error::new(std::io::ErrorKind::TimedOut, "response stalled");
                this.fail(Reason::Timeout, HttpError::new(HttpErrorKind::Timeout, late))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }

    fn size_hint(&self) -> SizeHint {
        let left = self.bounds.exact.map(|exact| exact.saturating_sub(self.received));
        match left.filter(|_| !self.is_over) {
            // What is reserved for it is bounded like what is read.
            Some(left) => SizeHint::with_exact(left.min(self.bounds.bytes_max)),
            None => SizeHint::default(),
        }
    }
}
