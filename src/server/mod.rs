//! The composition root: builds every part from the [`Config`], hands out handles, stops in order.
//!
//! Start: bind the listeners or take inherited ones (`sockets`), build the tiers bottom-up, take over what an earlier
//! process left, open the listeners, and only then tell a coordinator. Until the listeners open connects wait in the backlog.
//! How it ends is in `stop`, what a process does around it in `run`, and who may come next in `successor` and `upgrade`.

mod admin;
mod cluster;
mod forced_stop;
mod health;
mod hung_threads;
mod memory_backing;
mod metrics;
mod notify;
mod open;
mod reap;
mod rehearsal;
mod reload;
mod report;
mod run;
mod runtime_state;
mod settings;
mod signals;
mod snapshot;
mod sockets;
mod stop;
mod successor;
mod tickets;
mod tiers;
mod tls;
mod upgrade;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use prometheus::Registry;

use crate::app::AppRegistry;
use crate::budget::Heap;
use crate::config::Config;
use crate::coordinator::embedded::EmbeddedCoordinator;
use crate::coordinator::identity;
use crate::flush::Flusher;
use crate::memory::{Memory, Prefault};
use crate::metrics::clamped;
use crate::profile::allocator::AllocatorMetrics;
use crate::runtime::{Handover, RuntimeMetrics, Tasks};
use crate::service::Service;
use crate::telemetry::LogFilter;
use crate::tiers::Tier;

use self::memory_backing::look_at_backing;
use self::reload::Reloader;
use self::runtime_state::{RuntimeState, StateWriter};
use self::settings::RuntimeSettings;
use self::snapshot::ProcessGauges;
use self::sockets::Sockets;
use self::tiers::{Beside, Precheck};
use self::tls::Tls;
use self::upgrade::{RefusedBy, UpgradeMetrics};

pub use self::forced_stop::ForcedStop;
pub use self::metrics::metric_descriptions;
pub use self::rehearsal::{REHEARSED, rehearse};
pub use self::reload::{Origin, Reloaded};
pub use self::run::{Command, Ended, run};
pub use self::signals::{Signals, hold_upgrade_signal, take_upgrade_signal};
pub use self::sockets::{Addresses, Inherited};
pub use self::stop::Stopped;
pub use self::successor::Successor;
pub use self::upgrade::UPGRADE_FROM;

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    addresses: Addresses,
    ip: IpAddr,
    apps: Arc<AppRegistry>,
    memory: Arc<Memory>,
    service: Arc<Service>,
    registry: Registry,
    live: Arc<RuntimeSettings>,
    /// The coordinator of this process, if it has one.
    embedded: Option<EmbeddedCoordinator>,
    state: Arc<StateWriter>,
    reloader: Arc<Reloader>,
    started_ms: i64,
    listeners: Tasks,
    background: Tasks,
    /// What speaks HTTP: listeners, and what pushes metrics. It has seconds to end, for which no caller for data is to wait.
    http: Tasks,
    /// The listeners once more, so that they outlive the listeners' own for a successor.
    held: Inherited,
    grpc_handover: Handover,
    tcp_handover: Handover,
    flush_timeout: Duration,
    upgrades: UpgradeMetrics,
}

/// What a worker is given of the process that it runs in. The default is a worker among others.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// The log filter, if it is this worker's to change.
    pub log: Option<LogFilter>,
    /// What the configuration came from, if it is to be read again.
    pub origin: Option<Origin>,
    /// Handle for a stop that is not waited for.
    pub forced_stop: ForcedStop,
    /// Tiers beside those that the configuration names; they come after them.
    pub tiers: Vec<Arc<dyn Tier>>,
}

