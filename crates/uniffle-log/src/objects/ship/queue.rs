//! The queue of entries for the object store, shared by handle and task.
//!
//! With disks, a queue that becomes too long is dropped and replaced by a checkpoint. Invariant:
//! entries are taken in the order of their positions. After some were dropped, none is taken until
//! a checkpoint has replaced them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::LogError;
use crate::format::frame::FrameContent;
use crate::recovery::read::Snapshot;
use uniffle_base::budget::Charge;

/// Bookkeeping of a waiting entry in bytes.
const ENTRY_BYTES: u64 = 64;

/// The log on the disks, the source of checkpoints for the store.
pub(crate) trait CheckpointSource: fmt::Debug + Send + Sync {
    /// Waits until the log has begun a generation on the disks, or has failed to.
    fn begun(&self) -> BoxFuture<'_, ()>;

    /// Returns where the log can be read now, and which of its shuffles are live.
    fn snapshot(&self) -> BoxFuture<'_, Result<Snapshot, LogError>>;
}

/// Source of a checkpoint.
#[derive(Debug)]
pub(super) enum LogOrigin {
    Disks(Arc<dyn CheckpointSource>),
    Store,
}

#[derive(Debug)]
pub(super) struct ShipperState {
    pub(super) state: Mutex<State>,
    /// Notified when the task has work.
    pub(super) wake: Notify,
}

#[derive(Debug)]
pub(super) struct State {
    /// Waiting entries with their positions.
    pub(super) queue: VecDeque<(u64, FrameContent)>,
    pub(super) charge: Charge,
    /// True after waiting entries were dropped, until a checkpoint of the disks' log replaces them.
    pub(super) has_overflowed: bool,
    /// Position of the last entry.
    pub(super) end: u64,
    /// Position up to which the store has all entries, except those whose callers got an error.
    pub(super) known: u64,
    pub(super) waiters: Vec<(u64, oneshot::Sender<Result<(), LogError>>)>,
    /// True once this process has begun a generation. No wait ends with success before.
    pub(super) is_begun: bool,
    /// Error after which nothing is stored.
    pub(super) ended: Option<LogError>,
    /// Starts the task. Taken by the first call.
    pub(super) begin: Option<oneshot::Sender<LogOrigin>>,
}

impl State {
    pub(super) fn push(&mut self, entry: FrameContent) -> u64 {
        let bytes = bytes_of(&entry);
        self.end += 1;
        let charge = self.charge.budget().charge_unchecked(bytes);
        self.charge.merge(charge);
        self.queue.push_back((self.end, entry));
        self.end
    }

    /// Takes the next entry. Returns `None` after entries were dropped: the next checkpoint has
    /// them and all waiting ones.
    pub(super) fn pop(&mut self) -> Option<(u64, FrameContent)> {
        if self.has_overflowed { None } else { self.queue.pop_front() }
    }

    /// Returns the charge of entries that are no longer in the queue.
    pub(super) fn recharge(&mut self) {
        let held = self.queue.iter().map(|(_, entry)| bytes_of(entry)).sum::<u64>();
        drop(self.charge.split_up_to(self.charge.bytes().saturating_sub(held)));
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        drop(self.charge.split_up_to(u64::MAX));
    }

    pub(super) fn wait(&mut self, position: u64) -> oneshot::Receiver<Result<(), LogError>> {
        let (done, waiting) = oneshot::channel();
        if let Some(error) = &self.ended {
            // Cannot fail: the receiver is returned below.
            let _ = done.send(Err(error.clone()));
        } else if self.is_begun && position <= self.known {
            let _ = done.send(Ok(()));
        } else {
            self.waiters.push((position, done));
        }
        waiting
    }

    /// Records that the store has all entries up to `position`, and wakes their callers.
    pub(super) fn advance(&mut self, position: u64) {
        self.known = self.known.max(position);
        for (_, done) in self.waiters.extract_if(.., |(wanted, _)| *wanted <= position) {
            // The caller may have been dropped.
            let _ = done.send(Ok(()));
        }
    }

    /// Fails all waiting callers.
    pub(super) fn fail(&mut self, error: &LogError) {
        for (_, done) in self.waiters.drain(..) {
            let _ = done.send(Err(error.clone()));
        }
    }
}

fn bytes_of(entry: &FrameContent) -> u64 {
    let content = match entry {
        FrameContent::Record(_, record) => record.len() as u64,
        FrameContent::Purged(_)
        | FrameContent::Incomplete(..)
        | FrameContent::Moved(_)
        | FrameContent::Epoch(_)
        | FrameContent::Begun => 0,
    };
    ENTRY_BYTES + content
}
