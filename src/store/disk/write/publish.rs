//! Publishing: under one lock per shuffle, extents get their bases and become visible.
//!
//! Bases are promises to clients, so a group is appended to an index log before its extents are
//! visible. A group whose append failed or was cancelled stays pending, because its outcome is
//! unknown. The same bytes (same sequence and bases) are appended again before any later group.
//! After an error they go to another index log.
//!
//! Blocks may therefore be published although their writer saw an error and wrote them again.
//! Clients drop duplicates by id, and no block is missing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::append::{DiskSearch, DiskWriter};
use super::batch::WriteCall;
use super::pending::{PendingGroup, PublishState};
use crate::log::within;
use crate::metrics::clamped;
use crate::store::disk::config::NAME_TIMEOUT;
use crate::store::disk::directories::directory::LocalDisk;
use crate::store::disk::log_file::{Log, LogKind, LogRange};
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::extents::extent::Extent;
use crate::store::{ExtentWrite, StoreError};
use uniffle_io::Vanished;
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::PartitionId;

/// Age of a pending group from which on its data file is verified before publication: another
/// program may have removed the file.
const VERIFIED_AFTER: Duration = Duration::from_millis(100);

impl DiskWriter {
    /// Appends the index group of a written batch and makes its extents visible. Returns its
    /// sequence among the shuffle's batches.
    pub(in crate::store::disk) async fn publish(
        &self,
        shuffle: &Arc<DiskShuffle>,
        data: &LogRange,
        extents: &[ExtentWrite],
        is_last: bool,
    ) -> Result<u64, StoreError> {
        let mut state = shuffle.publish_lock.lock().await;
        self.settle(shuffle, &mut state, is_last).await?;
        if data.log.has_vanished() {
            return Err(StoreError::io(data.log.full_path(), Vanished::File.into()));
        }
        let sequence = state.next_sequence;
        let bases = |partition| shuffle.stream_bytes(partition);
        state.pending = Some(PendingGroup::new(shuffle.incarnation, sequence, data, extents, bases));
        state.next_sequence += 1;
        self.settle(shuffle, &mut state, is_last).await?;
        Ok(sequence)
    }

    /// Appends the pending group, if there is one, and makes it visible.
    async fn settle(
        &self,
        shuffle: &Arc<DiskShuffle>,
        state: &mut PublishState,
        is_last: bool,
    ) -> Result<(), StoreError> {
        shuffle.require_present()?;
        let Some(pending) = &state.pending else {
            return Ok(());
        };
        // On the disk of the data, if it is healthy.
        let first = Some(pending.disk.index).filter(|_| pending.disk.is_healthy());
        let bytes = pending.group.bytes.len() as u64;
        let mut search = DiskSearch::new(self, shuffle, bytes, is_last).starting_at(first);
        let LogRange { log, offset } = loop {
            let disk = search.next_disk().await?;
            match self.append_to(shuffle, disk, pending).await {
                Ok(appended) => break appended,
                Err(error) => search.failed(disk.index, error)?,
            }
        };
        if pending.since.elapsed() >= VERIFIED_AFTER {
            self.verify(pending.data()).await;
        }
        let extents = pending.placed(&log, offset);
        // Cached before the extents are visible, because a purge removes the records of visible
        // extents only.
        self.keep_records(shuffle, pending, &extents);
        if let Err(error) = shuffle.apply(&extents) {
            self.core.records.remove(extents.iter().map(|(_, extent)| shuffle.records_key(extent)));
            return Err(error);
        }
        for (_, extent) in &extents {
            self.core.metrics.extent_bytes.observe(extent_bytes(extent));
        }
        self.core.metrics.extents.add(clamped(extents.len()));
        // Checked once the extents are visible: if a file vanishes later, its loss covers them.
        let vanished = [&*log, pending.data()].into_iter().find(|log| log.has_vanished());
        let vanished = vanished.map(|log| {
            self.damage.lose_extents(shuffle, log, &extents);
            self.lose_vanished(shuffle);
            StoreError::io(log.full_path(), Vanished::File.into())
        });
        state.pending = None;
        vanished.map_or(Ok(()), Err)
    }

    /// Marks a log whose file has vanished. Its readers find any other damage.
    async fn verify(&self, log: &Log) {
        let Ok(file) = self.writer(log).await else { return };
        let verified = within(NAME_TIMEOUT, file.verify()).await;
        if verified.is_err_and(|error| Vanished::of(&error) == Some(Vanished::File)) {
            log.set_vanished();
        }
    }

    /// Caches the records of new extents: readers ask for them first.
    fn keep_records(&self, shuffle: &DiskShuffle, pending: &PendingGroup, extents: &[(PartitionId, Extent)]) {
        for ((_, extent), entry) in extents.iter().zip(&pending.group.entries) {
            let start = usize::try_from(entry.place.offset).expect("records are inside the group");
            let bytes = extent.blocks as usize * RECORD_BYTES;
            if !self.core.records.admits(bytes) {
                continue;
            }
            let records = Bytes::copy_from_slice(&pending.group.bytes[start..start + bytes]);
            self.core.records.insert(shuffle.records_key(extent), records);
        }
    }

    async fn append_to(
        &self,
        shuffle: &DiskShuffle,
        disk: &Arc<LocalDisk>,
        pending: &PendingGroup,
    ) -> Result<LogRange, StoreError> {
        let bytes = pending.group.bytes.clone();
        let place = self.reserve(shuffle, disk, LogKind::Index, bytes.len() as u64).await?;
        let file = self.writer(&place.log).await?;
        let mut call = WriteCall::new(self, &place, &file);
        call.push(bytes);
        call.send().await?;
        self.make_durable(&place.log, &file).await?;
        Ok(place)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a histogram's observation")]
fn extent_bytes(extent: &Extent) -> f64 {
    extent.length as f64
}