impl Worker {
    /// Starts a worker; it runs in the current runtime until [`Worker::stop`].
    ///
    /// # Errors
    /// A port in use, a data directory that is not ours or in use, memory that cannot be mapped.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_in(Environment::default(), Inherited::default(), config).await
    }

    /// As [`Worker::start`], as a part of `environment`, on the sockets of a predecessor as far as there are any.
    ///
    /// # Errors
    /// See [`Worker::start`].
    pub async fn start_in(
        environment: Environment,
        mut inherited: Inherited,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let precheck = if inherited.gap_began_ms.is_some() { Precheck::Done } else { Precheck::Asked };
        // Before anything else, so that a port in use is the first thing to be told.
        let tls = Tls::load(config)?;
        let (hand_off, left_memory) = (inherited.hand_off.take(), inherited.memory.take());
        let was_passed = left_memory.is_some();
        let promised = inherited.tickets.take();
        let sockets = Sockets::open(config, inherited)?;
        let addresses = sockets.addresses()?;
        let ip = advertised_ip(config).await?;
        let registry = crate::metrics::registry()?;
        let listeners = Tasks::new();
        let (background, http) = (listeners.sibling(), listeners.sibling());
        let gauges = ProcessGauges {
            runtime: RuntimeMetrics::new(listeners.clone(), &registry)?,
            allocator: AllocatorMetrics::new(&registry)?,
        };
        let server_id = server_id(ip, &addresses);
        let memory = memory_backing::open(config, &server_id, left_memory, &registry).await?;
        let beside = Beside { server_id, precheck, hand_off, others: environment.tiers };
        let flusher = tiers::start(config, beside, &memory, &background, &registry).await?;
        // Before the first block is acknowledged, and when the directories are this worker's.
        memory_backing::note(config).await;
        let state = RuntimeState::read(config).await;
        let apps = Arc::new(AppRegistry::new(config.app.clone(), memory.heap(), memory.answered()));
        let service = Service::new(
            config.service.clone(),
            Arc::clone(&apps),
            Arc::clone(&memory),
            flusher,
            background.clone(),
            &registry,
        )?;
        restore(&service, &memory).await;
        promised.into_iter().for_each(|promised| tickets::take_over(&memory, promised));
        service.lifecycle.set_quotas(&config.service.quota);
        let live = Arc::new(RuntimeSettings::new(config, environment.log));
        let embedded = embedded_coordinator(config, memory.heap(), &registry)?;
        let parts = (Arc::clone(&service), Arc::clone(&live), embedded.clone());
        let state = Arc::new(resume(config, state, parts));
        let (origin, tls_files) = (environment.origin, tls.clone());
        let reloader =
            Reloader::new(config, origin, Arc::clone(&service), Arc::clone(&live), tls_files, &registry)?;
        let upgrades = UpgradeMetrics::new(&registry)?;
        RefusedBy::ALL.iter().for_each(|by| drop(upgrades.refused.with_label_values(&[by.as_str()])));
        let held = for_a_successor(&sockets, &memory, was_passed)?;
        let worker = Self {
            addresses,
            ip,
            apps,
            memory,
            service,
            registry,
            live,
            embedded,
            state,
            reloader: Arc::new(reloader),
            started_ms: unix_ms(),
            listeners,
            background,
            http,
            held,
            grpc_handover: Handover::default(),
            tcp_handover: Handover::default(),
            flush_timeout: config.worker.flush_timeout,
            upgrades,
        };
        worker.spawn_upkeep(config);
        worker.open_listeners(config, sockets, tls, gauges)?;
        Ok(worker)
    }

    fn spawn_upkeep(&self, config: &Config) {
        let service = Arc::clone(&self.service);
        let (tickets_every, apps_every) = (config.service.ticket_check_interval, config.app.check_interval());
        let expiry = move || Arc::clone(&service.lifecycle).run_expiry(tickets_every, apps_every);
        self.background.spawn_again("expiry", expiry);
        if config.memory.prefault == Prefault::Idle {
            self.memory.prefault();
        }
        if self.memory.is_kept() {
            let (memory, tasks) = (Arc::clone(&self.memory), self.background.clone());
            let ahead = move || {
                let (memory, stopped) = (Arc::clone(&memory), tasks.cancelled());
                async move {
                    tokio::select! {
                        biased;
                        () = stopped => {}
                        () = memory.run_ahead() => {}
                    }
                }
            };
            self.background.spawn_again("memory pages", ahead);
        }
        if self.memory.outlives_process() {
            let (memory, interval) = (Arc::clone(&self.memory), config.local.probe_interval);
            let tasks = self.background.clone();
            let looks = move || {
                let (memory, stopped) = (Arc::clone(&memory), tasks.cancelled());
                async move {
                    tokio::select! {
                        biased;
                        () = stopped => {}
                        () = look_at_backing(memory, interval) => {}
                    }
                }
            };
            self.background.spawn_again("memory file", looks);
        }
        let (reloader, tasks) = (Arc::clone(&self.reloader), self.background.clone());
        let watch = move || Arc::clone(&reloader).watch(tasks.cancelled());
        self.background.spawn_again("configuration watch", watch);
        let service = Arc::clone(&self.service);
        self.background.spawn_again("sampling", move || Arc::clone(&service.insight).run_sampling());
        let (state, tasks) = (Arc::clone(&self.state), self.background.clone());
        let writer = move || {
            let (writing, stopped) = (Arc::clone(&state).run(), tasks.cancelled());
            async move {
                tokio::select! {
                    biased;
                    () = stopped => {}
                    () = writing => {}
                }
            }
        };
        self.background.spawn_again("state writer", writer);
    }

    /// Reads the configuration again, whole or not at all; the outcome is in the log.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub async fn reload(&self, trigger: &'static str) -> Result<Reloaded, String> {
        self.reloader.reload_aside(trigger).await
    }

    /// Where the listeners are.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// The address told to clients.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// By what name coordinators and remote stores know it.
    fn server_id(&self) -> String {
        server_id(self.ip, &self.addresses)
    }

    /// The service behind the listeners.
    #[must_use]
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// The memory tier.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The applications.
    #[must_use]
    pub fn apps(&self) -> &Arc<AppRegistry> {
        &self.apps
    }

    /// Who fills the tiers below memory, where there are any.
    #[must_use]
    pub fn flusher(&self) -> Option<&Arc<Flusher>> {
        self.service.flusher()
    }

    /// The registry of metrics.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    fn note_refused_upgrade(&self, by: RefusedBy) {
        self.upgrades.refused.with_label_values(&[by.as_str()]).inc();
    }
}

