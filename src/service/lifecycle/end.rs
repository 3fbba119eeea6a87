//! Runs calls whose work grows with an application's data on blocking threads. These are ends of
//! applications, which any client may request, and walks over all data in memory. The blocks,
//! extents, and ids of one application may number millions.
//!
//! An unknown application is refused at once, inline. An end requested by a client is acknowledged
//! only once it is durable: a later start cannot recover the ended shuffle. Otherwise a client that
//! registers the same shuffle again would get the old data.

use std::sync::Arc;

use super::drain::Draining;
use crate::service::Lifecycle;
use crate::service::ServiceError;
use crate::service::blocking::{run_blocking, run_own_blocking};
use crate::telemetry::AUDIT;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

impl Lifecycle {
    /// Runs [`Lifecycle::unregister_app`] on a blocking thread and waits until it is durable.
    ///
    /// # Errors
    /// The errors of that function, or a tier cannot write the end durably now.
    pub async fn end_app(self: &Arc<Self>, app: &str) -> Result<(), ServiceError> {
        let id = AppId::parse(app).map_err(|_| ServiceError::NotRegistered)?;
        if self.apps.find(&id).is_none() {
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
        let app = self.lookup.app(app)?;
        let key = ShuffleKey::new(app.id().clone(), ShuffleId(shuffle));
        let lifecycle = Arc::clone(self);
        let end = move || lifecycle.unregister_shuffle(app.id().as_str(), shuffle);
        run_blocking(&self.ends, false, end).await??;
        self.ended_durably(&key.app, Some(&key)).await
    }

    async fn ended_durably(&self, app: &AppId, key: Option<&ShuffleKey>) -> Result<(), ServiceError> {
        if let Some(tier) = self.tiers.metadata() {
            tier.forgotten_durable(app, key).await?;
        }
        Ok(())
    }

    /// Runs [`Lifecycle::expire_apps`] on a blocking thread.
    pub async fn end_expired_apps(self: &Arc<Self>) {
        if self.apps.expired().is_empty() {
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
        let Some(tier) = self.tiers.metadata() else { return };
        let Some(reason) = tier.metadata_gap().filter(|_| self.apps.is_abandoned()) else { return };
        match tier.end_metadata_gap().await {
            Ok(true) => {
                self.apps.forget_unproven();
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
