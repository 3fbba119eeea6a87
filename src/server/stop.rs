//! Graceful stop (shutdown) of a worker, with or without a successor.
//!
//! A stop refuses tickets, flushes memory while reads and sends with tickets continue, and closes
//! the listeners between requests. A last flush tries every disk. Blocks that remain are logged.
//! Unless the next process receives the memory, they are lost: the exit code changes, and the next
//! start reports them. Without a successor the disks are synced last.
//!
//! With a successor, the stop can be undone until the listeners close. If the successor takes over
//! the memory contents, no call is refused: new requests wait in their sockets.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;

use crate::clock::{Instant, sleep, timeout, timeout_at};
use crate::memory::{InMemory, Memory};
use crate::service::{Service, Stopping};
use crate::store::LocalStore;

use super::Worker;
use super::sockets::{Inherited, now_ms};
use super::start::memory_backing::MemoryRetention;
use super::upgrade::write_tickets;

/// Time for running requests to end after the listeners were closed.
const DRAIN_DEADLINE: Duration = Duration::from_secs(15);
/// Time for a task to notice its cancellation.
const CANCEL_DEADLINE: Duration = Duration::from_secs(15);
/// Time for one step of a local deletion, which takes milliseconds unless the disk hangs.
const REMOVAL_STEP_DEADLINE: Duration = Duration::from_secs(2);
/// Minimum time for the last flush, even if the first flush has used all of the time.
const LAST_FLUSH: Duration = Duration::from_secs(5);
/// Time to wait for outstanding tickets. A client with a ticket normally sends at once.
const TICKET_WAIT_MAX: Duration = Duration::from_secs(2);
/// Time for syncing the disks: the machine is often switched off next.
const SYNC_DEADLINE: Duration = Duration::from_secs(10);
/// Time for running deletions in the object store. The next start continues with the rest.
const DELETION_DEADLINE: Duration = Duration::from_secs(5);
/// Poll interval while waiting for tickets.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Outcome of a graceful stop.
#[derive(Debug, Clone, Copy)]
pub(super) struct StopOutcome {
    /// Number of tasks abandoned.
    pub(super) tasks_left: usize,
    /// True if acknowledged blocks are lost with the process.
    pub(super) has_lost: bool,
}

/// State left by a stopped worker.
#[derive(Debug)]
pub struct StopReport {
    /// Number of tasks abandoned, for example because a disk call hangs. Normally 0.
    pub tasks_left: usize,
    /// Shuffles with unflushed blocks. Normally empty.
    pub unflushed: Vec<InMemory>,
    /// True if the unflushed blocks are lost with the process.
    pub has_lost: bool,
    /// Bytes flushed after the listeners closed. Normally 0 with a successor, since clients wait
    /// during that flush.
    pub flushed_bytes: u64,
    /// Open listeners and connections for a successor.
    pub sockets: Inherited,
    /// The released memory. Dropping it takes milliseconds, which a process about to `exec` saves.
    pub(super) memory: Arc<Memory>,
}

impl Worker {
    /// Stops gracefully and waits for all tasks. Returns the number of tasks abandoned.
    pub async fn stop(self) -> usize {
        self.stop_in_order().await.tasks_left
    }

    /// Stops gracefully. Returns the abandoned tasks and whether blocks are lost.
    pub(super) async fn stop_in_order(mut self) -> StopOutcome {
        self.service.status().stop(Stopping::ForGood);
        self.state.save_for_stop().await;
        // An upgrade may have paused the flusher.
        if let Some(flusher) = self.service.flusher() {
            flusher.resume();
        }
        let deadline = Instant::now() + self.flush_timeout;
        self.flush_until(deadline).await;
        // Connects are refused as soon as the listeners close, since none would be accepted.
        self.handover.held = Inherited::default();
        let service = Arc::clone(&self.service);
        self.end_deletions().await;
        let stopped = self.end(deadline, MemoryTreatment::Flush).await;
        join_all(service.tiers().maintained().map(async |tier| tier.sync(SYNC_DEADLINE).await)).await;
        StopOutcome { tasks_left: stopped.tasks_left, has_lost: stopped.has_lost }
    }

    /// Waits for deletions in the object store, up to [`DELETION_DEADLINE`].
    pub(super) async fn end_deletions(&self) {
        let tiers = self.service.tiers().maintained();
        join_all(tiers.map(async |tier| tier.end_deletions(DELETION_DEADLINE).await)).await;
    }

    /// Refuses tickets and flushes, then refuses sends and flushes the rest. Afterwards memory is
    /// empty and stays so. After a failure, [`Worker::resume`] resumes service.
    ///
    /// # Errors
    /// The shuffles still in memory.
    pub(super) async fn flush_for_successor(&self) -> Result<(), Vec<InMemory>> {
        self.service.status().stop(Stopping::ForSuccessor);
        let deadline = Instant::now() + self.flush_timeout;
        let remaining = self.flush_until(deadline).await;
        if !remaining.is_empty() {
            return Err(remaining);
        }
        self.service.ingest.refuse_sends();
        self.drain_memory(deadline.max(Instant::now() + LAST_FLUSH)).await;
        let remaining = self.memory.contents_with_kept();
        if remaining.is_empty() { Ok(()) } else { Err(remaining) }
    }

