//! Rewrites metadata logs, indexes and claims so that damaged ones have valid checksums.
//!
//! The worker has no switches for its defences and should not have any. Recomputing the checksums
//! after a corruption shows the effect of a missing defence.

use std::path::Path;

use bytes::BytesMut;

use uniffle_worker::log::METADATA;
use uniffle_worker::log::format::frame::{self, Encoder, Epoch, Frame, FrameContent};
use uniffle_worker::store::index::codec;

/// Offset of the checksum in a frame header.
const FRAME_CHECKSUM_AT: usize = 36;
/// Offset of the checksum in an index group header.
const GROUP_CHECKSUM_AT: usize = 60;
/// Offset of the checksum of an entry's records in the entry.
const ENTRY_CHECKSUM_AT: usize = 36;

/// Returns whether the file is a copy of the metadata log.
pub(crate) fn is_log(path: &Path) -> bool {
    path.starts_with(METADATA) && path.ends_with("log")
}

/// Returns whether the file is the list of data directories.
pub(crate) fn is_members(path: &Path) -> bool {
    path.starts_with(METADATA) && path.ends_with("members")
}

pub(crate) fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "index")
}

/// Recomputes the checksum and the chain of every frame of a log or list.
pub(crate) fn reseal_log(content: &mut [u8]) {
    let (mut at, mut previous) = (0, 0_u32);
    while let Ok(length) = frame::total_bytes(content.get(at..).unwrap_or_default()) {
        let Some(frame) = content.get_mut(at..at + length) else { return };
        frame[FRAME_CHECKSUM_AT - 4..FRAME_CHECKSUM_AT].copy_from_slice(&previous.to_be_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&frame[..FRAME_CHECKSUM_AT]);
        hasher.update(&frame[frame::HEADER_BYTES..]);
        let crc: u32 = hasher.finalize();
        frame[FRAME_CHECKSUM_AT..frame::HEADER_BYTES].copy_from_slice(&crc.to_be_bytes());
        (at, previous) = (at + length, crc);
    }
}

/// Maps the frames of a log or list with `keep` and encodes the result as one chain.
pub(crate) fn chained(content: &[u8], mut keep: impl FnMut(Frame) -> Option<FrameContent>) -> Vec<u8> {
    let (mut at, mut out, mut encoder) = (0, BytesMut::new(), None);
    while let Ok(frame) = frame::decode(content.get(at..).unwrap_or_default()) {
        at += frame::total_bytes(&content[at..]).expect("the frame was decoded before");
        let encoder = encoder.get_or_insert_with(|| Encoder::new(frame.generation));
        if let Some(entry) = keep(frame) {
            assert!(encoder.encode(&entry, 0, &mut out), "the entry fitted into the previous log");
        }
    }
    out.to_vec()
}

/// Returns the frames of a log.
pub(crate) fn frames(content: &[u8]) -> Vec<Frame> {
    let mut all = Vec::new();
    chained(content, |frame| {
        all.push(frame);
        None
    });
    all
}

/// Recomputes the checksums of every index group that is as long as it declares.
pub(crate) fn reseal_index(content: &mut [u8]) {
    let mut at = 0;
    while let Some(found) = find(content, at) {
        at = found + 1;
        let group = &mut content[found..];
        let Some(header) = group.first_chunk::<{ codec::HEADER_BYTES }>() else { return };
        let word = |at: usize| {
            u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize
        };
        let head = codec::HEADER_BYTES.saturating_add(word(44).saturating_mul(codec::ENTRY_BYTES));
        // The length is the second half of the word at 8, because test groups are small.
        let total = word(12);
        if head > total || total > group.len() {
            continue;
        }
        let (head, records) = group[..total].split_at_mut(head);
        let mut records = &*records;
        for entry in head[codec::HEADER_BYTES..].chunks_mut(codec::ENTRY_BYTES) {
            let blocks = u32::from_be_bytes([entry[4], entry[5], entry[6], entry[7]]) as usize;
            let Some((own, rest)) = records.split_at_checked(blocks.saturating_mul(40)) else { break };
            records = rest;
            entry[ENTRY_CHECKSUM_AT..].copy_from_slice(&crc32fast::hash(own).to_be_bytes());
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head[..GROUP_CHECKSUM_AT]);
        hasher.update(&head[codec::HEADER_BYTES..]);
        let crc: u32 = hasher.finalize();
        head[GROUP_CHECKSUM_AT..codec::HEADER_BYTES].copy_from_slice(&crc.to_be_bytes());
        at = found + total;
    }
}

fn find(content: &[u8], from: usize) -> Option<usize> {
    let rest = content.get(from..)?;
    rest.windows(codec::MAGIC.len()).position(|bytes| bytes == codec::MAGIC).map(|at| from + at)
}

/// Returns the claim with a valid checksum.
pub(crate) fn reseal_claim(content: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(content).ok()?;
    let checked = text.lines().take(2).map(|line| line.len() + 1).sum::<usize>();
    let checksum = text.trim_end().len().checked_sub(8).filter(|at| *at > checked)?;
    let crc = crc32fast::hash(text.get(..checked)?.as_bytes());
    Some(format!("{}{crc:08x}\n", text.get(..checksum)?).into_bytes())
}

/// Returns whether a claim has a valid checksum.
pub(crate) fn is_sound_claim(content: &[u8]) -> bool {
    reseal_claim(content).is_some_and(|resealed| resealed == content)
}

/// Returns an epoch without absent members: its members are `here`, and it succeeds all `others`.
pub(crate) fn without_missing_members(mut epoch: Epoch, here: &[String], others: &[u64]) -> Epoch {
    epoch.members.retain(|member| here.contains(&member.uuid().to_string()));
    epoch.lineage.extend(others);
    epoch.gap = None;
    epoch
}
