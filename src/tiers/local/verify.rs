//! Checks the CRC-32 of every block that a data read covers wholly, while its bytes pass by.
//!
//! Clients check too, but they can only say that something is wrong; here it is known which disk returned other bytes
//! than were written.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::Core;
use super::log::Log;
use super::shuffle::{Extent, Shuffle};
use crate::schema::words;
use crate::tiers::StoreError;
use uniffle_wire::index::{IndexRecord, records};

words! {
    /// Which data reads are checked.
    pub enum VerifyReads {
        /// Every one.
        Always = "always",
        /// One in sixteen.
        Sampled = "sampled",
        /// None.
        Off = "off",
    }
}

/// Of so many reads one is checked when sampling.
pub(super) const SAMPLE: u64 = 16;

/// A block that is to pass by.
#[derive(Debug)]
struct Check {
    /// Its place in the stream.
    place: Range<u64>,
    /// 0 = was not computed.
    crc: u32,
    /// Base of its extent.
    base: u64,
}

/// Checks the blocks of one read as its bytes pass, in the order of the stream.
#[derive(Debug)]
pub(super) struct Verifier {
    extents: std::vec::IntoIter<Extent>,
    range: Range<u64>,
    checks: VecDeque<Check>,
    hasher: crc32fast::Hasher,
    /// Where in the stream the next byte stands.
    at: u64,
}

/// What was found.
#[derive(Debug)]
pub(super) enum Mismatch {
    /// A block has other bytes.
    Block {
        /// Base of its extent.
        base: u64,
    },
    /// The records of an extent cannot be read.
    Records {
        /// Why.
        error: StoreError,
        /// Where they stand.
        log: Arc<Log>,
    },
}

impl Verifier {
    /// For a read of `range`, which `extents` cover, holes left out.
    pub(super) fn new(extents: Vec<Extent>, range: Range<u64>) -> Self {
        let (checks, hasher, at) = (VecDeque::new(), crc32fast::Hasher::new(), range.start);
        Self { extents: extents.into_iter(), range, checks, hasher, at }
    }

    /// The next bytes of the range.
    pub(super) async fn check(
        &mut self,
        core: &Core,
        shuffle: &Shuffle,
        mut bytes: &[u8],
    ) -> Result<(), Mismatch> {
        while !bytes.is_empty() {
            let Some(check) = self.checks.front() else {
                match self.extents.next() {
                    Some(extent) => self.load(core, shuffle, &extent).await?,
                    None => return Ok(()),
                }
                continue;
            };
            let until = if self.at < check.place.start { check.place.start } else { check.place.end };
            let len = usize::try_from(until - self.at).unwrap_or(usize::MAX).min(bytes.len());
            let (head, rest) = bytes.split_at(len);
            if self.at >= check.place.start {
                self.hasher.update(head);
            }
            self.at += len as u64;
            bytes = rest;
            if self.at == check.place.end {
                let (crc, base) = (check.crc, check.base);
                let actual = std::mem::take(&mut self.hasher).finalize();
                self.checks.pop_front();
                if crc != 0 && actual != crc {
                    return Err(Mismatch::Block { base });
                }
            }
        }
        Ok(())
    }

    async fn load(&mut self, core: &Core, shuffle: &Shuffle, extent: &Extent) -> Result<(), Mismatch> {
        let (found, base) = match core.records.find(&shuffle.records_key(extent)) {
            // What is cached has offsets in the stream.
            Some(cached) => (records(&cached).collect(), 0),
            None => {
                let found = core.records_of(shuffle, extent).await;
                let log = || shuffle.log_at(extent.index_log);
                (found.map_err(|error| Mismatch::Records { error, log: log() })?, extent.base)
            }
        };
        let check = |record: &IndexRecord| {
            let start = base + record.offset.unsigned_abs();
            let place = start..start + u64::from(record.length.unsigned_abs());
            let whole = place.start >= self.range.start && place.end <= self.range.end;
            let crc = u32::try_from(record.crc).unwrap_or(0);
            whole.then_some(Check { place, crc, base: extent.base })
        };
        self.checks.extend(found.iter().filter_map(check));
        Ok(())
    }
}
