//! Copies the body of a response into the buffers of its reader.
//!
//! A body that was not read to its end stays open, so that the next chunk of a reader can continue
//! it. A response that is shorter or longer than the requested range is an error.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use bytes::{Buf as _, Bytes};
use futures::stream::{BoxStream, TryStreamExt as _};
use object_store::{GetOptions, GetRange, ObjectStore as _};
use parking_lot::Mutex;

use crate::store::StoreError;
use crate::store::object::circuit_breaker::{failed, wrong_answer};
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::path_of;

/// A buffer for bytes of an object.
pub(super) struct Room<'a> {
    /// Offset of the first byte in the object.
    pub(super) offset: u64,
    pub(super) buffer: &'a mut [u8],
}

impl Room<'_> {
    /// Returns the offset after the last byte.
    pub(super) fn end(&self) -> u64 {
        self.offset + self.buffer.len() as u64
    }
}

/// The unread rest of a response that contains a range of an object.
pub(in crate::store::object) struct RangeBody {
    key: String,
    /// Unread part of the requested range.
    range: Range<u64>,
    /// Received bytes that no reader has asked for yet.
    received: Bytes,
    /// Never locked. The mutex makes the stream `Sync`, which a boxed stream is not.
    chunks: Mutex<BoxStream<'static, object_store::Result<Bytes>>>,
}

impl fmt::Debug for RangeBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Body").field(&self.key).field(&self.range).finish()
    }
}

impl RangeBody {
    /// Requests a range of the object `key`.
    ///
    /// # Errors
    /// The store fails, or its response has another range.
    pub(super) async fn ask(core: &ObjectCore, key: String, range: Range<u64>) -> Result<Self, StoreError> {
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        let answer = core.store.get_opts(&path_of(&key), options).await;
        let answer = answer.map_err(|error| failed(&key, &error))?;
        if answer.range != range {
            return Err(wrong_answer(&key, "response has a different range than requested"));
        }
        Ok(Self { key, range, received: Bytes::new(), chunks: Mutex::new(answer.into_stream()) })
    }

    pub(in crate::store) fn key(&self) -> &str {
        &self.key
    }

    /// Returns the offset of the next byte in the object.
    pub(in crate::store) fn at(&self) -> u64 {
        self.range.start
    }

    /// Returns the number of unread bytes.
    pub(in crate::store::object) fn remaining(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Fills `rooms`, which are sorted by offset. Bytes between them are dropped.
    ///
    /// # Errors
    /// The store fails, or the response has fewer or more bytes than requested.
    pub(super) async fn fill(&mut self, rooms: Vec<Room<'_>>) -> Result<(), StoreError> {
        let mut rooms = VecDeque::from(rooms);
        let until = rooms.back().map_or(self.at(), Room::end);
        while self.at() < until {
            if self.received.is_empty() {
                let received = self.next().await?;
                self.received = received.ok_or_else(|| wrong_answer(&self.key, "response ended early"))?;
                continue;
            }
            let wanted = usize::try_from(until - self.at()).unwrap_or(usize::MAX).min(self.received.len());
            pour(&self.received[..wanted], self.at(), &mut rooms);
            self.received.advance(wanted);
            self.range.start += wanted as u64;
        }
        if self.remaining() == 0
            && (!self.received.is_empty() || self.next().await?.is_some_and(|it| !it.is_empty()))
        {
            return Err(wrong_answer(&self.key, "response has more bytes than requested"));
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<Bytes>, StoreError> {
        let next = self.chunks.get_mut().try_next().await;
        next.map_err(|error| failed(&self.key, &error))
    }
}

/// Copies `bytes`, which begin at offset `at`, into `rooms`. Removes rooms that are full.
fn pour(mut bytes: &[u8], mut at: u64, rooms: &mut VecDeque<Room<'_>>) {
    while let Some(Room { offset, buffer }) = rooms.pop_front() {
        let gap = usize::try_from(offset.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
        at += gap as u64;
        bytes = &bytes[gap..];
        let filled = bytes.len().min(buffer.len());
        let (head, tail) = buffer.split_at_mut(filled);
        head.copy_from_slice(&bytes[..filled]);
        at += filled as u64;
        bytes = &bytes[filled..];
        if !tail.is_empty() {
            rooms.push_front(Room { offset: offset + filled as u64, buffer: tail });
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(offset: u64, buffer: &mut [u8]) -> Room<'_> {
        Room { offset, buffer }
    }

    #[test]
    fn buffers_are_filled_in_any_pieces() {
        let object: Vec<u8> = (0..30).collect();
        for cut in 1..30 {
            let (mut first, mut second, mut third) = ([0; 5], [0; 1], [0; 7]);
            let mut rooms = VecDeque::from([room(2, &mut first), room(7, &mut second), room(20, &mut third)]);
            for (number, chunk) in object[2..27].chunks(cut).enumerate() {
                pour(chunk, 2 + (number * cut) as u64, &mut rooms);
            }
            assert!(rooms.is_empty(), "{cut}");
            assert_eq!((first, second, third), ([2, 3, 4, 5, 6], [7], [20, 21, 22, 23, 24, 25, 26]), "{cut}");
        }
    }

    fn body(range: Range<u64>, chunks: &[&'static [u8]]) -> RangeBody {
        let chunks: Vec<_> = chunks.iter().map(|chunk| Ok(Bytes::from_static(chunk))).collect();
        let chunks = Mutex::new(Box::pin(futures::stream::iter(chunks)) as BoxStream<'static, _>);
        RangeBody { key: "a/key".to_owned(), range, received: Bytes::new(), chunks }
    }

    #[tokio::test]
    async fn later_bytes_are_kept() {
        let mut body = body(10..16, &[b"abcd", b"", b"ef"]);
        let (mut first, mut second) = ([0; 2], [0; 3]);
        body.fill(vec![room(10, &mut first)]).await.unwrap();
        assert_eq!((body.at(), body.remaining()), (12, 4));
        body.fill(vec![room(13, &mut second)]).await.unwrap();
        assert_eq!((&first, &second, body.remaining()), (b"ab", b"def", 0));
    }

    #[tokio::test]
    async fn response_of_wrong_length_is_an_error() {
        let cases: [(&[&'static [u8]], &str); 2] =
            [(&[b"abc"], "ended early"), (&[b"abc", b"de"], "more bytes")];
        for (chunks, what) in cases {
            let (mut buffer, mut body) = ([0; 4], body(0..4, chunks));
            let error = body.fill(vec![room(0, &mut buffer)]);
            let text = error.await.unwrap_err().to_string();
            assert!(text.contains(what) && text.contains("a/key"), "{text}");
        }
    }
}
