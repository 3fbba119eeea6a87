//! State under the publish lock of a shuffle: the next sequence, and the index group that is not
//! appended yet.
//!
//! Pure: no I/O. Extents get their bases when their group is created, and their place in an index
//! log when it is appended.

use std::collections::HashMap;
use std::sync::Arc;

use crate::clock::Instant;
use crate::store::ExtentWrite;
use crate::store::disk::directories::directory::LocalDisk;
use crate::store::disk::log_file::{Log, LogRange, LogUse};
use crate::store::extents::extent::Extent;
use crate::store::index::codec::{EncodedGroup, GroupExtent, GroupHeader, encode, occupied_bytes};
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::types::PartitionId;

/// State under a shuffle's publish lock.
#[derive(Debug, Default)]
pub(in crate::store) struct PublishState {
    pub(in crate::store) next_sequence: u64,
    pub(in crate::store) pending: Option<PendingGroup>,
}

/// An index group that is not appended yet.
#[derive(Debug)]
pub(in crate::store) struct PendingGroup {
    pub(in crate::store) group: EncodedGroup,
    /// Extents, complete except for the place of their records.
    extents: Vec<(PartitionId, Extent)>,
    /// Disk of the data, and the preferred disk of the group.
    pub(in crate::store) disk: Arc<LocalDisk>,
    /// Keeps the log of the data until its extents are visible.
    data: LogUse,
    /// Time at which the data was written.
    pub(super) since: Instant,
}

impl PublishState {
    /// Continues after the sequences of an earlier process.
    pub(in crate::store) fn resume_at(&mut self, sequence: u64) {
        self.next_sequence = sequence;
    }
}

impl PendingGroup {
    /// Creates group `sequence` of an incarnation, of `writes` whose data is at `data`. Streams
    /// continue at `stream_bytes`.
    pub(in crate::store) fn new(
        incarnation: u64,
        sequence: u64,
        data: &LogRange,
        writes: &[ExtentWrite],
        stream_bytes: impl Fn(PartitionId) -> u64,
    ) -> Self {
        let LogRange { log: data, offset } = data;
        let mut offset = *offset;
        let mut bases: HashMap<PartitionId, u64> = HashMap::new();
        let mut placed = Vec::with_capacity(writes.len());
        let mut extents = Vec::with_capacity(writes.len());
        for write in writes {
            let (partition, blocks) = (write.partition, write.blocks.as_slice());
            let next = bases.entry(partition).or_insert_with(|| stream_bytes(partition));
            let base = *next;
            *next += write.length;
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
        for ((_, extent), entry) in extents.iter_mut().zip(&group.entries) {
            extent.records_crc = entry.place.crc;
        }
        let disk = Arc::clone(&data.disk);
        Self { group, extents, disk, data: data.clone(), since: Instant::now() }
    }

    /// Returns the log of the data.
    pub(in crate::store) fn data(&self) -> &Log {
        &self.data
    }

    /// Returns the extents for a group at `offset` of `log`.
    pub(super) fn placed(&self, log: &Log, offset: u64) -> Vec<(PartitionId, Extent)> {
        let entries = self.extents.iter().zip(&self.group.entries);
        let placed = entries.map(|((partition, extent), entry)| {
            let index_offset = offset + entry.place.offset;
            (*partition, Extent { index_offset, index_log: log.slot, ..*extent })
        });
        placed.collect()
    }
}
