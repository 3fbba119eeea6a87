//! A stream that combines the small writes of one poll. HTTP/2 writes and flushes each frame
//! separately, which costs a system call and a wake-up of the peer per 16 KiB. hyper owns the
//! [`CoalescingStream`]; the task of the connection drives the [`CoalescingWriter`]. A poll reads a
//! limited number of cancellations, so that h2 does not end the connection for them.
//!
//! Invariants: bytes go out in order and exactly once. When [`CoalescingWriter::poll`] returns
//! pending, the socket has everything, or the task will be woken. Buffers are bounded over all
//! connections: when many are in use, further ones get smaller buffers or none, and then write
//! through.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::listeners::http2::{FrameScanner, RST_STREAM};

/// Size and number of the buffers, 8.3 MiB over all connections. The sizes hold 64 frames, 16
/// frames and four.
///
/// The largest fits a client window of 1 MiB with frame heads and the end of the response; a buffer
/// of exactly 1 MiB would need a second write. A connection owns a buffer while it is polled, and
/// while its socket is full.
const SIZES: [(usize, usize); 3] = [(1056 << 10, 3), (264 << 10, 16), (68 << 10, 16)];
/// Writes of at least this length take no new buffer. A peer may ask for such frames.
const THROUGH_BYTES: usize = 256 << 10;
/// Number of written bytes after which the writes of a poll end until the next, and likewise its
/// flush.
const BYTES_PER_POLL: usize = 4 << 20;

/// Write buffers of all connections of a listener.
#[derive(Debug, Default)]
pub(in crate::listeners::grpc) struct Buffers {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Unused buffers, by size.
    spare: [Vec<Vec<u8>>; SIZES.len()],
    /// Number of buffers in use, by size.
    given: [usize; SIZES.len()],
}

/// A buffer that is returned on drop.
#[derive(Debug)]
struct PooledBuffer {
    bytes: Vec<u8>,
    /// Number of bytes already written to the socket.
    written: usize,
    /// Index into [`SIZES`].
    size: usize,
    home: Arc<Buffers>,
}

impl Buffers {
    fn take(self: &Arc<Self>) -> Option<PooledBuffer> {
        let mut state = self.state.lock();
        let size = state.given.iter().zip(SIZES).position(|(given, (_, most))| *given < most)?;
        state.given[size] += 1;
        let spare = state.spare[size].pop();
        drop(state);
        let bytes = spare.unwrap_or_else(|| Vec::with_capacity(SIZES[size].0));
        Some(PooledBuffer { bytes, written: 0, size, home: Arc::clone(self) })
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let mut state = self.home.state.lock();
        state.given[self.size] -= 1;
        state.spare[self.size].push(bytes);
    }
}

impl PooledBuffer {
    fn room(&self) -> usize {
        SIZES[self.size].0 - self.bytes.len()
    }

