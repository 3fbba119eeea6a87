//! The publish lane: one per shuffle, where extents get their base and become visible.
//!
//! Bases are promises to clients, so they are durable before they are visible: the group goes to an index log first.
//! A group whose append failed stays *pending*: the same bytes (same sequence, same bases) are appended to another
//! index log before anything later publishes. That also holds when the writer gave up waiting or was cancelled, since
//! the outcome of its append is then unknown. Blocks may so be published although their writer saw an error and wrote
//! them again; clients drop duplicates by id, and nothing is ever missing.

use std::collections::HashMap;
use std::sync::Arc;

use super::disk::LocalDisk;
use super::index::{EncodedGroup, GroupExtent, GroupHeader, encode, occupied_bytes};
use super::log::{Log, LogKind};
use super::shuffle::{Extent, Shuffle};
use super::write::WrittenBatch;
use super::{Core, Published};
use crate::metrics::clamped;
use crate::tiers::{ExtentWrite, StoreError};
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::index::{RECORD_BYTES, rebase};
use uniffle_wire::types::PartitionId;

/// State of a shuffle's lane.
#[derive(Debug, Default)]
pub(super) struct Lane {
    next_sequence: u64,
    pending: Option<Pending>,
}

/// A group that is to be appended.
#[derive(Debug)]
struct Pending {
    group: EncodedGroup,
    /// Complete but for the place of their records.
    extents: Vec<(PartitionId, Extent)>,
    /// Disk of the data: the index goes there too when it can.
    disk: Arc<LocalDisk>,
}

impl Lane {
    /// Goes on behind what an earlier process published.
    pub(super) fn resume_at(&mut self, sequence: u64) {
        self.next_sequence = sequence;
    }
}

impl Pending {
    fn new(shuffle: &Shuffle, sequence: u64, batch: &WrittenBatch, writes: &[ExtentWrite]) -> Self {
        let mut offset = batch.offset;
        let mut bases: HashMap<PartitionId, u64> = HashMap::new();
        let mut placed = Vec::with_capacity(writes.len());
        let mut extents = Vec::with_capacity(writes.len());
        for write in writes {
            let next = bases.entry(write.partition).or_insert_with(|| shuffle.stream_bytes(write.partition));
            let base = *next;
            *next += write.length;
            let (partition, blocks) = (write.partition, write.blocks.as_slice());
            placed.push(GroupExtent { partition, base, data_offset: offset, blocks });
            let extent = Extent {
                base,
                length: write.length,
                index_offset: 0,
                data_page: u32::try_from(offset / BLOCK_ALIGN as u64).expect("a log's length is bounded"),
                blocks: u32::try_from(blocks.len()).expect("a batch is validated before it is written"),
                records_crc: 0,
                data_log: batch.log.slot,
                index_log: 0,
            };
            extents.push((partition, extent));
            offset += occupied_bytes(write.length);
        }
        let header = GroupHeader {
            sequence,
            incarnation: shuffle.incarnation,
            disk: batch.log.disk.uuid,
            file_number: batch.log.number,
        };
        let group = encode(&header, &placed);
        for ((_, extent), place) in extents.iter_mut().zip(&group.places) {
            extent.records_crc = place.crc;
        }
        Self { group, extents, disk: Arc::clone(&batch.log.disk) }
    }

    /// The extents once the group stands at `offset` of `log`.
    fn placed(&self, log: &Log, offset: u64) -> Vec<(PartitionId, Extent)> {
        let places = self.extents.iter().zip(&self.group.places);
        let placed = places.map(|((partition, extent), place)| {
            let index_offset = offset + place.offset;
            (*partition, Extent { index_offset, index_log: log.slot, ..*extent })
        });
        placed.collect()
    }
}

