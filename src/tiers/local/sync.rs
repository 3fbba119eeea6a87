//! Group commit: one `fdatasync` of a log serves everybody who waits for it.
//!
//! Who has written takes a number and waits in a tokio lock for whoever syncs now; the sync after that covers all whose
//! number was taken before it began. After a failed sync nobody knows what of the log is on the device (Linux calls the
//! pages clean all the same, and the next sync says that all is well), so the log is closed forever and everybody who
//! waited writes elsewhere. One whose end nobody saw counts as failed.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Core;
use super::disk::{APPS, LocalDisk, within};
use super::log::Log;
use crate::tiers::StoreError;
use uniffle_io::File;

use crate::schema::words;

words! {
    /// When what is written counts as written.
    pub enum SyncWrites {
        /// When the operating system has it: safe from the end of the process.
        Off = "off",
        /// When the device has it: safe from power loss. Writers share their syncs.
        Group = "group",
    }
}

/// The syncs of a log.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// Writes that have come to their end.
    written: AtomicU64,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// So many of the writes are on the device.
    durable: u64,
    /// A sync failed, or is under way.
    in_doubt: bool,
}

impl Core {
    /// Waits until everything that the caller has written to a log is on the device, if that is wanted.
    ///
    /// # Errors
    /// A sync failed or took longer than `deadline`: the log is closed.
    pub(super) async fn make_durable(
        &self,
        log: &Log,
        file: &Arc<dyn File>,
        deadline: Duration,
    ) -> Result<(), StoreError> {
        if self.config.sync == SyncWrites::Off {
            return Ok(());
        }
        let number = log.syncs.written.fetch_add(1, Ordering::AcqRel) + 1;
        let mut state = log.syncs.state.lock().await;
        if state.durable >= number {
            return Ok(());
        }
        if state.in_doubt {
            log.close();
            let text = io::Error::other("an earlier sync of this file failed");
            return Err(StoreError::io(log.full_path(), text));
        }
        let covered = log.syncs.written.load(Ordering::Acquire);
        // Until the answer is there: the caller may go away.
        state.in_doubt = true;
        let started = Instant::now();
        let result = log.disk.call(deadline, file.sync()).await;
        let seconds = started.elapsed().as_secs_f64();
        self.metrics.sync_duration.with_label_values(&[log.disk.label.as_str()]).observe(seconds);
        match result {
            Ok(()) => {
                (state.durable, state.in_doubt) = (covered, false);
                log.disk.progressed();
                Ok(())
            }
            Err(error) => {
                log.close();
                Err(StoreError::io(log.full_path(), error))
            }
        }
    }

    /// Waits until the names of what stands in a shuffle's directory are on the device, if that is wanted.
    pub(super) async fn make_names_durable(&self, disk: &LocalDisk, directory: &Path) -> io::Result<()> {
        if self.config.sync == SyncWrites::Off {
            return Ok(());
        }
        let below_apps = directory.ancestors().take_while(|path| path.starts_with(APPS));
        for path in below_apps {
            within(self.config.name_timeout, disk.io.sync_dir(path)).await?;
        }
        Ok(())
    }
}
