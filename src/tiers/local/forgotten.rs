//! What a shuffle had when it was forgotten: its extents, which are still counted and cached.
//!
//! A shuffle is forgotten under a lock for which registrations wait on runtime threads, and may have hundreds of thousands of
//! extents. So they are only taken out there; they are walked through where this is dropped. Files are not removed before.

use std::sync::Arc;

use super::core::Core;
use super::extent::NO_LOG;
use super::shuffle::Shuffle;
use super::streams::Streams;
use crate::metrics::clamped;

/// A shuffle of which nothing is readable or writable any more. What it had leaves gauges and caches when this is dropped.
#[derive(Debug)]
#[must_use = "dropped under a lock it keeps others waiting"]
pub struct Forgotten {
    core: Arc<Core>,
    shuffle: Arc<Shuffle>,
    streams: Streams,
}

impl Forgotten {
    /// From now on it is purged.
    pub(super) fn new(core: &Arc<Core>, shuffle: Arc<Shuffle>) -> Self {
        let streams = shuffle.mark_purged();
        Self { core: Arc::clone(core), shuffle, streams }
    }
}

impl Drop for Forgotten {
    fn drop(&mut self) {
        let Self { core, shuffle, streams } = self;
        let known = || streams.extents().filter(|extent| extent.index_log != NO_LOG);
        core.metrics.extents.sub(clamped(known().count()));
        core.records.forget(streams.extents().map(|extent| shuffle.records_key(extent)));
        let logs = shuffle.logs();
        let mut bytes = vec![0; core.disks.len()];
        for extent in known() {
            if let Some(log) = logs.get(usize::from(extent.data_log)) {
                bytes[log.disk.index] += extent.length;
            }
        }
        for log in logs {
            core.files.forget(&log);
        }
        shuffle.set_forgotten(bytes);
    }
}

/// Drops what shuffles had, on a blocking thread; also when the caller goes away.
pub(super) async fn dropped_aside(forgotten: Vec<Forgotten>) {
    // Of a panic nobody here can make more than its message.
    let _dropped = tokio::task::spawn_blocking(move || drop(forgotten)).await;
}
