//! How a worker ends, with or without a successor.
//!
//! Tickets are refused with NO_BUFFER, for which every client waits, and memory is brought to the disks while reads and
//! the sends that hold tickets go on. Then the listeners close: gRPC connections get a GOAWAY, calls that have begun are
//! answered, and raw TCP connections end between two requests; with a successor they are kept for it. What came in
//! meanwhile is flushed: the last flush tries every disk, whatever its watermark or an earlier refusal says. What could not
//! be flushed is told in one line and by the exit code, and found lost by the next start. Last, without a successor,
//! the disks are synced.
//!
//! A worker lets go for a successor only when its memory is empty and no send can be acknowledged any more, which can
//! still be taken back; from there on nothing can be lost by it. Where the successor takes over what is in memory, no call
//! is refused: what is being written is waited for while everything goes on, then the listeners close, sends that had begun are
//! acknowledged, and all others wait in their sockets for the successor. What speaks HTTP ends before the listeners close for a
//! successor: it has seconds for that, in which data is served. Removals from disks cease then.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use crate::clock::{Instant, sleep, timeout, timeout_at};
use crate::memory::{InMemory, Memory};
use crate::service::Stopping;
use crate::tiers::LocalStore;

use super::memory_backing::Outlives;
use super::sockets::{Inherited, now_ms};
use super::{Worker, tickets};

/// How long what has begun on connections may take to end after the listeners were told to close.
const DRAIN_DEADLINE: Duration = Duration::from_secs(15);
/// What a task may take to see that it was cancelled.
const CANCEL_DEADLINE: Duration = Duration::from_secs(15);
/// How long a part of a removal may take, which takes milliseconds where the disk does not hang.
const PART_DEADLINE: Duration = Duration::from_secs(2);
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

/// How an ordered stop ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ending {
    /// Tasks that had to be left behind.
    pub(super) tasks_left: usize,
    /// Whether acknowledged blocks are lost with the process.
    pub(super) has_lost: bool,
}

/// What a worker leaves behind.
#[derive(Debug)]
pub struct Stopped {
    /// Tasks that had to be left behind (a disk call that hangs); 0 is the rule.
    pub tasks_left: usize,
    /// What could not be flushed: empty is the rule.
    pub unflushed: Vec<InMemory>,
    /// Whether that is lost with the process.
    pub has_lost: bool,
    /// Bytes that were flushed after it let go; 0 is the rule with a successor, for which clients wait meanwhile.
    pub flushed_bytes: u64,
    /// Listeners that still listen, and connections: for a successor.
    pub sockets: Inherited,
    /// What is let go of: to drop it takes milliseconds, which a process that becomes another one saves.
    pub(super) memory: Arc<Memory>,
}

impl Worker {
    /// Stops in order and waits until no task is left. Returns how many tasks had to be left behind.
    pub async fn stop(self) -> usize {
        self.stop_in_order().await.tasks_left
    }

