//! State shared by all connections of the TCP listener: settings, the service, and the limits over
//! all connections.
//!
//! A limit is a permit or a share of a budget. A permit for a local read is returned once the first
//! chunk of the reply is written. A connection has its share of the requests until it ends.

use std::sync::Arc;

use crate::listeners::connection_limiter::ConnectionState;
use crate::listeners::shares::{ShareBudget, ShareLimits};
use crate::runtime::{BlockingPool, Handover, Tasks};
use crate::service::Service;
use uniffle_base::budget::memory_plan::TCP_REQUESTS_MIN;
use uniffle_base::sched::{FairSemaphore, Reserve};

use super::config::TcpConfig;
use super::metrics::TcpMetrics;

/// Name of the listener in the log.
pub(super) const LISTENER: &str = "tcp";

/// Settings, the service, and limits over all connections.
#[derive(Debug)]
pub(super) struct TcpListenerState {
    pub(super) config: TcpConfig,
    pub(super) service: Arc<Service>,
    pub(super) metrics: TcpMetrics,
    /// Pool for memory reads that may take long.
    pub(super) pool: BlockingPool,
    /// Permits for local replies that hold their first chunk and wait for the socket. The last
    /// eighth is for applications that hold none.
    pub(super) local_reads: Arc<FairSemaphore>,
    /// Numbers of requests that connections may have in progress. Each connection takes a share
    /// when it begins.
    pub(super) requests: ShareBudget,
    /// Connections that the next process continues.
    pub(super) handover: Handover,
}

/// The parts of a connection that its reader, its parser and its writer use.
#[derive(Debug, Clone)]
pub(super) struct ConnectionContext {
    pub(super) shared: Arc<TcpListenerState>,
    pub(super) tasks: Tasks,
    pub(super) state: Arc<ConnectionState>,
}

impl TcpListenerState {
    pub(super) fn new(
        config: TcpConfig,
        service: Arc<Service>,
        metrics: TcpMetrics,
        handover: Handover,
    ) -> Arc<Self> {
        let most = u32::try_from(config.requests_in_flight_per_connection_max).unwrap_or(u32::MAX).max(1);
        let limits = ShareLimits { least: TCP_REQUESTS_MIN, most };
        Arc::new(Self {
            requests: ShareBudget::new(config.requests_total, config.connections_max, limits),
            pool: BlockingPool::sized_by_cores(),
            local_reads: FairSemaphore::new(config.local_reads_in_flight_max as u64, Reserve::Eighth),
            config,
            service,
            metrics,
            handover,
        })
    }
}
