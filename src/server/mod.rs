//! The composition root: builds every part from the [`Config`] and stops the parts in order.
//!
//! `start` opens the parts in phases and announces the worker to coordinators last. `process` runs
//! the worker, `upgrade` replaces it, and `stop` ends it. `settings` change while it runs, and
//! `status` describes it to operators and coordinators.

mod metrics;
mod process;
mod settings;
mod sockets;
mod start;
mod status;
mod stop;
mod tls;
mod upgrade;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use prometheus::Registry;

use crate::build::Build;
use crate::config::Config;
use crate::memory::Memory;
use crate::runtime::{Handover, Tasks};
use crate::service::Service;
use uniffle_coordinator::embedded::EmbeddedCoordinator;
use uniffle_coordinator::identity;

use self::settings::RuntimeSettings;
use self::settings::reload::Reloader;
use self::settings::runtime_state::StateWriter;
use self::upgrade::{RefusedBy, UpgradeMetrics};

pub use self::metrics::metric_descriptions;
pub use self::process::signals::{
    Signals, hold_signals, release_signals, release_signals_for_old_successor, send_stop_to_successor,
};
pub use self::process::{RunOutcome, run};
pub use self::settings::reload::{ConfigOrigin, ReloadOutcome};
pub use self::sockets::{Addresses, Inherited};
pub use self::start::Environment;
pub use self::start::machine::{check_files, examine_machine};
pub use self::stop::{ForcedStop, StopReport};
pub use self::upgrade::UPGRADE_FROM;
pub use self::upgrade::preparation::Command;
pub use self::upgrade::rehearsal::{REHEARSED, rehearse};
pub use self::upgrade::successor::Successor;

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    identity: WorkerIdentity,
    memory: Arc<Memory>,
    service: Arc<Service>,
    registry: Registry,
    live: Arc<RuntimeSettings>,
    /// The coordinator of this process, if it has one.
    embedded: Option<EmbeddedCoordinator>,
    state: Arc<StateWriter>,
    reloader: Arc<Reloader>,
    started_ms: i64,
    tasks: WorkerTasks,
    handover: SocketHandover,
    flush_timeout: Duration,
    upgrades: UpgradeMetrics,
}

/// The program, and the addresses by which others know the worker.
#[derive(Debug, Clone)]
struct WorkerIdentity {
    build: Build,
    /// The advertised address.
    ip: IpAddr,
    addresses: Addresses,
}

impl WorkerIdentity {
    /// Returns the id by which coordinators and clients know the worker. It prefixes the worker's
    /// remote files.
    fn server_id(&self) -> String {
        let Addresses { grpc, tcp, .. } = self.addresses;
        identity::server_id(self.ip, grpc.port(), tcp.map(|address| address.port()))
    }
}

/// The tasks of a worker, in the groups in which a stop ends them.
#[derive(Debug)]
struct WorkerTasks {
    listeners: Tasks,
    background: Tasks,
    /// HTTP tasks: the listeners and the metrics pusher. They take seconds to end, and data clients
    /// must not wait for that.
    http: Tasks,
}

/// Sockets that a stop can leave to a successor.
#[derive(Debug)]
struct SocketHandover {
    /// Duplicates of the listeners. They stay open after the listener tasks have ended.
    held: Inherited,
    grpc: Handover,
    tcp: Handover,
}

impl Worker {
    /// Reads the configuration again and applies the keys that need no restart. Applies nothing if
    /// there is a problem. The outcome is logged.
    ///
    /// # Errors
    /// Every problem of the configuration.
    pub async fn reload(&self, trigger: &'static str) -> Result<ReloadOutcome, String> {
        self.reloader.reload_on_thread(trigger).await
    }

    /// Returns the bound addresses of the listeners.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.identity.addresses
    }

    /// Returns the address advertised to clients.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.identity.ip
    }

    /// Returns the service behind the listeners.
    #[must_use]
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Returns the memory tier.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the metric registry.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    fn note_refused_upgrade(&self, by: RefusedBy) {
        self.upgrades.refused.with_label_values(&[by.as_str()]).inc();
    }
}

/// Returns the address advertised to coordinators and clients.
async fn advertised_ip(config: &Config) -> anyhow::Result<IpAddr> {
    let worker = &config.worker;
    let ip = identity::resolve(worker.advertised.as_ref(), worker.bind_address).await;
    ip.context("no address to announce to coordinators and clients")
}

/// Polls `work` until it ends or `stopped` resolves.
async fn until(stopped: impl Future<Output = ()>, work: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = stopped => {}
        () = work => {}
    }
}
