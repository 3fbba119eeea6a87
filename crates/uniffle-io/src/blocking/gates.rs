//! Limits of concurrent calls by kind and disk, and their blocking threads.
//!
//! Permits move to the thread, so a dropped future does not release them early.

use std::io;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::IoClass;

/// Maximum concurrent calls on names (open, rename, list, …). Most of these calls are short; a
/// higher limit would only let a hung disk block more threads.
pub(super) const NAME_CALLS_MAX: usize = 4;

/// Maximum concurrent recursive removals. They are slow, so they have a limit of their own and do
/// not delay opens.
pub(super) const REMOVALS_MAX: usize = 2;

/// Maximum concurrent writes and syncs of metadata: one can write while another syncs.
const METADATA_CALLS_MAX: usize = 2;

/// Limits the calls of one kind, and optionally those of several kinds together.
///
/// The permit of the kind is acquired first and that of the disk last, so that a holder of the
/// disk's permit never waits.
#[derive(Debug, Clone)]
pub(super) struct CallGate {
    pub(super) kind: Arc<Semaphore>,
    pub(super) disk: Option<Arc<Semaphore>>,
}

/// Permits that a call holds from start to end.
type Permits = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

pub(super) fn permits(count: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(count.clamp(1, Semaphore::MAX_PERMITS)))
}

impl CallGate {
    pub(super) fn new(calls_max: usize) -> Self {
        Self { kind: permits(calls_max), disk: None }
    }

    pub(super) async fn enter(self) -> Permits {
        const OPEN: &str = "a disk never closes its semaphores";
        let kind = self.kind.acquire_owned().await.expect(OPEN);
        let disk = match self.disk {
            Some(disk) => Some(disk.acquire_owned().await.expect(OPEN)),
            None => None,
        };
        (kind, disk)
    }

    /// Returns the permits if they are available without waiting.
    pub(super) fn try_enter(&self) -> Option<Permits> {
        let kind = Arc::clone(&self.kind).try_acquire_owned().ok()?;
        let disk = match &self.disk {
            Some(disk) => Some(Arc::clone(disk).try_acquire_owned().ok()?),
            None => None,
        };
        Some((kind, disk))
    }
}

/// Limits of writes and syncs.
#[derive(Debug, Clone)]
pub(super) struct WriteGates {
    pub(super) metadata: CallGate,
    pub(super) index: CallGate,
    pub(super) bulk: CallGate,
}

impl WriteGates {
    pub(super) fn new(calls_max: usize) -> Self {
        let metadata = CallGate::new(METADATA_CALLS_MAX);
        Self { metadata, index: CallGate::new(calls_max), bulk: CallGate::new(calls_max) }
    }

    pub(super) fn of(&self, class: IoClass) -> CallGate {
        match class {
            IoClass::Metadata => self.metadata.clone(),
            IoClass::Index => self.index.clone(),
            IoClass::Bulk => self.bulk.clone(),
        }
    }
}

/// Runs `work` on a blocking thread. The thread holds the permit until `work` ends.
pub(super) async fn blocking<T: Send + 'static>(
    gate: CallGate,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let permits = gate.enter().await;
    run_permitted(permits, work).await
}

pub(super) async fn run_permitted<T: Send + 'static>(
    permit: Permits,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let joined = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(permit);
        done
    });
    // The thread panicked, or the runtime is shutting down.
    joined.await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
