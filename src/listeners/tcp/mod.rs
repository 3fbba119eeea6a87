//! The raw TCP listener (docs/protocol.md §7): frames in, calls of the service, frames out. It decides nothing.
//!
//! It is called *tcp* in code, logs and task names. Others have other names for it: the keys `urpc_port` and
//! `runtime_config.urpc_runtime`, the client type `GRPC_NETTY`, and the metrics of Java (`netty_…`) and riffle (`urpc_…`).
//!
//! A connection is two tasks and a queue between them. The *reader* ([`reader`]) takes what the socket has into its
//! thread's chunk and walks the frames in it ([`frames`]) without waiting: payload goes from there into the
//! partitions' segments ([`Intake`](crate::service::Intake)), so a chunk is free again when it was walked and no connection owns one. Reads of
//! memory are answered on the spot, reads of local disks in tasks of their own ([`dispatch`]). The *writer*
//! ([`writer`]) puts replies on the socket in the order in which they became ready.
//!
//! Bounds: each request takes a permit of its connection before its first byte is walked and holds it until its reply
//! was written. A peer that sends too much, or takes too little, is not read until it has taken its replies.
//!
//! The end: the listener closes a connection between two requests, when what came is answered. A peer that has just
//! sent a request would see it fail; so with a successor the socket is not closed but kept, and the request waits in
//! it.

mod config;
mod dispatch;
mod frames;
pub(crate) mod metrics;
mod reader;
mod shared;
mod writer;

use std::sync::Arc;

use prometheus::{IntGauge, Registry};
use tokio::net::TcpStream;

pub use config::{TcpConfig, TcpThreads};
use metrics::TcpMetrics;

use crate::runtime::{Cores, Tasks};
use crate::service::Service;

use super::acceptor::{Acceptor, Binding, Connection, Names, WhenFull};
use shared::{LISTENER, Shared};

const NAMES: Names = Names { listener: LISTENER, accepting: "tcp accept", connection: "tcp connection" };

/// The TCP listener.
#[derive(Debug)]
pub struct TcpServer;

impl TcpServer {
    /// Serves on `binding`, in the clear, until `tasks` are told to close; returns the gauge of open connections at once.
    ///
    /// # Errors
    /// A metric name that is taken in `registry`, or threads that cannot be started.
    pub fn start(
        config: TcpConfig,
        binding: impl Into<Binding>,
        service: Arc<Service>,
        tasks: &Tasks,
        registry: &Registry,
    ) -> anyhow::Result<IntGauge> {
        let metrics = TcpMetrics::new(registry)?;
        let cores = match config.own_threads {
            0 => None,
            count => Some(Cores::start(count, config.blocking_threads, "uniffle-tcp", tasks)?),
        };
        let binding = binding.into();
        let handover = binding.handover.clone();
        let open = metrics.all.active.clone();
        let acceptor = Acceptor {
            names: NAMES,
            binding,
            connections_max: config.connections_max,
            when_full: WhenFull::Close(metrics.all.refused.clone()),
            open: vec![open.clone()],
            first_byte_deadline: None,
            cores,
            tasks: tasks.clone(),
        };
        let (shared, tasks) = (Shared::new(config, service, metrics, handover), tasks.clone());
        acceptor.start_plain(move |connection| {
            begin(&shared, connection, &tasks);
            std::future::ready(())
        });
        Ok(open)
    }
}

/// Starts the two tasks of a connection.
fn begin(shared: &Arc<Shared>, connection: Connection<TcpStream>, tasks: &Tasks) {
    let Connection { stream, place, .. } = connection;
    let (read_half, write_half) = stream.into_split();
    // Cancelled when either side of the connection fails, so that the other does not wait for it.
    let connection = tasks.child();
    let (outbox, queue) = writer::queue(shared.config.requests_in_flight_per_connection_max);
    let kept = writer::KeptHalf::default();
    let reader = reader::Reader::new(Arc::clone(shared), read_half, outbox, connection.clone(), kept.clone());
    connection.spawn_linked("tcp reader", reader.run());
    let writer = writer::Writer::new(Arc::clone(shared), write_half, queue, connection.clone(), kept);
    connection.spawn_linked("tcp writer", async move {
        writer.run().await;
        // The writer ends last: it outlives the reader until every reply was written or given up.
        drop(place);
    });
}
