//! Calls whose work grows with what an application has, away from the runtime's threads: its end, which anybody may call for, and
//! looks at all that is in memory. Memory, extents and ids of one application may be millions.
//!
//! An application that is unknown is refused here, at once.

use std::sync::Arc;

use super::ServiceError;
use super::aside::{aside, own_aside};
use super::drain::Draining;
use super::lifecycle::Lifecycle;
use uniffle_wire::types::AppId;

impl Lifecycle {
    /// [`Lifecycle::unregister_app`] on a blocking thread.
    ///
    /// # Errors
    /// As there.
    pub async fn end_app(self: &Arc<Self>, app: &str) -> Result<(), ServiceError> {
        let id = AppId::parse(app).map_err(|_| ServiceError::NotRegistered)?;
        if self.apps.find(&id).is_none() {
            return Err(ServiceError::NotRegistered);
        }
        let lifecycle = Arc::clone(self);
        aside(&self.ends, false, move || lifecycle.unregister_app(id.as_str())).await?
    }

    /// [`Lifecycle::unregister_shuffle`] on a blocking thread.
    ///
    /// # Errors
    /// As there.
    pub async fn end_shuffle(self: &Arc<Self>, app: &str, shuffle: i32) -> Result<(), ServiceError> {
        let app = self.known.app(app)?;
        let lifecycle = Arc::clone(self);
        let end = move || lifecycle.unregister_shuffle(app.id().as_str(), shuffle);
        aside(&self.ends, false, end).await?
    }

    /// [`Lifecycle::expire_apps`] on a blocking thread.
    pub async fn end_expired_apps(self: &Arc<Self>) {
        if self.apps.expired().is_empty() {
            return;
        }
        let lifecycle = Arc::clone(self);
        let expired = own_aside(move || lifecycle.expire_apps()).await;
        if let Err(error) = expired {
            tracing::error!(%error, "applications that are gone were not purged, the next look tries again");
        }
    }

    /// [`Lifecycle::flush_all`] on a blocking thread.
    ///
    /// # Errors
    /// As there.
    pub async fn flush_all_aside(self: &Arc<Self>) -> Result<usize, ServiceError> {
        let lifecycle = Arc::clone(self);
        own_aside(move || lifecycle.flush_all()).await?
    }

    /// [`Lifecycle::drain`] on a blocking thread.
    ///
    /// # Errors
    /// The worker is stopping.
    pub async fn drain_aside(self: &Arc<Self>) -> Result<Draining, ServiceError> {
        let lifecycle = Arc::clone(self);
        own_aside(move || lifecycle.drain()).await
    }
}
