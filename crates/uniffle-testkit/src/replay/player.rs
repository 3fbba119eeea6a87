//! Replays a recorded session against a new worker in this process.
//!
//! Requests are sent one after another in recorded order with the recorded bytes. Only tickets,
//! read cursors and ranges of local data are replaced with the new worker's. Requests whose
//! recorded response is NO_BUFFER are skipped. Statuses, assignments, sets of block ids and blocks
//! must equal the recording. Times, texts and the split between memory and disk may differ.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};

use uniffle_client::block::Block;
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::tcp::TcpClient;
use uniffle_wire::types::{BlockId, BlockMeta};
use uniffle_worker::proto::StatusCode;
use uniffle_worker::runtime::Tasks;

use super::call::call;
use super::meaning::{Meaning as _, MeantRequest, MeantResponse, PartitionKey};
use super::reads::PartitionReads;
use crate::recording::{Plane, RecordedExchange, RecordedSession};

/// Pause after NO_BUFFER, which depends on timing. Clients retry it.
const NO_BUFFER_PAUSE: Duration = Duration::from_millis(10);
const NO_BUFFER_TRIES: u32 = 1_000;

/// Totals of a replay, to detect a replay that compares nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct ReplaySummary {
    pub exchanges: usize,
    pub blocks_sent: usize,
    pub from_memory: usize,
    /// Number of memory reads with a task filter.
    pub filtered_reads: usize,
    pub from_disk: usize,
    /// Number of blocks that are on another tier than recorded, and were read as a client would
    /// have continued.
    pub caught_up: usize,
}

/// A recorded session during its replay.
#[derive(Debug)]
pub struct Player {
    channel: Channel,
    tcp: TcpClient,
    tcp_tasks: Tasks,
    client: ShuffleClient,
    tickets: HashMap<u64, u64>,
    sent: HashMap<PartitionKey, HashMap<BlockId, BlockMeta>>,
    reads: HashMap<PartitionKey, PartitionReads>,
    summary: ReplaySummary,
}

