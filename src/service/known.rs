//! The applications and shuffles that calls name.

use std::sync::Arc;

use crate::app::{App, AppRegistry, ShuffleState};
use crate::runtime::Aside;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::ServiceError;
use super::metrics::ServiceMetrics;

/// Finds them; cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) apps: Arc<AppRegistry>,
    pub(super) metrics: Arc<ServiceMetrics>,
    /// For what a request asks for and may be too long for a runtime thread.
    pub(super) aside: Aside,
}

impl Known {
    /// The app of a request; an id that cannot exist is unknown like any other.
    pub(super) fn app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let id = AppId::parse(app).ok();
        id.as_ref().and_then(|id| self.apps.find(id)).ok_or_else(|| {
            self.metrics.apps_not_found.inc();
            match id.and_then(|id| self.apps.unproven_reason(&id)) {
                Some(reason) => {
                    ServiceError::Forgotten(format!("application {app} is no longer registered: {reason}"))
                }
                None => ServiceError::NotRegistered,
            }
        })
    }

    /// As [`Known::app`], and the app counts as used now.
    pub(super) fn touched_app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let app = self.app(app)?;
        self.apps.touch(&app);
        Ok(app)
    }
}

/// Key and state of a shuffle of `app`; `None` if it is not registered.
pub(super) fn shuffle_of(app: &App, shuffle: i32) -> Option<(ShuffleKey, Arc<ShuffleState>)> {
    let state = app.shuffle(ShuffleId(shuffle))?;
    Some((state.key().clone(), state))
}
