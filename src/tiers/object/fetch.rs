//! Ranges of objects, straight into the buffer of whom they are for.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{GetOptions, GetRange, ObjectStore as _};

use super::condition::wrong_answer;
use super::core::Core;
use super::layout::path_of;
use crate::tiers::StoreError;

/// Ranges that one reader asks for at a time.
const RANGES_AT_ONCE: usize = 8;

/// Bytes between two parts of an object that are brought along rather than begin another request: a request costs as much
/// time as some hundred KiB.
const GAP_BYTES_MAX: u64 = 256 << 10;

/// A range of an object, as long as what it fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) segment: u32,
    pub(super) offset: u64,
    /// Its place in the buffer.
    pub(super) range: Range<usize>,
}

impl Part {
    /// Takes the first `bytes` out of it.
    pub(super) fn split_to(&mut self, bytes: usize) -> Self {
        let at = self.range.start + bytes;
        let head = Self { range: self.range.start..at, ..self.clone() };
        (self.offset, self.range.start) = (self.offset + bytes as u64, at);
        head
    }

    fn end(&self) -> u64 {
        self.offset + self.range.len() as u64
    }
}

/// Appends a part behind the others; one that goes on where the last one ends is one with it.
pub(super) fn push(parts: &mut Vec<Part>, part: Part) {
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

/// Parts of one object that one request brings: how many of those that follow. What lies between them is at most as much as they
/// are themselves, and one gap more.
fn together(parts: &[Part]) -> usize {
    let Some(first) = parts.first() else { return 0 };
    let (mut end, mut wanted, mut between) = (first.end(), first.range.len() as u64, 0);
    let joins = |part: &&Part| {
        let Some(gap) = part.offset.checked_sub(end) else { return false };
        wanted += part.range.len() as u64;
        between += gap;
        end = part.end();
        part.segment == first.segment && gap <= GAP_BYTES_MAX && between <= wanted + GAP_BYTES_MAX
    };
    1 + parts[1..].iter().take_while(joins).count()
}

/// Fills the parts of `buffer`, which stand in it in order.
///
/// # Errors
/// The store's; also when an answer is not as long as what was asked for.
pub(super) async fn fill(
    core: &Core,
    key_of: impl Fn(u32) -> String,
    mut parts: &[Part],
    buffer: &mut [u8],
) -> Result<(), StoreError> {
    let mut gets = Vec::new();
    let (mut rest, mut at) = (buffer, 0);
    while let Some(first) = parts.first() {
        let (those, others) = parts.split_at(together(parts));
        let mut rooms = Vec::with_capacity(those.len());
        for part in those {
            let (_, behind) =
                std::mem::take(&mut rest).split_at_mut_checked(part.range.start - at).unwrap_or_default();
            let (room, behind) = behind.split_at_mut_checked(part.range.len()).unwrap_or_default();
            (rest, at) = (behind, part.range.end);
            rooms.push((part.offset, room));
        }
        gets.push(get(core, key_of(first.segment), rooms));
        parts = others;
    }
    stream::iter(gets).buffer_unordered(RANGES_AT_ONCE).try_collect::<()>().await
}

/// Room for bytes of an object, with where they begin in it.
type Room<'a> = (u64, &'a mut [u8]);

async fn get(core: &Core, key: String, rooms: Vec<Room<'_>>) -> Result<(), StoreError> {
    core.metrics.ranges.inc();
    let got = get_into(core, &key, rooms).await;
    core.condition.note(&got);
    got
}

