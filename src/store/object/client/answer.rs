//! The body of a response. It is limited in size and time, and counted.
//!
//! A body that was read to its end returns its connection to the pool. A body that fails or is
//! dropped early closes its connection.

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
use super::pool::{ConnectionPool, StoreConnection};
use crate::clock::{Instant, Sleep, sleep_until};

/// A request in progress, from its permit to the end of its response. It ends on drop.
pub(super) struct StoreRequest {
    pub(super) metrics: Arc<Metrics>,
    pub(super) label: &'static str,
    pub(super) begun: Instant,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl Drop for StoreRequest {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        let seconds = self.metrics.seconds.with_label_values(&[self.label]);
        seconds.observe(self.begun.elapsed().as_secs_f64());
    }
}

/// Limits of a response.
pub(super) struct AnswerBounds {
    /// Largest size of the body.
    pub(super) bytes_max: u64,
    /// Truncates a body that exceeds `bytes_max`, instead of failing. Used for error texts.
    pub(super) is_cut: bool,
    pub(super) deadline: Instant,
    pub(super) stall_timeout: Duration,
}

/// Creates the error of a response with more than `bytes_max` bytes.
pub(super) fn too_long(bytes_max: u64) -> HttpError {
    let text = format!("the response has more than {bytes_max} bytes");
    HttpError::new(HttpErrorKind::Decode, std::io::Error::other(text))
}

/// A response body that is read in chunks. Closes its connection if dropped before its end.
pub(super) struct StoreAnswer {
    body: Incoming,
    bounds: AnswerBounds,
    received: u64,
    is_over: bool,
    /// Fires at the deadline, or when no byte has arrived for `stall_timeout`.
    alarm: Pin<Box<Sleep>>,
    connection: Option<StoreConnection>,
    pool: Arc<ConnectionPool>,
    request: Option<StoreRequest>,
}

impl StoreAnswer {
    pub(super) fn new(
        body: Incoming,
        bounds: AnswerBounds,
        connection: StoreConnection,
        pool: Arc<ConnectionPool>,
        request: StoreRequest,
    ) -> Self {
        let alarm = Box::pin(sleep_until(bounds.deadline.min(Instant::now() + bounds.stall_timeout)));
        let (connection, request) = (Some(connection), Some(request));
        let mut answer = Self { body, bounds, received: 0, is_over: false, alarm, connection, pool, request };
        if answer.body.is_end_stream() {
            // An empty body is never polled.
            answer.end(true);
        }
        answer
    }

    /// Ends the response. Returns the connection to the pool if the body was read `whole`.
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

    fn take(&mut self, data: Bytes) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let before = self.received;
        self.received = before.saturating_add(data.len() as u64);
        if let Some(request) = &self.request {
            request.metrics.received_bytes.inc_by(data.len() as u64);
        }
        if self.received <= self.bounds.bytes_max {
            let next = Instant::now() + self.bounds.stall_timeout;
            self.alarm.as_mut().reset(self.bounds.deadline.min(next));
            if self.body.is_end_stream() {
                // A reader that has all bytes may not poll again.
                self.end(true);
            }
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if !self.bounds.is_cut {
            return self.fail(Reason::Damaged, too_long(self.bounds.bytes_max));
        }
        let room = usize::try_from(self.bounds.bytes_max.saturating_sub(before)).unwrap_or(data.len());
        self.end(false);
        Poll::Ready(Some(Ok(Frame::data(data.slice(..room.min(data.len()))))))
    }
}

impl Body for StoreAnswer {
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
                // Trailers are passed on.
                Err(frame) => Poll::Ready(Some(Ok(frame))),
            },
            Poll::Ready(Some(Err(error))) => {
                this.fail(Reason::Cut, HttpError::new(HttpErrorKind::Interrupted, error))
            }
            Poll::Ready(None) => {
                this.end(true);
                Poll::Ready(None)
            }
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
        match self.body.size_hint().exact().filter(|_| !self.is_over) {
            // Callers reserve memory for the hint, so it has the same limit as the body.
            Some(remaining) => SizeHint::with_exact(remaining.min(self.bounds.bytes_max)),
            None => SizeHint::default(),
        }
    }
}
