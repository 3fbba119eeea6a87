//! An extent: a contiguous part of a partition's published stream, with its location.
//!
//! Base and length of an extent never change, and its records only when its data is lost. Its
//! location changes from a data log to an object when its data is offloaded, or to nowhere when its
//! data is lost.

#[cfg(feature = "object")]
use std::ops::Range;

use super::extent_list::{self, InStream, chunk_of};
#[cfg(feature = "object")]
use crate::store::index::codec::GroupEntry;
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::index::RECORD_BYTES;

/// A published extent. These 40 bytes are the only memory per extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Offset of its first byte in the partition's stream.
    pub(in crate::store) base: u64,
    /// Bytes of data.
    pub(in crate::store) length: u64,
    /// Offset of its records in the index log. In an object, the high 24 bits belong to the offset
    /// of its data.
    pub(in crate::store) index_offset: u64,
    /// Offset of its data in the data log, in units of [`BLOCK_ALIGN`]. In an object, the low 32
    /// bits of the offset.
    pub(in crate::store) data_page: u32,
    pub(in crate::store) blocks: u32,
    /// CRC-32 of its records, with offsets relative to the extent.
    pub(in crate::store) records_crc: u32,
    /// Slot of the data log, or [`OBJECT`] and the high bits of the number of an object.
    pub(in crate::store) data_log: u16,
    /// Slot of the index log, or the low bits of the number of an object.
    pub(in crate::store) index_log: u16,
}

/// Slot of a lost extent, which is a hole in the stream. Readers get filler records for it. They do
/// not get the records of its blocks, even if known, because a block may have been sent again and
/// have a later position.
pub(in crate::store) const NO_LOG: u16 = u16::MAX;

/// Bit of [`Extent::data_log`] of an extent in an object. Slots of logs are smaller.
pub(in crate::store) const OBJECT: u16 = 1 << 15;

/// Bits of [`Extent::index_offset`] for the offset of the records in an object.
#[cfg(feature = "object")]
const RECORDS_BITS: u32 = 40;

/// Length of one filler record. Clients also fetch the bytes between two blocks that they need.
pub(in crate::store) const FILLER_BYTES: u64 = 1 << 20;

/// Extents of a partition.
pub(in crate::store) type ExtentList = extent_list::ChunkedList<Extent, { chunk_of::<Extent>() }>;

const _: () = assert!(size_of::<Extent>() == 40, "extents are the only memory per extent; keep them small");

impl Extent {
    /// Returns the offset of its data in its data log.
    pub(in crate::store) fn data_offset(&self) -> u64 {
        u64::from(self.data_page) * BLOCK_ALIGN as u64
    }

    /// Creates a lost extent.
    pub(in crate::store) fn gap(base: u64, length: u64) -> Self {
        let blocks = u32::try_from(length.div_ceil(FILLER_BYTES)).unwrap_or(u32::MAX);
        let (data_log, index_log) = (NO_LOG, NO_LOG);
        Self { base, length, index_offset: 0, data_page: 0, blocks, records_crc: 0, data_log, index_log }
    }

    /// Returns the size of its records.
    pub(in crate::store) fn records_bytes(&self) -> u64 {
        u64::from(self.blocks) * RECORD_BYTES as u64
    }

    pub(in crate::store) fn is_lost(&self) -> bool {
        (self.data_log, self.index_log) == (NO_LOG, NO_LOG)
    }

    pub(in crate::store) fn is_on_disk(&self) -> bool {
        self.data_log < OBJECT
    }

    pub(in crate::store) fn is_in_object(&self) -> bool {
        !self.is_on_disk() && !self.is_lost()
    }

    /// Returns whether data and records of both are in the same place.
    pub(in crate::store) fn is_at(&self, other: &Self) -> bool {
        let place = |it: &Self| (it.base, it.data_log, it.data_page, it.index_log, it.index_offset);
        place(self) == place(other)
    }

    /// Returns whether both have the same blocks at the same place of the stream.
    pub(in crate::store) fn is_copy_of(&self, other: &Self) -> bool {
        let content = |it: &Self| (it.base, it.length, it.blocks, it.records_crc);
        content(self) == content(other)
    }
}

#[cfg(feature = "object")]
impl Extent {
    /// Locates an extent in the object `number`, where its data begins at `data` and its records at
    /// `records`.
    pub(in crate::store) fn in_object(self, number: u32, data: u64, records: u64) -> Self {
        let [a, b, c, d] = number.to_be_bytes();
        Self {
            index_offset: records | ((data >> 32) << RECORDS_BITS),
            data_page: u32::try_from(data & u64::from(u32::MAX)).unwrap_or(u32::MAX),
            data_log: OBJECT | u16::from_be_bytes([a, b]),
            index_log: u16::from_be_bytes([c, d]),
            ..self
        }
    }

    /// Creates the extent of an entry in the index of segment `number`, which begins at `index`.
    pub(in crate::store) fn of_segment(entry: &GroupEntry, number: u32, index: u64) -> Self {
        let GroupEntry { blocks, base, data_offset, length, place, .. } = *entry;
        let extent = Self { blocks, records_crc: place.crc, ..Self::gap(base, length) };
        extent.in_object(number, data_offset, index + place.offset)
    }

    /// Returns the number of its object.
    pub(in crate::store) fn object(&self) -> u32 {
        (u32::from(self.data_log & !OBJECT) << 16) | u32::from(self.index_log)
    }

    /// Returns the offset of its data in its object.
    pub(in crate::store) fn object_offset(&self) -> u64 {
        ((self.index_offset >> RECORDS_BITS) << 32) | u64::from(self.data_page)
    }

    /// Returns the range of its records in its object.
    pub(in crate::store) fn records_range(&self) -> Range<u64> {
        let start = self.index_offset & ((1 << RECORDS_BITS) - 1);
        start..start + self.records_bytes()
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

#[cfg(feature = "object")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_in_an_object_round_trips() {
        for (number, data, records) in
            [(1, 0, 0), (0x7fff_0000, (5 << 32) | 7, 6 << 32), (70_000, u64::from(u32::MAX), 1 << 39)]
        {
            let extent = Extent::gap(10, 20).in_object(number, data, records);
            let found = (extent.object(), extent.object_offset(), extent.records_range().start);
            assert_eq!(found, (number, data, records));
            assert!(extent.is_in_object() && !extent.is_lost() && !extent.is_on_disk());
        }
        assert!(Extent::gap(0, 1).is_lost() && !Extent::gap(0, 1).is_in_object());
    }
}
