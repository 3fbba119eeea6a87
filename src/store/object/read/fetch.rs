//! Reads ranges of objects directly into the buffers of their readers.
//!
//! Adjacent ranges share a request, and so do ranges with small gaps. A response may continue with
//! the next chunk of its reader ([`RangeReadState`]).

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::sync::OwnedSemaphorePermit;

use super::body::{RangeBody, Room};
use crate::store::StoreError;
use crate::store::object::circuit_breaker::wrong_answer;
use crate::store::object::core::ObjectCore;

/// Maximum number of concurrent requests of one reader.
const RANGES_AT_ONCE: usize = 8;

/// Largest gap between two parts of an object that share a request. Reading a gap of this size
/// takes about as long as another request.
const GAP_BYTES_MAX: u64 = 256 << 10;

/// A range of an object, and the range of a buffer that it fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store) struct RangePart {
    pub(in crate::store::object) segment: u32,
    pub(in crate::store::object) offset: u64,
    /// Range of the buffer. It has the length of the object's range.
    pub(in crate::store) range: Range<usize>,
}

impl RangePart {
    /// Removes the first `bytes` bytes of the part, and returns them as a part.
    pub(super) fn split_to(&mut self, bytes: usize) -> Self {
        let at = self.range.start + bytes;
        let head = Self { range: self.range.start..at, ..self.clone() };
        (self.offset, self.range.start) = (self.offset + bytes as u64, at);
        head
    }

    /// Returns the end offset in the object.
    pub(in crate::store) fn end(&self) -> u64 {
        self.offset + self.range.len() as u64
    }
}

/// Appends a part. If it continues the last part in object and buffer, both become one.
pub(in crate::store) fn push(parts: &mut Vec<RangePart>, part: RangePart) {
    match parts.last_mut() {
        Some(last)
            if last.segment == part.segment
                && last.range.end == part.range.start
                && last.end() == part.offset =>
        {
            last.range.end = part.range.end;
        }
        _ => parts.push(part),
    }
}

/// Returns the number of leading `parts` that one request reads. They belong to one object. The
/// gaps between them have at most as many bytes as the parts, plus `GAP_BYTES_MAX`.
fn together(parts: &[RangePart]) -> usize {
    let Some(first) = parts.first() else { return 0 };
    let (mut end, mut wanted, mut between) = (first.end(), first.range.len() as u64, 0);
    let joins = |part: &&RangePart| {
        let Some(gap) = part.offset.checked_sub(end) else { return false };
        wanted += part.range.len() as u64;
        between += gap;
        end = part.end();
        part.segment == first.segment && gap <= GAP_BYTES_MAX && between <= wanted + GAP_BYTES_MAX
    };
    1 + parts[1..].iter().take_while(joins).count()
}

/// State that a reader keeps between the chunks of a range. A response that continues with the next
/// chunk makes a long run of bytes a single request.
#[derive(Debug, Default)]
pub(in crate::store) struct RangeReadState {
    /// Bytes that follow the last part of a chunk in its object and belong to the next chunks.
    pub(super) more: u64,
    rest: Option<Rest>,
}

impl RangeReadState {
    /// Drops the response that continues with the next chunk, because its bytes may be wrong.
    pub(in crate::store::object) fn forget(&mut self) {
        self.rest = None;
    }
}

/// A response that continues with the next chunk. It occupies a connection, so the number of such
/// responses is [limited](ObjectCore::answers_ahead).
#[derive(Debug)]
struct Rest {
    segment: u32,
    body: RangeBody,
    _place: OwnedSemaphorePermit,
}

impl Rest {
    fn begins(&self, part: &RangePart) -> bool {
        (self.segment, self.body.at()) == (part.segment, part.offset)
    }
}

/// The rest of a buffer, from which parts are taken in ascending order.
struct Unfilled<'a> {
    rest: &'a mut [u8],
    at: usize,
}

impl<'a> Unfilled<'a> {
    fn take(&mut self, part: &RangePart) -> Room<'a> {
        let range = &part.range;
        let rest = std::mem::take(&mut self.rest);
        let (_, tail) = rest.split_at_mut_checked(range.start - self.at).unwrap_or_default();
        let (buffer, tail) = tail.split_at_mut_checked(range.len()).unwrap_or_default();
        (self.rest, self.at) = (tail, range.end);
        Room { offset: part.offset, buffer }
    }
}

