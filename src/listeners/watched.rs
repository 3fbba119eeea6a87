//! A stream that tells its connection's [`Seat`] when bytes come and go, and when HTTP/2 has begun on it.
//!
//! Not here: what the bytes mean; of HTTP/2 only the preface and the length of the frame behind it are looked at.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::places::Seat;

/// A client's preface (RFC 9113 §3.4) in front of its first frame.
const PREFACE_BYTES: usize = 24;
/// A frame's header begins with its length.
const LENGTH_BYTES: usize = 3;
const FRAME_HEADER_BYTES: usize = 9;

/// A connection and its seat.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    seat: Arc<Seat>,
    /// Until the connection has begun; none = that is not seen here.
    beginning: Option<Beginning>,
}

/// How much of an HTTP/2 connection's beginning has come: the preface and the first frame, the client's SETTINGS.
#[derive(Debug, Default)]
pub(super) struct Beginning {
    seen: usize,
    frame_bytes: usize,
}

impl Beginning {
    /// Takes what came; whether that is all of it.
    fn take(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            if (PREFACE_BYTES..PREFACE_BYTES + LENGTH_BYTES).contains(&self.seen) {
                self.frame_bytes = self.frame_bytes << 8 | usize::from(*byte);
            }
            self.seen += 1;
            if self.seen >= PREFACE_BYTES + FRAME_HEADER_BYTES + self.frame_bytes {
                return true;
            }
        }
        false
    }
}

impl<S> Watched<S> {
    pub(super) fn new(stream: S, seat: Arc<Seat>, beginning: Option<Beginning>) -> Self {
        Self { stream, seat, beginning }
    }

    fn wrote(&mut self, write: impl FnOnce(Pin<&mut S>) -> Poll<io::Result<usize>>) -> Poll<io::Result<usize>>
    where
        S: Unpin,
    {
        let began = self.seat.now();
        let written = write(Pin::new(&mut self.stream));
        if let Poll::Ready(Ok(1..)) = written {
            self.seat.wrote_at(began);
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let came = &buffer.filled()[before..];
        if !came.is_empty() {
            self.seat.progressed();
        }
        if let Some(beginning) = &mut self.beginning
            && beginning.take(came)
        {
            self.beginning = None;
            self.seat.opened();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn http2_has_begun_with_the_last_byte_of_its_first_frame(payload in 0usize..300, cut in 1usize..400) {
            let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
            bytes.extend_from_slice(&u32::try_from(payload).unwrap().to_be_bytes()[1..]);
            bytes.extend_from_slice(&[4, 0, 0, 0, 0, 0]);
            bytes.resize(PREFACE_BYTES + FRAME_HEADER_BYTES + payload, 7);
            let mut beginning = Beginning::default();
            let pieces: Vec<&[u8]> = bytes.chunks(cut).collect();
            for (at, piece) in pieces.iter().enumerate() {
                prop_assert_eq!(beginning.take(piece), at + 1 == pieces.len());
            }
        }
    }
}
