//! The composition root: builds every part from the [`Config`], hands out handles, stops in order.
//!
//! Start: bind the listeners or take inherited ones (`sockets`), build the tiers bottom-up, take over what an earlier
//! process left, open the listeners, and only then tell a coordinator. Until the listeners open connects wait in the backlog.
//! How it ends is in `stop`, what a process does around it in `run`, and who may come next in `successor`, `beside` and `upgrade`.

mod admin;
mod beside;
mod cluster;
mod forced_stop;
mod health;
mod hung_threads;
mod kept;
mod metrics;
mod notify;
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

use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use axum::Router;
use parking_lot::Mutex;
use prometheus::{IntGauge, Registry};
use tonic::service::RoutesBuilder;

use crate::app::AppRegistry;
use crate::budget::Heap;
use crate::config::Config;
use crate::coordinator::embedded::EmbeddedCoordinator;
use crate::coordinator::{NodeReport, ReportSource, heartbeat, identity};
use crate::flush::Flusher;
use crate::listeners::Binding;
use crate::listeners::grpc::GrpcServer;
use crate::listeners::http::admin::{AdminHooks, AdminServer, Control};
use crate::listeners::http::api::{self, ApiHooks};
use crate::listeners::http::java::{self, JavaHooks};
use crate::listeners::http::push::Pusher;
use crate::listeners::http::{self, HttpMetrics, HttpServer, Node, Pages, gathering_places};
use crate::listeners::tcp::TcpServer;
use crate::memory::{Backing, Memory, Owner, Prefault, describe_huge_pages};
use crate::metrics::clamped;
use crate::profile::allocator::AllocatorMetrics;
use crate::proto::coordinator_server_server::CoordinatorServerServer;
use crate::runtime::{Aside, Handover, RuntimeMetrics, Tasks};
use crate::service::Service;
use crate::telemetry::LogFilter;
use crate::tiers::Tier;

use self::cluster::ClusterPage;
use self::health::Watch;
use self::kept::Outlives;
use self::reload::Reloader;
use self::runtime_state::{RuntimeState, StateWriter};
use self::settings::{Pace, RuntimeSettings};
use self::snapshot::{Inspector, OpenConnections, ProcessGauges};
use self::sockets::{Sockets, accepting};
use self::tiers::{Beside, Precheck};
use self::tls::Tls;
use self::upgrade::{RefusedBy, UpgradeMetrics};

