//! The flush workers: each writes one batch at a time from memory to a tier.
//!
//! A batch that a tier failed to write goes to the next tier at once. After all tiers have failed,
//! it is retried with exponential backoff, without limit. Invariant: memory is released only after
//! a tier has published the batch, or by the purge of its shuffle.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use fastrace::Span;
use futures::FutureExt as _;
use tokio::sync::SemaphorePermit;

use crate::app::{App, WaitStage};
use crate::clock::Instant;
use crate::memory::{Buffer, SealedData};
use crate::store::{ExtentData, ExtentWrite, StoreError, StoreErrorKind, TierBatch};

use super::queue::FlushBatch;
use super::scheduler::Flusher;

impl Flusher {
    pub(super) async fn work(self: Arc<Self>, tier: usize) {
        let stopped = self.tasks.cancelled();
        tokio::pin!(stopped);
        let queue = &self.queues[tier];
        loop {
            let next = async {
                let batch = queue.pop().await;
                (batch, self.gate.read().await)
            };
            let (batch, _passing) = tokio::select! {
                biased;
                () = &mut stopped => return,
                next = next => next,
            };
            let (began, bytes) = (Instant::now(), batch.bytes());
            self.metrics.all.wait.observe(batch.sealed_at.elapsed().as_secs_f64());
            let span = self.config.traces.begin("flush", None);
            let span =
                span.with_properties(|| [("shuffle", batch.key.to_string()), ("bytes", bytes.to_string())]);
            let app = self.app_of(&batch.key);
            if let Some(app) = &app {
                app.account.enter(WaitStage::FlushQueue, bytes, began.duration_since(batch.queued));
            }
            let batch = Arc::new(batch);
            let writing = self.metrics.start_write(tier, bytes);
            // A panic must not lose the batch: its blocks would stay in memory forever.
            let written = AssertUnwindSafe(self.write(&batch, tier, &span)).catch_unwind().await;
            let written = written.unwrap_or_else(|_| Err(failed(&batch, "the write panicked")));
            drop(writing);
            if let Some(batch) = Arc::into_inner(batch) {
                self.finish(batch, app, tier, began.elapsed(), written);
            }
        }
    }

    /// Handles the result of a write that took `took`. Releases memory only if the tier has
    /// published the batch. Memory of a purged shuffle is released by the purge.
    fn finish(
        self: &Arc<Self>,
        batch: FlushBatch,
        app: Option<Arc<App>>,
        tier: usize,
        took: Duration,
        written: Result<(), StoreError>,
    ) {
        let bytes = batch.bytes();
        match written {
            Ok(()) => {
                self.metrics.observe_duration(took);
                if let Some(app) = app {
                    app.account.enter(WaitStage::FlushWrite, bytes, took);
                    let is_local = self.tiers.at(tier).served().is_some();
                    if let Some(shuffle) = app.shuffle(batch.key.shuffle).filter(|_| is_local) {
                        shuffle.on_disk.set(|| self.tiers.occupied_bytes(&batch.key));
                    }
                }
                self.release(&batch, bytes, tier);
            }
            Err(error) if error.kind == StoreErrorKind::Purged => {
                self.metrics.all.purged_batches.inc();
                tracing::debug!(shuffle = %batch.key, bytes, "shuffle was unregistered; batch dropped");
            }
            Err(error) => {
                self.try_elsewhere(batch, bytes, tier, &error);
                if let Some(app) = app {
                    app.account.flush_retries.add(1, bytes);
                }
            }
        }
    }