impl Player {
    /// Connects to a worker.
    pub async fn connect(grpc: SocketAddr, tcp: SocketAddr) -> io::Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{grpc}")).map_err(io::Error::other)?;
        let channel = endpoint.connect().await.map_err(io::Error::other)?;
        let (tcp, driver) = TcpClient::connect(tcp).await?;
        let tcp_tasks = Tasks::new();
        tcp_tasks.spawn("tcp client", driver);
        Ok(Self {
            client: ShuffleClient::on(channel.clone()),
            channel,
            tcp,
            tcp_tasks,
            tickets: HashMap::new(),
            sent: HashMap::new(),
            reads: HashMap::new(),
            summary: ReplaySummary::default(),
        })
    }

    /// Replays the whole `session`.
    pub async fn play(mut self, session: &RecordedSession) -> Result<ReplaySummary, String> {
        for (number, exchange) in session.exchanges.iter().enumerate() {
            let asks = exchange.parsed_request();
            let answer = self.exchange(exchange, &asks).await;
            answer.map_err(|error| format!("exchange {number}, {:?}: {error}\n{asks:?}", exchange.plane))?;
            self.summary.exchanges += 1;
        }
        self.close(|_| true).await?;
        drop(self.tcp);
        self.tcp_tasks.drained().await;
        Ok(self.summary)
    }

    async fn exchange(&mut self, exchange: &RecordedExchange, asks: &MeantRequest) -> Result<(), String> {
        let recorded = exchange.parsed_answer();
        if recorded.is(StatusCode::NoBuffer) {
            return Ok(()); // The client sent the request again.
        }
        match asks {
            MeantRequest::Ticket => {
                let answer = self.ask(exchange, &exchange.request, &recorded).await?;
                self.tickets.insert(recorded.ticket(), answer.ticket());
            }
            MeantRequest::Send { ticket, blocks } => {
                let ticket = self.tickets.get(ticket).copied().ok_or("no such ticket was granted")?;
                self.ask(exchange, &exchange.with_ticket(ticket), &recorded).await?;
                for (place, Block { meta, .. }) in blocks {
                    self.sent.entry(place.clone()).or_default().insert(meta.block_id, *meta);
                }
                self.summary.blocks_sent += blocks.len();
            }
            MeantRequest::Memory { place, cursor, filter } => {
                let cursor = self.reads.entry(place.clone()).or_default().cursor(filter.as_ref(), *cursor);
                let answer = self.ask(exchange, &exchange.with_cursor(cursor), &recorded).await?;
                let (before, now) = (recorded.memory_blocks()?, answer.memory_blocks()?);
                self.summary.from_memory += now.len();
                self.summary.filtered_reads += usize::from(filter.is_some());
                let reads = self.reads.entry(place.clone()).or_default();
                reads.memory(filter.as_ref(), &before, &now)?;
            }
            MeantRequest::Index { place } => {
                let answer = self.ask(exchange, &exchange.request, &recorded).await?;
                self.reads.entry(place.clone()).or_default().index(recorded.index()?, answer.index()?);
            }
            MeantRequest::Data { place, offset, length } => {
                let pieces = self.reads.entry(place.clone()).or_default().data(*offset, *length);
                for piece in pieces {
                    let request = exchange.with_range(piece.offset, piece.length);
                    let answer = self.ask(exchange, &request, &recorded).await?;
                    let reads = self.reads.entry(place.clone()).or_default();
                    self.summary.from_disk += reads.piece(piece, &answer.data())?;
                }
            }
            MeantRequest::Result => {
                let answer = self.ask(exchange, &exchange.request, &recorded).await?;
                let (before, now) = (recorded.block_ids()?, answer.block_ids()?);
                same("block ids", before.iter().collect::<Vec<_>>(), now.iter().collect())?;
            }
            MeantRequest::Assignments => {
                let answer = self.ask(exchange, &exchange.request, &recorded).await?;
                same("ranges", recorded.assigned(), answer.assigned())?;
            }
            MeantRequest::Unregister { app, shuffle } => {
                self.close(|place| {
                    place.key.app == *app && shuffle.is_none_or(|shuffle| place.key.shuffle == shuffle)
                })
                .await?;
                self.ask(exchange, &exchange.request, &recorded).await?;
            }
            MeantRequest::Other => drop(self.ask(exchange, &exchange.request, &recorded).await?),
        }
        Ok(())
    }

    /// Sends `request` like `exchange`. The response must have the recorded status.
    async fn ask(
        &self,
        exchange: &RecordedExchange,
        request: &Bytes,
        recorded: &MeantResponse,
    ) -> Result<MeantResponse, String> {
        let mut tries = 0;
        loop {
            let answer = self.send(exchange, request).await?;
            tries += 1;
            if answer.is(StatusCode::NoBuffer) && tries < NO_BUFFER_TRIES {
                sleep(NO_BUFFER_PAUSE).await;
                continue;
            }
            if answer.status() == recorded.status() {
                return Ok(answer);
            }
            return Err(format!(
                "status {:?} instead of {:?}: {answer:?}",
                answer.status(),
                recorded.status()
            ));
        }
    }

    async fn send(&self, exchange: &RecordedExchange, request: &Bytes) -> Result<MeantResponse, String> {
        match &exchange.plane {
            Plane::Grpc { path, .. } => {
                let answer = call(&self.channel, path, request).await;
                let (status, message) = answer.map_err(|error| error.to_string())?;
                Ok(MeantResponse::Grpc { path: path.clone(), status, message })
            }
            Plane::Tcp => {
                let id = super::recorder::request_id(request);
                let answer = self.tcp.exchange(id, request.clone()).await;
                Ok(MeantResponse::Tcp(answer.map_err(|error| error.to_string())?))
            }
        }
    }

    /// Completes the reads of these partitions: fetches blocks that are on another tier than
    /// recorded, and compares all.
    async fn close(&mut self, done: impl Fn(&PartitionKey) -> bool) -> Result<(), String> {
        let places: Vec<_> = self.reads.keys().filter(|place| done(place)).cloned().collect();
        for place in places {
            let mut reads = self.reads.remove(&place).unwrap();
            let missing = reads.missing();
            if !missing.is_empty() {
                self.catch_up(&place, &mut reads).await?;
                self.summary.caught_up += missing.len();
            }
            let missing = reads.missing();
            if !missing.is_empty() {
                return Err(format!("{place:?}: not read: {missing:?}"));
            }
            let sent = self.sent.entry(place.clone()).or_default();
            reads.compare(sent).map_err(|error| format!("{place:?}: {error}"))?;
        }
        Ok(())
    }

    async fn catch_up(&self, place: &PartitionKey, reads: &mut PartitionReads) -> Result<(), String> {
        let all = self.client.read_partition(&place.key, place.partition, &ReadOptions::default()).await;
        let all = all.map_err(|error| format!("{place:?}: {error}"))?;
        let sent = self.sent.get(place);
        for (id, data) in all.blocks {
            let meta = sent.and_then(|sent| sent.get(&id)).copied();
            let meta = meta.ok_or_else(|| format!("{place:?}: {id} was never sent"))?;
            reads.take(&Block { meta, data }, None)?;
        }
        Ok(())
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, before: T, now: T) -> Result<(), String> {
    if before == now { Ok(()) } else { Err(format!("{what}: recorded {before:?}, replayed {now:?}")) }
}