/// Returns the coordinator of this process, if it is to have one.
fn embedded_coordinator(
    config: &Config,
    heap: &Heap,
    registry: &Registry,
) -> anyhow::Result<Option<EmbeddedCoordinator>> {
    let made =
        config.is_embedded().then(|| EmbeddedCoordinator::new(config.embedded.clone(), heap, registry));
    Ok(made.transpose()?)
}

/// Applies the settings that an earlier process was given at run time. Returns the writer of later ones.
fn resume(
    config: &Config,
    state: RuntimeState,
    (service, live, embedded): (Arc<Service>, Arc<RuntimeSettings>, Option<EmbeddedCoordinator>),
) -> StateWriter {
    if state.decommission {
        tracing::info!(
            "decommissioning continues after the restart; POST /admin/cancel-decommission cancels it"
        );
        service.lifecycle.decommission();
    }
    if let Some(tags) = state.tags(&config.worker.tags) {
        tracing::info!(?tags, "tags set by a call before the restart remain in effect");
        live.set_tags(tags);
    }
    if let Some(embedded) = &embedded {
        embedded.restore_apps(&state.apps);
    }
    StateWriter::new(config, state, (service, live, embedded))
}

/// The sockets and the file that memory lies in, once more. The service manager keeps that file, too, which it may have passed on.
fn for_a_successor(sockets: &Sockets, memory: &Memory, was_passed: bool) -> anyhow::Result<Inherited> {
    let mut held = sockets.duplicate().context("cannot duplicate a listener")?;
    held.memory = memory.handed_over().context("cannot duplicate the descriptor of the memory file")?;
    notify::keep_memory(held.memory.as_ref().map(AsFd::as_fd), was_passed && held.memory.is_some());
    Ok(held)
}

/// Takes over what an earlier process left; when this returns, it is on the device.
async fn restore(service: &Service, memory: &Memory) {
    for tier in service.tiers().iter() {
        service.lifecycle.restore(tier.take_recovered()).await;
    }
    finish_restore(memory);
    for tier in service.tiers().iter() {
        tier.recovered_durable().await;
    }
    service.lifecycle.look_at_memory();
}

fn finish_restore(memory: &Memory) {
    let (found, restored) = memory.finish_restore();
    if found > 0 {
        tracing::info!(found, restored, "recovered blocks from memory");
    }
}

/// Reads the files that `config` names and checks the announced address, as a start will.
///
/// # Errors
/// A certificate, key or token that cannot be used, with its key of the configuration, or an address
/// on which nothing listens.
pub fn check_files(config: &Config) -> anyhow::Result<()> {
    identity::check(config.worker.advertised.as_ref(), config.worker.bind_address)?;
    Tls::load(config)?;
    admin::token(config)?;
    #[cfg(feature = "object")]
    if config.object.url.is_some() {
        crate::tiers::object::client::check_files(&config.object)?;
    }
    Ok(())
}

/// Returns the address that coordinators and clients are told.
async fn advertised_ip(config: &Config) -> anyhow::Result<IpAddr> {
    let worker = &config.worker;
    let ip = identity::resolve(worker.advertised.as_ref(), worker.bind_address).await;
    ip.context("no address to announce to coordinators and clients")
}

/// By this id coordinators and clients know the worker, and its remote files begin with it.
fn server_id(ip: IpAddr, addresses: &Addresses) -> String {
    identity::server_id(ip, addresses.grpc.port(), addresses.tcp.map(|address| address.port()))
}

fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| clamped(since.as_millis()))
}