    /// Pauses writes to the tiers and waits for running ones, while all other work continues.
    /// Afterwards memory can be handed over as it is. Returns false if that takes too long.
    pub(super) async fn pause_for_successor(&self) -> bool {
        let is_paused = match self.service.flusher() {
            Some(flusher) => flusher.pause(Instant::now() + self.flush_timeout).await,
            None => true,
        };
        if is_paused {
            self.unlink_pages().await;
        }
        is_paused
    }

    /// Removes the pages of a transferable memory from the page table of this process, which then
    /// ends faster. Their contents stay.
    async fn unlink_pages(&self) {
        let memory = Arc::clone(&self.memory);
        let _unlinked = tokio::task::spawn_blocking(move || memory.unlink_pages()).await;
    }

    /// Resumes tickets and sends after a handover that did not happen.
    pub(super) fn resume(&self) {
        self.service.resume();
        if let Some(flusher) = self.service.flusher() {
            flusher.resume();
        }
    }

    /// Stops and leaves the sockets to a successor. Must follow [`Worker::flush_for_successor`],
    /// or [`Worker::pause_for_successor`] if the successor takes over `memory`.
    pub(super) async fn hand_over(self, memory: MemoryTreatment) -> StopReport {
        // An error to save has been logged, and the successor gets the settings anyway.
        let ((), (), _saved) = tokio::join!(self.end_http(), self.cease_removals(), self.state.save());
        if memory == MemoryTreatment::HandOver {
            // Requests served since the first call have touched pages again.
            self.unlink_pages().await;
        }
        let gap_began_ms = Some(now_ms());
        self.handover.grpc.begin();
        self.handover.tcp.begin();
        let deadline = Instant::now() + self.flush_timeout;
        let (memory_with_tickets, state) = (Arc::clone(&self.memory), Arc::clone(&self.state));
        let mut stopped = self.end(deadline, memory).await;
        let (tickets, state) = (write_tickets(&memory_with_tickets), state.write_for_successor().await);
        stopped.sockets = Inherited { gap_began_ms, tickets, state, ..stopped.sockets };
        stopped
    }

    /// Stops deletions on local disks. The successor empties the trash.
    async fn cease_removals(&self) {
        let Some(local) = self.service.tiers().find::<LocalStore>() else { return };
        if timeout(REMOVAL_STEP_DEADLINE, local.cease_removals()).await.is_err() {
            tracing::warn!("deletion of shuffle files did not finish; the successor continues it");
        }
    }

    /// Ends the HTTP tasks. Requests that have begun, even partly received ones, get time to
    /// finish. New ones wait for the successor.
    async fn end_http(&self) {
        self.tasks.http.cancel();
        if timeout(CANCEL_DEADLINE, self.tasks.http.drained()).await.is_err() {
            tracing::warn!(tasks = self.tasks.http.running(), "http requests did not end in time");
        }
    }

    /// Flushes until memory is empty and no more sends are expected, at most until `deadline`.
    /// Returns the shuffles still in memory.
    async fn flush_until(&self, deadline: Instant) -> Vec<InMemory> {
        let tickets = async {
            while self.memory.tickets().count() > 0 {
                sleep(POLL_INTERVAL).await;
            }
        };
        let tickets = timeout_at(deadline.min(Instant::now() + TICKET_WAIT_MAX), tickets);
        let (_, ()) = tokio::join!(tickets, self.drain_memory(deadline));
        self.drain_memory(deadline).await;
        self.memory.contents()
    }

    async fn drain_memory(&self, deadline: Instant) {
        if let Some(flusher) = self.service.flusher() {
            flusher.drain(deadline).await;
        }
    }

