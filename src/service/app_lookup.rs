//! Lookup of the applications and shuffles named in requests.
//!
//! An unknown application is refused. If an earlier process may have known it, the error states why
//! its registration is missing. A lookup never creates an application.

use std::sync::Arc;

use crate::app::{App, AppRegistry, ShuffleState};
use crate::runtime::BlockingPool;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::ServiceError;
use crate::service::metrics::ServiceMetrics;

/// Lookup of applications; cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct AppLookup {
    pub(super) apps: Arc<AppRegistry>,
    pub(super) metrics: Arc<ServiceMetrics>,
    /// Pool for requested work that may be too long for a runtime thread.
    pub(super) pool: BlockingPool,
}

impl AppLookup {
    /// Returns the app of a request. An invalid id is treated as unknown.
    pub(super) fn app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let id = AppId::parse(app).ok();
        id.as_ref().and_then(|id| self.apps.find(id)).ok_or_else(|| {
            self.metrics.apps_not_found.inc();
            self.apps.note_unknown_call();
            match id.and_then(|id| self.apps.unproven_reason(&id)) {
                Some(reason) => {
                    ServiceError::Forgotten(format!("application {app} is no longer registered: {reason}"))
                }
                None => ServiceError::NotRegistered,
            }
        })
    }

    /// Returns the app as [`AppLookup::app`] does, and marks it as used now.
    pub(super) fn touched_app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let app = self.app(app)?;
        self.apps.touch(&app);
        Ok(app)
    }
}

/// Returns key and state of a shuffle of `app`, or `None` if it is not registered.
pub(super) fn shuffle_of(app: &App, shuffle: i32) -> Option<(ShuffleKey, Arc<ShuffleState>)> {
    let state = app.shuffle(ShuffleId(shuffle))?;
    Some((state.key().clone(), state))
}
