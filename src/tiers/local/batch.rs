//! Writing a batch: the disks are tried until one takes the data, then its index group is
//! published.

use std::sync::Arc;

use super::append::Writer;
use super::failures::wants_new_file;
use super::metrics::ALL_DISKS;
use super::shuffle::Shuffle;
use super::write::validate;
use crate::tiers::{ExtentWrite, StoreError, StoreErrorKind};

/// A published batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Sequence among the shuffle's batches.
    pub sequence: u64,
    /// Index of the disk with the data.
    pub disk: usize,
    /// Number of extents.
    pub extents: usize,
    /// Number of blocks.
    pub blocks: usize,
    /// Payload bytes.
    pub bytes: u64,
}

impl Writer {
    /// Writes a batch to one disk and publishes it. After `Ok` every block is readable. If a disk
    /// fails, the next one is tried.
    ///
    /// # Errors
    /// The error of the last disk (the caller keeps the batch and may retry), `Purged`, or
    /// `InvalidBatch`.
    pub(super) async fn write(
        self: &Arc<Self>,
        shuffle: &Arc<Shuffle>,
        extents: Vec<ExtentWrite>,
        is_last: bool,
    ) -> Result<Published, StoreError> {
        let extents = ExtentWrite::bounded(extents);
        let bytes = validate(shuffle, &extents)?;
        self.core.metrics.write_local.inc();
        let result = self.write_and_publish(shuffle, &extents, bytes, is_last).await;
        match &result {
            Ok(published) => self.count_published(published, bytes),
            Err(error) if error.kind == StoreErrorKind::Purged => {}
            Err(_) => self.core.metrics.write_local_failed.inc(),
        }
        result
    }

    async fn write_and_publish(
        self: &Arc<Self>,
        shuffle: &Arc<Shuffle>,
        extents: &[ExtentWrite],
        bytes: u64,
        is_last: bool,
    ) -> Result<Published, StoreError> {
        let (mut tried, mut renewed) = (Vec::new(), Vec::new());
        let mut last_error = None;
        let batch = loop {
            shuffle.require_present()?;
            let Some(index) = self.choose(bytes, &tried, is_last).await else {
                return Err(last_error.unwrap_or_else(|| self.no_disk()));
            };
            if !tried.is_empty() {
                self.core.metrics.write_local_retries.inc();
            }
            match self.write_batch(shuffle, &self.core.disks[index], extents, bytes).await {
                Ok(batch) => break batch,
                Err(error) => {
                    shuffle.require_present()?;
                    self.core.metrics.write_exceptions.inc();
                    // The log is closed now, so the same disk is tried with a new file.
                    if wants_new_file(&error) && !renewed.contains(&index) {
                        self.lose_vanished(shuffle);
                        renewed.push(index);
                        continue;
                    }
                    tracing::warn!(
                        shuffle = %shuffle.key,
                        error = %error,
                        "write failed; trying the next disk"
                    );
                    tried.push(index);
                    last_error = Some(error);
                }
            }
        };
        let sequence = self.publish(shuffle, &batch, extents, is_last).await?;
        Ok(Published {
            sequence,
            disk: batch.log.disk.index,
            extents: extents.len(),
            blocks: extents.iter().map(|extent| extent.blocks.len()).sum(),
            bytes: extents.iter().map(|extent| extent.length).sum(),
        })
    }

    fn count_published(&self, published: &Published, occupied_bytes: u64) {
        let metrics = &self.core.metrics;
        metrics.writes.inc();
        metrics.write_local_succeeded.inc();
        metrics.write_data.inc_by(published.bytes);
        metrics.write_blocks.inc_by(published.blocks as u64);
        metrics.localfile_used.inc_by(occupied_bytes);
        let label = self.core.disks[published.disk].label.as_str();
        metrics.localfile_write_data.with_label_values(&[label]).inc_by(published.bytes);
        metrics.localfile_write_data.with_label_values(&[ALL_DISKS]).inc_by(published.bytes);
    }
}