    /// Appends as much of `pieces` as fits. Returns the number of bytes taken.
    fn fill(&mut self, pieces: &[IoSlice<'_>]) -> usize {
        let before = self.bytes.len();
        for piece in pieces {
            let taken = piece.len().min(self.room());
            self.bytes.extend_from_slice(&piece[..taken]);
        }
        self.bytes.len() - before
    }
}

/// State shared by both halves.
#[derive(Debug)]
struct SharedIo<S> {
    stream: S,
    buffers: Arc<Buffers>,
    collected: Option<PooledBuffer>,
    /// Data was written to the stream but not flushed. TLS needs the flush.
    is_unflushed: bool,
    /// The stream did not take everything in this poll.
    is_blocked: bool,
    /// Bytes written to the stream in this poll.
    taken: usize,
    cancellations: Cancellations,
}

/// Limits the call cancellations that one poll reads from the stream. hyper has processed the
/// earlier ones by the next poll, so h2's own limit is never reached.
#[derive(Debug)]
struct Cancellations {
    scanner: FrameScanner,
    per_poll: usize,
    /// Number of cancellations that this poll may still read.
    remaining: usize,
    /// Bytes behind the last admitted cancellation.
    held: Bytes,
}

impl Cancellations {
    /// Returns how many of `bytes` this poll may read.
    fn admit(&mut self, bytes: &[u8]) -> usize {
        let mut admitted = 0;
        while admitted < bytes.len() && self.remaining > 0 {
            let (taken, ended) = self.scanner.advance(&bytes[admitted..]);
            admitted += taken;
            self.remaining -= usize::from(ended == Some(RST_STREAM));
        }
        admitted
    }
}

impl<S: AsyncRead + Unpin> SharedIo<S> {
    fn read(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { stream, cancellations, .. } = self;
        if cancellations.remaining == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if cancellations.held.is_empty() {
            let before = buffer.filled().len();
            ready!(Pin::new(stream).poll_read(context, buffer))?;
            let came = &buffer.filled()[before..];
            let admitted = cancellations.admit(came);
            if admitted < came.len() {
                cancellations.held = Bytes::copy_from_slice(&came[admitted..]);
                buffer.set_filled(before + admitted);
            }
        } else {
            let mut held = std::mem::take(&mut cancellations.held);
            let admitted = cancellations.admit(&held[..held.len().min(buffer.remaining())]);
            buffer.put_slice(&held.split_to(admitted));
            cancellations.held = held;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> SharedIo<S> {
    /// Permits one write to the stream, unless this poll has used its budget.
    fn turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.taken >= BYTES_PER_POLL {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.is_unflushed = true;
        Poll::Ready(())
    }

    /// Writes until the socket has all collected bytes.
    fn drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.collected.is_some() {
            ready!(self.turn(context));
            let Some(buffer) = &mut self.collected else { break };
            let rest = &buffer.bytes[buffer.written..];
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, rest))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.taken += written;
            buffer.written += written;
            if buffer.written == buffer.bytes.len() {
                self.collected = None;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn flush(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.drain(context))?;
        if self.is_unflushed {
            ready!(Pin::new(&mut self.stream).poll_flush(context))?;
            self.is_unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn write(&mut self, context: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = self.gather(context, pieces);
        self.is_blocked |= written.is_pending();
        written
    }

    fn gather(&mut self, context: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        if length == 0 {
            return Poll::Ready(Ok(0));
        }
        if self.collected.as_ref().is_some_and(|buffer| buffer.room() == 0) {
            ready!(self.drain(context))?;
        }
        if self.collected.is_none() {
            let buffer = if length < THROUGH_BYTES { self.buffers.take() } else { None };
            if buffer.is_none() {
                ready!(self.turn(context));
                let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, pieces))?;
                self.taken += written;
                return Poll::Ready(Ok(written));
            }
            self.collected = buffer;
        }
        Poll::Ready(Ok(self.collected.as_mut().map_or(0, |buffer| buffer.fill(pieces))))
    }
}

/// The half that HTTP/2 reads from and writes to. Its flush does nothing, since
/// [`CoalescingWriter::poll`] flushes.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct CoalescingStream<S>(Arc<Mutex<SharedIo<S>>>);

/// The half that writes collected bytes to the socket.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct CoalescingWriter<S>(Arc<Mutex<SharedIo<S>>>);

/// Splits `stream` into both halves. A poll reads at most `cancellations_per_poll` cancellations.
pub(in crate::listeners::grpc) fn coalescing<S>(
    stream: S,
    buffers: &Arc<Buffers>,
    cancellations_per_poll: usize,
) -> (CoalescingStream<S>, CoalescingWriter<S>) {
    let cancellations = Cancellations {
        scanner: FrameScanner::default(),
        per_poll: cancellations_per_poll,
        remaining: cancellations_per_poll,
        held: Bytes::new(),
    };
    let (buffers, collected) = (Arc::clone(buffers), None);
    let shared = SharedIo {
        stream,
        buffers,
        collected,
        is_unflushed: false,
        is_blocked: false,
        taken: 0,
        cancellations,
    };
    let shared = Arc::new(Mutex::new(shared));
    (CoalescingStream(Arc::clone(&shared)), CoalescingWriter(shared))
}

impl<S> CoalescingWriter<S> {
    /// Returns whether the socket took everything that was written until the last poll.
    pub(in crate::listeners::grpc) fn is_written(&self) -> bool {
        !self.0.lock().is_blocked
    }
}

impl<S: AsyncWrite + Unpin> CoalescingWriter<S> {
    /// Polls `connection`, which writes to the other half, then flushes its writes to the socket.
    pub(in crate::listeners::grpc) fn poll<F: Future>(
        &self,
        context: &mut Context<'_>,
        connection: Pin<&mut F>,
    ) -> Poll<F::Output> {
        let mut shared = self.0.lock();
        (shared.taken, shared.is_blocked) = (0, false);
        shared.cancellations.remaining = shared.cancellations.per_poll;
        drop(shared);
        let polled = connection.poll(context);
        let mut shared = self.0.lock();
        shared.taken = 0;
        let flushed = shared.flush(context);
        shared.is_blocked |= flushed.is_pending();
        if let (Poll::Ready(Err(_)), Poll::Pending) = (flushed, &polled) {
            // The next write or read returns the error as well.
            shared.collected = None;
            context.waker().wake_by_ref();
        }
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CoalescingStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.lock().read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CoalescingStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().write(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.lock().write(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        ready!(shared.drain(context))?;
        Pin::new(&mut shared.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use proptest::prelude::*;

    use super::*;

    /// A socket that accepts the byte counts of `takes` in turn, cyclically. At 0 it is full and
    /// wakes at once.
    #[derive(Debug)]
    struct Socket {
        takes: Vec<usize>,
        at: usize,
        came: Vec<u8>,
        writes: usize,
        unflushed: bool,
        is_broken: bool,
    }

    impl Socket {
        fn taking(takes: Vec<usize>) -> Self {
            Self { takes, at: 0, came: Vec::new(), writes: 0, unflushed: false, is_broken: false }
        }
    }

    impl AsyncWrite for Socket {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.poll_write_vectored_of(context, &[IoSlice::new(bytes)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            pieces: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            self.poll_write_vectored_of(context, pieces)
        }

        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.unflushed = false;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl Socket {
        fn poll_write_vectored_of(
            &mut self,
            context: &mut Context<'_>,
            pieces: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            if self.is_broken {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let takes = self.takes[self.at % self.takes.len()];
            self.at += 1;
            if takes == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.writes += 1;
            self.unflushed = true;
            let before = self.came.len();
            for piece in pieces {
                let room = takes - (self.came.len() - before);
                self.came.extend_from_slice(&piece[..piece.len().min(room)]);
            }
            Poll::Ready(Ok(self.came.len() - before))
        }
    }

    #[derive(Debug, Default)]
    struct WakeCounter(AtomicUsize);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes like HTTP/2: a frame, a flush, the next frame.
    async fn write_frames(mut stream: CoalescingStream<Socket>, frames: &[Vec<u8>]) -> io::Result<()> {
        use tokio::io::AsyncWriteExt as _;
        for frame in frames {
            let mut rest = frame.as_slice();
            while !rest.is_empty() {
                let (head, payload) = rest.split_at(rest.len().min(9));
                let pieces = [IoSlice::new(head), IoSlice::new(payload)];
                let written =
                    poll_fn(|context| Pin::new(&mut stream).poll_write_vectored(context, &pieces)).await?;
                rest = &rest[written..];
            }
            stream.flush().await?;
        }
        stream.shutdown().await
    }

    fn frames(lengths: &[usize]) -> Vec<Vec<u8>> {
        let frame = |(n, length): (usize, &usize)| vec![u8::try_from(n % 251).unwrap(); *length];
        lengths.iter().enumerate().map(frame).collect()
    }

    #[test]
    fn frames_of_one_poll_are_one_write() {
        let buffers = Arc::new(Buffers::default());
        let (stream, writer) = coalescing(Socket::taking(vec![usize::MAX]), &buffers, 1);
        let frames = frames(&[50, 16_393, 16_393, 16_393, 100]);
        let mut stream = Some(stream);
        let mut connection = std::pin::pin!(async {
            let mut stream = stream.take().unwrap();
            for frame in &frames {
                assert_eq!(
                    poll_fn(|context| Pin::new(&mut stream).poll_write(context, frame)).await.unwrap(),
                    frame.len()
                );
                poll_fn(|context| Pin::new(&mut stream).poll_flush(context)).await.unwrap();
            }
            std::future::pending::<()>().await;
        });
        let mut context = Context::from_waker(Waker::noop());
        assert!(writer.poll(&mut context, connection.as_mut()).is_pending());
        let shared = writer.0.lock();
        assert_eq!((shared.stream.writes, shared.stream.unflushed), (1, false));
        assert_eq!(shared.stream.came, frames.concat());
        assert_eq!(buffers.state.lock().given, [0; 3], "the write buffer was not returned");
    }

    #[test]
    fn connection_without_a_buffer_writes_through() {
        let buffers = Arc::new(Buffers::default());
        let taken: Vec<_> = std::iter::from_fn(|| buffers.take()).collect();
        let most = SIZES.map(|(_, most)| most);
        assert_eq!(buffers.state.lock().given, most);
        let held: usize = taken.iter().map(|buffer| buffer.bytes.capacity()).sum();
        assert!(held < 9 << 20, "{held}");
        let (mut stream, writer) = coalescing(Socket::taking(vec![usize::MAX]), &buffers, 1);
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..3 {
            assert!(Pin::new(&mut stream).poll_write(&mut context, &[1; 100]).is_ready());
        }
        let socket = &writer.0.lock().stream;
        assert_eq!((socket.writes, socket.came.len()), (3, 300));
        drop(taken);
        let state = buffers.state.lock();
        assert_eq!((state.given, state.spare.each_ref().map(Vec::len)), ([0; 3], most));
    }

    #[test]
    fn full_socket_has_not_everything() {
        let taken: Arc<Buffers> = Arc::default();
        let _taken: Vec<_> = std::iter::from_fn(|| taken.take()).collect();
        for buffers in [Arc::default(), taken] {
            let (stream, writer) = coalescing(Socket::taking(vec![10, 0, usize::MAX]), &buffers, 1);
            let frames = frames(&[50]);
            let mut connection = std::pin::pin!(async {
                let mut stream = stream;
                tokio::io::AsyncWriteExt::write_all(&mut stream, &frames[0]).await.unwrap();
                std::future::pending::<()>().await;
            });
            let mut context = Context::from_waker(Waker::noop());
            for is_written in [false, true] {
                assert!(writer.poll(&mut context, connection.as_mut()).is_pending());
                assert_eq!(writer.is_written(), is_written);
            }
            assert_eq!(writer.0.lock().stream.came, frames.concat());
        }
    }

    #[test]
    fn broken_socket_wakes_the_connection_and_fails_its_write() {
        let buffers = Arc::new(Buffers::default());
        let socket = Socket { is_broken: true, ..Socket::taking(vec![usize::MAX]) };
        let (stream, writer) = coalescing(socket, &buffers, 1);
        let woken = Arc::new(WakeCounter::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let frames = frames(&[10]);
        let mut connection = std::pin::pin!(async {
            let mut stream = stream;
            poll_fn(|context| Pin::new(&mut stream).poll_write(context, &frames[0])).await.unwrap();
            tokio::task::yield_now().await;
            poll_fn(|context| Pin::new(&mut stream).poll_write(context, &[2; THROUGH_BYTES]))
                .await
                .unwrap_err()
        });
        assert!(writer.poll(&mut context, connection.as_mut()).is_pending());
        assert!(woken.0.load(Ordering::Relaxed) > 0);
        let Poll::Ready(error) = writer.poll(&mut context, connection.as_mut()) else {
            panic!("expected the write to fail")
        };
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(buffers.state.lock().given, [0; 3]);
    }

    #[tokio::test]
    async fn poll_reads_a_bounded_number_of_cancellations() {
        use crate::listeners::http2::tests::{PREFACE, frame};
        let mut bytes = PREFACE.to_vec();
        for _ in 0..100 {
            bytes.extend([frame(1, 30), frame(RST_STREAM, 4)].concat());
        }
        bytes.extend(frame(6, 8));
        let stream = tokio::io::join(&bytes[..], tokio::io::sink());
        let (mut stream, writer) = coalescing(stream, &Arc::default(), 7);
        let (mut read, mut polls) = (Vec::new(), 0);
        let mut reading = std::pin::pin!(tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut read));
        poll_fn(|context| {
            polls += 1;
            writer.poll(context, reading.as_mut())
        })
        .await
        .unwrap();
        assert!(read == bytes, "the reader got other bytes than were written");
        assert_eq!(polls, 100 / 7 + 1);
    }

    proptest! {
        /// Holds for any number of bytes that the socket accepts at a time, including none.
        #[test]
        fn bytes_are_written_once_and_in_order(
            lengths in prop::collection::vec(prop_oneof![1usize..100, Just(16_393), 250_000usize..600_000], 1..12),
            takes in prop::collection::vec(prop_oneof![Just(0usize), 1000usize..20_000, Just(usize::MAX)], 1..6),
        ) {
            prop_assume!(takes.iter().any(|takes| *takes > 0));
            let buffers = Arc::new(Buffers::default());
            let (stream, writer) = coalescing(Socket::taking(takes), &buffers, 1);
            let frames = frames(&lengths);
            let woken = Arc::new(WakeCounter::default());
            let waker = Waker::from(Arc::clone(&woken));
            let mut context = Context::from_waker(&waker);
            let mut connection = std::pin::pin!(write_frames(stream, &frames));
            loop {
                let before = woken.0.load(Ordering::Relaxed);
                if let Poll::Ready(ended) = writer.poll(&mut context, connection.as_mut()) {
                    ended.unwrap();
                    break;
                }
                prop_assert!(woken.0.load(Ordering::Relaxed) > before, "the task was not woken");
            }
            prop_assert_eq!(&writer.0.lock().stream.came, &frames.concat());
            prop_assert_eq!(buffers.state.lock().given, [0; 3]);
        }
    }
}