impl Core {
    /// Makes a written batch durable and visible.
    pub(super) async fn publish(
        &self,
        shuffle: &Shuffle,
        batch: &WrittenBatch,
        extents: &[ExtentWrite],
    ) -> Result<Published, StoreError> {
        let mut lane = shuffle.lane.lock().await;
        self.settle(shuffle, &mut lane).await?;
        let sequence = lane.next_sequence;
        lane.pending = Some(Pending::new(shuffle, sequence, batch, extents));
        lane.next_sequence += 1;
        self.settle(shuffle, &mut lane).await?;
        Ok(Published {
            sequence,
            disk: batch.log.disk.index,
            extents: extents.len(),
            blocks: extents.iter().map(|extent| extent.blocks.len()).sum(),
            bytes: extents.iter().map(|extent| extent.length).sum(),
        })
    }

    /// Appends the pending group, if there is one, and makes it visible.
    async fn settle(&self, shuffle: &Shuffle, lane: &mut Lane) -> Result<(), StoreError> {
        shuffle.require_present()?;
        let Some(pending) = &lane.pending else {
            return Ok(());
        };
        let (log, offset) = self.append_group(shuffle, pending).await?;
        let extents = pending.placed(&log, offset);
        // Before they are visible: a purge forgets what is visible, so nothing stays behind.
        self.keep_records(shuffle, pending, &extents);
        if let Err(error) = shuffle.apply(&extents) {
            self.records.forget(extents.iter().map(|(_, extent)| shuffle.records_key(extent)));
            return Err(error);
        }
        for (_, extent) in &extents {
            self.metrics.extent_bytes.observe(extent_bytes(extent));
        }
        self.metrics.extents.add(clamped(extents.len()));
        lane.pending = None;
        Ok(())
    }

    /// What was just published is what readers ask for first.
    fn keep_records(&self, shuffle: &Shuffle, pending: &Pending, extents: &[(PartitionId, Extent)]) {
        for ((_, extent), place) in extents.iter().zip(&pending.group.places) {
            let start = usize::try_from(place.offset).expect("a place lies in the group");
            let bytes = extent.blocks as usize * RECORD_BYTES;
            if !self.records.takes(bytes) {
                continue;
            }
            let mut records = pending.group.bytes[start..start + bytes].to_vec();
            rebase(&mut records, extent.base);
            self.records.keep(shuffle.records_key(extent), records.into());
        }
    }

    /// Appends a group's bytes to the index log of its data's disk, or of any other that takes them.
    async fn append_group(
        &self,
        shuffle: &Shuffle,
        pending: &Pending,
    ) -> Result<(Arc<Log>, u64), StoreError> {
        let bytes = pending.group.bytes.len() as u64;
        let mut tried = Vec::new();
        let mut last_error = None;
        let mut next = Some(pending.disk.index).filter(|_| pending.disk.is_healthy());
        loop {
            let chosen = match next.take() {
                Some(index) => Some(index),
                None => self.choose(bytes, &tried).await,
            };
            let Some(index) = chosen else {
                return Err(last_error.unwrap_or_else(|| self.no_disk()));
            };
            match self.append_to(shuffle, &self.disks[index], pending).await {
                Ok(place) => return Ok(place),
                Err(error) => {
                    shuffle.require_present()?;
                    tracing::warn!(shuffle = %shuffle.key, error = %error, "index append failed, trying next disk");
                    self.metrics.write_exceptions.inc();
                    tried.push(index);
                    last_error = Some(error);
                }
            }
        }
    }

    async fn append_to(
        &self,
        shuffle: &Shuffle,
        disk: &Arc<LocalDisk>,
        pending: &Pending,
    ) -> Result<(Arc<Log>, u64), StoreError> {
        let bytes = pending.group.bytes.clone();
        let (log, offset) = shuffle.reserve(self, disk, LogKind::Index, bytes.len() as u64).await?;
        let file = self.writer(&log).await?;
        self.write_call(&log, &file, vec![bytes], offset).await?;
        self.make_durable(&log, &file, self.config.write_timeout).await?;
        Ok((log, offset))
    }
}

#[expect(clippy::cast_precision_loss, reason = "a histogram's observation")]
fn extent_bytes(extent: &Extent) -> f64 {
    extent.length as f64
}
