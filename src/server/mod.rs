//! The composition root: builds every part from the [`Config`] and stops the parts in order.
//!
//! A start binds the listeners or takes inherited ones (`sockets`), then builds the tiers
//! bottom-up. It recovers the state of an earlier process and opens the listeners. Only then does
//! it announce the worker to coordinators. Connects wait in the backlog until the listeners open.
//!
//! `stop` ends a worker, `run` wraps one in a process, and `successor` and `upgrade` replace it.

mod admin;
mod cluster;
mod forced_stop;
mod health;
mod hung_threads;
mod machine;
mod memory_backing;
mod metrics;
mod notify;
mod open;
mod passed;
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
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use bytesize::ByteSize;
use prometheus::Registry;

use crate::app::AppRegistry;
use crate::budget::Heap;
use crate::build::Build;
use crate::config::Config;
use crate::coordinator::embedded::EmbeddedCoordinator;
use crate::coordinator::identity;
use crate::flush::Flusher;
use crate::memory::{Memory, Prefault};
use crate::metrics::clamped;
use crate::runtime::{Handover, RuntimeMetrics, Tasks};
use crate::service::{Service, SettingsStore};
use crate::store::Tier;
use crate::telemetry::LogFilter;
use uniffle_profile::allocator::AllocatorMetrics;

use self::memory_backing::look_at_backing;
use self::reload::Reloader;
use self::runtime_state::{RuntimeState, StateWriter};
use self::settings::RuntimeSettings;
use self::snapshot::ProcessGauges;
use self::sockets::Sockets;
use self::tiers::{Precheck, TierInputs};
use self::tls::Tls;
use self::upgrade::{RefusedBy, UpgradeMetrics};

pub use self::forced_stop::ForcedStop;
pub use self::machine::examine_machine;
pub use self::metrics::metric_descriptions;
pub use self::rehearsal::{REHEARSED, rehearse};
pub use self::reload::{Origin, Reloaded};
pub use self::run::{Command, Ended, run};
pub use self::signals::{Signals, hold_upgrade_signal, take_upgrade_signal};
pub use self::sockets::{Addresses, Inherited};
pub use self::stop::StopReport;
pub use self::successor::Successor;
pub use self::upgrade::UPGRADE_FROM;

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    build: Build,
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
    /// HTTP tasks: the listeners and the metrics pusher. They take seconds to end, and data clients
    /// must not wait for that.
    http: Tasks,
    /// Duplicates of the listeners for a successor. They stay open after the listener tasks have
    /// ended.
    held: Inherited,
    grpc_handover: Handover,
    tcp_handover: Handover,
    flush_timeout: Duration,
    upgrades: UpgradeMetrics,
}

/// The parts of the surrounding process that a worker uses. The default suits one worker among
/// several in a process.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// The program.
    pub build: Build,
    /// The log filter, if this worker may change it.
    pub log: Option<LogFilter>,
    /// The origin of the configuration, if it can be reloaded.
    pub origin: Option<Origin>,
    /// Handle for a stop that does not wait.
    pub forced_stop: ForcedStop,
    /// Further tiers, placed after the configured ones.
    pub tiers: Vec<Arc<dyn Tier>>,
}

