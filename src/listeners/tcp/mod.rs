//! The raw TCP listener (client type `GRPC_NETTY`, docs/protocol.md §7): frames in, calls of the service, frames out.
//! It decides nothing.
//!
//! A connection is two tasks and a queue between them. The *reader* ([`reader`]) takes what the socket has into its
//! thread's chunk and walks the frames in it ([`frames`]) without waiting: payload goes from there into the
//! partitions' segments ([`ingest`]), so a chunk is free again when it was walked and no connection owns one. Reads of
//! memory are answered on the spot, reads of local disks in tasks of their own ([`dispatch`]). The *writer*
//! ([`writer`]) puts replies on the socket in the order in which they became ready.
//!
//! Bounds: each request takes a permit of its connection before its first byte is walked and holds it until its reply
//! was written. A peer that sends too much, or takes too little, is not read until it has taken its replies.
//!
//! The end: the listener closes a connection between two requests, when what came is answered. A peer that has just
//! sent a request would see it fail; so with a successor the socket is not closed but kept, and the request waits in
//! it.

mod accept;
mod config;
mod dispatch;
mod frames;
mod ingest;
mod metrics;
mod reader;
mod writer;

use std::sync::Arc;

use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

pub use config::TcpConfig;
pub use metrics::TcpMetrics;

use crate::runtime::{Cores, Handover, Tasks};
use crate::service::Service;

/// The listener; its connections live as long as the tasks it was started with.
#[derive(Debug)]
pub struct TcpServer {
    shared: Arc<Shared>,
    listener: TcpListener,
    cores: Option<Cores>,
    tasks: Tasks,
    kept: Vec<std::net::TcpStream>,
}

impl TcpServer {
    /// A listener that will accept connections on `listener`, until `tasks` is told to close.
    ///
    /// # Errors
    /// A metric name that is taken in `registry`, or threads that cannot be started.
    pub fn new(
        config: TcpConfig,
        listener: TcpListener,
        service: Arc<Service>,
        tasks: &Tasks,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        let metrics = TcpMetrics::new(registry)?;
        let cores = match config.own_threads {
            0 => None,
            count => Some(Cores::start(count, config.blocking_threads, "uniffle-tcp", tasks)?),
        };
        let shared = Arc::new(Shared {
            memory_reads: Arc::new(Semaphore::new(config.memory_reads_in_flight_max)),
            local_reads: Arc::new(Semaphore::new(config.local_reads_in_flight_max)),
            large_requests: Arc::new(Semaphore::new(config.large_requests_bytes_max as usize)),
            connections: Arc::new(Semaphore::new(config.connections_max)),
            config,
            service,
            metrics,
            handover: Handover::default(),
        });
        Ok(Self { shared, listener, cores, tasks: tasks.clone(), kept: Vec::new() })
    }

    /// Serves the connections `kept` by a predecessor, and leaves its own to `handover` when it closes.
    #[must_use]
    pub fn with_handover(mut self, handover: Handover, kept: Vec<std::net::TcpStream>) -> Self {
        let shared = Arc::get_mut(&mut self.shared).expect("nothing has started that could share it");
        shared.handover = handover;
        Self { kept, ..self }
    }

    /// Begins to accept; returns at once.
    pub fn start(self) {
        let Self { shared, listener, cores, tasks, kept } = self;
        let accepting = accept::run(shared, listener, cores, tasks.clone(), kept);
        tasks.spawn("tcp accept", accepting);
    }
}

/// What all connections of a listener share.
#[derive(Debug)]
struct Shared {
    config: TcpConfig,
    service: Arc<Service>,
    metrics: TcpMetrics,
    connections: Arc<Semaphore>,
    memory_reads: Arc<Semaphore>,
    local_reads: Arc<Semaphore>,
    large_requests: Arc<Semaphore>,
    handover: Handover,
}
