//! How a worker ends, with or without a successor.
//!
//! Tickets are refused with NO_BUFFER, for which every client waits, and memory is brought to the disks while reads and
//! the sends that hold tickets go on. Then the listeners close: gRPC connections get a GOAWAY, calls that have begun are
//! answered, and raw TCP connections end between two requests; with a successor they are kept for it. What came in
//! meanwhile is flushed. What could not be flushed is named here and found lost by the next start. Last, without a successor,
//! the disks are synced.
//!
//! A worker lets go for a successor only when its memory is empty and no send can be acknowledged any more, which can
//! still be taken back; from there on nothing can be lost by it. Where the successor takes over what is in memory, no call
//! is refused: what is being written is waited for while everything goes on, then the listeners close, sends that had begun are
//! acknowledged, and all others wait in their sockets for the successor.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::memory::{InMemory, Memory};
use crate::service::Stopping;

use super::kept::Outlives;
use super::sockets::Inherited;
use super::{Worker, tickets};

/// How long what has begun on connections may take to end after the listeners were told to close.
const DRAIN_DEADLINE: Duration = Duration::from_secs(15);
/// What a task may take to see that it was cancelled.
const CANCEL_DEADLINE: Duration = Duration::from_secs(15);
/// Time for what came in while the listeners closed, if the flush before has used up all of its own.
const LAST_FLUSH: Duration = Duration::from_secs(5);
/// A client that has a ticket sends at once; one that does not is not waited for any longer.
const TICKET_PATIENCE: Duration = Duration::from_secs(2);
/// Time for bringing what was written to the devices: the machine is often switched off next.
const SYNC_DEADLINE: Duration = Duration::from_secs(10);
/// Time for deletions of what applications that have gone leave in a remote store: what is left is the next start's.
const DELETION_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks at what is waited for.
const LOOK: Duration = Duration::from_millis(10);

/// What a worker leaves behind.
#[derive(Debug)]
pub struct Stopped {
    /// Tasks that had to be left behind (a disk call that hangs); 0 is the rule.
    pub tasks_left: usize,
    /// What could not be flushed: empty is the rule.
    pub unflushed: Vec<InMemory>,
    /// Bytes that were flushed after it let go; 0 is the rule with a successor, for which clients wait meanwhile.
    pub flushed_bytes: u64,
    /// Listeners that still listen, and connections: for a successor.
    pub sockets: Inherited,
    /// What is let go of: to drop it takes milliseconds, which a process that becomes another one saves.
    pub(super) memory: Arc<Memory>,
}

impl Worker {
    /// Stops in order and waits until no task is left. Returns how many tasks had to be left behind.
    pub async fn stop(mut self) -> usize {
        self.service.status().stop(Stopping::ForGood);
        // An upgrade may have been under way.
        if let Some(flusher) = self.service.flusher() {
            flusher.go_on();
        }
        let deadline = Instant::now() + self.flush_timeout;
        self.flush_until(deadline).await;
        // Connects are refused from here on: none would ever be accepted.
        self.held = Inherited::default();
        let service = Arc::clone(&self.service);
        self.end_deletions().await;
        let tasks_left = self.end(deadline, LeftMemory::Empty).await.tasks_left;
        join_all(service.tiers().iter().map(|tier| tier.sync(SYNC_DEADLINE))).await;
        tasks_left
    }

    /// Waits for what is being deleted in remote stores.
    pub(super) async fn end_deletions(&self) {
        join_all(self.service.tiers().iter().map(|tier| tier.end_deletions(DELETION_DEADLINE))).await;
    }

    /// Refuses tickets and flushes, then refuses sends and flushes the rest: afterwards memory is empty and stays so. If it
    /// is not in time, [`Worker::go_on`].
    ///
    /// # Errors
    /// What is left in memory.
    pub(super) async fn prepare_to_hand_over(&self) -> Result<(), Vec<InMemory>> {
        self.service.status().stop(Stopping::ForSuccessor);
        let deadline = Instant::now() + self.flush_timeout;
        let left = self.flush_until(deadline).await;
        if !left.is_empty() {
            return Err(left);
        }
        self.service.ingest.refuse_sends();
        self.empty(deadline.max(Instant::now() + LAST_FLUSH)).await;
        let left = self.memory.contents();
        if left.is_empty() { Ok(()) } else { Err(left) }
    }