/// Fills rooms, which are in the order of the object, by one request.
async fn get_into(core: &Core, key: &str, rooms: Vec<Room<'_>>) -> Result<(), StoreError> {
    let start = rooms.first().map_or(0, |(offset, _)| *offset);
    let end = rooms.last().map_or(0, |(offset, room)| offset + room.len() as u64);
    let options = GetOptions { range: Some(GetRange::Bounded(start..end)), ..GetOptions::default() };
    let failed = |error| super::condition::failed(key, &error);
    let answer = core.store.get_opts(&path_of(key), options).await.map_err(failed)?;
    if answer.range != (start..end) {
        return Err(wrong_answer(key, "another range than was asked for"));
    }
    let mut chunks = answer.into_stream();
    let (mut rooms, mut at) = (VecDeque::from(rooms), start);
    while let Some(chunk) = chunks.try_next().await.map_err(failed)? {
        if chunk.len() as u64 > end - at {
            return Err(wrong_answer(key, "more bytes than were asked for"));
        }
        pour(&chunk, at, &mut rooms);
        at += chunk.len() as u64;
    }
    match at == end {
        true => Ok(()),
        false => Err(wrong_answer(key, "the answer ended too early")),
    }
}

/// Copies what of the bytes at `at` has room.
fn pour(mut bytes: &[u8], mut at: u64, rooms: &mut VecDeque<Room<'_>>) {
    while let Some((offset, room)) = rooms.pop_front() {
        let gap = usize::try_from(offset.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
        at += gap as u64;
        bytes = &bytes[gap..];
        let filled = bytes.len().min(room.len());
        let (head, behind) = room.split_at_mut(filled);
        head.copy_from_slice(&bytes[..filled]);
        at += filled as u64;
        bytes = &bytes[filled..];
        if !behind.is_empty() {
            rooms.push_front((offset + filled as u64, behind));
            return;
        }
    }
}

/// A range as bytes of their own. For what is small.
pub(super) async fn read(core: &Core, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
    let too_long = || wrong_answer(key, "a range that does not fit into memory");
    let length = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| too_long())?;
    let mut bytes = vec![0; length];
    get(core, key.to_owned(), vec![(range.start, &mut bytes)]).await?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_request() {
        let mut parts = Vec::new();
        let part = |segment, offset, range| Part { segment, offset, range };
        for it in [part(1, 100, 0..10), part(1, 110, 10..30), part(1, 131, 30..40), part(2, 141, 40..50)] {
            push(&mut parts, it);
        }
        assert_eq!(parts, [part(1, 100, 0..30), part(1, 131, 30..40), part(2, 141, 40..50)]);
    }

    #[test]
    fn what_lies_close_together_is_asked_for_together() {
        let part = |segment, offset: u64, len| Part { segment, offset, range: 0..len };
        let gap = GAP_BYTES_MAX;
        assert_eq!(together(&[part(1, 0, 10), part(1, 10 + gap, 10), part(1, 20 + gap, 10)]), 3);
        assert_eq!(together(&[part(1, 0, 10), part(1, 11 + gap, 10)]), 1, "too far");
        assert_eq!(together(&[part(1, 0, 10), part(2, 10, 10)]), 1, "another object");
        assert_eq!(together(&[part(1, 50, 10), part(1, 10, 10)]), 1, "backwards");
        let sparse: Vec<_> = (0..9).map(|n| part(1, n * gap, 10)).collect();
        assert_eq!(together(&sparse), 2, "more would be brought along than is wanted");
        assert_eq!(together(&[]), 0);
    }

    #[test]
    fn rooms_are_filled_however_the_answer_is_cut() {
        let object: Vec<u8> = (0..30).collect();
        for cut in 1..30 {
            let (mut first, mut second, mut third) = ([0; 5], [0; 1], [0; 7]);
            let mut rooms = VecDeque::from([(2, &mut first[..]), (7, &mut second[..]), (20, &mut third[..])]);
            for (number, chunk) in object[2..27].chunks(cut).enumerate() {
                pour(chunk, 2 + (number * cut) as u64, &mut rooms);
            }
            assert!(rooms.is_empty(), "{cut}");
            assert_eq!((first, second, third), ([2, 3, 4, 5, 6], [7], [20, 21, 22, 23, 24, 25, 26]), "{cut}");
        }
    }
}