impl Worker {
    /// Starts a worker, which runs in the current runtime until [`Worker::stop`].
    ///
    /// # Errors
    /// A port in use, a data directory that is foreign or in use, or memory that cannot be mapped.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_in(Environment::default(), Inherited::default(), config).await
    }

    /// Starts a worker as a part of `environment`. It uses the sockets of its predecessor where
    /// `inherited` has any.
    ///
    /// # Errors
    /// See [`Worker::start`].
    pub async fn start_in(
        environment: Environment,
        mut inherited: Inherited,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let precheck = if inherited.gap_began_ms.is_some() { Precheck::Done } else { Precheck::Asked };
        // Before any slow step, so that a port in use is the first error reported.
        let tls = Tls::load(config)?;
        let (hand_off, left_memory) = (inherited.hand_off.take(), inherited.memory.take());
        let was_passed = left_memory.is_some();
        let (promised, passed_state) = (inherited.tickets.take(), inherited.state.take());
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
        log_start(environment.build, config, &server_id);
        metrics::register_build(environment.build, &registry)?;
        let memory = memory_backing::open(config, &server_id, left_memory, &registry).await?;
        let beside = TierInputs { server_id, precheck, hand_off, others: environment.tiers };
        let flusher = tiers::start(config, beside, &memory, &background, &registry).await?;
        // Before the first block is acknowledged, and after this worker has claimed the
        // directories.
        memory_backing::note(config).await;
        let apps = Arc::new(AppRegistry::new(config.app.clone(), memory.heap(), memory.answered()));
        let service = Service::new(
            config.service.clone(),
            Arc::clone(&apps),
            Arc::clone(&memory),
            flusher,
            background.clone(),
            &registry,
        )?;
        let state = RuntimeState::recover(config, &service, passed_state).await;
        restore(&service, &memory).await;
        promised.into_iter().for_each(|promised| tickets::take_over(&memory, promised));
        service.lifecycle.set_quotas(&config.service.quota);
        let live = Arc::new(RuntimeSettings::new(config, environment.log));
        let embedded = embedded_coordinator(config, memory.heap(), &registry)?;
        let state = resume(config, state, Arc::clone(&service), Arc::clone(&live), embedded.clone());
        let (origin, tls_files) = (environment.origin, tls.clone());
        let reloader =
            Reloader::new(config, origin, Arc::clone(&service), Arc::clone(&live), tls_files, &registry)?;
        let held = for_a_successor(&sockets, &memory, was_passed)?;
        let worker = Self {
            build: environment.build,
            addresses,
            ip,
            apps,
            memory,
            service,
            upgrades: UpgradeMetrics::with_labels(&registry)?,
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
        self.background.spawn_again("sampling", move || Arc::clone(&service.diagnostics).run_sampling());
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

    /// Reads the configuration again and applies all of it or nothing. The outcome is logged.
    ///
    /// # Errors
    /// Every problem of the configuration.
    pub async fn reload(&self, trigger: &'static str) -> Result<Reloaded, String> {
        self.reloader.reload_on_thread(trigger).await
    }

    /// Returns the bound addresses of the listeners.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the address advertised to clients.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// Returns the id by which coordinators and remote stores know this worker.
    fn server_id(&self) -> String {
        server_id(self.ip, &self.addresses)
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

    /// Returns the registry of applications.
    #[must_use]
    pub fn apps(&self) -> &Arc<AppRegistry> {
        &self.apps
    }

    /// Returns the flusher, if there are tiers below memory.
    #[must_use]
    pub fn flusher(&self) -> Option<&Arc<Flusher>> {
        self.service.flusher()
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

/// Logs which program starts with which configuration, as one line.
fn log_start(build: Build, config: &Config, server_id: &str) {
    let file = config.source.as_deref().unwrap_or(Path::new("none"));
    let paths = config.local.paths.iter().filter(|_| config.worker.store_type.has_local());
    let objects = config.object.url.iter().filter(|_| config.worker.store_type.has_object());
    let data = paths.map(|path| path.display().to_string()).chain(objects.map(ToString::to_string));
    tracing::info!(
        version = build.version,
        commit = build.commit,
        config = %file.display(),
        id = server_id,
        store_type = config.worker.store_type.as_str(),
        capacity = %ByteSize(config.memory.capacity_bytes),
        data = data.collect::<Vec<_>>().join(", "),
        "starting"
    );
}

/// Creates the embedded coordinator if the configuration enables it.
fn embedded_coordinator(
    config: &Config,
    heap: &Heap,
    registry: &Registry,
) -> anyhow::Result<Option<EmbeddedCoordinator>> {
    let made =
        config.is_embedded().then(|| EmbeddedCoordinator::new(config.embedded.clone(), heap, registry));
    Ok(made.transpose()?)
}

/// Applies the settings made at run time in an earlier process. Returns the writer that saves later
/// changes.
fn resume(
    config: &Config,
    state: RuntimeState,
    service: Arc<Service>,
    live: Arc<RuntimeSettings>,
    embedded: Option<EmbeddedCoordinator>,
) -> Arc<StateWriter> {
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
        embedded.restore_nodes(&state.nodes);
    }
    let lifecycle = Arc::clone(&service.lifecycle);
    let writer = Arc::new(StateWriter::new(config, state, service, live, embedded));
    let store: Weak<dyn SettingsStore> = Arc::<StateWriter>::downgrade(&writer);
    lifecycle.set_settings_store(store);
    writer
}

/// Duplicates the listeners and the memory file for a successor. Also hands the memory file to the
/// service manager, which may have passed it in.
fn for_a_successor(sockets: &Sockets, memory: &Memory, was_passed: bool) -> anyhow::Result<Inherited> {
    let mut held = sockets.duplicate().context("cannot duplicate a listener")?;
    held.memory =
        memory.duplicate_for_successor().context("cannot duplicate the descriptor of the memory file")?;
    notify::keep_memory(held.memory.as_ref().map(AsFd::as_fd), was_passed && held.memory.is_some());
    Ok(held)
}

/// Recovers the state of an earlier process. When this returns, the recovered state is durable.
async fn restore(service: &Service, memory: &Memory) {
    for tier in service.tiers().iter() {
        service.lifecycle.restore(tier.take_recovered()).await;
    }
    finish_restore(memory);
    for tier in service.tiers().iter() {
        tier.recovered_durable().await;
    }
    service.lifecycle.verify_memory();
}

fn finish_restore(memory: &Memory) {
    let (found, restored) = memory.finish_restore();
    if found > 0 {
        tracing::info!(found, restored, "recovered blocks from memory");
    }
}

/// Reads the files that `config` names and checks the advertised address, as a start does.
///
/// Returns the problems, each with its configuration key or variable.
#[must_use]
pub fn check_files(config: &Config) -> Vec<String> {
    let address = identity::check(config.worker.advertised.as_ref(), config.worker.bind_address);
    let mut problems: Vec<anyhow::Error> = address.err().into_iter().map(Into::into).collect();
    problems.extend(Tls::problems(config));
    problems.extend(admin::token(config).err());
    #[cfg(feature = "object")]
    if config.object.url.is_some() {
        let found = crate::store::object::client::check_files(&config.object);
        problems.extend(found.into_iter().map(anyhow::Error::from));
    }
    problems.iter().map(|problem| format!("{problem:#}")).collect()
}

/// Returns the address advertised to coordinators and clients.
async fn advertised_ip(config: &Config) -> anyhow::Result<IpAddr> {
    let worker = &config.worker;
    let ip = identity::resolve(worker.advertised.as_ref(), worker.bind_address).await;
    ip.context("no address to announce to coordinators and clients")
}

/// Returns the id by which coordinators and clients know the worker. It prefixes the worker's
/// remote files.
fn server_id(ip: IpAddr, addresses: &Addresses) -> String {
    identity::server_id(ip, addresses.grpc.port(), addresses.tcp.map(|address| address.port()))
}

fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| clamped(since.as_millis()))
}