    /// Waits for what is being written to the tiers, while everything else goes on, and begins nothing more: memory can be
    /// passed on as it is. False if that takes too long.
    pub(super) async fn prepare_to_pass_on(&self) -> bool {
        let rests = match self.service.flusher() {
            Some(flusher) => flusher.rest(Instant::now() + self.flush_timeout).await,
            None => true,
        };
        if rests {
            let memory = Arc::clone(&self.memory);
            // Without it the end takes longer.
            let _unlinked = tokio::task::spawn_blocking(move || memory.unlink_pages()).await;
        }
        rests
    }

    /// It did not come to a handover: tickets and sends are taken as before.
    pub(super) fn go_on(&self) {
        self.service.go_on();
        if let Some(flusher) = self.service.flusher() {
            flusher.go_on();
        }
    }

    /// Stops and leaves the sockets to a successor; [`Worker::prepare_to_hand_over`] came before, or
    /// [`Worker::prepare_to_pass_on`] where it takes over `memory`.
    pub(super) async fn hand_over(self, memory: LeftMemory) -> Stopped {
        self.grpc_handover.begin();
        self.tcp_handover.begin();
        let deadline = Instant::now() + self.flush_timeout;
        let promised = Arc::clone(&self.memory);
        let mut stopped = self.end(deadline, memory).await;
        stopped.sockets.tickets = tickets::passed_on(&promised);
        stopped
    }

    /// Flushes until memory is empty and no more sends are expected, at the latest until `deadline`.
    async fn flush_until(&self, deadline: Instant) -> Vec<InMemory> {
        let tickets = async {
            while self.memory.tickets().count() > 0 {
                sleep(LOOK).await;
            }
        };
        let tickets = timeout_at(deadline.min(Instant::now() + TICKET_PATIENCE), tickets);
        let (_, ()) = tokio::join!(tickets, self.empty(deadline));
        self.empty(deadline).await;
        self.memory.contents()
    }

    async fn empty(&self, deadline: Instant) {
        if let Some(flusher) = self.service.flusher() {
            flusher.empty(deadline).await;
        }
    }

    async fn end(mut self, deadline: Instant, memory: LeftMemory) -> Stopped {
        let flushed_before = self.flushed_bytes();
        self.listeners.close();
        if timeout(DRAIN_DEADLINE, self.listeners.drained()).await.is_err() {
            tracing::warn!(
                tasks = self.listeners.running(),
                "connections did not end in time and are closed"
            );
        }
        self.listeners.cancel();
        if timeout(CANCEL_DEADLINE, self.listeners.drained()).await.is_err() {
            tracing::warn!(tasks = self.listeners.running(), "connections did not end");
        }
        match memory {
            LeftMemory::Empty => self.empty(deadline.max(Instant::now() + LAST_FLUSH)).await,
            // Sends that had begun are answered. One that was not in time is never acknowledged.
            LeftMemory::PassedOn => self.service.ingest.refuse_sends(),
        }
        self.background.cancel();
        if timeout(CANCEL_DEADLINE, self.background.drained()).await.is_err() {
            tracing::warn!(tasks = self.background.running(), "background tasks did not end in time");
        }
        let unflushed = match memory {
            LeftMemory::Empty => self.memory.contents(),
            LeftMemory::PassedOn => Vec::new(),
        };
        Outlives::of(&self.memory).name_losses(&unflushed);
        self.memory.let_go();
        let flushed_bytes = self.flushed_bytes() - flushed_before;
        let mut sockets = std::mem::take(&mut self.held);
        sockets.grpc_connections.extend(self.grpc_handover.take());
        sockets.tcp_connections.extend(self.tcp_handover.take());
        let tasks_left = self.listeners.running() + self.background.running();
        Stopped { tasks_left, unflushed, flushed_bytes, sockets, memory: Arc::clone(&self.memory) }
    }

    fn flushed_bytes(&self) -> u64 {
        self.service.flusher().map_or(0, |flusher| flusher.flushed_bytes())
    }
}

/// What becomes of what is in memory at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeftMemory {
    /// It is flushed.
    Empty,
    /// A successor takes it over.
    PassedOn,
}
