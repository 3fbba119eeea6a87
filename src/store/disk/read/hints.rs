//! Hints: ranges that a client will read next, prefetched into the page cache.
//!
//! A hint only helps reads through the page cache: short parts, and everything if `direct_io` is
//! off. Parts that bypass it would be read twice, or need read memory for a reader that may never
//! come.
//!
//! A hint never changes a response or the health of a disk, and nobody waits for it. Its cost is
//! bounded: the extents and bytes of a request are limited, and a disk serves one request at a
//! time. Disks that are unhealthy or have no capacity for another read get none.

use std::ops::Range;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::{DIRECT_BYTES_MIN, DiskReader, LogPiece, piece_of};
use crate::log::within;
use crate::store::disk::config::READ_TIMEOUT;
use crate::store::disk::core::DiskCore;
use crate::store::disk::log_file::Log;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::extents::extent::ExtentList;
use uniffle_wire::types::PartitionId;

/// Maximum bytes that the hints of one request prefetch: about half of a client's usual read
/// (14 MiB).
pub(in crate::store::disk) const HINTED_BYTES_MAX: u64 = 8 << 20;

/// Maximum extents of the hints of one request: each costs a system call of some microseconds.
pub(in crate::store::disk) const HINTED_EXTENTS_MAX: usize = 256;

/// Parts of one log, and the permit of their request at its disk.
struct Hinted {
    log: Arc<Log>,
    parts: Vec<Range<u64>>,
    _permit: OwnedSemaphorePermit,
}

impl DiskReader {
    /// Applies hints. Ignores ranges that are not completely published, and parts beyond the
    /// bounds.
    pub(in crate::store::disk) fn hint(
        &self,
        shuffle: &DiskShuffle,
        partition: PartitionId,
        ranges: &[Range<u64>],
    ) {
        let pieces = shuffle.with_partition(partition, |found| {
            found.map_or_else(Vec::new, |partition| {
                let published = ranges.iter().filter(|range| range.end <= partition.bytes);
                pieces(&partition.extents, published)
            })
        });
        for hinted in self.by_log(shuffle, pieces) {
            let (core, stop) = (Arc::clone(&self.core), self.tasks.cancelled());
            self.tasks.spawn("read hints", async move {
                tokio::select! {
                    biased;
                    () = stop => {}
                    () = advise(&core, hinted) => {}
                }
            });
        }
    }

    /// Returns the pieces that are read through the page cache, up to [`HINTED_BYTES_MAX`], on
    /// healthy disks that serve no other hints.
    fn by_log(&self, shuffle: &DiskShuffle, pieces: Vec<LogPiece>) -> Vec<Hinted> {
        let mut all: Vec<Hinted> = Vec::new();
        let mut remaining = HINTED_BYTES_MAX;
        for LogPiece { log, offset, length, .. } in pieces {
            let log = shuffle.log_at(log);
            if length >= DIRECT_BYTES_MIN && self.core.files.is_direct(&log) {
                continue;
            }
            let part = offset..offset + length.min(remaining);
            remaining -= length.min(remaining);
            match all.iter_mut().find(|hinted| hinted.log.id == log.id) {
                _ if part.is_empty() => break,
                Some(hinted) => hinted.parts.push(part),
                None if !log.disk.is_healthy() => {}
                None => {
                    let permit = Arc::clone(&log.disk.hints).try_acquire_owned();
                    all.extend(permit.ok().map(|_permit| Hinted { log, parts: vec![part], _permit }));
                }
            }
        }
        all
    }
}

/// Returns the pieces on disks in `ranges`.
fn pieces<'a>(extents: &ExtentList, ranges: impl Iterator<Item = &'a Range<u64>>) -> Vec<LogPiece> {
    let all = ranges.flat_map(|Range { start, end }| {
        extents.touched(*start, *end).map(|extent| (extent, piece_of(extent, *start, *end)))
    });
    let on_disks = all.take(HINTED_EXTENTS_MAX).filter(|(extent, _)| extent.is_on_disk());
    on_disks.map(|(_, piece)| piece).collect()
}

async fn advise(core: &DiskCore, hinted: Hinted) {
    let bytes = hinted.parts.iter().map(|part| part.end - part.start).sum();
    let advised =
        within(READ_TIMEOUT, async { core.files.reader(&hinted.log).await?.advise(hinted.parts).await });
    // A later read of these bytes reports the error.
    if advised.await.is_ok() {
        core.metrics.hints.inc();
        core.metrics.hinted_bytes.inc_by(bytes);
    }
}
