//! Reads the next chunk of a local response while the previous one is being sent, for both
//! transports.
//!
//! When a chunk is returned, the read of the following one begins, using read memory that no other
//! read needs: half of the pool stays free, and nothing is waited for. gRPC requests a chunk only
//! when its transport accepts one, and gets the prefetched one. Raw TCP reports how long it is busy
//! ([`ReadAhead::during`]). Meanwhile the next chunk is read completely, and waits for memory if
//! none was spare.

use std::fmt;
use std::pin::pin;

use bytes::Bytes;
use futures::{FutureExt as _, poll};

use super::{ChunkStream, NextChunk};
use crate::service::ServiceError;

/// The chunks of one response, read at most one ahead.
pub struct ReadAhead(State);

enum State {
    Idle(Box<ChunkStream>),
    Reading(NextChunk),
    Ended,
}

impl ReadAhead {
    /// Creates a read-ahead of `chunks`.
    pub fn of(chunks: ChunkStream) -> Self {
        Self(State::Idle(Box::new(chunks)))
    }

    /// Returns the next bytes, or `None` after the last. Begins to read the following chunk.
    ///
    /// # Errors
    /// See [`ChunkStream::next`]; nothing follows an error.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ServiceError> {
        let (chunks, result) = match std::mem::replace(&mut self.0, State::Ended) {
            State::Idle(mut chunks) => {
                let result = chunks.next().await;
                (chunks, result)
            }
            State::Reading(reading) => reading.await,
            State::Ended => return Ok(None),
        };
        if let Ok(Some(_)) = &result {
            self.0 = begin(chunks).await;
        }
        result
    }

    /// Runs `work` and returns its outcome. Reads the next chunk meanwhile.
    pub async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            outcome = work.as_mut() => outcome,
            () = self.read() => work.await,
        }
    }

    /// Reads the next chunk and keeps it for [`ReadAhead::next`]. Cancel safe: a later call
    /// continues the read.
    async fn read(&mut self) {
        self.0 = match std::mem::replace(&mut self.0, State::Ended) {
            State::Idle(mut chunks) => State::Reading(
                async move {
                    let result = chunks.next().await;
                    (chunks, result)
                }
                .boxed(),
            ),
            state => state,
        };
        if let State::Reading(reading) = &mut self.0 {
            let read = reading.await;
            self.0 = State::Reading(std::future::ready(read).boxed());
        }
    }
}

/// Begins a read and polls it once, so that the disk works before the next poll.
async fn begin(chunks: Box<ChunkStream>) -> State {
    let mut reading = match chunks.next_if_spare() {
        Ok(reading) => reading,
        Err(chunks) => return State::Idle(chunks),
    };
    match poll!(&mut reading) {
        std::task::Poll::Pending => State::Reading(reading),
        std::task::Poll::Ready(read) => State::Reading(std::future::ready(read).boxed()),
    }
}

impl fmt::Debug for ReadAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.0 {
            State::Idle(_) => "idle",
            State::Reading(_) => "reading",
            State::Ended => "ended",
        };
        f.debug_tuple("ReadAhead").field(&state).finish()
    }
}