    /// Waits for permits to write the blocks of `batch`. The number of permits bounds the temporary
    /// memory of the sort and the index-group records. That memory is not charged to the heap,
    /// because it would be taken from requests whose flush frees more.
    async fn acquire_block_permits(&self, batch: &FlushBatch) -> Option<SemaphorePermit<'_>> {
        let (permits, most) = &self.blocks;
        let blocks = u32::try_from(batch.blocks()).unwrap_or(*most).min(*most);
        // The semaphore is never closed.
        permits.acquire_many(blocks).await.ok()
    }

    /// Writes a batch to a tier.
    async fn write(&self, batch: &Arc<FlushBatch>, tier: usize, span: &Span) -> Result<(), StoreError> {
        let _room = self.acquire_block_permits(batch).await;
        let extents = {
            // Sorting and cutting a large chain takes milliseconds, so it runs on a blocking
            // thread.
            let batch = Arc::clone(batch);
            let _part = Span::enter_with_parent("sort and cut", span);
            tokio::task::spawn_blocking(move || extents_of(&batch)).await
        };
        let extents = extents.map_err(|error| failed(batch, error))?;
        if extents.is_empty() {
            return Ok(());
        }
        let _part = Span::enter_with_parent("write and publish", span);
        let Some(shuffle) = &batch.handles[tier] else {
            return Err(failed(batch, "the shuffle has no storage in this tier"));
        };
        let huge_partition_bytes = self.limits().huge_partition_bytes;
        let is_huge = |(buffer, _): &&(Arc<Buffer>, _)| buffer.received_bytes() > huge_partition_bytes;
        let huge_bytes = batch.parts.iter().filter(is_huge).map(|(_, sealed)| sealed.bytes()).sum();
        let (is_retry, is_last) = (batch.failures > 0, *self.draining.borrow());
        shuffle.write(TierBatch { extents, is_retry, huge_bytes, is_last }).await
    }

    /// Releases the memory of a batch that a tier has published.
    fn release(&self, batch: &FlushBatch, bytes: u64, tier: usize) {
        for (buffer, sealed) in &batch.parts {
            #[expect(clippy::cast_precision_loss, reason = "a histogram bucket")]
            self.metrics.all.extent_bytes.observe(sealed.bytes() as f64);
            buffer.release(sealed);
        }
        // The tier's extent metadata now takes memory in place of the released blocks.
        self.memory.cover_extents();
        self.flush_overdue(batch);
        self.check_pressure();
        self.metrics.count_batch(tier, bytes);
        tracing::debug!(shuffle = %batch.key, bytes, tier = self.name_of(tier), "flushed");
    }

    fn name_of(&self, tier: usize) -> &'static str {
        self.tiers.at(tier).capability().names.name
    }

    /// Queues a batch that a tier failed to write for the next tier at once. After all tiers have
    /// failed, it waits for a new attempt.
    fn try_elsewhere(self: &Arc<Self>, mut batch: FlushBatch, bytes: u64, tier: usize, error: &StoreError) {
        self.metrics.count_failure(tier);
        let pause = backoff(batch.failures, self.config.retry_pause_min, self.config.retry_pause_max);
        let tiers = batch.handles.iter().flatten().count();
        let has_other_tiers = (batch.failures as usize) < tiers - 1;
        batch.failures = batch.failures.saturating_add(1);
        batch.failed = Some(tier);
        batch.in_flight = None;
        tracing::warn!(
            shuffle = %batch.key, bytes, tier = self.name_of(tier), failures = batch.failures, %error,
            "batch was not written; it stays in memory and is retried"
        );
        batch.queued = Instant::now() + if has_other_tiers { Duration::ZERO } else { pause };
        // A batch that fits on no disk may fit in two parts.
        let is_last = *self.draining.borrow();
        let half = if is_last && error.kind == StoreErrorKind::NoSpace { batch.cut() } else { None };
        for batch in half.into_iter().chain([batch]) {
            match has_other_tiers {
                true => self.enqueue(batch),
                false => self.retry(batch, pause, is_last),
            }
        }
    }

    /// Retry: queues a batch again after a backoff. The final flush cuts the pause of a batch that
    /// failed before it short, to `retry_pause_min`.
    fn retry(self: &Arc<Self>, batch: FlushBatch, pause: Duration, is_last: bool) {
        let flusher = Arc::clone(self);
        let mut draining = self.draining.subscribe();
        self.tasks.spawn("flush retry", async move {
            let least = flusher.config.retry_pause_min;
            let pause = async {
                crate::clock::sleep(least.min(pause)).await;
                tokio::select! {
                    _ = draining.wait_for(|draining| *draining), if !is_last => {}
                    () = crate::clock::sleep(pause.saturating_sub(least)) => {}
                }
            };
            tokio::select! {
                biased;
                () = flusher.tasks.cancelled() => {}
                () = pause => flusher.enqueue(batch),
            }
        });
    }
}

fn failed(batch: &FlushBatch, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::io(batch.key.to_string(), std::io::Error::other(why))
}

/// Returns the backoff after a failed write that was preceded by `failures` others. It doubles from
/// `min` to `max`.
fn backoff(failures: u32, min: Duration, max: Duration) -> Duration {
    min.saturating_mul(1 << failures.min(16)).min(max)
}

/// Returns the extents to write. Recovered blocks are verified first, and invalid ones are left
/// out.
fn extents_of(batch: &FlushBatch) -> Vec<ExtentWrite> {
    batch.parts.iter().for_each(|(buffer, _)| buffer.verify());
    batch
        .parts
        .iter()
        .filter(|(_, sealed)| sealed.blocks() > 0)
        .map(|(_, sealed)| {
            let extent = sealed.extent(batch.distribution);
            ExtentWrite {
                partition: sealed.partition(),
                length: sealed.bytes(),
                blocks: extent.blocks,
                data: match extent.data {
                    SealedData::Aligned(pages) => ExtentData::Aligned(pages),
                    SealedData::Pieces(pieces) => ExtentData::Pieces(pieces),
                },
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_maximum() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(10));
        assert_eq!(backoff(0, min, max), min);
        assert_eq!(backoff(3, min, max), Duration::from_millis(800));
        assert_eq!(backoff(u32::MAX, min, max), max);
    }
}
