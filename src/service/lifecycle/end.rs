//! Runs calls whose work grows with an application's data on blocking threads. These are ends of
//! applications, which any client may request, and walks over all data in memory. The blocks,
//! extents, and ids of one application may number millions.
//!
//! An unknown application is refused at once, inline. An end requested by a client is acknowledged
//! only once it is durable: a later start cannot recover the ended shuffle. Otherwise a client that
//! registers the same shuffle again would get the old data.

use std::sync::Arc;

use super::Lifecycle;
use crate::service::ServiceError;
use crate::service::parts::{run_blocking, run_own_blocking};
use crate::store::DrainBacklog;
use crate::telemetry::AUDIT;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Progress of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draining {
    /// Bytes in memory.
    pub in_memory_bytes: u64,
    /// Batches on their way to a tier.
    pub batches: usize,
    /// Data in the tiers that other machines cannot read yet; `None` if no tier has storage for it.
    pub tiers: Option<DrainBacklog>,
}

impl Draining {
    /// Returns whether other machines can read everything.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_elsewhere = |it: &DrainBacklog| it.shuffles_left == 0 && it.stuck_bytes == 0;
        self.in_memory_bytes == 0 && self.batches == 0 && self.tiers.as_ref().is_some_and(is_elsewhere)
    }
}

impl Lifecycle {
    /// Begins or continues a drain, in any state of the worker: decommissions it, flushes memory,
    /// and makes the tiers move their data. If a tier can be drained, new shuffles and data are
    /// refused. Data that no tier accepts stays readable in memory. Returns the progress.
    pub fn drain(&self) -> Draining {
        self.decommission();
        let has_place = self.parts.tiers.iter().any(|tier| tier.drain().is_some());
        if has_place && self.parts.status.drain() {
            tracing::info!(target: AUDIT, "draining: new shuffles and data are refused");
        }
        // Without a tier below memory there is nothing to flush to.
        let batches = self.flush_all().unwrap_or(0);
        let begun = self.parts.tiers.iter().filter_map(|tier| tier.drain()).map(|tier| tier.begin());
        let tiers = begun.reduce(|one, other| DrainBacklog {
            shuffles_left: one.shuffles_left + other.shuffles_left,
            bytes_left: one.bytes_left + other.bytes_left,
            stuck_bytes: one.stuck_bytes + other.stuck_bytes,
        });
        Draining {
            in_memory_bytes: self
                .parts
                .memory
                .used_bytes()
                .saturating_sub(self.parts.memory.extents().used()),
            batches,
            tiers,
        }
    }

    /// Runs [`Lifecycle::unregister_app`] on a blocking thread and waits until it is durable.
    ///
    /// # Errors
    /// The errors of that function, or a tier cannot write the end durably now.
    pub async fn end_app(self: &Arc<Self>, app: &str) -> Result<(), ServiceError> {
        let id = AppId::parse(app).map_err(|_| ServiceError::NotRegistered)?;
        if self.parts.apps.find(&id).is_none() {
            return Err(ServiceError::NotRegistered);
        }
        let (lifecycle, app) = (Arc::clone(self), id.clone());
        run_blocking(&self.ends, false, move || lifecycle.unregister_app(app.as_str())).await??;
        self.ended_durably(&id, None).await
    }

    /// Runs [`Lifecycle::unregister_shuffle`] on a blocking thread and waits until it is durable.
    ///
    /// # Errors
    /// The errors of that function, or a tier cannot write the end durably now.
    pub async fn end_shuffle(self: &Arc<Self>, app: &str, shuffle: i32) -> Result<(), ServiceError> {
        let app = self.parts.app(app)?;
        let key = ShuffleKey::new(app.id().clone(), ShuffleId(shuffle));
        let lifecycle = Arc::clone(self);
        let end = move || lifecycle.unregister_shuffle(app.id().as_str(), shuffle);
        run_blocking(&self.ends, false, end).await??;
        self.ended_durably(&key.app, Some(&key)).await
    }

    async fn ended_durably(&self, app: &AppId, key: Option<&ShuffleKey>) -> Result<(), ServiceError> {
        if let Some(tier) = self.parts.tiers.metadata() {
            tier.forgotten_durable(app, key).await?;
        }
        Ok(())
    }

    /// Runs [`Lifecycle::expire_apps`] on a blocking thread.
    pub async fn end_expired_apps(self: &Arc<Self>) {
        if self.parts.apps.expired().is_empty() {
            return;
        }
        let lifecycle = Arc::clone(self);
        let expired = run_own_blocking(move || lifecycle.expire_apps()).await;
        if let Err(error) = expired {
            tracing::error!(%error, "cannot purge finished applications; retrying at the next check");
        }
    }

    /// Records in the metadata log that its gap is over, once no app from before the gap is left.
    /// An app that calls later is treated as expired. A failure is retried at the next check.
    pub async fn end_metadata_gap(&self) {
        let Some(tier) = self.parts.tiers.metadata() else { return };
        let Some(reason) = tier.metadata_gap().filter(|_| self.parts.apps.is_abandoned()) else { return };
        match tier.end_metadata_gap().await {
            Ok(true) => {
                self.parts.apps.forget_unverified();
                tracing::info!(
                    target: AUDIT,
                    %reason,
                    "no application is left from before metadata was lost; results of unknown shuffles are \
                     no longer refused"
                );
            }
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "cannot record the end of the metadata gap yet; retrying"),
        }
    }

    /// Runs [`Lifecycle::flush_all`] on a blocking thread.
    ///
    /// # Errors
    /// The errors of that function.
    pub async fn flush_all_on_thread(self: &Arc<Self>) -> Result<usize, ServiceError> {
        let lifecycle = Arc::clone(self);
        run_own_blocking(move || lifecycle.flush_all()).await?
    }

    /// Runs [`Lifecycle::drain`] on a blocking thread.
    ///
    /// # Errors
    /// The worker is stopping.
    pub async fn drain_on_thread(self: &Arc<Self>) -> Result<Draining, ServiceError> {
        let lifecycle = Arc::clone(self);
        run_own_blocking(move || lifecycle.drain()).await
    }
}
