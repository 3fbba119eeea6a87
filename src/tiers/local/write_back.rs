//! Batches of the [overflow](super::overflow) on their way from the page cache to their disk.
//!
//! A disk may fail one before memory has released what was acknowledged a moment ago. What is lost is named only after that
//! ([`Released`]): the service would find the blocks in memory.

use std::sync::Arc;

use super::append::Writer;
use super::overflow::Passing;
use super::shuffle::Shuffle;
use super::write::WrittenBatch;
use crate::tiers::{ExtentWrite, Released};

impl Writer {
    /// Writes a batch from the page cache to its disk, whatever becomes of it: its charge goes back when its pages are clean.
    pub(super) fn write_back(
        self: &Arc<Self>,
        shuffle: &Arc<Shuffle>,
        (batch, passing): (WrittenBatch, Passing),
        extents: &[ExtentWrite],
        released: Released,
    ) {
        let (writer, shuffle) = (Arc::clone(self), Arc::clone(shuffle));
        let partitions: Vec<_> = extents.iter().map(|extent| extent.partition).collect();
        self.tasks.spawn("local write back", async move {
            let Passing { file, charge, load, began } = passing;
            let WrittenBatch { log, offset, .. } = batch;
            let range = offset..offset + charge.bytes();
            let written = file.write_back(range.clone()).await;
            drop((file, charge));
            let Err(error) = written else {
                log.disk.progressed();
                return log.disk.wrote(load.with_others, began);
            };
            if shuffle.is_purged() {
                return;
            }
            log.close();
            let failed = writer.core.failed(&log.disk, log.full_path(), error);
            tracing::error!(shuffle = %shuffle.key, error = %failed, "what was in the page cache was not written");
            released.wait().await;
            let is_in = |slot: u16, at: u64| slot == log.slot && range.contains(&at);
            for partition in partitions {
                let extents = shuffle.extents(partition);
                let lost = extents.iter().filter(|extent| is_in(extent.data_log, extent.data_offset()));
                let lost: Vec<_> = lost.copied().collect();
                writer.damage.mark_all_lost(&shuffle, partition, &lost, &failed);
            }
        });
    }
}
