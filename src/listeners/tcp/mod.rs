//! The raw TCP listener (docs/protocol.md §7): translates frames into calls of the service, and
//! decides only which connections it serves. Code, logs and task names say *tcp*.
//!
//! The [`reader`] walks frames ([`frames`]), answers quick memory reads at once and spawns tasks
//! for other reads ([`dispatch`]). The [`writer`] sends replies in the order in which they become
//! ready.
//!
//! Invariant: each request takes a permit of its connection until its reply is written. So a peer
//! that does not read its replies is not read either (backpressure). A closing listener ends a
//! connection between two requests, or keeps its socket for a successor. It cuts off a peer that is
//! too slow.

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

pub use config::TcpConfig;
use metrics::TcpMetrics;

use crate::runtime::{Cores, Tasks};
use crate::service::Service;

use super::acceptor::{Acceptor, Binding, Connection, ListenerNames, ProtocolStart};
use shared::{ConnectionContext, LISTENER, TcpListenerState};

const NAMES: ListenerNames = ListenerNames {
    listener: LISTENER,
    accepting: "tcp accept",
    connection: "tcp writer",
    limit: "tcp.max_connections",
};

/// The TCP listener.
#[derive(Debug)]
pub struct TcpServer;

impl TcpServer {
    /// Serves on `binding`, without TLS, until `tasks` are closed. Returns the gauge of open
    /// connections at once.
    ///
    /// # Errors
    /// If a metric name is already registered in `registry`, or threads cannot be started.
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
            begins: ProtocolStart::ByListener,
            cores,
            tasks: tasks.clone(),
        };
        let (shared, tasks) = (TcpListenerState::new(config, service, metrics, handover), tasks.clone());
        acceptor.start_plain(move |connection| serve(Arc::clone(&shared), connection, tasks.child()));
        Ok(open)
    }
}

/// Serves a connection in the group `tasks`.
async fn serve(shared: Arc<TcpListenerState>, connection: Connection<TcpStream>, tasks: Tasks) {
    let Connection { stream, place, .. } = connection;
    let (read_half, write_half) = stream.into_split();
    // Cancels the reader when the writer ends, also if this future is dropped or panics. A reader
    // that ends leaves its pending replies to the writer, unless it panics or the peer stalls.
    let _ends_reader = EndsWithThis(tasks.clone());
    let share = shared.requests.take();
    let requests_max = share.amount() as usize;
    let (outbox, queue) = writer::queue(requests_max);
    let handover_half = writer::HandoverHalf::default();
    let context = ConnectionContext { shared, tasks: tasks.clone(), state: Arc::clone(place.state()) };
    let reader = reader::ConnectionReader::new(
        context.clone(),
        read_half,
        outbox,
        handover_half.clone(),
        requests_max,
    );
    tasks.spawn_linked("tcp reader", reader.run());
    // The writer outlives a reader that ends by itself, until every reply is written or abandoned.
    writer::ConnectionWriter::new(context, write_half, queue, handover_half).run().await;
    drop((place, share));
}

/// Cancels a connection's tasks on drop.
struct EndsWithThis(Tasks);

impl Drop for EndsWithThis {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
