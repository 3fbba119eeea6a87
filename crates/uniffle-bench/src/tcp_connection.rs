//! One raw TCP ("Netty") connection. Responses are matched by request id, as in the Java client.
//!
//! Several tasks share it, and frames are written whole, one after another, or the connection is
//! closed. The content of the frames is in [`super::message`] and [`super::session`].

use std::collections::HashMap;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::message::MessagePieces;

/// Largest accepted response.
const FRAME_BYTES_MAX: usize = 1 << 30;
/// Most pieces in one `writev`.
const PIECES_MAX: usize = 256;

/// A response.
#[derive(Debug)]
pub(crate) struct TcpResponse {
    pub(crate) kind: u8,
    /// Message after the request id.
    pub(crate) message: Bytes,
    pub(crate) body: Bytes,
}

/// Pending calls by request id. `None` once the connection is broken.
type PendingCalls = Arc<Mutex<Option<HashMap<i64, oneshot::Sender<TcpResponse>>>>>;

/// A connection.
#[derive(Debug)]
pub(crate) struct RawConnection {
    /// `None` once a frame was not sent whole: the peer would take later frames for its rest.
    writer: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
    waiting: PendingCalls,
    next: AtomicI64,
    reader: AbortHandle,
    address: SocketAddr,
    rpc_timeout: Duration,
}

impl Drop for RawConnection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl RawConnection {
    pub(crate) async fn connect(
        address: SocketAddr,
        rpc_timeout: Duration,
        tasks: &mut tokio::task::JoinSet<()>,
    ) -> anyhow::Result<Self> {
        let stream = timeout(rpc_timeout, TcpStream::connect(address))
            .await
            .map_err(|_| anyhow!("connect to {address}: no answer"))?
            .with_context(|| format!("connect to {address}"))?;
        stream.set_nodelay(true)?;
        let (read, write) = stream.into_split();
        let waiting: PendingCalls = Arc::new(Mutex::new(Some(HashMap::new())));
        let answers = waiting.clone();
        let reader = tasks.spawn(async move {
            // Dropping the senders notifies waiting callers of a broken connection.
            let _ = receive(read, &answers).await;
            *answers.lock() = None;
        });
        let writer = tokio::sync::Mutex::new(Some(write));
        Ok(Self { writer, waiting, next: AtomicI64::new(0), reader, address, rpc_timeout })
    }

    pub(crate) fn next_id(&self) -> i64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a whole frame that carries `id`, and waits for its response.
    pub(crate) async fn call(&self, id: i64, frame: MessagePieces) -> anyhow::Result<TcpResponse> {
        let lost = || anyhow!("{} closed the connection or does not speak this protocol", self.address);
        let (sender, answer) = oneshot::channel();
        self.waiting.lock().as_mut().ok_or_else(lost)?.insert(id, sender);
        let exchange = async {
            self.write(frame).await.map_err(|error| anyhow!("{}: {error}", self.address))?;
            answer.await.map_err(|_| lost())
        };
        timeout(self.rpc_timeout, exchange)
            .await
            .map_err(|_| anyhow!("{}: no answer within {:?}", self.address, self.rpc_timeout))?
    }

    async fn write(&self, frame: MessagePieces) -> std::io::Result<()> {
        let mut place = self.writer.lock().await;
        // Dropped if the call fails or times out, which closes the connection.
        let mut writer = place.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        let mut slices: Vec<IoSlice<'_>> = frame.pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut remaining = slices.as_mut_slice();
        while !remaining.is_empty() {
            let batch = remaining.len().min(PIECES_MAX);
            let written = writer.write_vectored(&remaining[..batch]).await?;
            if written == 0 {
                return Err(std::io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut remaining, written);
        }
        *place = Some(writer);
        Ok(())
    }
}

async fn receive(mut stream: OwnedReadHalf, waiting: &PendingCalls) -> anyhow::Result<()> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let mut head = &head[..];
        let (message, kind, body) = (head.get_i32(), head.get_u8(), head.get_i32());
        let (message, body) = (usize::try_from(message)?, usize::try_from(body)?);
        ensure!(message >= 8 && message + body <= FRAME_BYTES_MAX, "not a frame");
        let mut frame = BytesMut::with_capacity(message + body);
        while frame.len() < message + body {
            let missing = (message + body - frame.len()) as u64;
            ensure!((&mut stream).take(missing).read_buf(&mut frame).await? > 0, "the response is truncated");
        }
        let mut message = frame.split_to(message).freeze();
        let id = message.get_i64();
        let receiver = waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id));
        if let Some(receiver) = receiver {
            // The caller may have timed out.
            let _ = receiver.send(TcpResponse { kind, message, body: frame.freeze() });
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::task::JoinSet;

    use super::*;

    fn frame(length: usize) -> MessagePieces {
        MessagePieces { length, pieces: vec![vec![0; length].into()] }
    }

    #[tokio::test]
    async fn partly_sent_frame_closes_the_connection() {
        // Larger than the buffers of both sockets.
        const LENGTH: usize = 64 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut tasks = JoinSet::new();
        let within = Duration::from_millis(200);
        let connecting = RawConnection::connect(listener.local_addr().unwrap(), within, &mut tasks);
        let (connection, accepted) = tokio::join!(connecting, listener.accept());
        let (connection, mut peer) = (connection.unwrap(), accepted.unwrap().0);
        let refused = connection.call(1, frame(LENGTH)).await.unwrap_err().to_string();
        assert!(refused.contains("no answer within"), "{refused}");
        let late = connection.call(2, frame(10)).await.unwrap_err().to_string();
        assert!(!late.contains("no answer within"), "{late}");
        let mut sent = Vec::new();
        timeout(Duration::from_secs(10), peer.read_to_end(&mut sent)).await.expect("it is open").unwrap();
        assert!(sent.len() < LENGTH, "{}", sent.len());
    }
}
