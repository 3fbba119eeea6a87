//! The publish lane of a shuffle, as values: what is to be appended next, and where its extents are then.

use std::collections::HashMap;
use std::sync::Arc;

use super::disk::LocalDisk;
use super::extent::Extent;
use super::index::{EncodedGroup, GroupExtent, GroupHeader, encode, occupied_bytes};
use super::log::{Log, LogUse};
use crate::clock::Instant;
use crate::tiers::ExtentWrite;
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::types::PartitionId;

/// State of a shuffle's lane.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) next_sequence: u64,
    pub(super) pending: Option<Pending>,
}

/// A group that is to be appended.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) group: EncodedGroup,
    /// Complete but for the place of their records.
    extents: Vec<(PartitionId, Extent)>,
    /// What they are copies of; empty where they are new.
    originals: Vec<Extent>,
    /// Disk of the data: the index goes there too when it can.
    pub(super) disk: Arc<LocalDisk>,
    /// The log of the data stays until its extents are visible.
    data: LogUse,
    /// When its data was written.
    pub(super) since: Instant,
}

impl Lane {
    /// Goes on behind what an earlier process published.
    pub(super) fn resume_at(&mut self, sequence: u64) {
        self.next_sequence = sequence;
    }
}

impl Pending {
    /// The group of `writes`, whose data stands at `offset` of `data`; streams go on where `stream_bytes` says.
    pub(super) fn new(
        ids: (u64, u64),
        place: (&LogUse, u64),
        writes: &[ExtentWrite],
        stream_bytes: impl Fn(PartitionId) -> u64,
    ) -> Self {
        let mut bases: HashMap<PartitionId, u64> = HashMap::new();
        let based = writes.iter().map(|write| {
            let next = bases.entry(write.partition).or_insert_with(|| stream_bytes(write.partition));
            let base = *next;
            *next += write.length;
            (base, write)
        });
        Self::of(ids, place, based)
    }

    /// The group of `writes`, which are copies of `originals`; none when one says something else than its original.
    pub(super) fn copies(
        ids: (u64, u64),
        place: (&LogUse, u64),
        writes: &[ExtentWrite],
        originals: Vec<Extent>,
    ) -> Option<Self> {
        let based = originals.iter().map(|original| original.base).zip(writes);
        let pending = Self::of(ids, place, based);
        let alike = |(original, (_, copy)): (&Extent, &(PartitionId, Extent))| copy.says_the_same(original);
        let all_alike = originals.len() == writes.len() && originals.iter().zip(&pending.extents).all(alike);
        (all_alike && !originals.is_empty()).then_some(Self { originals, ..pending })
    }

    /// The log in which their data is.
    pub(super) fn data(&self) -> &Log {
        &self.data
    }

    /// What they are copies of, in their order; none where they are new.
    pub(super) fn originals(&self) -> Option<&[Extent]> {
        (!self.originals.is_empty()).then_some(&self.originals)
    }

    /// The group of extents with their bases.
    fn of<'a>(
        (incarnation, sequence): (u64, u64),
        (data, mut offset): (&LogUse, u64),
        writes: impl ExactSizeIterator<Item = (u64, &'a ExtentWrite)>,
    ) -> Self {
        let mut placed = Vec::with_capacity(writes.len());
        let mut extents = Vec::with_capacity(writes.len());
        for (base, write) in writes {
            let (partition, blocks) = (write.partition, write.blocks.as_slice());
            placed.push(GroupExtent { partition, base, data_offset: offset, blocks });
            let extent = Extent {
                base,
                length: write.length,
                index_offset: 0,
                data_page: u32::try_from(offset / BLOCK_ALIGN as u64).expect("a log's length is bounded"),
                blocks: u32::try_from(blocks.len()).expect("a batch is validated before it is written"),
                records_crc: 0,
                data_log: data.slot,
                index_log: 0,
            };
            extents.push((partition, extent));
            offset += occupied_bytes(write.length);
        }
        let (disk, file_number) = (data.disk.uuid, data.number);
        let header = GroupHeader { sequence, incarnation, disk, file_number };
        let group = encode(&header, &placed);
        for ((_, extent), place) in extents.iter_mut().zip(&group.places) {
            extent.records_crc = place.crc;
        }
        let (disk, originals) = (Arc::clone(&data.disk), Vec::new());
        Self { group, extents, originals, disk, data: data.clone(), since: Instant::now() }
    }

    /// The extents once the group stands at `offset` of `log`.
    pub(super) fn placed(&self, log: &Log, offset: u64) -> Vec<(PartitionId, Extent)> {
        let places = self.extents.iter().zip(&self.group.places);
        let placed = places.map(|((partition, extent), place)| {
            let index_offset = offset + place.offset;
            (*partition, Extent { index_offset, index_log: log.slot, ..*extent })
        });
        placed.collect()
    }
}