pub use self::beside::{follow_keeper, run_beside};
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
        let (let_go, left_memory) = (inherited.let_go.clone(), inherited.memory.take());
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
        let silent = let_go.paths.clone();
        let memory = open_memory(config, (&server_id, &silent), left_memory, &registry).await?;
        let beside = Beside { server_id, precheck, let_go, others: environment.tiers };
        let flusher = tiers::start(config, beside, &memory, &background, &registry).await?;
        // Before the first block is acknowledged, and when the directories are this worker's.
        kept::note(config, &silent).await;
        let state = RuntimeState::read(config, &silent).await;
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
        let state = Arc::new(resume(config, &silent, state, parts));
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

    fn open_listeners(
        &self,
        config: &Config,
        sockets: Sockets,
        tls: Tls,
        gauges: ProcessGauges,
    ) -> anyhow::Result<()> {
        let mut routes = RoutesBuilder::default();
        if let Some(embedded) = &self.embedded {
            routes.add_service(CoordinatorServerServer::new(embedded.clone()));
        }
        let service = Arc::clone(&self.service);
        let binding = Binding {
            listener: accepting(sockets.grpc)?,
            tls: tls.grpc,
            handover: self.grpc_handover.clone(),
            kept: sockets.grpc_connections,
        };
        let tasks = self.listeners.clone();
        let grpc = GrpcServer::start(config.grpc.clone(), binding, routes, service, tasks, &self.registry)?;
        let kept = sockets.tcp_connections;
        let tcp = sockets.tcp.map(|listener| self.open_tcp(config, listener, kept)).transpose()?;
        let metrics = HttpMetrics::new(&self.registry)?;
        let connections = OpenConnections { grpc, tcp, http: metrics.connections.clone() };
        let inspector = Arc::new(Inspector {
            fixed: self.report(),
            store_type: config.worker.store_type.as_str(),
            service: Arc::clone(&self.service),
            live: Arc::clone(&self.live),
            reloader: Arc::clone(&self.reloader),
            gauges,
            connections,
            latest: Mutex::new(None),
            cluster: self.embedded.clone().map(|embedded| ClusterPage::new(embedded, tls.others)),
        });
        let source = report::source(Arc::clone(&inspector));
        let node: Arc<dyn Node> = inspector;
        if let Some(gateway) = &config.push.endpoint {
            let instance = self.server_id();
            let (registry, node) = (self.registry.clone(), Arc::clone(&node));
            Pusher::start(&config.push, gateway, &instance, registry, node, &self.http)?;
        }
        let profiles = http::debug::routes(self.http.clone());
        let binding = Binding { tls: tls.http, ..Binding::from(accepting(sockets.http)?) };
        self.open_http(config, binding, (metrics, node, &profiles))?;
        if let Some(listener) = sockets.admin {
            let binding = Binding { tls: tls.admin, ..Binding::from(accepting(listener)?) };
            self.open_admin(config, binding, profiles)?;
        }
        self.announce(config, source)
    }

    /// Pages, the API and metrics. Not with the other listeners: the last flush is to be seen too.
    fn open_http(
        &self,
        config: &Config,
        binding: Binding,
        (metrics, node, profiles): (HttpMetrics, Arc<dyn Node>, &Router),
    ) -> anyhow::Result<()> {
        let open_profiles = if config.http.profiles { profiles.clone() } else { Router::new() };
        let aside = gathering_places();
        let api = api::router(ApiHooks {
            service: Arc::clone(&self.service),
            node: Arc::clone(&node),
            aside: aside.clone(),
        });
        let java = java::router(JavaHooks {
            registry: self.registry.clone(),
            node: Arc::clone(&node),
            aside: aside.clone(),
        });
        let mounted = api.merge(java).merge(open_profiles);
        let pages =
            Pages { registry: self.registry.clone(), metrics, mounted, node, aside, ready: Aside::new(1) };
        HttpServer::start(config.http, binding, pages, &self.http)?;
        Ok(())
    }

    fn open_admin(&self, config: &Config, binding: Binding, profiles: Router) -> anyhow::Result<()> {
        let control: Arc<dyn Control> = Arc::clone(&self.reloader) as _;
        let hooks = AdminHooks { service: Arc::clone(&self.service), control };
        let of_parts =
            tiers::admin_routes(self.service.tiers()).merge(cluster::admin_routes(self.embedded.clone()));
        let mounted = http::debug::admin_routes(profiles).merge(of_parts);
        let token = admin::token(config)?;
        AdminServer::start(binding, token, hooks, mounted, &self.registry, &self.http)?;
        Ok(())
    }

    /// The gauge of its open connections.
    fn open_tcp(
        &self,
        config: &Config,
        listener: TcpListener,
        kept: Vec<TcpStream>,
    ) -> anyhow::Result<IntGauge> {
        let handover = self.tcp_handover.clone();
        let binding = Binding { handover, kept, ..Binding::from(accepting(listener)?) };
        let service = Arc::clone(&self.service);
        TcpServer::start(config.tcp.clone(), binding, service, &self.listeners, &self.registry)
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

    /// What a report says whatever happens.
    fn report(&self) -> NodeReport {
        let netty_port = self.addresses.tcp.map(|address| address.port());
        let grpc_port = self.addresses.grpc.port();
        let mut fixed = NodeReport::new(self.server_id(), self.ip, grpc_port);
        fixed.netty_port = netty_port;
        fixed.http_port = Some(self.addresses.http.port());
        fixed.version = env!("CARGO_PKG_VERSION").to_owned();
        fixed.git_commit = env!("WORKER_GIT_COMMIT").to_owned();
        fixed.start_time_ms = self.started_ms;
        fixed
    }

    /// The listeners are open: from now on coordinators hear of this worker, and at once of every change of its state.
    fn announce(&self, config: &Config, source: ReportSource) -> anyhow::Result<()> {
        let (embedded, state) = (self.embedded.clone(), Arc::clone(&self.state));
        let watch = Watch { service: Arc::clone(&self.service), live: Arc::clone(&self.live) };
        let stop = self.background.cancelled();
        let interval = config.heartbeat.interval;
        let pace = embedded
            .as_ref()
            .map(|embedded| embedded.keep_reporting(source.clone(), interval, &self.background));
        let quorum = match config.has_quorum() {
            true => {
                Some(heartbeat::start(config.heartbeat.clone(), &source, &self.background, &self.registry)?)
            }
            false => None,
        };
        if let Some(embedded) = embedded.as_ref().filter(|_| config.expects_workers()) {
            embedded.wait_for_workers(interval);
        }
        self.live.beating(Pace { embedded: pace, quorum: quorum.clone() });
        let tell = move || {
            state.notify();
            if let Some(embedded) = &embedded {
                embedded.report_now();
            }
            if let Some(heartbeats) = &quorum {
                heartbeats.beat_now();
            }
        };
        self.background.spawn("state watch", watch.run(tell, stop));
        Ok(())
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
    silent: &[PathBuf],
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
    StateWriter::new(config, silent, state, (service, live, embedded))
}

/// Maps the memory, or takes over what an earlier process left in it (`left`, if that was passed on). Data directories that are `silent`
/// are not touched.
async fn open_memory(
    config: &Config,
    (server_id, silent): (&str, &[PathBuf]),
    left: Option<OwnedFd>,
    registry: &Registry,
) -> anyhow::Result<Arc<Memory>> {
    let (left, unused) = match config.memory.backing {
        Backing::Memfd => (left, None),
        Backing::Auto | Backing::Private | Backing::Directory(_) => (None, left),
    };
    kept::refuse_left(config, (server_id, silent), unused).await?;
    let section = &config.memory;
    let huge_pages = describe_huge_pages(section);
    if section.backing.is_private() {
        tracing::info!(
            backing = %section.backing, huge_pages,
            "an upgrade flushes memory first, and a kill loses blocks in memory; to preserve them, use a \
             service manager that stores descriptors, or a tmpfs directory as memory_store.backing"
        );
        return Memory::new(section, registry).with_context(|| unmappable(config));
    }
    let owner = Owner::now(server_id).context("memory_store.backing")?;
    let memory = Memory::open(section, &owner, left, registry)
        .with_context(|| format!("memory_store.backing = \"{}\"", section.backing))?;
    tracing::info!(backing = %section.backing, huge_pages, "{}", Outlives::of(&memory).words());
    Ok(memory)
}

/// Looks whether the next process would find the file that memory lies in, as often as disks are probed.
async fn look_at_backing(memory: Arc<Memory>, interval: Duration) {
    loop {
        crate::clock::sleep(interval).await;
        let looked_at = Arc::clone(&memory);
        if tokio::task::spawn_blocking(move || looked_at.backing_vanished()).await.unwrap_or(false) {
            return;
        }
    }
}

/// The sockets and the file that memory lies in, once more. The service manager keeps that file, too, which it may have passed on.
fn for_a_successor(sockets: &Sockets, memory: &Memory, was_passed: bool) -> anyhow::Result<Inherited> {
    let mut held = sockets.duplicate().context("cannot duplicate a listener")?;
    held.memory = memory.handed_over().context("cannot duplicate the descriptor of the memory file")?;
    notify::keep_memory(held.memory.as_ref().map(AsFd::as_fd), was_passed && held.memory.is_some());
    Ok(held)
}

fn unmappable(config: &Config) -> String {
    format!("cannot map memory_store.capacity = {} bytes", config.memory.capacity_bytes)
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
