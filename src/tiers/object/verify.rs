//! Checks the CRC-32 of every block that a data read covers wholly, while its bytes pass by: the store, the way from it,
//! and what stands between may return other bytes than were written.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

use super::core::Core;
use super::fetch;
use super::shuffle::Shuffle;
use super::streams::Extent;
use crate::tiers::StoreError;
use uniffle_wire::index::{RECORD_BYTES, records};

/// Records that are asked for at a time where they are not in memory.
const WINDOW: u32 = 4096;

/// A block that is to pass by.
#[derive(Debug, Clone, Copy)]
struct Check {
    start: u64,
    end: u64,
    /// 0 = was not computed.
    crc: u32,
}

/// Checks the blocks of one read in the order of the stream.
#[derive(Debug, Clone)]
pub(super) struct Verifier {
    /// Those of which not all records are known, the first one first.
    extents: VecDeque<Extent>,
    /// Records of the first that are known, and bytes of their blocks.
    known: (u32, u64),
    range: Range<u64>,
    checks: VecDeque<Check>,
    hasher: crc32fast::Hasher,
    /// Where in the stream the next byte stands.
    at: u64,
}

impl Verifier {
    /// For a read of `range`, which `extents` cover.
    pub(super) fn new(extents: VecDeque<Extent>, range: Range<u64>) -> Self {
        let (checks, hasher, at) = (VecDeque::new(), crc32fast::Hasher::new(), range.start);
        Self { extents, known: (0, 0), range, checks, hasher, at }
    }

    /// Knows the checksums of the next `bytes` of the range from now on.
    ///
    /// # Errors
    /// The records of an extent cannot be read.
    pub(super) async fn prepare(
        &mut self,
        core: &Core,
        shuffle: &Shuffle,
        bytes: u64,
    ) -> Result<(), StoreError> {
        let until = self.at.saturating_add(bytes).min(self.range.end);
        while let Some(extent) = self.extents.front().copied()
            && extent.base + self.known.1 < until
        {
            let window = self.window(core, shuffle, &extent).await?;
            let (mut blocks, mut end) = self.known;
            for record in records(&window) {
                let start = extent.base + end;
                blocks += 1;
                end += u64::from(record.length.unsigned_abs());
                let check =
                    Check { start, end: extent.base + end, crc: u32::try_from(record.crc).unwrap_or(0) };
                if check.start >= self.range.start && check.end <= self.range.end {
                    self.checks.push_back(check);
                }
            }
            self.known = (blocks, end);
            if blocks >= extent.blocks {
                self.extents.pop_front();
                self.known = (0, 0);
            }
        }
        Ok(())
    }

    /// The next records of an extent.
    async fn window(&self, core: &Core, shuffle: &Shuffle, extent: &Extent) -> Result<Bytes, StoreError> {
        let from = u64::from(self.known.0) * RECORD_BYTES as u64;
        let count = WINDOW.min(extent.blocks - self.known.0);
        let to = from + u64::from(count) * RECORD_BYTES as u64;
        let in_memory = core.records.find(&shuffle.records_key(extent)).and_then(|records| {
            let range = usize::try_from(from).ok()?..usize::try_from(to).ok()?;
            (range.end <= records.len()).then(|| records.slice(range))
        });
        match in_memory {
            Some(records) => Ok(records),
            None => {
                let range = extent.records + from..extent.records + to;
                fetch::read(core, &shuffle.segment_key(extent.segment), range).await
            }
        }
    }

    /// The first block that ends in the next bytes of the range, which are [prepared](Self::prepare), and has others than
    /// were written.
    pub(super) fn check(&mut self, mut bytes: &[u8]) -> Option<Range<u64>> {
        while !bytes.is_empty()
            && let Some(check) = self.checks.front().copied()
        {
            let until = if self.at < check.start { check.start } else { check.end };
            let len = usize::try_from(until - self.at).unwrap_or(usize::MAX).min(bytes.len());
            let (head, rest) = bytes.split_at(len);
            if self.at >= check.start {
                self.hasher.update(head);
            }
            self.at += len as u64;
            bytes = rest;
            if self.at == check.end {
                let actual = std::mem::take(&mut self.hasher).finalize();
                if check.crc != 0 && actual != check.crc {
                    return Some(check.start..check.end);
                }
                self.checks.pop_front();
            }
        }
        self.at += bytes.len() as u64;
        None
    }
}