    async fn end(mut self, deadline: Instant, memory: MemoryTreatment) -> StopReport {
        let flushed_before = self.flushed_bytes();
        self.tasks.listeners.close();
        if timeout(DRAIN_DEADLINE, self.tasks.listeners.drained()).await.is_err() {
            tracing::warn!(
                tasks = self.tasks.listeners.running(),
                "connections did not end in time; closing them"
            );
        }
        self.tasks.listeners.cancel();
        if timeout(CANCEL_DEADLINE, self.tasks.listeners.drained()).await.is_err() {
            tracing::warn!(tasks = self.tasks.listeners.running(), "closed connections did not end in time");
        }
        match memory {
            MemoryTreatment::Flush => self.drain_memory(deadline.max(Instant::now() + LAST_FLUSH)).await,
            // Sends that had begun are answered by now. A late one is never acknowledged.
            MemoryTreatment::HandOver => self.service.ingest.refuse_sends(),
        }
        self.tasks.background.cancel();
        self.tasks.http.cancel();
        let ended = async { tokio::join!(self.tasks.background.drained(), self.tasks.http.drained()) };
        if timeout(CANCEL_DEADLINE, ended).await.is_err() {
            let tasks = self.tasks.background.running() + self.tasks.http.running();
            tracing::warn!(tasks, "background tasks did not end in time");
        }
        let unflushed = match memory {
            MemoryTreatment::Flush => self.memory.contents_with_kept(),
            MemoryTreatment::HandOver => Vec::new(),
        };
        let has_lost = MemoryRetention::of(&self.memory).log_losses(&unflushed);
        self.memory.release();
        let flushed_bytes = self.flushed_bytes() - flushed_before;
        let mut sockets = std::mem::take(&mut self.handover.held);
        sockets.grpc_connections.extend(self.handover.grpc.take());
        sockets.tcp_connections.extend(self.handover.tcp.take());
        let tasks_left =
            self.tasks.listeners.running() + self.tasks.background.running() + self.tasks.http.running();
        StopReport {
            tasks_left,
            unflushed,
            has_lost,
            flushed_bytes,
            sockets,
            memory: Arc::clone(&self.memory),
        }
    }

    fn flushed_bytes(&self) -> u64 {
        self.service.flusher().map_or(0, |flusher| flusher.flushed_bytes())
    }
}

/// Treatment of the memory contents at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryTreatment {
    /// Flush them.
    Flush,
    /// Leave them to a successor.
    HandOver,
}

/// Handle for a second signal to stop, which ends the process without waiting for the graceful
/// stop. Clones share it.
///
/// Sends are refused first, so that nothing is acknowledged any more. Then the unflushed blocks are
/// logged.
#[derive(Debug, Clone, Default)]
pub struct ForcedStop(Arc<Mutex<RunningWorker>>);

/// The worker running in the process. The handle does not keep it alive.
#[derive(Debug, Default)]
struct RunningWorker {
    service: Weak<Service>,
    memory: Weak<Memory>,
}

impl ForcedStop {
    /// Attaches the handle to the worker with `service` and `memory`.
    pub(super) fn watch(&self, service: &Arc<Service>, memory: &Arc<Memory>) {
        *self.0.lock() = RunningWorker { service: Arc::downgrade(service), memory: Arc::downgrade(memory) };
    }

    /// Refuses all further sends and logs unflushed blocks. Returns whether acknowledged blocks are
    /// lost with the process.
    #[must_use]
    pub fn end(&self) -> bool {
        let (service, memory) = {
            let running = self.0.lock();
            (running.service.upgrade(), running.memory.upgrade())
        };
        if let Some(service) = service {
            service.ingest.refuse_sends();
        }
        memory.is_some_and(|memory| MemoryRetention::of(&memory).log_losses(&memory.contents_with_kept()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpStream;
    use uniffle_testkit::eventually;

    use super::*;
    use crate::config::{Config, Machine};
    use crate::runtime::Tasks;

    const CONFIG: &str = "store_type = \"MEMORY\"\nbind_address = \"127.0.0.1\"\ngrpc_port = 0\nhttp_port = 0\n\
                          [memory_store]\ncapacity = \"64M\"\n[admin]\nport = 0\n\
                          [metrics]\npush_gateway_endpoint = \"http://127.0.0.1:1\"\n";

    /// Returns the names of the running HTTP tasks.
    fn http_tasks(tasks: &Tasks) -> BTreeSet<&'static str> {
        let names = tasks.list().into_iter().map(|task| task.name);
        names
            .filter(|name| name.contains("http") || name.contains("admin") || name.contains("push"))
            .collect()
    }

    /// Regression test: every client waited a second for a partly received HTTP request.
    #[tokio::test]
    async fn http_connections_end_before_a_hand_off() {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        let environment = HashMap::from([("WORKER_IP".to_owned(), "127.0.0.1".to_owned())]);
        let worker = Worker::start(&Config::parse(CONFIG, &environment, &machine).unwrap()).await.unwrap();
        let tasks = worker.tasks.listeners.clone();
        let mut asking = TcpStream::connect(worker.addresses().http).await.unwrap();
        asking.write_all(b"GET / HTT").await.unwrap();
        let all = BTreeSet::from(["admin accept", "http accept", "http connection", "metrics push"]);
        let is_taken =
            || if http_tasks(&tasks) == all { Ok(()) } else { Err(format!("{:?}", http_tasks(&tasks))) };
        eventually("the request has begun", is_taken).await;
        let closing = async {
            tasks.closing().await;
            http_tasks(&tasks)
        };
        let (stopped, remaining) = tokio::join!(worker.hand_over(MemoryTreatment::HandOver), closing);
        assert_eq!(remaining, BTreeSet::new());
        assert_eq!(stopped.tasks_left, 0);
        assert!(stopped.sockets.gap_began_ms.is_some());
    }
}
