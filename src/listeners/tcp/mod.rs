//! The raw TCP listener (docs/protocol.md §7): frames in, calls of the service, frames out. It decides nothing.
//!
//! It is called *tcp* in code, logs and task names. Others have other names for it: the keys `urpc_port` and
//! `runtime_config.urpc_runtime`, the client type `GRPC_NETTY`, and the metrics of Java (`netty_…`) and riffle (`urpc_…`).
//!
//! A connection is two tasks, its own and a reader, and a queue between them. The *reader* ([`reader`]) takes what the socket has into its
//! thread's chunk and walks the frames in it ([`frames`]) without waiting: payload goes from there into the
//! partitions' segments ([`Intake`](crate::service::Intake)), so a chunk is free again when it was walked and no connection owns one. Reads of
//! memory are answered on the spot, reads of local disks in tasks of their own ([`dispatch`]). The *writer*
//! ([`writer`]), the connection's own task, puts replies on the socket in the order in which they became ready.
//!
//! Bounds: a connection may have so many requests in progress, fewer the more connections there are. Each takes a permit of
//! its connection before its first byte is walked and holds it until its reply was written. A peer that sends too much, or
//! takes too little, is not read until it has taken its replies.
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

use super::acceptor::{Acceptor, Begins, Binding, Connection, Names};
use shared::{LISTENER, Shared};

const NAMES: Names = Names {
    listener: LISTENER,
    accepting: "tcp accept",
    connection: "tcp writer",
    limit: "tcp.max_connections",
};

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
            closed: metrics.all.refused.clone(),
            open: vec![open.clone()],
            opening_deadline: config.opening_timeout,
            begins: Begins::Said,
            cores,
            tasks: tasks.clone(),
        };
        let (shared, tasks) = (Shared::new(config, service, metrics, handover), tasks.clone());
        acceptor.start_plain(move |connection| serve(Arc::clone(&shared), connection, tasks.child()));
        Ok(open)
    }
}

/// Serves a connection, whose tasks are `tasks`.
async fn serve(shared: Arc<Shared>, connection: Connection<TcpStream>, tasks: Tasks) {
    let Connection { stream, place, .. } = connection;
    let (read_half, write_half) = stream.into_split();
    // Either side ends the other when it fails, this one also when its future is dropped or panics.
    let _ends_reader = EndsWithThis(tasks.clone());
    let share = shared.requests.take();
    let requests_max = share.amount() as usize;
    let (outbox, queue) = writer::queue(requests_max);
    let kept = writer::KeptHalf::default();
    let (link, half) = ((tasks.clone(), Arc::clone(place.seat())), kept.clone());
    let reader =
        reader::Reader::new(Arc::clone(&shared), read_half, outbox, link.clone(), half, requests_max);
    tasks.spawn_linked("tcp reader", reader.run());
    // The writer ends last: it outlives the reader until every reply was written or given up.
    writer::Writer::new(shared, write_half, queue, link, kept).run().await;
    drop((place, share));
}

/// Cancels a connection's tasks when it is dropped.
struct EndsWithThis(Tasks);

impl Drop for EndsWithThis {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
