//! A stream that reports to its connection's [`ConnectionState`] each read and write, and the
//! beginning of HTTP/2.
//!
//! It does not interpret the bytes, except to find the end of the first HTTP/2 frame.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connection_limiter::ConnectionState;
use super::http2::FrameScanner;

/// A stream with the state of its connection.
#[derive(Debug)]
pub(super) struct TrackedStream<S> {
    stream: S,
    connection_state: Arc<ConnectionState>,
    /// Detects the end of the first frame. `None` afterwards, and for a listener that reports the
    /// beginning itself.
    beginning: Option<FrameScanner>,
}

impl<S> TrackedStream<S> {
    pub(super) fn new(
        stream: S,
        connection_state: Arc<ConnectionState>,
        beginning: Option<FrameScanner>,
    ) -> Self {
        Self { stream, connection_state, beginning }
    }

    fn wrote(&mut self, write: impl FnOnce(Pin<&mut S>) -> Poll<io::Result<usize>>) -> Poll<io::Result<usize>>
    where
        S: Unpin,
    {
        let began = self.connection_state.now();
        let written = write(Pin::new(&mut self.stream));
        if let Poll::Ready(Ok(1..)) = written {
            self.connection_state.wrote_at(began);
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TrackedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let came = &buffer.filled()[before..];
        if !came.is_empty() {
            self.connection_state.progressed();
        }
        if let Some(beginning) = &mut self.beginning
            && beginning.advance(came).1.is_some()
        {
            self.beginning = None;
            self.connection_state.opened();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.wrote(|stream| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.wrote(|stream| stream.poll_write_vectored(context, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