    /// The same. Returns what is left behind and what is lost.
    pub(super) async fn stop_in_order(mut self) -> Ending {
        self.service.status().stop(Stopping::ForGood);
        self.state.save_for_stop().await;
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
        let stopped = self.end(deadline, LeftMemory::Empty).await;
        join_all(service.tiers().iter().map(|tier| tier.sync(SYNC_DEADLINE))).await;
        Ending { tasks_left: stopped.tasks_left, has_lost: stopped.has_lost }
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
            self.unlink_pages().await;
        }
        rests
    }

    /// Without it the end takes longer.
    async fn unlink_pages(&self) {
        let memory = Arc::clone(&self.memory);
        let _unlinked = tokio::task::spawn_blocking(move || memory.unlink_pages()).await;
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
        tokio::join!(self.end_http(), self.cease_removals(), self.state.save());
        if memory == LeftMemory::PassedOn {
            // Meanwhile data was served, out of pages and into them.
            self.unlink_pages().await;
        }
        let gap_began_ms = Some(now_ms());
        self.grpc_handover.begin();
        self.tcp_handover.begin();
        let deadline = Instant::now() + self.flush_timeout;
        let promised = Arc::clone(&self.memory);
        let mut stopped = self.end(deadline, memory).await;
        stopped.sockets =
            Inherited { gap_began_ms, tickets: tickets::passed_on(&promised), ..stopped.sockets };
        stopped
    }

    /// What is left in the trash of local disks is the successor's to remove.
    async fn cease_removals(&self) {
        let Some(local) = self.service.tiers().find::<LocalStore>() else { return };
        if timeout(PART_DEADLINE, local.cease_removals()).await.is_err() {
            tracing::warn!("deletion of shuffle files did not finish; the successor continues it");
        }
    }

    /// Ends what speaks HTTP. What has begun there, be it half a request, has its time; what comes waits for the successor.
    async fn end_http(&self) {
        self.http.cancel();
        if timeout(CANCEL_DEADLINE, self.http.drained()).await.is_err() {
            tracing::warn!(tasks = self.http.running(), "http requests did not end in time");
        }
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
            tracing::warn!(tasks = self.listeners.running(), "connections did not end in time; closing them");
        }
        self.listeners.cancel();
        if timeout(CANCEL_DEADLINE, self.listeners.drained()).await.is_err() {
            tracing::warn!(tasks = self.listeners.running(), "closed connections did not end in time");
        }
        match memory {
            LeftMemory::Empty => self.empty(deadline.max(Instant::now() + LAST_FLUSH)).await,
            // Sends that had begun are answered. One that was not in time is never acknowledged.
            LeftMemory::PassedOn => self.service.ingest.refuse_sends(),
        }
        self.background.cancel();
        self.http.cancel();
        let ended = async { tokio::join!(self.background.drained(), self.http.drained()) };
        if timeout(CANCEL_DEADLINE, ended).await.is_err() {
            let tasks = self.background.running() + self.http.running();
            tracing::warn!(tasks, "background tasks did not end in time");
        }
        let unflushed = match memory {
            LeftMemory::Empty => self.memory.contents(),
            LeftMemory::PassedOn => Vec::new(),
        };
        let has_lost = Outlives::of(&self.memory).name_losses(&unflushed);
        self.memory.let_go();
        let flushed_bytes = self.flushed_bytes() - flushed_before;
        let mut sockets = std::mem::take(&mut self.held);
        sockets.grpc_connections.extend(self.grpc_handover.take());
        sockets.tcp_connections.extend(self.tcp_handover.take());
        let tasks_left = self.listeners.running() + self.background.running() + self.http.running();
        Stopped { tasks_left, unflushed, has_lost, flushed_bytes, sockets, memory: Arc::clone(&self.memory) }
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

    /// Tasks that speak HTTP.
    fn speaking(tasks: &Tasks) -> BTreeSet<&'static str> {
        let names = tasks.list().into_iter().map(|task| task.name);
        names
            .filter(|name| name.contains("http") || name.contains("admin") || name.contains("push"))
            .collect()
    }

    /// Every caller waited a second for half a request over HTTP.
    #[tokio::test]
    async fn http_connections_end_before_a_hand_off() {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        let environment = HashMap::from([("WORKER_IP".to_owned(), "127.0.0.1".to_owned())]);
        let worker = Worker::start(&Config::parse(CONFIG, &environment, &machine).unwrap()).await.unwrap();
        let tasks = worker.listeners.clone();
        let mut asking = TcpStream::connect(worker.addresses().http).await.unwrap();
        asking.write_all(b"GET / HTT").await.unwrap();
        let all = BTreeSet::from(["admin accept", "http accept", "http connection", "metrics push"]);
        let is_taken =
            || if speaking(&tasks) == all { Ok(()) } else { Err(format!("{:?}", speaking(&tasks))) };
        eventually("the request has begun", is_taken).await;
        let closing = async {
            tasks.closing().await;
            speaking(&tasks)
        };
        let (stopped, left) = tokio::join!(worker.hand_over(LeftMemory::PassedOn), closing);
        assert_eq!(left, BTreeSet::new());
        assert_eq!(stopped.tasks_left, 0);
        assert!(stopped.sockets.gap_began_ms.is_some());
    }
}
