//! Ranges of objects, straight into the buffer of whom they are for.

use std::ops::Range;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{GetOptions, GetRange, ObjectStore as _};

use super::condition::wrong_answer;
use super::core::{Core, path_of};
use crate::tiers::StoreError;

/// Ranges that one reader asks for at a time.
const RANGES_AT_ONCE: usize = 8;

/// A range of an object, as long as what it fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) segment: u32,
    pub(super) offset: u64,
    /// Its place in the buffer.
    pub(super) range: Range<usize>,
}

/// Appends a part behind the others; one that goes on where the last one ends is asked for together with it.
pub(super) fn push(parts: &mut Vec<Part>, part: Part) {
    match parts.last_mut() {
        Some(last)
            if last.segment == part.segment
                && last.range.end == part.range.start
                && last.offset + last.range.len() as u64 == part.offset =>
        {
            last.range.end = part.range.end;
        }
        _ => parts.push(part),
    }
}

/// Fills the parts of `buffer`, which stand in it in order.
///
/// # Errors
/// The store's; also when an answer is not as long as what was asked for.
pub(super) async fn fill(
    core: &Core,
    key_of: impl Fn(u32) -> String,
    parts: &[Part],
    buffer: &mut [u8],
) -> Result<(), StoreError> {
    let mut gets = Vec::with_capacity(parts.len());
    let (mut rest, mut at) = (buffer, 0);
    for part in parts {
        let (_, behind) =
            std::mem::take(&mut rest).split_at_mut_checked(part.range.start - at).unwrap_or_default();
        let (room, behind) = behind.split_at_mut_checked(part.range.len()).unwrap_or_default();
        (rest, at) = (behind, part.range.end);
        gets.push(get(core, key_of(part.segment), part.offset, room));
    }
    stream::iter(gets).buffer_unordered(RANGES_AT_ONCE).try_collect::<()>().await
}

async fn get(core: &Core, key: String, offset: u64, room: &mut [u8]) -> Result<(), StoreError> {
    core.metrics.ranges.inc();
    let got = get_into(core, &key, offset, room).await;
    core.condition.note(&got);
    got
}

async fn get_into(core: &Core, key: &str, offset: u64, room: &mut [u8]) -> Result<(), StoreError> {
    let wanted = offset..offset + room.len() as u64;
    let options = GetOptions { range: Some(GetRange::Bounded(wanted.clone())), ..GetOptions::default() };
    let failed = |error| super::condition::failed(key, &error);
    let answer = core.store.get_opts(&path_of(key), options).await.map_err(failed)?;
    if answer.range != wanted {
        return Err(wrong_answer(key, "another range than was asked for"));
    }
    let mut chunks = answer.into_stream();
    let mut left = room;
    while let Some(chunk) = chunks.try_next().await.map_err(failed)? {
        let Some((head, behind)) = std::mem::take(&mut left).split_at_mut_checked(chunk.len()) else {
            return Err(wrong_answer(key, "more bytes than were asked for"));
        };
        head.copy_from_slice(&chunk);
        left = behind;
    }
    match left.is_empty() {
        true => Ok(()),
        false => Err(wrong_answer(key, "the answer ended too early")),
    }
}

/// A range as bytes of their own. For what is small.
pub(super) async fn read(core: &Core, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
    let too_long = || wrong_answer(key, "a range that does not fit into memory");
    let length = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| too_long())?;
    let mut bytes = vec![0; length];
    get(core, key.to_owned(), range.start, &mut bytes).await?;
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
}
