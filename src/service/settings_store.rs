//! Saving of settings made at run time, for calls that are answered only once they are saved.

use std::fmt;
use std::sync::Weak;

use futures::future::BoxFuture;

use super::ServiceError;
use super::lifecycle::Lifecycle;

/// Storage for decommissioning and tags, which outlives the process.
pub trait SettingsStore: fmt::Debug + Send + Sync {
    /// Saves the current settings.
    ///
    /// # Errors
    /// The path and the error of each file, if none was written.
    fn save(&self) -> BoxFuture<'_, Result<(), String>>;
}

impl Lifecycle {
    /// Sets the storage used by [`Lifecycle::save_settings`]. Only the first call counts.
    pub fn set_settings_store(&self, store: Weak<dyn SettingsStore>) {
        let _ = self.settings_store.set(store);
    }

    /// Saves decommissioning and tags, if a storage is set.
    ///
    /// # Errors
    /// [`ServiceError::NotSaved`]. The settings are in effect nevertheless.
    pub async fn save_settings(&self) -> Result<(), ServiceError> {
        match self.settings_store.get().and_then(Weak::upgrade) {
            Some(store) => store.save().await.map_err(ServiceError::NotSaved),
            None => Ok(()),
        }
    }
}
