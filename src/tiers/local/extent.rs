//! An extent: a contiguous part of a partition's published stream in one data log.

use crate::tiers::extents::{self, InStream, chunk_of};
use uniffle_io::BLOCK_ALIGN;

/// A published extent. These 40 bytes are the only memory per extent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Offset of its first byte in the partition's stream.
    pub(super) base: u64,
    /// Bytes of data.
    pub(super) length: u64,
    /// Offset of its records in the index log.
    pub(super) index_offset: u64,
    /// Offset of its data in the data log, in units of [`BLOCK_ALIGN`].
    pub(super) data_page: u32,
    pub(super) blocks: u32,
    /// CRC-32 of its records on disk.
    pub(super) records_crc: u32,
    pub(super) data_log: u16,
    pub(super) index_log: u16,
}

/// Slot of a lost extent: a hole in the stream, for which readers get filler records. They do not get the records of its blocks,
/// even if known: a block may have been sent again and be at a later place.
pub(super) const NO_LOG: u16 = u16::MAX;

/// Length of one filler record. Clients also fetch the bytes between two blocks that they need.
pub(super) const FILLER_BYTES: u64 = 1 << 20;

/// Extents of a partition.
pub(super) type ExtentList = extents::ExtentList<Extent, { chunk_of::<Extent>() }>;

const _: () = assert!(size_of::<Extent>() == 40, "the sketch of docs/architecture.md §2.3");

impl Extent {
    pub(super) fn data_offset(&self) -> u64 {
        u64::from(self.data_page) * BLOCK_ALIGN as u64
    }

    /// Creates a lost extent.
    pub(super) fn gap(base: u64, length: u64) -> Self {
        let blocks = u32::try_from(length.div_ceil(FILLER_BYTES)).unwrap_or(u32::MAX);
        let (data_log, index_log) = (NO_LOG, NO_LOG);
        Self { base, length, index_offset: 0, data_page: 0, blocks, records_crc: 0, data_log, index_log }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.data_log == NO_LOG
    }

    /// Returns whether data and records of both are in the same place.
    pub(super) fn is_at(&self, other: &Self) -> bool {
        let place = |it: &Self| (it.base, it.data_log, it.data_page, it.index_log, it.index_offset);
        place(self) == place(other)
    }
}

impl InStream for Extent {
    fn base(&self) -> u64 {
        self.base
    }

    fn end(&self) -> u64 {
        self.base + self.length
    }
}