/// Fills `parts` of `buffer`, which are in ascending order.
///
/// # Errors
/// The store fails, or a response has another length than requested.
pub(in crate::store::object) async fn fill(
    core: &ObjectCore,
    key_of: impl Fn(u32) -> String,
    parts: &[RangePart],
    buffer: &mut [u8],
    state: &mut RangeReadState,
) -> Result<(), StoreError> {
    let (mut parts, mut unfilled) = (parts.to_vec(), Unfilled { rest: buffer, at: 0 });
    let first = parts.first_mut();
    let begun = state.rest.take().zip(first).filter(|(rest, part)| rest.begins(part)).map(|(rest, part)| {
        let left = usize::try_from(rest.body.remaining()).unwrap_or(usize::MAX);
        let head = part.split_to(left.min(part.range.len()));
        (rest, unfilled.take(&head))
    });
    parts.retain(|part| !part.range.is_empty());
    let (mut gets, mut left) = (Vec::new(), &parts[..]);
    while let Some(first) = left.first() {
        let (those, others) = left.split_at(together(left));
        let rooms = those.iter().map(|part| unfilled.take(part)).collect();
        let more = if others.is_empty() { state.more } else { 0 };
        gets.push(get(core, first.segment, key_of(first.segment), rooms, more));
        left = others;
    }
    let gets = stream::iter(gets).buffer_unordered(RANGES_AT_ONCE).try_collect::<Vec<_>>();
    let begun = async {
        match begun {
            Some((rest, room)) => resume(core, rest, room).await,
            None => Ok(None),
        }
    };
    let (begun, rests) = futures::try_join!(begun, gets)?;
    // Only the last request of a chunk can leave an unread rest.
    state.rest = rests.into_iter().flatten().next().or(begun);
    Ok(())
}

/// Continues to read a response. If it fails, requests the range again.
async fn resume(core: &ObjectCore, mut rest: Rest, room: Room<'_>) -> Result<Option<Rest>, StoreError> {
    let Room { offset, buffer } = room;
    match rest.body.fill(vec![Room { offset, buffer: &mut *buffer }]).await {
        Ok(()) => Ok((rest.body.remaining() > 0).then_some(rest)),
        Err(error) => {
            tracing::debug!(%error, "requesting the rest of a response again");
            let (segment, key) = (rest.segment, rest.body.key().to_owned());
            drop(rest);
            get(core, segment, key, vec![Room { offset, buffer }], 0).await
        }
    }
}

/// Fills `rooms`, which are sorted by offset, with one request. The request includes `more` further
/// bytes if there is a permit for a response that continues.
async fn get(
    core: &ObjectCore,
    segment: u32,
    key: String,
    rooms: Vec<Room<'_>>,
    more: u64,
) -> Result<Option<Rest>, StoreError> {
    core.metrics.ranges.inc();
    let start = rooms.first().map_or(0, |room| room.offset);
    let end = rooms.last().map_or(0, Room::end);
    let place = if more > 0 { Arc::clone(&core.answers_ahead).try_acquire_owned().ok() } else { None };
    let end = if place.is_some() { end + more } else { end };
    let got = async {
        let mut body = RangeBody::ask(core, key, start..end).await?;
        body.fill(rooms).await?;
        Ok(body)
    };
    let got = got.await;
    core.circuit_breaker.note(&got);
    let body = got?;
    Ok(place.filter(|_| body.remaining() > 0).map(|_place| Rest { segment, body, _place }))
}

/// Reads a small range into a buffer of its own.
pub(in crate::store) async fn read(
    core: &ObjectCore,
    key: &str,
    range: Range<u64>,
) -> Result<Bytes, StoreError> {
    let too_long = || wrong_answer(key, "a range that does not fit into memory");
    let length = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| too_long())?;
    let mut bytes = vec![0; length];
    get(core, 0, key.to_owned(), vec![Room { offset: range.start, buffer: &mut bytes }], 0).await?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_request() {
        let mut parts = Vec::new();
        let part = |segment, offset, range| RangePart { segment, offset, range };
        for it in [part(1, 100, 0..10), part(1, 110, 10..30), part(1, 131, 30..40), part(2, 141, 40..50)] {
            push(&mut parts, it);
        }
        assert_eq!(parts, [part(1, 100, 0..30), part(1, 131, 30..40), part(2, 141, 40..50)]);
    }

    #[test]
    fn close_ranges_are_requested_together() {
        let part = |segment, offset: u64, len| RangePart { segment, offset, range: 0..len };
        let gap = GAP_BYTES_MAX;
        assert_eq!(together(&[part(1, 0, 10), part(1, 10 + gap, 10), part(1, 20 + gap, 10)]), 3);
        assert_eq!(together(&[part(1, 0, 10), part(1, 11 + gap, 10)]), 1);
        assert_eq!(together(&[part(1, 0, 10), part(2, 10, 10)]), 1);
        assert_eq!(together(&[part(1, 50, 10), part(1, 10, 10)]), 1);
        let sparse: Vec<_> = (0..9).map(|n| part(1, n * gap, 10)).collect();
        assert_eq!(
            together(&sparse),
            2,
            "ranges whose gaps exceed the wanted bytes must not share a request"
        );
        assert_eq!(together(&[]), 0);
    }
}
