//! Ships the metadata log to an object store.
//!
//! Entries are stored in order, as objects that never change (`objects`). Each entry has a
//! position, and the store knows all entries up to one position. An object that cannot be stored
//! now is stored later, under the same name. A start, a queue or generation that has become too
//! long, and every [`REFRESH`] begin a new generation with a checkpoint of all living entries.
//! Earlier generations are deleted once this process no longer reads them.
//!
//! Without local disks the store is the only holder of the log. After a failed write, all waiting
//! callers get the error, and the queue keeps only ends of shuffles. Entries of the object that
//! failed may be stored later, although their callers got the error.

mod queue;
mod task;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

pub(crate) use self::queue::CheckpointSource;
use self::queue::{LogOrigin, ShipperState, State};
pub use self::task::REFRESH;
use self::task::Task;
use super::object::LogObjects;
use super::shipped::ShippedLog;
use crate::LogError;
use crate::format::frame::{FrameContent, Incarnation, PAYLOAD_BYTES_MAX};
use uniffle_base::budget::Budget;
use uniffle_base::clock::timeout;
use uniffle_base::runtime::Tasks;

/// Maximum size of waiting entries that are also on the disks. Beyond it, they are dropped, and a
/// checkpoint replaces them. Without disks there is no maximum.
const QUEUE_BYTES_MAX: u64 = 8 << 20;
/// Longest wait of a caller for the store. Longer than the default limits of a request with its
/// retries, so that a store that refuses requests is reported with its own error.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// Handle of the log in the store. Clones share it.
#[derive(Debug, Clone)]
pub struct Shipper(Arc<ShipperState>);

/// Waits for the store until [`WAIT_MAX`].
async fn answer(waiting: oneshot::Receiver<Result<(), LogError>>) -> Result<(), LogError> {
    match timeout(WAIT_MAX, waiting).await {
        Ok(answered) => answered.unwrap_or_else(|_| Err(LogError::other("the worker is stopping"))),
        Err(_elapsed) => {
            let text = format!("the object store has not answered for {} s", WAIT_MAX.as_secs());
            Err(LogError::of(io::ErrorKind::TimedOut, &text))
        }
    }
}

impl Shipper {
    /// Opens the log for start number `start` of the worker, after the found entries. Nothing is
    /// stored before [`begin`](Self::begin) or `MetadataLog::ship_by`.
    #[must_use]
    pub fn open(
        objects: Arc<dyn LogObjects>,
        found: &Arc<ShippedLog>,
        start: u32,
        memory: &Budget,
        tasks: &Tasks,
    ) -> Self {
        let (begin, begun) = oneshot::channel();
        let state = State {
            queue: VecDeque::new(),
            charge: memory.empty_charge(),
            has_overflowed: false,
            end: 0,
            known: 0,
            waiters: Vec::new(),
            is_begun: false,
            ended: None,
            begin: Some(begin),
        };
        let shared = Arc::new(ShipperState { state: Mutex::new(state), wake: Notify::new() });
        let (task_shared, memory, found) = (Arc::clone(&shared), memory.clone(), Arc::clone(found));
        let (ending, cancelled) = (Self(Arc::clone(&shared)), tasks.cancelled());
        tasks.spawn("object metadata", async move {
            let shipping = async {
                let Ok(origin) = begun.await else { return };
                Task::new(task_shared, &objects, &memory, origin, found, start).run().await;
            };
            tokio::select! {
                biased;
                () = cancelled => {}
                () = shipping => {}
            }
            ending.end(LogError::other("the worker is stopping"));
        });
        Self(shared)
    }

    /// Begins to store the contents of the disks' log.
    pub(crate) fn begin_from_disks(&self, log: Arc<dyn CheckpointSource>) {
        self.begin_from(LogOrigin::Disks(log));
    }

    /// Begins to store entries of a worker without disks. Repeated calls change nothing.
    pub(crate) fn begin(&self) {
        self.begin_from(LogOrigin::Store);
    }

    fn begin_from(&self, origin: LogOrigin) {
        if let Some(begin) = self.0.state.lock().begin.take() {
            // The task may have ended.
            let _ = begin.send(origin);
        }
    }

    /// Adds entries that are on the disks, so a queue that is too long can be dropped. Returns the
    /// position of the last.
    pub(crate) fn add(&self, entries: impl IntoIterator<Item = FrameContent>) -> u64 {
        let mut state = self.0.state.lock();
        if state.ended.is_some() {
            return state.end;
        }
        for entry in entries {
            state.push(entry);
        }
        if state.charge.bytes() > QUEUE_BYTES_MAX {
            state.clear();
            state.has_overflowed = true;
        }
        let end = state.end;
        drop(state);
        self.0.wake.notify_one();
        end
    }

    /// Adds an entry of a worker without disks, and waits until the store has it. Returns its
    /// position.
    ///
    /// # Errors
    /// The store does not take the entry or does not answer, or the entry is too long.
    pub(crate) async fn append(&self, entry: FrameContent) -> Result<u64, LogError> {
        if let FrameContent::Record(_, record) = &entry
            && record.len() > PAYLOAD_BYTES_MAX / 2
        {
            return Err(LogError::of(io::ErrorKind::InvalidInput, "the metadata record is too long"));
        }
        let (position, waiting) = {
            // In one step, so that a failure in between drops no entry without telling its caller.
            let mut state = self.0.state.lock();
            let position = if state.ended.is_none() { state.push(entry) } else { state.end };
            (position, state.wait(position))
        };
        self.0.wake.notify_one();
        answer(waiting).await.map(|()| position)
    }

    /// Adds the end of a shuffle of a worker without disks. Returns its position.
    pub(crate) fn purge(&self, shuffle: Incarnation) -> u64 {
        let mut state = self.0.state.lock();
        if state.ended.is_some() {
            return state.end;
        }
        // Without disks a long queue is never dropped: nothing else has its entries.
        let end = state.push(FrameContent::Purged(shuffle));
        drop(state);
        self.0.wake.notify_one();
        end
    }

    /// Adds an entry without effect, and returns its position. Once the store has it, a write to
    /// the store has succeeded since.
    pub fn add_mark(&self) -> u64 {
        self.add([FrameContent::Begun])
    }

    /// Returns the position of the last entry.
    #[must_use]
    pub fn end_position(&self) -> u64 {
        self.0.state.lock().end
    }

    /// Returns whether the store has everything up to a position.
    #[must_use]
    pub fn knows(&self, position: u64) -> bool {
        self.0.state.lock().known >= position
    }

    /// Returns whether this process has begun a generation in the store.
    #[must_use]
    pub fn is_begun(&self) -> bool {
        self.0.state.lock().is_begun
    }

    /// Waits until the store has everything up to a position, and a generation of this process has
    /// begun.
    ///
    /// # Errors
    /// The next attempt to store it failed, or the store does not answer.
    pub async fn known(&self, position: u64) -> Result<(), LogError> {
        let waiting = {
            let mut state = self.0.state.lock();
            state.wait(position)
        };
        self.0.wake.notify_one();
        answer(waiting).await
    }

    fn end(&self, error: LogError) {
        let mut state = self.0.state.lock();
        state.fail(&error);
        state.clear();
        state.ended.get_or_insert(error);
    }
}

#[cfg(test)]
mod tests;
